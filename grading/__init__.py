"""Rewards: a completion and its row (`Case`) -> what it got (`Grade`). Read `score.py` first.

`reward.py` is the trainer's side. Here, too: answer keys that are lists, which the data's reader
and a verifier share.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from dataclasses import KW_ONLY, dataclass, field

NOT_GRADED = "not graded"  # the status of a grade


@dataclass(frozen=True)
class Case:
    """One completion to be graded, with everything that a verifier may want to know."""

    completion: str  # without special tokens
    answer: str
    columns: dict[str, object] = field(default_factory=dict)  # the whole data row
    _: KW_ONLY
    prompt: str = ""  # as the model saw it, template included
    token_ids: tuple[int, ...] = ()  # the completion's, if the reward asks for them
    num_tokens: int | None = None  # the completion's
    max_tokens: int | None = None  # what it could have had
    is_truncated: bool = False  # it ended at max_tokens, not by itself
    where: str = ""  # names the row in the log
    overlong_cache_tokens: int | None = None  # for `length`


@dataclass(frozen=True)
class Grade:
    """The grade of a completion: a verifier's score, or the weighted sum of all; 0.0 unless the status is "ok".

    A number of --truncated is the reward of what is "truncated".
    """

    reward: float
    status: str = "ok"  # or "truncated", "timeout", "error: ..." or, with --reward none, NOT_GRADED
    parts: dict[str, float] = field(default_factory=dict)  # verifier -> its score; then sub-score -> its value
    answer: str | None = None  # what the first verifier that reads one read as the final answer
    feedback: str = ""  # what functions of one's own say about it in words
    turn_rewards: tuple[float, ...] = ()  # from an environment that gives one for each turn
    is_compared: bool = True  # false: a function of the user's has failed, so that nobody knows the reward

    @property
    def score(self) -> float:
        """The score of the first verifier of the sum: it decides whether the completion is correct."""
        return next(iter(self.parts.values()), 0.0)

    @property
    def is_correct(self) -> bool:
        return self.score >= 1.0

    @property
    def is_failed(self) -> bool:
        """True if the completion could not be graded: its verifier ran out of time or raised."""
        return self.status not in ("ok", "truncated", NOT_GRADED)


def key_text(value: object) -> str:
    """The answer of a row as text: numbers and objects as JSON.

    A list of texts and numbers, or a text that spells one (`["7"]`, as OlympiadBench and Skywork have), is the answer
    in it. Several, of which a completion must give any, stay a JSON list, which `alternatives` reads. Raises ValueError
    for a list without an answer.
    """
    answers = _listed(value)
    if answers is None:
        return value if isinstance(value, str) else json.dumps(_whole(value), ensure_ascii=False)
    answers = [*dict.fromkeys(filter(str.strip, answers))]
    if not answers:
        raise ValueError("a list without an answer")
    return answers[0] if len(answers) == 1 else json.dumps(answers, ensure_ascii=False)


def alternatives(text: str) -> list[str]:
    """The answers of which any one will do: several for a JSON list of texts, else the text itself."""
    return _listed(text) or [text]


def _listed(value: object) -> list[str] | None:
    """The texts and numbers of a list, or of a text that spells one, without null and nan; else None."""
    if isinstance(value, str):  # [1, 2] is an interval
        value = spelled(value) if re.match(r"\s*\[\s*(?:[\"']|null|None|-?[\d.]+\s*\])", value) else None
    if not isinstance(value, list):
        return None
    items = [item for item in value if item is not None and item == item]  # nan equals nothing
    are_answers = all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in items)
    return [str(_whole(item)) for item in items] if are_answers else None


def _whole(value: object) -> object:
    """12 for 12.0: a column of whole numbers with a gap is one of floats, in pandas."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def spelled(text: str) -> object:
    """The value that the text spells in JSON, Python or NumPy's print, else None. LaTeX's single backslash is kept."""
    text = re.sub(r"(?<=['\"])\s+(?=['\"])", ", ", text)  # NumPy writes no commas
    commands = r"n(?:eq?|eg|abla|u|i|ot|otin)\b|(?!n|u[0-9a-fA-F]{4})[A-Za-z]"  # not a new line or \u00e9
    text = re.sub(rf"(?<!\\)\\(?={commands})", r"\\\\", text)
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    return None
