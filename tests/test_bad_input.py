"""Mistakes of the user end the program before any model is loaded, and say what was given and what to do."""

import json
import shutil
import time
from pathlib import Path

import pytest

from forked import run_ranks
from helpers import torchrun, training_flags
from inputs.checks import check_flags
from inputs.choices import algorithm_of
from inputs.command_line import parse_flags
from inputs.load import load_inputs

OF_IMAGE = b'{"problem": "<image>1+1", "answer": "2"}\n'


def check(policy: Path, out_dir: Path, **changes: object) -> None:
    """What the program does before it loads a model."""
    args = parse_flags(training_flags(policy, out_dir, **changes))
    check_flags(args)
    algorithm_of(args)
    load_inputs(args).grader.close()


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": "./nowhere"}, ["--model './nowhere'", "no such folder"]),
    ({"train_data": "absent.jsonl"}, ["absent.jsonl", "does not exist"]),
    ({"max_prompt_tokens": 4}, ["all 64 prompts", "--max_prompt_tokens 4", "5 tokens"]),
    ({"max_completion_tokens": 121, "micro_batch_tokens": 999}, ["8", "121", "beyond the context", "128", "by 1"]),
    ({"prompts_per_step": 128, "prompts_per_update": 128}, ["64 usable rows", "--prompts_per_step 128"]),
    ({"stop_after": 5}, ["--stop_after 5", "the last step is 4"]),
    ({"eval_temperature": 0, "eval_samples": 4}, ["--eval_samples 4", "--eval_temperature 0", "--eval_samples 1"]),
    ({"image_column": "image"}, ["--image_column 'image'", "of the type 'qwen2'", "qwen2_5_vl"]),
    ({"max_pixels": 4000}, ["--max_pixels 4000 has no effect without --image_column"]),
    ({"stop_tokens": "<|im_end|>"}, ["--stop_tokens <|im_end|>", "no token of the tokenizer", "special ones are"]),
    ({"reward": "absent.py:score"}, ["--reward", "FOLDER/absent.py", "does not exist"]),
    ({"policy_loss": "absent.py:f"}, ["--policy_loss", "FOLDER/absent.py"]),
    ({"reward": "exact,pairs.py:score"}, ["--eval_samples 1: --reward", "with itself", "--eval_samples 2 or more"]),
    ({"reward": "pairs.py:score", "group_size": 1, "advantage": "none"}, ["--group_size 1: --reward"]),
    ({"model": "."}, ["--model ", " is no folder with a model: it has no config.json"]),
    ({"train_data": "rows.jsonl"}, ["no row can be used", "line 1: 1 <image>", "--image_column"]),
])  # fmt: skip
def test_a_mistake_is_named_with_a_way_out(changes, words, policy, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_bytes(OF_IMAGE)
    (tmp_path / "pairs.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        check(policy, tmp_path / "run", **changes)
    assert [word for word in words if word.replace("FOLDER", str(tmp_path)) not in str(error.value)] == []
    assert not (tmp_path / "run").exists(), "a refused start leaves nothing behind"


def test_a_mistake_is_told_once_and_last_without_a_traceback(policy, tmp_path):
    broken = tmp_path / "broken.jsonl"
    shutil.copy(policy / "train.jsonl", broken)
    with broken.open("a") as file:
        file.write(json.dumps({"problem": "1+1"})[:-4])
    torchrun(1, "scripts/show_data.py", "--help")  # the first fork waits for the imports
    started = time.monotonic()
    done = run_ranks(2, "train_grpo.py", training_flags(policy, tmp_path / "run", train_data=broken), timeout=300)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "broken.jsonl, line 65: not valid JSON" in done.stderr
    assert time.monotonic() - started < 60
    assert not (tmp_path / "run").exists()
