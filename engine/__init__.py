"""The set-up of vLLM in a rank, behind the door `rollout.py`."""
