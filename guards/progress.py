"""Progress bars with the time left: of the main process, on a terminal, unless --quiet is given."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm

from guards.stall import bytes_moved

OFF = "TQDM_DISABLE"  # environment: tqdm's own name for it, which other libraries' bars know, too
LOOK_SECONDS = 0.5


def progress(
    what: str, total: int | None = None, items: Iterable[object] | None = None, shown_after: float = 2.0, **form: object
) -> tqdm:
    """A bar over the items, or to be updated. What is done within so many seconds shows none. `form`: of tqdm."""
    is_shown = os.environ.get("RANK", "0") == "0" and sys.stderr.isatty() and not os.environ.get(OFF)
    return tqdm(items, desc=what, total=total, leave=False, delay=shown_after, disable=not is_shown, **form)


@contextmanager
def moving(what: str, num_bytes: int) -> Iterator[None]:
    """A bar of the bytes that this process reads and writes in the block, which are about so many."""
    with progress(what, total=num_bytes, unit="B", unit_scale=True, miniters=1) as bar:
        start, is_done = bytes_moved(), Event()

        def follow() -> None:  # the counters of the system: what writes a checkpoint tells nothing until it is done
            while not is_done.wait(LOOK_SECONDS):
                bar.update(min(bytes_moved() - start, num_bytes) - bar.n)

        thread = Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()
