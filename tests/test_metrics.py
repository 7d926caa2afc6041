"""The metrics of a step, by hand-worked numbers: rewards, lengths, merged updates, speed. Tolerance 1e-6, relative."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import metrics
from grading import Grade
from helpers.made_up import ALONE, flags, load_policy, make_grade, make_rollout, policy_of
from metrics import merge_updates
from packing import pack
from plan.setup import shape_of
from plan.time import forward_flops
from step_metrics import Work, peak_flops, rollout_metrics, stderr_of_mean, throughput, update_flops, work_of_step

ROLLOUT = make_rollout([6, 2, 8, 4], group_size=2)  # prompts of 4 tokens: 9 + 5 + 11 + 7 positions


def test_rollout_metrics_count_groups_lengths_and_truncation():
    rewards, is_correct = [1, 1, 0.1, 0, 1, 0], [True, True, False, False, True, False]
    grades = [make_grade(*pair) for pair in zip(rewards, is_correct, strict=True)]
    rollout = make_rollout([2, 4, 6, 8, 10, 12])
    found = rollout_metrics(replace(rollout, grades=grades, is_truncated_B=np.arange(6) == 5), group_size=2)
    expected = {
        "reward/mean": 3.1 / 6, "reward/frac_groups_all_right": 1 / 3, "reward/frac_groups_all_wrong": 1 / 3,
        "reward/frac_groups_with_signal": 2 / 3,  # rewards decide, not correctness
        "completion/tokens_mean": 7, "completion/tokens_max": 12, "completion/tokens_right_mean": 16 / 3,
        "completion/tokens_wrong_mean": 26 / 3, "completion/frac_truncated": 1 / 6,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert all(type(value) is float for value in found.values()), "JSON knows no numpy"
    alone = rollout_metrics(replace(rollout, grades=grades), group_size=1)
    assert alone["reward/frac_groups_all_right"] == 0.5 and "reward/frac_groups_with_signal" not in alone


def test_the_standard_error_is_clustered_by_prompt():
    """Against the spread of 2,000 means of a third of 20 prompts x 4 completions; within 10 %."""
    random, means, errors = np.random.default_rng(0), [], []
    for _ in range(2000):
        values = np.repeat(random.normal(0, 1, 20), 4) + random.normal(0, 0.5, 80)
        chosen = random.random(80) < 1 / 3
        means.append(values[chosen].mean())
        errors.append(stderr_of_mean(values[chosen], np.repeat(np.arange(20), 4)[chosen]))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)
    assert stderr_of_mean(np.ones(4), np.array([5, 5, 9, 9])) == 0
    assert math.isnan(stderr_of_mean(np.ones(4), np.zeros(4, int))), "one group"


def test_ungraded_completions_are_counted_and_parts_averaged():
    def found(grades: list[Grade]) -> dict[str, float]:
        return rollout_metrics(replace(make_rollout([1] * 4), grades=grades), group_size=2)

    parts = {"math": 1.0, "format": 1.0}
    grades = [Grade(0.0, "timeout"), Grade(0.0, "error: no"), Grade(0.0, "truncated"), Grade(1.5, "ok", parts)]
    expected = {"reward/timeouts": 1, "reward/errors": 1, "reward/part/math": 0.25, "reward/part/format": 0.25}
    assert expected.items() <= found(grades).items()
    assert "reward/part/math" not in found([Grade(1.0, "ok", {"math": 1.0})] * 4), "one part is the reward itself"
    # A part has the name of its file, without the folder, unless another has it.
    parts = {"/a/x.py:f": 1.0, "/a/x.py:f/n": 2.0, "/b/x.py:f": 3.0}
    expected = {"reward/part/x.py:f": 1.0, "reward/part/x.py:f/n": 2.0, "reward/part//b/x.py:f": 3.0}
    assert expected.items() <= found([Grade(1.0, "ok", parts)] * 4).items()


def test_updates_of_a_step_are_merged_by_what_a_number_means():
    names = ("policy/loss", "policy/ratio_max", "policy/ratio_min", "optim/lr", "optim/skipped_updates")
    values = (1.0, 2.0, 0.5, 0.1, 1.0), (3.0, 1.5, 0.7, 0.2, 1.0), (2.0, 2.0, 0.5, 0.2, 2.0)
    *updates, merged = (dict(zip(names, each, strict=True)) for each in values)
    assert merge_updates(updates) == merged and merge_updates([]) == {}, "step 0 has none"


def test_the_work_of_a_step_counts_prompts_and_discarded_samples():
    policy = SimpleNamespace(adapter=None, flops_per_token=100, parity_length=10.0)
    updates = [[pack(ROLLOUT, [0, 1])], [pack(ROLLOUT, [2]), pack(ROLLOUT, [3])]]
    sampled, costs = make_rollout([6, 2, 8, 4, 10], group_size=1), 32 + (81 + 25 + 121 + 49) / 10
    work = work_of_step(sampled, ROLLOUT, updates, 2, policy)
    assert (work.sampled_tokens, work.completion_tokens, work.update_tokens) == (30, 20, 32 * 2)
    assert work.update_flops == pytest.approx(3 * 100 * costs * 2)
    # Positions that are shared count as tokens and not as FLOPs: 2 x 3 of the prompts' 4 tokens.
    together = [[pack(ROLLOUT, [0, 1, 2, 3], group_size=2)]]
    work = work_of_step(ROLLOUT, ROLLOUT, together, 1, policy)
    assert work.update_tokens == 32
    assert work.update_flops == pytest.approx(3 * 100 * (26 + (81 + 25 + 121 + 49 - 2 * 3**2) / 10))


def test_rates_and_waiting_are_those_of_the_step():
    seconds = [np.array([3.0, 2.0]), np.array([0.5, 1.0])]  # two rounds of two engines
    times = {"time/sample_s": 4.0, "time/update_s": 5.0, "time/step_s": 20.0}
    expected = {
        "time/rollout_tail_s": 1.5, "perf/tokens_per_s": 20 / 20, "perf/sample_tokens_per_s_per_gpu": 24 / 4 / 2,
        "perf/update_tokens_per_s_per_gpu": 64 / 5 / 2, "perf/update_tflops_per_gpu": 60 / 5 / 2,
    }  # fmt: skip
    world = replace(ALONE, num_trainers=2)
    assert throughput(Work(24, 20, 64, 6e13), seconds, times, world) == pytest.approx(expected)


def test_the_flops_of_an_update_are_those_of_the_planner(untied_policy):
    policy = load_policy(untied_policy)
    shape = shape_of(policy.model.config, "test")
    batches = [pack(make_rollout([9, 37, 97]), [0, 1, 2])]  # of 12, 40 and 100 positions
    forward = sum(forward_flops(shape, length, length) for length in (12, 40, 100))
    assert update_flops(policy, batches) == pytest.approx(3 * forward)
    assert update_flops(policy_of(flags(model=untied_policy, lora_rank=4)), batches) == pytest.approx(2 * forward)


def test_the_peak_is_that_of_the_gpu_or_unknown():
    known = {"H100 80GB HBM3": 989, "A100-SXM4-80GB": 312, "GeForce RTX 4090": 165, "L4": 121, "L40S": 362}
    known |= {"A10": 125, "GeForce RTX 3090": 71, "GH200 480GB": 989, "B200": 2250}
    assert {name: peak_flops(f"NVIDIA {name}") for name in known} == {name: x * 1e12 for name, x in known.items()}
    assert peak_flops("") is None
    for derived in ("GeForce RTX 4090 D", "GeForce RTX 3090 Ti", "H100 PCIe", "A10G", "L40"):
        assert peak_flops(f"NVIDIA {derived}") is None


def test_the_temperature_is_read_from_log_probs():
    torch.manual_seed(0)
    logits = torch.randn(4000, 32) * 2
    trainer, sampler = (torch.distributions.Categorical(logits=each) for each in (logits, logits / 0.9))
    tokens = sampler.sample()
    terms = metrics.temperature_terms(trainer.log_prob(tokens), sampler.log_prob(tokens), trainer.entropy())
    ratio, explained = metrics.temperature_of(**{name: values.mean().item() for name, values in terms.items()})
    assert abs(ratio - 0.9) < 0.015 and explained > 0.9
