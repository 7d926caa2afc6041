"""A reference that moves to the policy: --reference_every, --reference_mixup, --reset_optimizer"""

import torch
from torch.optim import Optimizer

from fsdp_utils import local_shard
from policy import Policy
from schedule import UpdateStep


@torch.no_grad()
def move_references(policy: Policy, optimizer: Optimizer, step: UpdateStep) -> None:
    """reference += mixup x (policy - reference), on the shards of this rank: nothing is communicated.

    With 1 it is the policy, to the bit. With --reset_optimizer moments and counts become 0, as at the start; the
    remainders of bf16 parameters stay: they are a part of the parameters.
    """
    for reference in policy.moving_references:
        for target, parameter in zip(reference.parameters(), policy.parameters(), strict=True):
            own = local_shard(target)
            own.lerp_(local_shard(parameter).to(own), step.reference_mixup)
    for state in optimizer.state.values() if step.resets_optimizer else ():
        for name, value in state.items():
            if name != "remainder":
                local_shard(value).zero_()
