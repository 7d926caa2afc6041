"""Grading behind the door `reward.py`: text in, number out. No torch, numpy or transformers here."""
