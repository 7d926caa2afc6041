"""GPG: the plain policy gradient, scaled up for the groups that give none: --advantage gpg

    --policy_loss reinforce --loss_aggregation token_mean

Sources: arXiv 2504.02546 and its code (AMAP-ML/GPG, adjust_gd), whose scale is 1 / (share + 1e-5).
The authors' trainers of text and verl take the mean over tokens.
"""

from extras.losses.whole_step import over_step
from grpo import centred


def gpg(g):
    """(r - mean of group) / the share of groups whose rewards are not all equal."""
    has_signal_P = over_step(g, lambda groups: groups.rewards_PG.amax(dim=1) > groups.rewards_PG.amin(dim=1))
    return centred(g.rewards_PG) / has_signal_P.float().mean().clamp(min=1 / len(has_signal_P))
