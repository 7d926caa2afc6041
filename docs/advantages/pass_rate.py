"""Prompts count by how hard they are: --advantage docs/advantages/pass_rate.py:hard, or with :curriculum

The pass rate of `hard` is that of the group. For `curriculum` it is the row's column `pass_rate`,
measured before, for example by evaluate.py: easy prompts count first, hard ones last.
"""

import torch

from grpo import grpo


def hard(g, *, advantage_ddof, advantage_eps):
    """`grpo` x 2 (1 - pass rate)."""
    rates_P1 = g.is_correct_PG.float().mean(dim=1, keepdim=True)
    return 2.0 * (1.0 - rates_P1) * grpo(g, advantage_ddof=advantage_ddof, advantage_eps=advantage_eps)


def curriculum(g, *, advantage_ddof, advantage_eps, width=0.3):
    """`grpo` x exp(-((pass rate - target) / width)^2), with a target that falls from 1 to 0 over the run."""
    rates_P1 = torch.tensor([float(columns["pass_rate"]) for columns in g.columns])[:, None]
    target = 1.0 - (g.step - 1) / max(g.total_steps - 1, 1)
    weights_P1 = torch.exp(-(((rates_P1 - target) / width) ** 2))
    return weights_P1 * grpo(g, advantage_ddof=advantage_ddof, advantage_eps=advantage_eps)
