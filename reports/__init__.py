"""What `report.py` shows of runs: page, curves, comparison, verdict. This folder may be deleted."""
