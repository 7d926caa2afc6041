"""GSPO: the ratio of the whole sequence: --policy_loss gspo, or gspo_token, which has a gradient for each token."""

import torch
from torch import Tensor

from extras.losses.sequences import sequence_mean
from grpo import LOG_RATIO_LIMIT, Loss, Tokens, clipped


def gspo(t: Tokens, *, clip_low: float, clip_high: float, dual_clip: float) -> Loss:
    """`clip` with the ratio of the whole sequence. GSPO (arXiv 2507.18071), eq. 5 and 7."""
    ratio = sequence_ratio(t.logprobs, t.old_logprobs, t.mask, t.sequence_ids)
    return clipped(ratio, t.advantages, clip_low, clip_high, dual_clip)


def gspo_token(t: Tokens, *, clip_low: float, clip_high: float, dual_clip: float) -> Loss:
    """`gspo` whose gradient flows to each token's own log-prob alone. GSPO-token (arXiv 2507.18071), eq. 13 and 14."""
    ratio = gspo_token_ratio(t.logprobs, t.old_logprobs, t.mask, t.sequence_ids)
    return clipped(ratio, t.advantages, clip_low, clip_high, dual_clip)


def gspo_token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """The value of `sequence_ratio` with the gradient of each token's own log-prob alone: GSPO-token, eq. 14."""
    value = sequence_ratio(logprobs.detach(), old_logprobs, mask, sequence_ids)
    return value * torch.where(mask, logprobs - logprobs.detach(), 0.0).exp()


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """(pi(y) / pi_old(y))^(1 / |y|) of each token's sequence, the geometric mean of its token ratios; 1 where masked.

    GSPO, eq. 7, its log clamped to +-20 (verl: only above, at 10).
    """
    log_ratio = sequence_mean(logprobs - old_logprobs, mask, sequence_ids)
    return torch.where(mask, log_ratio, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
