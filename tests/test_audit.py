"""scripts/audit.py: a step that is made again is equal, and one place that was changed afterwards is found and named.

One run of two ranks is for all tests but one; what was sampled again once is compared with each copy of it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow.parquet import read_table, write_table
from safetensors.torch import load_file, save_file

import audit
from helpers.runs import ENVIRONMENT, ended, succeeded, torchrun, training_flags


@pytest.fixture(scope="module", autouse=True)
def forks():
    """In place of a process that imports everything."""

    def run(command: list[str], **_: object) -> object:
        return succeeded(ended(["scripts/launch.py", *command[2:]], ENVIRONMENT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "subprocess", SimpleNamespace(run=run))
        yield


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    torchrun(2, "train_grpo.py", *training_flags(policy, folder, reward="exact:1,length:0.1", overlong_cache_tokens=6))
    return folder


@pytest.fixture(scope="module")
def again(run, tmp_path_factory) -> tuple[Path, str]:
    """Step 3 of the run in another folder, and what the audit says."""
    folder = tmp_path_factory.mktemp("again") / "run"
    return folder, audit.audit(run, 3, None, False, [], folder)


def test_a_step_is_sampled_graded_and_trained_again_to_the_bit(again):
    said = "step 3: equal to the bit: 32 completions, rewards, 34 metrics, weights (by the log-probs of step 4)"
    assert again[1] == said


def test_one_rank_makes_the_step_of_two_within_the_tolerance(run, tmp_path):
    said = audit.audit(run, 3, 1, False, [], tmp_path / "run")
    assert said.startswith("step 3: equal within 0.001: 32 completions, rewards, 32 metrics, weights (by")
    assert said.endswith("; not sampled again, but graded, scored and trained on: world_size 2 there, 1 here")


def change_row(run: Path, b: int, name: str, change: Callable, step: int = 3) -> None:
    file = run / "rollouts" / f"step_{step}.parquet"
    table = read_table(file)
    values = table[name].to_pylist()
    values[b] = change(values[b])
    write_table(table.set_column(table.column_names.index(name), name, pyarrow.array(values, table[name].type)), file)


def change_metric(run: Path) -> None:
    """Of step 3, in its last digit."""
    file, text = run / "metrics.jsonl", (run / "metrics.jsonl").read_text()
    (line,) = (line for line in text.splitlines() if json.loads(line)["step"] == 3)
    metrics = json.loads(line)
    metrics["reward/mean"] *= 1 + 1e-15
    file.write_text(text.replace(line, json.dumps(metrics)))


def change_weight(run: Path) -> None:
    file = run / "step_2" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.25
    save_file(weights, file, {"format": "pt"})


def change_flag(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"learning_rate": 0.002}))


def change_token(run: Path) -> None:
    change_row(run, 9, "token_ids", lambda ids: [*ids[:2], ids[2] + 1, *ids[3:]])


def change_reward(run: Path) -> None:
    change_row(run, 7, "reward", lambda _: 0.5)


@pytest.mark.parametrize(("change", "place"), [
    (change_reward, r"completion 7 \(.*train.jsonl, line \d+, .*\), reward, .*: \(0.5, .*exact.* there, \(0.0, "),
    (change_token, r"completion 9 \(.*\), token_ids 2: \d+ there, \d+ here"),
    (change_metric, r"metric reward/mean: \S+ there, \S+ here"),
    (change_weight, r"weight model.layers.1.mlp.up_proj.weight of step_2, .*: the largest difference is 0.25"),
    (change_flag, r"--learning_rate: 0.002 in config.json, 0.001 in the command of starts.jsonl"),
])  # fmt: skip
def test_what_was_changed_in_one_place_is_found_and_named(change, place, run, again, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy", symlinks=True)
    change(copy)
    with pytest.raises(audit.Different, match=place):
        audit.flags_of(copy, audit.read_lines(copy / "starts.jsonl")[-1]["command"][2:])
        audit.verdict(copy, 3, again[0], [], None, [])


def test_partial_rollouts_are_graded_and_trained_on_again(policy, tmp_path):
    """To the bit on as many ranks, within the tolerance on others; the weights are those of a checkpoint."""
    changes = {"partial_rollouts": True, "max_completion_tokens": 40, "save_every": 1, "total_steps": 3}
    torchrun(1, "train_grpo.py", *training_flags(policy, tmp_path / "run", **changes, micro_batch_tokens=256))
    said = audit.audit(tmp_path / "run", 2, None, False, [], tmp_path / "again")
    assert said.startswith("step 2: equal to the bit: 32 completions, rewards,") and ", weights; not sampled" in said
    assert said.endswith("but graded, scored and trained on: --partial_rollouts")
    said = audit.audit(tmp_path / "run", 2, 2, False, [], tmp_path / "two_ranks")
    assert said.startswith("step 2: equal within 0.001: 32 completions") and ", weights; not sampled" in said
    change_row(tmp_path / "run", 7, "reward", lambda _: 0.5, step=2)
    words = audit.read_lines(tmp_path / "run" / "starts.jsonl")[-1]["command"][2:]
    with pytest.raises(audit.Different, match=r"completion 7 .*, reward, .*: \(0.5, .* there, \(0.0, .* here"):
        audit.verdict(tmp_path / "run", 2, tmp_path / "again", ["--partial_rollouts"], None, words)


def test_a_step_without_the_checkpoint_before_it_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be audited, .* step_3, .*; steps that can: \[1, 3\]"):
        audit.audit(run, 4, None, False, [], tmp_path)
