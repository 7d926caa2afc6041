"""The trainer's side of the reward: what a `Grader` makes of rows and completions."""

import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from flags import Grading, Sampling
from gate.keys import check_keys
from grading import Case
from helpers.grades import graded
from helpers.runs import ROOT
from reward import Grade, Grader, workers_per_engine
from runtime.rank import RunError

FAILING = f"{Path(__file__).parent}/helpers/user_code.py:score"
ALONE = SimpleNamespace(engine_index=0, num_engines=1)


def bad_rows(grader: Grader, rows: list[SimpleNamespace], world: SimpleNamespace = ALONE) -> dict[int, str]:
    """The reasons of `check_keys`, by which it excludes rows; ends the grader."""
    try:
        return check_keys(grader, SimpleNamespace(rows=rows, exclude=lambda reasons: reasons), world)
    finally:
        grader.close()


def row(answer: str, opened: str = "", **columns: object) -> SimpleNamespace:
    return SimpleNamespace(answer=answer, columns=columns, where=f"the row of {answer}", text=f"{answer}? {opened}")


def test_completions_are_graded_with_their_row_and_prompt():
    grader = Grader(Grading("exact,length,format", overlong_cache_tokens=4), num_workers=1)
    rows = [row(answer, "<think>") for answer in "45"]
    on_finished = grader.callback_for(rows, Sampling(2, 1.0, max_completion_tokens=8))
    for b in (3, 0, 2, 1):
        on_finished(b, f"hm</think><answer>{4 + b % 2}</answer>", [7] * (5 + b % 2), False)
    grades = grader.collect_from_ranks()
    grader.close()
    scores = [[1.0, -0.25], [0.0, -0.5], [0.0, -0.25], [1.0, -0.5]]
    assert [list(grade.parts.values()) for grade in grades] == [[*each, 1.0] for each in scores]
    assert [grade.is_correct for grade in grades] == [True, False, False, True]


@pytest.mark.parametrize("truncated", ["score", "mask", "zero", "-10"])
def test_truncated_completions_are_graded_as_the_flag_says(truncated):
    grader = Grader(Grading("exact", truncated=truncated), num_workers=1)
    cut, whole = graded(grader, [Case("\\boxed{4}", "4", is_truncated=is_truncated) for is_truncated in (True, False)])
    grader.close()
    assert whole.reward == 1.0 and not cut.is_failed
    ungraded = {"zero": Grade(0.0, "truncated", {"exact": 0.0}), "-10": Grade(-10.0, "truncated", {"exact": 0.0})}
    assert cut == ungraded.get(truncated, whole)


SHARES = """def score(completions, num_tokens):
    total = sum(map(len, completions))
    return [{'reward': len(c) / total, 'tokens': n} for c, n in zip(completions, num_tokens)]
"""


def test_a_group_is_compared_when_its_last_completion_is_there(tmp_path):
    """Each completion gets its share of the group's characters."""
    (tmp_path / "my_reward.py").write_text(SHARES)
    grader = Grader(Grading(f"{tmp_path}/my_reward.py:score,exact:2"), num_workers=2)
    on_finished = grader.callback_for([row("4"), row("5")], Sampling(2, 1.0, max_completion_tokens=8))
    for _ in range(2):  # as in two steps
        for b, text in {3: "5", 0: "4", 2: "555", 1: "four"}.items():
            on_finished(b, text, [7] * b, False)
        grades = grader.collect_from_ranks()
        assert [grade.reward for grade in grades] == [1 / 5 + 2, 4 / 5, 3 / 4, 1 / 4 + 2]
        assert [grade.parts["tokens"] for grade in grades] == [0.0, 1.0, 2.0, 3.0]
        assert [grade.answer for grade in grades] == ["4", "four", "555", "5"]
        assert not any(grade.is_correct for grade in grades), "the first verifier of the sum says so: the shares"
    grader.close()


def test_a_reward_that_fails_from_the_start_ends_the_run():
    grader = Grader(Grading(FAILING, truncated="zero"), num_workers=1)
    on_finished = grader.callback_for([row("4")], Sampling(3, 1.0, 8))
    for _ in range(2):  # nothing is known yet of completions that are cut
        for b in range(3):
            on_finished(b, "raise", [7], True)
        assert [grade.status for grade in grader.collect_from_ranks()] == ["truncated"] * 3
    for b in range(3):
        on_finished(b, "raise", [7], b == 0)
    words = "not one of the first 2 completions could be graded; the first: error: ValueError: no such luck"
    with pytest.raises(RunError, match=words):
        grader.collect_from_ranks()
    for texts in (["4", "raise"], ["raise", "raise"]):  # once it has worked, failures are counted and no more
        for b, text in enumerate(texts):
            on_finished(b, text, [7], False)
        assert [grade.is_failed for grade in grader.collect_from_ranks()] == [text == "raise" for text in texts]
    grader.close()


