"""Whether the files of a folder are those that were written: sizes and SHA-256, in a list that is written last.

They find accidents: a file that is cut off, empty, missing or changed. They are no signature: who can change a file can
change the list, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from guards.progress import moving
from guards.stall import tick

HASHED_AT_A_TIME = 8
PIECE = 2**26  # bytes
Checksums = dict[str, tuple[int, str]]  # path in the folder -> bytes, SHA-256


def checksums(folder: Path, files: Iterable[Path]) -> Checksums:
    """Of these files of the folder, which are on the disk when it returns. Raises OSError.

    Several at a time: hashing leaves the interpreter to the other threads.
    """
    files = list(files)
    with ThreadPoolExecutor(HASHED_AT_A_TIME) as pool:
        found = list(pool.map(lambda file: (flush(file).stat().st_size, sha256(file)), files))
    return {str(file.relative_to(folder)): each for file, each in zip(files, found, strict=True)}


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while piece := content.read(PIECE):
            digest.update(piece)
            tick()
    return digest.hexdigest()


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
    file.write_text(json.dumps(sums, indent=0) + "\n")
    for each in (file, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        flush(each)


def complaints(folder: Path, file: Path, part: int, num_parts: int) -> list[str]:
    """What is wrong with the files of the list, one text each. Other files of the folder are ignored.

    Of all files only part 0, 1, ... of `num_parts`, which are about equal in bytes; of a list that cannot be read, part
    0 says so.
    """
    try:
        sums = json.loads(file.read_text())
        largest_first = sorted(sums, key=lambda name: (-sums[name][0], name))
        assert largest_first
    except (OSError, ValueError, TypeError, LookupError, AssertionError) as error:
        wrong = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        return [f"{file.relative_to(folder)} {wrong}"][part:]
    own = {name: tuple(sums[name]) for name in largest_first[part::num_parts]}
    with moving("verify the checkpoint", sum(size for size, _ in own.values())):
        return [text for name, expected in own.items() if (text := complaint(folder, name, expected))]


def complaint(folder: Path, name: str, expected: tuple[int, str]) -> str | None:
    """What is wrong with this file, or None."""
    try:
        size = (folder / name).stat().st_size
        if size != expected[0]:
            return f"{name} has {size:,} instead of {expected[0]:,} bytes"
        if sha256(folder / name) != expected[1]:
            return f"{name} has the right size but other contents"
    except OSError as error:
        return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
    return None
