"""The place of this rank in the run. After `STALL_SECONDS` without a `beat` its stacks are in OUT_DIR/ranks.

`faulthandler` writes them from a thread in C, also while a collective or a lock holds Python. The rank for which the
others wait is the one that is in no collective. Each rank has a file: on one stream their lines would mix.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.rank import PLACE, beat

STALL_SECONDS = 600.0


def watch(folder: Path, rank: int, timeout_minutes: float) -> None:
    """Watches this rank from here on."""
    folder.mkdir(exist_ok=True)
    PLACE.stacks = (folder / f"rank_{rank}.txt").open("w", encoding="utf-8")
    # Below the time-out of the collectives, which would end the run without any stacks.
    PLACE.stall_seconds = min(STALL_SECONDS, 0.8 * 60 * timeout_minutes)
    beat()


@contextmanager
def in_phase(name: str, step: int) -> Iterator[None]:
    """Runs the block as phase `name` of the step. After an exception the phase stays: it is where the rank ended."""
    outer = PLACE.phase
    PLACE.phase, PLACE.step = name, step
    beat()
    yield
    PLACE.phase = "loop" if outer == "start" else outer
    beat()
