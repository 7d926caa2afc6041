"""From the graded rollout of a step to new weights: packing, old and reference log-probs, advantages, the loss, the optimizer update.

The functions stand in the order in which the loop of `train_grpo.py` calls them; the equations they put together are in `grpo.py`.
Dimensions: `batch.py`.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

import grpo
from batch import Batch, Rollout, from_positions, pack, plan_micro_batches, shared_positions, to_positions
from fsdp_utils import (
    World,
    activations_on_host,
    clip_grad_norm,
    gather_from_ranks,
    keep_gathered,
    max_over_trainers,
    reduce_gradients,
    release_gathered,
    sum_over_trainers,
)  # fmt: skip
from metrics import Metrics
from plan import Plan
from policy import Policy


def pack_updates(
    rollout: Rollout, plan: Plan, args: Namespace, world: World, parity_length: float = math.inf
) -> list[list[Batch]]:
    """This rank's micro-batches of each update of one pass: consecutive prompts form an update, `plan_micro_batches` divides it.

    `parity_length`: the policy's, for the cost of attention; by default sequences cost what they have of tokens.
    """
    constant = args.loss_constant_tokens or args.max_completion_tokens
    shares = np.split(np.arange(plan.completions_per_step), plan.updates_per_pass)
    lengths_B = torch.from_numpy(rollout.trained_lengths_B)
    weights = [grpo.aggregation_weights(lengths_B[indices], args.loss_aggregation, constant) for indices in shares]
    rollout = replace(rollout, loss_weights_B=torch.cat(weights).numpy())
    updates = []
    group_size = args.group_size if args.share_prompts else 1
    for indices in shares:
        lengths = rollout.sequence_lengths_B[indices]
        shared = np.array([shared_positions(rollout, b) for b in indices]) if args.share_prompts else None
        micros = plan_micro_batches(
            lengths, world.num_trainers, args.micro_batch_tokens, parity_length, group_size, shared
        )[world.trainer_rank]
        updates.append([pack(rollout, indices[micro].tolist(), group_size).to(world.device) for micro in micros])
    return updates


def add_logprobs(
    updates: list[list[Batch]], policy: Policy, reference: Policy | None, args: Namespace
) -> list[list[Batch]]:
    """The updates with the log-probs that they need, under weights that have not changed yet.

    Old ones: not for the first update, which makes its own, unless it drops inputs, the batches are used again or the KL belongs to the
    reward. The reference may be the policy itself: its adapter is off meanwhile.
    """
    first = (
        0 if args.lora_dropout or args.passes_per_step > 1 or (reference is not None and args.kl_in == "reward") else 1
    )
    updates = updates[:first] + [
        logprobs_under(policy, "old_logprobs_N", batches, args.temperature) for batches in updates[first:]
    ]
    if reference is not None:
        with reference.adapter_off():
            updates = [logprobs_under(reference, "ref_logprobs_N", batches, args.temperature) for batches in updates]
    return updates


@torch.no_grad()
def logprobs_under(model: Policy, field: str, batches: list[Batch], temperature: float) -> list[Batch]:
    """The batches with `field` (old_logprobs_N or ref_logprobs_N) set to the model's log-probabilities of their tokens."""
    batches = [replace(batch, **{field: model(batch, temperature)[0]}) for batch in batches]
    release_gathered(model)
    return batches


def gather_penalties(rollout: Rollout, updates: list[list[Batch]], args: Namespace) -> list[np.ndarray] | None:
    """With --kl_in reward: coefficient x KL of each token of all completions, gathered from the ranks that hold them; otherwise None.

    It is the KL of the policy that sampled, by the trainer's log-probs. Zero for completions that are left out of the loss.
    """
    if args.kl_coef == 0 or args.kl_in == "loss":
        return None
    own = {}
    for batch in (batch for batches in updates for batch in batches):
        kl_N = grpo.kl_estimate(batch.old_logprobs_N, batch.ref_logprobs_N, args.kl_estimator, args.kl_clamp)
        own |= from_positions(rollout, batch, args.kl_coef * kl_N)
    gathered = {b: penalties for part in gather_from_ranks(own) for b, penalties in part.items()}
    return [gathered[b] for b in range(len(gathered))]


