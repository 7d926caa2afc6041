"""RLSD: a teacher that reads a hint says how much each token counts, not in which direction: --policy_loss rlsd

    --hint_column solution --kl_coef 1 --kl_estimator none --reference_every 20

Source: arXiv 2604.03128, by three re-implementations that agree (among them fw-ai/cookbook, pull
request 333); its authors' code could not be read. The share falls to 0 over the first 60 steps.
"""

from dataclasses import replace

import torch

from grpo import clip


def rlsd(t, *, clip_low, clip_high, dual_clip, share=0.5, bound=0.2, steps=60):
    """`clip` of A x (1 - share + share x exp(sign(A) log(teacher / pi_old)) clipped to 1 +- bound); the share falls."""
    if t.ref_logprobs is None:
        raise ValueError("--policy_loss rlsd needs the teacher: --kl_coef 1 --kl_estimator none.")
    share = share * max(0.0, 1.0 - (t.step - 1) / steps)
    evidence = (t.advantages.sign() * (t.ref_logprobs - t.old_logprobs)).clamp(-20.0, 20.0).exp()
    weights = 1.0 - share + share * evidence.clamp(1.0 - bound, 1.0 + bound)
    weighted = replace(t, advantages=t.advantages * torch.where(t.mask, weights, 1.0))
    return clip(weighted, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
