"""The Sampler: draws prompts, samples and grades their completions, until a step has its P groups.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group whose completions are all correct or all incorrect has
advantage 0 and teaches nothing. It is put aside, and further prompts are sampled, in rounds, until P groups with a
signal are there; groups beyond P are not used. After `--max_sampling_rounds` the groups put aside first fill the gap.
Prompts are then drawn from the data in a row, over all epochs; how far is kept in the checkpoint (`state`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from batch import Rollout
from flags import Sampling
from guards.fingerprint import check_same_step
from metrics import Metrics, rollout_metrics

if TYPE_CHECKING:  # importing vLLM takes seconds; the checks of bad input come first
    from data import PromptData
    from reward import Grader
    from rollout import Engine
    from run import Run


@dataclass(frozen=True)
class Draws:
    """Which prompts a step samples, and which of its groups it trains on."""

    prompts_per_step: int
    group_size: int
    seed: int
    keep_last: bool
    dynamic_sampling: str  # "off"; a group has a signal if some completions are "correct", or if a "reward" differs
    max_sampling_rounds: int
    truncated: str  # "mask": what was cut is compared with like the others, but left out of the loss


@dataclass
class Sampler:
    """Fills steps with graded groups. The same on every rank."""

    engine: Engine
    grader: Grader
    data: PromptData
    draws: Draws
    sampling: Sampling
    run: Run
    num_drawn: int = 0  # prompts sampled so far, in the order of the data
    drawn_before: dict[int, int] = field(default_factory=dict)  # step -> num_drawn at its beginning; the last one alone
    seconds_RE: list[np.ndarray] = field(default_factory=list)  # of each round of this step, what each engine took
    sampled: Rollout | None = None  # all completions of this step, also those that are not trained on

    def state(self, step: int) -> dict[str, int]:
        """What a run needs that continues after `step`, the last one or the one before: goes into the checkpoint."""
        return {"prompts_drawn": self.drawn_before.get(step + 1, self.num_drawn)}

    def restore(self, state: dict[str, int]) -> None:
        self.num_drawn = state["prompts_drawn"]

    def collect(self, step: int) -> tuple[Rollout, Metrics]:
        """P groups of G graded completions to train on, and the metrics of all that were sampled for them."""
        rounds: list[Rollout] = []
        self.seconds_RE, self.drawn_before = [], {step: self.num_drawn}
        while count := prompts_to_sample(rounds, self.draws):
            rounds.append(self.sample_round(step, len(rounds), count))
        self.sampled = Rollout.concatenate(rounds)
        check_same_step(
            prompts=[row.ids for row in self.sampled.rows], completions=self.sampled.completions,
            rewards=[self.sampled.rewards_B],
        )  # fmt: skip
        self.run.reward_failures(step, self.sampled)
        chosen, metrics = choose_groups(self.sampled, len(rounds), self.draws)
        return chosen, metrics | rollout_metrics(self.sampled, self.draws.group_size)

    def sample_round(self, step: int, number: int, count: int) -> Rollout:
        """The next `count` prompts' completions, each graded as soon as it is finished."""
        draws = self.draws
        if draws.dynamic_sampling == "off":
            indices_P = self.data.indices_of_step(step, draws.prompts_per_step, draws.seed, draws.keep_last)
        else:
            indices_P = self.data.indices_from(self.num_drawn, count, draws.seed)
        self.num_drawn += count
        rows = [self.data.rows[i] for i in indices_P]
        on_finished = self.grader.submit_to(rows, self.sampling)
        rollout = self.engine.sample(rows, self.sampling, (draws.seed, step, 0, number), "sample", on_finished)
        self.seconds_RE.append(self.engine.seconds_E)
        with self.run.phase("reward"):
            grades = self.grader.collect_from_ranks()
        is_trained_B = ~rollout.is_truncated_B if draws.truncated == "mask" else None
        return replace(rollout, grades=grades, is_trained_B=is_trained_B)


def has_signal_P(rollout: Rollout, draws: Draws) -> np.ndarray:
    """bool: some completions of the group are correct and some are not (DAPO, eq. 11), or its rewards differ."""
    of_groups = rollout.is_correct_B if draws.dynamic_sampling == "correct" else rollout.rewards_B
    values_PG = of_groups.reshape(-1, draws.group_size)
    return values_PG.max(axis=1) > values_PG.min(axis=1)


def prompts_to_sample(rounds: list[Rollout], draws: Draws) -> int:
    """How many prompts the next round of the step samples, given the rounds so far; 0: the step is complete.

    As many as are expected to fill the gap, at the share of groups with a signal seen so far, but at most P.
    """
    if not rounds:
        return draws.prompts_per_step
    if draws.dynamic_sampling == "off" or len(rounds) == draws.max_sampling_rounds:
        return 0
    is_kept_P = has_signal_P(Rollout.concatenate(rounds), draws)
    num_kept = int(is_kept_P.sum())
    missing = max(draws.prompts_per_step - num_kept, 0)
    return min(math.ceil(missing * len(is_kept_P) / max(num_kept, 1)), draws.prompts_per_step)


def choose_groups(sampled: Rollout, num_rounds: int, draws: Draws) -> tuple[Rollout, Metrics]:
    """The P groups to train on, and metrics of the choice."""
    if draws.dynamic_sampling == "off":
        return sampled, {}
    has_signal = has_signal_P(sampled, draws)
    with_signal, without_signal = np.flatnonzero(has_signal), np.flatnonzero(~has_signal)
    kept = with_signal[: draws.prompts_per_step]
    filling = without_signal[: draws.prompts_per_step - len(kept)]
    counts = {
        "sampling/rounds": num_rounds,
        "sampling/prompts": len(has_signal),
        "sampling/groups_without_signal": len(without_signal),
        "sampling/groups_unused": len(with_signal) - len(kept),
        "sampling/groups_filled": len(filling),
    }
    groups = np.sort(np.concatenate([kept, filling]))
    indices_B = (groups[:, None] * draws.group_size + np.arange(draws.group_size)).flatten()
    return sampled.take(indices_B), {name: float(count) for name, count in counts.items()}
