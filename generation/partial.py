"""Partial rollouts: a step ends when enough groups are finished; unfinished completions go on in the next step.

    partial = PartialRollouts(engine)
    rollout = partial.sample(new, count, sampling, seed, version, hear)   # `count` groups, out of more in the air

Between two calls the completions so far are here, as tokens: nothing is under way in the engine, which may sleep, take
new weights or sample something else. Each engine has prompts of its own in the air, and stops when its share of the
groups is finished. A completion that goes on is read again as a longer prompt, by the new weights. docs/partial.md
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from batch import OnFinished, Rollout, Row
from flags import Sampling
from fsdp_utils import end_if_requested, gather_from_ranks
from guards.progress import progress
from guards.stall import beat
from model.sizes import MOST_LAG

if TYPE_CHECKING:  # importing vLLM takes seconds; the checks of bad input come first
    from rollout import Engine

# Place of a group in the rollout, and its prompt -> what is called when its completions are finished.
Hear = Callable[[int, "Row"], "OnFinished"]


@dataclass(frozen=True)
class Completion:
    """So far: a list of each, one per token."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # under the weights that made the token
    versions: tuple[int, ...] = ()  # the steps that those were trained
    finish_reason: str | None = None  # None: it goes on

    def longer(self, token_ids: list[int], logprobs: list[float], version: int, reason: str | None) -> Completion:
        """With these tokens, which weights of this version have made."""
        assert len(token_ids) == len(logprobs), "each token has its log-prob"
        versions = self.versions + (version,) * len(token_ids)
        return Completion(self.token_ids + tuple(token_ids), self.logprobs + tuple(logprobs), versions, reason)


@dataclass
class Group:
    """The completions of a prompt, on the ranks of the engine that has it in the air."""

    number: int  # of the prompt, in the order of the run
    row: Row
    begun: int  # the version of the weights then
    completions: list[Completion]

    @property
    def is_finished(self) -> bool:
        return all(each.finish_reason is not None for each in self.completions)

    def is_due(self, version: int) -> bool:
        """It is as old as may be: the step waits for it."""
        return version - self.begun >= MOST_LAG


