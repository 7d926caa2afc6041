"""Off-policy sequence masking of DeepSeek-V3.2: --policy_loss off_policy_mask

Sources: arXiv 2512.02556 and TRL's off_policy_mask_threshold. The paper gives no delta; 0.5 is what
TRL's documentation starts with. The old log-probs of the mask are the sampler's, as in both.
"""

import torch

from extras.losses.sequences import sequence_mean
from grpo import clip


def off_policy_mask(t, *, clip_low, clip_high, dual_clip, delta=0.5):
    """`clip`, without sequences that have A < 0 and that the sampler found likelier than the policy does.

    By more than delta: the mean over the sequence's tokens of log(pi_sampler / pi).
    """
    loss = clip(t, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    log_ratio = (t.rollout_logprobs - t.logprobs).detach()
    is_off = (sequence_mean(log_ratio, t.mask, t.sequence_ids) > delta) & (t.advantages < 0)
    return loss._replace(per_token=torch.where(is_off, 0.0, loss.per_token), metrics={"off_policy_frac": is_off})
