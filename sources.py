"""Sources of data: from WHAT[@SPLIT][#ROWS] to rows as they are, each with the place that names it in errors.

WHAT is a .jsonl, .json or .parquet file, a folder of such files or of datasets.save_to_disk, or the id of a data set on the hub
(owner/name, or owner/name/configuration where it has several); #ROWS draws so many at random. What exists as a path is taken literally.

The `datasets` library reads all but .jsonl and .json files. Its JSON reader guesses one type per column: ISO dates become timestamps,
1 beside 2.5 becomes 1.0 (an answer no completion equals), half a surrogate pair refuses the whole file, and no error names a line.
(JSON on the hub does go through it.)
"""

from __future__ import annotations

import glob
import io
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from datasets import (
        Dataset,  # below it is imported where it is needed: that takes a second, and .jsonl files do without
    )

FILE_ENDING = re.compile(
    r"\.(jsonl?|parquet|csv|tsv|txt|md|ya?ml|py|pkl|npy|npz|arrow|xlsx|gz|zip|zst|xz|bz2|tar)$", re.IGNORECASE
)
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:/([\w.-]+))?")  # data set, configuration
SOURCE = "needed is WHAT[@SPLIT][#ROWS]: a .jsonl, .json or .parquet file, a folder of them, or a data set on the hub (owner/name)"
Record = tuple[
    str, dict[str, object], Path
]  # a row as read: `Row.where`, its columns, the folder that paths of images start from


def parse_source(source: str) -> tuple[str, str | None, int | None]:
    """(WHAT, SPLIT, ROWS) of WHAT[@SPLIT][#ROWS]."""
    what, split, count = source, None, None
    if not Path(what).exists() and (match := re.fullmatch(r"(.+)#([1-9]\d*)", what)):
        what, count = match[1], int(match[2])
    if not Path(what).exists() and (match := re.fullmatch(r"(.+)@([^@/]+)", what)):
        what, split = match[1], match[2]
    return what, split, count


def name_of_source(source: str) -> str:
    """`math500` for x/math500.jsonl, `gsm8k_test` for openai/gsm8k/main@test#100: the <set> in eval/<set>/..."""
    what, split, _ = parse_source(source)
    if not Path(what).exists() and what.count("/") == 2 and HUB_ID.fullmatch(what) and not FILE_ENDING.search(what):
        what = what.rpartition("/")[0]  # the configuration says nothing without the name
    return FILE_ENDING.sub("", Path(what).name) + (f"_{split}" if split else "")


def read_records(source: str, seed: int) -> list[Record]:
    """The rows in the order of the source, or with #ROWS in that of drawing, a function of the seed. ValueError, FileNotFoundError."""
    what, split, count = parse_source(source)
    path, ending = Path(what), Path(what).suffix.lower()
    if not path.exists() and (
        FILE_ENDING.search(what) or not HUB_ID.fullmatch(what) or ("/" in what and path.parent.is_dir())
    ):
        raise FileNotFoundError(f"data {source!r}: {what} does not exist (looked in {Path.cwd()}); {SOURCE}.")
    if path.is_file() and ending not in (".jsonl", ".json", ".parquet"):
        raise ValueError(f"data {source!r}: a file of this kind is not read; {SOURCE}.")
    if path.is_file() and ending != ".parquet":
        if split not in (None, "train"):
            raise ValueError(f"data {source!r}: a single {ending} file has no split {split!r}; leave out @{split}.")
        rows, name = read_json_file(path), ""
    else:
        rows, name = _open_dataset(source, what, split)
    if len(rows) < (count or 1):
        raise ValueError(
            f"data {source!r} holds {len(rows) or 'no'} rows; needed is 1{f', for #{count} {count}: lower it' if count else ''}."
        )
    indices = np.arange(len(rows))
    if count is not None:
        indices = np.random.default_rng([seed, 0, 0, 1]).permutation(indices)[
            :count
        ]  # another stream than any epoch's, [seed, epoch]
    if isinstance(rows, list):
        return [rows[i] for i in indices]
    columns = rows.select(indices).with_format("arrow")[:].to_pylist()  # arrow: images stay encoded
    mixed = type(rows.features)(
        {name: feature for name, feature in rows.features.items() if "Json(" in repr(feature)}
    )  # read as JSON text
    columns = [row | mixed.decode_example({name: row[name] for name in mixed}) for row in columns]
    return [
        (f"{name}, row {i}", row, path if path.is_dir() else path.parent)
        for i, row in zip(indices, columns, strict=True)
    ]


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) < len(
        pairs
    ):  # JSON leaves open which one counts; in a training example that is not to be guessed
        raise ValueError(f"a key appears twice among {', '.join(repr(key) for key, _ in pairs)[:200]}")
    return dict(pairs)


DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys
)  # takes NaN and Infinity: json.dumps writes them for missing numbers


def read_json_file(path: Path) -> list[Record]:
    """The rows of a .jsonl (one JSON object per line, UTF-8, blank lines skipped) or .json (an array of objects, or as .jsonl).

    Raises ValueError naming file and line. A key that appears twice in an object is an error.
    """
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # UTF-8's byte order mark, as Windows writes it
    except OSError as error:
        raise ValueError(f"data file {path} cannot be read: {error.strerror}.") from None
    form = (
        "an array of objects, or one object per line" if path.suffix.lower() == ".json" else "one JSON object per line"
    )

    def parse(where: str, text: bytes) -> object:
        try:
            return DECODER.decode(text.decode())
        except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError, too deeply nested
            hint = f"UTF-16? iconv -f UTF-16 -t UTF-8 {path} > NEW_FILE" if b"\0" in text else "cut off?"
            raise ValueError(f"{where}: not valid JSON ({error}); {hint} The file must be {form}, in UTF-8.") from None

    if path.suffix.lower() == ".json" and content.lstrip()[:1] == b"[":
        values = [(f"{path}, row {i}", value) for i, value in enumerate(parse(str(path), content))]
    else:
        lines = [(f"{path}, line {i}", line) for i, line in enumerate(io.BytesIO(content), start=1) if line.strip()]
        values = [(where, parse(where, line)) for where, line in lines]
        if path.suffix.lower() == ".json" and len(values) == 1:
            raise ValueError(
                f"{path}: found a single JSON object; the file must be {form}. If the object is a row, put it in [ ]."
            )
    for where, value in values:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(value).__name__}; the file must be {form}.")
    return [(where, value, path.parent) for where, value in values]


def _open_dataset(source: str, what: str, split: str | None) -> tuple[Dataset | list[Record], str]:
    """(rows, their name in `where`) of what is not a single JSON file. Raises ValueError."""
    import datasets
    from huggingface_hub import constants, errors, get_session
    from pyarrow import ArrowException
    from yaml import YAMLError  # a README with broken settings

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    path, full = Path(what), str(Path(what).resolve())  # full, because "json" and "parquet" mean readers of the library
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(full)
            loaded = loaded if isinstance(loaded, dict) else {"train": loaded}
        elif path.is_dir():
            loaded = {str(key): files for key, files in datasets.load_dataset_builder(full).config.data_files.items()}
            if {Path(file).suffix.lower() for files in loaded.values() for file in files} - {".json", ".jsonl"}:
                loaded = datasets.load_dataset(full, split=split)
        elif path.is_file():
            loaded = datasets.load_dataset("parquet", data_files={"train": glob.escape(full)}, split=split or "train")
        else:
            try:  # ask the hub once: without network, `datasets` tries for 23 s to minutes before it looks into its cache or gives up
                get_session().head(constants.ENDPOINT, timeout=5)
            except (errors.HTTPError, OSError):
                datasets.config.HF_HUB_OFFLINE = True  # what the environment variable of this name sets
            dataset, configuration = HUB_ID.fullmatch(what).groups()
            loaded = datasets.load_dataset(dataset, configuration, split=split)
    except (
        datasets.exceptions.DatasetsError,
        errors.HTTPError,
        ArrowException,
        YAMLError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:500]
        advice = (
            ""
            if path.exists()
            else f" (or: hf download --repo-type dataset {what} --local-dir FOLDER, and name that folder)"
        )
        raise ValueError(f"data {source!r} cannot be loaded: {reason}{advice}") from None
    if isinstance(loaded, dict):
        split = split or (str(*loaded) if len(loaded) == 1 else "train")
        if split not in loaded:
            raise ValueError(
                f"data {source!r}: no split {split!r} (@SPLIT), but {', '.join(loaded)}; choose one of them."
            )
        loaded = loaded[split]
    if isinstance(loaded, list):  # a folder of JSON files
        loaded = [record for file in loaded for record in read_json_file(Path(file))]
    return loaded, f"{what}@{split}" if split else what
