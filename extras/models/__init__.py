"""Parts of a model: LoRA (--lora_rank), images, experts and their routes, linear attention.

The seams: `Policy.adapter`, `batch.Part`, `gate.inputs.load_reader`, and hooks of `policy.py` and `rollout.py`.
"""
