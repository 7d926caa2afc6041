"""Which part of a completion is its final answer: what is stated, joined, taken back, and long texts."""

import json
import time
from pathlib import Path

import pytest

from grading.answer import read_answer, read_final_answer
from grading.verifiers import BUILT_IN, Case

CASES = [json.loads(line) for line in (Path(__file__).parent / "answer_cases.jsonl").read_text().splitlines()]


def test_the_final_answer_of_the_written_cases_is_the_one_that_a_reader_would_name():
    paid, missed = [], []
    for case in CASES:
        is_paid = BUILT_IN["math"].score(Case(case["completion"], case["answer"]))[0] == 1.0
        if is_paid != case["is_right"]:
            (paid if is_paid else missed).append((case["answer"], case["completion"]))
    assert not paid, "no wrong answer is paid"
    assert len(missed) <= 10, missed


@pytest.mark.parametrize(
    ("behind", "answer"),
    [
        (". No, that is wrong. The answer is 8.", "8"),
        (". Wait, actually it's 8.", "8"),
        (". Oops, that should be 8.", "8"),
        (". But wait, the question asks for the perimeter, which is 8.", "8"),
        (". 不对，应该是8。", "8"),
        (". That is not right.", None),
        (", or maybe 8", "7, 8"),
        (". Wait, let me verify: 2+5=7, yes.", "7"),
        (". Is there another solution? No.", "7"),
        (". Is this right? No, it is 8.", "8"),
        (". If we had added, the answer would be 8.", "7"),
        (". A common mistake is to add, which gives the wrong answer 8.", "7"),
        (". Note that $x=-7$ is not a valid solution.", "7"),
        (". " + "x " * 500 + "No, that is wrong.", "7"),  # too far away
    ],
)
@pytest.mark.parametrize("marked", ["\\boxed{7}", "<answer>7</answer>", "The answer is 7"])
def test_what_is_said_behind_an_answer_may_take_it_back(marked, behind, answer):
    assert read_answer(marked + behind) == answer


def test_a_choice_beside_a_boxed_value_is_read_with_it():
    assert read_answer("\\boxed{7}. Hence the correct option is (B).") == "(B) 7"


def test_a_final_answer_in_plain_text_is_taken_back_too():
    assert read_final_answer("\\boxed{Rome}. That is wrong.") is None
    assert read_final_answer("\\boxed{Rome}. That is the capital.") == "Rome"


@pytest.mark.parametrize("between", ["|", "vs", "---", ";", " ", "\\mid", "or", "\\text{ vs }", "$ *or* $", "\\\\"])
def test_boxes_that_are_joined_are_several_answers(between):
    assert read_answer(f"\\boxed{{3}} {between} \\boxed{{4}}") == "3, 4"


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("We get 28.", "28"),
        ("Result: 28", "28"),
        ("Answer 28", "28"),
        ("Thus $x+y = 28$.", "28"),
        ("Thus $2x = 28$.", "2x = 28"),
        ("The equation of the line is $x+y=28$.", "x+y=28"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("Final Answer: The final answer is $28$. I hope it is correct.", "$28$"),
        ("Hence there are 28 ways. I hope this helps!", "28 ways"),
        ("The length is 28 m.", "28 m"),
        ("The area is 25π.", "25π"),
        ("The answer is not 20 but 18.", "18"),
        ("#### 18 (since 9 - 5)", "18"),
        ("The correct option is (B).", "(B)"),
        ("option B is correct", "B"),
        ("So B is the answer.", "B"),
        ("B is not correct.", None),
        ("故选B。", "B"),
        ("所以小明有5个苹果。", "5"),
        ("It could be 7.", None),
    ],
)
def test_an_answer_without_tag_and_box_is_what_the_end_of_the_text_says(completion, answer):
    assert read_answer(completion) == answer


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 100_000,
        "<answer>x</answer>" * 50_000,
        "\\boxed{" * 100_000,
        "\\boxed{1}, " * 50_000,
        "No, that is wrong. " * 50_000,
        "\\boxed{1}" + "No, that is wrong. " * 50_000,
        "\\boxed{1}" + "\n- " * 300_000 + "\\boxed{2}",
        "\\boxed{1}" + "wait, " * 150_000 + "8",
        "A, " * 300_000,
        "答案" * 500_000,
        "1 or " * 200_000,
        "<think>a</think>" + "a" * 1_000_000 + "</think>b",
        "#### " + "1" * 1_000_000,
        "``" * 500_000,
        '"so the answer is 3 ' * 50_000,
    ],
    ids=lambda text: text[:20].strip(),
)
def test_a_text_of_a_megabyte_is_read_in_time_linear_in_its_length(text):
    for verifier in ("math", "gsm8k", "exact", "format", "think_format"):
        start = time.process_time()
        assert BUILT_IN[verifier].score(Case(text, "4"))[0] == 0.0 or verifier == "think_format"
        assert time.process_time() - start < 2.0, verifier