def compute_advantages(rollout: Rollout, penalties: list[np.ndarray] | None, args: Namespace) -> Rollout:
    """The rollout with `advantages`. Penalties are taken off the rewards: token by token by reinforce++, by the others as their sum."""
    rewards_B = torch.from_numpy(rollout.rewards_B)
    lengths = rollout.completion_lengths_B.tolist()
    if penalties is not None and args.advantage != "reinforce++":
        rewards_B = rewards_B - torch.tensor([penalty.sum() for penalty in penalties])
    if not args.advantage.startswith("reinforce++"):
        rewards_PG = rewards_B.view(-1, args.group_size)
        advantages_B = (
            grpo.group_advantages(rewards_PG, args.advantage, args.advantage_ddof, args.advantage_eps).flatten().numpy()
        )
        return replace(
            rollout, advantages=[np.broadcast_to(advantages_B[b], length) for b, length in enumerate(lengths)]
        )
    if args.advantage == "reinforce++_baseline":
        rewards_B = grpo.group_advantages(rewards_B.view(-1, args.group_size), "dr_grpo").flatten()
    returns = torch.repeat_interleave(rewards_B, torch.tensor(lengths))
    if penalties is not None and args.advantage == "reinforce++":
        returns = torch.cat(
            [grpo.returns_to_go(rewards_B[b], torch.from_numpy(penalty)) for b, penalty in enumerate(penalties)]
        )
    is_trained_B = np.ones(len(lengths), dtype=bool) if rollout.is_trained_B is None else rollout.is_trained_B
    mask = torch.from_numpy(np.repeat(is_trained_B, lengths))
    advantages = grpo.whitened(returns, mask, args.advantage_ddof, args.advantage_eps)
    return replace(rollout, advantages=[piece.numpy() for piece in advantages.split(lengths)])


def add_advantages(updates: list[list[Batch]], rollout: Rollout) -> list[list[Batch]]:
    """The updates with the advantages of the rollout at each of their positions."""
    return [
        [
            replace(x, advantages_N=to_positions(rollout, x.segments_S, rollout.advantages).to(x.labels_N.device))
            for x in batches
        ]
        for batches in updates
    ]


def policy_loss(
    batch: Batch, logprobs_N: Tensor, old_logprobs_N: Tensor, args: Namespace
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss_N, ratio_N, is_low_N, is_high_N) of --policy_loss; the last two mark what is clipped for a ratio too small or too large."""
    advantages_N, sequences = batch.advantages_N, (batch.loss_mask_N, batch.sequence_ids_N)
    if args.policy_loss == "gspo":
        ratio_N = grpo.sequence_ratio(logprobs_N, old_logprobs_N, *sequences)
    elif args.policy_loss == "gspo_token":
        ratio_N = grpo.gspo_token_ratio(logprobs_N, old_logprobs_N, *sequences)
    else:
        ratio_N = grpo.token_ratio(logprobs_N, old_logprobs_N)
    is_low_N = is_high_N = torch.zeros_like(batch.loss_mask_N)
    if args.policy_loss == "cispo":
        loss_N, is_low_N, is_high_N = grpo.cispo_loss(logprobs_N, ratio_N, advantages_N, args.clip_low, args.clip_high)
    elif args.policy_loss == "sapo":
        loss_N = grpo.sapo_loss(ratio_N, advantages_N, args.sapo_tau_pos, args.sapo_tau_neg)
    elif args.policy_loss == "reinforce":
        loss_N = grpo.policy_gradient_loss(logprobs_N, advantages_N)
    else:
        loss_N, is_low_N, is_high_N = grpo.clipped_loss(
            ratio_N, advantages_N, args.clip_low, args.clip_high, args.dual_clip
        )
    return loss_N, ratio_N, is_low_N, is_high_N


def total_loss(
    batch: Batch, logprobs_N: Tensor, old_logprobs_N: Tensor, entropies_N: Tensor, args: Namespace
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(loss_N, what is averaged over tokens for the metrics, what the maximum is taken of).

    The loss is the policy loss, weighted for the sampler's mismatch, + coefficient x KL - coefficient x entropy.
    """
    loss_N, ratio_N, is_low_N, is_high_N = policy_loss(batch, logprobs_N, old_logprobs_N, args)
    weights_N, is_outside_N = grpo.rollout_weights(
        old_logprobs_N, batch.rollout_logprobs_N, batch.loss_mask_N, batch.sequence_ids_N,
        args.rollout_correction, args.rollout_correction_min, args.rollout_correction_max,
    )  # fmt: skip
    gap_N = (old_logprobs_N.exp() - batch.rollout_logprobs_N.exp()).abs()
    means = {
        "policy/entropy": entropies_N,
        "policy/clip_frac": is_low_N | is_high_N,
        "policy/clip_frac_low": is_low_N,
        "policy/clip_frac_high": is_high_N,
        "policy/kl_old": grpo.kl_estimate(old_logprobs_N, logprobs_N),
        "policy/rollout_gap_mean": gap_N,
        "policy/rollout_kl": grpo.kl_estimate(batch.rollout_logprobs_N, old_logprobs_N),
        "weight": weights_N,
        "weight_squared": weights_N.square(),
    }
    maxima = {"policy/ratio_max": ratio_N, "policy/ratio_min": -ratio_N, "policy/rollout_gap_max": gap_N}
    if args.rollout_correction != "none":
        loss_N = loss_N * weights_N
        means["policy/rollout_clip_frac"] = is_outside_N
    if batch.ref_logprobs_N is not None:
        kl_N = grpo.kl_estimate(logprobs_N, batch.ref_logprobs_N, args.kl_estimator, args.kl_clamp)
        means["policy/kl_ref"] = kl_N
        if args.kl_in == "loss":
            loss_N = loss_N + args.kl_coef * kl_N
    if args.entropy_coef:
        loss_N = loss_N - args.entropy_coef * entropies_N
    return loss_N, means, maxima


