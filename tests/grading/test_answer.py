"""Which part of a completion is its final answer: one rule, whatever stands before the mark and behind it."""

import json
import time
from pathlib import Path

import pytest

from grading import Case
from grading.answer import read_answer
from grading.verifiers import load_verifier

CASES = [json.loads(line) for line in (Path(__file__).parent / "answer_cases.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["completion"])
def test_the_last_mark_counts(case):
    assert read_answer(case["completion"], case.get("prompt", "")) == case["read_as"]


def test_exact_takes_a_whole_text_without_a_mark():
    assert read_answer("Rome is the capital of Italy", unmarked="all") == "Rome is the capital of Italy"
    assert read_answer("<answer>Rome", unmarked="all") is None
    assert read_answer("<answer>*.*\n_._</answer>", unmarked="all") == "*.*\n_._", "a drawing is no emphasis"


def long_texts(k: int) -> list[str]:
    """Texts of about k kilobytes."""
    texts = ["<answer>" * 100 * k, "<answer>x</answer>" * 50 * k, "\\boxed{" * 100 * k, "\\boxed{1}, " * 50 * k]
    texts += ["answer is " * 100 * k, "The answer is $" + "$ $" * 300 * k, f"<think>a</think>{'a' * 1000 * k}</think>b"]
    texts += ["A, " * 300 * k, "#### " + "1" * 1000 * k, " " * 1000 * k + "x"]
    texts += [sign * 1000 * k for sign in "`($\\=_>"]
    texts += ["*a " * 300 * k, "***a **b *c " * 80 * k, "$a " * (300 * k + 1), "\\(" * 500 * k, "\n#" * 500 * k]
    return [*texts, "Final answer x" * 70 * k]


def least_seconds(verifier: str, text: str) -> float:
    """CPU time of the faster of two readings."""
    verify, seconds = load_verifier(verifier), []
    for _ in range(2):
        start = time.process_time()
        assert verify(Case(text, "4"))[0] == 0.0 or verifier == "think_format"
        seconds.append(time.process_time() - start)
    return min(seconds)


@pytest.mark.parametrize("text", range(len(long_texts(1))), ids=lambda i: long_texts(1)[i][:20].strip() or "blank")
def test_a_long_text_is_read_in_linear_time(text):
    """Sixteen times the text takes about 16 times as long; 256 times, if it were quadratic."""
    for verifier in ("math", "gsm8k", "exact", "format", "think_format"):
        short, long = (least_seconds(verifier, long_texts(k)[text]) for k in (16, 256))
        assert long < 64 * max(short, 0.005), verifier
