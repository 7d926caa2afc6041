"""Grades a file of completions as a training run would, in the same worker processes.

    python scripts/grade.py --reward math --input completions.jsonl --output graded.jsonl

What `--reward` takes, functions of your own included: `docs/rewards.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from flags import GROUPS, Grading, take
from grading.score import EXTRAS
from grading.verifiers import Case
from inputs.command_line import add_flags
from reward import Grader, workers_per_engine


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
