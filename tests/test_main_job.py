"""The main command, as a user would type it: the policy learns to think. Two nodes, on that job."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from safetensors.torch import load_file

from helpers.runs import ROOT, as_user, lines, metrics_of, run_command, run_script, succeeded, without_times

POLICY = ROOT / "scripts" / "tiny_policy"
SHORT = ["--total_steps", "2", "--prompts_per_step", "8", "--prompts_per_update", "4", "--eval_samples", "1"]
SHORT += ["--train_data", f"{POLICY}/train.jsonl#64", "--eval_data", f"{POLICY}/heldout.jsonl#4"]


def run_job(run_it: Callable, run_dir: Path, *flags: str, **settings: object) -> CompletedProcess[str]:
    """`bash scripts/tiny_cpu.sh FLAGS` with a thread a rank: sums depend on it, and more wait for each other."""
    return as_user(run_it, "scripts/tiny_cpu.sh", *flags, OUT_DIR=run_dir, OMP_NUM_THREADS=1, **settings)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    run = tmp_path_factory.mktemp("main_job") / "run"
    succeeded(run_job(run_command, run))
    return run


def test_the_policy_learns_to_think_on_the_main_job(job):
    metrics = metrics_of(job)
    before, after = metrics[0], metrics[max(metrics)]
    assert before["eval/heldout/avg@4"] <= 0.45 and after["eval/heldout/avg@4"] >= 0.90
    assert after["eval/heldout/tokens_mean"] > 2 * before["eval/heldout/tokens_mean"]
    last = lines(job / "samples.jsonl")[-4:]
    assert all(sample["completion"].startswith("<think>") for sample in last)
    assert max(metrics[step]["policy/rollout_gap_mean"] for step in metrics if step) < 1e-4


def test_the_first_twelve_steps_are_those_of_the_golden_curve(job):
    """In fp32. After a wanted change, write `found` to the file: a line a step with floats of 9 digits. Kernels that
    sum in another order draw other tokens after the first step: the tolerance is then what two steps change at most.
    """
    found = [without_times(metrics) for step, metrics in metrics_of(job).items() if step <= 12]
    golden = lines(ROOT / "tests" / "golden_curve.jsonl")
    assert [line.keys() for line in found] == [line.keys() for line in golden]
    rounding_noise = {name: found[1][name] for name in ["policy/rollout_temperature_r2"]}  # a share of a gap of 3e-8
    assert found[1] == pytest.approx(golden[1] | rounding_noise, rel=1e-3, abs=1e-5)
    for name in ("reward/mean", "completion/tokens_mean", "policy/entropy"):
        ours, theirs = ([line[name] for line in curve[1:]] for curve in (found, golden))
        drift = max(abs(later - value) for value, later in zip(theirs, theirs[2:], strict=False))
        assert ours == pytest.approx(theirs, abs=drift), name


def test_the_stored_policy_is_that_of_its_program(tmp_path):
    """Two updates of 650, which take minutes: the weights are others, and all else is the same."""
    command = f"python scripts/warm_start.py --out_dir {tmp_path}/policy --num_updates 2"
    succeeded(as_user(run_script, "-c", command, OMP_NUM_THREADS=1))
    for file in POLICY.iterdir():
        if file.name != "model.safetensors":
            assert (tmp_path / "policy" / file.name).read_bytes() == file.read_bytes(), file.name
    weights, remade = (load_file(folder / "model.safetensors") for folder in (POLICY, tmp_path / "policy"))
    assert {name: each.shape for name, each in weights.items()} == {name: each.shape for name, each in remade.items()}
    train, heldout = ([row["problem"].split("+") for row in lines(POLICY / f"{n}.jsonl")] for n in ("train", "heldout"))
    assert len(train) == 4096 and len(heldout) == 256
    assert not {frozenset(numbers) for numbers in train} & {frozenset(numbers) for numbers in heldout}


def test_two_nodes_train_together_and_one_without_its_place_says_what_is_missing(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"NNODES": 2, "NGPU": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ThreadPoolExecutor(2) as pool:
        node = partial(run_job, run_script, tmp_path / "run", *SHORT, **where)
        first, second = (succeeded(done) for done in pool.map(lambda rank: node(NODE_RANK=rank), (0, 1)))
    assert "2 ranks on cpu, 2 engines of 1" in first.stdout
    assert "step" not in second.stdout, "only the first node's first rank speaks"
    assert list(metrics := metrics_of(tmp_path / "run")) == [0, 1, 2]
    assert max(metrics[step]["policy/rollout_gap_mean"] for step in (1, 2)) < 0.005
    done = run_job(run_script, tmp_path / "run", NNODES=2)
    assert done.returncode != 0 and "NNODES=2 needs NODE_RANK" in done.stderr
