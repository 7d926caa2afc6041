"""A run in numbers: its batches, steps, updates and learning rates, from the flags and the number of rows.

No torch here: the dry run plans with it, too.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

from flags import AdamW, Settings


class Reference(Settings):
    """The model that the KL compares the policy with."""

    path: str
    reference_every: int  # above 0: it moves, and is in the checkpoints
    reference_mixup: float  # below 1: it is kept in fp32, because bf16 would round small moves away
    reset_optimizer: bool


class Plan(Settings, kw_only=True):
    """The arithmetic of batches and steps, and which prompts fill them. One step = one rollout; one update = one
    optimizer step.
    """

    prompts_per_step: int
    group_size: int
    num_iterations: int
    completions_per_step: int
    updates_per_pass: int
    updates_per_step: int  # in all passes
    steps_per_epoch: float  # a whole number but with --keep_last
    total_steps: int
    total_updates: int
    warmup_updates: int
    adamw: AdamW
    lr_schedule: str
    seed: int
    max_rollout_gaps: tuple[float, float]  # of the first update of a step, of a later one; 0: no bound
    reference: Reference | None  # None: no KL term
    keep_last: bool
    drop_solved: float  # share of correct completions from which on a prompt is drawn no more; 0: none is dropped
    dynamic_sampling: str  # "off"; a group has a signal if some completions are "correct", or if a "reward" differs
    steps_ahead: int  # steps whose first round is sampled while an earlier one is trained

    def update(self, step: int, i: int) -> UpdateStep:
        """The place of update i of step 1, 2, ... in the run, and its learning rate."""
        index = (step - 1) * self.updates_per_step + i
        is_last, reference = i + 1 == self.updates_per_step, self.reference
        is_moving = is_last and reference and reference.reference_every and step % reference.reference_every == 0
        return UpdateStep(
            index=index,
            rate=self.rate(index),
            is_first=i == 0,
            max_grad_norm=self.adamw.max_grad_norm,
            seed=self.seed,
            step=step,
            number=i + 1,
            max_rollout_gap=self.max_rollout_gaps[i > 0],
            total_steps=self.total_steps,
            reference_mixup=reference.reference_mixup if is_moving else 0.0,
            resets_optimizer=bool(is_moving) and reference.reset_optimizer,
        )

    def rate(self, update: int) -> float:
        """The learning rate of update 0, 1, ...: linear warm-up to the peak, then constant, or cosine or linear to 0.

        The last update is the last one above 0: none is wasted on a rate of 0.
        """
        peak = self.adamw.learning_rate
        if update < self.warmup_updates:
            return peak * (update + 1) / self.warmup_updates
        progress = (update - self.warmup_updates) / max(self.total_updates - self.warmup_updates, 1)
        if self.lr_schedule == "cosine":
            return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        return peak * (1.0 - progress) if self.lr_schedule == "linear" else peak


class UpdateStep(NamedTuple):
    """One optimizer step of the run."""

    index: int  # 0, 1, ... over the whole run
    rate: float
    is_first: bool  # in its rollout: no weight has changed since sampling
    max_grad_norm: float
    seed: int
    step: int = 1
    number: int = 1  # in its step
    max_rollout_gap: float = 0.0  # beyond it the run ends before the update; 0: no bound
    total_steps: int = 1
    reference_mixup: float = 0.0  # how far the reference moves to the policy after it; 0: it stays
    resets_optimizer: bool = False  # after it


def make_plan(args: argparse.Namespace, num_rows: int) -> Plan:
    """The plan for `num_rows` usable training rows. Raises ValueError if they do not fill one step."""
    if num_rows < args.prompts_per_step and not args.keep_last:
        raise ValueError(
            f"--train_data has {num_rows} usable rows, fewer than --prompts_per_step {args.prompts_per_step}; "
            f"use at most {num_rows}. With --keep_last a step may reach into the next epoch."
        )
    completions_per_step = args.prompts_per_step * args.group_size
    steps_per_epoch = num_rows / args.prompts_per_step if args.keep_last else num_rows // args.prompts_per_step
    total_steps = args.total_steps
    if args.epochs is not None:
        total_steps = math.ceil(args.epochs * steps_per_epoch)
    if args.total_episodes is not None:
        total_steps = args.total_episodes // completions_per_step
    if args.stop_after and args.stop_after > total_steps:
        raise ValueError(f"--stop_after {args.stop_after} is beyond the last step, {total_steps}; leave it out.")
    updates_per_pass = args.prompts_per_step // args.prompts_per_update
    total_updates = total_steps * updates_per_pass * args.num_iterations
    # Other weights sampled: a gap is no fault.
    bound = 0.0 if args.steps_ahead or args.partial_rollouts or args.replay else args.max_rollout_gap
    # Without a pass of the trainer before the first update, that one also sees its dropout, and later ones how far the
    # policy has moved.
    is_unknown = args.old_logprobs == "rollout"
    gaps = 0.0 if is_unknown and args.lora_dropout else bound, 0.0 if is_unknown else bound
    path = args.reference or args.model
    return Plan.from_flags(
        args,
        adamw=AdamW.from_flags(args),
        reference=Reference.from_flags(args, path=path) if args.kl_coef > 0 else None,
        max_rollout_gaps=gaps,
        completions_per_step=completions_per_step,
        updates_per_pass=updates_per_pass,
        updates_per_step=updates_per_pass * args.num_iterations,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_updates=total_updates,
        warmup_updates=math.ceil(args.warmup_ratio * total_updates),
    )
