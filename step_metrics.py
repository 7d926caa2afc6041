"""The metrics of a step: functions of what was sampled and graded, and of the seconds that it took.

`docs/runs.md` explains each name. A new metric is one line in the function that knows what it needs.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
import torch

from batch import Batch, Metrics, Rollout, Update
from fsdp_utils import World, sum_over_trainers
from grading import NOT_GRADED
from packing import cost_of
from policy import Policy
from runtime.cards import GPUS

VARIANTS = ("PCIe", "NVL", "4090 D", "Ti", "Laptop")  # GPUs that are slower or faster than their namesakes


@dataclass(frozen=True)
class Work:
    """The work of a step on all ranks together. The trainer's tokens count a prompt once for each completion."""

    sampled_tokens: int  # in completions, also in those that are not trained on
    completion_tokens: int  # in the completions that are trained on
    update_tokens: int  # in all passes over the rollout
    update_flops: float  # in all passes


def floats(metrics: Metrics) -> Metrics:
    """The metrics as Python's own numbers: JSON knows no numpy."""
    return {name: float(value) for name, value in metrics.items()}


def rollout_metrics(rollout: Rollout, group_size: int) -> Metrics:
    """The metrics of a step's completions, of which most need grades."""
    lengths_B = rollout.completion_lengths_B
    metrics = {
        "completion/tokens_mean": lengths_B.mean(),
        "completion/tokens_max": lengths_B.max(),
        "completion/frac_truncated": rollout.is_truncated_B.mean(),
    }
    if rollout.has_replies:
        metrics["completion/turns_mean"] = np.mean([turns.max() + 1 for turns in rollout.turns])
    if any(grade.status != NOT_GRADED for grade in rollout.grades):  # not with --reward none
        metrics |= reward_metrics(rollout, group_size) | part_metrics(rollout)
    return floats(metrics)


def reward_metrics(rollout: Rollout, group_size: int) -> Metrics:
    """The metrics of rewards, of right and wrong completions, and of what could not be graded.

    What a function of the user's could not grade counts in the last ones alone.
    """
    lengths_B, is_compared_B = rollout.completion_lengths_B, rollout.is_compared_B
    group_B = np.arange(len(lengths_B)) // group_size
    rewards_B = rollout.rewards_B[is_compared_B]
    is_right_B, is_wrong_B = is_compared_B & rollout.is_correct_B, is_compared_B & ~rollout.is_correct_B
    has_right_P, has_wrong_P = (each_B.reshape(-1, group_size).any(axis=1) for each_B in (is_right_B, is_wrong_B))
    metrics = {
        "reward/mean": rewards_B.mean(),
        "reward/mean_stderr": stderr_of_mean(rewards_B, group_B[is_compared_B]),
        "reward/std": rewards_B.std(),
        "reward/frac_groups_all_right": (has_right_P & ~has_wrong_P).mean(),
        "reward/frac_groups_all_wrong": (has_wrong_P & ~has_right_P).mean(),
    }
    if group_size > 1:
        metrics["reward/frac_groups_with_signal"] = differs_P(rollout, rollout.rewards_B, group_size).mean()
    by_outcome = {"completion/tokens_right_mean": is_right_B, "completion/tokens_wrong_mean": is_wrong_B}
    for name, chosen_B in by_outcome.items():
        if chosen_B.any():
            metrics[name] = lengths_B[chosen_B].mean()
            metrics[f"{name}_stderr"] = stderr_of_mean(lengths_B[chosen_B], group_B[chosen_B])
    num_failed = sum(grade.is_failed for grade in rollout.grades)
    metrics["reward/timeouts"] = sum(grade.status == "timeout" for grade in rollout.grades)
    metrics["reward/errors"] = num_failed - metrics["reward/timeouts"]
    if num_left_out := np.count_nonzero(~is_compared_B):
        metrics["reward/left_out"] = num_left_out
    return metrics


def differs_P(rollout: Rollout, values_B: np.ndarray, group_size: int) -> np.ndarray:
    """bool: not all values of the group are the same; those that could not be graded are no values."""
    most_B, least_B = (np.where(rollout.is_compared_B, values_B, none) for none in (-np.inf, np.inf))
    return most_B.reshape(-1, group_size).max(axis=1) > least_B.reshape(-1, group_size).min(axis=1)


def part_metrics(rollout: Rollout) -> Metrics:
    """The mean of each part of a reward that is a sum; a part that is alone is the reward itself."""
    names = dict.fromkeys(name for grade in rollout.grades for name in grade.parts)
    grades = [grade for grade in rollout.grades if grade.is_compared]
    if len(names) == 1 or not grades:
        return {}
    metrics = {}
    for name in names:
        shown = re.sub(r".*/(?=[^/]+\.py:)", "", name)  # /home/me/my_reward.py:score
        shown = name if f"reward/part/{shown}" in metrics else shown  # another folder has one of this name
        metrics[f"reward/part/{shown}"] = sum(grade.parts.get(name, 0.0) for grade in grades) / len(grades)
    return metrics


