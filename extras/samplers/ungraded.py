"""Groups of which a function of the user's could not grade all completions: advantages of those that it could.

`update.compute_advantages` asks for it. What could not be graded is taken out before anything is compared. So every
advantage, also one of the user's, sees groups as if it had never been sampled. docs/rewards.md
"""

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from batch import Rollout
from grpo import Algorithm, Groups
from update import compute_advantages


def compare_the_rest(
    rollout: Rollout, penalties: list[np.ndarray] | None, algorithm: Algorithm, step: int, total_steps: int
) -> list[np.ndarray]:
    """The advantage of each completion's tokens; 0 where it could not be graded.

    Groups of which as many are left make one `Groups`. Its `other_groups` are those of another size, for an advantage
    that compares over the whole step.
    """
    is_left_PG = rollout.is_compared_B.reshape(-1, algorithm.group_size)
    size_B = (is_left_PG * is_left_PG.sum(axis=1, keepdims=True)).flatten()  # of its group; 0: it could not be graded
    chosen = {int(size): np.flatnonzero(size_B == size) for size in np.unique(size_B[size_B > 0])}

    def compare(size: int, advantage: Callable[[Groups], Tensor]) -> list[np.ndarray]:
        """The advantages, by this function, of what is left of the groups of this size."""
        own = penalties and [penalties[b] for b in chosen[size]]
        smaller = replace(algorithm, advantage=advantage, group_size=size)
        return compute_advantages(rollout.select(chosen[size]), own, smaller, step, total_steps)

    groups: dict[int, Groups] = {}
    for size in chosen:
        compare(size, lambda g, size=size: groups.setdefault(size, g).rewards_PG)
    names = dict.fromkeys(name for g in groups.values() for name in g.parts)
    for size, g in groups.items():
        parts = {name: g.parts.get(name, torch.zeros_like(g.rewards_PG)) for name in names}
        groups[size] = replace(g, parts=parts)
    advantages = [np.zeros(len(ids), dtype=np.float32) for ids in rollout.completions]
    for size, indices in chosen.items():
        other_groups = tuple(g for other_size, g in groups.items() if other_size != size)
        seen = {"other_groups": other_groups, "parts": groups[size].parts}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"std\(\): degrees of freedom")  # of one that is left alone there is none
            found = compare(size, lambda g, seen=seen: algorithm.advantage(replace(g, **seen)))
        for b, values in zip(indices, found, strict=True):
            advantages[b] = values
    return advantages
