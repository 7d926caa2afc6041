"""Dynamic sampling: which groups a step trains on, how many prompts a round asks for, and what happens at the bound."""

import argparse
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from algorithm import algorithm_of
from batch import NO_IDS, OnFinished, Rollout, Row
from data import PromptData
from flags import Memory, Sampling
from grading import Grade
from helpers.made_up import ALONE, flags, make_grade, make_rollout, make_row
from runtime.rank import RunError
from sampling import Sampler, choose_groups, has_signal_P, prompts_to_sample
from schedule import Plan, make_plan
from update import add_advantages, pack_updates

RIGHT, WRONG, MIXED = [1, 1], [0, 0], [0, 1]


def draws(prompts: int, dynamic_sampling: str = "correct") -> Plan:
    changes = {"prompts_per_step": prompts, "prompts_per_update": prompts, "dynamic_sampling": dynamic_sampling}
    return make_plan(flags(group_size=2, **changes), prompts)


def groups(*verdicts: list[int], first_row: int = 0, rewards: list[list[float]] | None = None) -> Rollout:
    """Groups of two completions each, whose lengths tell them apart: 10 x row + number in the group + 1 tokens."""
    is_correct_B = np.array(verdicts, dtype=bool).flatten()
    rollout = make_rollout([10 * (first_row + i) + g + 1 for i in range(len(verdicts)) for g in range(2)], group_size=2)
    rewards_B = is_correct_B.astype(np.float32) if rewards is None else np.array(rewards, dtype=np.float32).flatten()
    grades = [make_grade(r, bool(is_correct)) for r, is_correct in zip(rewards_B, is_correct_B, strict=True)]
    return replace(rollout, grades=grades)


