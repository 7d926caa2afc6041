"""An entropy bonus that falls from --entropy_coef to 0: --policy_loss docs/hooks/entropy_schedule.py:clip_explores

It needs --rollout_correction none, whose weights would also count for what is taken off here.
"""

from grpo import clip


def clip_explores(t, *, clip_low, clip_high, dual_clip, entropy_coef):
    """`clip`; of the entropy bonus, which the total loss has anyway, the share of the run that is over is taken off."""
    loss = clip(t, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    share = (t.step - 1) / t.total_steps
    return loss._replace(per_token=loss.per_token + share * entropy_coef * t.entropies)
