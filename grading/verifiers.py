"""The built-in verifiers: each says how good one completion is. A new one is a function and an entry in `BUILT_IN`.

`math`, `gsm8k`, `gsm8k_strict` and `exact` compare its final answer with the row's, `ifeval` checks instructions,
`format` and `think_format` check the tags, `length` the length. `score.py` adds them up, in processes that can be
killed: nothing here minds the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from grading import Case, spelled
from grading.answer import read_answer, visible_text
from grading.equality import canonical, equal, key_content, key_problem
from grading.ifeval import follows_instructions, read_instructions
from grading.values import MAX_FORMULA, SCALES, clean, parse_value

Verdict = tuple[float, str | None]  # the score and, from a verifier that reads one, the final answer


@dataclass(frozen=True)
class Verifier:
    score: Callable[[Case], Verdict]
    key_problem: Callable[[Case], str | None] = lambda case: None  # why its answer key cannot be used, in a few words


# Answers --------------------------------------------------------------------------------------------------------------


def verify_exact(case: Case) -> Verdict:
    """1.0 if the final answer, or without a mark the whole visible text, equals the row's as text; else 0.0."""
    found = read_answer(case.completion, unmarked="all")
    return float(found == case.answer.strip()), found


def _exact_key_problem(case: Case) -> str | None:
    return None if case.answer.strip() else "the answer is blank"


def verify_math(case: Case) -> Verdict:
    """1.0 if the final answer (`answer.py`) equals the row's answer mathematically (`equality.py`); else 0.0."""
    found = read_answer(case.completion)
    if found is None:
        return 0.0, None
    return float(equal(key_content(case.answer), found)), canonical(found)


def _math_key_problem(case: Case) -> str | None:
    return _no_answer(case.answer) or key_problem(case.answer)


def _no_answer(key: str) -> str | None:
    """Why a key is data and no answer, or None: an object, or a list with more than numbers in it."""
    value = spelled(key) if key.lstrip()[:1] in ("[", "{") else None
    if isinstance(value, dict) or (isinstance(value, list) and re.search(r"[^-+\d.,eE\s\[\]]", key)):
        return f"an object or a nested list, not an answer: {key[:80]!r}"
    return None


def verify_gsm8k(case: Case) -> Verdict:
    """1.0 if the final answer is the key's number, which may stand after "####" as in the data; else 0.0.

    Of an answer in words ("18 eggs left over from 20") it is the first number. Without a mark it is the last number of
    the visible text. Several answers are incorrect.
    """
    found, key = read_answer(case.completion, unmarked="none"), _gsm8k_key(case)
    if found is None:
        visible = visible_text(case.completion) or ""
        numbers = [] if re.search(r"\\f?box|<answer>", visible) else _numbers(visible)[-1:]
    elif len(found) > MAX_FORMULA or re.search("|".join(SCALES), found) or parse_value(clean(found))[0] == "list":
        numbers = []
    else:
        numbers = _numbers(found)[:1]
    is_equal = found is not None and len(found) <= MAX_FORMULA and equal(str(key), found)
    value = key if is_equal else numbers[0] if numbers else None
    return float(value is not None and value == key), None if value is None else str(value)


def _gsm8k_key(case: Case) -> Fraction | None:
    return next(iter(_numbers(case.answer.rpartition("####")[2])[-1:]), None)


def _numbers(text: str) -> list[Fraction]:
    plain = text.replace("\\!", "").replace("{,}", ",")
    found = re.findall(r"(?<![\d)}])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", plain)
    return [Fraction(each.replace(",", "")) for each in found]


def _gsm8k_key_problem(case: Case) -> str | None:
    if re.fullmatch(r"(?:(?:#### *)?-?\d[\d.,]*(?:, |$)){2,}", case.answer):
        return f"several numbers in the answer {case.answer[:80]!r}, but one is read; give --list_answers any"
    no_number = f"no number in the answer {case.answer[:80]!r}" if _gsm8k_key(case) is None else None
    return _no_answer(case.answer) or no_number


