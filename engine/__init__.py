"""How vLLM is set up in a rank: behind the door `rollout.py`."""
