"""VESPO: a smooth weight of the whole sequence's ratio: --policy_loss vespo

Sources: arXiv 2602.10693 (section 3.4) and its code (FloyedShen/VESPO,
recipe/vespo/code/core_algos.py); TRL's loss_type "vespo" agrees. The W of both is pi / the
sampler's: --old_logprobs rollout. Token mean, as there.
"""

import torch

from extras.losses.sequences import sequence_sum
from grpo import LOG_RATIO_LIMIT


def vespo(t, *, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0):
    """-A x logprob x W^k exp(lambda (1 - W)), detached, with W = pi(y) / pi_old(y), the product of the token ratios."""
    log_ratio = torch.where(t.mask, (t.logprobs - t.old_logprobs).detach(), 0.0)
    log_w = sequence_sum(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), t.sequence_ids)
    log_w = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k = torch.where(t.advantages >= 0, k_pos, k_neg)
    decay = torch.where(t.advantages >= 0, lambda_pos, lambda_neg)
    weight = (k * log_w + decay * (1.0 - log_w.exp())).exp()
    return -weight * t.advantages * t.logprobs