@dataclass
class PartialRollouts:
    """What is in the air. Every rank has one, and calls it alike."""

    engine: Engine
    held_E: list[dict[int, Row]] = field(init=False)  # prompts in the air of each engine, by number; alike on all ranks
    groups: list[Group] = field(default_factory=list)  # of this rank's engine, the oldest first
    kept_tokens: int = 0  # sampled, of all engines, but not returned yet

    def __post_init__(self) -> None:
        self.held_E = [{} for _ in range(self.engine.world.num_engines)]

    @property
    def held(self) -> dict[int, Row]:
        """The prompts in the air, by number."""
        return {number: row for held in self.held_E for number, row in sorted(held.items())}

    def sample(
        self, new: dict[int, Row], count: int, sampling: Sampling, seed: tuple[int, ...], version: int, hear: Hear
    ) -> Rollout:
        """`count` finished groups, the same on every rank, which must all begin the same `new` prompts.

        As soon as a group is finished and has its place in the rollout, the leader of its engine tells the one whom
        `hear(place, row)` returns of its completions. `version`: the steps that the weights were trained. Raises
        Stopped, and cannot sample any more, if a signal came meanwhile.
        """
        engine, world = self.engine, self.engine.world
        engine.prepare(seed)
        self.begin(new, sampling, version)
        shares_E = shares_of(count, [len(held) for held in self.held_E])
        own = world.engine_index
        first, share = sum(shares_E[:own]), shares_E[own]
        # Groups of short completions are finished first: a place by lot, so that all updates of a step get the same.
        places = first + np.random.default_rng([*seed, own]).permutation(share)
        start = time.perf_counter()
        texts: dict[int, list[str]] = {}  # by place

        def tell(group: Group) -> None:
            place = int(places[len(texts)])
            ids = [list(each.token_ids) for each in group.completions]
            texts[place] = [engine.tokenizer.decode(each, skip_special_tokens=True) for each in ids]
            on_finished = hear(place, group.row) if world.is_engine_leader else None
            for g, each in enumerate(group.completions if on_finished else []):
                b = place * sampling.num_samples + g
                on_finished(b, texts[place][g], ids[g], each.finish_reason == "length")

        taken = self.finish(share, sampling, version, tell)
        end_if_requested()
        assert len(taken) == share, "an engine has its share in the air, at least"
        seconds = time.perf_counter() - start
        chosen = [taken[i] for i in np.argsort(places)]
        numbers = [group.number for group in chosen]
        self.groups = [group for group in self.groups if group.number not in numbers]
        kept = sum(len(each.token_ids) for group in self.groups for each in group.completions)
        all_texts = [text for place in sorted(texts) for text in texts[place]]
        part = numbers, rollout_of(chosen, all_texts), seconds, kept
        return self.gather(part, sampling.num_samples)

    def begin(self, new: dict[int, Row], sampling: Sampling, version: int) -> None:
        """Each new prompt goes to the engine that has the fewest in the air."""
        for number, row in new.items():
            index = min(range(len(self.held_E)), key=lambda e: len(self.held_E[e]))
            self.held_E[index][number] = row
            if index == self.engine.world.engine_index:
                self.groups.append(Group(number, row, version, [Completion()] * sampling.num_samples))

    def finish(self, share: int, sampling: Sampling, version: int, tell: Callable[[Group], None]) -> list[Group]:
        """The first `share` groups that are finished, in this order; `tell` hears of each at once.

        Groups that were finished in an earlier step come first. Those that are due have a place kept for them.
        """
        taken: list[Group] = []

        def take_if_there_is_room(group: Group) -> None:
            num_due = sum(each.is_due(version) and not each.is_finished for each in self.groups)
            if len(taken) < share - num_due:
                taken.append(group)
                tell(group)

        for group in self.groups:
            if group.is_finished:
                take_if_there_is_room(group)
        if len(taken) < share:
            self.run(share, sampling, version, taken, take_if_there_is_room)
        return taken

    def run(
        self, share: int, sampling: Sampling, version: int, taken: list[Group], take: Callable[[Group], None]
    ) -> None:
        """The engine samples until `share` groups are taken, then gives back what it has of the others."""
        engine, llm = self.engine, self.engine.llm.llm_engine
        todo = [(x, g) for x in self.groups for g, each in enumerate(x.completions) if each.finish_reason is None]
        rows = [group.row for group, _ in todo]
        so_far = [group.completions[g].token_ids for group, g in todo]
        first_id = engine.add(rows, so_far, sampling)
        beat(f"begins to sample {len(todo)} completions, {sum(map(bool, so_far))} of them from an earlier step on")
        told = None
        with progress("groups", total=share, shown_after=0.0) as bar:
            while len(taken) < share and llm.has_unfinished_requests() and not engine.is_abandoned():
                told = engine.tell_progress(rows, first_id, told)
                for output in (output for output in llm.step() if output.finished):
                    group, g = todo[int(output.request_id) - first_id]
                    (done,) = output.outputs
                    group.completions[g] = group.completions[g].longer(
                        done.token_ids, done.logprobs.logprobs, version, done.finish_reason
                    )
                    if group.is_finished:
                        take(group)
                bar.update(len(taken) - bar.n)
        for request_id, token_ids, logprobs in engine.withdraw():
            group, g = todo[request_id - first_id]
            group.completions[g] = group.completions[g].longer(token_ids, logprobs, version, None)

    def gather(self, part: tuple[list[int], Rollout, float, int], num_samples: int) -> Rollout:
        """The parts of all engines as one rollout; its prompts are not in the air any more."""
        engine = self.engine
        parts = [x for x in gather_from_ranks(part if engine.world.is_engine_leader else None) if x is not None]
        engine.seconds_E = np.array([seconds for _, _, seconds, _ in parts])
        self.kept_tokens = sum(kept for *_, kept in parts)
        rows = [held.pop(n) for held, (numbers, *_) in zip(self.held_E, parts, strict=True) for n in numbers]
        rows_B = [row for row in rows for _ in range(num_samples)]
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
