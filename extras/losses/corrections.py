"""Weights from the ratio trainer / sampler: --rollout_correction token_truncate, token_mask, ..."""

import torch
from torch import Tensor

from extras.losses.sequences import sequence_mismatch
from grpo import Tokens, mismatch


def token_truncate(t: Tokens, *, largest: float = 2.0) -> tuple[Tensor, Tensor]:
    """min(ratio of the token, largest). Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (2025).
    """
    return truncated(mismatch(t), largest)


def sequence_truncate(t: Tokens, *, largest: float = 2.0) -> tuple[Tensor, Tensor]:
    """min(product of the sequence's ratios, largest). Liu et al., "When Speed Kills Stability" (2025)."""
    return truncated(sequence_mismatch(t), largest)


def token_mask(t: Tokens, *, smallest: float = 0.5, largest: float = 2.0) -> tuple[Tensor, Tensor]:
    """The ratio of the token within smallest and largest, 0 outside. IcePop (arXiv 2510.18855), with 0.5 and 5."""
    return masked(mismatch(t), smallest, largest)


def sequence_mask(t: Tokens, *, smallest: float = 0.5, largest: float = 2.0) -> tuple[Tensor, Tensor]:
    """The product of the sequence's ratios within smallest and largest, 0 outside."""
    return masked(sequence_mismatch(t), smallest, largest)


def truncated(ratio: Tensor, high: float) -> tuple[Tensor, Tensor]:
    return ratio.clamp(max=high), ratio > high


def masked(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    is_outside = (ratio < low) | (ratio > high)
    return torch.where(is_outside, 0.0, ratio), is_outside
