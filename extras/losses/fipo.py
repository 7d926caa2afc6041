"""FIPO: a token counts more where the rest of its completion is being reinforced: --policy_loss fipo

    --clip_high 0.28 --dual_clip 10

Sources: arXiv 2603.19835 and its code (qwenpilot/FIPO, "future_kl" with high-only clipping, read in
a fork). There a sequence with two tokens beyond the dual clip also leaves the denominator.
"""

import torch

from extras.losses.sequences import sequence_sum
from grpo import clipped, token_ratio


def fipo(t, *, clip_low, clip_high, dual_clip, half_life=32.0, most=1.2, safety=10.0):
    """`clip` of A x exp(discounted sum of log ratios of this token and later ones), within [1, most], detached.

    Ratios above --dual_clip do not count. Where A < 0 and the ratio is above `safety`, the factor is at most 1.
    """
    ratio, bound = token_ratio(t.logprobs, t.old_logprobs), dual_clip or torch.inf
    log_ratio = torch.where(t.mask & (ratio <= bound), ratio.log(), 0.0).detach()
    future, width = log_ratio, 1  # the discounted sum over the next `width` tokens of the sequence
    while width < len(future):
        is_same = t.sequence_ids[width:] == t.sequence_ids[:-width]
        later = torch.where(is_same, future[width:] * 0.5 ** (width / half_life), 0.0)
        future, width = future + torch.nn.functional.pad(later, (0, width)), 2 * width
    factor = future.exp().clamp(1.0, most)
    factor = torch.where((t.advantages < 0) & (ratio.detach() > safety), factor.clamp(max=1.0), factor)
    loss = clipped(ratio, t.advantages * factor, clip_low, clip_high, dual_clip)
    is_beyond = t.mask & (t.advantages < 0) & (ratio.detach() > bound)
    is_kept = sequence_sum(is_beyond.to(ratio.dtype), t.sequence_ids) <= 1
    return loss._replace(per_token=torch.where(is_kept, loss.per_token, 0.0), metrics={"future_factor": factor})
