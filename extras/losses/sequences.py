"""Sums, means and ratios over whole sequences, at each of their tokens: what several losses are made of."""

import torch
from torch import Tensor

from grpo import LOG_RATIO_LIMIT, Tokens, log_mismatch


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """At each token, the mean of the values over the trained tokens of its sequence; 0 if there are none."""
    lengths = sequence_sum(mask.to(values.dtype), sequence_ids).clamp(min=1.0)
    return sequence_sum(torch.where(mask, values, 0.0), sequence_ids) / lengths


def sequence_sum(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """At each token, the sum of the values over its whole sequence."""
    return torch.zeros_like(values).index_add(0, sequence_ids, values)[sequence_ids]


def sequence_mismatch(t: Tokens) -> Tensor:
    """The product of `mismatch` over the whole sequence, added up in logs."""
    return sequence_sum(log_mismatch(t), t.sequence_ids).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
