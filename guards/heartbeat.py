"""What this rank is doing, for the other ranks and for whoever asks after a crash why it ended.

    with in_phase("update", step=3):
        beat("runs a backward pass")   # progress; it costs less than a microsecond, because nothing is written here

The thread of `doctor.py` writes it to OUT_DIR/ranks/rank_N.json about once a second and when a phase begins. A file,
not torch's store: any rank may be the one that is stopped, also the one that keeps the store.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

WAITS = "waits for the other ranks"  # so begins what a rank is doing that others keep from going on


@dataclass
class Board:
    """The state of this process. Its main thread writes it, the doctor's thread reads it."""

    step: int = 0
    phase: str = "start"
    since: float = field(default_factory=time.monotonic)  # when the phase began
    doing: str = "starts"
    count: int = 0  # grows with all progress
    gpu_bytes: int = 0  # that tensors took when the phase began
    has_changed: threading.Event = field(default_factory=threading.Event)


BOARD = Board()


def beat(doing: str) -> None:
    """This rank makes progress. `doing` goes on the sentence "rank 1 ...", and says for what it waits, if it does."""
    BOARD.doing = doing
    BOARD.count += 1


def tick() -> None:
    """Progress that goes without saying, of any thread."""
    BOARD.count += 1


def note(doing: str) -> None:
    """The same without progress: a better word for what lasts."""
    BOARD.doing = doing


@contextmanager
def in_phase(name: str, step: int) -> Iterator[None]:
    """The block is phase `name` of the step. After an exception the phase stays: it is where the rank ended."""
    outer = BOARD.phase
    _enter(name, step)
    yield
    _enter("loop" if outer == "start" else outer, step)


def _enter(name: str, step: int) -> None:
    import torch  # not for the reward, which beats without it

    BOARD.phase, BOARD.step, BOARD.since = name, step, time.monotonic()
    if torch.cuda.is_initialized():  # asked here, because torch's allocator may be what another thread hangs in
        BOARD.gpu_bytes = torch.cuda.memory_allocated()
    beat("computes")
    BOARD.has_changed.set()


# The files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself, in one file."""

    run: str  # a name that all ranks of this start share: files of an earlier one are not meant
    rank: int
    host: str
    pid: int
    started: str  # of the process, so that another one with its number is not taken for it
    number: int  # grows with each writing
    time: str
    step: int
    phase: str
    phase_seconds: float
    doing: str
    quiet_seconds: float  # since the last progress
    resident_bytes: int
    gpu_bytes: int
    has_ended: bool = False  # in order, or by an exception
    stall: str = ""  # the stall that this rank wants all stacks of, or has given its own for
    stack: str = ""  # of its main thread, then
    stopped: str = ""  # processes that it has started and that do not run, then
    stop: bool = False  # all ranks are to end


def heartbeat_file(out_dir: Path, rank: int) -> Path:
    return out_dir / "ranks" / f"rank_{rank}.json"


def write(heartbeat: Heartbeat, file: Path) -> None:
    """In place: over NFS a file that is replaced may be seen late, one that is opened again is seen as it is.

    Raises OSError. On a full disk it succeeds: the file keeps its block.
    """
    data = json.dumps(asdict(heartbeat)).encode()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def read(file: Path) -> Heartbeat | None:
    """None if there is none, or if it is being written."""
    try:
        return Heartbeat(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


# Processes (Linux) ----------------------------------------------------------------------------------------------------


def state_of(heartbeat: Heartbeat) -> str:
    """The state of the rank's process, as in /proc/PID/stat: T stopped, D waits for a disk, Z and X ended, S, R.

    "?" on another host.
    """
    if heartbeat.host != socket.gethostname():
        return "?"
    fields = process_fields(heartbeat.pid)
    return fields[0] if fields and fields[19] == heartbeat.started else "X"


def process_fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; [] if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def stopped_children() -> str:
    """The processes that this one has started, and they in turn, which are stopped: those of the reward, say."""
    found, to_see = [], [os.getpid()]
    while to_see:
        pid = to_see.pop()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                to_see += map(int, task.read_text().split())
        if pid != os.getpid() and process_fields(pid)[:1] in (["T"], ["t"]):
            found.append(str(pid))
    return ", ".join(found)


def bytes_moved() -> int:
    """Read from and written to files by this process so far: a checkpoint of many gigabytes is progress, too."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"]) + int(fields["wchar"])
    except (OSError, ValueError, KeyError):
        return 0  # not Linux, or not allowed


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # not Linux
