"""Tokens per second, FLOP/s, MFU and waiting: by hand-worked numbers. Tolerance 1e-6, relative."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batch import Batch, pack, training_costs
from fsdp_utils import World
from helpers import flags, make_rollout
from planner.setup import shape_of
from planner.time import training_flops
from policy import load_policy
from throughput import peak_flops, throughput, update_flops

WORLD = World(rank=0, size=2, tp_size=1, device=torch.device("cpu"))
ROLLOUT = make_rollout([6, 2, 8, 4], group_size=2)  # with prompts of 4 tokens: 9 + 5 + 11 + 7 positions


def batch(indices: list[int], old: bool, ref: bool) -> Batch:
    known = torch.zeros(1)
    return replace(pack(ROLLOUT, indices), old_logprobs_N=known if old else None, ref_logprobs_N=known if ref else None)


def test_rates_and_waiting_are_those_of_the_step():
    times = {
        "time/sample_s": 4.0,
        "time/logprobs_s": 2.0,
        "time/update_s": 5.0,
        "time/step_s": 20.0,
        "perf/update_idle_frac": 0.1,
    }
    updates = [[batch([0, 1], old=False, ref=True)], [batch([2], old=True, ref=True), batch([3], old=True, ref=True)]]
    seconds = [np.array([3.0, 2.0]), np.array([0.5, 1.0])]  # two rounds of two engines
    policy = SimpleNamespace(flops_per_token=100, parity_length=10.0)
    args = flags(passes_per_step=2)
    found = throughput(times, ROLLOUT, ROLLOUT, updates, seconds, args, policy, WORLD)
    costs = 32 + (81 + 25 + 121 + 49) / 10
    assert found == pytest.approx(
        {
            "time/rollout_tail_s": 1.5,
            "perf/idle_frac": (0.5 + 0.25 + 0.1 * 5) / 20,
            "perf/tokens_per_s": 20 / 20,
            "perf/sample_tokens_per_s_per_gpu": 20 / 4 / 2,
            "perf/logprobs_tokens_per_s_per_gpu": (14 * 1 + 18 * 2) / 2 / 2,
            "perf/update_tokens_per_s_per_gpu": 32 * 2 / 5 / 2,
            "perf/update_tflops_per_gpu": 3 * 100 * costs * 2 / 5 / 2 / 1e12,
        }
    )


def test_positions_that_are_shared_count_as_tokens_and_not_as_flops():
    rollout = make_rollout([6, 2, 8, 4], group_size=2)
    times = {"time/sample_s": 4.0, "time/update_s": 5.0, "time/step_s": 20.0, "perf/update_idle_frac": 0.0}
    policy = SimpleNamespace(flops_per_token=100, parity_length=10.0)
    updates = [[pack(rollout, [0, 1, 2, 3], group_size=2)]]  # twice 3 of the prompt's 4 tokens are shared
    found = throughput(times, rollout, rollout, updates, [np.ones(2)], flags(share_prompts=True), policy, WORLD)
    assert found["perf/shared_frac"] == pytest.approx(6 / 32)
    assert found["perf/update_tokens_per_s_per_gpu"] == pytest.approx(32 / 5 / 2)
    costs = 26 + (81 + 25 + 121 + 49 - 2 * 3**2) / 10
    assert found["perf/update_tflops_per_gpu"] == pytest.approx(3 * 100 * costs / 5 / 2 / 1e12)


def test_the_flops_of_an_update_are_those_of_the_planner_but_for_the_embedding(untied_policy):
    policy = load_policy(str(untied_policy), torch.float32)
    shape = shape_of(policy.model.config, "test")
    lengths = np.array([12, 40, 100])
    embedding = (
        6 * shape.vocab * shape.hidden * lengths.sum()
    )  # which verl's convention, the planner's, counts as a matrix
    cost = training_costs(lengths, policy.parity_length).sum()
    assert update_flops(policy, cost, False) == pytest.approx(training_flops(shape, lengths.tolist()) - embedding)
    assert update_flops(policy, cost, True) == pytest.approx(2 / 3 * update_flops(policy, cost, False))


def test_the_peak_is_that_of_the_gpu_or_unknown():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 PCIe") is None
    assert peak_flops("") is None
