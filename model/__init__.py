"""The model behind the door `policy.py`: attention, head, weights, optimizer, sizes."""
