"""Run under torchrun: what `fill` puts into the shards, against `from_pretrained`; and how many full parameters a sync
holds.

torchrun --nproc_per_node 2 tests/distributed_loading.py OUTPUT_FILE FOLDER...
"""

import itertools
import sys

import torch
from transformers import AutoModelForCausalLM

from fsdp_utils import close_world, gather_from_ranks, init_world, shard
from helpers import HeldInSync
from model.weights import fill
from policy import Policy, empty_policy, shard_and_fill


def sharded(path: str, dtype: torch.dtype, on_host: bool, world) -> Policy:
    return shard_and_fill(empty_policy(path, dtype), path, world, on_host)


def differences(path: str, dtype: torch.dtype, on_host: bool, world) -> list[str]:
    """Names of parameters and buffers that are not, bit for bit, what from_pretrained gives."""
    policy = sharded(path, dtype, on_host, world)
    wanted = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    found = dict(policy.full_weights()) | dict(policy.model.named_buffers())
    expected = dict(wanted.named_parameters()) | dict(wanted.named_buffers())
    assert found.keys() == expected.keys()
    return [name for name, x in expected.items() if found[name].dtype != x.dtype or not found[name].equal(x)]


def most_held_in_a_sync(path: str, world) -> float:
    """The most bytes of full parameters alive at a time, in decoder layers, where the consumer keeps none of them."""
    policy = sharded(path, torch.float32, False, world)
    policy.dtype = torch.bfloat16
    held = HeldInSync()
    for _ in held.stream(policy.full_weights()):
        pass
    return held.most / sum(2 * parameter.numel() for parameter in policy.layers[0].parameters())


def is_extra_parameter_kept(path: str, world) -> bool:
    """Whether a parameter that is in no file, as an adapter is, keeps its values through sharding and filling."""
    policy = empty_policy(path, torch.bfloat16)
    values = torch.arange(15, dtype=torch.float32).view(5, 3)
    policy.layers[0].extra = torch.nn.Parameter(values.clone())
    fill(policy, policy.model, path, shard(policy, policy.layers, world, torch.bfloat16))
    policy.dtype = torch.float32
    full = dict(policy.full_weights())
    return full["model.layers.0.extra"].equal(values) and len(full) > 20


def main(output: str, *folders: str) -> None:
    world = init_world(tp_size=1, timeout_minutes=2)
    cases = itertools.product(folders, (torch.float32, torch.bfloat16), (False, True))
    results = {str(case): differences(*case, world) for case in cases}
    results["held"] = most_held_in_a_sync(folders[0], world)
    results["is extra kept"] = is_extra_parameter_kept(folders[0], world)
    results = gather_from_ranks(results)
    if world.is_main:
        torch.save(results, output)
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
