"""The metrics of a step: functions of what was sampled, graded and trained, and of the seconds that it took.

`docs/runs.md` explains each name. A new metric is one line in the function that knows what it needs; a metric of the
loss is one line in `grpo.total_loss`.
"""

from __future__ import annotations

import math
import re

import numpy as np
import torch

from batch import Batch, Metrics, Pass, Rollout, Work
from fsdp_utils import World, max_over_trainers, sum_over_trainers
from runtime.cards import GPUS

LEAST_SPREAD = 0.02  # of a token's log-prob, squared: entropies above about 0.05 have more


def rollout_metrics(rollout: Rollout, group_size: int) -> Metrics:
    """The metrics of a step's completions, of which most need grades; of a sum also the mean of each part."""
    rewards_PG = rollout.rewards_B.reshape(-1, group_size)
    is_correct_B, lengths_B = rollout.is_correct_B, rollout.completion_lengths_B
    is_correct_PG = is_correct_B.reshape(-1, group_size)
    group_B = np.arange(len(lengths_B)) // group_size
    of_lengths = {
        "completion/tokens_mean": lengths_B.mean(),
        "completion/tokens_max": lengths_B.max(),
        "completion/frac_truncated": rollout.is_truncated_B.mean(),
    }
    if rollout.is_sampled is not None:
        of_lengths["completion/turns_mean"] = np.mean([each.max() + 1 for each in rollout.turns])
    if not rollout.has_rewards:
        return {name: float(value) for name, value in of_lengths.items()}
    metrics = of_lengths | {
        "reward/mean": rewards_PG.mean(),
        "reward/mean_stderr": stderr_of_mean(rollout.rewards_B, group_B),
        "reward/std": rewards_PG.std(),
        "reward/frac_groups_all_right": is_correct_PG.all(axis=1).mean(),
        "reward/frac_groups_all_wrong": (~is_correct_PG).all(axis=1).mean(),
    }
    if group_size > 1:
        metrics["reward/frac_groups_with_signal"] = (rewards_PG.max(axis=1) > rewards_PG.min(axis=1)).mean()
    of = {"completion/tokens_right_mean": is_correct_B, "completion/tokens_wrong_mean": ~is_correct_B}
    for name, chosen_B in of.items():
        if chosen_B.any():
            metrics[name] = lengths_B[chosen_B].mean()
            metrics[f"{name}_stderr"] = stderr_of_mean(lengths_B[chosen_B], group_B[chosen_B])
    grades = rollout.grades
    metrics["reward/timeouts"] = sum(grade.status == "timeout" for grade in grades)
    metrics["reward/errors"] = sum(grade.is_failed for grade in grades) - metrics["reward/timeouts"]
    names = dict.fromkeys(name for grade in grades for name in grade.parts)
    short = {name: re.sub(r".*/(?=[^/]+\.py:)", "", name) for name in names}  # of /home/me/my_reward.py:score
    shared = {each for each in short.values() if list(short.values()).count(each) > 1}
    for name in names if len(names) > 1 else ():
        shown = name if short[name] in shared else short[name]
        metrics[f"reward/part/{shown}"] = sum(grade.parts.get(name, 0.0) for grade in grades) / len(grades)
    return {name: float(value) for name, value in metrics.items()}


