"""Run under torchrun with four ranks: the same updates where all share a copy of the policy, and with --shard_ranks.

Writes {flags: {shard_ranks: (metrics of the updates, gradients, weights as the engine gets them)}} and the checkpoint
of each to the folder, and checks that a checkpoint comes back to the bit on another mesh.

torchrun --nproc_per_node 4 tests/distributed_mesh.py POLICY_FOLDER OUTPUT_FOLDER
"""

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoTokenizer

from checkpoint import Writer, load
from flags import Saving
from fsdp_utils import World, close_world, fill_from_main, full_tensors, init_world, local_shard, shard
from helpers import build, make_rollout, train_once, whole_update
from inputs.checks import check_flags
from inputs.choices import algorithm_of
from inputs.command_line import parse_flags
from policy import Policy
from update import add_logprobs

MESHES = (None, 2, 1)  # --shard_ranks
CASES = (
    "--kl_coef 0.1 --micro_batch_tokens 20 --communicate_once",
    "--param_dtype bfloat16 --offload optimizer",
    "--kl_coef 0.1 --lora_rank 3 --offload all",
)
COMMON = (
    "--train_data d --out_dir o --total_steps 1 --max_prompt_tokens 4 --max_completion_tokens 12 "
    "--micro_batch_tokens 40 --group_size 2 --dtype float32 --max_grad_norm 0.05"
)


def parsed(path: str, case: str):
    common = COMMON.replace("--dtype float32", "") if "bfloat16" in case else COMMON
    return parse_flags(["--model", path, *common.split(), *case.split(), "--prompts_per_step", "4"])


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: full.clone() for name, full in policy.full_weights()}


def state_of(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All that a resume restores, whole, in fp32: gloo gathers no int16."""
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    found = dict(trained)
    for name, parameter in trained.items():
        found |= {f"{key} of {name}": tensor for key, tensor in optimizer.state[parameter].items()}
    whole = {name: x.float().full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
    return {name: x.detach().clone() for name, x in whole.items()}  # the full tensor of one shard is that shard


def train(args, world: World) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], Policy, torch.optim.Optimizer]:
    """Two updates: their metrics, the gradients of the last one, and what was trained."""
    check_flags(args, world.num_trainers)
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
    return metrics, gradients, policy, optimizer


def gradients_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor().clone() for name, p in policy.named_parameters() if p.grad is not None}


def check_unequal_parts(world: World) -> None:
    """Seven rows over the shards: what is filled comes back whole, in fp32 and in bf16."""
    torch.manual_seed(0)
    wanted, linear = [torch.randn(7, 3), torch.randn(7)], nn.Linear(3, 7)
    shard(linear, [], world, torch.float32)
    for parameter, values in zip(linear.parameters(), wanted, strict=True):
        fill_from_main(parameter, values if world.is_main else None)
    for dtype in (torch.float32, torch.bfloat16):
        found = full_tensors((parameter, dtype) for parameter in linear.parameters())
        assert all(full.equal(values.to(dtype)) for full, values in zip(found, wanted, strict=True))


def main(path: str, output: str) -> None:
    whole, folder = init_world(tp_size=1, timeout_minutes=2), Path(output)
    tokenizer, results = AutoTokenizer.from_pretrained(path), {}
    for shard_ranks in MESHES:
        check_unequal_parts(replace(whole, shard_ranks=shard_ranks))
    for number, case in enumerate(CASES):
        args, results[case] = parsed(path, case), {}
        states, models = [], []
        for step, shard_ranks in enumerate(MESHES, start=1):
            world = replace(whole, shard_ranks=shard_ranks)
            for group in world.mesh.get_all_groups():
                assert group._get_backend(world.device).options._timeout == timedelta(minutes=2), "that of the run"
            metrics, gradients, policy, optimizer = train(args, world)
            results[case][shard_ranks] = metrics, gradients, weights_of(policy)
            states.append(state_of(policy, optimizer))
            models.append((policy, optimizer))
            (folder / str(number)).mkdir(exist_ok=True)
            writer = Writer(folder / str(number), [tokenizer], Saving(keep_checkpoints=0), world, print)
            writer.save(step, policy, optimizer, {"drawn": step})
        for step, expected in enumerate(states, start=1):
            policy, optimizer = models[step - 2]  # of another mesh
            assert load(folder / str(number) / f"step_{step}", policy, optimizer) == {"drawn": step}
            found = state_of(policy, optimizer)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert found[name].equal(tensor), f"{case}: {name}, saved with {MESHES[step - 1]}"
    if whole.is_main:
        torch.save(results, folder / "results.pt")
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
