"""Run under torchrun: one update's loss and gradient on the real FSDP model, for several caps and orders. Writes them to the file given.

torchrun --nproc_per_node 2 tests/distributed_gradient.py POLICY_FOLDER OUTPUT_FILE
"""

import argparse
import sys
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

import train_grpo
from batch import Batch, Rollout, pack, plan_micro_batches
from fsdp_utils import close_world, init_world, shard
from helpers import make_rollout
from policy import load_policy


class Recorder(torch.optim.SGD):
    """Keeps the gradient of the step that it is asked to make, and makes none."""

    def step(self) -> None:
        self.gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in self.param_groups[0]["params"]]


def reordered(rollout: Rollout, order: list[int]) -> Rollout:
    lists = {name: [getattr(rollout, name)[i] for i in order] for name in ("prompts", "completions", "rollout_logprobs", "texts")}
    return replace(rollout, **lists, advantages_B=rollout.advantages_B[order])


def off_policy_shift(batch: Batch) -> torch.Tensor:
    """What is added to old log-probs, so that ratios differ from 1 and about half of the tokens are clipped, whatever the packing."""
    return torch.where(batch.labels_N % 2 == 0, -0.3, 0.1) * torch.sign(batch.advantages_N)


def main(path: str, output: str) -> None:
    world = init_world(tp_size=1, timeout_minutes=2)
    args = argparse.Namespace(temperature=1.0, clip_low=0.2, clip_high=0.3, kl_coef=0.1, max_grad_norm=1e9)
    policy, reference = load_policy(path, torch.float32), load_policy(path, torch.float32).requires_grad_(False)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # otherwise the KL term has no gradient
    for model in (policy, reference):
        shard(model, model.layers, world, torch.float32)
    optimizer = Recorder(policy.parameters(), lr=0.0)
    three = [12, 11, 9]  # under the cap of 16 one micro-batch each: with two ranks the fourth one is empty
    cases = {
        f"cap {cap}, first {order[0]}": (reordered(make_rollout(), order), cap)
        for cap in (16, 23, 40, 1000)
        for order in (list(range(8)), [7, 2, 5, 0, 3, 6, 1, 4])
    }
    results = {}
    for name, (rollout, cap) in (cases | {"three sequences": (make_rollout(three), 16)}).items():
        micros = plan_micro_batches(rollout.sequence_lengths_B, world.size, cap)[world.rank]
        batches = train_grpo.add_logprobs(reference, "ref_logprobs_N", [pack(rollout, micro) for micro in micros], 1.0)
        batches = train_grpo.add_logprobs(policy, "old_logprobs_N", batches, 1.0)
        batches = [replace(batch, old_logprobs_N=batch.old_logprobs_N + off_policy_shift(batch)) for batch in batches]
        metrics = train_grpo.update_policy(policy, optimizer, batches, int(rollout.completion_lengths_B.sum()), 0.0, args, world)
        results[name] = (metrics, optimizer.gradients)
    if world.is_main:
        torch.save(results, output)
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
