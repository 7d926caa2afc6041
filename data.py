"""Data: source -> records -> rows. A row carries its prompt, so a prompt cannot come apart from its answer.

`runtime/sources.py` reads records. Read from the top: `PromptData.load` loads a source, `indices_of_step`
draws the rows of a step, `make_row` makes a row. scripts/show_data.py shows data before training.
"""

from __future__ import annotations

import ast
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from itertools import chain
from unicodedata import category

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from batch import Messages, Row
from flags import PromptFormat
from grading import key_text
from model.special_tokens import template_tokens
from runtime.parts import part
from runtime.progress import progress
from runtime.sources import Record, name_of_source, read_records

ImageReader = object  # what reads images for a model: `Vision` of extras/models/vision.py


class UnusableRow(Exception):
    """A value cannot be used: the row is excluded and listed. A missing column raises ValueError instead."""


@dataclass(frozen=True)
class PromptData:
    """The usable rows of a source, in its order. Raises ValueError if there are none."""

    name: str
    rows: list[Row]
    num_too_long: int = 0
    excluded: list[tuple[str, str]] = field(default_factory=list)  # (where, reason) of rows that cannot be used
    is_shuffled: bool = True  # in each epoch anew; else all epochs keep the order of the rows

    def __post_init__(self) -> None:
        if not self.rows:
            reasons = " ".join(f"{where}: {reason}." for where, reason in self.excluded[:3])
            raise ValueError(f"data {self.name}: no row can be used. {reasons}")

    @staticmethod
    def load(
        source: str, prompt_format: PromptFormat, tokenizer: Tokenizer, seed: int, vision: ImageReader | None = None,
        hint_column: str | None = None, is_shuffled: bool = True,
    ) -> PromptData:  # fmt: skip
        """The usable rows whose prompt has at most `max_prompt_tokens` tokens, with its images and its hint.

        Without `vision` images count as the template writes them: enough to look at data, not to train.
        Raises ValueError or FileNotFoundError if the source or a column is not there, or no row is left.
        """
        kept, lengths, excluded = [], [], []
        limit = prompt_format.max_prompt_tokens
        for record in progress(f"read {source}", items=read_records(source, seed, is_shuffled)):
            try:
                row = make_row(record, prompt_format, tokenizer, vision)
                if hint_column:
                    hints = part("extras.teacher.hints", "--hint_column")
                    row = replace(row, hinted_ids=hints.hinted_ids(record, prompt_format, tokenizer, hint_column))
            except UnusableRow as reason:
                excluded.append((record.where, str(reason)))
                continue
            lengths.append(len(row.reference_ids))  # a hint makes a prompt longer
            if lengths[-1] <= limit:
                kept.append(row)
        if lengths and not kept:
            raise ValueError(
                f"data {source!r}: all {len(lengths)} prompts are longer than --max_prompt_tokens {limit}; "
                f"the shortest has {min(lengths)} tokens."
            )
        num_too_long = len(lengths) - len(kept)
        return PromptData(name_of_source(source), kept, num_too_long, excluded=excluded, is_shuffled=is_shuffled)

    @staticmethod
    def mix(parts: list[PromptData]) -> PromptData:
        """All sources as one, in the order in which they are given; an epoch draws each row of each once."""
        if len(parts) == 1:
            return parts[0]
        return PromptData(
            name="+".join(part.name for part in parts),
            rows=list(chain.from_iterable(part.rows for part in parts)),
            num_too_long=sum(part.num_too_long for part in parts),
            excluded=list(chain.from_iterable(part.excluded for part in parts)),
            is_shuffled=parts[0].is_shuffled,
        )

    def exclude(self, reasons: dict[int, str]) -> PromptData:
        """The data without the rows of these indices, which join `excluded`."""
        excluded = self.excluded + [(self.rows[i].where, reason) for i, reason in sorted(reasons.items())]
        return replace(self, rows=[row for i, row in enumerate(self.rows) if i not in reasons], excluded=excluded)

    def indices_of_step(self, step: int, prompts_per_step: int, seed: int, keep_last: bool = False) -> np.ndarray:
        """The P row indices of step 1, 2, ...: a function of (seed, step), so a resumed run loses and repeats no row.

        An epoch is a new permutation of all rows, or keeps their order. Steps are consecutive slices of an epoch, whose
        last partial one is dropped; with `keep_last`, of all epochs in a row.
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
        orders = [order_of_epoch(num_rows, seed, e) if self.is_shuffled else np.arange(num_rows) for e in epochs]
        return np.concatenate(orders)[start : start + count]


@lru_cache(maxsize=8)
def order_of_epoch(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The row indices that epoch 0, 1, ... draws, in order."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


# Record -> row --------------------------------------------------------------------------------------------------------


def make_row(
    record: Record, prompt_format: PromptFormat, tokenizer: Tokenizer, vision: ImageReader | None = None
) -> Row:
    """The row of a record. Raises UnusableRow for a value, ValueError for a missing column."""
    where, columns, _ = record
    column = prompt_format.prompt_column
    messages = _messages(look_up(record, column, "--prompt_column"), f"column {column!r}", prompt_format)
    check_special_tokens(messages, prompt_format, tokenizer)
    answer, encoded = "", ()
    column = None if prompt_format.reward == "none" else prompt_format.answer_column
    if column:
        value = look_up(record, column, "--answer_column")
        answer = _answer(value, f"column {column!r}")
    if prompt_format.image_column:
        encoded, columns = part("extras.models.vision", "--image_column").take_images(record, messages, prompt_format)
    text = render(messages, prompt_format, tokenizer)
    ids = encode(text, prompt_format, tokenizer)
    images = None
    if vision is not None and (encoded or vision.image_token in ids):
        try:
            images = vision.find_images(encoded, ids)
        except ValueError as error:
            raise UnusableRow(str(error)) from None
        ids = images.prompt
    return Row(
        messages=messages, answer=answer, columns=columns, where=where, encoded_images=encoded, text=text, ids=ids,
        images=images,
    )  # fmt: skip


def encode(text: str, prompt_format: PromptFormat, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of a rendered prompt, int32.

    A chat template writes its own special tokens; a bare prompt gets the tokenizer's, unless it begins with the BOS.
    """
    has_special_tokens = prompt_format.prompt_format == "chat" or text.startswith(tokenizer.bos_token or "\0")
    encoded = tokenizer(text, add_special_tokens=not has_special_tokens, return_special_tokens_mask=True)
    ids, is_added = encoded["input_ids"], encoded["special_tokens_mask"]  # 0 for those that the text itself holds
    while is_added and is_added.pop():
        ids.pop()  # some tokenizers end a text: nothing would come after it
    return np.array(ids, dtype=np.int32)


