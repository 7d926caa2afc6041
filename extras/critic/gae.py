"""Generalised advantage estimation (arXiv 1506.02438), without discount."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo import Groups


def gae(g: Groups, values_T: Tensor, lam: float, alpha: float = 0.0) -> Tensor:
    """float64: at each trained token the sum of lambda^k x the TD error k trained tokens later; else 0.

    What an environment said is skipped: its neighbours are linked. `alpha` above 0: lambda is
    1 - 1 / (alpha x trained tokens) of each completion (VAPO, arXiv 2504.05118).
    """
    lengths, sums = g.lengths_B.tolist(), []
    for returns, values, mask in zip(*(x.split(lengths) for x in (g.returns_T, values_T, g.mask_T)), strict=True):
        # TD error = reward + next value - value; a token's reward is what the return to go loses behind it.
        errors = returns[mask].double() - values[mask].double()
        errors[:-1] -= errors[1:].clone()
        decay = 1.0 - 1.0 / max(alpha * len(errors), 1.0) if alpha else lam
        sums.append(torch.zeros(len(mask), dtype=torch.float64).masked_scatter_(mask, decayed_sums(errors, decay)))
    return torch.cat(sums)


def decayed_sums(values: Tensor, decay: float) -> Tensor:
    """At each place, the sum of this value and later ones, each x decay to the power of its distance."""
    sums, span = values.clone(), 1
    while span < len(values):  # each round doubles the number of places that a sum is over
        sums[:-span] += decay**span * sums[span:].clone()
        span *= 2
    return sums
