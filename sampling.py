"""The Sampler: draws prompts, samples and grades their completions, until a step has its P groups.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group whose completions are all correct or
all incorrect has advantage 0 and teaches nothing. It is put aside, and further prompts are sampled,
in rounds, until P groups have a signal; groups beyond P are not used. After `MOST_ROUNDS` rounds
the groups that were put aside first fill the gap. Prompts are then drawn from the data in a row,
over all epochs; the checkpoint keeps how far (`state`).

With --drop_solved (ScaleRL, arXiv 2510.13786) a prompt whose group was correct often enough is skipped from then on.

With --steps_ahead servers sample the first round of coming steps while the ranks train (`start`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from batch import Metrics, Rollout, Row, Update
from flags import Sampling
from run import StepRecord, own_values
from runtime.parts import part
from runtime.rank import RunError
from schedule import Plan
from step_metrics import differs_P, lag_metrics, rollout_metrics

if TYPE_CHECKING:  # importing vLLM takes seconds; the checks of bad input come first
    from data import PromptData
    from reward import Grader
    from rollout import Engine
    from run import Run

MOST_ROUNDS = 10  # for a step; verl's recipe of DAPO sets max_num_gen_batches to it
# (rollout, group size) -> the rollout with hints in its rows, and metrics of the hints.
AddHints = Callable[[Rollout, int], tuple[Rollout, Metrics]]


@dataclass
class Sampler:
    """Fills steps with graded groups. The same on every rank."""

    engine: Engine
    grader: Grader
    data: PromptData
    plan: Plan
    sampling: Sampling
    run: Run
    add_hints: AddHints | None = None  # makes hints of the completions, for the reference; None: nothing does
    num_drawn: int = 0  # prompts drawn or skipped so far, in the order of the data
    solved: dict[str, int] = field(default_factory=dict)  # place of a row that is skipped -> num_drawn at that time
    drawn_ahead: dict[int, int] = field(default_factory=dict)  # step that was begun -> num_drawn before its first round
    before: dict[int, dict] = field(default_factory=dict)  # last step -> `position` at its start
    # About the step that was collected last:
    seconds_RE: list[np.ndarray] = field(default_factory=list)  # of each engine in each round
    rollout: Rollout | None = None  # all its completions, also those that are not trained on
    round_B: np.ndarray | None = None  # the round of each
    used_B: np.ndarray | None = None  # the indices of the completions that are trained on

    def state(self, step: int) -> dict:
        """The position after `step` (the last step or the one before), for the checkpoint.

        A run that continues samples again what was begun ahead, from the same prompts.
        """
        return self.before.get(step + 1) or self.position()

    def position(self) -> dict:
        """The place in the data up to which prompts are drawn at this moment."""
        state = {"prompts_drawn": self.num_drawn}
        if self.drawn_ahead:
            state["drawn_ahead"] = sorted(self.drawn_ahead.items())
        if self.solved:
            state["solved"] = sorted(self.solved.items())
        return state

    def restore(self, state: dict) -> None:
        if type(state.get("prompts_drawn")) is not int:
            raise RunError(
                f"trainer/progress.json of the last checkpoint is damaged: {str(state)[:80]}; "
                "move that checkpoint away, and the one before is used."
            )
        self.num_drawn, self.drawn_ahead = state["prompts_drawn"], dict(state.get("drawn_ahead", ()))
        self.solved = dict(state.get("solved", ()))

    def start(self, step: int, last_step: int) -> None:
        """Has servers sample the first round of the steps after this one; an engine in the ranks does nothing.

        The bound is on what is begun, so no sampled token is thrown away.
        """
        for ahead in range(step + 1, min(step + self.plan.steps_ahead, last_step) + 1):
            first = self.num_drawn
            rows = self.draw(ahead, 0, self.plan.prompts_per_step)
            self.drawn_ahead.setdefault(ahead, first)  # after a resume it may be there already: the same prompts then
            self.engine.begin(rows, self.sampling, self.seed_of(ahead, 0))

    def collect(self, step: int) -> tuple[Rollout, Metrics]:
        """P groups of G graded completions to train on, and the metrics of all that were sampled for them."""
        # Where the step began: a signal that ends it amid the work must not lose prompts.
        self.seconds_RE, self.before = [], {step: self.position()}
        rounds = self.rounds(step)
        self.drawn_ahead.pop(step, None)
        self.rollout = Rollout.concatenate(rounds)
        self.round_B = np.repeat(np.arange(len(rounds)), [len(rollout.rows) for rollout in rounds])
        self.used_B, metrics = choose_groups(self.rollout, len(rounds), self.plan)
        if is_mostly_lost(self.rollout):
            with self.run.shown(partial(self.step_record, step, self.rollout, []), is_complete=False):
                self.end_without_grades(step)
        if self.plan.drop_solved:
            metrics |= part("extras.samplers.solved", "--drop_solved").drop_solved(self)
        # Metrics of rewards and lengths count all that were sampled: dynamic sampling would flatter them.
        chosen = self.rollout.select(self.used_B)
        self.rollout = self.rollout.with_parts(routes=None)  # they are large, and the others' are not needed
        if self.add_hints:
            chosen, hint_metrics = self.add_hints(chosen, self.plan.group_size)
            metrics |= hint_metrics
        return chosen, metrics | rollout_metrics(self.rollout, self.plan.group_size) | lag_metrics(chosen)

    def step_record(self, step: int, trained: Rollout, updates: list[Update]) -> StepRecord:
        """All that the last `collect` sampled. `trained`: what it returned, with its advantages, as in `updates`."""
        return StepRecord(
            step=step,
            group_size=self.plan.group_size,
            rollout=self.rollout,
            round_B=self.round_B,
            used_B=self.used_B,
            advantages=trained.advantages,
            logprobs=own_values(trained, updates, attrgetter("old_logprobs_N")),
        )

    def rounds(self, step: int) -> list[Rollout]:
        """The graded completions of each round of the step."""
        rounds: list[Rollout] = []
        while count := prompts_to_sample(rounds, self.plan):
            rollout = self.completions(step, len(rounds), count)
            self.seconds_RE.append(self.engine.seconds_E)
            with self.run.phase("reward"):  # short: most were graded while others were sampled
                grades = self.grader.collect_from_ranks()
            rounds.append(self.as_training_data(rollout.graded(grades), step))
        return rounds

    def end_without_grades(self, step: int) -> NoReturn:
        """Raises RunError, which says how many completions of the step could be graded, and the last error."""
        reward, given = self.grader.grading.reward, [x for x in self.rollout.grades if x.status != "truncated"]
        lost = [grade for grade in given if not grade.is_compared]
        raise RunError(
            f"step {step} is not trained: {'--environment' if reward == 'none' else f'--reward {reward!r}'} has graded "
            f"{len(given) - len(lost)} of {len(given)} completions, less than half; the last error: {lost[-1].status}. "
            "Mend that; the same command continues from the last checkpoint."
        )

    def completions(self, step: int, number: int, count: int) -> Rollout:
        """The completions of the next `count` prompts; the grader gets each as soon as it is finished."""
        rows, seed = self.draw(step, number, count), self.seed_of(step, number)
        return self.engine.sample(rows, self.sampling, seed, "sample", self.grader.callback_for(rows, self.sampling))

    def as_training_data(self, rollout: Rollout, step: int) -> Rollout:
        """The rollout with `is_trained_B` and `lags`."""
        # "mask": what was cut is compared with like all, but left out of the loss.
        is_trained_B = rollout.is_trained_B
        if self.grader.grading.truncated == "mask":
            is_trained_B = is_trained_B & ~rollout.is_truncated_B
        # The weights that are trained in this step were trained in all steps before it.
        versions_B = rollout.parts.get("versions")
        lags = versions_B and [step - 1 - versions for versions in versions_B]
        return replace(rollout, is_trained_B=is_trained_B).with_parts(lags=lags)

    def seed_of(self, step: int, number: int) -> tuple[int, ...]:
        """The seed of a round of sampling, which is also its name."""
        return self.plan.seed, step, 0, number

    def draw(self, step: int, number: int, count: int) -> list[Row]:
        """The next `count` prompts, for round `number` of the step; those that it began with, if it was begun ahead."""
        plan, is_begun = self.plan, number == 0 and step in self.drawn_ahead
        first = self.drawn_ahead[step] if is_begun else self.num_drawn
        if plan.dynamic_sampling == "off" and not plan.drop_solved:  # the step alone says which
            indices_P, end = self.data.indices_of_step(step, count, plan.seed, plan.keep_last), first + count
        else:
            indices_P, end = self.unsolved_from(first, count)
        self.num_drawn = max(self.num_drawn, end)
        return [self.data.rows[i] for i in indices_P]

    def unsolved_from(self, first: int, count: int) -> tuple[list[int], int]:
        """The row indices of the next `count` prompts from number `first` on, without solved ones; the number after.

        A prompt is skipped at numbers that were not drawn yet when it was solved: those of earlier draws stay.
        """
        indices, number = [], first
        while len(indices) < count:
            for index in self.data.indices_from(number, self.plan.prompts_per_step, self.plan.seed):
                number += 1
                if number <= self.solved.get(self.data.rows[index].where, math.inf):
                    indices.append(index)
                if len(indices) == count:
                    break
        return indices, number


def has_signal_P(rollout: Rollout, plan: Plan) -> np.ndarray:
    """bool: some completions of the group are correct and some are not (DAPO, eq. 11), or its rewards differ."""
    values_B = rollout.is_correct_B if plan.dynamic_sampling == "correct" else rollout.rewards_B
    return differs_P(rollout, values_B, plan.group_size)


def is_mostly_lost(rollout: Rollout) -> bool:
    """Whether functions of the user's could grade less than half of what they were given."""
    num_given = sum(grade.status != "truncated" for grade in rollout.grades)
    return 2 * np.count_nonzero(~rollout.is_compared_B) > num_given


