"""Which prompts a step samples, and on which of its groups it trains: all, or with DAPO's dynamic sampling those that carry a signal.

Dynamic sampling (arXiv 2503.14476, section 3.2): a group whose completions are all right or all wrong has advantage 0 and teaches nothing.
It is put aside and further prompts are sampled, in rounds, until P groups with a signal are there. At most `--max_sampling_rounds`: then
the groups put aside first fill the gap, so a step always has P groups, and what has no signal stays without effect. Groups with a
signal beyond P are not used. Prompts are drawn from the data in a row, over all epochs; how far is kept in the checkpoint.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass

import numpy as np

from batch import Rollout
from data import PromptData
from metrics import Metrics
from reward import Grade


@dataclass(frozen=True)
class Groups:
    """Sampled and graded groups: the prompts' rows in the training data, their completions prompt-major, and the grades of those."""

    indices_P: np.ndarray
    rollout: Rollout
    grades: list[Grade]

    @property
    def group_size(self) -> int:
        return len(self.grades) // len(self.indices_P)

    def take(self, groups: np.ndarray) -> Groups:
        """The groups of these numbers, in this order."""
        indices_B = (groups[:, None] * self.group_size + np.arange(self.group_size)).flatten()
        return Groups(self.indices_P[groups], self.rollout.take(indices_B), [self.grades[b] for b in indices_B])

    @staticmethod
    def concatenate(parts: list[Groups]) -> Groups:
        return Groups(
            np.concatenate([part.indices_P for part in parts]),
            Rollout.concatenate([part.rollout for part in parts]),
            [grade for part in parts for grade in part.grades],
        )

    def has_signal_P(self, dynamic_sampling: str) -> np.ndarray:
        """bool: "right": some completions of the group are right and some are not (DAPO, eq. 11); otherwise: not all rewards are equal."""
        assert self.rollout.is_right_B is not None and self.rollout.rewards_B is not None, "groups are graded"
        if dynamic_sampling == "right":
            is_right_PG = self.rollout.is_right_B.reshape(len(self.indices_P), -1)
            return is_right_PG.any(axis=1) & ~is_right_PG.all(axis=1)
        rewards_PG = self.rollout.rewards_B.reshape(len(self.indices_P), -1)
        return rewards_PG.max(axis=1) > rewards_PG.min(axis=1)


def draw_prompts(data: PromptData, step: int, num_drawn: int, count: int, args: Namespace) -> np.ndarray:
    """The rows of the next `count` prompts: those of the step; with dynamic sampling, those after the `num_drawn` of the run so far."""
    if args.dynamic_sampling == "off":
        return data.indices_of_step(step, args.prompts_per_step, args.seed, args.keep_last)
    return data.indices_from(num_drawn, count, args.seed)


def prompts_to_sample(rounds: list[Groups], args: Namespace) -> int:
    """How many prompts the next round of the step samples, given the rounds so far; 0: the step is complete.

    As many as are expected to fill the gap, at the share of groups with a signal seen so far, but at most P.
    """
    if not rounds:
        return args.prompts_per_step
    if args.dynamic_sampling == "off" or len(rounds) == args.max_sampling_rounds:
        return 0
    num_sampled = sum(len(groups.indices_P) for groups in rounds)
    num_kept = sum(int(groups.has_signal_P(args.dynamic_sampling).sum()) for groups in rounds)
    missing = max(args.prompts_per_step - num_kept, 0)
    return min(math.ceil(missing * num_sampled / max(num_kept, 1)), args.prompts_per_step)


def choose_groups(rounds: list[Groups], args: Namespace) -> tuple[Groups, Groups, Metrics]:
    """(all groups that were sampled, the P groups to train on, metrics of the choice)."""
    sampled = Groups.concatenate(rounds)
    if args.dynamic_sampling == "off":
        return sampled, sampled, {}
    has_signal_P = sampled.has_signal_P(args.dynamic_sampling)
    with_signal, without_signal = np.flatnonzero(has_signal_P), np.flatnonzero(~has_signal_P)
    kept = with_signal[: args.prompts_per_step]
    filling = without_signal[: args.prompts_per_step - len(kept)]
    metrics = {
        "sampling/rounds": float(len(rounds)),
        "sampling/prompts": float(len(has_signal_P)),
        "sampling/groups_without_signal": float(len(without_signal)),
        "sampling/groups_unused": float(len(with_signal) - len(kept)),
        "sampling/groups_filled": float(len(filling)),
    }
    return sampled, sampled.take(np.sort(np.concatenate([kept, filling]))), metrics