@pytest.mark.parametrize(("code", "words"), [
    ("def score(completion):\n    return None\n", "score returned None, not a finite number"),
    ("def score(completions):\n    return 1.0\n", "score returned 1.0 for 2 completions"),
    ("def score(completion):\n    return 1 / len(completion)\n", None),  # it may not like an empty completion
    ("def score(completion, answer):\n    return float(int(completion) == int(answer))\n", None),  # nor some other
    ("def score(completion):\n    return float(completion.split('Answer: ')[1] == 'x')\n", None),
    ("def score(completion, num_tokens, max_tokens, token_ids):\n    return num_tokens / max_tokens\n", None),
    ("from statistics import stdev\ndef score(completions, num_tokens):\n    return [stdev(num_tokens)] * 2\n", None),
    ("def score(completion, **kw):\n    return float(kw['answer'] == completion + kw['kind'])\n", None),
    ("def score(completion, columns):\n    return columns['absent']\n", "fails for each .* of 4: error: KeyError"),
    ("def score(completion):\n    return 1.0 if completion[0]['content'] else 0.0\n", "TypeError.* are texts, not"),
    ("def score(completions):\n    return [c[0]['content'] == 'x' for c in completions]\n", "TypeError.* not messages"),
    ("def score(completion):\n    while completion or True: pass\n", "fails for each text of a trial with .*: timeout"),
    ("def score(completion):\n    return {'acc': 1} if completion else 0.0\n", "score returned {'acc': 1}"),
])  # fmt: skip
def test_functions_without_a_reward_are_named_early(code, words, tmp_path):
    (tmp_path / "my_reward.py").write_text(code)
    grader = Grader(Grading(f"exact,{tmp_path}/my_reward.py:score", reward_timeout=1.0), num_workers=1)
    with pytest.raises(ValueError, match=f"--reward .*: .*{words}.*docs/rewards.md") if words else nullcontext():
        assert bad_rows(grader, [row("4", kind=""), row("5", kind="")]) == {}


def test_the_trial_is_of_a_row_that_can_be_used(tmp_path):
    (tmp_path / "my_reward.py").write_text("def score(completions, level):\n    return [each + 1 for each in level]\n")
    found = bad_rows(Grader(Grading(f"{tmp_path}/my_reward.py:score"), num_workers=1), [row("4"), row("5", level=1)])
    assert found == {0: "score takes 'level', but the row's columns are none"}


def test_rows_with_unusable_keys_are_excluded_with_a_reason():
    """Rows whose key cannot be used are excluded with a reason, and the engines share the check."""
    rows = [("#### 4", "gsm8k"), ("many", "gsm8k"), ("4", "poems"), ("\\frac{1}{", "MATH")]
    rows = [row(answer, kind=kind) for answer, kind in rows]
    reasons = bad_rows(Grader(Grading("@kind"), num_workers=2), rows)
    assert list(reasons) == [1, 2, 3]
    for i, words in {1: "no number", 2: "'poems', which names no verifier", 3: "cannot read"}.items():
        assert words in reasons[i]
    second = SimpleNamespace(engine_index=1, num_engines=2)
    assert list(bad_rows(Grader(Grading("@kind"), num_workers=1), rows, second)) == [1, 3]


def test_a_key_that_hangs_excludes_no_other_row(tmp_path):
    code = "import time\nfrom grading import Grade, verifiers\n"
    code += "verifiers.verify_exact = lambda case: time.sleep(60 * (case.answer == 'hang')) or Grade(0.0)\n"
    (tmp_path / "my_reward.py").write_text(code + "def score(completion):\n    return 0.0\n")
    grader = Grader(Grading(f"exact,{tmp_path}/my_reward.py:score", reward_timeout=0.5), num_workers=2)
    assert bad_rows(grader, [row("hang" if i == 70 else str(i)) for i in range(150)]) == {70: "timeout"}


def test_a_rank_without_workers_has_a_grader_that_starts_nothing():
    grader = Grader(Grading("math"), num_workers=0)
    assert grader.pool is None and grader.collect() == {} and grader.collect_from_ranks() == []
    assert bad_rows(grader, [row("")]) == {}
    with pytest.raises(ValueError, match="neither built in"):
        Grader(Grading("maths"), num_workers=0)


def test_the_engines_of_a_node_share_its_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(96))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert [workers_per_engine(tensor_parallel_size=size) for size in (1, 4, 16)] == [12, 48, 96]


def test_a_reward_loads_only_what_it_names():
    """The trainer and a worker of `exact` load neither SymPy nor IFEval, nor how functions of the user's are called."""
    code = """
        import sys
        import reward
        from grading.score import RewardWorker

        RewardWorker("exact,format,length", None)
        print(*{"sympy", "math_verify", "grading.ifeval", "grading.own", "grading.user_code"} & {*sys.modules})
        RewardWorker("ifeval", None)
        print(*{"sympy", "grading.ifeval"} & {*sys.modules})
        RewardWorker("@kind", None)
        print(*{"sympy", "math_verify"} & {*sys.modules})
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [{*line.split()} for line in said] == [set(), {"grading.ifeval"}, {"sympy", "math_verify"}]