def prompts_to_sample(rounds: list[Rollout], plan: Plan) -> int:
    """The number of prompts of the step's next round, given the rounds so far; 0: the step is complete.

    As many as are expected to fill the gap, at the share of groups with a signal seen so far, but at most P.
    """
    if not rounds:
        return plan.prompts_per_step
    if plan.dynamic_sampling == "off" or len(rounds) == MOST_ROUNDS:
        return 0
    sampled = Rollout.concatenate(rounds)
    if is_mostly_lost(sampled):  # the run ends
        return 0
    is_kept_P = has_signal_P(sampled, plan)
    num_kept = int(is_kept_P.sum())
    num_missing = max(plan.prompts_per_step - num_kept, 0)
    expected = math.ceil(num_missing * len(is_kept_P) / max(num_kept, 1))
    return min(expected, plan.prompts_per_step)


def choose_groups(sampled: Rollout, num_rounds: int, plan: Plan) -> tuple[np.ndarray, Metrics]:
    """The indices of the completions of the P groups to train on, and metrics of the choice."""
    if plan.dynamic_sampling == "off":
        return np.arange(len(sampled.rows)), {}
    has_signal = has_signal_P(sampled, plan)
    with_signal, without_signal = np.flatnonzero(has_signal), np.flatnonzero(~has_signal)
    kept = with_signal[: plan.prompts_per_step]
    # Only after `MOST_ROUNDS`: they teach nothing, but the learning rate is for a step of this size.
    filling = without_signal[: plan.prompts_per_step - len(kept)]
    counts = {
        "sampling/rounds": num_rounds,
        "sampling/prompts": len(has_signal),
        "sampling/groups_without_signal": len(without_signal),
        "sampling/groups_unused": len(with_signal) - len(kept),
        "sampling/groups_filled": len(filling),
    }
    groups = np.sort(np.concatenate([kept, filling]))
    indices_B = (groups[:, None] * plan.group_size + np.arange(plan.group_size)).flatten()
    return indices_B, {name: float(count) for name, count in counts.items()}
