"""Prompts: read the rows, render them as the model's chat, drop what is too long, and say which rows each step trains on.

The order is a function of (seed, epoch): a new permutation each epoch, the last partial step dropped. A resumed run therefore
needs no saved position: step s trains on the same rows whether or not the run was interrupted. A row is one object from file to
reward, so a prompt cannot come apart from its answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Row:
    """One problem. `columns` is the whole line of the file, for rewards that need more than the answer."""

    prompt: str
    answer: str
    columns: dict[str, object]


def read_rows(path: str, prompt_column: str, answer_column: str) -> list[Row]:
    """The rows of a .jsonl file (one JSON object per line, UTF-8; blank lines are skipped).

    Raises ValueError naming the file and the line if a line is not an object or lacks a non-empty prompt or answer; FileNotFoundError
    if there is no such file. Numbers are accepted as answers.
    """
    file = Path(path)
    if not file.is_file():
        kind = "is a folder, not a file" if file.is_dir() else "does not exist"
        raise FileNotFoundError(f"data file {path!r} {kind} (looked in {file.absolute().parent}).")
    rows = []
    with file.open("rb") as lines:  # binary: a bad byte is then reported with its line, too
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_parse_row(line, f"{path}, line {number}", prompt_column, answer_column))
    if not rows:
        raise ValueError(f"data file {path!r} holds no rows; it needs one JSON object per line.")
    return rows


def _parse_row(line: bytes, where: str, prompt_column: str, answer_column: str) -> Row:
    try:
        columns = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{where}: not valid JSON ({error}); the file may be cut off or not be JSON Lines.") from None
    if not isinstance(columns, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(columns).__name__}.")
    values = []
    for flag, column in (("--prompt_column", prompt_column), ("--answer_column", answer_column)):
        if column not in columns:
            raise ValueError(f"{where}: no column {column!r} ({flag}); this line has {', '.join(map(repr, columns)) or 'no columns'}.")
        value = columns[column]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip() or not _is_unicode(value):
            raise ValueError(f"{where}: column {column!r} ({flag}) must be a non-empty text of valid characters, found {value!r}.")
        values.append(value)
    return Row(values[0], values[1], columns)


def _is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can escape but no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def render_prompt(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text the model continues: the chat template with the problem as the user's turn; without a template, the problem itself."""
    if tokenizer.chat_template is None:
        return row.prompt
    return tokenizer.apply_chat_template([{"role": "user", "content": row.prompt}], tokenize=False, add_generation_prompt=True)


@dataclass(frozen=True)
class PromptData:
    """Rows with their token ids, in file order."""

    name: str  # the file's name without its ending, as in eval/<name>/...
    rows: list[Row]
    prompts: list[np.ndarray]  # int32 token ids
    num_dropped: int  # rows left out because their prompt is longer than the limit

    @staticmethod
    def load(path: str, prompt_column: str, answer_column: str, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> PromptData:
        """The rows of `path` whose rendered prompt has at most `max_prompt_tokens` tokens. Raises ValueError if none has."""
        rows = read_rows(path, prompt_column, answer_column)
        texts = [render_prompt(row, tokenizer) for row in rows]
        # A chat template writes its own special tokens; a bare prompt gets the tokenizer's (a leading BOS, say).
        token_ids = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
        kept = [i for i, ids in enumerate(token_ids) if len(ids) <= max_prompt_tokens]
        if not kept:
            raise ValueError(
                f"{path}: all {len(rows)} prompts are longer than --max_prompt_tokens {max_prompt_tokens}; "
                f"the shortest has {min(map(len, token_ids))} tokens."
            )
        prompts = [np.array(token_ids[i], dtype=np.int32) for i in kept]
        return PromptData(Path(path).stem, [rows[i] for i in kept], prompts, len(rows) - len(kept))

    def indices_of_step(self, step: int, prompts_per_step: int, seed: int) -> np.ndarray:
        """The P row indices of step 1, 2, ...: consecutive slices of each epoch's own permutation."""
        steps_per_epoch = len(self.rows) // prompts_per_step
        epoch, position = divmod(step - 1, steps_per_epoch)
        order = np.random.default_rng([seed, epoch]).permutation(len(self.rows))
        return order[position * prompts_per_step : (position + 1) * prompts_per_step]
