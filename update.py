"""From the graded rollout of a step to new weights: packing, log-probs, advantages, the loss, the optimizer step.

The functions stand in the order in which the loop of `train_grpo.py` calls them; the equations are
in `grpo.py`. Dimensions: `batch.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

import grpo
from batch import Batch, Metrics, Rollout, Update
from flags import Memory
from fsdp_utils import World, begin_micro_batch, clip_grad_norm, release_gathered
from grpo import Algorithm, Groups, tokens_of
from metrics import idle_share, loss_metrics, pass_metrics
from model.optimizer import set_rate
from packing import pack, plan_micro_batches, shared_positions, to_positions
from policy import Policy, place
from runtime.parts import part
from runtime.rank import RunError, beat
from schedule import Plan, UpdateStep


def pack_updates(
    rollout: Rollout, plan: Plan, algorithm: Algorithm, memory: Memory, policy: Policy, world: World
) -> list[Update]:
    """The updates of one pass over the rollout, each of consecutive prompts and divided by `plan_micro_batches`.

    Raises RunError for a rollout that is not of the plan's size, or whose groups are not of one prompt each.
    """
    check_groups(rollout, plan, algorithm.group_size)
    indices_of_updates = np.split(np.arange(plan.completions_per_step), plan.updates_per_pass)
    trained_lengths_B = torch.from_numpy(rollout.trained_lengths_B)
    # The weight of a token in the loss follows from the lengths of the whole update, before anything
    # is packed: loss and gradient do not depend on what shares a micro-batch or a rank.
    weights_B = loss_weights(trained_lengths_B, indices_of_updates, algorithm)
    rollout = replace(rollout, loss_weights_B=weights_B.numpy())
    group_size = group_size_of_hinted = plan.group_size if memory.share_prompts else 1
    if "is_hinted" in rollout.parts:
        group_size_of_hinted = 1  # each completion has a hint of its own, so none share a prompt
        is_hinted_B = torch.tensor(rollout.parts["is_hinted"])
        hinted_weights_B = loss_weights(trained_lengths_B * is_hinted_B, indices_of_updates, algorithm)
        rollout = rollout.with_parts(kl_weights=(is_hinted_B * hinted_weights_B / weights_B).tolist())
    hinted = rollout.hinted()
    longest = hinted or rollout  # the reference's batches must fit under the cap, too
    lengths_B = longest.sequence_lengths_B
    shared_B = np.array([shared_positions(longest, b) for b in range(len(rollout.rows))])
    # Every rank makes the plan of all ranks and takes its own part: nothing is communicated, but for routes.
    plans = []
    for indices in indices_of_updates:
        micros_of_ranks = plan_micro_batches(
            lengths_B[indices],
            num_ranks=world.num_trainers,
            max_tokens=memory.micro_batch_tokens,
            parity_length=policy.parity_length,
            group_size=group_size_of_hinted,
            shared=shared_B[indices],
        )
        plans.append([[indices[micro].tolist() for micro in micros] for micros in micros_of_ranks])
    add_parts = []  # to a batch: what only optional parts of the model know of its sequences
    if any(row.images is not None for row in rollout.rows):
        add_parts.append(part("extras.models.vision", "--image_column").add_images)
    if "routes" in rollout.parts:
        experts = part("extras.models.experts", "--router_replay")
        rollout = experts.bring_routes(rollout, plans)
        add_parts.append(experts.add_routes)
    updates = []
    for indices, micros_of_ranks in zip(indices_of_updates, plans, strict=True):
        update, num_tokens = [], max(int(trained_lengths_B[indices].sum()), 1)
        for chosen in micros_of_ranks[world.trainer_rank]:
            batch = replace(pack(rollout, chosen, group_size), update_tokens=num_tokens)
            for add_part in add_parts:
                batch = add_part(batch, rollout)
            batch = place(batch, world.device)
            if hinted:
                batch = replace(batch, hinted=place(pack(hinted, chosen, group_size_of_hinted), world.device))
            update.append(batch)
        updates.append(update)
    return updates


def check_groups(rollout: Rollout, plan: Plan, size: int) -> None:
    """Raises RunError unless the rollout has the plan's completions, each `size` in a row to one prompt."""
    places = [row.where for row in rollout.rows]
    is_divisible = len(places) % (plan.updates_per_pass * size) == 0
    is_grouped = places == [places[b - b % size] for b in range(len(places))]
    if not (0 < len(places) == plan.completions_per_step and is_divisible and is_grouped):
        raise RunError(
            f"the rollout has {len(places)} completions; the plan has {plan.completions_per_step}, in "
            f"{plan.updates_per_pass} equal updates, each {size} in a row to one prompt. Add or select whole groups, "
            "and give pack_updates replace(plan, completions_per_step=len(rollout.rows)) (docs/hacks.md)."
        )


