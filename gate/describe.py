"""The first lines of a run's log."""

from __future__ import annotations

from argparse import Namespace

from algorithm import functions_of
from command_line import first_sentence
from flags import FLAGS
from fsdp_utils import World
from policy import Policy
from runtime.tables import counted
from schedule import Plan

ALSO_DESCRIBED = (
    "--old_logprobs", "--kl_coef", "--kl_in", "--entropy_coef", "--dynamic_sampling", "--truncated",
    "--num_iterations", "--temperature",
)  # fmt: skip


def describe_algorithm(args: Namespace) -> str:
    """Says in one log line what the flags amount to: the functions in words, the rest as it was written."""
    unused = {"--kl_estimator"} if not args.kl_coef or args.kl_over == "vocabulary" else set()
    if args.rollout_correction == "none":
        unused.add("--rollout_correction")
    parts = []
    for name, function in functions_of(args).items():
        if name not in unused:
            values = "".join(f" --{key} {value}" for key, value in function.keywords.items() if f"--{key}" in FLAGS)
            parts.append(f"{FLAGS[name].written(args)}{values}: {first_sentence(function.func.__doc__)}")
    parts.append(" ".join(FLAGS[name].written(args) for name in ALSO_DESCRIBED))
    return f"algorithm: {'; '.join(parts)}"


def describe_world(world: World) -> str:
    """The log's line: 16 ranks on cuda, 2 copies of the policy, 8 engines of 2."""
    text = f"{world.num_trainers} rank{'s' * (world.num_trainers > 1)} on {world.device.type}"
    if world.shard_ranks not in (None, world.num_trainers):
        text += f", {world.num_trainers // world.shard_ranks} copies of the policy"
    if not world.has_engines:
        return f"{text}, generation servers"
    return f"{text}, {world.num_engines} engine{'s' * (world.num_engines > 1)} of {world.tp_size}"


def describe_plan(plan: Plan) -> str:
    """The numbers of the plan, for the first lines of the log."""
    return (
        f"{counted(plan.prompts_per_step, 'prompt')} x {plan.group_size} = "
        f"{counted(plan.completions_per_step, 'completion')} a step, "
        f"{counted(plan.updates_per_step, 'update')} a step, {counted(plan.steps_per_epoch, 'step')} an epoch, "
        f"{counted(plan.total_steps, 'step')} in all"
    )


def describe_policy(policy: Policy) -> str:
    """The numbers of parameters and of trained ones, for the first lines of the log."""
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in policy.parameters())
    adapter = f": {policy.adapter.describe()}" if policy.adapter else ""
    return f"trainable: {trained:,} of {total:,} parameters{adapter}"