def look_up(record: Record, column: str, flag: str) -> object:
    """The value of this column, or else at this dotted path; None if one on the path is null."""
    value: object = record.columns
    for key in [column] if column in record.columns else column.split("."):
        if not isinstance(value, dict) or key not in value:
            names = list(record.columns)
            for name, inner in record.columns.items():
                if isinstance(inner, dict):
                    names += [f"{name}.{inner_name}" for inner_name in inner]
            listed = ", ".join(map(repr, names)) or "none"
            raise ValueError(f"{record.where}: no column {column!r} ({flag}); this row has {listed}.")
        value = value[key]
        if value is None:
            break
    return value


def as_text(value: object, name: str) -> str:
    """The value. Raises UnusableRow if it is no text, blank, or has invalid characters."""
    if value is None:
        raise UnusableRow(f"{name} is null")
    if not isinstance(value, str):
        raise UnusableRow(f"{name} is {value!r:.60}, no text")
    if not any(category(c)[0] in "LNPS" for c in value):  # marks and invisible characters alone are no text
        raise UnusableRow(f"{name} is blank")
    if re.search("[\ud800-\udfff]", value):  # half a surrogate pair, which JSON can escape
        raise UnusableRow(f"{name} has invalid characters")
    return value


def _messages(value: object, name: str, prompt_format: PromptFormat) -> Messages:
    """The conversation with its suffix. A system prompt takes the place of the data's own."""
    value = without_nulls(_spelled_messages(value, name))
    messages = value if isinstance(value, list) else [{"role": "user", "content": as_text(value, name)}]
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise UnusableRow(f"{name} is no list of messages")
    for message in messages:
        calls_tools = message.get("role") == "assistant" and message.get("tool_calls")
        if calls_tools:
            message.setdefault("content", None)  # templates ask whether it is none
        if not {"role", "content"} <= message.keys():
            raise UnusableRow(f"{name}: a message has {', '.join(message) or 'nothing'}; needed are role and content")
        as_text(message["role"], f"{name}: a role")
        if message["content"] or not calls_tools:
            as_text(message["content"], f"{name}: the content of a message")
    if messages[-1]["role"] != "user":
        raise UnusableRow(f"{name}: the last message is not the user's, but of {messages[-1]['role']!r}")
    messages[-1]["content"] += prompt_format.prompt_suffix
    if prompt_format.system_prompt is None:
        return messages
    system = {"role": "system", "content": prompt_format.system_prompt}
    return [system, *(message for message in messages if message["role"] != "system")]


