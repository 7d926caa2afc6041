"""Prompts: read the rows of a source, render them as the model's chat, drop what is too long, say which rows each step trains on.

What a source is says `sources.py`. A row is one object from file to reward, so a prompt cannot come apart from its answer. To look at
data before training:

    python data.py --data hiyouga/math12k@test#100 --model Qwen/Qwen2.5-7B [the flags of `add_data_flags`]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from transformers import AutoConfig, PreTrainedTokenizerBase

import flags
from flags import from_args
from model.vision import PromptImages, UnreadableImage, Vision, encoded_images, find_images, load_processor
from sources import Record, name_of_source, read_records

IMAGE = "<image>"  # in a prompt: the place of an image
Messages = list[dict[str, object]]


class UnusableRow(Exception):
    """A value cannot be used: the row is excluded, counted and listed. (A missing column is a ValueError for the whole source.)"""


@dataclass(frozen=True)
class Row:
    """One problem. `columns` is the row as read, but for images: for rewards that need more than the answer."""

    messages: Messages  # the conversation, system prompt and suffix included; content: text, or image and text parts
    answer: str
    columns: dict[str, object]
    where: (
        str  # "train.jsonl, line 17", from 1; or "hiyouga/math12k@train, row 17", from 0 as the datasets library counts
    )
    images: tuple[bytes, ...] = ()  # encoded, in the order of the image parts

    @property
    def prompt(self) -> str:
        """The user's last text, for logs; images show as `<image>`."""
        content = self.messages[-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", IMAGE) for part in content)


@dataclass(frozen=True)
class PromptFormat:
    """The flags of `add_data_flags` that say how a row becomes a prompt."""

    prompt_column: str = "problem"
    answer_column: str = "answer"
    image_column: str | None = None
    prompt_format: str = "chat"
    system_prompt: str | None = None
    prompt_suffix: str = ""


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the group "prompts"."""
    add = parser.add_argument_group("prompts").add_argument
    add(
        "--prompt_column",
        default="problem",
        help="column of the problem: a text, or messages; a dotted path reaches into nested objects",
    )
    add(
        "--answer_column",
        default="answer",
        help="column of the right answer, given to the reward; lists and objects become JSON text",
    )
    add(
        "--image_column",
        help="column of the images, one or a list: files, relative to the data, or encoded bytes; default: none",
    )
    add(
        "--max_pixels",
        type=int,
        help="larger images are scaled down to so many pixels (Qwen2.5-VL: a token per 28 x 28); default: the processor's",
    )
    add(
        "--prompt_format",
        choices=["chat", "raw"],
        default="chat",
        help="chat: by the model's chat template; raw: the text as it is",
    )
    add(
        "--system_prompt",
        help="text, or a file of it; put first, in place of the data's own system message; default: the data's",
    )
    add(
        "--prompt_suffix",
        default="",
        help="appended to the last user message as it is: begin it with a space or a line break",
    )
    add(
        "--max_prompt_tokens",
        type=int,
        default=1024,
        help="prompts of more tokens, template included, are dropped and counted",
    )


def prompt_format_of(args: argparse.Namespace) -> PromptFormat:
    """The flags as a PromptFormat, the system prompt read from its file. Raises ValueError if that is not there or cannot be read."""
    system_prompt = args.system_prompt
    if system_prompt and len(system_prompt.encode()) < 256:  # longer than a file name: a text
        file, given = Path(system_prompt), f"--system_prompt {system_prompt!r}"
        if re.search(r"\.(txt|md)$|^\S*/\S*$", system_prompt) and not file.is_file():
            raise ValueError(f"{given}: no such file. If it is meant as the text itself, put a space at its end.")
        try:
            system_prompt = file.read_text(encoding="utf-8-sig").rstrip("\r\n") if file.is_file() else system_prompt
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{given}: the file cannot be read as UTF-8 text ({error}).") from None
    columns = (args.prompt_column, args.answer_column, args.image_column)
    return PromptFormat(*columns, args.prompt_format, system_prompt, args.prompt_suffix)


def _look_up(record: Record, column: str, flag: str) -> object:
    """The column of this name, or what the dotted path leads to: None if an object on the way is null. ValueError if it leads nowhere."""
    where, columns, _ = record
    value: object = columns
    for key in [column] if column in columns else column.split("."):
        if not isinstance(value, dict) or key not in value:
            nested = [
                f"{outer}.{inner}" for outer, value in columns.items() if isinstance(value, dict) for inner in value
            ]
            raise ValueError(
                f"{where}: no column {column!r} ({flag}); this row has {', '.join(map(repr, [*columns, *nested])) or 'none'}."
            )
        value = value[key]
        if value is None:
            break
    return value


def _text(value: object, name: str) -> str:
    """The value, if it is a non-blank text of valid characters. Raises UnusableRow otherwise."""
    if not isinstance(value, str):
        raise UnusableRow(f"{name} is {'null' if value is None else f'{value!r:.60}, no text'}")
    if not value.strip() or any(
        "\ud800" <= character <= "\udfff" for character in value
    ):  # half a surrogate pair, which JSON can escape
        raise UnusableRow(f"{name} {'has invalid characters' if value.strip() else 'is blank'}")
    return value


def _messages(value: object, name: str, prompt_format: PromptFormat) -> Messages:
    """The conversation with suffix and system prompt, which takes the place of the data's own."""
    if isinstance(value, list) and prompt_format.prompt_format == "text":
        raise ValueError(
            f"{name} (--prompt_column) holds messages, which need a chat template; this tokenizer has none."
        )
    messages = value if isinstance(value, list) else [{"role": "user", "content": _text(value, name)}]
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise UnusableRow(f"{name} is no list of messages")
    messages = [
        {key: part for key, part in message.items() if part is not None} for message in messages
    ]  # parquet fills in nulls
    for message in messages:
        (
            _text(message.get("role"), f"{name}: a role"),
            _text(message.get("content"), f"{name}: the content of a message"),
        )
    if messages[-1]["role"] != "user":
        raise UnusableRow(f"{name}: the last message is not the user's, but of {messages[-1]['role']!r}")
    messages[-1]["content"] += prompt_format.prompt_suffix
    if prompt_format.system_prompt is None:
        return messages
    return [{"role": "system", "content": prompt_format.system_prompt}, *(m for m in messages if m["role"] != "system")]


def _answer(value: object, name: str) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    try:
        return _text(json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value, name)
    except TypeError as error:  # bytes or dates in it
        raise UnusableRow(f"{name}: {error}") from None


def _place_images(messages: Messages, num_images: int) -> Messages:
    """Each `<image>` in the user's texts becomes an image part; without any, the images come first in the last text."""
    num_markers = sum(message["content"].count(IMAGE) for message in messages if message["role"] == "user")
    if num_markers not in (0, num_images):
        raise UnusableRow(f"{num_markers} {IMAGE} in the text, but {num_images} images")
    if not num_markers:
        messages = [*messages[:-1], messages[-1] | {"content": IMAGE * num_images + messages[-1]["content"]}]
    placed = []
    for message in messages:
        if message["role"] == "user" and IMAGE in message["content"]:
            parts = [
                part
                for text in message["content"].split(IMAGE)
                for part in ({"type": "image"}, {"type": "text", "text": text})
            ][1:]
            message = message | {"content": [part for part in parts if part.get("text") != ""]}
        placed.append(message)
    return placed


def make_row(record: Record, prompt_format: PromptFormat) -> Row:
    """Raises UnusableRow for values that are no prompt, answer or image; ValueError for a column that is not there."""
    column = prompt_format.prompt_column
    messages = _messages(_look_up(record, column, "--prompt_column"), f"column {column!r}", prompt_format)
    column = prompt_format.answer_column
    answer = _answer(_look_up(record, column, "--answer_column"), f"column {column!r}")
    where, columns, folder = record
    images: tuple[bytes, ...] = ()
    if column := prompt_format.image_column:
        try:
            images = encoded_images(_look_up(record, column, "--image_column"), folder)
        except UnreadableImage as error:
            raise UnusableRow(f"column {column!r} cannot be read as an image ({str(error)[:200]})") from None
        columns = {
            name: value for name, value in columns.items() if name != column
        }  # they would travel with each completion to the reward
        messages = _place_images(messages, len(images))
    return Row(messages, answer, columns, where, images)


def check_template(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
    """The format, `chat` turned into `text` if the tokenizer has no chat template. ValueError for flags that need (a better) one."""
    if prompt_format.prompt_format == "chat" and tokenizer.chat_template is None:
        prompt_format = replace(prompt_format, prompt_format="text")
    for flag, value in (
        ("--system_prompt", prompt_format.system_prompt),
        ("--image_column", prompt_format.image_column),
    ):
        if value is not None and prompt_format.prompt_format != "chat":
            raise ValueError(
                f"{flag} {value!r} needs --prompt_format chat and a tokenizer with a chat template, to say where it goes."
            )
    if prompt_format.image_column is not None:
        image, text = {"type": "image"}, {"type": "text", "text": "?"}
        try:
            without, one = (
                _render([{"role": "user", "content": x}], prompt_format, tokenizer) for x in ([text], [image, text])
            )
        except UnusableRow:
            without, one = "", ""
        if without == one or "'image'" in one:  # left out, or printed as a Python list
            raise ValueError(
                f"--image_column {prompt_format.image_column!r}: the model's chat template has no place for images."
            )
    return prompt_format


def _render(messages: Messages, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the model continues."""
    if prompt_format.prompt_format == "chat":
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            raise UnusableRow(f"the chat template refuses it ({error})") from None
    if len(messages) > 1:
        raise UnusableRow(f"{len(messages)} messages need --prompt_format chat")
    return messages[0]["content"]


def _draws(shares: tuple[tuple[str, int, float], ...]) -> list[int]:
    """How many draws of an epoch fall on each of the (name, rows, weight): largest remainders. ValueError if none on one."""
    num_rows, total = sum(size for _, size, _ in shares), sum(weight for _, _, weight in shares)
    quotas = np.array([weight / total * num_rows for _, _, weight in shares])
    draws = np.floor(quotas).astype(int)
    draws[np.argsort(draws - quotas, kind="stable")[: num_rows - draws.sum()]] += 1
    for (name, size, weight), count in zip(shares, draws, strict=True):
        if not size or not count:
            raise ValueError(
                f"weight {weight:g} of {name}, {size} rows, is {count} of an epoch's {num_rows} draws; raise it or leave {name} out."
            )
    return draws.tolist()


@lru_cache(maxsize=8)
def order_of_epoch(num_rows: int, shares: tuple[tuple[str, int, float], ...], seed: int, epoch: int) -> np.ndarray:
    """The row indices that epoch 0, 1, ... draws, in order."""
    chosen, start = [np.arange(num_rows)], 0
    if shares:
        chosen = []
        for part, (count, (_, size, _)) in enumerate(zip(_draws(shares), shares, strict=True)):
            first = epoch * count  # position in the part's endless stream of permutations
            passes = range(first // size, (first + count - 1) // size + 1)
            stream = np.concatenate(
                [np.random.default_rng([seed, part, number, 2]).permutation(size) for number in passes]
            )
            chosen.append(start + stream[first % size :][:count])
            start += size
    return np.random.default_rng([seed, epoch]).permutation(np.concatenate(chosen))


@dataclass(frozen=True)
class PromptData:
    """Rows with their prompts, in the order of the source."""

    name: str
    rows: list[Row]
    texts: list[str]  # rendered prompts, what the model sees
    prompts: list[np.ndarray]  # int32 token ids; as many image tokens as an image has embeddings
    images: list[PromptImages | None]  # None: a prompt without any
    num_too_long: int
    excluded: list[tuple[str, str]]  # (where, reason) of rows that cannot be used
    shares: tuple[tuple[str, int, float], ...] = ()  # (name, rows, weight) of the mixed sources, if they have weights

    @staticmethod
    def load(
        source: str,
        prompt_format: PromptFormat,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        seed: int,
        vision: Vision | None = None,
    ) -> PromptData:
        """The usable rows whose prompt has at most `max_prompt_tokens` tokens, those of images included.

        Without `vision` images count as the template writes them: enough to look at data, not to train.
        Raises ValueError or FileNotFoundError if the source or a column is not there, or no row is left.
        """
        prompt_format = check_template(prompt_format, tokenizer)
        rows, texts, excluded = [], [], []
        for record in read_records(source, seed):
            try:
                row = make_row(record, prompt_format)
                texts.append(_render(row.messages, prompt_format, tokenizer))
                rows.append(row)
            except UnusableRow as reason:
                excluded.append((record[0], str(reason)))
        if not rows:
            raise ValueError(f"data {source!r}: no row can be used. {_first(excluded)}")
        # A chat template writes its own special tokens; a bare prompt gets the tokenizer's (a leading BOS, say), unless it has it already.
        has_special_tokens = prompt_format.prompt_format == "chat" or texts[0].startswith(tokenizer.bos_token or "\0")
        token_ids = tokenizer(texts, add_special_tokens=not has_special_tokens)["input_ids"]
        prompts = [np.array(ids, dtype=np.int32) for ids in token_ids]
        images, unusable = [None] * len(rows), {}
        for i, row in enumerate(rows):
            if vision is not None and (row.images or vision.image_token in prompts[i]):
                try:
                    images[i] = find_images(vision, row.images, prompts[i])
                    prompts[i] = images[i].prompt
                except ValueError as reason:
                    unusable[i] = str(reason)
        data = PromptData(name_of_source(source), rows, texts, prompts, images, 0, excluded).exclude(unusable)
        kept = [i for i, prompt in enumerate(data.prompts) if len(prompt) <= max_prompt_tokens]
        if not kept:
            limit = f"--max_prompt_tokens {max_prompt_tokens}; the shortest has {min(map(len, data.prompts))} tokens"
            raise ValueError(f"data {source!r}: all {len(data.rows)} prompts are longer than {limit}.")
        return replace(data._take(kept), num_too_long=len(data.rows) - len(kept))

    def _take(self, kept: list[int]) -> PromptData:
        return replace(
            self, **{name: [getattr(self, name)[i] for i in kept] for name in ("rows", "texts", "prompts", "images")}
        )

    def exclude(self, reasons: dict[int, str]) -> PromptData:
        """Without the rows of these indices, which join `excluded`. Raises ValueError if none is left, of all or of a weighted source."""
        excluded = self.excluded + [(self.rows[i].where, reason) for i, reason in sorted(reasons.items())]
        if len(reasons) == len(self.rows):
            raise ValueError(f"data {self.name}: no row can be used. {_first(excluded)}")
        ends = np.cumsum([size for _, size, _ in self.shares])
        sizes = [
            size - sum(end - size <= i < end for i in reasons)
            for end, (_, size, _) in zip(ends, self.shares, strict=True)
        ]
        shares = tuple((name, size, weight) for size, (name, _, weight) in zip(sizes, self.shares, strict=True))
        _draws(shares)
        return replace(
            self._take([i for i in range(len(self.rows)) if i not in reasons]), excluded=excluded, shares=shares
        )

    @staticmethod
    def mix(parts: list[PromptData], weights: list[float] | None) -> PromptData:
        """All parts as one. Weights of any scale, one per part, are their shares of an epoch's draws; without, each row is drawn once."""
        if weights is not None and (len(weights) != len(parts) or not all(0 < weight < math.inf for weight in weights)):
            raise ValueError(
                f"weights {' '.join(f'{w:g}' for w in weights)} of {len(parts)} sources: give each source a positive one."
            )
        if len(parts) == 1:
            return parts[0]
        assert not any(part.shares for part in parts), "a weighted mixture is not mixed again"
        names, counts = [part.name for part in parts], [part.num_too_long for part in parts]
        lists = {
            field: sum((getattr(part, field) for part in parts), [])
            for field in ("rows", "texts", "prompts", "images", "excluded")
        }
        shares = tuple((part.name, len(part.rows), weight) for part, weight in zip(parts, weights or [], strict=False))
        _draws(shares)
        return PromptData("+".join(names), **lists, num_too_long=sum(counts), shares=shares)

    def steps_per_epoch(self, prompts_per_step: int, keep_last: bool) -> float:
        """Whole steps, or with `keep_last` the exact number of them: the last step of an epoch may reach into the next."""
        return len(self.rows) / prompts_per_step if keep_last else len(self.rows) // prompts_per_step

    def indices_of_step(self, step: int, prompts_per_step: int, seed: int, keep_last: bool = False) -> np.ndarray:
        """The P row indices of step 1, 2, ...: a function of (seed, step), so a resumed run neither loses nor repeats rows.

        An epoch is a new permutation of all rows; with weights it has as many draws, of which each source gives its share out of its own
        endless stream of permutations, so that its rows are drawn equally often. Steps are consecutive slices: of each epoch, the last
        partial one dropped; or, with `keep_last`, of all epochs in a row.
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
        """Lines for the console: rows used, dropped, excluded (the first five named), and the shares of a weighted mixture."""
        lines = [
            f"data {self.name}: {len(self.rows)} rows; {self.num_too_long} dropped (too many tokens), {len(self.excluded)} excluded"
        ]
        lines += [f"  excluded: {where}: {reason}" for where, reason in self.excluded[:5]]
        for count, (name, size, weight) in zip(_draws(self.shares), self.shares, strict=True):
            lines.append(
                f"  {name}: weight {weight:g}, {count} of {len(self.rows)} draws an epoch, {count / size:.2f} for each of {size} rows"
            )
        return lines


def _first(excluded: list[tuple[str, str]]) -> str:
    return " ".join(f"{where}: {reason}." for where, reason in excluded[:3])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", nargs="+", required=True, help="sources, each WHAT[@SPLIT][#ROWS]")
    parser.add_argument("--weights", nargs="*", type=float, help="of the sources, to see their shares of an epoch")
    parser.add_argument("--model", required=True, help="the tokenizer: folder or hub id")
    parser.add_argument("--seed", type=int, default=1, help="of drawing #ROWS")
    parser.add_argument("--show", type=int, default=2, help="so many prompts of each source, as the model sees them")
    add_data_flags(parser)
    args = parser.parse_args()
    try:
        try:
            config = AutoConfig.from_pretrained(args.model)
        except (OSError, ValueError):
            config = None  # a folder with a tokenizer alone: enough to look at texts
        prompt_format, (tokenizer, vision) = (
            prompt_format_of(args),
            load_processor(args.model, config, from_args(flags.PromptFormat, args)),
        )
        parts = [
            PromptData.load(source, prompt_format, tokenizer, args.max_prompt_tokens, args.seed, vision)
            for source in args.data
        ]
        mixture = PromptData.mix(parts, args.weights)
    except (ValueError, OSError) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    for data in parts:
        lengths = np.percentile([len(ids) for ids in data.prompts], [0, 50, 90, 99, 100], method="nearest")
        print(
            *data.describe(),
            "  prompt tokens: shortest {}, median {}, 90 % {}, 99 % {}, longest {}".format(*lengths),
            sep="\n",
        )
        for row, text in list(zip(data.rows, data.texts, strict=True))[: args.show]:
            images = (
                f"\n  {len(row.images)} images of {', '.join(str(len(image)) for image in row.images)} bytes"
                if row.images
                else ""
            )
            print(f"\n--- {row.where}{images}\n{text}\n--- answer: {row.answer}\n")
    if len(parts) > 1:
        print(*mixture.describe(), sep="\n")


if __name__ == "__main__":
    main()
