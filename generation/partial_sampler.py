"""Partial rollouts: the Sampler that keeps more prompts in the air than a step trains on (`generation/partial.py`).

A step begins as many new prompts as it trains on, and ends when so many groups are finished, those of earlier steps
among them: it does not wait for its longest completions, which go on in the next steps. The last steps begin only what
the run still needs, so that nothing is in the air at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batch import Metrics, Rollout, Row, State
from generation.partial import PartialRollouts
from model.sizes import prompts_in_the_air
from sampling import Sampler


@dataclass
class PartialSampler(Sampler):
    """Each prompt of the data is used once, in about their order. The same on every rank."""

    partial: PartialRollouts = field(init=False)
    waiting: list[int] = field(default_factory=list)  # numbers of prompts that were in the air at the checkpoint

    def __post_init__(self) -> None:
        self.partial = PartialRollouts(self.engine)

    def position(self) -> State:
        """A run that continues samples anew what is in the air, from the same prompts."""
        return {"prompts_drawn": self.num_drawn, "in_the_air": sorted([*self.partial.held, *self.waiting])}

    def restore(self, state: State) -> None:
        self.num_drawn, self.waiting = state["prompts_drawn"], list(state["in_the_air"])

    def collect(self, step: int) -> tuple[Rollout, Metrics]:
        rollout, metrics = super().collect(step)
        return rollout, metrics | {"rollout/kept_tokens": float(self.partial.kept_tokens)}

    def sample(self, step: int, number: int, count: int) -> Rollout:
        """`count` groups, in whatever step they were begun, handed to the grader."""
        still_needed = count + (self.run.last_step - step) * self.draws.prompts_per_step
        most = min(prompts_in_the_air(count, self.engine.world.num_engines), still_needed)
        new = {i: self.prompt(i) for i in self.next_numbers(most - len(self.partial.held))}
        seed = self.seed_of(step, number)
        return self.partial.sample(
            new,
            count,
            self.sampling,
            seed,
            step - 1,
            lambda place, row: self.grader.submit_to({place: row}, self.sampling),
        )

    def next_numbers(self, count: int) -> list[int]:
        """Of the prompts to begin: first those that were in the air at the checkpoint."""
        again, self.waiting = self.waiting[: max(count, 0)], self.waiting[max(count, 0) :]
        first, self.num_drawn = self.num_drawn, self.num_drawn + max(count, 0) - len(again)
        return again + list(range(first, self.num_drawn))

    def prompt(self, number: int) -> Row:
        """Of all that the run draws, in order: with dynamic sampling in a row over all epochs, else step by step."""
        draws = self.draws
        if draws.dynamic_sampling != "off":
            (index,) = self.data.indices_from(number, 1, draws.seed)
        else:
            step, place = divmod(number, draws.prompts_per_step)
            index = self.data.indices_of_step(step + 1, draws.prompts_per_step, draws.seed, draws.keep_last)[place]
        return self.data.rows[index]
