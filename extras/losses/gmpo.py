"""GMPO: the geometric mean of clipped token ratios: --policy_loss gmpo

    --clip_low 0.4 --clip_high 0.4 --loss_aggregation seq_mean_token_mean

Sources: arXiv 2507.20673 (its objective as TRL's documentation has it), verl's "geo_mean" and TRL's
GMPOTrainer. The bounds are of log-ratios: 0.4 clips to exp(-0.4) and exp(0.4). The loss of a
sequence stands at each of its tokens.
"""

import torch

from extras.losses.sequences import sequence_mean
from grpo import Loss


def gmpo(t, *, clip_low, clip_high):
    """-A x the geometric mean of the sequence's token ratios, each clipped where A moves it on."""
    log_ratio = t.logprobs - t.old_logprobs
    is_low = (log_ratio < -clip_low) & (t.advantages < 0)
    is_high = (log_ratio > clip_high) & (t.advantages > 0)
    clipped = torch.where(is_low, -clip_low, torch.where(is_high, clip_high, log_ratio))
    mean = sequence_mean(clipped, t.mask, t.sequence_ids)
    return Loss(-t.advantages * mean.exp(), None, is_low, is_high)
