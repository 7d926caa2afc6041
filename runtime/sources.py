"""Sources -> records: rows of .jsonl and .json files, as they are.

A source is WHAT[@SPLIT][#ROWS]. WHAT is a file; parquet files, folders and data sets on the hub are read by
extras/sources/tables.py. #ROWS draws so many rows at random. `READERS` is the place for another kind of file.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.parts import part


class Record(NamedTuple):
    """A row as it was read."""

    where: str  # "train.jsonl, line 17", counted from 1; "hiyouga/math12k@train, row 17", from 0 as `datasets` counts
    columns: dict[str, object]
    folder: Path  # where the relative paths of images start


def read_records(source: str, seed: int, is_shuffled: bool = True) -> list[Record]:
    """The rows in their order; with #ROWS in the order of the draw, unless epochs keep the file's."""
    what, split, count = parse_source(source)
    path = Path(what)
    if is_reader_file(path) and split in (None, "train"):
        rows = READERS[path.suffix.lower()](path)
    else:
        rows = part("extras.sources.tables", f"data {source!r}").load(source, what, split)
    if len(rows) < (count or 1):
        raise ValueError(f"data {source!r} holds {len(rows) or 'no'} rows; needed are at least {count or 1}.")
    indices = np.arange(len(rows))
    if count is not None:  # from another stream than any epoch's, [seed, epoch]
        indices = np.random.default_rng([seed, 0, 0, 1]).permutation(indices)[:count]
        if not is_shuffled:
            indices.sort()
    return [rows[i] for i in indices] if isinstance(rows, list) else rows.take(indices)


def is_reader_file(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in READERS


def parse_source(source: str) -> tuple[str, str | None, int | None]:
    """(WHAT, SPLIT, ROWS) of WHAT[@SPLIT][#ROWS]. A path that exists is taken literally."""
    what, split, count = source, None, None
    if not Path(what).exists() and (match := re.fullmatch(r"(.+)#([1-9]\d*)", what)):
        what, count = match[1], int(match[2])
    if not Path(what).exists() and (match := re.fullmatch(r"(.+)@([^@/]+)", what)):
        what, split = match[1], match[2]
    return what, split, count


def name_of_source(source: str) -> str:
    """`math500` for x/math500.jsonl, `gsm8k_test` for openai/gsm8k/main@test#100: the <set> in eval/<set>/..."""
    what, split, _ = parse_source(source)
    path = Path(what)
    is_file = path.suffix.lower() in TABLES
    if what.count("/") == 2 and HUB_ID.fullmatch(what) and not is_file and not path.exists():
        path = path.parent  # the configuration says nothing without the name
    name = path.stem if is_file else path.name
    return f"{name}_{split}" if split else name


# Files ----------------------------------------------------------------------------------------------------------------


def read_json_file(path: Path) -> list[Record]:
    """The rows of a .jsonl file (an object per line) or a .json file (also an array, or one object).

    Raises ValueError with file and line. `datasets` does not read these files: it guesses one type per column, so ISO
    dates become timestamps and 1 beside 2.5 becomes 1.0 (no completion equals that), and its errors name no line.
    """
    is_json = path.suffix.lower() == ".json"
    form = "an array of objects, one object, or one object per line" if is_json else "one JSON object per line"

    def parse(where: str, text: bytes) -> object:
        try:
            return json.loads(text.decode())
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, too deeply nested
            raise ValueError(f"{where}: not valid JSON ({error}); the file must be {form}, in UTF-8.") from None

    check_content(path)
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # UTF-8's byte order mark, which Windows writes
    lines = [(f"{path}, line {i}", line) for i, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    if is_json and lines and not re.fullmatch(rb"\s*\{.*\}\s*", lines[0][1]):
        value = parse(str(path), content)
        rows = value if isinstance(value, list) else [value]
        values = [(f"{path}, row {i}", row) for i, row in enumerate(rows)]
    else:
        values = [(where, parse(where, line)) for where, line in lines]
    for where, value in values:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(value).__name__}; the file must be {form}.")
    return [Record(where, value, path.parent) for where, value in values]


READERS: dict[str, Callable[[Path], list[Record]]] = {".jsonl": read_json_file, ".json": read_json_file}
TABLES = {*READERS, ".parquet", ".arrow", ".csv", ".tsv"}  # what is read in a folder, and no data set on the hub
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:/([\w.-]+))?")  # data set, configuration
CONTENTS = {  # first bytes -> what a file is that has them, whatever its name says, and what to do
    (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh", b"PK\3\4"): "compressed; unpack it",
    (b"version https://git-lfs",): "a pointer of Git LFS in place of the file; fetch that: git lfs pull",
    (b"<",): "a page of HTML or XML, perhaps of an error; download the file itself (on the hub: /resolve/, not /blob/)",
}


def check_content(path: Path) -> None:
    """Raises ValueError for a file that cannot be read, or that by its first bytes is neither JSON nor Parquet."""
    if not path.is_file():  # as /dev/stdin, or <(...) in a shell
        raise ValueError(f"{path} is a pipe or a device, but every process reads the data; write it to a file first.")
    try:
        with path.open("rb") as file:
            start = file.read(256).removeprefix(b"\xef\xbb\xbf").lstrip()  # before JSON may be white space
    except OSError as error:
        raise ValueError(f"data file {path} cannot be read: {error.strerror}.") from None
    for marks, what in CONTENTS.items():
        if start.startswith(marks):
            raise ValueError(f"{path} is {what}.")
