"""On ranks: updates that follow a reference, of its own or the policy without its adapter, on the real FSDP model."""

from dataclasses import replace

import numpy as np
import torch

from batch import Rollout, Row
from distributed_gradient import recorded
from fsdp_utils import World, shard
from helpers import flags, make_rollout, whole_update
from inputs.choices import algorithm_of
from policies import load_policy, policy_of
from update import add_reference

CASES = {  # name -> flags
    "sampled, with hints": {"kl_estimator": "k2", "micro_batch_tokens": 24},
    "whole": {"kl_over": "vocabulary"},
    "small, on the host": {"kl_over": "vocabulary", "micro_batch_tokens": 24, "offload_reference": True},
    "shared, communicates once": {"kl_over": "vocabulary", "share_prompts": True, "communicate_once": True},
    "LoRA": {"kl_over": "vocabulary", "lora_rank": 3},
    "LoRA, small": {"kl_over": "vocabulary", "lora_rank": 3, "micro_batch_tokens": 24},
    "LoRA, small, communicates once": {
        "kl_over": "vocabulary", "lora_rank": 3, "micro_batch_tokens": 24, "communicate_once": True,
    },
    "LoRA, shared, recomputed": {
        "kl_over": "vocabulary", "lora_rank": 3, "share_prompts": True, "gradient_checkpointing": True,
    },
}  # fmt: skip


def with_hints(rollout: Rollout) -> Rollout:
    """Two completions to a prompt; hints of different lengths."""
    rng = np.random.default_rng(3)
    rows = [Row([], "", {}, "", ids=row.ids) for row in rollout.rows[::2]]
    rows = [replace(row, hinted_ids=np.append(row.ids, rng.integers(0, 64, 2 + i))) for i, row in enumerate(rows)]
    return replace(rollout, rows=[rows[b // 2] for b in range(len(rollout.rows))], loss_weights_B=None)


def main(world: World, path: str, teacher: str) -> dict[str, tuple]:
    """Case -> (metrics, gradients). Eight completions, of which a rank may have none in a micro-batch."""
    found = {}
    for name, changes in CASES.items():
        args = flags(model=path, max_grad_norm=1e9, group_size=2, kl_coef=0.5, prompts_per_step=4, **changes)
        policy = policy_of(args)
        shard(policy, policy.layers, world, torch.float32, stays_gathered=args.communicate_once)
        reference = policy
        if not args.lora_rank:
            reference = load_policy(teacher).requires_grad_(False)
            shard(reference, reference.layers, world, torch.float32, on_host=args.offload_reference)
        update = whole_update(with_hints(make_rollout(group_size=2)), args, policy, world)
        update = add_reference(update, reference, algorithm_of(args))
        found[name] = recorded(policy, update, args, world)
    return found
