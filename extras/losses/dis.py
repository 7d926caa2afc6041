"""Double-sided importance sampling of SAO: --policy_loss dis, with --old_logprobs rollout"""

import torch

from grpo import Loss, token_ratio


def dis(t, *, clip_low, clip_high):
    """-A x ratio within [1 - clip_low, 1 + clip_high], and 0 outside, whatever the sign of A.

    SAO (arXiv 2607.07508), section 3.1, where the ratio is that of policy and sampler.
    """
    ratio = token_ratio(t.logprobs, t.old_logprobs)
    is_low, is_high = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    return Loss(torch.where(is_low | is_high, 0.0, -t.advantages * ratio), ratio, is_low, is_high)
