"""The mathematical verifier: written cases, and completions that must never hang or crash it.

`math_cases.jsonl` holds 2,978 of 4,170 cases that several authors wrote: those that the rule of `answer.py` decides. In
the other 1,192 the verdict depends on prose: on an answer without a mark, on a hedge before it, a retraction behind it.
"""

import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flags import Grading
from grading import Case
from grading.equality import equal
from helpers.grades import graded
from helpers.runs import ROOT
from reward import Grader


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (Path(__file__).parent / name).read_text().splitlines()]


CASES = read("math_cases.jsonl")
TIMEOUT = 2.0


@pytest.fixture(scope="module")
def grader():
    grader = Grader(Grading("math", reward_timeout=TIMEOUT), num_workers=2)
    yield grader
    grader.close()


def test_the_written_cases_are_graded_as_a_careful_reader_would(grader):
    grades = graded(grader, [Case(case["completion"], case["answer"]) for case in CASES])
    wrong = [(case, grade) for case, grade in zip(CASES, grades, strict=True) if grade.is_correct != case["is_right"]]
    paid = [case for case, _ in wrong if not case["is_right"]]
    assert len(paid) <= 1, paid
    assert len(wrong) <= 0.033 * len(CASES), [(case["answer"], case["completion"][-80:]) for case, _ in wrong]
    failed = Counter(case["kind"] for case, grade in zip(CASES, grades, strict=True) if grade.is_failed)
    assert set(failed) <= {"hostile_size"} and failed["hostile_size"] <= 3, failed


def test_every_key_of_the_written_cases_can_be_used(grader):
    assert not grader.bad_keys([Case("", answer) for answer in {case["answer"] for case in CASES}])


HOSTILE = ["9^{9^{9}}", "9^{9^{9^{9}}}", "99999999!", "((10!)!)!", "\\binom{99999999}{5000000}", "(x+1)^{100000}"]
HOSTILE += ["(" * 500_000 + "1" + ")" * 500_000, "9" * 100_000, "\0" * 1000 + "\ud800"]


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda text: text[:20])
@pytest.mark.parametrize("key", ["4", "\\frac{7}{2}"])
def test_hostile_answers_are_wrong_and_cost_at_most_their_time(answer, key, grader):
    start = time.monotonic()
    hostile, fine = graded(grader, [Case(f"\\boxed{{{each}}}", key) for each in (answer, key)])
    assert time.monotonic() - start < 10 * (TIMEOUT + 2), "a guard: it hangs nobody"
    assert not hostile.is_correct and hostile.reward == 0.0
    assert fine.is_correct


@pytest.mark.parametrize("case", read("equal_cases.jsonl"), ids=lambda case: f"{case['key']} | {case['answer']}")
def test_what_reviewers_slipped_past_the_comparison(case):
    assert equal(case["key"], case["answer"]) == case["is_equal"]


ROWS = re.findall(r"^\| `(.+)` \| `(.+)` \| (yes|no)\b", (ROOT / "docs/rewards.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("key", "answer", "verdict"), ROWS)
def test_the_table_of_the_page_says_what_equals_a_key(key, answer, verdict):
    assert equal(key, answer) == (verdict == "yes")


def test_the_table_of_the_page_is_read():
    assert len(ROWS) > 25


PIECES = st.sampled_from(
    ["\\boxed{", "<answer>", "</answer>", "<think>", "</think>", "\\frac", "\\sqrt", "\\pm", "\\cup", "\\text{", "or",
     "the answer is ", "####", "99", "\\infty", "\\begin{pmatrix}", "\\\\", "\\end{pmatrix}", "\\left", "\\right", "½",
     "\\int", "\\sum_", "\\log", "\\le", "and", *"{}^_$()[],=!9x&%°<\n .-/:"]
)  # fmt: skip
COMPLETIONS = st.lists(PIECES, max_size=40).map("".join) | st.lists(PIECES | st.text(max_size=5)).map("".join)


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(completions=st.lists(st.tuples(COMPLETIONS, st.booleans()), min_size=4, max_size=4))
def test_generated_completions_cannot_hang_or_crash_the_grader(completions, grader):
    """No generated completion hangs the grader, crashes it or escapes the time-out."""
    texts = [f"\\boxed{{{text}}}" if is_boxed else text for text, is_boxed in completions]
    begin = time.monotonic()
    grades = graded(grader, [Case(text, "\\frac{7}{2}") for text in texts])
    assert time.monotonic() - begin < 10 * (2 * TIMEOUT + 2), "a guard, for two workers: it hangs nobody"
    for text, grade in zip(texts, grades, strict=True):
        assert grade.status in ("ok", "timeout"), (text, grade.status)
