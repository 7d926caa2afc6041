"""MT-GRPO: the reward of a turn is compared with the group's rewards of that turn: --advantage mt_grpo

--environment my_environment.py:Class    whose reward() returns a list, a number a turn (docs/turns.md)
"""

import torch
from torch import Tensor

from grpo import Groups, divided, to_go


def mt_grpo(g: Groups, *, advantage_ddof: int, advantage_eps: float) -> Tensor:
    """The `grpo` of each turn's rewards among the group, summed over a token's turn and later ones.

    MT-GRPO (arXiv 2505.11821v1) and its code (SiliangZeng/Multi-Turn-RL-Agent), where the first of two turns has a
    reward of its own, and the outcome is that of the last. Raises ValueError if the rewards are not by turn.
    """
    if g.turn_rewards_PGK is None:
        raise ValueError("--advantage mt_grpo needs an --environment whose reward() returns a list, a number a turn.")
    rewards_PKG = g.turn_rewards_PGK.transpose(1, 2)
    is_there = ~rewards_PKG.isnan()
    counts = is_there.sum(dim=2, keepdim=True)
    mean = rewards_PKG.nansum(dim=2, keepdim=True) / counts
    deviations = torch.where(is_there, rewards_PKG - mean, 0.0)
    std = (deviations.square().sum(dim=2, keepdim=True) / (counts - advantage_ddof).clamp(min=1)).sqrt()
    advantages_BK = divided(deviations, std + advantage_eps).transpose(1, 2).flatten(0, 1)
    sequences_T = torch.repeat_interleave(g.lengths_B)
    return to_go(advantages_BK)[sequences_T, g.turns_T]
