"""This process as a rank: what the launcher has given it, its signal, its sign of life, and what ends a run.

Standard library only. `start.py` and `signals.py` begin and end a rank, `stall.py` watches it.
"""

import faulthandler
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

FOLDER = "GRPO_LAUNCH_FOLDER"  # environment: set by scripts/launch.py
FIRST_SIGNAL: list[int] = []  # to this process, by `signals.py`; empty: none has come


class RunError(Exception):
    """Ends the run, without a traceback: the message says what happened and what to do."""


class OwnCodeError(Exception):
    """Ends the run as `RunError`, but perhaps from this rank alone: no collective may follow."""


class Stopped(Exception):
    """A signal has asked the run to end; every rank raises it at the same place."""


def launched_world_size() -> int:
    """Number of processes that the launcher started, on all nodes; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Processes that the launcher started on this node; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def launch_folder() -> Path | None:
    """The folder of scripts/launch.py, the same for all ranks that it has started on this node."""
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else None


def launch_name() -> str:
    """Names this run among all on the machine."""
    return Path(os.environ.get(FOLDER) or os.environ["MASTER_PORT"]).name


@dataclass
class Place:
    """The place of this process in the run, and the limit of its stalls."""

    step: int = 0
    phase: str = "start"
    stacks: TextIO | None = None  # where they go; None: nobody watches
    stall_seconds: float = 0.0


PLACE = Place()


def beat() -> None:
    """Notes progress of this rank. It takes 50 microseconds: once a pass, a step of the engine or a tensor."""
    if PLACE.stacks is not None:
        faulthandler.dump_traceback_later(PLACE.stall_seconds, file=PLACE.stacks)


def requested() -> bool:
    """Whether this rank got a signal; `fsdp_utils.end_if_requested` asks all ranks together."""
    return bool(FIRST_SIGNAL)
