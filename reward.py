"""Completions and answers -> grades: the trainer's side of the reward.

What `--reward` takes, functions of your own included: `docs/rewards.md`. Verifiers run in worker processes
(`grading/pool.py`) while the engine still samples. A verifier that exceeds its time or memory, raises, returns no
finite number or ends its process costs one completion: its reward is 0.0, and its status says why. No torch here.
`scripts/grade.py` grades a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flags import Grading, Sampling
from grading.pool import Limits, Pool
from grading.score import Grade, needs_math, parse_reward
from grading.verifiers import Case

if TYPE_CHECKING:
    from data import PromptData, Row
    from fsdp_utils import World

OnFinished = Callable[[int, str, int, bool], None]  # (index b of the completion, text, number of tokens, is truncated)


class Grader:
    """Grades completions in worker processes: `submit` each as it is finished, `collect` when all are.

    Every rank has one. It has workers on the first rank of each engine; on the others nothing is submitted.
    """

    def __init__(self, grading: Grading, num_workers: int) -> None:
        """Starts the workers. Raises ValueError or FileNotFoundError if the reward cannot be loaded or used."""
        weights = parse_reward(grading.reward)
        self.truncated = grading.truncated
        self.not_graded: dict[int, Grade] = {}
        self.pool: Pool | None = None
        if num_workers:
            arguments = (grading.reward, grading.overlong_cache_tokens)
            limits = Limits(num_workers, grading.reward_timeout, grading.reward_memory_gib)
            preload = "grading.preload_math" if needs_math(weights) else "grading.preload"
            try:
                self.pool = Pool("grading.score:make_handler", arguments, limits, preload)
            except ValueError as error:
                raise ValueError(f"--reward {grading.reward!r}: {error}") from None

    def submit(self, b: int, case: Case) -> None:
        """Hands completion b to the workers and returns at once."""
        assert self.pool is not None, "completions are submitted on the first rank of their engine"
        if case.is_truncated and self.truncated == "zero":
            self.not_graded[b] = Grade(0.0, "truncated")
        else:
            self.pool.submit(b, ("grade", case))

    def submit_to(self, rows: Sequence[Row], sampling: Sampling) -> OnFinished:
        """What `Engine.sample` calls with each finished completion b of the rows, of which each has `num_samples`."""

        def on_finished(b: int, text: str, num_tokens: int, is_truncated: bool) -> None:
            row = rows[b // sampling.num_samples]
            limit = sampling.max_completion_tokens
            case = Case(text, row.answer, row.columns, row.text, num_tokens, limit, is_truncated, row.where)
            self.submit(b, case)

        return on_finished

    def collect(self) -> dict[int, Grade]:
        """The grade of each completion submitted here since the last call, by its b; waits for those not done yet."""
        if self.pool is None:
            return {}
        grades, self.not_graded = self.not_graded, {}
        for b, outcome in self.pool.collect().items():
            grades[b] = outcome.value if outcome.status == "ok" else Grade(0.0, outcome.status)
        return grades

    def collect_from_ranks(self) -> list[Grade]:
        """The grades of the completions submitted on all ranks, in the order of b; the same on every rank."""
        from fsdp_utils import gather_from_ranks

        grades = {b: grade for share in gather_from_ranks(self.collect()) for b, grade in share.items()}
        return [grades[b] for b in range(len(grades))]

    def grade(self, cases: list[Case]) -> list[Grade]:
        """The grades of the cases, in their order."""
        for b, case in enumerate(cases):
            self.submit(b, case)
        grades = self.collect()
        return [grades[b] for b in range(len(cases))]

    def bad_keys(self, cases: list[Case]) -> dict[int, str]:
        """Index -> reason, of the cases whose answer key cannot be used; their completions do not matter."""
        assert self.pool is not None, "keys are checked on the first rank of an engine"
        todo, reasons = dict(enumerate(cases)), {}
        for _ in range(3):  # a time-out on a busy machine must not decide which rows are trained on
            for i, case in todo.items():
                self.pool.submit(i, ("check", case))
            for i, outcome in self.pool.collect().items():
                reasons[i] = outcome.value if outcome.status == "ok" else outcome.status
                if outcome.status == "ok":
                    del todo[i]
        return {i: reasons[i] for i in range(len(cases)) if reasons[i] is not None}

    def check_keys(self, data: PromptData, world: World) -> PromptData:
        """The data without the rows whose answer key cannot be used; the engines' first ranks share the work."""
        from fsdp_utils import gather_from_ranks

        share = range(world.engine_index, len(data.rows), world.num_engines) if self.pool is not None else ()
        rows = [data.rows[i] for i in share]
        bad = self.bad_keys([Case("", row.answer, row.columns, where=row.where) for row in rows]) if rows else {}
        reasons = {share[i]: reason for i, reason in bad.items()}
        return data.exclude({i: reason for part in gather_from_ranks(reasons) for i, reason in part.items()})

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def workers_per_engine(grading: Grading, tensor_parallel_size: int = 1) -> int:
    """The number of grading processes of an engine; without --reward_workers, the node's engines share its cores."""
    engines_of_node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // tensor_parallel_size)
    return grading.reward_workers or max(1, len(os.sched_getaffinity(0)) // engines_of_node)