def without_nulls(value: object) -> object:
    """A copy without the keys that are null, at any depth: a parquet file gives each object the keys of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def _spelled_messages(value: object, name: str) -> object:
    """The messages that a text spells as JSON or Python, not NumPy; any other value as it is."""
    form = r"\s*(array\()?[\s\[]*\{.*['\"]role['\"]\s*:.*[\]})]\s*"
    if not isinstance(value, str) or not re.fullmatch(form, value, re.DOTALL):
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(value.strip())
    raise UnusableRow(f"{name} spells messages, but neither as JSON nor as Python: {value!r:.60}")


def check_special_tokens(messages: Messages, prompt_format: PromptFormat, tokenizer: Tokenizer) -> None:
    """Raises for a text that holds what only the chat template may write: it would begin a turn, or end one."""
    for token in template_tokens(tokenizer) if prompt_format.prompt_format == "chat" else ():
        if not any(token in (message["content"] or "") for message in messages):
            continue
        held = f"holds {token!r}, which the chat template writes itself"
        if token in (prompt_format.system_prompt or ""):
            raise ValueError(f"--system_prompt {held}; give the text without it.")
        column = prompt_format.prompt_column
        raise UnusableRow(f"column {column!r} {held}; give --prompt_format raw, or another --prompt_column")


def _answer(value: object, name: str) -> str:
    """The value as text, see `grading.key_text`. Raises UnusableRow."""
    is_number = type(value) is int or (isinstance(value, float) and math.isfinite(value))  # True is no number
    try:
        if is_number or isinstance(value, (str, list, dict)):
            value = key_text(value)
        return as_text(value, name)
    except (TypeError, ValueError) as error:  # bytes or dates in it; an empty list
        raise UnusableRow(f"{name}: {error}") from None


# Messages -> text -----------------------------------------------------------------------------------------------------


def render(messages: Messages, prompt_format: PromptFormat, tokenizer: Tokenizer, continues: bool = True) -> str:
    """The text of the messages, which the model continues if it is its turn. Raises UnusableRow."""
    if prompt_format.prompt_format == "chat":
        variables = template_variables(prompt_format, tokenizer)
        variables["strftime_now"] = DATE.strftime
        if prompt_format.tools:
            variables["tools"] = part("extras.turns.schemas", "--tools").tool_schemas(prompt_format.tools)
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=continues, **variables)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise UnusableRow(f"the chat template refuses it ({error})") from None
    if len(messages) > 1:
        raise UnusableRow(f"{len(messages)} messages need --prompt_format chat")
    return messages[0]["content"]


DATE = datetime(2026, 1, 1)  # for a template that writes it: with the clock's a run would have new prompts each day


def template_variables(prompt_format: PromptFormat, tokenizer: Tokenizer) -> dict[str, object]:
    """The values of --template_args. Raises ValueError for what the template ignores."""
    if not prompt_format.template_args:
        return {}
    return part("extras.sources.variables", "--template_args").read(prompt_format.template_args, tokenizer)
