"""What the ratio trainer / sampler weighs: --rollout_correction token_truncate, sequence_truncate, token_mask, ..."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo import Correction, Tokens, mismatch


def token_truncate(t: Tokens, *, rollout_correction_max: float) -> Correction:
    """min(ratio of the token, max): truncated importance sampling.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    return truncated(mismatch(t), rollout_correction_max)


def sequence_truncate(t: Tokens, *, rollout_correction_max: float) -> Correction:
    """min(product of the sequence's ratios, max). Liu et al., "When Speed Kills Stability" (2025)."""
    return truncated(mismatch(t, is_sequence=True), rollout_correction_max)


def token_mask(t: Tokens, *, rollout_correction_min: float, rollout_correction_max: float) -> Correction:
    """The ratio of the token inside [min, max], 0 outside. IcePop (Ring-1T, arXiv 2510.18855), with 0.5 and 5."""
    return masked(mismatch(t), rollout_correction_min, rollout_correction_max)


def sequence_mask(t: Tokens, *, rollout_correction_min: float, rollout_correction_max: float) -> Correction:
    """The product of the sequence's ratios inside [min, max], 0 outside."""
    return masked(mismatch(t, is_sequence=True), rollout_correction_min, rollout_correction_max)


def truncated(ratio: Tensor, high: float) -> Correction:
    return Correction(ratio.clamp(max=high), ratio > high)


def masked(ratio: Tensor, low: float, high: float) -> Correction:
    is_outside = (ratio < low) | (ratio > high)
    return Correction(torch.where(is_outside, 0.0, ratio), is_outside)
