"""REINFORCE++: whitened over the tokens of a step: --advantage reinforce++, or reinforce++_baseline"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo import Groups, centred, whitened


def reinforce_pp(g: Groups, *, advantage_ddof: int, advantage_eps: float) -> Tensor:
    """(return - mean over tokens of the step) / (std + eps): long completions count more, as in verl.

    REINFORCE++ (arXiv 2501.03262), eq. 4 and 5 of its later versions.
    """
    return whitened(g.returns_T, g.mask_T, advantage_ddof, advantage_eps)


def reinforce_pp_baseline(g: Groups, *, advantage_ddof: int, advantage_eps: float) -> Tensor:
    """(x - mean over tokens of the step) / (std + eps), with x = r - mean of group. REINFORCE++, later eq. 7."""
    rewards_T = torch.repeat_interleave(centred(g.rewards_PG).flatten(), g.lengths_B)
    return whitened(rewards_T, g.mask_T, advantage_ddof, advantage_eps)
