"""--partial_rollouts: a step ends when enough groups are finished; unfinished completions go on in the next step.

The seam is `Sampler.collect`: `train_grpo.build_sampler` takes `PartialSampler` in place of `Sampler`.

Between two steps the completions so far are here, as tokens: the engine has no requests, and may
sleep, take new weights or sample something else. Each engine has unfinished prompts of its own, and
stops when its share of the groups is finished. A completion that goes on is read again as a longer
prompt, by the new weights. The last steps begin only what the run still needs, so that nothing is
unfinished at its end. docs/generation.md
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from batch import Completion, Metrics, Rollout, Row, rollout_of
from flags import MORE_UNFINISHED, MOST_LAG
from fsdp_utils import end_if_requested, gather_from_ranks
from runtime.progress import progress
from sampling import Sampler

if TYPE_CHECKING:
    from rollout import Engine


def num_unfinished_prompts(prompts: int, num_engines: int) -> int:
    """--partial_rollouts: unfinished prompts when a step of `prompts` begins, the same number in each engine."""
    share = math.ceil(prompts / num_engines)
    return num_engines * (share + math.ceil(share * MORE_UNFINISHED))


@dataclass(eq=False)
class Group:
    """A prompt that is begun, not trained on. Its completions grow on the ranks of its engine alone."""

    number: int  # the prompt's, in the order of the run
    row: Row
    engine: int
    first_version: int  # number of the weights that began it
    completions: list[Completion]

    @property
    def is_finished(self) -> bool:
        return all(completion.finish_reason for completion in self.completions)


@dataclass
class PartialSampler(Sampler):
    """The Sampler with more unfinished prompts than a step has. Each prompt is used once, in about their order.

    The same on every rank.
    """

    groups: list[Group] = field(default_factory=list)  # of all engines, the oldest first
    kept_tokens: int = 0  # sampled, of all engines, but not trained on yet
    waiting: list[int] = field(default_factory=list)  # numbers of prompts that were unfinished at the checkpoint

    def position(self) -> dict:
        """The place in the data. A run that continues samples the unfinished prompts anew."""
        return super().position() | {"in_the_air": sorted([group.number for group in self.groups] + self.waiting)}

    def restore(self, state: dict) -> None:
        super().restore(state)
        self.waiting = list(state["in_the_air"])

    def collect(self, step: int) -> tuple[Rollout, Metrics]:
        rollout, metrics = super().collect(step)
        return rollout, metrics | {"rollout/kept_tokens": float(self.kept_tokens)}

    def completions(self, step: int, number: int, count: int) -> Rollout:
        """`count` groups, in whatever step they were begun. The grader gets a completion when its place is known.

        Raises Stopped, and cannot sample any more, if a signal came meanwhile.
        """
        seed = self.seed_of(step, number)
        self.engine.prepare(seed)
        self.begin(step, count)
        own = self.engine.world.engine_index
        shares_E = shares_of(count, self.num_unfinished_E)
        # Groups of short completions end first: places by lot give all updates the same mix.
        places = sum(shares_E[:own]) + np.random.default_rng([*seed, own]).permutation(shares_E[own])
        start = time.perf_counter()
        finished = self.finish([group for group in self.groups if group.engine == own], places.tolist(), step - 1)
        end_if_requested()
        assert len(finished) == len(places), "an engine has its share of unfinished prompts, at least"
        return self.from_engines([finished[i] for i in np.argsort(places)], time.perf_counter() - start)

    @property
    def num_unfinished_E(self) -> list[int]:
        """The number of prompts of each engine that are not trained on."""
        engines = [group.engine for group in self.groups]
        return [engines.count(e) for e in range(self.engine.world.num_engines)]

    def begin(self, step: int, count: int) -> None:
        """Begins prompts, first those that were unfinished at the checkpoint, in the engine with the fewest."""
        still_needed = count + (self.run.last_step - step) * self.plan.prompts_per_step
        most = min(num_unfinished_prompts(count, self.engine.world.num_engines), still_needed)
        numbers = self.waiting[: max(most - len(self.groups), 0)]
        self.waiting = self.waiting[len(numbers) :]
        while len(self.groups) + len(numbers) < most:
            _, self.num_drawn = self.unsolved_from(self.num_drawn, 1)
            numbers.append(self.num_drawn - 1)
        for number in numbers:
            completions = [Completion() for _ in range(self.sampling.num_samples)]
            engine = int(np.argmin(self.num_unfinished_E))
            self.groups.append(Group(number, self.prompt(number), engine, step - 1, completions))

    def prompt(self, number: int) -> Row:
        """The prompt of this number in the run: with dynamic sampling or dropped ones in a row, else step by step."""
        plan = self.plan
        if plan.dynamic_sampling != "off" or plan.drop_solved:
            (index,) = self.data.indices_from(number, 1, plan.seed)
        else:
            step, place = divmod(number, plan.prompts_per_step)
            index = self.data.indices_of_step(step + 1, plan.prompts_per_step, plan.seed, plan.keep_last)[place]
        return self.data.rows[index]

    def finish(self, groups: list[Group], places: list[int], version: int) -> list[Group]:
        """The first of these groups that are finished, in this order; each gets the next place, and the grader hears.

        Groups that were finished in an earlier step come first. Those that are waited for have a place kept for them.
        """
        chosen = []
        before = [group for group in groups if group.is_finished]
        finished = itertools.chain(before, self.finished_groups(groups, version, lambda: len(chosen) == len(places)))
        oldest = [group for group in groups if version - group.first_version >= MOST_LAG]  # which are waited for
        with progress("groups", total=len(places), shown_after=0.0) as bar:
            for group in finished:
                num_kept_places = sum(not other.is_finished for other in oldest)
                if len(chosen) < len(places) - num_kept_places:
                    self.report(group, places[len(chosen)])
                    chosen.append(group)
                    bar.update()
        return chosen

    def report(self, group: Group, place: int) -> None:
        """Tells the grader of the completions of a group, by its place among all of the step."""
        on_finished = None
        if self.engine.world.is_engine_leader:
            on_finished = self.grader.callback_for({place: group.row}, self.sampling)
        for b, completion in enumerate(group.completions, start=place * self.sampling.num_samples):
            completion.finish(b, self.engine.tokenizer, on_finished)

    def finished_groups(self, groups: list[Group], version: int, is_enough: Callable[[], bool]) -> Iterator[Group]:
        """Groups as they are finished, until it is enough; then the engine gives back what it has of the others."""
        if is_enough():
            return
        unfinished = [(group, x) for group in groups for x in group.completions if not x.finish_reason]
        rows = [group.row for group, _ in unfinished]
        so_far = [completion.token_ids for _, completion in unfinished]
        limits = [self.sampling.max_completion_tokens - len(ids) for ids in so_far]
        first = self.engine.add(rows, so_far, limits, self.sampling)
        while not is_enough() and self.engine.is_busy():
            for number, part in self.engine.step():
                group, completion = unfinished[number - first]
                completion.extend(part.token_ids, part.logprobs, version, part.finish_reason)
                if group.is_finished:
                    yield group
        for number, token_ids, logprobs in abort_unfinished(self.engine):
            _, completion = unfinished[number - first]
            completion.extend(token_ids, logprobs, version)

    def from_engines(self, chosen: list[Group], seconds: float) -> Rollout:
        """The chosen groups of all engines as one rollout; they leave `groups`."""
        kept = [group for group in self.groups if group not in chosen]
        kept_tokens = sum(len(completion.token_ids) for group in kept for completion in group.completions)
        rollout = rollout_of([completion for group in chosen for completion in group.completions])
        part = [group.number for group in chosen], rollout, seconds, kept_tokens
        parts = gather_from_ranks(part if self.engine.world.is_engine_leader else None)
        numbers_E, rollouts, seconds_E, kept_tokens_E = zip(*filter(None, parts), strict=True)
        self.engine.seconds_E = np.array(seconds_E)
        self.kept_tokens = sum(kept_tokens_E)
        rows = {group.number: group.row for group in self.groups}
        numbers = list(itertools.chain(*numbers_E))
        self.groups = [group for group in self.groups if group.number not in numbers]
        rows_B = [rows[number] for number in numbers for _ in range(self.sampling.num_samples)]
        return replace(Rollout.concatenate(list(rollouts)), rows=rows_B)


def abort_unfinished(engine: Engine) -> list[tuple[int, list[int], list[float]]]:
    """Aborts each unfinished request. Returns (number, token ids, log-probs) of what it has sampled so far.

    They are read out of vLLM, which returns a request at its end, or all of it at each token.
    """
    core = engine.llm.llm_engine
    states = dict(core.output_processor.request_states)
    unfinished = []
    for state in states.values():
        logprobs = list(state.logprobs_processor.logprobs.logprobs)
        unfinished.append((int(state.external_req_id), list(state.detokenizer.output_token_ids), logprobs))
    core.abort_request(list(states), internal=True)
    engine.requests.clear()
    engine.empty_queue()
    return unfinished


def shares_of(count: int, num_unfinished_E: list[int]) -> list[int]:
    """The number of groups, of `count`, that each engine finishes: the most where most are unfinished."""
    shares_E = [0] * len(num_unfinished_E)
    for _ in range(count):
        shares_E[np.argmax(np.subtract(num_unfinished_E, shares_E))] += 1
    return shares_E
