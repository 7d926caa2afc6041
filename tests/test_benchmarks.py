"""Each benchmark runs at its smallest size and ends with one JSON line that has its goal. Times are not looked at."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench_common import save_random_model
from helpers import torchrun

TINY = ["--hidden", "64", "--layers", "1", "--rounds", "1"]
STEP = ["--prompts", "2", "--group_size", "2", "--max_tokens", "4", "--steps", "3"]


def run(script: str, *arguments: object, num_ranks: int = 1) -> dict[str, object]:
    """The JSON line."""
    return json.loads(torchrun(num_ranks, f"benchmarks/{script}", *arguments).stdout.strip().splitlines()[-1])


def test_bench_update():
    sizes = "--vocab 64 --sequences 4 --mean_length 20 --memory_vocab 512 --memory_tokens 1024 --group_size 2"
    found = run("bench_update.py", *TINY, *sizes.split())
    assert found["goal"] == 0.9
    assert min(found["ratio"], found["ours, prompts shared"]) > 0
    assert set(found["peak_mib"]) == {"ours", "bare", "full_logits"}


def test_bench_sync():
    found = run("bench_sync.py", *TINY, "--vocab", 64, num_ranks=2)
    assert (found["goal"], found["ranks"]) == (0.5, 2)
    assert found["ratio"] > 0


def test_bench_mfu(policy):
    variants = ["full", "full, padded", "LoRA"]
    sizes = "--micro_batch_tokens 64 --mean_length 20 --rounds 1"
    found = run("bench_mfu.py", "--model", policy, *sizes.split(), "--variants", *variants)
    assert (found["goal"], found["unit"]) == (0.5, "TFLOP/s"), "there is no MFU without a GPU whose peak is known"
    assert found["ratio"].keys() == set(variants) and min(found["ratio"].values()) > 0


def test_bench_leak():
    found = run("bench_leak.py", "--ranks", 1, "--steps", 8)
    assert (found["goal"], found["steps"]) == (1.0, 8)
    assert found["mb_per_step"] != 0, "the first steps of a run take more and more"


def test_bench_keep():
    found = run("bench_keep.py", "--completions", 16, "--mean_tokens", 40, "--rounds", 2)
    assert found["goal"] == 0.1 and found["seconds"] > 0 and found["mb_per_million_tokens"] > 0


@pytest.mark.parametrize("script", ["bench_step.py", "bench_scaling.py"])
def test_benchmarks_of_whole_steps(script):  # the first one on two ranks, without TRL
    only = ["--ranks", "1", "--only", "smallest"] if script == "bench_scaling.py" else []
    found = run(script, *TINY, *STEP, *only)
    assert found["goal"]
    assert found["rounds"] == 1


@pytest.mark.parametrize(("hidden", "layers", "mean_tokens"), [(256, 4, 20), (512, 8, 40)])
def test_random_models_end_a_completion_at_the_rate_asked_for_after_any_prompt(hidden, layers, mean_tokens, tmp_path):
    save_random_model(tmp_path, hidden, layers, 4 * hidden, mean_tokens=mean_tokens)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = model(torch.randint(model.config.vocab_size, (16, 64))).logits
    ends = logits.softmax(dim=-1)[..., model.config.eos_token_id]
    assert ends.mean().item() == pytest.approx(1 / mean_tokens, rel=0.05)
    assert ends.std() < 0.05 * ends.mean()


def test_the_plans_of_published_runs_stay_within_their_bounds():
    """The program prints published times beside ours, and the errors of all runs and of those held out."""
    found = run("plan_vs_published.py")
    assert (found["goal"], found["runs"]) == ([0.15, 0.3], 17)
    assert found["all_median"] <= 0.15 and found["all_worst"] <= 0.3
    assert found["held_out_median"] <= 0.15


def test_bench_ahead():
    found = run("bench_ahead.py", "--phase_s", 0.1, "--steps", 4, "--rounds", 1)
    assert (found["goal"], found["0"]) == (0.6, 1.0)
    assert 0 < found["2 in flight"] <= found["ratio"]
