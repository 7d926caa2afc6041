"""The built-in verifiers: each looks at one completion and says how good it is.

`math`, `gsm8k` and `exact` compare its final answer with the row's, `ifeval` checks instructions, `format` and `think_format` the tags,
`soft_overlong` the length. `reward.py` adds them up, in processes that can be killed: nothing here minds the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from grading.answer import read_answer, read_final_answer, visible_text
from grading.ifeval import follows_instructions, read_instructions
from grading.math_equal import canonical, equal, key_text
from grading.math_equal import key_problem as math_key_problem
from grading.math_text import clean
from grading.math_value import MAX_FORMULA, parse_value


@dataclass(frozen=True)
class Case:
    """One completion to be graded, with all that a verifier may want to know."""

    completion: str  # without special tokens
    answer: str
    columns: dict[str, object] = field(default_factory=dict)  # the whole data row
    prompt: str = ""  # as the model saw it, template included
    num_tokens: int | None = None  # of the completion
    max_tokens: int | None = None  # that it could have had
    is_truncated: bool = False  # it ended at max_tokens, not by itself
    where: str = ""  # names the row in the log


Verifier = Callable[[Case], tuple[float, str | None]]  # score and, for verifiers that read one, the final answer

# Verifiers --------------------------------------------------------------------------------------------------------------------------


def verify_exact(case: Case) -> tuple[float, str | None]:
    """1.0 if the final answer equals the row's answer, character by character but for surrounding white space; else 0.0."""
    found = read_final_answer(case.completion)
    return float(found == case.answer.strip()), found


def verify_math(case: Case) -> tuple[float, str | None]:
    """1.0 if the final answer equals the row's answer mathematically (`math_equal.py`), read by the rules of `answer.py`; else 0.0."""
    found = read_answer(case.completion)
    if found is None:
        return 0.0, None
    return float(equal(key_text(case.answer), found)), canonical(found)


def verify_gsm8k(case: Case) -> tuple[float, str | None]:
    """1.0 if the final number is the key's, which may stand after "####" as in the data set; else 0.0.

    The final number is what `read_answer` finds; where that is no number, the last one of the visible text. Several answers: wrong.
    """
    found = parse_value(clean((read_answer(case.completion) or "")[:MAX_FORMULA]))
    value = (
        found[1]
        if found[0] == "number"
        else None
        if found[0] == "list"
        else _last_number(visible_text(case.completion))
    )
    return float(
        value is not None and value == _last_number(case.answer.rpartition("####")[2])
    ), None if value is None else str(value)


def _last_number(text: str | None) -> Fraction | None:
    found = re.findall(
        r"(?<![\d)}])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", (text or "").replace("\\!", "").replace("{,}", ",")
    )
    return Fraction(found[-1].replace(",", "")) if found else None


def verify_ifeval(case: Case) -> tuple[float, str | None]:
    """1.0 if the completion, thinking aside, follows all of its row's instructions (`ifeval.py`); else 0.0. Strict, per prompt."""
    text = visible_text(case.completion)
    return float(
        text is not None and all(follows_instructions(text, read_instructions(case.answer, case.columns)))
    ), None


def verify_format(case: Case) -> tuple[float, str | None]:
    """1.0 if the completion is `<think>...</think>` and `<answer>...</answer>` and nothing else, each tag once; else 0.0.

    A prompt that ends with `<think>` (QwQ's chat template does) has opened the first tag: then the completion must not open it again.
    """
    return float(_thinks_first(case, r"<answer>(?:(?!</?(?:think|answer)>).)+</answer>\s*")), None


def verify_think_format(case: Case) -> tuple[float, str | None]:
    """1.0 if the completion is `<think>...</think>` and then some text, each tag once; else 0.0. An opened prompt: as for `format`."""
    return float(_thinks_first(case, r"(?:(?!</?think>).)*\S(?:(?!</?think>).)*")), None


def _thinks_first(case: Case, rest: str) -> bool:
    text = case.completion.strip()
    if not case.prompt.rstrip().endswith("<think>"):
        if not text.startswith("<think>"):
            return False
        text = text.removeprefix("<think>")
    thought, closing, after = text.partition("</think>")
    return bool(
        closing and thought.strip() and "<think>" not in thought and re.fullmatch(rest, after.strip(), re.DOTALL)
    )


def soft_overlong(num_tokens: int, max_tokens: int, cache_tokens: int) -> float:
    """DAPO's soft overlong punishment (eq. 13 of the paper): 0 up to max - cache tokens, then linearly down to -1 at max."""
    return min(0.0, max(-1.0, (max_tokens - cache_tokens - num_tokens) / cache_tokens))


BUILT_IN: dict[str, Verifier] = {
    "math": verify_math,
    "gsm8k": verify_gsm8k,
    "ifeval": verify_ifeval,
    "exact": verify_exact,
    "format": verify_format,
    "think_format": verify_think_format,
}


def key_problem(verifier: str, answer: str, columns: dict[str, object]) -> str | None:
    """Why this verifier cannot grade against this answer key, in a few words; None if it can."""
    if verifier == "math":
        return math_key_problem(answer)
    if verifier == "gsm8k" and _last_number(answer.rpartition("####")[2]) is None:
        return f"no number in the answer {answer[:80]!r}"
    if verifier == "ifeval":
        try:
            read_instructions(answer, columns)
        except ValueError as error:
            return str(error)
    return None
