"""The model behind the door `policy.py`: attention, LoRA, images, weights, optimizer."""
