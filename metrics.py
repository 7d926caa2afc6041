"""The metrics of a step: functions of what was sampled, graded and trained, and of the seconds that it took.

`docs/runs.md` explains each name. A new metric is one line in the function that knows what it
needs; a metric of the loss is one line in `token_metrics`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from batch import Batch, Metrics, Rollout, Update
from fsdp_utils import World, gather_from_ranks, max_over_trainers, sum_over_trainers
from grpo import Algorithm, Loss, Tokens, k1, k3, masked_sum
from runtime.cards import GPUS
from runtime.start import RunError

LEAST_SPREAD = 0.02  # a token's log-prob, squared: entropies above about 0.05 have more
MAXIMA = ("policy/ratio_max", "policy/ratio_min", "policy/rollout_gap_max")  # over tokens; the others are means
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
    """Standard error of the mean of values whose groups are independent; nan for a single group.

    The values of one prompt are alike, so its deviations from the mean are summed before they are squared.
    """
    sums_P, counts_P = np.bincount(group_B, values_B), np.bincount(group_B)
    num_groups, count = np.count_nonzero(counts_P), counts_P.sum()
    if num_groups < 2:
        return math.nan
    deviations_P = sums_P - counts_P * (sums_P.sum() / count)
    return math.sqrt(np.square(deviations_P).sum() * num_groups / (num_groups - 1)) / float(count)


# Of the loss ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def pass_metrics(batch: Batch, t: Tokens, loss: Loss, num_tokens: int, algorithm: Algorithm) -> dict[str, Tensor]:
    """The metrics of a micro-batch, on the device: its part of each mean over the update's tokens, and its `MAXIMA`."""
    metrics, mask_N = {}, batch.loss_mask_N
    for name, values_N in token_metrics(batch, t, loss, algorithm).items():
        if name in MAXIMA:
            metrics[name] = torch.where(mask_N, values_N, -torch.inf).max()
        else:
            metrics[name] = masked_sum(values_N, mask_N) / num_tokens
    return metrics


def token_metrics(batch: Batch, t: Tokens, loss: Loss, algorithm: Algorithm) -> dict[str, Tensor]:
    """The values of the tokens that metrics average, or of which they take the maximum."""
    weights_N, is_outside_N = algorithm.rollout_correction(t)
    # What compares the two engines needs the trainer's log-probs.
    old_N = t.logprobs if algorithm.old_logprobs == "rollout" else t.old_logprobs
    gap_N = (old_N.exp() - t.rollout_logprobs.exp()).abs()
    values = {
        "policy/entropy": t.entropies,
        "policy/clip_frac": loss.is_low | loss.is_high,
        "policy/clip_frac_low": loss.is_low,
        "policy/clip_frac_high": loss.is_high,
        "policy/approx_kl": k1(t.logprobs - t.old_logprobs),
        "policy/ratio_max": loss.ratio,
        "policy/ratio_min": -loss.ratio,  # whose maximum is minus the minimum
        "policy/rollout_gap_max": gap_N,
        "policy/rollout_gap_mean": gap_N,
        "policy/rollout_kl": k1(old_N - t.rollout_logprobs),
        "weight": weights_N,
        "weight_squared": weights_N.square(),
    }
    values |= temperature_terms(old_N, t.rollout_logprobs, t.entropies)
    values |= {f"loss/{name}": loss.metrics[name] for name in sorted(loss.metrics)}  # in one order on all ranks
    if algorithm.is_corrected:
        values["policy/rollout_clip_frac"] = is_outside_N
    if batch.ref_logprobs_N is not None:
        values |= kl_metrics(batch, batch.ref_logprobs_N - t.logprobs, algorithm)
    for lag in range(algorithm.most_lag + 1) if algorithm.most_lag else ():
        is_lag_N = (batch.lags_N == lag).float()
        values[f"tokens_of_lag_{lag}"] = is_lag_N
        values[f"policy/rollout_gap_lag_{lag}"] = gap_N * is_lag_N
    return values


def kl_metrics(batch: Batch, x_N: Tensor, algorithm: Algorithm) -> dict[str, Tensor]:
    """The values that the metrics of the KL average over tokens; `x_N`: reference log-prob - log-prob."""
    means = {"policy/kl_ref": k1(x_N)}  # whatever the loss uses: a clamp would cut rare tokens with a large k3
    if algorithm.kl_clamp:
        means["policy/kl_clamp_frac"] = k3(x_N, kl_clamp=0.0) != k3(x_N, kl_clamp=algorithm.kl_clamp)
    if algorithm.has_teacher:
        kl_N = k1(x_N) if batch.distilled is None else batch.distilled.kl_N
        means["distill/kl"] = kl_N * batch.kl_weights_N  # so its mean is over the completions with a hint
    if batch.distilled is not None:
        means["distill/agreement"] = batch.distilled.agrees_N * batch.kl_weights_N
    return means


