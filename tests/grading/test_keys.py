"""Answer keys that are lists: what they say, which completions meet them, which of them cannot be met."""

from pathlib import Path

import pytest

from grading import Case, key_text
from grading.score import RewardWorker
from helpers.runs import lines

CASES = lines(Path(__file__).with_name("key_cases.jsonl"))


@pytest.mark.parametrize("case", [case for case in CASES if "value" in case], ids=str)
def test_a_key_that_is_a_list_says_the_answers_in_it(case):
    if case["text"] is None:
        with pytest.raises(ValueError, match="a list without an answer"):
            key_text(case["value"])
    else:
        assert key_text(case["value"]) == case["text"]


@pytest.mark.parametrize("case", [case for case in CASES if "reward" in case], ids=str)
def test_one_of_several_answers_is_required(case):
    handle, key = RewardWorker(case["verifier"], None), key_text(case["key"])
    assert handle(("check", [Case("", key)])) == [None]
    assert handle(("grade", Case(case["completion"], key))).reward == case["reward"]


@pytest.mark.parametrize("case", [case for case in CASES if "problem" in case], ids=str)
def test_a_key_that_no_completion_can_meet_is_reported(case):
    (problem,) = RewardWorker(case["verifier"], None)(("check", [Case("", key_text(case["key"]))]))
    assert problem is None if case["problem"] is None else case["problem"] in problem
