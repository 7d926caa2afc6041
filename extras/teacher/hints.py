"""Hints that a step makes for its reference out of its own completions, for --hint_column @group and @feedback.

Self-distillation of a policy that has tried several times (SDPO, arXiv 2601.20802): the reference
reads, behind the problem, what a completion got right or wrong, and judges its tokens anew. The
templates are those of the authors' code (lasgroup/SDPO, verl/trainer/config/actor/actor.yaml).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from batch import NO_IDS, Messages, Metrics, Rollout
from data import UnusableRow, as_text, check_special_tokens, encode, look_up, make_row, render
from flags import PromptFormat
from runtime.sources import Record

HINT = "\n\nHere is a reference solution:\n{}\n\nAfter understanding it, solve the problem in your own words."
SOLUTION = "\nCorrect solution:\n\n{}\n\nCorrectly solve the original question."
FEEDBACK = (
    "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{}\n\n"
    "Correctly solve the original question."
)


def solution(rollout: Rollout, b: int, group_size: int) -> str | None:
    """The first correct completion of the group but b itself, without its thought."""
    first = b - b % group_size
    for other in range(first, first + group_size):
        if other != b and rollout.grades[other].is_correct:
            return SOLUTION.format(rollout.texts[other].rpartition("</think>")[2].strip())
    return None


def feedback(rollout: Rollout, b: int, group_size: int) -> str | None:
    """The reward's words about completion b; None if it is correct: the template denies it."""
    grade = rollout.grades[b]
    said = grade.feedback.strip()
    return FEEDBACK.format(said) if said and not grade.is_correct else None


MAKERS: dict[str, Callable[[Rollout, int, int], str | None]] = {"@group": solution, "@feedback": feedback}


@dataclass(frozen=True)
class Hints:
    """Gives each completion of a step a prompt of its own for the reference."""

    names: tuple[str, ...]  # of `MAKERS`: the first one that has a hint for a completion counts
    prompt_format: PromptFormat
    tokenizer: Tokenizer

    def add(self, rollout: Rollout, group_size: int) -> tuple[Rollout, Metrics]:
        """The rollout with `hinted_ids` in its rows and the part `is_hinted`; the share of completions with a hint.

        There is none where the prompt with it is longer than --max_prompt_tokens, or a text cannot be in a prompt.
        """
        made: dict[tuple[int, str], np.ndarray] = {}  # most completions of a group have the same hint
        rows = []
        for b, row in enumerate(rollout.rows):
            hints = (MAKERS[name](rollout, b, group_size) for name in self.names)
            hint = next(filter(None, hints), None)
            if hint is not None and (id(row), hint) not in made:
                made[id(row), hint] = self.ids(row.messages, hint)
            rows.append(replace(row, hinted_ids=made.get((id(row), hint), NO_IDS)))
        is_hinted = [len(row.hinted_ids) > 0 for row in rows]
        return replace(rollout, rows=rows).with_parts(is_hinted=is_hinted), {"distill/frac_hinted": np.mean(is_hinted)}

    def ids(self, messages: Messages, hint: str) -> np.ndarray:
        """The tokens of the prompt with this hint at the end of the last message; none where it does not fit."""
        *before, last = messages
        messages = [*before, last | {"content": last["content"] + hint}]
        try:
            check_special_tokens(messages, self.prompt_format, self.tokenizer)
            text = render(messages, self.prompt_format, self.tokenizer)
            ids = encode(text, self.prompt_format, self.tokenizer)
        except UnusableRow:
            return NO_IDS
        return ids if len(ids) <= self.prompt_format.max_prompt_tokens else NO_IDS


def hinted_ids(record: Record, prompt_format: PromptFormat, tokenizer: Tokenizer, column: str) -> np.ndarray:
    """The tokens of the prompt with the hint of this column between problem and suffix."""
    hint = HINT.format(as_text(look_up(record, column, "--hint_column"), f"column {column!r}"))
    prompt_format = replace(prompt_format, prompt_suffix=hint + prompt_format.prompt_suffix)
    try:
        return make_row(record, prompt_format, tokenizer).ids
    except UnusableRow as reason:
        raise UnusableRow(f"with the hint of column {column!r}: {reason}") from None
