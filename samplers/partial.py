"""Partial rollouts: a step ends when enough groups are finished; unfinished completions go on in the next step.

Between two steps the completions so far are here, as tokens: nothing is under way in the engine, which may sleep, take
new weights or sample something else. Each engine has prompts of its own in the air, and stops when its share of the
groups is finished. A completion that goes on is read again as a longer prompt, by the new weights. The last steps begin
only what the run still needs, so that nothing is in the air at its end. docs/generation.md
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from batch import Completion, Metrics, Rollout, Row, State, rollout_of
from flags import MORE_IN_THE_AIR, MOST_LAG
from fsdp_utils import end_if_requested, gather_from_ranks
from runtime.progress import progress
from runtime.stall import beat
from sampling import Sampler


def prompts_in_the_air(prompts: int, num_engines: int) -> int:
    """--partial_rollouts: prompts under way when a step of `prompts` begins, the same number in each engine."""
    of_engine = math.ceil(prompts / num_engines)
    return num_engines * (of_engine + math.ceil(of_engine * MORE_IN_THE_AIR))


@dataclass(eq=False)
class Group:
    """A prompt in the air. Its completions grow on the ranks of its engine alone."""

    number: int  # of the prompt, in the order of the run
    row: Row
    engine: int
    begun: int  # the version of the weights then
    completions: list[Completion]

    @property
    def is_finished(self) -> bool:
        return all(each.finish_reason is not None for each in self.completions)

    def is_waited_for(self, version: int) -> bool:  # it is as old as may be
        return not self.is_finished and version - self.begun >= MOST_LAG


@dataclass
class PartialSampler(Sampler):
    """The Sampler with more prompts in the air. Each one is used once, in about their order. The same on every rank."""

    groups: list[Group] = field(default_factory=list)  # in the air, of all engines, the oldest first
    kept_tokens: int = 0  # sampled, of all engines, but not trained on yet
    waiting: list[int] = field(default_factory=list)  # numbers of prompts that were in the air at the checkpoint

    def position(self) -> State:
        """A run that continues samples anew what is in the air, from the same prompts."""
        in_the_air = sorted([*(group.number for group in self.groups), *self.waiting])
        return {"prompts_drawn": self.num_drawn, "in_the_air": in_the_air}

    def restore(self, state: State) -> None:
        self.num_drawn, self.waiting = state["prompts_drawn"], list(state["in_the_air"])

    def collect(self, step: int) -> tuple[Rollout, Metrics]:
        rollout, metrics = super().collect(step)
        return rollout, metrics | {"rollout/kept_tokens": float(self.kept_tokens)}

    def sample(self, step: int, number: int, count: int) -> Rollout:
        """`count` groups, in whatever step they were begun. The grader gets a completion when its place is known.

        Raises Stopped, and cannot sample any more, if a signal came meanwhile.
        """
        engine, seed = self.engine, self.seed_of(step, number)
        engine.prepare(seed)
        self.begin(step, count)
        own, shares_E = engine.world.engine_index, shares_of(count, self.held_E)
        # Groups of short completions are finished first: a place by lot, so that all updates of a step get the same.
        places = sum(shares_E[:own]) + np.random.default_rng([*seed, own]).permutation(shares_E[own])
        start = time.perf_counter()
        taken = self.finish([group for group in self.groups if group.engine == own], places.tolist(), step - 1)
        end_if_requested()
        assert len(taken) == len(places), "an engine has its share in the air, at least"
        return self.from_engines([taken[i] for i in np.argsort(places)], time.perf_counter() - start)

    @property
    def held_E(self) -> list[int]:
        """How many prompts each engine has in the air."""
        engines = [group.engine for group in self.groups]
        return [engines.count(e) for e in range(self.engine.world.num_engines)]

    def begin(self, step: int, count: int) -> None:
        """First prompts that were in the air at the checkpoint. Each goes to the engine that has the fewest."""
        still_needed = count + (self.run.last_step - step) * self.draws.prompts_per_step
        most = min(prompts_in_the_air(count, self.engine.world.num_engines), still_needed)
        missing = max(most - len(self.groups), 0)
        again, self.waiting = self.waiting[:missing], self.waiting[missing:]
        first, self.num_drawn = self.num_drawn, self.num_drawn + missing - len(again)
        for number in [*again, *range(first, self.num_drawn)]:
            completions = [Completion() for _ in range(self.sampling.num_samples)]
            engine = int(np.argmin(self.held_E))
            self.groups.append(Group(number, self.prompt(number), engine, step - 1, completions))

    def prompt(self, number: int) -> Row:
        """Of all that the run draws, in order: with dynamic sampling in a row over all epochs, else step by step."""
        draws = self.draws
        if draws.dynamic_sampling != "off":
            (index,) = self.data.indices_from(number, 1, draws.seed)
        else:
            step, place = divmod(number, draws.prompts_per_step)
            index = self.data.indices_of_step(step + 1, draws.prompts_per_step, draws.seed, draws.keep_last)[place]
        return self.data.rows[index]

    def finish(self, groups: list[Group], places: list[int], version: int) -> list[Group]:
        """The first of these groups that are finished, in this order; each gets the next place, and the grader hears.

        Groups that were finished in an earlier step come first. Those that are waited for have a place kept for them.
        """
        taken: list[Group] = []
        before = [group for group in groups if group.is_finished]
        finished = itertools.chain(before, self.sample_on(groups, version, lambda: len(taken) == len(places)))
        with progress("groups", total=len(places), shown_after=0.0) as bar:
            for group in finished:
                if len(taken) < len(places) - sum(each.is_waited_for(version) for each in groups):
                    self.tell(group, places[len(taken)])
                    taken.append(group)
                    bar.update()
        return taken

    def tell(self, group: Group, place: int) -> None:
        """The grader hears of the completions of a group, by its place among all of the step."""
        is_leader, num_samples = self.engine.world.is_engine_leader, self.sampling.num_samples
        on_finished = self.grader.submit_to({place: group.row}, self.sampling) if is_leader else None
        for g, completion in enumerate(group.completions):
            completion.tell(place * num_samples + g, self.engine.tokenizer, on_finished)

    def sample_on(self, groups: list[Group], version: int, is_enough: Callable[[], bool]) -> Iterator[Group]:
        """Groups as they are finished, until it is enough; then the engine gives back what it has of the others."""
        if is_enough():
            return
        todo = [(x, each) for x in groups for each in x.completions if each.finish_reason is None]
        rows, so_far = [group.row for group, _ in todo], [each.token_ids for _, each in todo]
        left = [self.sampling.max_completion_tokens - len(ids) for ids in so_far]
        first = self.engine.add(rows, so_far, left, self.sampling)
        beat(f"begins to sample {len(todo)} completions, {sum(map(bool, so_far))} of them from an earlier step on")
        while not is_enough() and self.engine.is_busy():
            for number, done in self.engine.step():
                group, completion = todo[number - first]
                completion.extend(done.token_ids, done.logprobs, version, done.finish_reason)
                if group.is_finished:
                    yield group
        for number, token_ids, logprobs in self.engine.abort_unfinished():
            todo[number - first][1].extend(token_ids, logprobs, version)

    def from_engines(self, chosen: list[Group], seconds: float) -> Rollout:
        """The groups of all engines as one rollout; their prompts are not in the air any more."""
        kept = sum(len(x.token_ids) for group in self.groups if group not in chosen for x in group.completions)
        rollout = rollout_of([completion for group in chosen for completion in group.completions])
        part = [group.number for group in chosen], rollout, seconds, kept
        parts = gather_from_ranks(part if self.engine.world.is_engine_leader else None)
        numbers_E, rollouts, seconds_E, kept_E = zip(*filter(None, parts), strict=True)
        self.engine.seconds_E, self.kept_tokens = np.array(seconds_E), sum(kept_E)
        rows = {group.number: group.row for group in self.groups}
        taken = list(itertools.chain(*numbers_E))
        self.groups = [group for group in self.groups if group.number not in taken]
        rows_B = [rows[number] for number in taken for _ in range(self.sampling.num_samples)]
        return replace(Rollout.concatenate(list(rollouts)), rows=rows_B)


def shares_of(count: int, held_E: list[int]) -> list[int]:
    """How many of `count` groups each engine finishes, out of those that it has in the air: those with most, most."""
    shares_E = [0] * len(held_E)
    for _ in range(count):
        index = max(range(len(held_E)), key=lambda e: held_E[e] - shares_E[e])
        shares_E[index] += 1
    return shares_E
