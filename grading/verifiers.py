"""The built-in verifiers: each says how good one completion is. A new one is a function and an entry in `BUILT_IN`.

`math`, `gsm8k`, `gsm8k_strict` and `exact` compare its final answer with the row's, `ifeval` checks
instructions, `format` and `think_format` check the tags, `length` the length. They raise
ValueError, in a few words, for a row whose answer key cannot be used. `score.py` adds them up, in
processes that can be killed: nothing here minds the time.
"""

from __future__ import annotations

import re
from fractions import Fraction

from grading import Case, spelled
from grading.answer import opens_thought, plain, read_answer, visible_text
from grading.equality import canonical, check_key, equal, key_content
from grading.ifeval import follows_instructions, read_instructions
from grading.values import MAX_FORMULA, SCALES, clean, parse_value

Verdict = tuple[float, str | None]  # the score and, from a verifier that reads one, the final answer

# Answers --------------------------------------------------------------------------------------------------------------


def verify_exact(case: Case) -> Verdict:
    """1.0 if the final answer, or without a mark the whole visible text, is the row's, emphasized or not; else 0.0."""
    if not case.answer.strip():
        raise ValueError("the answer is blank")
    answer = read_answer(case.completion, case.prompt, unmarked="all")
    return float(answer is not None and case.answer.strip() in (answer, plain(answer))), answer


def verify_math(case: Case) -> Verdict:
    """1.0 if the final answer (`answer.py`) equals the row's answer mathematically (`equality.py`); else 0.0."""
    answer = read_answer(case.completion, case.prompt)
    if answer is None:  # as when the keys of the data are checked
        _check_is_answer(case.answer)
        check_key(case.answer)
        return 0.0, None
    return float(equal(key_content(case.answer), answer)), canonical(answer)


def _check_is_answer(key: str) -> None:
    """Raises ValueError for a key that is data: an object, or a list with more than numbers in it."""
    value = spelled(key) if key.lstrip()[:1] in ("[", "{") else None
    if isinstance(value, dict) or (isinstance(value, list) and re.search(r"[^-+\d.,eE\s\[\]]", key)):
        raise ValueError(f"an object or a nested list, not an answer: {key[:80]!r}")


def verify_gsm8k(case: Case) -> Verdict:
    """1.0 if the final answer is the key's number, which may stand after "####" as in the data; else 0.0.

    Of an answer in words ("18 eggs left over from 20") it is the first number. Without a mark it is the last number of
    the visible text. Several answers are incorrect.
    """
    key = _gsm8k_key(case.answer)
    answer = read_answer(case.completion, case.prompt, unmarked="none")
    numbers: list[Fraction] = []
    if answer is None:
        visible = visible_text(case.completion, case.prompt) or ""
        if not re.search(r"\\f?box|<answer>", visible):
            numbers = _numbers(visible)[-1:]
    elif len(answer) <= MAX_FORMULA:
        if equal(str(key), answer):
            numbers = [key]
        elif not re.search("|".join(SCALES), answer) and parse_value(clean(answer))[0] != "list":
            numbers = _numbers(answer)[:1]
    return float(numbers == [key]), str(numbers[0]) if numbers else None


def _gsm8k_key(answer: str) -> Fraction:
    _check_is_answer(answer)
    if re.fullmatch(r"(?:(?:#### *)?-?\d[\d.,]*(?:, |$)){2,}", answer):
        raise ValueError(f"several numbers in the answer {answer[:80]!r}, but one is read; give --list_answers any")
    numbers = _numbers(answer.rpartition("####")[2])
    if not numbers:
        raise ValueError(f"no number in the answer {answer[:80]!r}")
    return numbers[-1]


def _numbers(text: str) -> list[Fraction]:
    text = text.replace("\\!", "").replace("{,}", ",")
    numbers = re.findall(r"(?<![\d)}])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", text)
    return [Fraction(number.replace(",", "")) for number in numbers]


def verify_gsm8k_strict(case: Case) -> Verdict:
    """1.0 if the last "#### number" within the last 300 characters is the key's, as text without commas; else 0.0.

    So does verl. "#### $18" and "#### 18.0" are not 18.
    """
    _gsm8k_key(case.answer)
    key = case.answer.rpartition("####")[2].strip().replace(",", "")
    if not re.fullmatch(r"-?\d+(?:\.\d+)?", key):
        raise ValueError(f"not a number alone, or alone after ####: the answer {case.answer[-80:]!r}")
    numbers = re.findall(r"#### (-?[0-9.,]+)", case.completion[-300:])
    answer = numbers[-1].replace(",", "") if numbers else None
    return float(answer == key), answer


def verify_ifeval(case: Case) -> Verdict:
    """1.0 if the completion, without its thinking, follows all instructions of its row (`ifeval.py`); else 0.0."""
    instructions, text = read_instructions(case.answer, case.columns), visible_text(case.completion, case.prompt)
    return float(text is not None and all(follows_instructions(text, instructions))), None


# Form -----------------------------------------------------------------------------------------------------------------


def verify_format(case: Case) -> Verdict:
    """1.0 if the completion is `<think>...</think><answer>...</answer>` and nothing else, each tag once; else 0.0.

    Neither may be blank. A prompt that ends with `<think>` (as QwQ's chat template does) has opened the first tag: then
    the completion must not open it again.
    """
    return float(_has_form(case, "<answer>(.*)</answer>", "think|answer")), None


def verify_think_format(case: Case) -> Verdict:
    """1.0 if the completion is `<think>...</think>` and then some text, each tag once; else 0.0. Else as `format`."""
    return float(_has_form(case, "(.*)", "think")), None


def _has_form(case: Case, ending: str, tags: str) -> bool:
    """Whether the completion is a thought and this ending, neither blank and without any other of these tags."""
    opened = "<think>" if opens_thought(case.prompt) else ""
    thought, _, rest = (opened + case.completion.strip()).partition("</think>")
    match = re.fullmatch(ending, rest.strip(), re.DOTALL)
    if not match or not thought.startswith("<think>"):
        return False
    for part in (thought.removeprefix("<think>"), match[1]):
        is_blank = not any(c.isprintable() and not c.isspace() for c in part)
        if is_blank or re.search(rf"</?(?:{tags})>", part):
            return False
    return True


def verify_length(case: Case) -> Verdict:
    """DAPO's soft overlong punishment (eq. 13): 0 up to max - cache tokens, then linearly down to -1 at max."""
    if case.num_tokens is None or case.max_tokens is None:
        raise ValueError("the reward `length` needs num_tokens and max_tokens")
    cache_tokens = case.overlong_cache_tokens or max(case.max_tokens // 5, 1)
    return min(0.0, max(-1.0, (case.max_tokens - cache_tokens - case.num_tokens) / cache_tokens)), None


BUILT_IN = {
    "math": verify_math,
    "gsm8k": verify_gsm8k,
    "gsm8k_strict": verify_gsm8k_strict,
    "ifeval": verify_ifeval,
    "exact": verify_exact,
    "format": verify_format,
    "think_format": verify_think_format,
    "length": verify_length,
}
