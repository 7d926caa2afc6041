"""Before anything is loaded: the arithmetic of batches and steps, checked; and the learning-rate schedule that follows from it."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass

from transformers import PretrainedConfig

from algorithm import check_algorithm


@dataclass(frozen=True)
class Plan:
    """What the flags amount to. One step = one rollout; one update = one optimizer step."""

    completions_per_step: int
    updates_per_pass: int
    updates_per_step: int  # of all passes
    steps_per_epoch: float  # a whole number but with --keep_last
    total_steps: int
    total_updates: int
    warmup_updates: int


TINY = 1e-9  # stands for "greater than 0"
RANGES = {  # flag -> smallest and largest sensible value; what has a rule of its own is checked below
    "max_prompt_tokens": (1, math.inf),
    "max_completion_tokens": (1, math.inf),
    "max_pixels": (1, math.inf),
    "prompts_per_step": (1, math.inf),
    "prompts_per_update": (1, math.inf),
    "total_steps": (1, math.inf),
    "epochs": (1, math.inf),
    "total_episodes": (1, math.inf),
    "stop_after": (1, math.inf),
    "temperature": (0.01, 100),  # vLLM would raise a smaller one to 0.01 and tell nobody; the trainer would not
    "gpu_memory_utilization": (0.01, 1),
    "seed": (0, math.inf),
    "passes_per_step": (1, math.inf),
    "advantage_eps": (0, math.inf),
    "max_sampling_rounds": (1, math.inf),
    "sapo_tau_pos": (TINY, math.inf),
    "sapo_tau_neg": (TINY, math.inf),
    "loss_constant_tokens": (1, math.inf),
    "entropy_coef": (0, math.inf),
    "kl_coef": (0, math.inf),
    "kl_clamp": (0, math.inf),
    "rollout_correction_max": (TINY, math.inf),
    "rollout_correction_min": (0, math.inf),
    "clip_low": (0, 1),
    "clip_high": (0, math.inf),
    "lora_rank": (0, math.inf),
    "lora_alpha": (TINY, math.inf),
    "lora_dropout": (0, 0.99),
    "learning_rate": (0, math.inf),
    "warmup_ratio": (0, 1),
    "weight_decay": (0, math.inf),
    "adam_beta1": (0, 0.99999),
    "adam_beta2": (0, 0.99999),
    "max_grad_norm": (TINY, math.inf),
    "max_skipped_updates": (1, math.inf),
    "timeout_minutes": (TINY, 1e6),
    "eval_every": (0, math.inf),
    "reward_timeout": (TINY, 1e6),
    "reward_memory_gib": (0.25, math.inf),
    "reward_workers": (0, math.inf),
    "overlong_cache_tokens": (1, math.inf),
    "save_every": (0, math.inf),
    "keep_checkpoints": (0, math.inf),
    "plan_gpus": (1, math.inf),
    "plan_nodes": (1, math.inf),
    "plan_gpu_memory_gib": (TINY, math.inf),
    "plan_host_memory_gib": (TINY, math.inf),
    "plan_network_gb_s": (TINY, math.inf),
    "plan_rows": (1, math.inf),
    "plan_flops_share": (TINY, 1),
    "plan_memory_share": (TINY, 1),
    "plan_link_share": (TINY, 1),
    "plan_length_share": (TINY, 1),
}


def _suggest(value: int, divisor: int) -> str:
    """The two multiples of `divisor` next to `value`, as words."""
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {divisor}"


def check_flags(args: Namespace, world_size: int) -> None:
    """Raises ValueError for flags that contradict each other, each with what was given, what is required and what to do."""
    for name, (low, high) in RANGES.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:  # also true for nan
            bounds = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise ValueError(f"--{name} {value:g}: must be {bounds}.")
    if min(args.profile_steps, default=1) < 1:
        raise ValueError(f"--profile_steps {' '.join(map(str, args.profile_steps))}: steps count from 1.")
    check_algorithm(args)
    num_engines = world_size // args.tensor_parallel_size
    engines = f"{num_engines} engines ({world_size} ranks / --tensor_parallel_size {args.tensor_parallel_size})"
    if args.group_size < 2:
        raise ValueError(
            f"--group_size {args.group_size}: an advantage compares completions of the same prompt; use at least 2."
        )
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
    if args.param_dtype == "bfloat16" and args.dtype == "float32":
        raise ValueError(
            "--dtype float32 computes more finely than --param_dtype bfloat16 stores; leave one of them out."
        )
    if args.lora_rank and (args.param_dtype != "float32" or args.offload_reference):
        flag = "--offload_reference" if args.offload_reference else f"--param_dtype {args.param_dtype}"
        reason = "frozen weights are held in --dtype, adapters in float32, and the reference is the policy with its adapter off"
        raise ValueError(f"{flag} has no effect with --lora_rank {args.lora_rank}: {reason}; leave it out.")
    if args.offload_reference and args.kl_coef == 0:
        raise ValueError("--offload_reference does nothing with --kl_coef 0: there is no reference; leave it out.")
    if args.eval_every and not args.eval_data:
        raise ValueError(f"--eval_every {args.eval_every} needs --eval_data; name a file or use --eval_every 0.")
    if args.eval_before_training and not args.eval_data:
        raise ValueError("--eval_before_training needs --eval_data; name a file.")


def check_model(args: Namespace, config: PretrainedConfig) -> None:
    """Raises ValueError if the model cannot be trained under these flags: context, attention or logits do not fit."""
    config = config.get_text_config()
    longest = args.max_prompt_tokens + max(args.max_completion_tokens, *args.eval_max_completion_tokens)
    model_context = getattr(config, "max_position_embeddings", None)
    if model_context is not None and longest > model_context:
        raise ValueError(
            f"--max_prompt_tokens {args.max_prompt_tokens} + the larger of --max_completion_tokens {args.max_completion_tokens} and "
            f"--eval_max_completion_tokens {max(args.eval_max_completion_tokens)} = {longest} "
            f"is beyond the model's context of {model_context} tokens; lower them by {longest - model_context} in all."
        )

    num_heads = getattr(config, "num_attention_heads", args.tensor_parallel_size)
    if num_heads % args.tensor_parallel_size:
        raise ValueError(
            f"--tensor_parallel_size {args.tensor_parallel_size} does not divide the model's {num_heads} attention heads."
        )
    window = getattr(config, "sliding_window", None)
    has_window = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if window and has_window and getattr(config, "use_sliding_window", True) and window < longest:
        raise ValueError(
            f"--model {args.model}: its sliding-window attention of {window} tokens is not supported for sequences of up to {longest}; "
            f"keep --max_prompt_tokens + --max_completion_tokens within the window, or use another model."
        )
    # Values that scale or squash logits or attention scores, which our packed attention and chunked head leave out.
    for name, neutral in (
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None),
        ("logits_scaling", 1.0),
        ("logit_scale", 1.0),
    ):
        if getattr(config, name, None) not in (None, neutral):
            raise ValueError(
                f"--model {args.model}: its {name} = {getattr(config, name)} is not implemented in policy.py; use another model."
            )


def make_plan(args: Namespace, num_rows: int) -> Plan:
    """The derived numbers, for `num_rows` usable training rows. Raises ValueError if they do not fill one step."""
    if num_rows < args.prompts_per_step and not args.keep_last:
        raise ValueError(
            f"--train_data has {num_rows} usable rows, fewer than --prompts_per_step {args.prompts_per_step}; use at most {num_rows}."
            " With --keep_last a step may reach into the next epoch."
        )
    completions_per_step = args.prompts_per_step * args.group_size
    steps_per_epoch = num_rows / args.prompts_per_step if args.keep_last else num_rows // args.prompts_per_step
    total_steps = args.total_steps
    if args.epochs is not None:
        total_steps = math.ceil(args.epochs * steps_per_epoch)
    if args.total_episodes is not None:
        total_steps = args.total_episodes // completions_per_step
    updates_per_pass = args.prompts_per_step // args.prompts_per_update
    updates_per_step = updates_per_pass * args.passes_per_step
    total_updates = total_steps * updates_per_step
    return Plan(
        completions_per_step=completions_per_step,
        updates_per_pass=updates_per_pass,
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
