"""Clip-Cov: some tokens that would cost much entropy are left out: --policy_loss clip_cov

    --clip_low 1 --clip_high 1

Sources: arXiv 2505.22617 and its code (PRIME-RL/Entropy-Mechanism-of-RL), as verl's "clip_cov" has
it. The means are those of the micro-batch, as there. Which tokens of the window: there drawn from
torch's random state, here from digits of the log-probs, so that a resumed run draws the same.
"""

import torch

from grpo import clip


def clip_cov(t, *, clip_low, clip_high, dual_clip, ratio=2e-4, low=1.0, high=5.0):
    """`clip`, but 0 at ratio x N random tokens whose (A - mean) (logprob - mean) lies between low and high."""
    loss = clip(t, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    count = t.mask.sum().clamp(min=1)
    logprobs = t.logprobs.detach()
    a, x = (v - torch.where(t.mask, v, 0.0).sum() / count for v in (t.advantages, logprobs))
    in_window = t.mask & (a * x > low) & (a * x < high) & ~(loss.is_low | loss.is_high)
    order = torch.where(in_window, (logprobs * 1e4) % 1.0, 2.0).argsort()
    rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    is_left_out = in_window & (rank < (ratio * count).floor().clamp(min=1))
    per_token = torch.where(is_left_out, 0.0, loss.per_token)
    return loss._replace(per_token=per_token, metrics={"left_out_frac": is_left_out})
