"""OPO: the baseline weighs rewards by the lengths of their completions: --advantage opo

Sources: arXiv 2505.23585 and verl's "opo". On-policy: --prompts_per_update is --prompts_per_step.
"""


def opo(g):
    """r - sum of length x r / sum of lengths, over the group."""
    lengths_PG = g.lengths_B.view_as(g.rewards_PG)
    num_tokens_P1 = lengths_PG.sum(dim=1, keepdim=True).clamp(min=1)
    return g.rewards_PG - (lengths_PG * g.rewards_PG).sum(dim=1, keepdim=True) / num_tokens_P1
