"""Whether a run fits, and how long a step takes (`--dry_run`), without starting it."""
