"""Data: source -> records -> rows. A row carries its prompt, so a prompt cannot come apart from its answer.

A source is WHAT[@SPLIT][#ROWS]. WHAT is a file (.jsonl, .json, .parquet), a folder of such files or of
datasets.save_to_disk, or a data set on the hub (owner/name, or owner/name/configuration where it has several).
#ROWS draws so many rows at random. Read `PromptData.load` first; `READERS` is the place for another kind of file.
To look at data before training:

    python data.py --data hiyouga/math12k@test#100 --model Qwen/Qwen2.5-7B [--prompt_column ...]
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import AutoConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from flags import GROUPS, PromptFormat, add_flags, parse_source, take
from model.vision import PromptImages, UnreadableImage, Vision, encoded_images, find_images, load_processor

if TYPE_CHECKING:
    from datasets import Dataset  # imported where it is needed: that takes a second, and .jsonl files do without

IMAGE = "<image>"  # in a prompt: the place of an image
Messages = list[dict[str, object]]
Share = tuple[str, int, float]  # name, number of rows and weight of a source in a mixture


class UnusableRow(Exception):
    """A value cannot be used: the row is excluded and listed. (A missing column is a ValueError for its source.)"""


def read_system_prompt(text: str | None) -> str | None:
    """The text, or the content of the file that it names. Raises ValueError if that is not there or cannot be read."""
    if not text or len(text.encode()) > 255:  # longer than a file name can be
        return text
    if Path(text).is_file():
        try:
            return Path(text).read_text(encoding="utf-8-sig").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--system_prompt {text!r}: the file cannot be read as UTF-8 text ({error}).") from None
    if re.search(r"\.(txt|md)$|^\S*/\S*$", text):
        raise ValueError(f"--system_prompt {text!r}: no such file. If this is the text itself, put a space at its end.")
    return text


# Records: rows as they are in the source ------------------------------------------------------------------------------


class Record(NamedTuple):
    """A row as it was read."""

    where: str  # "train.jsonl, line 17", counted from 1; "hiyouga/math12k@train, row 17", from 0 as `datasets` counts
    columns: dict[str, object]
    folder: Path  # where the relative paths of images start


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The JSON object. JSON leaves open which of two equal keys counts; training data must not depend on a guess."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a key appears twice among {', '.join(repr(key) for key, _ in pairs)[:200]}")
    return dict(pairs)


DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)  # accepts NaN and Infinity, as json.dumps writes them


def read_json_file(path: Path) -> list[Record]:
    """The rows of a .jsonl file (an object per line, blank lines are skipped) or a .json file (an array, or as .jsonl).

    Raises ValueError with file and line. `datasets` does not read these files: it guesses one type per column, so ISO
    dates become timestamps and 1 beside 2.5 becomes 1.0 (no completion equals that), and its errors name no line.
    """
    is_json = path.suffix.lower() == ".json"
    form = "an array of objects, or one object per line" if is_json else "one JSON object per line"

    def parse(where: str, text: bytes) -> object:
        try:
            return DECODER.decode(text.decode())
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, too deeply nested
            hint = f"UTF-16? iconv -f UTF-16 -t UTF-8 {path} > NEW_FILE" if b"\0" in text else "cut off?"
            raise ValueError(f"{where}: not valid JSON ({error}); {hint} The file must be {form}, in UTF-8.") from None

    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # UTF-8's byte order mark, which Windows writes
    except OSError as error:
        raise ValueError(f"data file {path} cannot be read: {error.strerror}.") from None
    if is_json and content.lstrip().startswith(b"["):
        values = [(f"{path}, row {i}", value) for i, value in enumerate(parse(str(path), content))]
    else:
        lines = [(f"{path}, line {i}", line) for i, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
        values = [(where, parse(where, line)) for where, line in lines]
        if is_json and len(values) == 1:
            raise ValueError(f"{path}: found a single JSON object; the file must be {form}. Put a lone row in [ ].")
    for where, value in values:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(value).__name__}; the file must be {form}.")
    return [Record(where, value, path.parent) for where, value in values]


READERS: dict[str, Callable[[Path], list[Record]]] = {".jsonl": read_json_file, ".json": read_json_file}
OTHER_FILES = ".parquet .csv .tsv .txt .md .yaml .yml .py .pkl .npy .npz .arrow .xlsx .gz .zip .zst .xz .bz2 .tar"
FILE_ENDINGS = {*READERS, *OTHER_FILES.split()}  # what ends like this is no data set on the hub
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:/([\w.-]+))?")  # data set, configuration


def name_of_source(source: str) -> str:
    """`math500` for x/math500.jsonl, `gsm8k_test` for openai/gsm8k/main@test#100: the <set> in eval/<set>/..."""
    what, split, _ = parse_source(source)
    path, is_file = Path(what), Path(what).suffix.lower() in FILE_ENDINGS
    if what.count("/") == 2 and HUB_ID.fullmatch(what) and not is_file and not path.exists():
        path = path.parent  # the configuration says nothing without the name
    return (path.stem if is_file else path.name) + (f"_{split}" if split else "")


