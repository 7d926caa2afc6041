"""REINFORCE++: whitened over the tokens of a step: --advantage reinforce++, or reinforce++_baseline"""

import torch
from torch import Tensor

from extras.losses.whole_step import over_step
from grpo import Groups, centred


def reinforce_pp(g: Groups, *, advantage_ddof: int, advantage_eps: float) -> Tensor:
    """(return - mean over tokens of the step) / (std + eps): long completions count more, as in verl.

    REINFORCE++ (arXiv 2501.03262), eq. 4 and 5 of its later versions.
    """
    trained = over_step(g, lambda groups: groups.returns_T[groups.mask_T])
    return whitened(g.returns_T, g.mask_T, advantage_ddof, advantage_eps, trained)


def reinforce_pp_baseline(g: Groups, *, advantage_ddof: int, advantage_eps: float) -> Tensor:
    """(x - mean over tokens of the step) / (std + eps), with x = r - mean of group. REINFORCE++, later eq. 7."""

    def rewards_T(groups: Groups) -> Tensor:
        return torch.repeat_interleave(centred(groups.rewards_PG).flatten(), groups.lengths_B)

    trained = over_step(g, lambda groups: rewards_T(groups)[groups.mask_T])
    return whitened(rewards_T(g), g.mask_T, advantage_ddof, advantage_eps, trained)


def whitened(values: Tensor, mask: Tensor, ddof: int, eps: float, trained: Tensor | None = None) -> Tensor:
    """(value - mean) / (std + eps) where the mask is true; 0 elsewhere, or if all are equal. `trained`: of the step."""
    chosen = (values[mask] if trained is None else trained).double()  # of millions float32 sums would lose digits
    if len(chosen) == 0 or chosen.max() == chosen.min():
        return torch.zeros_like(values)
    result = (values.double() - chosen.mean()) / (chosen.std(correction=ddof) + eps)
    return torch.where(mask, result, 0.0).to(values.dtype)
