"""Partial rollouts: a step ends when enough groups are finished; unfinished completions go on in the next step.

Between two steps the completions so far are here, as tokens: nothing is under way in the engine, which may sleep, take
new weights or sample something else. Each engine has prompts of its own in the air, and stops when its share of the
groups is finished. A completion that goes on is read again as a longer prompt, by the new weights. The last steps begin
only what the run still needs, so that nothing is in the air at its end. docs/generation.md
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from batch import Metrics, Rollout, Row, State
from fsdp_utils import end_if_requested, gather_from_ranks
from guards.progress import progress
from guards.stall import beat
from model.sizes import MOST_LAG, prompts_in_the_air
from sampling import Sampler


@dataclass
class Completion:
    """So far: a list of each, one per token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # under the weights that made the token
    versions: list[int] = field(default_factory=list)  # the steps that those were trained
    finish_reason: str | None = None  # None: it goes on

    def extend(self, token_ids: list[int], logprobs: list[float], version: int, reason: str | None = None) -> None:
        assert len(token_ids) == len(logprobs), "each token has its log-prob"
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.versions += [version] * len(token_ids)
        self.finish_reason = reason


@dataclass(eq=False)
class Group:
    """The completions of a prompt, on the ranks of the engine that has it in the air."""

    number: int  # of the prompt, in the order of the run
    row: Row
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

    held_E: list[dict[int, Row]] = field(init=False)  # prompts in the air of each engine, by number
    groups: list[Group] = field(default_factory=list)  # the same, of this rank's engine, the oldest first
    kept_tokens: int = 0  # sampled, of all engines, but not trained on yet
    waiting: list[int] = field(default_factory=list)  # numbers of prompts that were in the air at the checkpoint

    def __post_init__(self) -> None:
        self.held_E = [{} for _ in range(self.engine.world.num_engines)]

    @property
    def held(self) -> dict[int, Row]:
        """The prompts in the air, by number."""
        return {number: row for held in self.held_E for number, row in sorted(held.items())}

    def position(self) -> State:
        """A run that continues samples anew what is in the air, from the same prompts."""
        return {"prompts_drawn": self.num_drawn, "in_the_air": sorted([*self.held, *self.waiting])}

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
        new = {i: self.prompt(i) for i in self.next_numbers(step, count)}
        engine.prepare(seed)
        self.begin(new, version=step - 1)
        shares_E, own = shares_of(count, [len(held) for held in self.held_E]), engine.world.engine_index
        # Groups of short completions are finished first: a place by lot, so that all updates of a step get the same.
        places = sum(shares_E[:own]) + np.random.default_rng([*seed, own]).permutation(shares_E[own])
        start, texts = time.perf_counter(), {}
        taken = self.finish(shares_E[own], step - 1, lambda group: self.tell(group, int(places[len(texts)]), texts))
        end_if_requested()
        assert len(taken) == shares_E[own], "an engine has its share in the air, at least"
        return self.from_engines([taken[i] for i in np.argsort(places)], texts, time.perf_counter() - start)

    def next_numbers(self, step: int, count: int) -> list[int]:
        """Of the prompts to begin: first those that were in the air at the checkpoint."""
        still_needed = count + (self.run.last_step - step) * self.draws.prompts_per_step
        most = min(prompts_in_the_air(count, self.engine.world.num_engines), still_needed)
        missing = max(most - len(self.held), 0)
        again, self.waiting = self.waiting[:missing], self.waiting[missing:]
        first, self.num_drawn = self.num_drawn, self.num_drawn + missing - len(again)
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

    def begin(self, new: dict[int, Row], version: int) -> None:
        """Each new prompt goes to the engine that has the fewest in the air."""
        for number, row in new.items():
            index = min(range(len(self.held_E)), key=lambda e: len(self.held_E[e]))
            self.held_E[index][number] = row
            if index == self.engine.world.engine_index:
                completions = [Completion() for _ in range(self.sampling.num_samples)]
                self.groups.append(Group(number, row, version, completions))

    def tell(self, group: Group, place: int, texts: dict[int, list[str]]) -> None:
        """The grader hears of the completions of a group, whose texts are from now on in `texts`, by place."""
        ids = [each.token_ids for each in group.completions]
        texts[place] = [self.engine.tokenizer.decode(each, skip_special_tokens=True) for each in ids]
        if self.engine.world.is_engine_leader:
            on_finished = self.grader.submit_to({place: group.row}, self.sampling)
            for g, each in enumerate(group.completions):
                b = place * self.sampling.num_samples + g
                on_finished(b, texts[place][g], ids[g], each.finish_reason == "length")

    def finish(self, share: int, version: int, tell: Callable[[Group], None]) -> list[Group]:
        """The first `share` groups that are finished, in this order; `tell` hears of each at once.

        Groups that were finished in an earlier step come first. Those that are waited for have a place kept for them.
        """
        taken: list[Group] = []

        def take_if_there_is_room(group: Group) -> None:
            if len(taken) < share - sum(each.is_waited_for(version) for each in self.groups):
                taken.append(group)
                tell(group)

        for group in self.groups:
            if group.is_finished:
                take_if_there_is_room(group)
        if len(taken) < share:
            with progress("groups", total=share, shown_after=0.0) as bar:
                for group in self.sample_on(version, lambda: len(taken) == share):
                    take_if_there_is_room(group)
                    bar.update(len(taken) - bar.n)
        self.groups = [group for group in self.groups if group not in taken]
        return taken

    def sample_on(self, version: int, is_enough: Callable[[], bool]) -> Iterator[Group]:
        """Groups as they are finished, until it is enough; then the engine gives back what it has of the others."""
        engine, llm = self.engine, self.engine.llm.llm_engine
        todo = [(x, each) for x in self.groups for each in x.completions if each.finish_reason is None]
        rows, so_far = [group.row for group, _ in todo], [each.token_ids for _, each in todo]
        first_id = engine.add(rows, so_far, self.sampling)
        beat(f"begins to sample {len(todo)} completions, {sum(map(bool, so_far))} of them from an earlier step on")
        told = None  # how far the engine was
        while not is_enough() and llm.has_unfinished_requests() and not engine.is_abandoned():
            told = engine.tell_progress(rows, first_id, told)
            for output in (output for output in llm.step() if output.finished):
                group, completion = todo[int(output.request_id) - first_id]
                (done,) = output.outputs
                completion.extend(list(done.token_ids), list(done.logprobs.logprobs), version, done.finish_reason)
                if group.is_finished:
                    yield group
        for request_id, token_ids, logprobs in engine.withdraw():
            todo[request_id - first_id][1].extend(token_ids, logprobs, version)

    def from_engines(self, chosen: list[Group], texts: dict[int, list[str]], seconds: float) -> Rollout:
        """The groups of all engines as one rollout; their prompts are not in the air any more."""
        engine, numbers = self.engine, [group.number for group in chosen]
        kept = sum(len(each.token_ids) for group in self.groups for each in group.completions)
        part = numbers, rollout_of(chosen, [text for place in sorted(texts) for text in texts[place]]), seconds, kept
        parts = [x for x in gather_from_ranks(part if engine.world.is_engine_leader else None) if x is not None]
        engine.seconds_E = np.array([seconds for _, _, seconds, _ in parts])
        self.kept_tokens = sum(kept for *_, kept in parts)
        rows = [held.pop(n) for held, (numbers, *_) in zip(self.held_E, parts, strict=True) for n in numbers]
        rows_B = [row for row in rows for _ in range(self.sampling.num_samples)]
        return replace(Rollout.concatenate([rollout for _, rollout, *_ in parts]), rows=rows_B)


def shares_of(count: int, held_E: list[int]) -> list[int]:
    """How many of `count` groups each engine finishes, out of those that it has in the air: those with most, most."""
    shares_E = [0] * len(held_E)
    for _ in range(count):
        index = max(range(len(held_E)), key=lambda e: held_E[e] - shares_E[e])
        shares_E[index] += 1
    return shares_E


def rollout_of(groups: list[Group], texts: list[str]) -> Rollout:
    """Without the rows, which every rank has."""
    completions = [each for group in groups for each in group.completions]
    return Rollout(
        rows=[],
        completions=[np.array(each.token_ids, dtype=np.int32) for each in completions],
        rollout_logprobs=[np.array(each.logprobs, dtype=np.float32) for each in completions],
        texts=texts,
        is_truncated_B=np.array([each.finish_reason == "length" for each in completions], dtype=bool),
        versions=[np.array(each.versions, dtype=np.int32) for each in completions],
    )
