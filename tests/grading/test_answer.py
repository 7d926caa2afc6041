"""Which part of a completion is its final answer: one rule, whatever stands before the mark and behind it."""

import time

import pytest

from grading import Case
from grading.answer import read_answer
from grading.verifiers import BUILT_IN


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>\\boxed{5}</think>So <answer>the result is \\boxed{4}</answer>", "4"),
        ("First \\boxed{3}. Then, doubling it, \\boxed{6}.", "6"),
        ("\\boxed{7}. No, that is wrong. The answer is 8.", "7"),
        ("It is \\boxed{3}, or maybe 4.", "3"),
        ("I am not sure. <answer>7</answer> I hope it is right", "7"),
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("18 apples.\n#### 18\nThat is all.", "18"),
        ("The final answer is $7$. I hope it is correct.", "$7$"),
        ("We add.\n**Answer:** $\\frac{1}{2}$", "$\\frac{1}{2}$"),
        ("The answer is 12 because 3*4 = 12.", "12"),
        ("The answer is $x = 1.5. y = 2$. Done.", "$x = 1.5. y = 2$"),
        ("The answer is 7. So \\boxed{8}", "8"),
        ("\\fbox{7}", "7"),
        ("\\boxed 5 is it", "5"),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right."),
        (" x = 5\n", "x = 5"),
        ("no solution", "no solution"),
        ("<think>a</think>1<think>b</think>2", "2"),
        ("the template opened it</think> 7", "7"),
        ("<think>never closed \\boxed{42}", None),
        ("<think>a</think>1<think>again", None),
        ("<answer>1</answer> and <answer>2", None),
        ("\\boxed{1} and \\boxed{2", None),
        ("<answer>\\boxed{4</answer>", None),
        ("\\boxed{}", None),
        ("Adding both sides we get $b = 4$.", None),
        ("There are 12 dozens, that makes 144 eggs", None),
        ("", None),
        ("<think></think>", None),
    ],
)
def test_the_last_mark_counts(completion, answer):
    assert read_answer(completion) == answer


def test_exact_takes_a_whole_text_without_a_mark():
    assert read_answer("Rome is the capital of Italy", unmarked="all") == "Rome is the capital of Italy"
    assert read_answer("<answer>Rome", unmarked="all") is None


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 100_000,
        "<answer>x</answer>" * 50_000,
        "\\boxed{" * 100_000,
        "\\boxed{1}, " * 50_000,
        "answer is " * 100_000,
        "The answer is $" + "$ $" * 300_000,
        "A, " * 300_000,
        "<think>a</think>" + "a" * 1_000_000 + "</think>b",
        "#### " + "1" * 1_000_000,
        "``" * 500_000,
    ],
    ids=lambda text: text[:20].strip(),
)
def test_a_text_of_a_megabyte_is_read_in_time_linear_in_its_length(text):
    for verifier in ("math", "gsm8k", "exact", "format", "think_format"):
        start = time.process_time()
        assert BUILT_IN[verifier].score(Case(text, "4"))[0] == 0.0 or verifier == "think_format"
        assert time.process_time() - start < 2.0, verifier
