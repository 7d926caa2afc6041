"""What a run writes: one run at a time in a folder, files whole or not at all, and their checksums.

A file that must be written ends the run with a sentence (`must_write`). Any other costs a warning (`best_effort`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TextIO

from runtime.start import RunError

LOCK_SECONDS = 60.0  # that a start waits for the end of another run
Checksums = dict[str, tuple[int, str]]  # path in the folder -> bytes, SHA-256
WARNED: set[str] = set()  # what `best_effort` has warned of


def checkpoints(out_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first."""
    numbered = [(path.name.removeprefix("step_"), path) for path in out_dir.glob("step_*")]
    return sorted((int(number), path) for number, path in numbered if number.isdigit())


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
    """Why something could not be written, in a few words. Libraries hide the reason of the system in their own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    hidden = error.__cause__ or error.__context__
    if isinstance(hidden, OSError):
        return cause(hidden)
    return str(error).partition("\n")[0] or type(error).__name__


def free_space(folder: Path) -> str:
    """For example: 3.2 GiB are free in runs/math."""
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
    """Where the block writes what then becomes the file. If it fails, an older file of this name is left as it was."""
    unfinished = file.with_name(f".{file.name}.unfinished")
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


# Checksums: `checkpoint.latest` verifies with them --------------------------------------------------------------------
# They find accidents: a file that is cut off, empty, missing or changed. They are no signature.


def checksums(folder: Path, files: Iterable[Path]) -> Checksums:
    """The checksums of these files of the folder, which are on the disk when it returns. Raises OSError."""

    def measure(file: Path) -> tuple[str, tuple[int, str]]:
        return str(file.relative_to(folder)), (flush(file).stat().st_size, sha256(file))

    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter to the other threads
        return dict(pool.map(measure, files))


def sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def flush(path: Path) -> Path:
    """Returns the path when the content of a file, or the names in a folder, would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def write_list(folder: Path, file: Path, sums: Checksums) -> None:
    """Writes the list. Afterwards list and folder would survive a power failure. Raises OSError."""
    file.write_text(json.dumps(sums, indent=0) + "\n", "utf-8")
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    for path in [file, *folders, folder]:
        flush(path)


def verify(folder: Path, file: Path, part: int, num_parts: int) -> list[str]:
    """What is wrong with the files of the list, one text each. Other files of the folder are ignored.

    It reads part 0, 1, ... of `num_parts`, about equal in bytes; part 0 says it if the list cannot be read.
    """
    try:
        sums = json.loads(file.read_text("utf-8"))
        largest_first = sorted(sums, key=lambda name: (-sums[name][0], name))
        assert largest_first
    except (OSError, ValueError, TypeError, LookupError, AssertionError) as error:
        return [f"{file.relative_to(folder)} cannot be read: {cause(error)}"] if part == 0 else []
    problems = []
    for name in largest_first[part::num_parts]:
        size, digest = sums[name]
        try:
            own_size = (folder / name).stat().st_size
            if own_size != size:
                problems.append(f"{name} has {own_size:,} instead of {size:,} bytes")
            elif sha256(folder / name) != digest:
                problems.append(f"{name} has the right size but other contents")
        except OSError as error:
            problems.append(f"{name} cannot be read: {cause(error)}")
    return problems
