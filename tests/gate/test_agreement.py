"""Ranks that differ in flags, code or data are found, and named."""

from dataclasses import replace

import numpy as np
import pytest

from gate.agreement import check_same_start, check_same_step, differences, digest
from helpers.made_up import make_grade, make_rollout
from helpers.runs import run_ranks, training_flags
from runtime.rank import RunError

OTHER_REWARD = """
import os, runpy
from dataclasses import replace
import sampling

def rounds(self, step):
    result, *later = before(self, step)
    first, *others = result.grades
    changed = replace(first, reward=first.reward + int(os.environ["RANK"]))
    return [replace(result, grades=[changed, *others]), *later]

before, sampling.Sampler.rounds = sampling.Sampler.rounds, rounds
runpy.run_path("train_grpo.py", run_name="__main__")
"""


def test_the_rank_that_differs_is_named_by_digests_that_see_every_byte_and_border():
    one, two = {"--seed": "1"}, {"--seed": "2"}
    assert differences([one] * 4) == ""
    assert differences([one, two, one, one]) == "rank 1 has --seed 2 (the other ranks: 1)"
    assert differences([{"a": "1"}, {}]) == "rank 1 has a none (the other ranks: 1)"
    pieces = [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([], np.int32)]
    variants = [[np.array([1, 2, 3], np.int32)], pieces[:2], [pieces[1], pieces[0], pieces[2]], [b"", *pieces]]
    assert digest(pieces) == digest([piece.copy() for piece in pieces])
    assert len({digest(each) for each in [pieces, *variants]}) == 5


def test_flags_code_and_batch_are_compared(monkeypatch):
    digests_by_path = []

    def gather(own: dict[str, str]) -> list[dict[str, str]]:
        digests_by_path.append(own)
        return [own, own | change]

    change = {"--group_size": "4"}
    monkeypatch.setattr("gate.agreement.gather_from_ranks", gather)
    said = r"^rank 1 has --group_size 4 \(the other ranks: 8\); start all ranks with the same"
    with pytest.raises(ValueError, match=said):
        check_same_start({"group_size": 8})
    assert {"run.py", "runtime/stall.py", "torch"} < digests_by_path[0].keys()
    change = {}
    check_same_start({"group_size": 8})
    sampled = replace(make_rollout([2, 3]), grades=[make_grade(1.0, True)] * 2)
    check_same_step(4, sampled)
    change = {"prompts": "another"}
    with pytest.raises(RunError, match=r"diverged in step 4: rank 1 has prompts another"):
        check_same_step(4, sampled)


def test_a_rank_with_another_reward_ends_the_run_and_is_named(policy, tmp_path):
    (tmp_path / "program.py").write_text(OTHER_REWARD)
    options = training_flags(policy, tmp_path / "run", total_steps=1, eval_before_training=None)
    done = run_ranks(2, str(tmp_path / "program.py"), options)
    assert done.returncode == 1
    assert "error: the ranks have diverged in step 1: rank 1 has rewards " in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "before anything is trained on it"
