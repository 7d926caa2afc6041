"""The built-in verifiers: which part of a completion is its final answer (one rule, whatever stands
before the mark and behind it), what a key that is a list says, and the score.
"""

import time
import timeit
from functools import partial
from pathlib import Path

import pytest

from grading import Case, key_text
from grading.answer import read_answer
from grading.score import RewardWorker
from grading.verifiers import load_verifier
from helpers.runs import lines

HERE = Path(__file__).parent
READ, KEYS, SCORED = (lines(HERE / f"{name}_cases.jsonl") for name in ("answer", "key", "verifier"))


@pytest.mark.parametrize("case", READ, ids=lambda case: case["completion"])
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
    """16 times the text takes about 16 times the time; a quadratic reader would take 256 times."""
    for name in ("math", "gsm8k", "exact", "format", "think_format"):
        verify = load_verifier(name)
        once, long = (  # seconds of this process, without the garbage of other tests
            min(timeit.repeat(partial(verify, Case(each, "4")), number=1, repeat=repeat, timer=time.process_time))
            for each, repeat in ((text[: len(text) // 16], 3), (text, 1))
        )
        assert long < 64 * max(once, 0.002), name  # below, the clock decides
        assert verify(Case(text, "4")).reward == 0.0 or name == "think_format"


@pytest.mark.parametrize("case", [case for case in KEYS if "value" in case], ids=str)
def test_a_key_that_is_a_list_says_the_answers_in_it(case):
    if case["text"] is None:
        pytest.raises(ValueError, key_text, case["value"]).match("a list without an answer")
    else:
        assert key_text(case["value"]) == case["text"]


@pytest.mark.parametrize("case", [case for case in KEYS if "value" not in case], ids=str)
def test_one_of_several_answers_is_required_and_a_key_that_none_can_meet_is_reported(case):
    handle, key = RewardWorker(case["verifier"], None), key_text(case["key"])
    (problem,) = handle(("check", [Case("", key, num_tokens=0, max_tokens=1)]))
    if case.get("problem"):
        assert case["problem"] in problem
    else:
        assert problem is None
    if "reward" in case:
        assert handle(("grade", Case(case["completion"], key))).reward == case["reward"]


def scored(verifier: str, completion: str, answer: str = "", **more: object) -> float:
    return load_verifier(verifier)(Case(completion, answer, **more)).reward


@pytest.mark.parametrize("case", SCORED, ids=lambda case: f"{case['verifier']} {case['completion'][:40]!r}")
def test_a_verifier_scores_a_completion_as_its_rule_says(case):
    assert scored(**{name: value for name, value in case.items() if name != "score"}) == case["score"]


def test_the_thinking_is_left_aside():
    assert scored("exact", "<think>1+1=2</think>2", " 2 ") == 1.0
    assert scored("exact", "<think>1+1=2</think>22", "2") == scored("exact", "", "2") == 0.0
    columns = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert scored("ifeval", "<think>a, b</think>no commas here", columns=columns) == 1.0
    assert scored("ifeval", "some, commas", columns=columns) == 0.0


def test_the_soft_overlong_punishment_is_dapos():
    for length, punishment in {1: 0.0, 16384: 0.0, 18432: -0.5, 20480: -1.0, 20481: -1.0}.items():
        limits = {"num_tokens": length, "max_tokens": 20480}
        assert scored("length", "", **limits, overlong_cache_tokens=4096) == punishment
        assert scored("length", "", **limits) == punishment, "by default the last fifth of the limit"
    pytest.raises(ValueError, scored, "length", "").match("needs num_tokens and max_tokens")
