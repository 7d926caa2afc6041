"""The start and the end of a rank: it ends with its launcher, and leaves its reason. Standard library only.

`rank.py` has what the loop asks; `signals.py` hears signals, for a run that has something to save.
"""

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from runtime.files import write
from runtime.rank import FIRST_SIGNAL, PLACE, launch_folder

PR_SET_PDEATHSIG = 1  # Linux: sets the signal that a process gets when its parent dies
LAUNCHER = "GRPO_LAUNCHER_PID"  # environment: set by scripts/launch.py
ON_END: list[Callable[[str], None]] = []  # called with how this process ends; the main one has one, for its run
# How gloo, NCCL and torch's store say that another rank has gone; their other errors are of the rank itself.
GONE = re.compile(
    r"Connection (was likely )?(closed|reset)|remote process|(gloo|NCCL).*([Tt]imed? ?out|Broken pipe)", re.DOTALL
)
NOT_FINISHED = 75  # exit status of a run that a signal has ended, saved: EX_TEMPFAIL of sysexits.h, "try again"


# The launcher ---------------------------------------------------------------------------------------------------------


def join_launcher() -> None:
    """Ties this rank to its launcher, first of all: it must not outlive it while it imports torch."""
    if "RANK" in os.environ:
        die_with_parent(int(os.environ.get(LAUNCHER, "0")))
    sys.warnoptions.append("ignore:resource_tracker")  # it puts away the semaphores of a rank that leaves at once
    if not shutil.which("nvidia-smi"):  # vLLM's remarks on memory binding; torch reads it when it is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    print_any_text()
    faulthandler.enable()
    sys.excepthook = _note_exception


def die_with_parent(parent: int = 0) -> None:
    """Linux kills this process when the one that started it dies, however that dies. `parent`: its pid, if known."""
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has died before the call


class Outlet(io.FileIO):
    """Where text leaves this process; it drops what nobody can read any more, as after `| head`."""

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except OSError:  # also of a disk that is full, or a terminal that is gone
            return len(data)


def print_any_text() -> None:
    """From now on no print fails: what the locale's encoding lacks is an escape, what nobody reads is dropped.

    The first goes for processes that this one starts, too.
    """
    os.environ.setdefault("PYTHONIOENCODING", ":backslashreplace")
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is getattr(sys, f"__{name}__"):  # else somebody has it, such as pytest
            number = stream.fileno() if stream else os.open(os.devnull, os.O_WRONLY)  # None: it was closed, as by >&-
            outlet = io.BufferedWriter(Outlet(number, "w", closefd=False))
            encoding = stream.encoding if stream else None
            stream = io.TextIOWrapper(outlet, encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def reason_file(folder: Path, rank: int) -> Path:
    return folder / f"reason_{rank}.json"


def tell_end(how: str) -> None:
    """Calls `ON_END`, once: the first reason counts."""
    while ON_END:
        ON_END.pop()(how)


def note_reason(text: str, kind: str) -> bool:
    """Leaves to the launcher why and where this rank ends; False if there is none. The first reason counts.

    `kind`: "error" for what goes on the words "rank 1 ended with"; "mistake" for a whole sentence of all ranks.
    """
    tell_end(f"failed: {text}")
    if (folder := launch_folder()) is None:
        return False
    file = reason_file(folder, int(os.environ["RANK"]))
    with contextlib.suppress(OSError):
        if not file.exists():
            place = f"step {PLACE.step}, {PLACE.phase}"
            write(file, json.dumps({"time": time.time(), "text": text, "kind": kind, "place": place}))
    return file.exists()


def _note_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback that only says that another rank has gone goes to a file of the rank."""
    text = str(error).strip()
    first, _, rest = text.partition("\n")
    last = rest.partition("Last error:")[2].strip().partition("\n")[0]  # NCCL's reason; its first line has none
    sys.stderr = sys.__stderr__  # torch, once it has a process group, puts a buffer there and shows it afterwards
    try:
        note_reason(": ".join(filter(None, [kind.__name__, first, last])), "error")
        if (folder := launch_folder()) and GONE.search(text):
            file = Path(tempfile.gettempdir()) / f"{folder.name}_rank_{os.environ['RANK']}.txt"
            file.write_text("".join(traceback.format_exception(kind, error, trace)), "utf-8", "replace")
            print(f"rank {os.environ['RANK']} has lost the others; its traceback is in {file}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)
    finally:  # also where the disk is full, or nobody reads what is said
        leave_the_others()


def leave_the_others() -> None:
    """Ends a rank that fails at once, if it has a process group; the others may wait in a collective.

    At a usual exit vLLM's finalizer destroys the groups, and NCCL's destroy waits for those others, which wait for this
    rank (vllm/v1/engine/core.py, torch/distributed/distributed_c10d.py).
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        leave(1)


def leave(status: int) -> None:
    """Ends the process at once, without what libraries do at an exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            stream.flush()
    os._exit(status)


# Signals --------------------------------------------------------------------------------------------------------------


def signal_name() -> str:
    """Name of the signal that this rank got; SIGTERM if another rank got it instead."""
    return signal.Signals([*FIRST_SIGNAL, signal.SIGTERM][0]).name


def end_at_once(status: int, text: str) -> None:
    """Ends the process, wherever its main thread is."""
    if status == NOT_FINISHED:
        tell_end("stopped")
    is_noted = status != NOT_FINISHED and note_reason(text, "mistake")
    if not is_noted and os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError, ValueError):  # as in `leave`
            print(text, file=sys.stderr, flush=True)
    os._exit(status)


def check_divides(flag: str, part: int, what: str, whole: int) -> None:
    """Raises ValueError if the flag's value does not divide the whole."""
    if whole % part:
        divisors = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise ValueError(f"{flag} {part} does not divide {what} {whole}; use one of {divisors}.")