def temperature_terms(logprobs: Tensor, rollout_logprobs: Tensor, entropies: Tensor) -> dict[str, Tensor]:
    """x * d, x^2 and d^2 of each token, with d = trainer's - sampler's log-prob: the sums give the slope of d over x.

    x = log-prob + entropy is the derivative of the token's log-prob by the inverse temperature: at temperature T_s the
    sampler's log-probs are the trainer's + x (T / T_s - 1), to first order. Clamps: a few rare tokens do not decide.
    """
    x = (logprobs + entropies).clamp(-3.0, 3.0)
    difference = (logprobs - rollout_logprobs).clamp(-0.5, 0.5)
    return {"slope": x * difference, "spread": x.square(), "squares": difference.square()}


def temperature_of(slope: float, spread: float, squares: float) -> tuple[float, float]:
    """(the sampler's temperature / the trainer's, share of the difference that it explains), from the means over tokens
    of `temperature_terms`. Near 1 where the policy is almost certain of every token: a few rare ones would decide.
    """
    if not spread * squares > 0:  # nothing varies, or nothing differs
        return 1.0, 0.0
    return 1.0 / max(1.0 - slope / (spread + LEAST_SPREAD), 0.1), slope**2 / (spread * squares)


def loss_metrics(passes: list[dict[str, Tensor]]) -> Metrics:
    """The metrics of an update's loss, over all micro-batches and ranks.

    Raises RunError where a loss of the user's has not the same metrics in all of them, which are added up.
    """
    kinds = list(set().union(*gather_from_ranks({tuple(each) for each in passes})))
    if len(kinds) > 1:
        here, there = (", ".join(name[5:] for name in each if name[:5] == "loss/") or "none" for each in kinds[:2])
        raise RunError(f"--policy_loss returned the metrics {here}, and elsewhere {there}; return all each time.")
    values = torch.stack([torch.stack(list(each.values())) for each in passes])
    sums = sum_over_trainers(values.sum(dim=0)).tolist()
    maxima = max_over_trainers(values.amax(dim=0)).tolist()
    metrics = {name: (maxima if name in MAXIMA else sums)[i] for i, name in enumerate(passes[0])}
    terms = {name: metrics.pop(name) for name in ("slope", "spread", "squares")}
    metrics["policy/rollout_temperature"], metrics["policy/rollout_temperature_r2"] = temperature_of(**terms)
    metrics["policy/ratio_min"] *= -1
    for name in [name for name in metrics if name.startswith("tokens_of_lag_")]:
        share = metrics.pop(name)
        gap = f"policy/rollout_gap_{name.removeprefix('tokens_of_')}"
        metrics[gap] = metrics[gap] / share if share else math.nan  # no token is of this lag
    weight, weight_squared = metrics.pop("weight"), metrics.pop("weight_squared")
    metrics["policy/rollout_ess"] = weight**2 / weight_squared if weight_squared else 0.0  # (sum w)^2 / (n sum w^2)
    return metrics


# Of the step ----------------------------------------------------------------------------------------------------------


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
    """The metrics of a step's updates as one: the maximum of `..._max`, the minimum of `..._min`, else the mean."""
    merged = {}
    for name in dict.fromkeys(chain.from_iterable(updates)):
        values = [metrics[name] for metrics in updates if name in metrics]
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


def work_of_step(
    sampled: Rollout,
    trained: Rollout,
    updates: list[Update],
    num_iterations: int,
    flops_of: Callable[[list[Batch]], float],
) -> Work:
    """The work of a step, the same on every rank; all ranks call it. `updates`: of one pass over `trained`.

    `flops_of`: `Policy.update_flops`.
    """
    flops = torch.tensor(sum(flops_of(update.batches) for update in updates), dtype=torch.float64)
    return Work(
        sampled_tokens=int(sampled.completion_lengths_B.sum()),
        completion_tokens=int(trained.completion_lengths_B.sum()),
        update_tokens=int(trained.sequence_lengths_B.sum()) * num_iterations,
        update_flops=sum_over_trainers(flops).item() * num_iterations,
    )


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