def rows_of(rollout: Rollout) -> list[int]:
    assert [x % 10 for x in rollout.completion_lengths_B] == [1, 2] * (len(rollout.rows) // 2)
    return (rollout.completion_lengths_B[::2] // 10).tolist()


def test_without_dynamic_sampling_one_round_is_the_step():
    drawn, sampled = draws(3, "off"), groups(RIGHT, WRONG, WRONG)
    assert (prompts_to_sample([], drawn), prompts_to_sample([sampled], drawn)) == (3, 0)
    indices_B, metrics = choose_groups(sampled, 1, drawn)
    assert (indices_B.tolist(), metrics) == ([0, 1, 2, 3, 4, 5], {})


def test_groups_without_signal_are_replaced_by_later_ones():
    drawn = draws(3)
    rounds = [groups(RIGHT, MIXED, WRONG)]
    assert prompts_to_sample(rounds, drawn) == 3, "2 missing at one good group in three: 6 expected, at most P"
    rounds.append(groups(MIXED, WRONG, MIXED, first_row=3))
    assert prompts_to_sample(rounds, drawn) == 0
    sampled = Rollout.concatenate(rounds)
    indices_B, metrics = choose_groups(sampled, len(rounds), drawn)
    trained = sampled.select(indices_B)
    assert rows_of(trained) == [1, 3, 5] and trained.is_correct_B.tolist() == [False, True] * 3
    assert metrics == {
        "sampling/rounds": 2, "sampling/prompts": 6, "sampling/groups_without_signal": 3, "sampling/groups_unused": 0,
        "sampling/groups_filled": 0,
    }  # fmt: skip
    assert prompts_to_sample([groups(*[MIXED] * 6, WRONG, WRONG)], draws(8)) == 3, "2 missing / 0.75, rounded up"
    assert prompts_to_sample([groups(*[WRONG] * 8)], draws(8)) == 8


def test_groups_without_signal_fill_the_step_at_the_bound(monkeypatch):
    sampled = Rollout.concatenate([groups(MIXED, WRONG), groups(MIXED, MIXED, first_row=2)])
    indices_B, metrics = choose_groups(sampled, 2, draws(2))
    assert (rows_of(sampled.select(indices_B)), metrics["sampling/groups_unused"]) == ([0, 2], 1)
    monkeypatch.setattr("sampling.MOST_ROUNDS", 2)
    rounds = [groups(WRONG, WRONG, MIXED), groups(RIGHT, RIGHT, WRONG, first_row=3)]
    assert prompts_to_sample(rounds, draws(3)) == 0
    sampled = Rollout.concatenate(rounds)
    indices_B, metrics = choose_groups(sampled, 2, draws(3))
    assert rows_of(sampled.select(indices_B)) == [0, 1, 2], "the first ones that were put aside, in their order"
    assert metrics["sampling/groups_filled"] == 2


@pytest.mark.parametrize(("by", "expected"), [("correct", [False, True]), ("reward", [True, False])])
def test_signal_is_in_the_verdicts_or_in_the_rewards(by, expected):
    shaped = groups(WRONG, MIXED, rewards=[[0.0, -0.5], [0.3, 0.3]])
    assert has_signal_P(shaped, draws(2, by)).tolist() == expected


def data_of(count: int) -> PromptData:
    """Prompts of four tokens, which are drawn in the order of their rows, one epoch after the other."""
    return SimpleNamespace(
        rows=[make_row([i] * 4, where=f"row {i}") for i in range(count)],
        indices_of_step=lambda step, prompts, *_: range(prompts),
        indices_from=lambda first, prompts, _: [i % count for i in range(first, first + prompts)],
    )


class StubEngine:
    """Samples completions of 1, 2, 3, ... tokens, cut at `limit` tokens."""

    seconds_E = np.ones(1)

    def __init__(self, limit: int) -> None:
        self.limit, self.seeds = limit, []

    def begin(self, rows: list[Row], sampling: Sampling, seed: tuple[int, ...]) -> None:
        self.seeds.append(seed)

    def sample(self, rows: list[Row], sampling: Sampling, seed: tuple, description: str, on_finished) -> Rollout:
        self.seeds.append(seed)
        full = make_rollout([min(b + 1, self.limit) for b in range(len(rows) * sampling.num_samples)])
        is_truncated_B = np.arange(len(full.rows)) + 1 > self.limit
        completion_rows = [row for row in rows for _ in range(sampling.num_samples)]
        found = replace(full, rows=completion_rows, is_truncated_B=is_truncated_B, loss_weights_B=NO_IDS, advantages=[])
        for b, ids in enumerate(found.completions):
            on_finished(b, "", ids, bool(is_truncated_B[b]))
        return found


class StubGrader:
    """Gives each completion the reward of its number; correct is each whose number `divisor` divides."""

    def __init__(self, divisor: int = 2, truncated: str = "score") -> None:
        self.divisor, self.grading = divisor, SimpleNamespace(truncated=truncated)

    def callback_for(self, rows: list[Row], sampling: Sampling) -> OnFinished:
        self.heard: list[int] = []
        return lambda b, *_: self.heard.append(b)

    def collect_from_ranks(self) -> list[Grade]:
        return [make_grade(b, is_correct=b % self.divisor == 0) for b in self.heard]


def sampler_over(data: PromptData, args: argparse.Namespace, grader: StubGrader | None = None) -> Sampler:
    run = SimpleNamespace(phase=lambda _: nullcontext())
    sampling = Sampling.from_flags(args, num_samples=2)
    grader = grader or StubGrader(truncated=args.truncated)
    return Sampler(StubEngine(3), grader, data, make_plan(args, len(data.rows)), sampling, run)


@pytest.mark.parametrize("dynamic_sampling", ["off", "correct"])
@pytest.mark.parametrize(("truncated", "left_out"), [("mask", {3, 4, 5}), ("score", set()), ("zero", set())])
def test_only_truncated_completions_are_masked_from_the_loss(truncated, left_out, dynamic_sampling):
    changes = {"truncated": truncated, "dynamic_sampling": dynamic_sampling, "advantage": "dr_grpo"}
    args = flags(prompts_per_step=3, group_size=2, **changes)
    rollout, metrics = sampler_over(data_of(3), args).collect(step=1)
    assert rollout.is_truncated_B.tolist() == [False] * 3 + [True] * 3
    lengths = [0 if b in left_out else min(b + 1, 3) for b in range(6)]
    assert rollout.trained_lengths_B.tolist() == lengths

    policy = SimpleNamespace(parity_length=math.inf)
    plan, algorithm = make_plan(args, 3), algorithm_of(args)
    (update,) = pack_updates(rollout, plan, algorithm, Memory.from_flags(args), policy, ALONE)
    rollout, (update,) = add_advantages(rollout, [update], algorithm)
    (batch,) = update
    assert batch.update_tokens == sum(lengths)
    pieces = [values_N.split(batch.lengths_S) for values_N in (batch.loss_mask_N, batch.loss_weights_N)]
    for x, mask, weights in zip(batch.segments_S, *pieces, strict=True):
        assert int(mask.sum()) == lengths[x.index]
        assert weights[mask].tolist() == pytest.approx([1 / sum(lengths)] * lengths[x.index])
    assert [x[0] for x in rollout.advantages] == [-0.5, 0.5] * 3, "they are compared with the others all the same"


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("stops", [(3,), (1, 2, 5)])
def test_a_continued_run_uses_every_prompt_once(ahead, stops):
    """Every second group has no signal. Each stop comes amid the step after it."""
    args = flags(prompts_per_step=4, group_size=2, dynamic_sampling="correct", engine="server", steps_ahead=ahead)

    def prompts_of_steps(*lasts: int) -> list[list[int]]:
        used, state = [], {"prompts_drawn": 0}
        for last in lasts:
            sampler = sampler_over(data_of(100), args, StubGrader(4))
            sampler.restore(state)
            for step in range(len(used) + 1, last + 1):
                sampler.collect(step)
                sampler.start(step, 8)
                used.append([int(row.ids[0]) for row in sampler.rollout.rows[::2]])
            state = sampler.state(last)
            if last < 8:
                sampler.collect(last + 1)  # and is cut off
                assert sampler.state(last) == state
        return used

    whole = prompts_of_steps(8)
    assert prompts_of_steps(*stops, 8) == whole
    assert sorted(sum(whole, [])) == list(range(sum(map(len, whole)))), "no prompt twice, and none left out"


def test_the_seed_of_a_round_has_the_step_and_its_number():
    args = flags(prompts_per_step=4, group_size=2, dynamic_sampling="correct", engine="server", steps_ahead=1, seed=7)
    sampler = sampler_over(data_of(100), args, StubGrader(4))
    sampler.collect(3)
    sampler.start(3, 8)
    assert sampler.engine.seeds == [(7, 3, 0, 0), (7, 3, 0, 1), (7, 4, 0, 0)]


class EvenRows(StubGrader):
    """All completions of every row of an even number are correct, and the first of the two of the others."""

    def callback_for(self, rows: list[Row], sampling: Sampling) -> OnFinished:
        self.numbers = [int(row.ids[0]) for row in rows for _ in range(2)]
        return super().callback_for(rows, sampling)

    def collect_from_ranks(self) -> list[Grade]:
        return [make_grade(b, is_correct=b % 2 == 0 or self.numbers[b] % 2 == 0) for b in self.heard]


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("stops", [(), (1, 2, 5)])
@pytest.mark.parametrize("dynamic_sampling", ["off", "reward"])
def test_solved_prompts_are_drawn_no_more(ahead, stops, dynamic_sampling):
    """Of ten rows the even ones are solved when first seen. A continued run draws the same prompts."""
    changes = {"dynamic_sampling": dynamic_sampling, "engine": "server", "steps_ahead": ahead, "drop_solved": 0.9}
    args, used, state = flags(prompts_per_step=4, group_size=2, **changes), [], {"prompts_drawn": 0}
    for last in (*stops, 8):
        sampler = sampler_over(data_of(10), args, EvenRows())
        sampler.restore(json.loads(json.dumps(state)))
        for step in range(len(used) + 1, last + 1):
            _, metrics = sampler.collect(step)
            sampler.start(step, 8)
            used.append([int(row.ids[0]) for row in sampler.rollout.rows[::2]])
        state = sampler.state(last)
    # Two steps ahead, row 8 is drawn again before its completions are graded.
    fourth = [5, 7, 8, 9] if ahead else [5, 7, 9, 1]
    assert used[:4] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 1, 3], fourth]
    assert all(i % 2 for step in used[4:] for i in step) and metrics["sampling/prompts_solved"] == 5
    assert [sum(step.count(i) for step in used[4:]) for i in (1, 3, 5, 7, 9)] == pytest.approx([3.2] * 5, abs=0.81)


def test_a_prompt_is_solved_at_the_share_of_the_flag_and_a_steps_prompts_are_never_dropped():
    args = flags(prompts_per_step=4, group_size=2, drop_solved=0.5)
    sampler = sampler_over(data_of(6), args, StubGrader(1))  # all completions are correct
    solved = [sampler.collect(step)[1]["sampling/prompts_solved"] for step in (1, 2, 3)]
    assert solved == [2, 2, 2] and len(sampler.draw(4, 0, 4)) == 4
    for bound, count in ((0.5, 4.0), (0.51, 2.0)):  # of two of the four prompts one completion of two is correct
        args = flags(prompts_per_step=4, group_size=2, drop_solved=bound)
        assert sampler_over(data_of(9), args, EvenRows()).collect(1)[1]["sampling/prompts_solved"] == count


@pytest.mark.parametrize("state", [{}, {"prompts_drawn": "4"}, {"prompts_drown": 4}])
def test_a_state_without_the_place_in_the_data_ends_the_run_in_a_sentence(state):
    with pytest.raises(RunError, match=r"trainer/progress\.json of the last checkpoint is damaged: {.*move that"):
        Sampler.restore(SimpleNamespace(), state)
