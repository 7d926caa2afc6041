"""Each benchmark runs at its smallest size and ends with one JSON line that has its goal. No time is looked at. TRL is left out."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench_common import save_random_model
from helpers import ENVIRONMENT, ROOT, torchrun

TINY = ["--hidden", "64", "--layers", "1", "--rounds", "1"]
STEP = ["--prompts", "2", "--group_size", "2", "--max_tokens", "4", "--steps", "3"]


def last_line(output: str) -> dict[str, object]:
    return json.loads(output.strip().splitlines()[-1])


def run(script: str, *arguments: str) -> dict[str, object]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return last_line(done.stdout)


def test_bench_update():
    sizes = [
        "--vocab",
        "64",
        "--sequences",
        "4",
        "--mean_length",
        "20",
        "--memory_vocab",
        "512",
        "--memory_tokens",
        "1024",
    ]
    found = run("bench_update.py", *TINY, *sizes, "--group_size", "2")
    assert found["goal"] == 0.9
    assert min(found["ratio"], found["ours, prompts shared"]) > 0
    assert set(found["peak_mib"]) == {"ours", "bare", "full_logits"}


def test_bench_sync():
    found = last_line(torchrun(2, "benchmarks/bench_sync.py", *TINY, "--vocab", "64").stdout)
    assert (found["goal"], found["ranks"]) == (0.5, 2)
    assert found["ratio"] > 0


def test_bench_mfu(policy):
    sizes = [
        "--micro_batch_tokens",
        "64",
        "--mean_length",
        "20",
        "--rounds",
        "1",
        "--variants",
        "full",
        "full, padded",
        "LoRA",
    ]
    found = last_line(torchrun(1, "benchmarks/bench_mfu.py", "--model", policy, *sizes).stdout)
    assert (found["goal"], found["unit"]) == (0.5, "TFLOP/s"), "there is no MFU without a GPU whose peak is known"
    assert found["ratio"].keys() == {"full", "full, padded", "LoRA"} and min(found["ratio"].values()) > 0


@pytest.mark.parametrize("script", ["bench_step.py", "bench_scaling.py"])
def test_benchmarks_of_whole_steps(script):
    only = ["--ranks", "2", "--only", "smallest"] if script == "bench_scaling.py" else []
    found = run(script, *TINY, *STEP, *only)
    assert found["goal"]
    assert found["rounds"] == 1


@pytest.mark.parametrize(("hidden", "layers", "mean_tokens"), [(256, 4, 20), (512, 8, 40)])
def test_random_models_end_a_completion_at_the_rate_asked_for_after_any_prompt(hidden, layers, mean_tokens, tmp_path):
    save_random_model(tmp_path, hidden, layers, 4 * hidden, mean_tokens=mean_tokens)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        ends = model(torch.randint(model.config.vocab_size, (16, 64))).logits.softmax(dim=-1)[
            ..., model.config.eos_token_id
        ]
    assert ends.mean().item() == pytest.approx(1 / mean_tokens, rel=0.05)
    assert ends.std() < 0.05 * ends.mean()
