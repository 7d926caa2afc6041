"""Which part of a completion is its final answer: one rule, whatever stands before the mark and behind it."""

import time
import timeit
from functools import partial
from pathlib import Path

import pytest

from grading import Case
from grading.answer import read_answer
from grading.verifiers import load_verifier
from helpers.runs import lines

CASES = lines(Path(__file__).with_name("answer_cases.jsonl"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["completion"])
def test_the_last_mark_counts(case):
    assert read_answer(case["completion"], case.get("prompt", "")) == case["read_as"]


def test_exact_takes_a_whole_text_without_a_mark():
    assert read_answer("Rome is the capital of Italy", unmarked="all") == "Rome is the capital of Italy"
    assert read_answer("<answer>Rome", unmarked="all") is None
    assert read_answer("<answer>*.*\n_._</answer>", unmarked="all") == "*.*\n_._", "a drawing is no emphasis"


LONG = ["<answer>" * 100_000, "<answer>x</answer>" * 50_000, "\\boxed{" * 100_000, "\\boxed{1}, " * 50_000]
LONG += ["answer is " * 100_000, "The answer is $" + "$ $" * 300_000, f"<think>a</think>{'a' * 1_000_000}</think>b"]
LONG += ["A, " * 300_000, "#### " + "1" * 1_000_000, " " * 1_000_000 + "x", *(sign * 1_000_000 for sign in "`($\\=_>")]
LONG += ["*a " * 300_000, "***a **b *c " * 80_000, "$a " * 300_001, "\\(" * 500_000, "\n#" * 500_000]
LONG += ["Final answer x" * 70_000]


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:20].strip() or "blank")
def test_a_megabyte_of_text_is_read_in_linear_time(text):
    """16 times the text takes about 16 times the time; where a reader is quadratic, it would take 256 times."""
    for name in ("math", "gsm8k", "exact", "format", "think_format"):
        verify = load_verifier(name)
        once, long = (  # the least of three: seconds of this process, without the garbage of other tests
            min(timeit.repeat(partial(verify, Case(each, "4")), number=1, repeat=3, timer=time.process_time))
            for each in (text[: len(text) // 16], text)
        )
        assert long < 64 * max(once, 0.002), name  # below, the clock decides
        assert verify(Case(text, "4"))[0] == 0.0 or name == "think_format"
