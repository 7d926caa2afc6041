"""Completions and answers -> grades: the trainer's side of the reward, and a command that grades a file.

    python reward.py --reward math --input completions.jsonl --output graded.jsonl

What `--reward` takes, functions of your own included: `grading/score.py`. Verifiers run in worker processes
(`grading/pool.py`) while the engine still samples. A verifier that exceeds its time or memory, raises, returns no
finite number or ends its process costs one completion: its reward is 0.0, and its status says why. No torch here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flags import GROUPS, Grading, Sampling, take
from grading.pool import Limits, Pool
from grading.score import EXTRAS, Grade, needs_math, parse_reward
from grading.verifiers import Case
from inputs.command_line import add_flags

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
        terms = parse_reward(grading.reward)
        self.truncated = grading.truncated
        self.not_graded: dict[int, Grade] = {}
        self.pool: Pool | None = None
        if num_workers:
            arguments = (grading.reward, grading.overlong_cache_tokens)
            limits = Limits(num_workers, grading.reward_timeout, grading.reward_memory_gib)
            preload = "grading.preload_math" if needs_math(terms) else "grading.preload"
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


# The command ----------------------------------------------------------------------------------------------------------


def read_cases(path: str, max_tokens: int | None) -> tuple[list[dict[str, object]], list[Case]]:
    """The rows of a .jsonl file, and a case for each. Raises FileNotFoundError, or ValueError naming the line."""
    rows, cases = [], []
    if not Path(path).is_file():
        raise FileNotFoundError(f"--input {path!r}: no such file.")
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON ({error}).") from None
        if not isinstance(row, dict) or not isinstance(row.get("completion"), str) or row.get("answer") is None:
            raise ValueError(f"{where}: needs an object with a text `completion` and an `answer`.")
        answer = row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"], ensure_ascii=False)
        options = {"max_tokens": max_tokens} | {name: row[name] for name in EXTRAS if name in row}
        rows.append(row)
        cases.append(Case(row["completion"], answer, row, where=where, **options))
    return rows, cases


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Grades a file of completions: adds `reward` (null if the answer key cannot be used) and "
        f"`reward_status` to each row, in order. Fields: completion, answer; optional: {', '.join(EXTRAS)}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--input", required=True, help="a .jsonl file, one JSON object per line")
    parser.add_argument("--output", required=True, help="the graded rows; written at the end, replaced if it exists")
    parser.add_argument("--max_completion_tokens", type=int, help="reward `length`: for rows without max_tokens")
    add_flags(parser, {"reward": GROUPS["reward"]})
    return parser.parse_args()


def main() -> None:
    args = parse_flags()
    try:
        if Path(args.output).exists() and Path(args.output).samefile(args.input):
            raise ValueError(f"--output {args.output!r} is the input; choose another file.")
        rows, cases = read_cases(args.input, args.max_completion_tokens)
        grading = take(Grading, args)
        grader = Grader(grading, workers_per_engine(grading))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    bad_keys = grader.bad_keys(cases)
    for i in sorted(set(range(len(cases))) - set(bad_keys)):
        grader.submit(i, cases[i])
    grades = grader.collect()
    grader.close()
    unfinished = Path(f"{args.output}.unfinished")
    with unfinished.open("w", encoding="utf-8") as out:
        for i, row in enumerate(rows):
            status = f"bad key: {bad_keys[i]}" if i in bad_keys else grades[i].status
            reward = None if i in bad_keys else grades[i].reward
            out.write(json.dumps({**row, "reward": reward, "reward_status": status}) + "\n")
    unfinished.replace(args.output)
    rewards = [grade.reward for grade in grades.values() if grade.status == "ok"]
    failed = [f"{cases[i].where}: {grades[i].status}" for i in sorted(grades) if grades[i].status != "ok"]
    mean = sum(rewards) / max(len(rewards), 1)
    graded = f"{len(rows)} rows: {len(rewards)} graded, mean reward {mean:.4f}"
    print(f"{graded}; {len(failed)} failed, {len(bad_keys)} with an answer key that cannot be used")
    for line in [*(f"{cases[i].where}: {reason}" for i, reason in bad_keys.items()), *failed][:20]:
        print(f"  {line}")


if __name__ == "__main__":
    main()
