"""All that refuses: flags, functions of the user, models, the machine, ranks that differ.

Called by `train_grpo.py`, `evaluate.py` and the dry run alone, before a weight is read.
"""
