"""Before anything is loaded: the arithmetic of batches and steps, checked; and the learning-rate schedule that follows from it."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What the flags amount to. One step = one rollout; one update = one optimizer step."""

    completions_per_step: int
    updates_per_step: int
    steps_per_epoch: int
    total_steps: int
    total_updates: int
    warmup_updates: int


def _suggest(value: int, divisor: int) -> str:
    """The two multiples of `divisor` next to `value`, as words."""
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {divisor}"


def _check_at_least(name: str, value: float, minimum: int) -> None:
    if not value >= minimum:  # also true for nan
        raise ValueError(f"--{name} {value:g}: must be at least {minimum}.")


def check_flags(args: Namespace, world_size: int) -> None:
    """Raises ValueError for flags that contradict each other, each with what was given, what is required and what to do."""
    for name in ("prompts_per_step", "prompts_per_update", "max_prompt_tokens", "max_completion_tokens", "eval_samples"):
        _check_at_least(name, getattr(args, name), 1)
    for name in ("total_steps", "epochs", "total_episodes", "max_skipped_updates"):
        if getattr(args, name) is not None:
            _check_at_least(name, getattr(args, name), 1)
    for name in ("kl_coef", "clip_low", "clip_high", "learning_rate", "warmup_ratio", "weight_decay", "eval_temperature", "seed"):
        _check_at_least(name, getattr(args, name), 0)
    for name in ("eval_every", "save_every", "keep_checkpoints"):
        _check_at_least(name, getattr(args, name), 0)
    for name in ("temperature", "max_grad_norm", "timeout_minutes"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name} {getattr(args, name)}: must be greater than 0.")
    num_engines = world_size // args.tensor_parallel_size
    engines = f"{num_engines} engines ({world_size} ranks / --tensor_parallel_size {args.tensor_parallel_size})"
    if args.group_size < 2:
        raise ValueError(f"--group_size {args.group_size}: an advantage compares completions of the same prompt; use at least 2.")
    if args.prompts_per_step % num_engines:
        raise ValueError(
            f"--prompts_per_step {args.prompts_per_step} is not divisible by {engines}; {_suggest(args.prompts_per_step, num_engines)}."
        )
    if args.prompts_per_step % args.prompts_per_update:
        divisors = [n for n in range(1, args.prompts_per_step + 1) if args.prompts_per_step % n == 0]
        raise ValueError(
            f"--prompts_per_update {args.prompts_per_update} does not divide --prompts_per_step {args.prompts_per_step}; "
            f"use one of {', '.join(map(str, divisors))}."
        )
    longest = args.max_prompt_tokens + args.max_completion_tokens
    if args.micro_batch_tokens < longest:
        raise ValueError(
            f"--micro_batch_tokens {args.micro_batch_tokens} cannot hold one sequence of --max_prompt_tokens {args.max_prompt_tokens} "
            f"+ --max_completion_tokens {args.max_completion_tokens}; use at least {longest}."
        )
    num_lengths = sum(x is not None for x in (args.total_steps, args.epochs, args.total_episodes))
    if num_lengths != 1:
        raise ValueError(f"{num_lengths} of --total_steps, --epochs, --total_episodes were given; give exactly one.")
    if args.total_episodes is not None and args.total_episodes < args.prompts_per_step * args.group_size:
        raise ValueError(
            f"--total_episodes {args.total_episodes} is less than one step: --prompts_per_step x --group_size = "
            f"{args.prompts_per_step * args.group_size} completions."
        )
    if args.eval_every and not args.eval_data:
        raise ValueError(f"--eval_every {args.eval_every} needs --eval_data; name a file or use --eval_every 0.")
    if args.eval_before_training and not args.eval_data:
        raise ValueError("--eval_before_training needs --eval_data; name a file.")


def check_context(args: Namespace, model_context: int | None) -> None:
    """Raises ValueError if prompt and completion limits together exceed the model's positions (None: the model states none)."""
    longest = args.max_prompt_tokens + args.max_completion_tokens
    if model_context is not None and longest > model_context:
        raise ValueError(
            f"--max_prompt_tokens {args.max_prompt_tokens} + --max_completion_tokens {args.max_completion_tokens} = {longest} "
            f"is beyond the model's context of {model_context} tokens; lower them by {longest - model_context} in all."
        )


def make_plan(args: Namespace, num_rows: int) -> Plan:
    """The derived numbers, for `num_rows` usable training rows. Raises ValueError if they do not fill one step."""
    if num_rows < args.prompts_per_step:
        raise ValueError(
            f"--train_data has {num_rows} usable rows, fewer than --prompts_per_step {args.prompts_per_step}; use at most {num_rows}."
        )
    completions_per_step = args.prompts_per_step * args.group_size
    steps_per_epoch = num_rows // args.prompts_per_step
    total_steps = args.total_steps
    if args.epochs is not None:
        total_steps = args.epochs * steps_per_epoch
    if args.total_episodes is not None:
        total_steps = args.total_episodes // completions_per_step
    updates_per_step = args.prompts_per_step // args.prompts_per_update
    total_updates = total_steps * updates_per_step
    return Plan(
        completions_per_step=completions_per_step,
        updates_per_step=updates_per_step,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_updates=total_updates,
        warmup_updates=math.ceil(args.warmup_ratio * total_updates),
    )


def learning_rate(update: int, peak: float, schedule: str, warmup_updates: int, total_updates: int) -> float:
    """The rate of update 0, 1, ...: linear warm-up from peak / warmup_updates to the peak, then constant, or cosine or linear to zero.

    The last update is the last one above zero: none is wasted on a rate of 0.
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    progress = (update - warmup_updates) / max(total_updates - warmup_updates, 1)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule == "linear":
        return peak * (1.0 - progress)
    assert schedule == "constant", f"unknown schedule {schedule!r}"
    return peak
