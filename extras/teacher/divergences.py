"""Divergences of policy and reference over the whole vocabulary, for `--kl_over vocabulary`.

From log-probs [T, V] of policy (p) and reference (q) to a value at each token [T].
"""

import torch
from torch import Tensor


def reverse(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(policy || reference): the policy leaves out what the reference finds unlikely."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def forward(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(reference || policy): the policy covers all that the reference finds likely."""
    return (log_q.exp() * (log_q - log_p)).sum(dim=-1)


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float = 0.5) -> Tensor:
    """beta KL(reference || m) + (1 - beta) KL(policy || m), with m = beta reference + (1 - beta) policy.

    Generalized Jensen-Shannon divergence, GKD (arXiv 2306.13649), eq. 2; TRL's `beta` is the same.
    """
    m = beta * log_q.exp() + (1.0 - beta) * log_p.exp()
    log_m = m.clamp(min=torch.finfo(m.dtype).tiny).log()  # where m is 0, both are
    return beta * reverse(log_q, log_m) + (1.0 - beta) * reverse(log_p, log_m)
