"""The first lines of a run's log."""

from __future__ import annotations

from fsdp_utils import World
from policy import Policy
from runtime.tables import counted
from schedule import Plan


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
