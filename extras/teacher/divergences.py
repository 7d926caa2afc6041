"""Divergences of policy and reference over the whole vocabulary, for `--kl_over vocabulary`. The head computes them.

From log-probs [T, V] of policy (p) and reference (q) to (its value at each token [T], slopes [T, V]). A slope is p x
the derivative by p, up to a multiple of p; by the logits it is slope - p x the sum of the token's slopes. Beside the
arguments at most two tensors [T, V] are held.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reverse(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(policy || reference): the policy leaves out what the reference finds unlikely."""
    slopes = (log_p - log_q).mul_(log_p.exp())
    return slopes.sum(dim=-1), slopes


def forward(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(reference || policy): the policy covers all that the reference finds likely."""
    q = log_q.exp()
    return (log_q - log_p).mul_(q).sum(dim=-1), q.neg_()


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """beta KL(reference || m) + (1 - beta) KL(policy || m), with m = beta reference + (1 - beta) policy.

    Generalized Jensen-Shannon divergence, GKD (arXiv 2306.13649), eq. 2; TRL's `beta` is the same.
    """

    def above_mixture(log_x: Tensor) -> Tensor:
        """x log(x / m), for x = p or q."""
        m = log_p.exp().mul_(1.0 - beta).add_(log_q.exp(), alpha=beta)
        log_m = m.clamp_(min=torch.finfo(m.dtype).tiny).log_()  # where m is 0, x is
        return log_m.neg_().add_(log_x).mul_(log_x.exp())

    values = above_mixture(log_q).sum(dim=-1)
    slopes = above_mixture(log_p).mul_(1.0 - beta)
    return beta * values + slopes.sum(dim=-1), slopes
