"""How well a step used its GPUs: tokens per second, FLOP/s, MFU, and the time spent waiting."""

from __future__ import annotations

import math
from argparse import Namespace

import numpy as np
import torch

from batch import Batch, Rollout
from fsdp_utils import World, sum_over_trainers
from metrics import Metrics
from model.sizes import GPUS
from policy import Policy


def throughput(
    metrics: Metrics, sampled: Rollout, trained: Rollout, updates: list[list[Batch]], seconds_RE: list[np.ndarray], args: Namespace,
    policy: Policy, world: World,
) -> Metrics:  # fmt: skip
    """The `perf/` metrics of a step and `time/rollout_tail_s`, from its phase times and `perf/update_idle_frac` in `metrics`.

    `seconds_RE`: for each round of sampling, what each engine took. The tail is the time between the first engine's last completion and
    the last one's. `perf/idle_frac` is the share of the step in which a GPU waits, on average: in sampling for the last engine, by the
    clock; in the update for the costliest micro-batch, by cost. Tokens of the trainer are those of prompts and completions, a prompt once
    for each completion; with --share_prompts `perf/shared_frac` of them were not computed, nor counted in FLOP/s and MFU.
    """
    passes, lengths = args.passes_per_step, trained.sequence_lengths_B
    scored = 0  # positions that got old or reference log-probs
    for share, batches in zip(np.split(lengths, len(updates)), updates, strict=True):
        scored += share.sum() * sum(
            known is not None for known in (batches[0].old_logprobs_N, batches[0].ref_logprobs_N)
        )
    update_s, step_s = metrics["time/update_s"], metrics["time/step_s"]
    waited = sum(seconds.max() - seconds.mean() for seconds in seconds_RE) + metrics["perf/update_idle_frac"] * update_s
    packed = [batch for batches in updates for batch in batches]
    own = [
        sum(batch.cost(length) for batch in packed) for length in (policy.parity_length, math.inf)
    ]  # at infinity: positions
    cost, positions = sum_over_trainers(torch.tensor(own, dtype=torch.float64)).tolist()
    flops = update_flops(policy, cost, bool(args.lora_rank)) * passes / update_s / world.num_trainers
    found = {
        "time/rollout_tail_s": sum(seconds.max() - seconds.min() for seconds in seconds_RE),
        "perf/idle_frac": waited / step_s,
        "perf/tokens_per_s": trained.completion_lengths_B.sum() / step_s,
        "perf/sample_tokens_per_s_per_gpu": sampled.completion_lengths_B.sum() / metrics["time/sample_s"] / world.num_trainers,
        "perf/update_tokens_per_s_per_gpu": lengths.sum() * passes / update_s / world.num_trainers,
        "perf/update_tflops_per_gpu": flops / 1e12,
    }
    if args.share_prompts:
        found["perf/shared_frac"] = 1 - positions / lengths.sum()
    if scored:
        found["perf/logprobs_tokens_per_s_per_gpu"] = scored / metrics["time/logprobs_s"] / world.num_trainers
    if peak := peak_flops(torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""):
        found["perf/update_mfu"] = flops / peak
    return {name: float(value) for name, value in found.items()}


def update_flops(policy: Policy, cost: float, has_frozen_weights: bool) -> float:
    """FLOPs that one pass of updates needs at the positions that it computes, from the sum of their `batch.training_costs`.

    3 x (2 x numbers in the matrices x tokens + 2 x layers x width of the queries x sum of length^2): the forward pass, and twice that for
    the backward pass, whose half, the weights' gradients, falls away where they are frozen (LoRA). Recomputation is not counted, nor are
    biases, norms, embedding and vision tower; the head is, at every position, as the field does.
    """
    return (2 if has_frozen_weights else 3) * policy.flops_per_token * cost


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that CUDA gives it; None for those that `shapes.GPUS` does not know (its H100 is the SXM)."""
    for name, (_, tera_flops, *_) in GPUS.items():
        if name.partition("-")[0] in device_name and not any(variant in device_name for variant in ("PCIe", "NVL")):
            return tera_flops * 1e12
    return None
