"""Pass@k as the reward of a group, without sampling subsets: --advantage pass_at_k

Sources: arXiv 2508.10751 and its code (RUCAIBox/Passk_Training, README and code/passk_adv.py),
without its 1e-6 beside the std. verl's "grpo_passk" is another method (2503.19595): the best
completion alone gets its lead over the second.
"""

from math import comb

import torch


def pass_at_k(g, *, k=4):
    """(value of a subset with this completion - mean over all subsets of k) / std of these, by counting."""
    size = g.rewards_PG.shape[1]
    k = min(k, size)  # of a group of which fewer could be graded; all are in the one subset, so the advantage is 0
    rows = []
    for is_correct in g.is_correct_PG.tolist():
        num_wrong = size - sum(is_correct)
        mean = 1.0 - comb(num_wrong, k) / comb(size, k)
        std = (mean * (1.0 - mean)) ** 0.5
        fails = comb(num_wrong - 1, k - 1) / comb(size - 1, k - 1) if num_wrong else 0.0
        if std:
            wrong_advantage, right_advantage = (1.0 - fails - mean) / std, (1.0 - mean) / std
        else:  # all subsets are worth the same
            wrong_advantage = right_advantage = 0.0
        rows.append([right_advantage if is_right else wrong_advantage for is_right in is_correct])
    return torch.tensor(rows)
