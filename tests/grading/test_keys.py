"""Answer keys that are lists."""

import pytest

from grading.keys import alternatives, key_text
from grading.score import Handler
from grading.verifiers import Case


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("7", "7"),
        (7, "7"),
        (0.5, "0.5"),
        (["7"], "7"),
        ([7], "7"),
        ('["7"]', "7"),
        ("['\\frac12']", "\\frac12"),
        (r"['\\frac12']", r"\frac12"),
        (r'["\sqrt{2}"]', r"\sqrt{2}"),
        (r'["\\sqrt{2}"]', r"\sqrt{2}"),
        (["7", " ", "7"], "7"),
        ("[1, 2]", "[1, 2]"),  # an interval
        ("[x, y]", "[x, y]"),
        ('["7"', '["7"'),  # no list
        ({"a": 1}, '{"a": 1}'),
        ([{"a": 1}], '[{"a": 1}]'),  # instructions, say
        (["7", "8"], '["7", "8"]'),
        ("['7', '8']", '["7", "8"]'),
    ],
)
def test_a_list_with_one_answer_is_that_answer(value, text):
    assert key_text(value) == text
    assert alternatives(text) == (["7", "8"] if "8" in text else [text])


def test_all_of_several_answers_are_one_list():
    assert key_text(["7", "-7"], "all") == "7, -7"
    assert key_text(["7"], "all") == "7"


@pytest.mark.parametrize("value", [[], [""], "['']"])
def test_a_list_without_an_answer_is_none(value):
    with pytest.raises(ValueError, match="a list without an answer"):
        key_text(value)


@pytest.mark.parametrize(
    ("verifier", "completion"),
    [("math", "\\boxed{1/2}"), ("exact", "<answer>0.5</answer>"), ("gsm8k", "it is 8"), ("gsm8k_strict", "#### 8")],
)
def test_any_of_several_answers_is_correct(verifier, completion):
    keys = '["7", "0.5"]' if verifier in ("math", "exact") else '["7", "8"]'
    handle = Handler(verifier, None)
    assert handle(("grade", Case(completion, keys))).reward == 1.0
    assert handle(("grade", Case("\\boxed{9}", keys))).reward == 0.0
    assert handle(("check", Case("", keys))) is None


def test_all_of_several_answers_must_be_given():
    key = key_text(["7", "-7"], "all")
    rewards = [Handler("math", None)(("grade", Case(text, key))).reward for text in ("\\boxed{-7, 7}", "\\boxed{7}")]
    assert rewards == [1.0, 0.0]


def test_a_row_is_usable_if_one_of_its_answers_is():
    handle = Handler("math", None)
    assert handle(("check", Case("", '["\\\\frac{1}{", "7"]'))) is None
    assert "cannot read" in handle(("check", Case("", '["\\\\frac{1}{", "\\\\frac{2}{"]')))
