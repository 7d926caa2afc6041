"""--drop_solved: a prompt whose group was correct often enough is drawn no more (ScaleRL, arXiv 2510.13786).

`Sampler.collect` asks for it at the end of a step, and `Sampler.unsolved_from` skips what it has noted.
"""

from batch import Metrics
from sampling import Sampler


def drop_solved(sampler: Sampler) -> Metrics:
    """Notes which prompts of the step are solved, but for the last ones that a step needs; counts all of them."""
    plan, rollout, solved = sampler.plan, sampler.rollout, sampler.solved
    num_left = len({row.where for row in sampler.data.rows}) - len(solved)
    is_correct_PG = rollout.is_correct_B.reshape(-1, plan.group_size)
    for row, rate in zip(rollout.rows[:: plan.group_size], is_correct_PG.mean(axis=1), strict=True):
        if rate >= plan.drop_solved and row.where not in solved and num_left > plan.prompts_per_step:
            solved[row.where] = sampler.num_drawn
            num_left -= 1
    return {"sampling/prompts_solved": float(len(solved))}
