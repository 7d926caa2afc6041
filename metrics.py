"""The metrics of an update: functions of what was trained, and of how ranks waited for each other.

`docs/runs.md` explains each name. A new metric of the loss is one line in `token_metrics`. Those of the
step, of what was sampled and of the seconds that it took, are in `step_metrics.py`.
"""

from __future__ import annotations

import math
from itertools import chain

import torch
from torch import Tensor

from batch import Batch, Metrics
from fsdp_utils import World, gather_from_ranks, max_over_trainers, sum_over_trainers
from grpo import Algorithm, Loss, Tokens, k1, k3, masked_sum
from runtime.rank import RunError

LEAST_SPREAD = 0.02  # a token's log-prob, squared: entropies above about 0.05 have more
MAXIMA = ("policy/ratio_max", "policy/ratio_min", "policy/rollout_gap_max")  # over tokens; the others are means


@torch.no_grad()
def pass_metrics(batch: Batch, t: Tokens, loss: Loss, algorithm: Algorithm) -> dict[str, Tensor]:
    """The metrics of a micro-batch, on the device: its part of each mean over the update's tokens, and its `MAXIMA`."""
    metrics, mask_N = {}, batch.loss_mask_N
    for name, values_N in token_metrics(batch, t, loss, algorithm).items():
        if name in MAXIMA:
            metrics[name] = torch.where(mask_N, values_N, -torch.inf).max()
        else:
            metrics[name] = masked_sum(values_N, mask_N) / batch.update_tokens
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
        missing = ", ".join(sorted(name.removeprefix("loss/") for name in set(kinds[0]) ^ set(kinds[1])))
        raise RunError(f"--policy_loss returns the metrics {missing} only sometimes; return all each time.")
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


def idle_share(batches: list[Batch], parity_length: float, world: World) -> float:
    """The share of the update in which ranks wait, by cost, for the costliest batch of each micro step."""
    costs = torch.tensor([batch.cost(parity_length) for batch in batches])
    work = sum_over_trainers(costs).sum()
    room = max_over_trainers(costs).sum() * world.num_trainers
    return 1.0 - (work / room).item()
