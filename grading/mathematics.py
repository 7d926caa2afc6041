"""The verifiers `math`, `gsm8k` and `gsm8k_strict`: they compare the final answer with the row's as a value."""

from __future__ import annotations

import re
from fractions import Fraction

from grading import Case, Grade, spelled
from grading.answer import read_answer, visible_text
from grading.equality import canonical, check_key, equal, key_content
from grading.spelling import MAX_FORMULA, clean
from grading.values import parse_value
from grading.verifiers import shown, uniform


def verify_math(case: Case) -> Grade:
    """1.0 if the final answer (`answer.py`) equals the row's answer mathematically (`equality.py`); else 0.0."""
    answer = read_answer(case.completion, case.prompt)
    if answer is None:  # as when the keys of the data are checked
        _check_is_answer(case.answer)
        check_key(case.answer)
        return Grade(0.0)
    return Grade(float(equal(key_content(case.answer), answer)), answer=canonical(answer))


def _check_is_answer(key: str) -> None:
    """Raises ValueError for a key that is data: an object, or a list with more than numbers in it."""
    value = spelled(key) if key.lstrip().startswith(("[", "{")) else None
    if isinstance(value, (dict, list)) and re.search(r"[^-+\d.,eE\s\[\]]", key):
        raise ValueError(f"an object or a nested list, not an answer: {key[:80]!r}")


def verify_gsm8k(case: Case) -> Grade:
    """1.0 if the final answer is the key's number, which may stand after "####" as in the data; else 0.0.

    Of an answer in words ("18 eggs left over from 20") it is the first number. Without a mark it is the last number of
    the visible text. Several answers are incorrect.
    """
    key = _gsm8k_key(case.answer)
    completion = shown(case.completion)
    answer = read_answer(completion, case.prompt, unmarked="none")
    numbers = []
    if answer is None:
        visible = visible_text(completion, case.prompt) or ""
        if not re.search(r"\\f?box|<answer>", visible):
            numbers = _numbers(visible)[-1:]
    elif len(answer) <= MAX_FORMULA:
        if equal(str(key), answer):
            numbers = [key]
        elif not re.search("dozen|hundred|thousand|illion", answer) and parse_value(clean(answer))[0] != "list":
            numbers = _numbers(answer)[:1]
    return Grade(float(numbers == [key]), answer=str(numbers[0]) if numbers else None)


def _gsm8k_key(answer: str) -> Fraction:
    answer = uniform(answer)
    _check_is_answer(answer)
    if re.fullmatch(r"(?:(?:#### *)?-?\d[\d.,]*(?:, |$)){2,}", answer):
        raise ValueError(f"several numbers in the answer {answer[:80]!r}, but one is read; write them as a list")
    numbers = _numbers(answer.rpartition("####")[2])
    if not numbers:
        raise ValueError(f"no number in the answer {answer[:80]!r}")
    return numbers[-1]


def _numbers(text: str) -> list[Fraction]:
    text = uniform(re.sub(r"，(?!\d{3}(?!\d))", " ", text))  # a full-width comma parts clauses, or thousands
    text = re.sub(r"\\!|\{(,)\}", r"\1", text)
    numbers = re.findall(r"(?<![\d)}])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", text)
    return [Fraction(number.replace(",", "")) for number in numbers]


def verify_gsm8k_strict(case: Case) -> Grade:
    """1.0 if the last "#### number" within the last 300 characters is the key's, as text without commas; else 0.0.

    So does verl. "#### $18" and "#### 18.0" are not 18.
    """
    _gsm8k_key(case.answer)
    key = case.answer.rpartition("####")[2].strip().replace(",", "")
    if not re.fullmatch(r"-?\d+(?:\.\d+)?", key):
        raise ValueError(f"not a number alone, or alone after ####: the answer {case.answer[-80:]!r}")
    numbers = re.findall(r"#### (-?[0-9.,]+)", case.completion[-300:])
    answer = numbers[-1].replace(",", "") if numbers else None
    return Grade(float(answer == key), answer=answer)
