"""A*-PO: regression to the advantage over an optimal value that was estimated before: --policy_loss a_star_po

    --advantage a_star_po --kl_coef 1 --kl_estimator none --loss_aggregation seq_mean_token_mean --group_size 1

Sources: arXiv 2505.20686 and its code (ZhaolinGao/A-PO). The value of a prompt is from the rewards
of 8 completions of the starting policy, a list in the row's column `start_rewards`. The loss of a
sequence stands at each of its tokens.
"""

import torch

from extras.losses.sequences import sequence_sum


def optimal_advantage(g, *, beta_1=0.5):
    """r - beta_1 log(mean of exp(start_rewards / beta_1)): what the best policy near the starting one would get."""
    starts = [torch.tensor(columns["start_rewards"]).reshape(-1) for columns in g.columns]
    values = [beta_1 * (rewards / beta_1).exp().mean().log() for rewards in starts]
    return g.rewards_PG - torch.stack(values)[:, None]


def a_star_po(t, *, beta_2=1e-3):
    """(beta_2 log(pi(y) / reference(y)) - A)^2."""
    if t.ref_logprobs is None:
        raise ValueError("--policy_loss a_star_po needs the reference: --kl_coef 1 --kl_estimator none.")
    log_ratio = sequence_sum(torch.where(t.mask, t.logprobs - t.ref_logprobs, 0.0), t.sequence_ids)
    return (beta_2 * log_ratio - t.advantages).square()
