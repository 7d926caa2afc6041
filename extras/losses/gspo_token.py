"""GSPO-token: the ratio of the sequence, with a gradient for each token: --policy_loss gspo_token"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo import Loss, Tokens, clipped, sequence_ratio


def gspo_token(t: Tokens, *, clip_low: float, clip_high: float, dual_clip: float) -> Loss:
    """`gspo` whose gradient flows to each token's own log-prob alone. GSPO-token (arXiv 2507.18071), eq. 13 and 14."""
    ratio = gspo_token_ratio(t.logprobs, t.old_logprobs, t.mask, t.sequence_ids)
    return clipped(ratio, t.advantages, clip_low, clip_high, dual_clip)


def gspo_token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """The value of `sequence_ratio` with the gradient of each token's own log-prob alone: GSPO-token, eq. 14."""
    value = sequence_ratio(logprobs.detach(), old_logprobs, mask, sequence_ids)
    return value * torch.where(mask, logprobs - logprobs.detach(), 0.0).exp()