def _open(source: str, what: str, split: str | None) -> dict[str, Dataset | list[str]]:
    """The rows of each split, or of the split asked for: a Dataset, or files for READERS. Raises ValueError."""
    path = Path(what)
    if path.is_file() and path.suffix.lower() in READERS:
        return {"train": [what]}
    import datasets
    from huggingface_hub import constants, errors, get_session
    from pyarrow import ArrowException
    from yaml import YAMLError  # a README with broken settings

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    full = str(path.resolve())  # because names such as json and parquet are readers of `datasets`
    mistakes = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, ArrowException, YAMLError)
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(full)
            return loaded if isinstance(loaded, dict) else {"train": loaded}
        if path.is_dir():
            files = {str(key): names for key, names in datasets.load_dataset_builder(full).config.data_files.items()}
            if all(Path(name).suffix.lower() in READERS for names in files.values() for name in names):
                return files
            loaded = datasets.load_dataset(full, split=split)
        elif path.is_file():
            loaded = datasets.load_dataset("parquet", data_files=glob.escape(full), split=split)
        else:
            try:  # without network `datasets` tries for 23 s to minutes before it looks into its cache or gives up
                get_session().head(constants.ENDPOINT, timeout=5)
            except (errors.HTTPError, OSError):
                datasets.config.HF_HUB_OFFLINE = True  # what the environment variable of this name sets
            loaded = datasets.load_dataset(*HUB_ID.fullmatch(what).groups(), split=split)
    except (*mistakes, errors.HTTPError) as error:
        advice = f" (or: hf download --repo-type dataset {what} --local-dir FOLDER, and name that folder)"
        reason = " ".join(str(error.__cause__ or error).split())[:500] + ("" if path.exists() else advice)
        raise ValueError(f"data {source!r} cannot be loaded: {reason}") from None
    return loaded if isinstance(loaded, dict) else {split: loaded}


def read_records(source: str, seed: int) -> list[Record]:
    """The rows in the order of the source, or for #ROWS in that of drawing. Raises ValueError or FileNotFoundError."""
    what, split, count = parse_source(source)
    path, ending, given = Path(what), Path(what).suffix.lower(), f"data {source!r}"
    kinds = f"a file ({', '.join(READERS)}, .parquet), a folder of them, or a data set on the hub (owner/name)"
    is_on_hub = HUB_ID.fullmatch(what) and ending not in FILE_ENDINGS and not ("/" in what and path.parent.is_dir())
    if not path.exists() and not is_on_hub:
        absent = f"{what} does not exist (looked in {Path.cwd()})"
        raise FileNotFoundError(f"{given}: {absent}; needed is WHAT[@SPLIT][#ROWS], where WHAT is {kinds}.")
    if path.is_file() and ending not in READERS and ending != ".parquet":
        raise ValueError(f"{given}: a file of this kind is not read; needed is {kinds}.")
    splits = _open(source, what, split)
    split = split or ("train" if len(splits) > 1 else next(iter(splits)))
    if split not in splits:
        raise ValueError(f"{given}: no split {split!r} (@SPLIT), but {', '.join(splits)}; choose one of them.")
    rows = splits[split]
    if isinstance(rows, list):
        rows = [record for file in map(Path, rows) for record in READERS[file.suffix.lower()](file)]
    if len(rows) < (count or 1):
        raise ValueError(f"{given} holds {len(rows) or 'no'} rows; needed are at least {count or 1}.")
    indices = np.arange(len(rows))
    if count is not None:  # from another stream than any epoch's, [seed, epoch]
        indices = np.random.default_rng([seed, 0, 0, 1]).permutation(indices)[:count]
    if isinstance(rows, list):
        return [rows[i] for i in indices]
    folder, drawn = path if path.is_dir() else path.parent, rows.select(indices).to_list()  # images stay encoded
    return [Record(f"{what}@{split}, row {i}", columns, folder) for i, columns in zip(indices, drawn, strict=True)]


