"""Do all ranks do the same? They compare flags, code and packages at the start, and what they train on in each step.

Ranks that differ would hang in a collective, or train on different data without a word. A
difference is an error that names the rank. The reward and the data are compared by what comes of
them: prompts, completions, rewards.
"""

import socket
import time
import uuid
from argparse import Namespace
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path

from batch import Rollout
from fsdp_utils import World, gather_from_ranks, is_main_process, wait_for_all
from gate.digests import ROOT, digest
from gate.machine import check_device
from run import versions
from runtime.rank import RunError
from runtime.stall import watch

SHOWN_SECONDS = 10.0  # network file systems do not show a new file at once


def check_world(args: Namespace, world: World) -> None:
    """Checks what only ranks together can know, and watches each. ValueError or RuntimeError, on every rank."""
    check_shared(Path(args.out_dir))
    check_same_start(vars(args))
    watch(Path(args.out_dir) / "ranks", world.trainer_rank, args.timeout_minutes)
    check_device(world.device, args.share_prompts)


def check_shared(folder: Path) -> None:
    """Raises ValueError, on every rank, if a node does not see what the main process writes into the folder."""
    mark = folder / f".seen_by_all_{gather_from_ranks(uuid.uuid4().hex)[0]}"
    if is_main_process():
        mark.touch()
    wait_for_all()
    deadline = time.monotonic() + SHOWN_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = {host for host in gather_from_ranks(None if mark.exists() else socket.gethostname()) if host is not None}
    if is_main_process():
        mark.unlink()
    if blind:
        where = f"{folder} on the first node is not what {', '.join(sorted(blind))} has under this name"
        raise ValueError(f"--out_dir: {where}; it must be on a file system that all nodes share.")


def check_same_start(flags: dict[str, object]) -> None:
    """Raises ValueError, on every rank, if the ranks were started with other flags, code or packages."""
    own = {f"--{name}": repr(value) for name, value in flags.items()}
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    files = sorted([*ROOT.glob("*.py"), *(file for room in rooms for file in room.rglob("*.py"))])
    code = {str(file.relative_to(ROOT)): digest([file.read_bytes()]) for file in files}
    difference = differences(gather_from_ranks(own | code | versions()))
    if difference:
        raise ValueError(f"{difference}; start all ranks with the same command, code and packages.")


def check_same_step(step: int, sampled: Rollout) -> None:
    """Raises RunError, on every rank, if the ranks are in different steps, or have not sampled and graded the same.

    Each rank has collected the step by itself. One that has other data or another grade would train on something else
    without a word, or hang in a collective.
    """
    own = {
        "step": str(step),
        "prompts": digest(row.ids for row in sampled.rows),
        "completions": digest(sampled.completions),
        "rewards": digest([sampled.rewards_B]),
    }
    difference = differences(gather_from_ranks(own))
    if difference:
        raise RunError(f"the ranks have diverged in step {step}: {difference}. The last checkpoint is of before.")


def differences(ranks: list[dict[str, str]]) -> str:
    """The ranks that differ: "rank 3 has --seed 2 (the other ranks: 1)"; "" if all say the same.

    The majority counts as right; where as many say something else, the side of the first rank does.
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