def update_policy(
    policy: Policy,
    optimizer: Optimizer,
    batches: list[Batch],
    num_tokens: int,
    is_first: bool,
    rate: float,
    args: Namespace,
    world: World,
) -> Metrics:
    """One optimizer update on this rank's micro-batches; returns its metrics, the same on every rank.

    The loss is summed with weights that are made of global counts, so neither micro-batches, packing nor world size enter it; metrics
    are means over the `num_tokens` trained tokens of all ranks. `is_first`: no weight has changed since sampling, so the old log-probs
    are the current ones and every ratio is exactly 1 (not with --lora_dropout: see `lora.py`). A non-finite loss or gradient leaves policy
    and optimizer untouched: `optim/skipped_updates` is then 1.
    """
    sums, extremes = [], []
    for i, batch in enumerate(batches):
        is_last = i == len(batches) - 1
        if args.reduce_gradients_once:
            reduce_gradients(policy, is_last)
        if args.gather_parameters_once:
            keep_gathered(policy, not is_last)
        with activations_on_host(args.offload_activations):
            logprobs_N, entropies_N = policy(batch, args.temperature, args.entropy_coef != 0)
        old_logprobs_N = logprobs_N.detach() if is_first and not args.lora_dropout else batch.old_logprobs_N
        loss_N, means, maxima = total_loss(batch, logprobs_N, old_logprobs_N, entropies_N, args)
        loss = grpo.masked_sum(loss_N * batch.loss_weights_N, batch.loss_mask_N)
        (loss * world.num_trainers).backward()  # FSDP averages gradients over ranks; the weights are global already
        with torch.no_grad():
            sums.append(
                torch.stack([loss, *(grpo.masked_sum(x, batch.loss_mask_N) / num_tokens for x in means.values())])
            )
            extremes.append(torch.stack([torch.where(batch.loss_mask_N, x, -torch.inf).max() for x in maxima.values()]))
    if args.gather_parameters_once:
        release_gathered(
            policy
        )  # the last backward pass has done it; what stayed would be used as it is after the weights have changed
    grad_norm = clip_grad_norm(policy, args.max_grad_norm)
    totals = sum_over_trainers(torch.stack(sums).sum(dim=0))
    largest = max_over_trainers(torch.stack(extremes).amax(dim=0))
    is_finite = bool(torch.isfinite(grad_norm) & torch.isfinite(totals[0]))
    if is_finite:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad()
    metrics = dict(zip(["policy/loss", *means, *maxima], totals.tolist() + largest.tolist(), strict=True))
    metrics["policy/ratio_min"] *= -1
    weight, weight_squared = metrics.pop("weight"), metrics.pop("weight_squared")
    metrics["policy/rollout_ess"] = weight**2 / weight_squared if weight_squared else 0.0  # (sum w)^2 / (n sum w^2)
    metrics |= {"optim/grad_norm": grad_norm.item(), "optim/lr": rate, "optim/skipped_updates": float(not is_finite)}
    return metrics | {"perf/update_idle_frac": idle_share(batches, policy, world)}


def idle_share(batches: list[Batch], policy: Policy, world: World) -> float:
    """The share of the update in which a rank waits for another, by cost: the ranks meet in each micro-batch, at its costliest."""
    costs = torch.tensor([batch.cost(policy.parity_length) for batch in batches])
    return 1.0 - (sum_over_trainers(costs).sum() / (max_over_trainers(costs).sum() * world.num_trainers)).item()


def merge_updates(updates: list[Metrics]) -> Metrics:
    """The metrics of a step's updates as one: extremes of extremes, the sum of skipped updates, the last learning rate, else the mean."""
    merged = {}
    for name in updates[0]:
        values = [metrics[name] for metrics in updates]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name.endswith("_min"):
            merged[name] = min(values)
        elif name == "optim/skipped_updates":
            merged[name] = sum(values)
        else:
            merged[name] = values[-1] if name == "optim/lr" else sum(values) / len(values)
    return merged
