"""Run under torchrun: LoRA on the real FSDP model and the real engine. Writes what it finds to the file given.

torchrun --nproc_per_node 2 tests/distributed_lora.py POLICY_FOLDER OUTPUT_FILE
"""

import argparse
import sys

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from distributed_gradient import Recorder
from flags import EngineSettings, Lora, take
from fsdp_utils import World, close_world, init_world, shard
from helpers import HeldInSync, flags, make_rollout, train_once, whole_update
from inputs.choices import algorithm_of
from model.lora import add_adapter
from policy import Policy, load_policy
from update import add_logprobs, logprobs_under

RANK = 3  # two ranks share the rows of A unequally


def lora_flags(path: str, **changes: object) -> argparse.Namespace:
    limits = {
        "max_grad_norm": 1e9, "max_prompt_tokens": 4, "max_completion_tokens": 12, "kl_coef": 0.1,
        "micro_batch_tokens": 1000, "group_size": 4, "model": path, "lora_rank": RANK, "lora_alpha": 6,
    }  # fmt: skip
    return flags(**(limits | changes))


def adapted_policy(args: argparse.Namespace, gradient_checkpointing: bool = False) -> Policy:
    """A policy with frozen bf16 weights and an fp32 adapter that is no longer the zero it starts as; not sharded."""
    policy = load_policy(args.model, torch.bfloat16, gradient_checkpointing)
    add_adapter(policy.model, take(Lora, args), args.seed, args.model)
    torch.manual_seed(2)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.2)
    return policy


def gradient(policy: Policy, args: argparse.Namespace, world: World, index: int = 0) -> tuple[dict, dict]:
    """(metrics, name -> gradient) of the update of this index, after a pass of the reference, as in a step."""
    updates = [whole_update(make_rollout(group_size=4), args, policy, world)]
    (update,) = add_logprobs(updates, policy, policy, algorithm_of(args))
    assert all(isinstance(x, DTensor) for x in policy.parameters()), "a pass without gradient leaves nothing gathered"
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    optimizer = Recorder(trained.values(), lr=0.0)
    metrics = train_once(policy, optimizer, update, args, world, index=index)
    return metrics, dict(zip(trained, optimizer.gradients, strict=True))


def logprobs(model: Policy, args: argparse.Namespace, world: World) -> list[torch.Tensor]:
    update = whole_update(make_rollout(), args, model, world)
    update = logprobs_under(model, "old_logprobs_N", update, algorithm_of(args))
    return [batch.old_logprobs_N for batch in update.batches]


def main(path: str, output: str) -> None:
    from rollout import Engine  # here, not above: the tests use the functions of this file without vLLM

    world = init_world(tp_size=1, timeout_minutes=2)
    found: dict[str, object] = {"gradients": {}, "with dropout": {}}
    for cap, changes in ((16, {}), (40, {}), (16, {"communicate_once": True}), (40, {"share_prompts": True})):
        for checkpointing in (False, True):
            args = lora_flags(path, micro_batch_tokens=cap, **changes)
            policy = adapted_policy(args, checkpointing)
            shard(policy, policy.layers, world, torch.float32, stays_gathered=args.communicate_once)
            found["gradients"][f"cap {cap}, {changes}, checkpointing {checkpointing}"] = gradient(policy, args, world)
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters()), "nothing stays gathered"

    found["bf16"] = {}
    for first_pass in ("of the policy", "of the reference"):
        args = lora_flags(path)
        policy = adapted_policy(args)
        shard(policy, policy.layers, world, torch.bfloat16)
        if first_pass == "of the policy":
            logprobs(policy, args, world)
        found["bf16"][first_pass] = gradient(policy, args, world)[1]

    args = lora_flags(path)
    for dtype in (torch.float32, torch.bfloat16):
        policy, base = adapted_policy(args), load_policy(path, torch.bfloat16)
        for model in (policy, base):
            shard(model, model.layers, world, dtype)
        with policy.adapter_off():
            reference = logprobs(policy, args, world)
        wanted, adapted = logprobs(base, args, world), logprobs(policy, args, world)
        found[f"reference is the base model, {dtype}"] = all(a.equal(b) for a, b in zip(reference, wanted, strict=True))
        found[f"reference is the policy, {dtype}"] = any(a.equal(b) for a, b in zip(reference, adapted, strict=True))

    args = lora_flags(path, lora_dropout=0.4)
    for name, checkpointing, index in (("plain", False, 2), ("checkpointed", True, 2), ("other update", False, 3)):
        policy = adapted_policy(args, checkpointing)
        shard(policy, policy.layers, world, torch.float32)
        before = logprobs(policy, args, world)
        found["with dropout"][name] = gradient(policy, args, world, index)
        found["with dropout"][f"{name}, again"] = gradient(policy, args, world, index)
        after = logprobs(policy, args, world)
        found["with dropout"][f"{name}, passes without"] = [a.equal(b) for a, b in zip(before, after, strict=True)]

    args = lora_flags(path)
    policy = adapted_policy(args)
    whole = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    shard(policy, policy.layers, world, torch.bfloat16)
    settings = EngineSettings(24, gpu_memory_utilization=0.3, enforce_eager=True)
    engine = Engine(path, AutoTokenizer.from_pretrained(path), world, settings)
    found["merged"] = {name: tensor.clone() for name, tensor in policy.full_weights()}
    for _ in range(100):
        engine.sync(policy.full_weights())
    held = HeldInSync()
    engine.sync(held.stream(policy.full_weights()))
    own = (parameter for name, parameter in policy.layers[0].named_parameters() if ".lora_" not in name)
    layer_bytes = sum(2 * parameter.numel() for parameter in own)
    found["held in a sync, in layers"] = held.most / layer_bytes
    found["merged after"] = {name: tensor.clone() for name, tensor in policy.full_weights()}
    after = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in policy.named_parameters()}
    found |= {"parameters": whole, "parameters after": {name: x.detach() for name, x in after.items()}}
    if world.is_main:
        torch.save(found, output)
    engine.close()
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
