"""The 80/20 rule: only tokens of high entropy are trained: --policy_loss high_entropy

Sources: arXiv 2506.01939, on top of DAPO, and TRL's top_entropy_quantile. The denominator counts
all tokens. The quantile is over a micro-batch; TRL's is over a micro-batch of all ranks together.
"""

import torch

from grpo import clip


def high_entropy(t, *, clip_low, clip_high, dual_clip, fraction=0.2):
    """`clip` of the fraction of tokens whose distribution has the highest entropy; 0 at the others."""
    loss = clip(t, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    threshold = torch.nanquantile(torch.where(t.mask, t.entropies, torch.nan), 1.0 - fraction)
    is_chosen = t.entropies >= threshold
    return loss._replace(per_token=torch.where(is_chosen, loss.per_token, 0.0), metrics={"chosen_frac": is_chosen})
