"""REINFORCE++: whitened over the tokens of a step: --advantage reinforce++, or reinforce++_baseline"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo import Groups, centred


def reinforce_pp(g: Groups, *, advantage_ddof: int, advantage_eps: float) -> Tensor:
    """(return - mean over tokens of the step) / (std + eps): long completions count more, as in verl.

    REINFORCE++ (arXiv 2501.03262), eq. 4 and 5 of its later versions.
    """
    return whitened(g.returns_T, g.mask_T, advantage_ddof, advantage_eps)


def reinforce_pp_baseline(g: Groups, *, advantage_ddof: int, advantage_eps: float) -> Tensor:
    """(x - mean over tokens of the step) / (std + eps), with x = r - mean of group. REINFORCE++, later eq. 7."""
    rewards_T = torch.repeat_interleave(centred(g.rewards_PG).flatten(), g.lengths_B)
    return whitened(rewards_T, g.mask_T, advantage_ddof, advantage_eps)


def whitened(values: Tensor, mask: Tensor, ddof: int, eps: float) -> Tensor:
    """(value - mean) / (std + eps) over the positions where the mask is true; 0 elsewhere, or if all are equal."""
    chosen = values[mask].double()  # a step has millions of tokens: float32 sums would lose digits
    if len(chosen) == 0 or chosen.max() == chosen.min():
        return torch.zeros_like(values)
    result = (values.double() - chosen.mean()) / (chosen.std(correction=ddof) + eps)
    return torch.where(mask, result, 0.0).to(values.dtype)
