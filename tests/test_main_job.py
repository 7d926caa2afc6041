"""The README's main command, as a user would type it: the policy learns to think (about three minutes); and every recipe on that job."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from helpers import ROOT, metrics_of

RECIPES = re.findall(r"^\| (.+?) (?:\(.*\) )?\| `(--[^`]+)` \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)


def run_script(run_dir: Path, policy: Path, *flags: str) -> str:
    """The output of `bash scripts/tiny_cpu.sh FLAGS`, with every path in a folder of the test's own."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")}
    environment |= {"OUT_DIR": str(run_dir), "POLICY": str(policy)}
    command = ["bash", "scripts/tiny_cpu.sh", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("main_job")
    run_script(folder / "run", folder / "policy")
    return folder


def test_held_out_accuracy_rises_from_at_most_45_to_at_least_90_percent(job):
    metrics = metrics_of(job / "run")
    before, after = metrics[0]["eval/heldout/avg@4"], metrics[max(metrics)]["eval/heldout/avg@4"]
    assert before <= 0.45
    assert after >= 0.90


def test_the_policy_learns_to_think_and_not_only_to_answer(job):
    metrics = metrics_of(job / "run")
    assert metrics[max(metrics)]["eval/heldout/tokens_mean"] > 2 * metrics[0]["eval/heldout/tokens_mean"]
    last = [json.loads(line) for line in (job / "run" / "samples.jsonl").read_text().splitlines()][-4:]
    assert all(sample["completion"].startswith("<think>") for sample in last)


def test_sampler_and_trainer_agree_at_every_step_of_it(job):
    assert max(metrics["policy/rollout_gap_mean"] for step, metrics in metrics_of(job / "run").items() if step) < 0.005


def test_the_held_out_problems_are_never_trained_on(job):
    train, heldout = (
        [json.loads(line)["problem"].split("+") for line in (job / "policy" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert len(train) == 4096
    assert len(heldout) == 256
    assert not {frozenset(numbers) for numbers in train} & {frozenset(numbers) for numbers in heldout}


def test_the_readme_has_the_recipes():
    assert [name for name, _ in RECIPES] == [
        "GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "SAPO", "RLOO", "REINFORCE++", "Lite PPO", "truncated importance sampling", "IcePop"
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "flags"), RECIPES, ids=[name for name, _ in RECIPES])
def test_each_recipe_of_the_readme_trains_on_the_main_job(name, flags, job, tmp_path):
    limits = ["--total_steps", "2", "--eval_samples", "1", "--prompts_per_step", "16", "--prompts_per_update", "8"]
    if "--overlong_cache_tokens" in flags:  # 4,096 tokens are more than this job's completions have
        limits += ["--reward", "exact,length", "--overlong_cache_tokens", "16"]
    said = run_script(tmp_path / "run", job / "policy", *flags.split(), *limits)
    assert "algorithm: advantage" in said
    metrics = metrics_of(tmp_path / "run")
    assert list(metrics) == [0, 1, 2]
    for step in (1, 2):
        assert metrics[step]["optim/skipped_updates"] == 0
        assert metrics[step]["optim/grad_norm"] > 0
        assert metrics[step]["policy/rollout_gap_mean"] < 0.005
        assert metrics[step]["policy/rollout_ess"] > 0.99, "sampler and trainer agree here, so the weights are all close to 1"
    if name == "DAPO":
        assert metrics[1]["sampling/prompts"] == 16 + sum(metrics[1][f"sampling/groups_{kind}"] for kind in ("without_signal", "unused"))
