"""The page and the comparison of `report.py`. This folder may be deleted."""
