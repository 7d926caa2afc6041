"""KL-Cov: the tokens that would cost the most entropy are held near the old policy: --policy_loss kl_cov

Sources: arXiv 2505.22617 and its code (PRIME-RL/Entropy-Mechanism-of-RL), as verl's "kl_cov" has
it: nothing is clipped. The means, and the chosen tokens, are those of the micro-batch, as there.
"""

import torch

from grpo import Loss, token_ratio


def kl_cov(t, *, share=2e-3, penalty=1.0):
    """-A x ratio; + penalty x |log ratio| at the share of tokens with the largest (A - mean) (logprob - mean)."""
    count = t.mask.sum().clamp(min=1)
    a, x = (v - torch.where(t.mask, v, 0.0).sum() / count for v in (t.advantages, t.logprobs.detach()))
    order = torch.where(t.mask, a * x, -torch.inf).argsort(descending=True)
    rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    is_held = t.mask & (rank < (share * count).floor().clamp(min=1))
    ratio = token_ratio(t.logprobs, t.old_logprobs)
    held = torch.where(is_held, penalty * (t.logprobs - t.old_logprobs).abs(), 0.0)
    return Loss(-t.advantages * ratio + held, ratio, metrics={"held_frac": is_held})
