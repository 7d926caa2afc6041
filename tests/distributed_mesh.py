"""On four ranks: the same updates where all share a copy of the policy, and with --shard_ranks."""

from argparse import Namespace
from dataclasses import replace
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from fsdp_utils import World, fill_from_main, full_tensors, local_shard, own_rows, shard, sum_over_trainers
from helpers import build, make_rollout, train_once, whole_update
from inputs.choices import algorithm_of
from policy import Policy
from ranks import parsed
from update import add_logprobs

MESHES = (None, 2, 1)  # --shard_ranks
CASES = (
    "--dtype float32 --kl_coef 0.1 --micro_batch_tokens 20 --communicate_once",
    "--param_dtype bfloat16 --offload optimizer",
    "--dtype float32 --kl_coef 0.1 --lora_rank 3 --offload all",
)
COMMON = "--prompts_per_step 4 --group_size 2 --max_grad_norm 0.05"

Tensors = dict[str, torch.Tensor]


def train(args: Namespace, world: World) -> tuple[list[dict[str, float]], Tensors, Tensors]:
    """Two updates: their metrics, the gradients of the last one, and the weights."""
    policy, reference, optimizer = build(args, world)
    shape = (4,) if world.shard_ranks is None else (4 // world.shard_ranks, world.shard_ranks)
    placements = (Shard(0),) if world.shard_ranks is None else (Replicate(), Shard(0))
    for parameter in policy.parameters():
        assert parameter.device_mesh.shape == shape and parameter.placements == placements
        assert len(local_shard(parameter)) <= -(-len(parameter) // shape[-1])
    metrics, gradients, rollout = [], {}, make_rollout()
    optimizer.register_step_pre_hook(lambda *_: gradients.update(gradients_of(policy)))
    for i in range(2):
        update = whole_update(rollout, args, policy, world)
        (update,) = add_logprobs([update], policy, reference, algorithm_of(args))
        metrics.append(train_once(policy, optimizer, update, args, world, rate=1e-3, index=i))
    return metrics, gradients, {name: full.clone() for name, full in policy.full_weights()}


def gradients_of(policy: Policy) -> Tensors:
    return {name: p.grad.full_tensor().clone() for name, p in policy.named_parameters() if p.grad is not None}


def check_unequal_parts(world: World) -> None:
    """Seven rows over the shards: what is filled comes back whole, in fp32 and bf16; each row belongs to one rank."""
    torch.manual_seed(0)
    wanted, linear = [torch.randn(7, 3), torch.randn(7)], nn.Linear(3, 7)
    shard(linear, [], world, torch.float32)
    for parameter, values in zip(linear.parameters(), wanted, strict=True):
        fill_from_main(parameter, values if world.is_main else None)
    for dtype in (torch.float32, torch.bfloat16):
        found = full_tensors((parameter, dtype) for parameter in linear.parameters())
        assert all(full.equal(values.to(dtype)) for full, values in zip(found, wanted, strict=True))
    total = torch.zeros(7, 3)
    for rows, first in own_rows(linear.weight, at_most=2):
        total[first : first + len(rows)] += rows
    assert sum_over_trainers(total).equal(wanted[0])


def main(whole: World, path: str) -> dict[str, dict[int | None, tuple]]:
    """Flags -> --shard_ranks -> (metrics of the updates, gradients, weights as the engine gets them)."""
    results = {case: {} for case in CASES}
    for shard_ranks in MESHES:
        world = replace(whole, shard_ranks=shard_ranks)
        check_unequal_parts(world)
        for group in world.mesh.get_all_groups():
            assert group._get_backend(world.device).options._timeout == timedelta(minutes=2), "that of the run"
        for case in CASES:
            results[case][shard_ranks] = train(parsed(f"--model {path} {COMMON} {case}", 4), world)
    return results
