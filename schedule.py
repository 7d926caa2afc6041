"""A run in numbers: its batches, steps, updates and learning rates, from the flags and the number of rows.

No torch here: the dry run plans with it, too.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

from flags import Settings


class Plan(Settings, kw_only=True):
    """The arithmetic of batches and steps. One step = one rollout; one update = one optimizer step."""

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
    learning_rate: float
    lr_schedule: str
    max_grad_norm: float
    seed: int
    max_rollout_gaps: tuple[float, float]  # of the first update of a step, of a later one; 0: no bound
    reference_every: int
    reference_mixup: float
    reset_optimizer: bool

    def update(self, step: int, i: int) -> UpdateStep:
        """The place of update i of step 1, 2, ... in the run, and its learning rate."""
        index = (step - 1) * self.updates_per_step + i
        is_last = i + 1 == self.updates_per_step
        is_moving = is_last and self.reference_every > 0 and step % self.reference_every == 0
        return UpdateStep(
            index=index,
            rate=self.rate(index),
            is_first=i == 0,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
            step=step,
            number=i + 1,
            max_rollout_gap=self.max_rollout_gaps[i > 0],
            total_steps=self.total_steps,
            reference_mixup=self.reference_mixup if is_moving else 0.0,
            resets_optimizer=is_moving and self.reset_optimizer,
        )

    def rate(self, update: int) -> float:
        """The learning rate of update 0, 1, ...: linear warm-up to the peak, then constant, or cosine or linear to 0.

        The last update is the last one above 0: none is wasted on a rate of 0.
        """
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / self.warmup_updates
        progress = (update - self.warmup_updates) / max(self.total_updates - self.warmup_updates, 1)
        if self.lr_schedule == "cosine":
            return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.learning_rate * (1.0 - progress) if self.lr_schedule == "linear" else self.learning_rate


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
    return Plan.from_flags(
        args,
        max_rollout_gaps=gaps,
        completions_per_step=completions_per_step,
        updates_per_pass=updates_per_pass,
        updates_per_step=updates_per_pass * args.num_iterations,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_updates=total_updates,
        warmup_updates=math.ceil(args.warmup_ratio * total_updates),
    )
