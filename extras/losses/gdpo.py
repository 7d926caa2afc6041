"""GDPO: each part of the reward is compared within its group by itself: --advantage gdpo

    --reward math,format

Sources: arXiv 2601.05242 and TRL's multi_objective_aggregation "normalize_then_sum", which in the
end standardises over completions, as here; verl's "gdpo" does it over tokens. Weights stand here:
those of --reward are not used.
"""

from extras.losses.whole_step import over_step
from grpo import centred, divided

WEIGHTS = {}  # part -> weight; 1 where none is given, 0 for a sub-score that is no reward


def gdpo(g, *, advantage_ddof, advantage_eps):
    """Sum over parts of weight x (r - mean of group) / (std of group + eps), then standardised over the step."""

    def total(groups):
        total_PG = 0.0 * groups.rewards_PG
        for name, part_PG in groups.parts.items():
            std_P1 = part_PG.std(dim=1, correction=advantage_ddof, keepdim=True)
            total_PG = total_PG + WEIGHTS.get(name, 1.0) * divided(centred(part_PG), std_P1 + advantage_eps)
        return total_PG

    totals = over_step(g, total)
    return divided(total(g) - totals.mean(), totals.std(correction=advantage_ddof) + advantage_eps)
