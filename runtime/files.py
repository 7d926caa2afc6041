"""The files of a run: one run at a time in a folder, files whole or not at all, and the sizes of a checkpoint's.

A file that must be written ends the run with a sentence (`must_write`). Any other costs a warning (`best_effort`).
"""

import fcntl
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TextIO

from runtime.history import parse
from runtime.rank import RunError

LOCK_SECONDS = 60.0  # that a start waits for the end of another run
STATE = "trainer/progress.json"  # in a checkpoint: the state of the loop
SIZES = "sizes.json"  # in a checkpoint: path of each other file -> its bytes
WARNED: set[str] = set()  # what `best_effort` has warned of


# One run at a time ----------------------------------------------------------------------------------------------------


def lock_file(file: Path, where: str) -> TextIO:
    """The open file, locked until it is closed or this process ends. Raises ValueError if another process keeps it.

    Waits up to `LOCK_SECONDS` for one that is ending: a killed rank with many GiB takes some seconds. The kernel drops
    the lock with its process. The file names its holder.
    """
    lock = file.open("a+", encoding="utf-8", errors="backslashreplace")
    for seconds in count():
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        lock.seek(0)
        holder = lock.read().strip() or "a process that has just begun"
        if seconds > LOCK_SECONDS:
            lock.close()
            raise ValueError(f"{where} is in use by {holder}; end that run, or choose another folder.")
        if seconds == 0:
            print(f"{where} is in use by {holder}; waiting up to {LOCK_SECONDS:g} s for its end", flush=True)
        time.sleep(1)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}: {' '.join(sys.argv)}")
    lock.flush()
    return lock


# Whole or not at all --------------------------------------------------------------------------------------------------


class DiskError(RunError):
    """Files that cannot be written, or not be used. The message says which, why, and what to do."""


def cause(error: BaseException) -> str:
    """The reason why a file was not written, in a few words. Libraries hide the system's in their own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    hidden = error.__cause__ or error.__context__
    if isinstance(hidden, OSError):
        return cause(hidden)
    return str(error).partition("\n")[0] or type(error).__name__


def free_space(folder: Path) -> str:
    """The room on the disk in words: 3.2 GiB are free in runs/math."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free in {folder}"
    except OSError as error:
        return f"{folder}: {cause(error)}"


@contextmanager
def must_write(file: Path) -> Iterator[None]:
    """Turns an OSError into the sentence that ends the run."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{file} could not be written: {cause(error)} ({free_space(file.parent)}); "
            "make room, and start the same command again."
        ) from error


@contextmanager
def best_effort(what: str, *more: type[Exception]) -> Iterator[None]:
    """Turns an OSError, or one of `more`, into a warning, the first time of this `what`: for what a run can miss."""
    try:
        yield
    except (OSError, *more) as error:
        if what not in WARNED:
            print(f"warning: {what} could not be written: {cause(error)}; the run continues without.", flush=True)
        WARNED.add(what)


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """The path for the block to write, which then becomes the file. If it fails, an older file stays as it was."""
    unfinished = file.with_name(f".{file.name}.{os.environ.get('RANK', 0)}")  # all ranks may write
    try:
        yield unfinished
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def write(file: Path, text: str) -> None:
    """Writes a file whole or not at all. Raises OSError."""
    with atomic_write(file) as unfinished:
        unfinished.write_text(text, "utf-8", "backslashreplace")


def append(file: Path, text: str) -> None:
    """Appends whole lines, all or nothing; after a line that a kill cut off, on a new one. Raises OSError."""
    data = text.encode("utf-8", "backslashreplace")
    with file.open("a+b", buffering=0) as out:
        size = out.seek(0, os.SEEK_END)
        out.seek(max(size - 1, 0))
        rest = data if out.read(1) in (b"", b"\n") else b"\n" + data
        try:
            while rest:
                rest = rest[out.write(rest) :]  # a disk that is almost full takes a part
        except OSError:
            out.truncate(size)
            raise


def end_status(out_dir: Path, how: str, processes: Iterable[int] = ()) -> None:
    """Says in status.json how the run has ended. `processes`: only if one of these has written the file."""
    file, status = out_dir / "status.json", {}
    with suppress(OSError, ValueError):
        status = json.loads(file.read_text("utf-8"))
    if not processes or status.get("pid") in processes:
        status |= {"now": how, "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        with best_effort(str(file)):
            write(file, json.dumps(status, indent=1) + "\n")


# Checkpoints ----------------------------------------------------------------------------------------------------------


def numbered(folder: Path, end: str = "") -> dict[int, Path]:
    """N -> step_N<end> in the folder, in order. What has another name, such as a copy's, is somebody else's."""
    names = {path: re.fullmatch(rf"step_(0|[1-9][0-9]*){re.escape(end)}", path.name) for path in folder.glob("step_*")}
    return dict(sorted((int(name[1]), path) for path, name in names.items() if name))


def checkpoints(out_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first."""
    return [*numbered(out_dir).items()]


def run_and_step(path: str) -> tuple[Path, int]:
    """(run folder, step) that --replay names: a run, with step 0, or a checkpoint of one."""
    folder = Path(path)
    name = re.fullmatch(r"step_(\d+)", folder.name)
    return (folder.parent, int(name[1])) if name else (folder, 0)


def rollouts_file(out_dir: Path, step: int) -> Path:
    """Where --keep_rollouts keeps the completions of a step."""
    return out_dir / "rollouts" / f"step_{step}.parquet"


def write_sizes(folder: Path) -> None:
    """Writes the size of each file of the folder into SIZES, the last of them. Raises OSError."""
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    (folder / SIZES).write_text(json.dumps(sizes, indent=0) + "\n", "utf-8")


def find_damage(folder: Path) -> str:
    """The first file that is missing, cut off or, if the loop needs it, no JSON, and how; "" if there is none."""
    name = SIZES
    try:
        for name, size in json.loads((folder / SIZES).read_text("utf-8")).items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found:,} instead of {size:,} bytes"
        if (state := folder / (name := STATE)).exists():
            parse(state.read_text("utf-8"), "it")
    except (OSError, ValueError) as error:
        return f"{name} cannot be read: {cause(error)}"
    return ""
