"""What a rank owes to its launcher: it ends with it, and leaves its reason where the launcher finds it.

Standard library only, and imported first: a rank must not outlive its launcher while it imports torch. With torchrun,
or started by hand, there is no folder of the launcher, and a rank says its reason itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import TracebackType

PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent dies
FOLDER = "GRPO_LAUNCH_FOLDER"  # environment: the folder of scripts/launch.py
LAUNCHER = "GRPO_LAUNCHER_PID"


def join_launcher() -> None:
    """Call it first in a program that is started as ranks."""
    if "RANK" in os.environ:
        die_with_parent(int(os.environ.get(LAUNCHER, "0")))
    faulthandler.enable()
    sys.excepthook = _note_exception


def die_with_parent(parent: int = 0) -> None:
    """Linux kills this process when the one that started it dies, however that dies. `parent`: its pid, if known."""
    parent = parent or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has died before the call


def launch_folder() -> Path | None:
    """The folder of scripts/launch.py, on this node: the same for all ranks that it has started."""
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else None


def launch_name() -> str:
    """Names this run among all on the machine."""
    folder = launch_folder()
    return folder.name if folder else os.environ["MASTER_PORT"]


def reason_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"


def pass_on_stop() -> bool:
    """A signal to this rank alone is meant for the run: the launcher passes it on. False if there is no launcher."""
    folder = launch_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            stop_file(folder, int(os.environ["RANK"])).touch()
    return folder is not None


def wait_for_stops(seconds: float = 5.0) -> None:
    """Returns when every rank of this node has a signal, or after so many seconds."""
    folder, first = launch_folder(), int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    deadline = time.monotonic() + seconds
    while folder and time.monotonic() < deadline and not all(stop_file(folder, rank).exists() for rank in ranks):
        time.sleep(0.01)


def stop_file(folder: Path, rank: int) -> Path:
    return folder / f"stop_{rank}"


def note_reason(text: str, kind: str) -> bool:
    """Leaves the reason why this rank ends to the launcher; False if there is none. The first reason counts.

    `kind`: "error" of this rank; "mistake" of the user's, the same on every rank; "verdict" on the run, which is the
    reason whatever the others say.
    """
    folder = launch_folder()
    if folder is None:
        return False
    file = reason_file(folder, int(os.environ["RANK"]))
    with contextlib.suppress(OSError):
        if not file.exists():
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps({"time": time.time(), "text": text, "kind": kind}))
            unfinished.replace(file)
    return file.exists()


def _note_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    lines = str(error).strip().splitlines()
    note_reason(f"{kind.__name__}: {lines[0]}" if lines else kind.__name__, "error")
