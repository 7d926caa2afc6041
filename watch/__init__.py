"""Observers of the loop (`run.Observer`): console, tracker, rollout files, memory, curves, the verdict."""
