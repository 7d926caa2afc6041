"""What is kept of a step, and runs that train on it again."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

from batch import NO_IDS, Rollout
from extras.samplers.replay import read_rounds, weights_of
from grading import Grade
from helpers.made_up import make_rollout, make_row
from helpers.runs import NO_EVAL, metrics_of, torchrun, training_flags
from run import StepRecord
from runtime.files import numbered, rollouts_file
from runtime.rank import RunError
from watch.rollouts import Keeper

ROWS = [make_row([1, 2, 3], where="a.jsonl:1", text="<user>x"), make_row([4], where="a.jsonl:2")]
GRADES = [Grade(1 / 3, "ok", {"math": 1.0, "length": -1 / 3}, "4"), Grade(0.0, "timeout"), *[Grade(1.0, "ok")] * 2]


def sampled(step: int = 3) -> StepRecord:
    """Two rounds of a group of two completions each; the second group was trained on."""
    rollout = replace(
        make_rollout([2, 5, 1, 4]), rows=[ROWS[0], ROWS[0], ROWS[1], ROWS[1]], advantages=[], loss_weights_B=NO_IDS,
        grades=GRADES, texts=["a", "<b>", "\u2713", ""], is_truncated_B=np.array([False, True, False, False]),
    )  # fmt: skip
    return StepRecord(
        step, 2, rollout, round_B=np.array([0, 0, 1, 1]), used_B=np.array([2, 3]),
        advantages=[np.full(1, 0.5, np.float32), np.full(4, -0.5, np.float32)],
        logprobs={1: np.arange(4, dtype=np.float32)},
    )  # fmt: skip


def kept(folder, *steps: StepRecord, max_gib: float = 1.0) -> None:
    keeper = Keeper(folder, max_gib, [b"a", b"b"])
    for each in steps:
        keeper.rollout(each)
    keeper.wait()


def test_what_was_kept_comes_back_to_the_bit(tmp_path):
    kept(tmp_path, sampled())
    rounds = read_rounds(tmp_path, 3, {row.where: row for row in ROWS})
    assert [len(each.rows) for each in rounds] == [2, 2]
    found, expected = Rollout.concatenate(rounds), sampled().rollout
    assert all(a is b for a, b in zip(found.rows, expected.rows, strict=True))
    for name in ("completions", "rollout_logprobs"):
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b)
    assert found.texts == expected.texts and found.grades == expected.grades and found.parts == {}
    assert found.is_truncated_B.tolist() == expected.is_truncated_B.tolist()


def test_the_file_says_what_was_trained_on_and_how(tmp_path):
    versions = [np.arange(length, dtype=np.int32) for length in (2, 5, 1, 4)]
    kept(tmp_path, replace(sampled(), rollout=sampled().rollout.with_parts(versions=versions)))
    table = pyarrow.parquet.read_table(rollouts_file(tmp_path, 3)).to_pydict()
    assert table["advantages"] == [None, None, [0.5], [-0.5] * 4]
    assert table["old_logprobs"] == [None, None, None, [0, 1, 2, 3]]
    assert table["versions"] == [each.tolist() for each in versions]
    assert table["is_trained"] == [False, False, True, True]
    assert (table["group"], table["row"][:2], table["prompt"][0]) == ([0, 0, 1, 1], ["a.jsonl:1"] * 2, "<user>x")
    assert json.loads(table["reward_parts"][0]) == GRADES[0].parts


def test_the_oldest_kept_steps_make_room_and_the_last_one_stays(tmp_path, monkeypatch):
    kept(tmp_path, sampled(1))
    file_bytes = rollouts_file(tmp_path, 1).stat().st_size
    kept(tmp_path, *map(sampled, range(2, 7)), max_gib=2.5 * file_bytes / 2**30)
    assert [*numbered(tmp_path / "rollouts", ".parquet")] == [5, 6]
    (tmp_path / "rollouts" / "step_5_copy.parquet").write_bytes(b"somebody's")
    kept(tmp_path, sampled(7), max_gib=0.1 * file_bytes / 2**30)
    assert [*numbered(tmp_path / "rollouts", ".parquet")] == [7]
    free = SimpleNamespace(free=9 * file_bytes)  # and what the rollouts take: a quarter is for them
    monkeypatch.setattr("watch.rollouts.shutil.disk_usage", lambda _: free)
    kept(tmp_path, *map(sampled, range(8, 15)))
    assert [*numbered(tmp_path / "rollouts", ".parquet")] == [12, 13, 14]


def test_a_disk_that_refuses_them_costs_rollouts_and_no_run(tmp_path, capsys):
    (tmp_path / "rollouts").write_text("no folder")
    kept(tmp_path, sampled())
    assert "warning: " in capsys.readouterr().out


def test_other_data_and_what_is_not_there_are_named(tmp_path):
    with pytest.raises(RunError, match="it has no folder rollouts"):
        weights_of(f"{tmp_path}", 1)
    kept(tmp_path, *map(sampled, (1, 2, 3)))
    (tmp_path / "step_1").mkdir()
    with pytest.raises(RunError, match="step_3.parquet: a.jsonl:1 is another prompt in --train_data"):
        read_rounds(tmp_path, 3, {"a.jsonl:1": make_row([1, 2, 9], where="a.jsonl:1"), "a.jsonl:2": ROWS[1]})
    with pytest.raises(RunError, match="step 4 are missing; it has steps 1 to 3"):
        weights_of(f"{tmp_path}", 9)
    with pytest.raises(RunError, match="no such checkpoint; .* has step_1"):
        weights_of(f"{tmp_path}/step_2", 3)
    assert weights_of(f"{tmp_path}/step_1", 3) == (1, tmp_path / "step_1")
    assert weights_of(f"{tmp_path}", 3) == (0, None)


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    flags_to = partial(
        training_flags, policy, dynamic_sampling="reward", truncated="mask", num_iterations=2, overlong_cache_tokens=6,
        reward="exact:1,length:0.2", **NO_EVAL,
    )  # fmt: skip
    torchrun(2, "train_grpo.py", *flags_to(folder))
    return flags_to, folder


@pytest.mark.parametrize(("begins", "first"), [("", 1), ("step_2", 3)])
def test_a_replay_has_the_losses_of_the_run_bit_for_bit(run, begins, first, tmp_path):
    flags_to, original = run
    torchrun(2, "train_grpo.py", *flags_to(tmp_path, replay=original / begins))
    expected, found = metrics_of(original), metrics_of(tmp_path)
    assert sorted(found) == list(range(first, 5))
    kinds = ("policy/", "optim/", "reward/", "completion/", "sampling/")  # of the training
    for step, line in found.items():
        names = {name for name in line.keys() | expected[step].keys() if name.startswith(kinds)}
        assert len(names) > 20 and [name for name in names if line[name] != expected[step][name]] == []
    weights = "step_4/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (original / weights).read_bytes()


def test_another_loss_on_the_same_rollouts_keeps_the_rewards(run, tmp_path):
    flags_to, original = run
    torchrun(2, "train_grpo.py", *flags_to(tmp_path, replay=original, policy_loss="cispo", stop_after=2))
    before, after = metrics_of(original), metrics_of(tmp_path)
    for step in (1, 2):
        assert before[step]["reward/mean"] == after[step]["reward/mean"]
        assert before[step]["optim/grad_norm"] != after[step]["optim/grad_norm"]
