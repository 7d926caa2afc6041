"""The README's main command, as a user would type it: the policy learns to think. About three minutes on two quiet cores."""

import json
import os
import subprocess

import pytest

from helpers import ROOT, metrics_of


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The run folder of `bash scripts/tiny_cpu.sh`, with every path in a folder of the test's own."""
    folder = tmp_path_factory.mktemp("main_job")
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")}
    environment |= {"OUT_DIR": str(folder / "run"), "POLICY": str(folder / "policy")}
    done = subprocess.run(["bash", "scripts/tiny_cpu.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
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