def loss_weights(lengths_B: Tensor, indices_of_updates: list[np.ndarray], algorithm: Algorithm) -> Tensor:
    """The weight of each token of each completion in the loss of its update. `lengths_B`: the tokens that count."""
    return torch.cat([algorithm.loss_aggregation(lengths_B[indices]) for indices in indices_of_updates])


def add_logprobs(updates: list[Update], policy: Policy, reference: Policy | None, algorithm: Algorithm) -> list[Update]:
    """The updates with the log-probs that they need, under weights that have not changed yet.

    The first update needs no pass for its old log-probs, unless the policy has dropout, its batches are used again, or
    the KL belongs to the reward. The sampler's own log-probs need none at all. With LoRA the reference is the policy,
    with its adapter off. A reference that is followed over the vocabulary runs beside the update: the distributions of
    a step would not fit.
    """
    if algorithm.old_logprobs == "rollout":
        updates = [[replace(x, old_logprobs_N=x.rollout_logprobs_N) for x in update] for update in updates]
    else:
        needs_all = policy.has_dropout or algorithm.num_iterations > 1 or algorithm.has_penalties
        # Until the first optimizer step the policy is the old one: its own pass has the old log-probs.
        first = 0 if needs_all else 1
        scored = [logprobs_under(policy, "old_logprobs_N", update, algorithm) for update in updates[first:]]
        updates = updates[:first] + scored
    if reference is None:
        return updates
    return [add_reference(update, reference, algorithm) for update in updates]


def add_reference(update: Update, reference: Policy, algorithm: Algorithm) -> Update:
    """The update with the reference's log-probs; over the vocabulary with what runs the reference on each batch."""
    if algorithm.kl_over == "vocabulary":
        teacher = part("extras.teacher.vocabulary", "--kl_over vocabulary")
        run_teacher = partial(teacher.run, reference, algorithm.kl_direction, algorithm.temperature)
        return [replace(batch, run_teacher=run_teacher) for batch in update]
    with reference.adapter_off():  # with LoRA: the same module as the policy
        return logprobs_under(reference, "ref_logprobs_N", update, algorithm)


@torch.no_grad()
def logprobs_under(model: Policy, field: str, update: Update, algorithm: Algorithm) -> Update:
    """The update with `field` (old_logprobs_N or ref_logprobs_N) set to the model's log-probs of its tokens."""

    scored = []
    for batch in update:
        read = batch.reference_batch() if field == "ref_logprobs_N" else batch
        logprobs_N = model(read, algorithm.temperature).logprobs_N
        if read is batch.hinted:  # the same tokens in the same order, at other positions
            logprobs_K = logprobs_N.index_select(0, read.trained_K)
            logprobs_N = torch.zeros_like(batch.rollout_logprobs_N).index_copy(0, batch.trained_K, logprobs_K)
        scored.append(replace(batch, **{field: logprobs_N}))
    # FSDP keeps the last layer gathered for a backward pass that does not follow.
    release_gathered(model)
    return scored


def add_advantages(
    rollout: Rollout, updates: list[Update], algorithm: Algorithm, step: int = 1, total_steps: int = 1
) -> tuple[Rollout, list[Update]]:
    """The rollout with its advantages, and the updates with them at each of their positions."""
    penalties = None
    if algorithm.has_penalties:
        gather = part("extras.teacher.penalties", "--kl_in reward").gather_penalties
        penalties = gather(rollout, updates, algorithm)
    rollout = replace(rollout, advantages=compute_advantages(rollout, penalties, algorithm, step, total_steps))
    return rollout, [[with_advantages(rollout, batch) for batch in update] for update in updates]


def with_advantages(rollout: Rollout, batch: Batch) -> Batch:
    advantages_N = to_positions(rollout, batch.segments_S, rollout.advantages)
    return replace(batch, advantages_N=advantages_N.to(batch.labels_N.device))


