"""Sources -> records: rows of files, folders and data sets on the hub, as they are.

A source is WHAT[@SPLIT][#ROWS]. WHAT is a file (.jsonl, .json, .parquet), a folder of such files or
of datasets.save_to_disk, or a data set on the hub (owner/name, or owner/name/configuration where it
has several). #ROWS draws so many rows at random. `READERS` is the place for another kind of file.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from runtime.hub import has_hub
from runtime.progress import OFF

if TYPE_CHECKING:
    from datasets import Dataset  # imported where it is needed: that takes a second, and .jsonl files do without


class Record(NamedTuple):
    """A row as it was read."""

    where: str  # "train.jsonl, line 17", counted from 1; "hiyouga/math12k@train, row 17", from 0 as `datasets` counts
    columns: dict[str, object]
    folder: Path  # where the relative paths of images start


def read_records(source: str, seed: int, is_shuffled: bool = True) -> list[Record]:
    """The rows in their order; with #ROWS in the order of the draw, unless epochs keep the file's."""
    what, split, count = parse_source(source)
    check_source(source, what)
    splits = _load_splits(source, what, split)
    split = split or ("train" if len(splits) > 1 else next(iter(splits)))
    if split not in splits:
        raise ValueError(f"data {source!r}: no split {split!r} (@SPLIT), but {', '.join(splits)}; choose one of them.")
    rows = splits[split]
    if isinstance(rows, list):
        rows = [record for file in map(Path, rows) for record in READERS[file.suffix.lower()](file)]
    if len(rows) < (count or 1):
        raise ValueError(f"data {source!r} holds {len(rows) or 'no'} rows; needed are at least {count or 1}.")
    indices = np.arange(len(rows))
    if count is not None:  # from another stream than any epoch's, [seed, epoch]
        indices = np.random.default_rng([seed, 0, 0, 1]).permutation(indices)[:count]
        if not is_shuffled:
            indices.sort()
    if isinstance(rows, list):
        return [rows[i] for i in indices]
    path = Path(what)
    folder = path if path.is_dir() else path.parent
    drawn = rows.select(indices)
    records = []
    for i, columns in zip(indices, drawn.to_list(), strict=True):  # images stay encoded
        columns = as_written(columns, drawn.features)
        records.append(Record(f"{what}@{split}, row {i}", columns, folder))
    return records


# Sources --------------------------------------------------------------------------------------------------------------


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


def check_source(source: str, what: str) -> None:
    """Raises ValueError or FileNotFoundError for a source that is not there, or of a kind that is not read."""
    path, ending = Path(what), Path(what).suffix.lower()
    kinds = f"a file ({', '.join(READERS)}, .parquet), a folder of them, or a data set on the hub (owner/name)"
    if not path.exists():
        is_below_folder = "/" in what and path.parent.is_dir()
        if not HUB_ID.fullmatch(what) or ending in TABLES or is_below_folder:
            raise FileNotFoundError(
                f"data {source!r}: {what} does not exist (looked in {Path.cwd()}); "
                f"needed is WHAT[@SPLIT][#ROWS], ROWS 1 or more, where WHAT is {kinds}."
            )
    elif path.is_file() and ending not in READERS and ending != ".parquet":
        raise ValueError(f"data {source!r}: a file of this kind is not read; convert or unpack it; needed is {kinds}.")
    elif not path.is_dir():
        check_content(path)


