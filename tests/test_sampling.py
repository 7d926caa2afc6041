"""Dynamic sampling: which groups a step trains on, how many prompts a round asks for, and what happens at the bound."""

from dataclasses import replace

import numpy as np
import pytest

from helpers import flags, make_rollout
from reward import Grade
from sampling import Groups, choose_groups, prompts_to_sample

RIGHT, WRONG, MIXED = [1, 1], [0, 0], [0, 1]


def groups(*verdicts: list[int], first_row: int = 0, rewards: list[list[float]] | None = None) -> Groups:
    """Groups of two completions each, whose lengths tell them apart: 10 x row + number in the group + 1 tokens."""
    is_right_B = np.array(verdicts, dtype=bool).flatten()
    rows = np.arange(first_row, first_row + len(verdicts))
    rollout = make_rollout([int(10 * row + g + 1) for row in rows for g in range(2)])
    rewards_B = is_right_B.astype(np.float32) if rewards is None else np.array(rewards, dtype=np.float32).flatten()
    rollout = replace(rollout, is_right_B=is_right_B, rewards_B=rewards_B)
    return Groups(rows, rollout, [Grade(float(reward), "ok") for reward in rewards_B])


def test_without_dynamic_sampling_one_round_is_the_step():
    args = flags(prompts_per_step=3, prompts_per_update=3)
    assert prompts_to_sample([], args) == 3
    rounds = [groups(RIGHT, WRONG, WRONG)]
    assert prompts_to_sample(rounds, args) == 0
    sampled, trained, metrics = choose_groups(rounds, args)
    assert trained is sampled
    assert metrics == {}


def test_groups_without_signal_are_replaced_by_later_ones():
    args = flags(prompts_per_step=3, prompts_per_update=3, dynamic_sampling="right")
    rounds = [groups(RIGHT, MIXED, WRONG)]
    assert prompts_to_sample(rounds, args) == 3, "2 missing at one good group in three: 6 expected, at most P"
    rounds.append(groups(MIXED, WRONG, MIXED, first_row=3))
    assert prompts_to_sample(rounds, args) == 0
    sampled, trained, metrics = choose_groups(rounds, args)
    assert sampled.indices_P.tolist() == [0, 1, 2, 3, 4, 5]
    assert trained.indices_P.tolist() == [1, 3, 5]
    assert trained.rollout.completion_lengths_B.tolist() == [11, 12, 31, 32, 51, 52]
    assert trained.rollout.is_right_B.tolist() == [False, True] * 3
    assert [grade.reward for grade in trained.grades] == [0, 1] * 3
    assert metrics == {
        "sampling/rounds": 2, "sampling/prompts": 6, "sampling/groups_without_signal": 3, "sampling/groups_unused": 0,
        "sampling/groups_filled": 0,
    }  # fmt: skip


def test_a_round_asks_for_what_is_expected_to_fill_the_gap():
    args = flags(prompts_per_step=8, prompts_per_update=8, dynamic_sampling="right")
    assert prompts_to_sample([groups(*[MIXED] * 6, WRONG, WRONG)], args) == 3, "2 missing / 0.75, rounded up"
    assert prompts_to_sample([groups(*[WRONG] * 8)], args) == 8


def test_surplus_groups_are_not_used_and_counted():
    args = flags(prompts_per_step=2, prompts_per_update=2, dynamic_sampling="right")
    _, trained, metrics = choose_groups([groups(MIXED, WRONG), groups(MIXED, MIXED, first_row=2)], args)
    assert trained.indices_P.tolist() == [0, 2]
    assert metrics["sampling/groups_unused"] == 1


def test_at_the_bound_groups_without_signal_fill_the_step():
    args = flags(prompts_per_step=3, prompts_per_update=3, dynamic_sampling="right", max_sampling_rounds=2)
    rounds = [groups(WRONG, WRONG, MIXED), groups(RIGHT, RIGHT, WRONG, first_row=3)]
    assert prompts_to_sample(rounds, args) == 0
    _, trained, metrics = choose_groups(rounds, args)
    assert trained.indices_P.tolist() == [0, 1, 2], "the first ones that were put aside, in the order of sampling"
    assert metrics["sampling/groups_filled"] == 2


@pytest.mark.parametrize(("by", "expected"), [("right", [False, True]), ("reward", [True, False])])
def test_signal_is_in_the_verdicts_or_in_the_rewards(by, expected):
    shaped = groups(WRONG, MIXED, rewards=[[0.0, -0.5], [0.3, 0.3]])
    assert shaped.has_signal_P(by).tolist() == expected