def compute_advantages(
    rollout: Rollout, penalties: list[np.ndarray] | None, algorithm: Algorithm, step: int = 1, total_steps: int = 1
) -> list[np.ndarray]:
    """The advantage of each completion's tokens; 0 for what could not be graded, with which nothing is compared."""
    if not rollout.is_compared_B.all():
        return part("extras.samplers.ungraded", "a reward that fails").compare_the_rest(
            rollout, penalties, algorithm, step, total_steps
        )
    rewards_B = torch.from_numpy(rollout.rewards_B)
    lengths_B = torch.tensor([len(completion) for completion in rollout.completions])
    returns_T = torch.repeat_interleave(rewards_B, lengths_B)
    turn_fields = {}
    if rollout.has_replies or any(grade.turn_rewards for grade in rollout.grades):
        turn_fields = part("extras.turns.credit", "--environment").by_turn(rollout, algorithm.group_size)
    if "turn_rewards_PGK" in turn_fields:
        # A token is credited with its own turn and later ones, not with what was earned before it.
        returns_BK = grpo.to_go(turn_fields["turn_rewards_PGK"].nan_to_num()).flatten(0, 1)
        returns_T = returns_BK[torch.repeat_interleave(lengths_B), turn_fields["turns_T"]]
    if penalties is not None:
        pairs = zip(returns_T.split(lengths_B.tolist()), penalties, strict=True)
        # At each token, minus the penalties of this token and later ones.
        returns_T = torch.cat([rewards - grpo.to_go(torch.from_numpy(penalty)) for rewards, penalty in pairs])
        rewards_B = rewards_B - torch.tensor([penalty.sum() for penalty in penalties])
    mask_T = torch.repeat_interleave(torch.from_numpy(rollout.is_trained_B), lengths_B)
    mask_T &= torch.from_numpy(np.concatenate(rollout.is_sampled))
    rewards_PG = rewards_B.view(-1, algorithm.group_size)  # prompt-major: the G of a prompt stand together
    graded = Groups(
        rewards_PG=rewards_PG,
        returns_T=returns_T,
        lengths_B=lengths_B,
        mask_T=mask_T,
        step=step,
        total_steps=total_steps,
        columns=[row.columns for row in rollout.rows[:: algorithm.group_size]],
        **grade_fields(rollout, rewards_PG.shape),
        **turn_fields,
    )
    advantages = algorithm.advantage(graded)
    if advantages.shape == rewards_PG.shape:  # one for the whole completion: each of its tokens gets it
        advantages = torch.repeat_interleave(advantages.flatten(), lengths_B)
    return [piece.numpy() for piece in advantages.split(lengths_B.tolist())]


def grade_fields(rollout: Rollout, shape: torch.Size) -> dict[str, Tensor | dict[str, Tensor]]:
    """The fields of `Groups` that show the grades. Where a completion has no such part of the reward, it is 0."""
    parts = {}
    for name in dict.fromkeys(name for grade in rollout.grades for name in grade.parts):
        values = [float(grade.parts.get(name, 0)) for grade in rollout.grades]
        parts[name] = torch.tensor(values).view(shape)
    return {
        "parts": parts,
        "is_correct_PG": torch.from_numpy(rollout.is_correct_B).view(shape),
        "is_truncated_PG": torch.from_numpy(rollout.is_truncated_B).view(shape),
    }


def update_policy(
    policy: Policy,
    optimizer: Optimizer,
    update: Update,
    algorithm: Algorithm,
    step: UpdateStep,
    memory: Memory,
    guard: UpdateGuard,
) -> dict[str, float]:
    """Makes one optimizer step on this rank's micro-batches; returns its metrics, the same on every rank.

    The weights of the loss are made of global counts, so micro-batches, packing and ranks do not enter it; metrics are
    means over the trained tokens of all ranks. An update that the guard finds bad, for example because its loss is not
    finite, leaves policy and optimizer untouched; a reference that is due moves all the same. Raises RunError where the
    guard ends the run.
    """
    passes = add_gradients(policy, update, algorithm, step, memory, guard)
    grad_norm = clip_grad_norm(policy, step.max_grad_norm, guard.loss_scale)
    metrics = loss_metrics(passes) | (policy.expert_loads.largest() if policy.expert_loads else {})
    metrics |= {"optim/grad_norm": grad_norm.item(), "optim/lr": step.rate}
    metrics |= guard.judge(metrics, step)  # before any weight moves: what is judged bad leaves no trace
    if not metrics["optim/skipped_updates"]:
        beat()
        set_rate(optimizer, step.rate)
        optimizer.step()
    policy.zero_grad()  # also of an update that was left out, and what the optimizer does not have
    if step.reference_mixup:
        part("extras.teacher.moving", "--reference_every").move_references(policy, optimizer, step)
    return metrics | {"perf/update_idle_frac": idle_share(update, policy.parity_length, guard.world)}


