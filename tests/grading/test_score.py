"""From the text of `--reward` to a grade: its terms, functions of one's own, and what a worker answers."""

import json

import pytest

from grading import Case, Grade, mathematics, score, verifiers
from grading.pool import Pool
from grading.score import RewardWorker, parse_reward


def graded(spec: str, *cases: Case) -> list[Grade]:
    handle = RewardWorker(spec, None)
    return [handle(("grade", case)) for case in cases]


def test_a_weighted_sum_adds_up_and_names_its_parts():
    completion = "<think>a</think>\n<answer>1/2</answer>"
    (grade,) = graded("math:2,format:0.5,length", Case(completion, "0.5", num_tokens=95, max_tokens=100))
    assert grade.parts == {"math": 1.0, "format": 1.0, "length": -0.75}
    assert grade.reward == 2 + 0.5 - 0.75 and grade.status == "ok"
    assert grade.is_correct and grade.answer == "1/2"


def test_the_verifier_of_a_row_is_the_one_that_its_column_names():
    rows = [{"dataset": name} for name in ("gsm8k", "MATH", "ifeval", "poems")]
    keys = ["#### 4", "(x+1)^2", json.dumps({"func_name": "validate_no_commas"}), "4"]
    completions = ["2+2 is 4", "\\boxed{x^2+2x+1}", "a, b", "4"]
    cases = [Case(*each) for each in zip(completions, keys, rows, strict=True)]
    assert [grade.reward for grade in graded("@dataset", *cases[:3])] == [1.0, 1.0, 0.0]
    problems = RewardWorker("@dataset", None)(("check", cases))
    assert problems[:3] == [None] * 3 and "'poems', which names no verifier" in problems[3]


RESULT = "{'reward': %s, 'brevity': %s, 'exact': 9.0}"
TWO_FUNCTIONS = f"""
def one(completion):
    return {RESULT % (0.5, 1.0)}

def all(completions):
    return [{RESULT % (1.0, 2.0)}] * len(completions)
"""


@pytest.mark.parametrize("first", range(3))
def test_sub_scores_stay_apart_and_the_first_verifier_says_what_is_correct(first, tmp_path):
    """A sub-score hides neither a verifier's score nor another function's sub-score."""
    (tmp_path / "own.py").write_text(TWO_FUNCTIONS)
    one, all_ = f"{tmp_path}/own.py:one", f"{tmp_path}/own.py:all"
    (grade,) = graded(f"{one},exact", Case("4", "4"))
    assert grade.parts == {one: 0.5, "brevity": 1.0, f"{one}/exact": 9.0, "exact": 1.0}
    names = [one, all_, "exact"]
    names.insert(0, names.pop(first))
    handle = RewardWorker(",".join(names), None)
    grades = [handle(("compare", [Case("5", "4")]))[0], handle(("grade", Case("5", "4")))]
    for each in (grades, grades[::-1]):
        grade = score.add_up(each, handle.weights)
        assert grade.reward == 1.5 and grade.score == [0.5, 1.0, 0.0][first]
        assert grade.is_correct == (first == 1)
        assert grade.parts == {
            one: 0.5, "exact": 0.0, all_: 1.0,
            f"{one}/brevity": 1.0, f"{one}/exact": 9.0, f"{all_}/brevity": 2.0, f"{all_}/exact": 9.0,
        }  # fmt: skip


@pytest.mark.parametrize(("spec", "words"), [
    ("exakt", "neither built in .math, gsm8k"), ("math:x", "weight 'x' of math"), ("math:0", "weight '0' of math"),
    ("math,,format", "'' is neither built in"), ("math,math:2", "twice"), ("missing.py:score", "does not exist"),
])  # fmt: skip
def test_a_wrong_reward_text_is_explained_before_loading(spec, words):
    pytest.raises((ValueError, FileNotFoundError), parse_reward, spec).match(words)


@pytest.mark.parametrize(("code", "words"), [
    ("raise SystemExit(2)\n", "SystemExit: 2"), ("def score(:\n", "SyntaxError"),
    ("import os\nos._exit(5)\n", "the workers end while they are loading"),
])  # fmt: skip
def test_a_reward_file_that_cannot_be_loaded_says_why(code, words, tmp_path):
    (tmp_path / "my_reward.py").write_text(code)
    pool = Pool("grading.score:RewardWorker", (f"{tmp_path}/my_reward.py:score", None), 1, 60.0)
    pool.submit(0, ("inputs", None))
    pytest.raises(ValueError, pool.collect).match(words)


@pytest.mark.parametrize("verdict", [True, False])
def test_a_broken_dependency_is_found_at_the_start(verdict, monkeypatch):
    monkeypatch.setattr(mathematics, "equal", lambda key, answer: verdict)
    for spec in ("math", "format:0.1,math", "@dataset"):
        pytest.raises(ValueError, RewardWorker, spec, None).match("math-verify or SymPy is broken")
    RewardWorker("gsm8k", None)


def test_a_fault_of_a_verifier_is_no_key_that_cannot_be_used(monkeypatch):
    monkeypatch.setattr(verifiers, "verify_exact", lambda case: {"x": (1.0, None)}[case.answer])
    pytest.raises(KeyError, graded, "exact", Case("x", '["a", "x"]'))
