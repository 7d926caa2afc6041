"""Parts of a model: LoRA (--lora_rank), images, experts and their routes, linear attention.

The seams: `policy.Adapter`, `batch.Part`, and what loads a model (`data.load_reader`, `engine.options`).
"""
