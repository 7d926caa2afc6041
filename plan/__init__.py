"""--dry_run: batches, memory and time of a run, without a GPU. This folder may be deleted."""