def stderr_of_mean(values_B: np.ndarray, group_B: np.ndarray) -> float:
    """Standard error of the mean of values whose groups are independent; nan for a single group.

    The values of one prompt are alike, so its deviations from the mean are summed before they are squared.
    """
    sums_P, counts_P = np.bincount(group_B, values_B), np.bincount(group_B)
    num_groups, count = np.count_nonzero(counts_P), counts_P.sum()
    if num_groups < 2:
        return math.nan
    deviations_P = sums_P - counts_P * (sums_P.sum() / count)
    return math.sqrt(np.square(deviations_P).sum() * num_groups / (num_groups - 1)) / float(count)


def lag_metrics(trained: Rollout) -> Metrics:
    """Steps by which the weights that sampled are behind; {} where they cannot be."""
    if "lags" not in trained.parts:
        return {}
    # Without the tokens that an environment said.
    lags_B = [lags[chosen] for lags, chosen in zip(trained.parts["lags"], trained.is_sampled, strict=True)]
    lags = [lags for lags, length in zip(lags_B, trained.trained_lengths_B, strict=True) if length]
    together = np.concatenate([*lags, np.zeros(0 if lags else 1)])
    is_mixed = [len(set(lags.tolist())) > 1 for lags in lags_B]
    return floats({
        "rollout/lag_mean": together.mean(),
        "rollout/lag_max": together.max(),
        "rollout/frac_old_tokens": (together > 0).mean(),
        "rollout/frac_mixed": np.mean(is_mixed),
    })  # fmt: skip


def work_of_step(
    sampled: Rollout,
    trained: Rollout,
    updates: list[Update],
    num_iterations: int,
    policy: Policy,
) -> Work:
    """The work of a step, the same on every rank; all ranks call it. `updates`: of one pass over `trained`."""
    flops = torch.tensor(sum(update_flops(policy, update) for update in updates), dtype=torch.float64)
    return Work(
        sampled_tokens=int(sampled.completion_lengths_B.sum()),
        completion_tokens=int(trained.completion_lengths_B.sum()),
        update_tokens=int(trained.sequence_lengths_B.sum()) * num_iterations,
        update_flops=sum_over_trainers(flops).item() * num_iterations,
    )


def update_flops(policy: Policy, batches: list[Batch]) -> float:
    """FLOPs of a forward and a backward pass over these batches.

    3 x (2 x numbers in the matrices x tokens + 2 x layers x width of the queries x sum of length^2): the forward
    pass, and twice that for the backward pass, of which half makes the weights' gradients and falls away with LoRA.
    The head counts at every token. Recomputation, biases, norms, embedding and vision tower do not count.
    """
    cost = sum(cost_of(batch, policy.parity_length) for batch in batches)
    return (2 if policy.adapter else 3) * policy.flops_per_token * cost


def throughput(work: Work, seconds_RE: list[np.ndarray], metrics: Metrics, world: World) -> Metrics:
    """The `perf/` metrics of a step and `time/rollout_tail_s`, from its times in `metrics`.

    `seconds_RE`: the time of each engine in each round of sampling. The tail is the time from the end of the first
    engine to the end of the last one.
    """
    sample_s, update_s, step_s = metrics["time/sample_s"], metrics["time/update_s"], metrics["time/step_s"]
    flops_per_s = work.update_flops / update_s / world.num_trainers  # on each GPU
    rates = {}
    if world.has_engines:
        rates["time/rollout_tail_s"] = sum(seconds_E.max() - seconds_E.min() for seconds_E in seconds_RE)
        num_samplers = world.num_engines * world.tp_size
        rates["perf/sample_tokens_per_s_per_gpu"] = work.sampled_tokens / sample_s / num_samplers
    rates |= {
        "perf/tokens_per_s": work.completion_tokens / step_s,
        "perf/update_tokens_per_s_per_gpu": work.update_tokens / update_s / world.num_trainers,
        "perf/update_tflops_per_gpu": flops_per_s / 1e12,
    }
    if world.device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(world.device))):
        rates["perf/update_mfu"] = flops_per_s / peak
    return floats(rates)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that CUDA gives it; None if not in `GPUS` (its H100 is the SXM)."""
    if any(variant in device_name for variant in VARIANTS):
        return None
    words = re.split(r"[ -]", device_name.replace("RTX ", "RTX"))
    for name, (_, tera_flops, *_) in GPUS.items():
        if name.partition("-")[0] in words:
            return tera_flops * 1e12
    return None