# Rows: records with their prompts -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Row:
    """One problem with its prompt."""

    messages: Messages  # with system prompt and suffix; content: a text, or a list of image and text parts
    answer: str
    columns: dict[str, object]  # as read, without the images: for rewards that need more than the answer
    where: str  # its place in the source
    encoded_images: tuple[bytes, ...] = ()  # in the order of the image parts
    text: str = ""  # the rendered prompt, which the model continues
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # its tokens, image tokens repeated
    images: PromptImages | None = None  # None: the prompt has no image, or the model sees none

    @property
    def prompt(self) -> str:
        """The user's last text, for logs; images show as `<image>`."""
        content = self.messages[-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", IMAGE) for part in content)


def _look_up(record: Record, column: str, flag: str) -> object:
    """The column of this name, or else what the dotted path leads to: None if an object on the way is null."""
    value: object = record.columns
    for key in [column] if column in record.columns else column.split("."):
        if not isinstance(value, dict) or key not in value:
            objects = {name: inner for name, inner in record.columns.items() if isinstance(inner, dict)}
            names = [*record.columns, *(f"{name}.{key}" for name, inner in objects.items() for key in inner)]
            found = ", ".join(map(repr, names)) or "none"
            raise ValueError(f"{record.where}: no column {column!r} ({flag}); this row has {found}.")
        value = value[key]
        if value is None:
            break
    return value


def _text(value: object, name: str) -> str:
    """The value, if it is a text that is not blank."""
    if not isinstance(value, str):
        raise UnusableRow(f"{name} is {'null' if value is None else f'{value!r:.60}, no text'}")
    if not value.strip():
        raise UnusableRow(f"{name} is blank")
    if re.search("[\ud800-\udfff]", value):  # half a surrogate pair, which JSON can escape
        raise UnusableRow(f"{name} has invalid characters")
    return value


def _messages(value: object, name: str, prompt_format: PromptFormat) -> Messages:
    """The conversation with suffix and system prompt; the latter takes the place of the data's own."""
    if isinstance(value, list) and prompt_format.prompt_format == "text":
        raise ValueError(
            f"{name} (--prompt_column) holds messages, which need a chat template; the tokenizer has none."
        )
    messages = value if isinstance(value, list) else [{"role": "user", "content": _text(value, name)}]
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise UnusableRow(f"{name} is no list of messages")
    # Without the nulls that parquet files add; a new dictionary each, because the row's columns stay as read.
    messages = [{key: part for key, part in message.items() if part is not None} for message in messages]
    for message in messages:
        _text(message.get("role"), f"{name}: a role")
        _text(message.get("content"), f"{name}: the content of a message")
    if messages[-1]["role"] != "user":
        raise UnusableRow(f"{name}: the last message is not the user's, but of {messages[-1]['role']!r}")
    messages[-1]["content"] += prompt_format.prompt_suffix
    if prompt_format.system_prompt is None:
        return messages
    system = {"role": "system", "content": prompt_format.system_prompt}
    return [system, *(message for message in messages if message["role"] != "system")]


def _answer(value: object, name: str) -> str:
    """The value as text: numbers as Python writes them, lists and objects as JSON."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    try:
        return _text(json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value, name)
    except TypeError as error:  # bytes or dates in it
        raise UnusableRow(f"{name}: {error}") from None


def _place_images(messages: Messages, num_images: int) -> Messages:
    """Each `<image>` in the user's texts becomes an image part. Without any, the images come first in the last text."""
    num_markers = sum(message["content"].count(IMAGE) for message in messages if message["role"] == "user")
    if num_markers not in (0, num_images):
        raise UnusableRow(f"{num_markers} {IMAGE} in the text, but {num_images} images")
    if not num_markers:
        messages = [*messages[:-1], messages[-1] | {"content": IMAGE * num_images + messages[-1]["content"]}]
    placed = []
    for message in messages:
        if message["role"] == "user" and IMAGE in message["content"]:
            pieces = [piece for piece in re.split(f"({IMAGE})", message["content"]) if piece]
            parts = [{"type": "image"} if piece == IMAGE else {"type": "text", "text": piece} for piece in pieces]
            message = message | {"content": parts}
        placed.append(message)
    return placed


def _render(messages: Messages, prompt_format: PromptFormat, tokenizer: Tokenizer) -> str:
    """The text that the model continues."""
    if prompt_format.prompt_format == "chat":
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            raise UnusableRow(f"the chat template refuses it ({error})") from None
    if len(messages) > 1:
        raise UnusableRow(f"{len(messages)} messages need --prompt_format chat")
    return messages[0]["content"]


def check_template(prompt_format: PromptFormat, tokenizer: Tokenizer) -> PromptFormat:
    """The format, with `text` for `chat` if the tokenizer has no chat template. ValueError for flags that need one."""
    if prompt_format.prompt_format == "chat" and tokenizer.chat_template is None:
        prompt_format = replace(prompt_format, prompt_format="text")
    for flag in ("system_prompt", "image_column"):
        value = getattr(prompt_format, flag)
        if value is not None and prompt_format.prompt_format != "chat":
            raise ValueError(f"--{flag} {value!r} needs --prompt_format chat and a tokenizer with a chat template.")
    return prompt_format


def make_row(record: Record, prompt_format: PromptFormat, tokenizer: Tokenizer, vision: Vision | None = None) -> Row:
    """Raises UnusableRow for a value that is no prompt, answer or image; ValueError for a column that is not there."""
    where, columns, folder = record
    column = prompt_format.prompt_column
    messages = _messages(_look_up(record, column, "--prompt_column"), f"column {column!r}", prompt_format)
    column = prompt_format.answer_column
    answer = _answer(_look_up(record, column, "--answer_column"), f"column {column!r}")
    encoded: tuple[bytes, ...] = ()
    if column := prompt_format.image_column:
        try:
            encoded = encoded_images(_look_up(record, column, "--image_column"), folder)
        except UnreadableImage as error:
            raise UnusableRow(f"column {column!r} cannot be read as an image ({str(error)[:200]})") from None
        messages = _place_images(messages, len(encoded))
        columns = {name: value for name, value in columns.items() if name != column}  # each reward call would carry it
    text = _render(messages, prompt_format, tokenizer)
    # A chat template writes its own special tokens; a bare prompt gets the tokenizer's, unless it begins with the BOS.
    has_special_tokens = prompt_format.prompt_format == "chat" or text.startswith(tokenizer.bos_token or "\0")
    ids = np.array(tokenizer(text, add_special_tokens=not has_special_tokens)["input_ids"], dtype=np.int32)
    images = None
    if vision is not None and (encoded or vision.image_token in ids):
        try:
            images = find_images(vision, encoded, ids)
        except ValueError as error:
            raise UnusableRow(str(error)) from None
    return Row(messages, answer, columns, where, encoded, text, ids if images is None else images.prompt, images)


# Order: which rows a step draws ---------------------------------------------------------------------------------------


def _draws(shares: tuple[Share, ...]) -> list[int]:
    """How many draws of an epoch fall on each source, by largest remainders. Raises ValueError for none."""
    num_rows, total = sum(size for _, size, _ in shares), sum(weight for _, _, weight in shares)
    quotas = np.array([weight / total * num_rows for _, _, weight in shares])
    draws = np.floor(quotas).astype(int)
    draws[np.argsort(draws - quotas, kind="stable")[: num_rows - draws.sum()]] += 1
    for (name, size, weight), count in zip(shares, draws, strict=True):
        if not count:
            given = f"weight {weight:g} of {name}, {size} rows, is 0 of an epoch's {num_rows} draws"
            raise ValueError(f"{given}; raise it or leave {name} out.")
    return draws.tolist()


@lru_cache(maxsize=8)
def order_of_epoch(num_rows: int, shares: tuple[Share, ...], seed: int, epoch: int) -> np.ndarray:
    """The row indices that epoch 0, 1, ... draws, in order."""
    chosen, start = [] if shares else [np.arange(num_rows)], 0
    for part, (count, (_, size, _)) in enumerate(zip(_draws(shares), shares, strict=True)):
        first = epoch * count  # position in the source's endless stream of permutations
        passes = range(first // size, (first + count - 1) // size + 1)
        stream = np.concatenate([np.random.default_rng([seed, part, i, 2]).permutation(size) for i in passes])
        chosen.append(start + stream[first % size :][:count])
        start += size
    return np.random.default_rng([seed, epoch]).permutation(np.concatenate(chosen))


@dataclass(frozen=True)
class PromptData:
    """The usable rows of a source, in its order. Raises ValueError if there are none."""

    name: str
    rows: list[Row]
    num_too_long: int = 0
    excluded: list[tuple[str, str]] = field(default_factory=list)  # (where, reason) of rows that cannot be used
    shares: tuple[Share, ...] = ()  # of the mixed sources, if they have weights

    def __post_init__(self) -> None:
        if not self.rows:
            reasons = " ".join(f"{where}: {reason}." for where, reason in self.excluded[:3])
            raise ValueError(f"data {self.name}: no row can be used. {reasons}")

    @staticmethod
    def load(
        source: str, prompt_format: PromptFormat, tokenizer: Tokenizer, seed: int, vision: Vision | None = None
    ) -> PromptData:
        """The usable rows whose prompt has at most `max_prompt_tokens` tokens, those of images included.

        Without `vision` images count as the template writes them: enough to look at data, not to train.
        Raises ValueError or FileNotFoundError if the source or a column is not there, or no row is left.
        """
        prompt_format = check_template(prompt_format, tokenizer)
        rows, excluded = [], []
        for record in read_records(source, seed):
            try:
                rows.append(make_row(record, prompt_format, tokenizer, vision))
            except UnusableRow as reason:
                excluded.append((record.where, str(reason)))
        limit = prompt_format.max_prompt_tokens
        kept = [row for row in rows if len(row.ids) <= limit]
        if rows and not kept:
            shortest = f"--max_prompt_tokens {limit}; the shortest has {min(len(row.ids) for row in rows)} tokens"
            raise ValueError(f"data {source!r}: all {len(rows)} prompts are longer than {shortest}.")
        return PromptData(name_of_source(source), kept, len(rows) - len(kept), excluded)

    def exclude(self, reasons: dict[int, str]) -> PromptData:
        """Without the rows of these indices, which join `excluded`."""
        assert not self.shares, "rows are excluded before sources are mixed by weights"
        excluded = self.excluded + [(self.rows[i].where, reason) for i, reason in sorted(reasons.items())]
        return replace(self, rows=[row for i, row in enumerate(self.rows) if i not in reasons], excluded=excluded)

    @staticmethod
    def mix(parts: list[PromptData], weights: list[float] | None) -> PromptData:
        """All sources as one. Weights of any scale are shares of an epoch's draws; without, each row is drawn once."""
        if weights is not None and (len(weights) != len(parts) or not all(0 < weight < math.inf for weight in weights)):
            given = " ".join(f"{weight:g}" for weight in weights)
            raise ValueError(f"weights {given} of {len(parts)} sources: give each source a positive one.")
        if len(parts) == 1:
            return parts[0]
        assert not any(part.shares for part in parts), "a weighted mixture is not mixed again"
        shares = tuple((part.name, len(part.rows), weight) for part, weight in zip(parts, weights or [], strict=False))
        _draws(shares)  # raises for a weight that is too small
        rows = [row for part in parts for row in part.rows]
        excluded = [each for part in parts for each in part.excluded]
        name, num_too_long = "+".join(part.name for part in parts), sum(part.num_too_long for part in parts)
        return PromptData(name, rows, num_too_long, excluded, shares)

    def indices_of_step(self, step: int, prompts_per_step: int, seed: int, keep_last: bool = False) -> np.ndarray:
        """The P row indices of step 1, 2, ...: a function of (seed, step), so a resumed run loses and repeats no row.

        An epoch is a new permutation of all rows. With weights it has as many draws; each source gives its share of
        them out of its own endless stream of permutations, so its rows are drawn equally often. Steps are consecutive
        slices of each epoch, and the last partial one is dropped; with `keep_last`, slices of all epochs in a row.
        """
        num_rows = len(self.rows)
        per_epoch = num_rows if keep_last else num_rows // prompts_per_step * prompts_per_step
        assert per_epoch, f"{num_rows} rows do not fill a step of {prompts_per_step} prompts"
        epoch, start = divmod((step - 1) * prompts_per_step, per_epoch)
        return self.indices_from(epoch * num_rows + start, prompts_per_step, seed)

    def indices_from(self, first: int, count: int, seed: int) -> np.ndarray:
        """The row indices of prompts number first, first + 1, ..., counted over all epochs in a row."""
        num_rows = len(self.rows)
        epoch, start = divmod(first, num_rows)
        epochs = range(epoch, epoch + math.ceil((start + count) / num_rows))
        return np.concatenate([order_of_epoch(num_rows, self.shares, seed, e) for e in epochs])[start : start + count]

    def describe(self) -> list[str]:
        """Lines for the console: rows used, dropped, excluded (five of them by name), shares of a weighted mixture."""
        dropped = f"{self.num_too_long} dropped (too many tokens), {len(self.excluded)} excluded"
        lines = [f"data {self.name}: {len(self.rows)} rows; {dropped}"]
        lines += [f"  excluded: {where}: {reason}" for where, reason in self.excluded[:5]]
        for count, (name, size, weight) in zip(_draws(self.shares), self.shares, strict=True):
            draws = f"{count} of {len(self.rows)} draws an epoch, {count / size:.2f} for each of {size} rows"
            lines.append(f"  {name}: weight {weight:g}, {draws}")
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="sources, each WHAT[@SPLIT][#ROWS]")
    parser.add_argument(
        "--weights", nargs="*", type=float, help="weights of the sources; shows their shares of an epoch"
    )
    parser.add_argument("--model", required=True, help="model with the tokenizer: folder or hub id")
    parser.add_argument("--seed", type=int, default=1, help="random seed for drawing #ROWS (default: 1)")
    parser.add_argument("--show", type=int, default=2, help="number of prompts to show of each source (default: 2)")
    add_flags(parser, {"prompts": GROUPS["prompts"]})
    args = parser.parse_args()
    try:
        config = AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError):
        config = None  # a folder with a tokenizer alone is enough to look at texts
    try:
        prompt_format = take(PromptFormat, args, system_prompt=read_system_prompt(args.system_prompt))
        tokenizer, vision = load_processor(args.model, config, prompt_format)
        parts = [PromptData.load(source, prompt_format, tokenizer, args.seed, vision) for source in args.data]
        mixture = PromptData.mix(parts, args.weights)
    except (ValueError, OSError) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    for data in parts:
        print(*data.describe(), sep="\n")
        lengths = np.percentile([len(row.ids) for row in data.rows], [0, 50, 90, 99, 100], method="nearest")
        print("  prompt tokens: shortest {}, median {}, 90 % {}, 99 % {}, longest {}".format(*lengths))
        for row in data.rows[: args.show]:
            sizes = ", ".join(str(len(image)) for image in row.encoded_images)
            images = f"\n  {len(row.encoded_images)} images of {sizes} bytes" if sizes else ""
            print(f"\n--- {row.where}{images}\n{row.text}\n--- answer: {row.answer}\n")
    if len(parts) > 1:
        print(*mixture.describe(), sep="\n")


if __name__ == "__main__":
    main()
