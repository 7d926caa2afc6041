"""Do all ranks do the same? They compare flags, code and packages at the start, and what they train on in each step.

Ranks that differ would hang in a collective, or train on different data without a word. A
difference is an error that names the rank. The reward and the data are compared by what comes of
them: prompts, completions, rewards.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np

from batch import Rollout
from fsdp_utils import gather_from_ranks
from runtime.machine import versions
from runtime.start import RunError

ROOT = Path(__file__).parent.parent


def check_same_start(flags: dict[str, object]) -> None:
    """Raises ValueError, on every rank, if the ranks were started with other flags, code or packages."""
    own = {f"--{name}": repr(value) for name, value in flags.items()}
    code = {str(file.relative_to(ROOT)): digest([file.read_bytes()]) for file in program_files()}
    difference = differences(gather_from_ranks(own | code | versions()))
    if difference:
        raise ValueError(f"{difference}; start all ranks with the same command, code and packages.")


def program_files() -> list[Path]:
    """The files at the top, and those of the rooms: folders with an `__init__.py`."""
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    return sorted([*ROOT.glob("*.py"), *(file for room in rooms for file in room.rglob("*.py"))])


def check_same_step(step: int, sampled: Rollout) -> None:
    """Raises RunError, on every rank, if the ranks are in different steps, or have not sampled and graded the same.

    Each rank has collected the step by itself. One that has other data or another grade would train on something else
    without a word, or hang in a collective.
    """
    parts = {
        "prompts": [row.ids for row in sampled.rows],
        "completions": sampled.completions,
        "rewards": [sampled.rewards_B],
    }
    own = {"step": str(step)} | {name: digest(pieces) for name, pieces in parts.items()}
    difference = differences(gather_from_ranks(own))
    if difference:
        raise RunError(f"the ranks have diverged in step {step}: {difference}. The last checkpoint is of before.")


def differences(ranks: list[dict[str, str]]) -> str:
    """For example "rank 3 has --seed 2 (the other ranks: 1)"; "" if all ranks say the same.

    What most ranks say counts as right; if as many say something else, what the first of them says.
    """
    deviations: dict[int, list[str]] = defaultdict(list)  # by rank
    for name in dict.fromkeys(chain.from_iterable(ranks)):
        values = [own.get(name, "none") for own in ranks]
        common = Counter(values).most_common(1)[0][0]
        for rank, value in enumerate(values):
            if value != common:
                deviations[rank].append(f"{name} {value} (the other ranks: {common})")
    # The first four of a rank will do.
    return "; ".join(f"rank {rank} has {', '.join(texts[:4])}" for rank, texts in sorted(deviations.items()))


def digest(pieces: Iterable[np.ndarray | bytes]) -> str:
    """Twelve hexadecimal digits, which differ if a byte or the end of a piece does."""
    sha1 = hashlib.sha1(usedforsecurity=False)  # the fastest that hashlib has
    for piece in pieces:
        sha1.update(len(piece).to_bytes(8))
        sha1.update(piece)
    return sha1.hexdigest()[:12]
