"""Parquet files, folders, and data sets on the hub, as sources of rows: what `datasets` reads.

`runtime/sources.read_records` asks for it, for a source that is no .jsonl or .json file.
"""

import glob
import os
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
from datasets.data_files import FILES_TO_IGNORE
from huggingface_hub import errors
from pyarrow import ArrowException
from yaml import YAMLError

from runtime.hub import has_hub
from runtime.progress import OFF
from runtime.sources import HUB_ID, READERS, TABLES, Record, check_content, is_reader_file

MISTAKES = (
    OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, ArrowException,
    YAMLError,  # a README with broken settings
    errors.HTTPError, IndexError,  # the last for a saved split without rows
)  # fmt: skip
GUESSED = {".csv", ".tsv"}  # their types
UNTYPED = (
    "in .csv and .tsv files numbers would be guessed (007 is read as 7); convert them to .jsonl, as they are written"
)


@dataclass(frozen=True)
class Table:
    """The rows of a split."""

    name: str  # WHAT@SPLIT
    rows: datasets.Dataset
    folder: Path

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: np.ndarray) -> list[Record]:
        drawn = self.rows.select(indices)
        return [
            Record(f"{self.name}, row {i}", as_written(columns, drawn.features), self.folder)
            for i, columns in zip(indices, drawn.to_list(), strict=True)  # images stay encoded
        ]


def load(source: str, what: str, split: str | None) -> Table | list[Record]:
    """The rows of the split asked for, or of the only one, or of `train`. Raises ValueError or FileNotFoundError."""
    check_source(source, what)
    splits = _load_splits(source, what, split)
    split = split or ("train" if len(splits) > 1 else next(iter(splits)))
    if split not in splits:
        raise ValueError(f"data {source!r}: no split {split!r} (@SPLIT), but {', '.join(splits)}; choose one of them.")
    rows = splits[split]
    if isinstance(rows, list):
        return [record for file in map(Path, rows) for record in READERS[file.suffix.lower()](file)]
    path = Path(what)
    return Table(f"{what}@{split}", rows, path if path.is_dir() else path.parent)


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


def _load_splits(source: str, what: str, split: str | None) -> dict[str, datasets.Dataset | list[str]]:
    """The rows of each split, or of the split asked for: a Dataset, or files for READERS. Raises ValueError."""
    path = Path(what)
    if is_reader_file(path):
        return {"train": [what]}
    if os.environ.get(OFF) or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    name, configuration = match.groups() if (match := HUB_ID.fullmatch(what)) else (what, None)
    full = str(path.resolve())  # because names such as json and parquet are readers of `datasets`
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():  # written by save_to_disk
            loaded = datasets.load_from_disk(full)
            split = "train"
        elif path.is_dir():
            if not any(file.suffix.lower() in TABLES for file in path.rglob("*")):
                raise ValueError(f"the folder does not contain any data files ({', '.join(sorted(TABLES - GUESSED))})")
            data_files = datasets.load_dataset_builder(full).config.data_files
            files = [Path(file) for file in chain.from_iterable(data_files.values())]
            check_folder(path, files)
            if all(file.suffix.lower() in READERS for file in files):
                return {str(key): names for key, names in data_files.items()}
            for file in files:  # such as `train.jsonl.gz`: `datasets` would unpack it, and guess its types
                check_content(file)
                if file.suffix.lower() in GUESSED:
                    raise ValueError(f"{file.name}: {UNTYPED}")
            loaded = datasets.load_dataset(full, split=split)
        elif path.is_file():
            loaded = datasets.load_dataset("parquet", data_files=glob.escape(full), split=split)
        else:
            datasets.config.HF_HUB_OFFLINE = not has_hub()
            loaded = datasets.load_dataset(name, configuration, split=split)
        splits = loaded if isinstance(loaded, dict) else {split: loaded}
        if not path.exists() and any(rows.builder_name == "csv" for rows in splits.values()):
            raise ValueError(UNTYPED)
        return splits
    except MISTAKES as error:
        reason = " ".join(str(error.__cause__ or error).split())[:500]
        if not path.exists():
            where = f"FOLDER/{configuration}, or where its files are" if configuration else "that folder"
            reason += f" (or: hf download --repo-type dataset {name} --local-dir FOLDER, and name {where})"
        raise ValueError(f"data {source!r} cannot be loaded: {reason}") from None


def check_folder(path: Path, read: list[Path]) -> None:
    """Raises ValueError if the folder holds more data than the files that `datasets` would read.

    As soon as one file has a split in its name, such as `train`, it leaves out those that have none. A README with
    `data_files` says what belongs together.
    """
    readme = path / "README.md"
    if readme.is_file() and "data_files:" in readme.read_text("utf-8", "replace"):
        return
    data = {file for file in path.rglob("*") if file.suffix.lower() in TABLES and file.name not in FILES_TO_IGNORE}
    known = {file.resolve() for file in read}
    left_out = sorted(str(file.relative_to(path)) for file in data if file.resolve() not in known)
    if left_out:
        raise ValueError(
            f"folder {path}: {len(read)} of its files would be read ({read[0].name}), "
            f"others not ({', '.join(left_out[:3])}); "
            "name the file or the folder that you mean, or move the others away."
        )


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
