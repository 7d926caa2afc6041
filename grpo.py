"""The algorithm as tensor arithmetic: advantages, clipped policy loss, KL to the reference, aggregation.

Pure functions: tensors in, tensors out; no model, device, rank or flag object in sight. Read top to bottom; `policy_loss` is the
equation of GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3, with the token mean of DAPO, arXiv 2503.14476, eq. 8). Dimensions: `batch.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond it a ratio is only a way to overflow (EasyR1 and verl clamp alike)
KL_LIMIT = 10.0  # k3 is clamped to +-10, as EasyR1 and verl do for `low_var_kl`


def group_advantages(rewards_PG: Tensor, eps: float = 1e-6) -> Tensor:
    """Advantages, shape PG: each reward minus its group's mean, over the group's standard deviation (ddof=1) + eps, as EasyR1.

    A group of equal rewards carries no signal: exactly 0, not rounding noise divided by eps.
    """
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    std_P1 = rewards_PG.std(dim=1, correction=1, keepdim=True)
    has_signal_P1 = rewards_PG.amax(dim=1, keepdim=True) > rewards_PG.amin(dim=1, keepdim=True)
    return torch.where(has_signal_P1, centred_PG / (std_P1 + eps), 0.0)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference), same shape: k3 = exp(x) - x - 1 with x = ref - logprob, never negative.

    Source: Schulman, "Approximating KL Divergence"; x clamped to +-20 and the value to +-10, as EasyR1 (`low_var_kl`).
    """
    x = (ref_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (x.exp() - x - 1.0).clamp(-KL_LIMIT, KL_LIMIT)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token (loss, ratio, is_clipped), each of the inputs' shape: the larger of -A * ratio and -A * clipped ratio.

    The ratio pi / pi_old is clipped to [1 - clip_low, 1 + clip_high]. `is_clipped` marks the tokens where the clipped term is the
    larger one, that is, whose gradient is zero. `old_logprobs` must not require grad.
    """
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped, clipped), ratio, clipped > unclipped


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the sum over positions where the boolean mask is true. Elsewhere the gradient is exactly 0, also beside inf or nan."""
    return torch.where(mask, values, 0.0).sum()
