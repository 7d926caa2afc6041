"""Observers of the loop (`run.Observer`), of which `train_grpo.observers_of` has the list."""
