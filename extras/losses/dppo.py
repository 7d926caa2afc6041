"""DPPO: a trust region of probabilities in place of a clip of ratios: --policy_loss dppo, or dppo_kl"""

import torch
from torch import Tensor

from grpo import Loss, Tokens, token_ratio

DPPO_RATIO_LIMIT = 20.0  # verl: `clip_ratio_c`, of which its `dppo_tv` says that it should be large


def dppo(t: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """-A x logprob x the detached ratio, at most 20; no gradient where the token's probability has moved too far.

    DPPO-Binary-TV (arXiv 2602.04879): up by more than clip_high where A > 0, or down by more than clip_low where A < 0.
    verl: `dppo_tv`, by the authors, with 0.15. The paper measures from the sampler: --old_logprobs rollout.
    """
    moved = t.logprobs.detach().exp() - t.old_logprobs.exp()
    return within_region(t, moved.abs(), clip_low, clip_high)


def dppo_kl(t: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """`dppo` with KL(old || new) of "this token or another one" as the measure of how far. DPPO-Binary-KL (2602.04879).

    verl: `dppo_kl`, with 0.05 in its script, and with the same 1e-8 against the logarithm of 0.
    """
    p, old_p = t.logprobs.detach().exp(), t.old_logprobs.exp()
    rest_of_kl = (1.0 - old_p) * ((1.0 - old_p + 1e-8) / (1.0 - p + 1e-8)).log()
    divergence = old_p * (t.old_logprobs - t.logprobs.detach()) + rest_of_kl
    return within_region(t, divergence, clip_low, clip_high)


def within_region(t: Tokens, divergence: Tensor, low: float, high: float) -> Loss:
    """-A x logprob x the detached ratio, at most 20; 0 where A moves a token on that is already outside the region."""
    ratio = token_ratio(t.logprobs, t.old_logprobs)
    is_low = (divergence > low) & (ratio < 1.0) & (t.advantages < 0)
    is_high = (divergence > high) & (ratio > 1.0) & (t.advantages > 0)
    loss = -ratio.detach().clamp(max=DPPO_RATIO_LIMIT) * t.advantages * t.logprobs
    return Loss(torch.where(is_low | is_high, 0.0, loss), ratio, is_low, is_high)
