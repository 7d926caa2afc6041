"""Passes on the meta device: what the tests of the loop over micro-batches share.

Meta raises wherever the host would wait for a GPU to read a value (`item`, `tolist`, `if`), or a size that depends on
values (`nonzero`, an index that is a mask).
"""

from __future__ import annotations

from argparse import Namespace

import torch

import update
from batch import Rollout
from flags import Memory, UpdateStep
from fsdp_utils import World
from helpers import whole_update
from inputs.choices import algorithm_of
from policy import Policy

META = World(trainer_rank=0, num_trainers=1, tp_size=1, device=torch.device("meta"))


def run_passes(policy: Policy, args: Namespace, rollout: Rollout) -> int:
    """The passes for log-probs and the update's loop over micro-batches; returns how many of these there were."""
    policy.to("meta")
    algorithm, memory = algorithm_of(args), Memory.from_flags(args)
    packed = whole_update(rollout, args, policy, META)
    step = UpdateStep(index=0, rate=0.0, is_first=False, max_grad_norm=1.0, seed=0)
    for field in ("old_logprobs_N", "ref_logprobs_N"):
        packed = update.logprobs_under(policy, field, packed, algorithm)
    passes = update.add_gradients(policy, packed, algorithm, step, memory, META)
    assert all(parameter.grad is not None for parameter in policy.parameters() if parameter.requires_grad)
    return len(passes)
