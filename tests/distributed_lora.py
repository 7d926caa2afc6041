"""On ranks: LoRA on the real FSDP model and the real engine."""

import argparse
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from distributed_gradient import recorded
from flags import EngineSettings
from fsdp_utils import World, shard
from helpers import flags, make_rollout, whole_update
from inputs.choices import algorithm_of
from policies import load_policy, policy_of
from policy import Policy
from update import add_logprobs, logprobs_under

RANK = 3  # two ranks share the rows of A unequally


def lora_flags(path: Path | str, **changes: object) -> argparse.Namespace:
    limits = {
        "max_grad_norm": 1e9, "max_prompt_tokens": 4, "max_completion_tokens": 12, "kl_coef": 0.1,
        "micro_batch_tokens": 1000, "group_size": 4, "model": path, "lora_rank": RANK, "lora_alpha": 6,
    }  # fmt: skip
    return flags(**(limits | changes))


def sharded(args: argparse.Namespace, world: World, dtype: torch.dtype) -> Policy:
    """Frozen bf16 weights, an fp32 adapter; the arithmetic has this dtype."""
    policy = policy_of(args, torch.bfloat16)
    shard(policy, policy.layers, world, dtype, stays_gathered=args.communicate_once)
    return policy


def gradient(policy: Policy, args: argparse.Namespace, world: World, index: int = 0) -> tuple[dict, dict]:
    """(metrics, name -> gradient) of the update of this index, after a pass of the reference, as in a step."""
    updates = [whole_update(make_rollout(group_size=4), args, policy, world)]
    (update,) = add_logprobs(updates, policy, policy, algorithm_of(args))
    assert all(isinstance(x, DTensor) for x in policy.parameters()), "a pass without gradient leaves nothing gathered"
    return recorded(policy, update, args, world, index=index)


def logprobs(model: Policy, args: argparse.Namespace, world: World) -> list[torch.Tensor]:
    update = whole_update(make_rollout(), args, model, world)
    update = logprobs_under(model, "old_logprobs_N", update, algorithm_of(args))
    return [batch.old_logprobs_N for batch in update.batches]


def main(world: World, path: str) -> dict[str, object]:
    from rollout import Engine  # here, not above: the tests use the functions of this file without vLLM

    found: dict[str, object] = {"gradients": {}, "bf16": {}, "reference": {}, "with dropout": {}}
    for cap, changes in ((16, {}), (40, {}), (16, {"communicate_once": True}), (40, {"share_prompts": True})):
        for checkpointing in (False, True):
            args = lora_flags(path, micro_batch_tokens=cap, gradient_checkpointing=checkpointing or None, **changes)
            policy = sharded(args, world, torch.float32)
            found["gradients"][f"cap {cap}, {changes}, checkpointing {checkpointing}"] = gradient(policy, args, world)
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters()), "nothing stays gathered"

    for first_pass in ("of the policy", "of the reference"):
        args = lora_flags(path)
        policy = sharded(args, world, torch.bfloat16)
        if first_pass == "of the policy":
            logprobs(policy, args, world)
        found["bf16"][first_pass] = gradient(policy, args, world)[1]

    args = lora_flags(path)
    for dtype in (torch.float32, torch.bfloat16):
        policy, base = sharded(args, world, dtype), load_policy(path, torch.bfloat16)
        shard(base, base.layers, world, dtype)
        with policy.adapter_off():
            reference = logprobs(policy, args, world)
        found["reference"][dtype] = reference, logprobs(base, args, world), logprobs(policy, args, world)

    for name, checkpointing, index in (("plain", None, 2), ("checkpointed", True, 2), ("other update", None, 3)):
        args = lora_flags(path, lora_dropout=0.4, gradient_checkpointing=checkpointing)
        policy = sharded(args, world, torch.float32)
        before = logprobs(policy, args, world)
        found["with dropout"][name] = gradient(policy, args, world, index)
        found["with dropout"][f"{name}, again"] = gradient(policy, args, world, index)
        after = logprobs(policy, args, world)
        found["with dropout"][f"{name}, passes without"] = [a.equal(b) for a, b in zip(before, after, strict=True)]

    args = lora_flags(path)
    policy = policy_of(args, torch.bfloat16)
    whole = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    shard(policy, policy.layers, world, torch.bfloat16)
    settings = EngineSettings(24, gpu_memory_utilization=0.3, enforce_eager=True)
    engine = Engine(path, AutoTokenizer.from_pretrained(path), world, settings)
    found["merged"] = {name: tensor.clone() for name, tensor in policy.full_weights()}
    for _ in range(10):
        engine.sync(policy.full_weights())
    found["merged after"] = {name: tensor.clone() for name, tensor in policy.full_weights()}
    after = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in policy.named_parameters()}
    found |= {"parameters": whole, "parameters after": {name: x.detach() for name, x in after.items()}}
    engine.close()
    return found