def _load_splits(source: str, what: str, split: str | None) -> dict[str, Dataset | list[str]]:
    """The rows of each split, or of the split asked for: a Dataset, or files for READERS. Raises ValueError."""
    path = Path(what)
    if path.is_file() and path.suffix.lower() in READERS:
        return {"train": [what]}
    import datasets
    from huggingface_hub import errors
    from pyarrow import ArrowException
    from yaml import YAMLError  # a README with broken settings

    if os.environ.get(OFF) or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    full = str(path.resolve())  # because names such as json and parquet are readers of `datasets`
    mistakes = (
        OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, ArrowException, YAMLError,
        errors.HTTPError, IndexError,  # the last for a saved split without rows
    )  # fmt: skip
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():  # written by save_to_disk
            loaded = datasets.load_from_disk(full)
            split = "train"
        elif path.is_dir():
            if not any(file.suffix.lower() in TABLES for file in path.rglob("*")):
                raise ValueError(f"the folder does not contain any data files ({', '.join(sorted(TABLES))})")
            data_files = datasets.load_dataset_builder(full).config.data_files
            files = [Path(file) for file in chain.from_iterable(data_files.values())]
            if files[0].suffix == ".md":
                raise ValueError(f"most of its files are texts ({files[0].name}); name a file, or a folder of data")
            check_folder(path, files)
            if all(file.suffix.lower() in READERS for file in files):
                return {str(key): names for key, names in data_files.items()}
            for file in files:  # such as `train.jsonl.gz`: `datasets` would unpack it, and guess its types
                check_content(file)
            loaded = datasets.load_dataset(full, split=split)
        elif path.is_file():
            loaded = datasets.load_dataset("parquet", data_files=glob.escape(full), split=split)
        else:
            datasets.config.HF_HUB_OFFLINE = not has_hub()
            loaded = datasets.load_dataset(*HUB_ID.fullmatch(what).groups(), split=split)
    except mistakes as error:
        reason = " ".join(str(error.__cause__ or error).split())[:500]
        if re.match("BatchSize|Instruction .* no data", reason):  # what `datasets` says of it
            reason = "a parquet file in it has no data; leave that out"
        if not path.exists():
            reason += f" (or: hf download --repo-type dataset {what} --local-dir FOLDER, and name that folder)"
        raise ValueError(f"data {source!r} cannot be loaded: {reason}") from None
    return loaded if isinstance(loaded, dict) else {split: loaded}


def check_folder(path: Path, read: list[Path]) -> None:
    """Raises ValueError if the folder holds more data than the files that `datasets` would read.

    As soon as one file has a split in its name, such as `train`, it leaves out those that have none. A README with
    `data_files` says what belongs together.
    """
    readme = path / "README.md"
    if readme.is_file() and "data_files:" in readme.read_text("utf-8", "replace"):
        return
    from datasets.data_files import FILES_TO_IGNORE

    known = {file.resolve() for file in read}
    left_out = []
    for file in sorted(path.rglob("*")):
        is_data = file.suffix.lower() in TABLES and file.name not in FILES_TO_IGNORE
        if is_data and file.resolve() not in known:
            left_out.append(str(file.relative_to(path)))
    if left_out:
        raise ValueError(
            f"folder {path}: {len(read)} of its files would be read ({read[0].name}), "
            f"others not ({', '.join(left_out[:3])}); "
            "name the file or the folder that you mean, or move the others away."
        )


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


def as_written(value: object, feature: object) -> object:
    """The value of a column of this kind in `datasets`, as its author wrote it.

    A label is its name (None: -1, which is none). A float of 16 or 32 bits is the shortest decimal of its own type:
    0.1, not 0.10000000149.
    """
    names, dtype = getattr(feature, "names", None), getattr(feature, "dtype", None)
    if names and isinstance(value, int):
        return names[value] if value >= 0 else None
    if isinstance(value, float) and dtype in ("float16", "float32"):
        return float(str(np.dtype(dtype).type(value)))
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: as_written(part, feature[name]) for name, part in value.items()}
    if isinstance(value, list):
        return [as_written(part, getattr(feature, "feature", feature)) for part in value]
    return value


def read_system_prompt(text: str | None) -> str | None:
    """The text, or the content of the file that it names. Raises ValueError if that is not there or cannot be read."""
    if not text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8-sig").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError) or re.search(r"\.(txt|md)$|^\S*/\S*$", text):
            raise ValueError(
                f"--system_prompt {text!r}: no such file, or it cannot be read as UTF-8 text. "
                "If this is the text itself, put a space at its end."
            ) from None
    return text