def verify_gsm8k_strict(case: Case) -> Verdict:
    """1.0 if the last "#### number" within the last 300 characters is the key's, as text without commas; else 0.0.

    So does verl. "#### $18" and "#### 18.0" are not 18.
    """
    found = re.findall(r"#### (-?[0-9.,]+)", case.completion[-300:])
    answer = found[-1].replace(",", "") if found else None
    return float(answer == _strict_key(case)), answer


def _strict_key(case: Case) -> str:
    return case.answer.rpartition("####")[2].strip().replace(",", "")


def _strict_key_problem(case: Case) -> str | None:
    if problem := _gsm8k_key_problem(case):
        return problem
    if re.fullmatch(r"-?\d+(?:\.\d+)?", _strict_key(case)):
        return None
    return f"not a number alone, or alone after ####: the answer {case.answer[-80:]!r}"


def verify_ifeval(case: Case) -> Verdict:
    """1.0 if the completion, without its thinking, follows all instructions of its row (`ifeval.py`); else 0.0."""
    text = visible_text(case.completion)
    if text is None:
        return 0.0, None
    return float(all(follows_instructions(text, read_instructions(case.answer, case.columns)))), None


def _ifeval_key_problem(case: Case) -> str | None:
    try:
        read_instructions(case.answer, case.columns)
    except ValueError as error:
        return str(error)
    return None


# Form -----------------------------------------------------------------------------------------------------------------


def verify_format(case: Case) -> Verdict:
    """1.0 if the completion is `<think>...</think><answer>...</answer>` and nothing else, each tag once; else 0.0.

    Neither may be blank. A prompt that ends with `<think>` (as QwQ's chat template does) has opened the first tag: then
    the completion must not open it again.
    """
    thought, rest = _thought_and_rest(case)
    is_tagged = rest.startswith("<answer>") and rest.endswith("</answer>")
    inside = rest.removeprefix("<answer>").removesuffix("</answer>")
    has_tags = re.search(r"</?(?:think|answer)>", thought + " " + inside)
    return float(is_tagged and not has_tags and _is_visible(thought) and _is_visible(inside)), None


def verify_think_format(case: Case) -> Verdict:
    """1.0 if the completion is `<think>...</think>` and then some text, each tag once; else 0.0. Else as `format`."""
    thought, rest = _thought_and_rest(case)
    has_tags = re.search(r"</?think>", thought + " " + rest)
    return float(not has_tags and _is_visible(thought) and _is_visible(rest)), None


def _thought_and_rest(case: Case) -> tuple[str, str]:
    """What stands before and behind the first `</think>`; nothing if the thinking is not opened as it must be."""
    text = case.completion.strip()
    if not case.prompt.rstrip().endswith("<think>"):
        if not text.startswith("<think>"):
            return "", ""
        text = text.removeprefix("<think>")
    thought, _, rest = text.partition("</think>")
    return thought, rest.strip()


def _is_visible(text: str) -> bool:
    return any(character.isprintable() and not character.isspace() for character in text)


def verify_length(case: Case) -> Verdict:
    """DAPO's soft overlong punishment (eq. 13): 0 up to max - cache tokens, then linearly down to -1 at max."""
    if case.num_tokens is None or case.max_tokens is None:
        raise ValueError("the reward `length` needs num_tokens and max_tokens")
    cache_tokens = case.overlong_cache_tokens or max(case.max_tokens // 5, 1)
    return min(0.0, max(-1.0, (case.max_tokens - cache_tokens - case.num_tokens) / cache_tokens)), None


BUILT_IN = {
    "math": Verifier(verify_math, _math_key_problem),
    "gsm8k": Verifier(verify_gsm8k, _gsm8k_key_problem),
    "gsm8k_strict": Verifier(verify_gsm8k_strict, _strict_key_problem),
    "ifeval": Verifier(verify_ifeval, _ifeval_key_problem),
    "exact": Verifier(verify_exact, _exact_key_problem),
    "format": Verifier(verify_format),
    "think_format": Verifier(verify_think_format),
    "length": Verifier(verify_length),
}