def add_gradients(
    policy: Policy, update: Update, algorithm: Algorithm, step: UpdateStep, memory: Memory, guard: UpdateGuard
) -> list[dict[str, Tensor]]:
    """The metrics of passes over this rank's micro-batches, whose gradients add up in the policy.

    In the first update of a step no weight has changed since sampling, so the old log-probs are the current ones and
    every ratio is exactly 1. With dropout they are those of a pass without it.
    """
    is_unchanged = step.is_first and not policy.has_dropout and algorithm.old_logprobs == "trainer"
    passes = []
    with policy.dropout_on((step.seed, step.index), guard.world):
        for i, batch in enumerate(update):
            begin_micro_batch(policy, memory.communicate_once, is_last=i == len(update) - 1)
            teacher = batch.run_teacher and batch.run_teacher(batch)
            scores = policy(batch, algorithm.temperature, teacher)
            logprobs_N = scores.logprobs_N
            # Detached they are the same numbers, to the bit: a ratio of exactly 1, and a gradient all the same.
            old_logprobs_N = logprobs_N.detach() if is_unchanged else batch.old_logprobs_N
            if batch.old_logprobs_N is None:  # kept in the caller's list: what is stored of the step has them
                update[i] = replace(batch, old_logprobs_N=old_logprobs_N)
            scored = batch
            if scores.distilled:
                scored = replace(batch, ref_logprobs_N=scores.distilled.ref_logprobs_N, distilled=scores.distilled)
            t = tokens_of(scored, logprobs_N, old_logprobs_N, scores.entropies_N, step.step, step.total_steps)
            loss = grpo.total_loss(scored, t, algorithm)
            # A sum, not a mean: the weights have the counts of the whole update in them.
            total = grpo.masked_sum(loss.per_token * batch.loss_weights_N, batch.loss_mask_N)
            beat()
            # FSDP averages gradients; the weights are global already.
            (total * guard.world.num_trainers * guard.loss_scale).backward()
            # They stay on the device: one transfer to the host for all, after the last pass.
            metrics = pass_metrics(scored, t, loss, algorithm)
            passes.append({"policy/loss": total.detach()} | metrics)
    if memory.communicate_once:
        release_gathered(policy)  # they are from before the optimizer step
    return passes


# Which updates are left out ------------------------------------------------------------------------------------------
#
# Those that are not finite. An update is judged between its gradient and the optimizer's step, by metrics that are the
# same on every rank. Left out, it changes no bit of policy and optimizer. It does not end the run, because a resumed
# run would meet it again; several in a row do.

MOST_SKIPPED = 3  # updates in a row; one more ends the run


@dataclass
class UpdateGuard:
    """Judges updates, the same on every rank."""

    world: World
    loss_scale: float = 1.0  # what the loss is multiplied by before its gradient is taken
    num_skipped: int = 0  # in a row
    is_broken: bool = False  # none of the step's updates was finite: no checkpoint of it is written

    def state(self) -> dict:
        """The guard's part of a checkpoint."""
        return {"skipped_in_a_row": self.num_skipped, "is_broken": self.is_broken}

    def restore(self, state: dict) -> None:
        self.num_skipped = state.get("skipped_in_a_row", 0)

    def judge(self, metrics: Metrics, step: UpdateStep) -> Metrics:
        """The metric of updates that are left out: 0 or 1 for this one.

        Raises RunError if it is one too many, or if sampler and policy differ (`check_gap`).
        """
        check_gap(metrics, step)
        loss, norm = metrics["policy/loss"], metrics["optim/grad_norm"]
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        self.num_skipped = 0 if is_finite else self.num_skipped + 1
        self.is_broken = not is_finite and (step.number == 1 or self.is_broken)
        if self.num_skipped > MOST_SKIPPED:
            way_out = "lower --learning_rate in a new --out_dir"
            if step.index < self.num_skipped:  # no weight has changed yet
                way_out = "--model, --reference or a loss of your own is not finite"
            raise RunError(
                f"step {step.step}, update {step.number} is left out, as {MOST_SKIPPED} before it: the loss is "
                f"{loss:g}, the gradient norm {norm:g}; {way_out}."
            )
        return {"optim/skipped_updates": float(not is_finite)}


def make_guard(dtype: str, world: World) -> UpdateGuard:
    """The guard of a run with this --dtype."""
    if dtype == "float16":
        return part("extras.precision.float16", "--dtype float16").ScalingGuard(world)
    return UpdateGuard(world)


def check_gap(metrics: Metrics, step: UpdateStep) -> None:
    """Raises RunError if what an update is to train on was sampled by something else than the policy.

    The mean gap or the temperature is farther off than the bound, or not a number. The temperature
    counts by the share of the gap that it explains: over two hundred tokens of an uncertain policy
    rounding alone has looked like 0.94, which explained half. Faults explain three quarters and
    more. Where the loss is not finite, log-probs say nothing.
    """
    bound = step.max_rollout_gap
    gap, temperature = metrics["policy/rollout_gap_mean"], metrics["policy/rollout_temperature"]
    share = metrics["policy/rollout_temperature_r2"]
    is_within = gap <= bound and abs(temperature - 1.0) * share <= bound
    if bound > 0 and math.isfinite(metrics["policy/loss"]) and not is_within:
        unknown = " This model is not known to work here: docs/data.md has those that do." if step.index == 0 else ""
        raise RunError(
            f"step {step.step}, update {step.number} is not made: sampler and trainer give other log-probs to the same "
            f"tokens: policy/rollout_gap_mean {gap:.4f}, policy/rollout_temperature {temperature:.3f} "
            f"(it explains {share:.0%}); --max_rollout_gap {bound:g}.{unknown}"
        )
