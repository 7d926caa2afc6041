"""The metrics of a step: functions of what was sampled, graded and trained, and of the seconds that it took.

`docs/runs.md` explains each name. A new metric is one line in the function that knows what it
needs; a metric of the loss is one line in `grpo.total_loss`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from batch import Batch, Metrics, Pass, Rollout
from fsdp_utils import World, max_over_trainers, sum_over_trainers
from runtime.cards import GPUS

LEAST_SPREAD = 0.02  # a token's log-prob, squared: entropies above about 0.05 have more
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
    if rollout.has_rewards:
        metrics |= reward_metrics(rollout, group_size) | part_metrics(rollout)
    return floats(metrics)


def reward_metrics(rollout: Rollout, group_size: int) -> Metrics:
    """The metrics of rewards, of right and wrong completions, and of what could not be graded."""
    lengths_B = rollout.completion_lengths_B
    group_B = np.arange(len(lengths_B)) // group_size
    rewards_PG = rollout.rewards_B.reshape(-1, group_size)
    is_correct_PG = rollout.is_correct_B.reshape(-1, group_size)
    metrics = {
        "reward/mean": rewards_PG.mean(),
        "reward/mean_stderr": stderr_of_mean(rollout.rewards_B, group_B),
        "reward/std": rewards_PG.std(),
        "reward/frac_groups_all_right": is_correct_PG.all(axis=1).mean(),
        "reward/frac_groups_all_wrong": (~is_correct_PG).all(axis=1).mean(),
    }
    if group_size > 1:
        metrics["reward/frac_groups_with_signal"] = (rewards_PG.max(axis=1) > rewards_PG.min(axis=1)).mean()
    by_outcome = {
        "completion/tokens_right_mean": rollout.is_correct_B,
        "completion/tokens_wrong_mean": ~rollout.is_correct_B,
    }
    for name, chosen_B in by_outcome.items():
        if chosen_B.any():
            metrics[name] = lengths_B[chosen_B].mean()
            metrics[f"{name}_stderr"] = stderr_of_mean(lengths_B[chosen_B], group_B[chosen_B])
    num_failed = sum(grade.is_failed for grade in rollout.grades)
    metrics["reward/timeouts"] = sum(grade.status == "timeout" for grade in rollout.grades)
    metrics["reward/errors"] = num_failed - metrics["reward/timeouts"]
    return metrics


def part_metrics(rollout: Rollout) -> Metrics:
    """The mean of each part of a reward that is a sum; a part that is alone is the reward itself."""
    names = dict.fromkeys(name for grade in rollout.grades for name in grade.parts)
    if len(names) == 1:
        return {}
    short = {name: re.sub(r".*/(?=[^/]+\.py:)", "", name) for name in names}  # /home/me/my_reward.py:score
    counts = Counter(short.values())
    metrics = {}
    for name in names:
        shown = short[name] if counts[short[name]] == 1 else name
        parts = [grade.parts.get(name, 0.0) for grade in rollout.grades]
        metrics[f"reward/part/{shown}"] = sum(parts) / len(parts)
    return metrics


def stderr_of_mean(values_B: np.ndarray, group_B: np.ndarray) -> float:
    """Standard error of the mean of values whose groups are independent; nan for a single group."""
    return stderr_of_ratio(np.bincount(group_B, values_B), np.bincount(group_B))


def stderr_of_ratio(sums_P: np.ndarray, counts_P: np.ndarray) -> float:
    """Standard error of sum / count, where the groups are independent; nan if only one has a count.

    The values of one prompt are alike, so its deviations from the mean are summed before they are squared.
    """
    num_groups, count = np.count_nonzero(counts_P), counts_P.sum()
    if num_groups < 2:
        return math.nan
    deviations_P = sums_P - counts_P * (sums_P.sum() / count)
    return math.sqrt(np.square(deviations_P).sum() * num_groups / (num_groups - 1)) / float(count)


def standard_errors(passes: list[Pass], num_prompts: int, group_size: int, world: World) -> dict[str, float]:
    """The standard errors of the metrics that are means over tokens: prompts are drawn, so their sums vary."""
    names = list(passes[0].sums_of_sequences)
    sums_PK = torch.zeros(num_prompts, len(names), dtype=torch.float64)
    for done in passes:
        sums_SK = torch.stack(list(done.sums_of_sequences.values()), dim=1).double().cpu()
        prompts_S = [(segment.index or 0) // group_size for segment in done.batch.segments_S]  # an empty one adds zeros
        sums_PK.index_add_(0, torch.tensor(prompts_S), sums_SK)
    sums_KP = sum_over_trainers(sums_PK.to(world.device)).T.cpu().numpy()
    sums = dict(zip(names, sums_KP, strict=True))
    lengths_P = sums.pop("tokens")
    return {f"{name}_stderr": stderr_of_ratio(sums_P, lengths_P) for name, sums_P in sums.items()}


def temperature_of(slope: float, spread: float, squares: float) -> tuple[float, float]:
    """(the sampler's temperature / the trainer's, share of the difference that it explains), from the means over tokens
    of `grpo.temperature_terms`. Near 1 where the policy is almost certain of every token: a few rare ones would decide.
    """
    if not spread * squares > 0:  # nothing varies, or nothing differs
        return 1.0, 0.0
    return 1.0 / max(1.0 - slope / (spread + LEAST_SPREAD), 0.1), slope**2 / (spread * squares)


def idle_share(batches: list[Batch], parity_length: float, world: World) -> float:
    """The share of the update in which ranks wait, by cost, for the costliest batch of each micro step."""
    costs = torch.tensor([batch.cost(parity_length) for batch in batches])
    work = sum_over_trainers(costs).sum()
    room = max_over_trainers(costs).sum() * world.num_trainers
    return 1.0 - (work / room).item()


def lag_metrics(trained: Rollout) -> Metrics:
    """Steps by which the weights that sampled are behind; {} where they cannot be."""
    if "lags" not in trained.parts:
        return {}
    lags_B = trained.sampled_only(trained.parts["lags"])
    lags = [lags for lags, length in zip(lags_B, trained.trained_lengths_B, strict=True) if length]
    together = np.concatenate([*lags, np.zeros(0 if lags else 1)])
    is_mixed = [len(set(lags.tolist())) > 1 for lags in lags_B]
    return floats({
        "rollout/lag_mean": together.mean(),
        "rollout/lag_max": together.max(),
        "rollout/frac_old_tokens": (together > 0).mean(),
        "rollout/frac_mixed": np.mean(is_mixed),
    })  # fmt: skip


def merge_updates(updates: list[Metrics]) -> Metrics:
    """The metrics of a step's updates as one: the maximum of `..._max`, the minimum of `..._min`, else the mean.

    The mean of standard errors is right for updates that vary alike, and too large for independent ones.
    """
    merged = {}
    for name in updates[0] if updates else ():
        values = [metrics[name] for metrics in updates]
        if "_gap_lag_" in name:  # only the updates that have tokens of this lag count
            values = [value for value in values if not math.isnan(value)] or [math.nan]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name.endswith("_min"):
            merged[name] = min(values)
        elif name.startswith("optim/skipped_"):
            merged[name] = sum(values)
        elif name == "optim/lr":
            merged[name] = values[-1]
        else:
            merged[name] = sum(values) / len(values)
    return merged


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
