"""A mistake of the user ends the program before any model is loaded, and says what was given and what is required."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from run import open_run_folder

import train_grpo
from flags import algorithm_of, check_flags, free_on_resume, parse_flags
from fsdp_utils import check_launch
from helpers import start, training_flags


def check(policy: Path, out_dir: Path, **changes: object) -> None:
    """What `main` does before it loads a model."""
    args = parse_flags(training_flags(policy, out_dir, **changes))
    check_flags(args)
    algorithm_of(args)
    train_grpo.load_inputs(args).grader.close()
    open_run_folder(Path(args.out_dir), vars(args), free_on_resume(args)).close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 1}, ["--group_size 1", "at least 2"]),
        ({"prompts_per_update": 3}, ["--prompts_per_update 3", "1, 2, 4, 8"]),
        ({"tensor_parallel_size": 2}, ["--tensor_parallel_size 2", "world size 1", "use one of 1"]),
        ({"model": "tests/no_such_model"}, ["--model 'tests/no_such_model'", "no such folder"]),
        ({"model": "./nowhere"}, ["--model './nowhere'", "no such folder"]),
        ({"train_data": "absent.jsonl"}, ["absent.jsonl", "does not exist"]),
        ({"eval_data": "absent.jsonl"}, ["absent.jsonl", "does not exist"]),
        ({"max_prompt_tokens": 4}, ["all 64 prompts", "--max_prompt_tokens 4", "5 tokens"]),
        ({"max_completion_tokens": 121, "micro_batch_tokens": 1000}, ["8", "121", "context of 128", "by 1"]),
        ({"prompts_per_step": 128, "prompts_per_update": 128}, ["64 usable rows", "--prompts_per_step 128"]),
        ({"data_weights": -1}, ["weights -1", "positive"]),
        ({"eval_top_p": 1.5}, ["--eval_top_p 1.5", "at most 1"]),
        ({"eval_temperature": 0, "eval_samples": 4}, ["--eval_samples 4", "--eval_temperature 0", "--eval_samples 1"]),
        ({"eval_max_completion_tokens": 121}, ["--eval_max_completion_tokens 121", "context of 128", "by 1"]),
        ({"profile_steps": 0}, ["--profile_steps 0", "at least 1"]),
        ({"policy_loss": "ppo"}, ["--policy_loss ppo", "use clip", "FILE.py:FUNCTION"]),
        ({"policy_loss": "absent.py:f"}, ["--policy_loss absent.py:f", "cannot be loaded"]),
        ({"compile_layers": True}, ["--compile_layers has no effect without a GPU"]),
        ({"image_column": "image"}, ["--image_column 'image'", "of the type 'qwen2'", "qwen2_5_vl"]),
        ({"max_pixels": 4000}, ["--max_pixels 4000 has no effect without --image_column"]),
        ({"system_prompt": "no/such.txt"}, ["--system_prompt 'no/such.txt'", "no such file"]),
        ({"reward": "maths"}, ["--reward 'maths'", "neither built in"]),
        ({"reward": "absent.py:score"}, ["--reward", "absent.py", "does not exist"]),
        ({"answer_column": "solution"}, ["train.jsonl, line 1", "'solution'", "--answer_column", "'answer'"]),
    ],
)
def test_a_mistake_is_named_with_a_way_out(changes, words, policy, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        check(policy, tmp_path / "run", **changes)
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "run").exists(), "a refused start leaves nothing behind"


def test_a_folder_that_is_no_model_is_refused(tmp_path, policy):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--model .* is neither a folder with a model"):
        check(policy, tmp_path / "run", model=tmp_path / "empty")


def test_more_visible_gpus_than_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(
        ValueError, match="8 GPUs are visible but the world size is 1: start it with the script or torchrun"
    ):
        check_launch(tp_size=1, dtype="bfloat16")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_launch(tp_size=4, dtype="bfloat16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    with pytest.raises(ValueError, match="16 processes were started on this node but only 8 GPUs"):
        check_launch(tp_size=4, dtype="bfloat16")


def test_a_first_start_that_trained_nothing_may_be_corrected(policy, tmp_path):
    check(policy, tmp_path / "run")
    check(policy, tmp_path / "run", group_size=8)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["group_size"] == 8


def test_a_run_folder_of_another_configuration_is_left_alone(policy, tmp_path):
    check(policy, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ValueError, match="another configuration.*--group_size 4 there, 8 now.*another --out_dir"):
        check(policy, tmp_path / "run", group_size=8)
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    check(policy, tmp_path / "run", total_steps=8, save_every=1, micro_batch_tokens=64)  # these may change


def test_the_length_of_a_run_may_not_change_where_the_learning_rate_depends_on_it(policy, tmp_path):
    check(policy, tmp_path / "run", lr_schedule="cosine")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="--total_steps 4 there, 8 now"):
        check(policy, tmp_path / "run", lr_schedule="cosine", total_steps=8)


def test_a_folder_of_something_else_is_refused(policy, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds thesis.tex but no config.json"):
        check(policy, tmp_path / "run")
    assert (tmp_path / "run" / "thesis.tex").read_text() == "precious"


def test_a_folder_that_cannot_be_written_is_refused(policy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        check(policy, tmp_path / "file" / "run")
    if os.getuid() != 0:  # root writes everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="cannot be written"):
            check(policy, tmp_path / "locked" / "run")


def test_two_runs_cannot_share_a_folder(policy, tmp_path):
    args = parse_flags(training_flags(policy, tmp_path / "run"))
    lock = open_run_folder(tmp_path / "run", vars(args), free_on_resume(args))
    with pytest.raises(ValueError, match="in use by another run"):
        open_run_folder(tmp_path / "run", vars(args), free_on_resume(args))
    lock.close()
    open_run_folder(tmp_path / "run", vars(args), free_on_resume(args)).close()


def test_under_torchrun_the_mistake_is_told_once_without_a_traceback_of_ours(policy, tmp_path):
    broken = tmp_path / "broken.jsonl"
    shutil.copy(policy / "train.jsonl", broken)
    with broken.open("a") as file:
        file.write(json.dumps({"problem": "1+1"})[:-4])
    started = time.monotonic()
    done = start(2, "train_grpo.py", *training_flags(policy, tmp_path / "run", train_data=broken))
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "broken.jsonl, line 65: not valid JSON" in done.stderr
    assert 'train_grpo.py", line' not in done.stderr
    assert time.monotonic() - started < 60
    assert not (tmp_path / "run").exists()
