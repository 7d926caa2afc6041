"""A disk that is full, a quota, a limit on the size of a file: what they refuse is kept, told, and written later."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from guards.start import RunError

GIB = 1024**3
Writes = Callable[[Path, bytes], None]  # `append` or `replace`


class DiskError(RunError):
    """Files that cannot be written, or not be used. The message says which, why, and what to do."""


def cause(error: BaseException) -> str:
    """Why something could not be written, in a few words. Libraries hide the reason of the system in their own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    hidden = error.__cause__ or error.__context__
    return cause(hidden) if isinstance(hidden, OSError) else (str(error).splitlines() or [type(error).__name__])[0]


def free_space(folder: Path) -> str:
    """For example: 3.2 GiB are free in runs/math."""
    try:
        return f"{shutil.disk_usage(folder).free / GIB:.1f} GiB are free in {folder}"
    except OSError as error:
        return f"{folder}: {cause(error)}"


@contextlib.contextmanager
def tolerated(what: str) -> Iterator[None]:
    """Turns an OSError into a warning: for files that a run does not need, or writes again."""
    try:
        yield
    except OSError as error:
        print(f"warning: {what} could not be written: {cause(error)}; the run goes on without.", flush=True)


def replace(file: Path, data: bytes) -> None:
    """Writes a file whole or not at all. Raises OSError; then an older file of this name is left as it was."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(file)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def append(file: Path, data: bytes) -> None:
    """Appends whole lines, all or nothing; after a line that a kill cut off, on a new one. Raises OSError."""
    with file.open("a+b", buffering=0) as out:
        size = out.seek(0, os.SEEK_END)
        out.seek(max(size - 1, 0))
        is_cut_off = out.read(1) not in (b"", b"\n")
        rest = memoryview(b"\n" + data if is_cut_off else data)
        try:
            while rest:
                rest = rest[out.write(rest) :]  # a disk that is almost full takes a part
        except OSError:
            out.truncate(size)
            raise


@dataclass(frozen=True)
class Records:
    """Files of a folder that a run writes as it goes. What the disk refuses waits in memory for the next write."""

    folder: Path
    waiting: dict[tuple[Writes, Path], bytes] = field(default_factory=dict)
    told: set[Path] = field(default_factory=set)  # files that the disk refused, since it last took one of them

    def __truediv__(self, name: str) -> Records:
        """The records of a folder in this one."""
        return Records(self.folder / name, self.waiting, self.told)

    def append(self, name: str, text: str) -> None:
        """Appends whole lines to the file, which may not be there yet."""
        key = append, self.folder / name
        self.waiting[key] = self.waiting.get(key, b"") + text.encode("utf-8", "backslashreplace")
        self._write_waiting()

    def replace(self, name: str, text: str) -> None:
        """Gives the file this content."""
        self.waiting[replace, self.folder / name] = text.encode("utf-8", "backslashreplace")
        self._write_waiting()

    def finish(self) -> None:
        """Raises DiskError if something still waits."""
        self._write_waiting()
        if self.waiting:
            names = ", ".join(sorted({str(file) for _, file in self.waiting}))
            room = free_space(self.folder)
            raise DiskError(f"not everything could be written to {names} ({room}); lines of this run are missing.")

    def _write_waiting(self) -> None:
        for (write, file), data in list(self.waiting.items()):
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write(file, data)
            except OSError as error:
                if file not in self.told:
                    print(f"warning: {file}: {cause(error)}; what is missing is written later.", flush=True)
                self.told.add(file)
            else:
                del self.waiting[write, file]
                self.told.discard(file)
