"""Clip-Cov and KL-Cov: tokens that would cost much entropy are left out, or held: --policy_loss clip_cov, or kl_cov

clip_cov with --clip_low 1 --clip_high 1; kl_cov clips nothing.
Sources: arXiv 2505.22617 and its code (PRIME-RL/Entropy-Mechanism-of-RL), as verl has it: means are of the micro-batch.
clip_cov draws by digits of the log-probs, so that a resumed run draws the same; their code by torch's random state.
"""

import torch

from grpo import Loss, clip, token_ratio


def clip_cov(t, *, clip_low, clip_high, dual_clip, ratio=2e-4, low=1.0, high=5.0):
    """`clip`, but 0 at ratio x N random tokens whose (A - mean) (logprob - mean) lies between low and high."""
    loss = clip(t, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    values = covariances(t)
    in_window = t.mask & (values > low) & (values < high) & ~(loss.is_low | loss.is_high)
    order = torch.where(in_window, (t.logprobs.detach() * 1e4) % 1.0, 2.0).argsort()
    is_left_out = in_window & is_first(order, t.mask, ratio)
    per_token = torch.where(is_left_out, 0.0, loss.per_token)
    return loss._replace(per_token=per_token, metrics={"left_out_frac": is_left_out})


def kl_cov(t, *, share=2e-3, penalty=1.0):
    """-A x ratio; + penalty x |log ratio| at the share of tokens with the largest (A - mean) (logprob - mean)."""
    order = torch.where(t.mask, covariances(t), -torch.inf).argsort(descending=True)
    is_held, ratio = t.mask & is_first(order, t.mask, share), token_ratio(t.logprobs, t.old_logprobs)
    held = torch.where(is_held, penalty * (t.logprobs - t.old_logprobs).abs(), 0.0)
    return Loss(-t.advantages * ratio + held, ratio, metrics={"held_frac": is_held})


def covariances(t):
    count = t.mask.sum().clamp(min=1)
    a, x = (v - torch.where(t.mask, v, 0.0).sum() / count for v in (t.advantages, t.logprobs.detach()))
    return a * x


def is_first(order, mask, share):
    rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return rank < (share * mask.sum().clamp(min=1)).floor().clamp(min=1)
