"""MaxRL: hard prompts count more: --advantage maxrl"""

from torch import Tensor

from grpo import Groups, centred, divided


def maxrl(g: Groups) -> Tensor:
    """(r - mean of group) / mean of group, and 0 where that is 0: hard prompts count more.

    MaxRL (arXiv 2602.02710), whose code (tajwarfahim/maxrl, `compute_maxrl_outcome_advantage`) adds 1e-6 to the mean.
    Raises ValueError for a negative reward: the paper's are 0 or 1, and a mean below 0 would turn signs around.
    """
    if (lowest := g.rewards_PG.min().item()) < 0:
        raise ValueError(f"--advantage maxrl: a reward is {lowest:g}; it needs rewards that are not negative.")
    return divided(centred(g.rewards_PG), g.rewards_PG.mean(dim=1, keepdim=True))