def stderr_of_mean(values_B: np.ndarray, group_B: np.ndarray) -> float:
    """Standard error of the mean of values whose groups are independent; nan of a single group."""
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
    sums_PK = torch.zeros(num_prompts, len(passes[0].sums_of_sequences), dtype=torch.float64)
    for each in passes:
        sums_SK = torch.stack(list(each.sums_of_sequences.values()), dim=1).double().cpu()
        prompts_S = [(segment.index or 0) // group_size for segment in each.batch.segments_S]  # an empty one adds zeros
        sums_PK.index_add_(0, torch.tensor(prompts_S), sums_SK)
    sums_KP = sum_over_trainers(sums_PK.to(world.device)).T.cpu().numpy()
    named = dict(zip(passes[0].sums_of_sequences, sums_KP, strict=True))
    lengths_P = named.pop("tokens")
    return {f"{name}_stderr": stderr_of_ratio(sums_P, lengths_P) for name, sums_P in named.items()}


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
    return 1.0 - (sum_over_trainers(costs).sum() / (max_over_trainers(costs).sum() * world.num_trainers)).item()


def lag_metrics(trained: Rollout) -> Metrics:
    """How many steps the weights that sampled are behind; {} where they cannot be."""
    if trained.lags is None:
        return {}
    lags_B = trained.sampled_only(trained.lags)
    lags = [lags for lags, length in zip(lags_B, trained.trained_lengths_B, strict=True) if length]
    together = np.concatenate([*lags, np.zeros(0 if lags else 1)])
    is_mixed = [len(set(each.tolist())) > 1 for each in lags_B]
    found = {"rollout/lag_mean": together.mean(), "rollout/lag_max": together.max()}
    found["rollout/frac_old_tokens"] = (together > 0).mean()
    return {name: float(value) for name, value in found.items()} | {"rollout/frac_mixed": float(np.mean(is_mixed))}


def merge_updates(updates: list[Metrics]) -> Metrics:
    """The metrics of a step's updates as one: the maximum of `..._max`, the minimum of `..._min`, else the mean.

    The mean of standard errors is right for updates that vary alike, and too large for independent ones.
    """
    merged = {}
    for name in updates[0] if updates else ():
        values = [metrics[name] for metrics in updates]
        if "_gap_lag_" in name:  # of the updates that have tokens of this lag
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
    """The `perf/` metrics of a step and `time/rollout_tail_s`, from its times and `perf/update_idle_frac` in `metrics`.

    `seconds_RE`: the time of each engine in each round of sampling. The tail is the time from the end of the first
    engine to the end of the last one. `perf/idle_frac` is the share of the step in which a GPU waits, on average: in
    sampling for the last engine, by the clock; in the update for the costliest micro-batch, by cost.
    """
    update_s, step_s = metrics["time/update_s"], metrics["time/step_s"]
    waited = sum(seconds_E.max() - seconds_E.mean() for seconds_E in seconds_RE)
    waited += metrics["perf/update_idle_frac"] * update_s
    num_samplers = world.num_engines * world.tp_size
    flops_per_s = work.update_flops / update_s / world.num_trainers  # of each GPU
    found = {
        "time/rollout_tail_s": sum(seconds_E.max() - seconds_E.min() for seconds_E in seconds_RE),
        "perf/idle_frac": waited / step_s,
        "perf/tokens_per_s": work.completion_tokens / step_s,
        "perf/sample_tokens_per_s_per_gpu": work.sampled_tokens / metrics["time/sample_s"] / num_samplers,
        "perf/update_tokens_per_s_per_gpu": work.update_tokens / update_s / world.num_trainers,
        "perf/update_tflops_per_gpu": flops_per_s / 1e12,
    }
    if not world.has_engines:  # the ranks have nothing to do until the servers' completions are there
        del found["time/rollout_tail_s"], found["perf/sample_tokens_per_s_per_gpu"]
        found["perf/idle_frac"] = (metrics["time/sample_s"] + metrics["perf/update_idle_frac"] * update_s) / step_s
    of_some = {"perf/shared_frac": work.shared_frac, "perf/teacher_s": work.teacher_s}
    found |= {name: value for name, value in of_some.items() if value is not None}
    if work.logprobs_tokens:
        tokens_per_s = work.logprobs_tokens / metrics["time/logprobs_s"]
        found["perf/logprobs_tokens_per_s_per_gpu"] = tokens_per_s / world.num_trainers
    if world.device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(world.device))):
        found["perf/update_mfu"] = flops_per_s / peak
    return {name: float(value) for name, value in found.items()}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that CUDA gives it; None if not in `GPUS` (its H100 is the SXM)."""
    is_variant = any(variant in device_name for variant in ("PCIe", "NVL", "4090 D", "Ti", "Laptop"))
    words = re.split(r"[ -]", device_name.replace("RTX ", "RTX"))
    for name, (_, tera_flops, *_) in GPUS.items():
        if name.partition("-")[0] in words and not is_variant:
            return tera_flops * 1e12
    return None
