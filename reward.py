"""Completions and answers -> grades: the trainer's side of the reward.

What `--reward` takes, functions of your own included: `docs/rewards.md`. Verifiers run in worker
processes (`grading/pool.py`) while the engine still samples. A verifier that exceeds its time or
memory, raises, returns no finite number or ends its process costs one completion: its reward is
0.0, and its status says why. If it is a function of the user's, nobody knows the reward, so that
the completion is left out. No torch here. `scripts/grade.py` grades a file.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flags import Grading, Sampling
from grading import NOT_GRADED, Case, Grade
from grading.pool import Failure, Pool
from grading.score import RewardInputs, add_up, parse_reward
from grading.verifiers import modules_of
from runtime.progress import progress
from runtime.rank import RunError, Stopped, beat, requested

if TYPE_CHECKING:
    from batch import OnFinished, Row


class Grader:
    """Grades completions in worker processes: `submit` each as it is finished, `collect` when all are.

    Every rank has one. It has workers on the first rank of each engine; on the others nothing is submitted.
    """

    def __init__(self, grading: Grading, num_workers: int) -> None:
        """Starts the workers. Raises ValueError or FileNotFoundError if the reward cannot be loaded or used."""
        self.grading = grading
        self.weights = parse_reward(grading.reward)
        self.not_graded: dict[int, Grade] = {}
        self.cases: dict[int, Case] = {}
        self.groups: dict[int, list[int]] = {}  # for functions that compare: key of the request -> its completions
        self.is_proven = False  # something has been graded
        self.pool: Pool | None = None
        self.inputs = RewardInputs(cases=False, groups=False, token_ids=False)
        if num_workers and self.weights:
            arguments = (grading.reward, grading.overlong_cache_tokens)
            # Each worker makes a `RewardWorker` of grading/score.py and calls it with what is submitted here.
            self.pool = Pool(
                "grading.score:RewardWorker",
                arguments,
                num_workers,
                grading.reward_timeout,
                grading.reward_in_flight,
                shared_modules=modules_of(self.weights),
            )
            self.pool.submit(0, ("inputs", None))
            try:
                self.inputs = self.pool.collect()[0]
            except ValueError as error:
                raise ValueError(f"--reward {grading.reward!r}: {error}") from None

    def submit(self, b: int, case: Case, group_size: int = 1, grade: Grade | None = None) -> None:
        """Hands completion b to the workers and returns at once. Groups are b = 0 ... group_size - 1, and so on.

        `grade`: what an environment has given it already.
        """
        assert self.pool or not self.weights, "completions are submitted on the first rank of their engine"
        self.cases[b] = case
        if case.is_truncated and self.grading.truncated not in ("score", "mask"):  # zero, or a number
            self.not_graded[b] = self.nothing("truncated", reward=float(self.grading.truncated.replace("zero", "0")))
        elif grade or not self.weights:
            self.not_graded[b] = grade or self.nothing(NOT_GRADED)
        elif self.inputs.cases:
            self.pool.submit(b, ("grade", case))
        first = b - b % group_size
        group = range(first, first + group_size)  # its request has a negative key, -1 - first
        if self.inputs.groups and self.cases.keys() >= {*group}:
            members = self.groups[~first] = [i for i in group if i not in self.not_graded]
            if members:
                self.pool.submit(~first, ("compare", [self.cases[i] for i in members]))

    def nothing(self, status: str, is_compared: bool = True, reward: float = 0.0) -> Grade:
        """The grade without a mark; an advantage of the user's finds each verifier in it."""
        return Grade(reward, status, dict.fromkeys(self.weights, 0.0), is_compared=is_compared)

    def callback_for(self, rows: Sequence[Row] | Mapping[int, Row], sampling: Sampling) -> OnFinished:
        """The function that `Engine.sample` calls with each finished completion b: it submits the completion.

        Completion b answers row b // `num_samples`.
        """

        def on_finished(
            b: int, text: str, token_ids: Sequence[int], is_truncated: bool, grade: Grade | None = None
        ) -> None:
            row = rows[b // sampling.num_samples]
            case = Case(
                text,
                row.answer,
                row.columns,
                prompt=row.text,
                token_ids=tuple(token_ids) if self.inputs.token_ids else (),
                num_tokens=len(token_ids),
                max_tokens=sampling.max_completion_tokens,
                is_truncated=is_truncated,
                where=row.where,
            )
            self.submit(b, case, sampling.num_samples, grade)

        return on_finished

    def collect(self) -> dict[int, Grade]:
        """The grade of each completion submitted here since the last call, by its b; waits for those not done yet."""
        outcomes = self.outcomes("grade") if self.pool else {}
        lost = ()  # the requests in which a function of the user's has failed
        if ".py:" in self.grading.reward:
            from grading.own import lost_requests

            lost = lost_requests(outcomes, self.cases, self.pool, self.outcomes)
        parts: dict[int, list[Grade]] = defaultdict(list)
        for key, outcome in sorted(outcomes.items(), reverse=True):  # first those of one completion
            members = self.groups.get(key, [key])
            if isinstance(outcome, Failure):
                values = [self.nothing(str(outcome), key not in lost)] * len(members)
            else:
                values = outcome if key in self.groups else [outcome]
            for b, grade in zip(members, values, strict=True):
                parts[b].append(grade)
        grades = self.not_graded | {b: add_up(grades, self.weights) for b, grades in parts.items()}
        self.not_graded, self.cases, self.groups = {}, {}, {}
        return grades

    def outcomes(self, what: str) -> dict[int, object]:
        """The value, or Failure, of all that was submitted. Raises Stopped if a signal came."""
        with progress(what, total=self.pool.num_left) as bar:

            def on_wait(num_left: int) -> None:
                if requested():
                    raise Stopped
                num_new = bar.total - num_left - bar.n
                bar.update(num_new)
                if num_new:
                    beat()

            return self.pool.collect(on_wait)

    def collect_from_ranks(self) -> list[Grade]:
        """The grades of the completions submitted on all ranks, in the order of b; the same on every rank.

        Raises RunError if grading failed for each of the first completions: it will for the next ones; Stopped, on
        all ranks, if a signal has come.
        """
        from fsdp_utils import end_if_requested, gather_from_ranks

        try:
            own = self.collect()
        except Stopped:  # the others learn it from the next line
            own = {}
        end_if_requested()
        grades = [grade for _, grade in sorted(pair for share in gather_from_ranks(own) for pair in share.items())]
        tried = [grade for grade in grades if grade.status != "truncated"]
        if not self.is_proven and tried and all(grade.is_failed for grade in tried):
            flag = f"--reward {self.grading.reward!r}" if self.weights else "--environment"
            raise RunError(
                f"{flag}: not one of the first {len(tried)} completions could be graded; the first: {tried[0].status}"
            )
        self.is_proven |= bool(tried)
        return grades

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def workers_per_engine(tensor_parallel_size: int = 1) -> int:
    """The number of grading processes of an engine: the node's engines share its cores."""
    engines_of_node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // tensor_parallel_size)
    return max(1, len(os.sched_getaffinity(0)) // engines_of_node)
