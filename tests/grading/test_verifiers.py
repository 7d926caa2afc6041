"""What each built-in verifier says of a completion."""

from pathlib import Path

import pytest

from grading import Case
from grading.verifiers import load_verifier
from helpers.runs import lines


def scored(verifier: str, completion: str, answer: str = "", **more: object) -> float:
    return load_verifier(verifier)(Case(completion, answer, **more))[0]


def test_exact_compares_the_whole_final_answer():
    assert scored("exact", "<think>1+1=2</think>2", " 2 ") == 1.0
    assert scored("exact", "<think>1+1=2</think>22", "2") == 0.0
    assert scored("exact", "", "2") == 0.0


CASES = lines(Path(__file__).with_name("verifier_cases.jsonl"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['verifier']} {case['completion'][:40]!r}")
def test_a_verifier_scores_a_completion_as_its_rule_says(case):
    assert scored(**{name: value for name, value in case.items() if name != "score"}) == case["score"]


def test_the_soft_overlong_punishment_is_dapos():
    punishments = {1: 0.0, 16384: 0.0, 18432: -0.5, 20480: -1.0, 20481: -1.0}
    for length, punishment in punishments.items():
        limits = {"num_tokens": length, "max_tokens": 20480}
        assert scored("length", "", **limits, overlong_cache_tokens=4096) == punishment
        assert scored("length", "", **limits) == punishment, "by default the last fifth of the limit"
    with pytest.raises(ValueError, match="needs num_tokens and max_tokens"):
        scored("length", "")


def test_ifeval_leaves_the_thinking_aside():
    columns = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert scored("ifeval", "<think>a, b</think>no commas here", columns=columns) == 1.0
    assert scored("ifeval", "some, commas", columns=columns) == 0.0
