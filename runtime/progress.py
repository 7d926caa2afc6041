"""Progress bars with the time left: of the main process, on a terminal, unless --quiet is given."""

import os
import sys
from collections.abc import Iterable

from tqdm import tqdm

OFF = "TQDM_DISABLE"  # environment: tqdm's own name for it, which other libraries' bars know, too


def progress(what: str, total: int | None = None, items: Iterable | None = None, shown_after: float = 2.0) -> tqdm:
    """A bar over the items, or to be updated. What is done within so many seconds shows none."""
    is_shown = os.environ.get("RANK", "0") == "0" and sys.stderr.isatty() and not os.environ.get(OFF)
    return tqdm(items, desc=what, total=total, leave=False, delay=shown_after, disable=not is_shown)
