"""Grades a file of completions as a training run would, in the same worker processes.

    python scripts/grade.py --reward math --input completions.jsonl --output graded.jsonl

A row has `completion` and `answer`, and may have the fields of `EXTRAS`. To each it adds `reward` (null if the answer
key cannot be used), `is_correct`, `reward_status`, `reward_parts`, and `read_as`, the final answer. docs/rewards.md
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from command_line import parser_of
from flags import GROUPS, INF, Grading, flag
from gate.checks import check_ranges
from gate.keys import bad_keys as find_bad_keys
from gate.keys import check_groups
from gate.machine import check_temporary_folder
from grading import Case, Grade, key_text
from grading.own import EXTRAS
from reward import Grader, workers_per_engine
from runtime.files import atomic_write
from runtime.sources import read_json_file

# fmt: off
FILES = [
    flag("--input", None, "a .jsonl file, one JSON object per line; or a .json file, an array of objects",
         is_required=True),
    flag("--output", None, "the graded rows, one per line; written at the end, replaced if it exists",
         is_required=True),
    flag("--max_completion_tokens", None, "reward `length`: for rows without max_tokens", (1, INF), type=int),
    flag("--group_size", 1, "consecutive rows that are completions of one prompt, for a reward that compares them",
         (1, INF)),
]
# fmt: on
FLAGS = {"files": FILES, "reward": GROUPS["reward"]}
# A run has written them into its rows: they follow from its rewards.
RUN_COLUMNS = ("advantage", "advantages", "is_trained")


def read_cases(path: str, max_tokens: int | None) -> tuple[list[dict[str, object]], list[Case]]:
    """The rows of the file, and a case for each. Raises ValueError, naming the line if one cannot be used.

    A prompt that is a list of messages stays a column: the text that the model saw is not known.
    """
    rows, cases = [], []
    for where, row, _ in read_json_file(Path(path)):
        if not isinstance(row.get("completion"), str) or row.get("answer") is None:
            raise ValueError(f"{where}: needs an object with a text `completion` and an `answer`.")
        given = {name: row[name] for name in EXTRAS if row.get(name) is not None}
        if isinstance(given.get("prompt"), list):
            del given["prompt"]
        for name, value in given.items():
            if type(value) is not EXTRAS[name]:
                raise ValueError(f"{where}: `{name}` is {str(value)[:80]!r}, not of the type {EXTRAS[name].__name__}.")
        try:
            answer = key_text(row["answer"])
        except ValueError as error:
            raise ValueError(f"{where}: the answer is {error}.") from None
        rows.append(row)
        cases.append(Case(row["completion"], answer, row, where=where, **{"max_tokens": max_tokens} | given))
    if not rows:
        raise ValueError(f"--input {path!r} holds no rows.")
    return rows, cases


def check_output(output: Path, source: Path) -> None:
    """Raises ValueError if the graded rows could not be written, or over what they are read from."""
    if output.exists() and (not output.is_file() or output.samefile(source)):
        raise ValueError(f"--output {str(output)!r} is the input, a folder or a device; name another file.")
    if not os.access(output.parent, os.W_OK):
        raise ValueError(f"--output {str(output)!r} cannot be written; make its folder, or name another.")


def question(case: Case) -> object:
    """The mark of a row's problem, if others have the same answer: what a run has written, or the prompt."""
    return case.columns.get("row"), case.columns.get("prompt")


def check_needs(grader: Grader, cases: list[Case], group_size: int) -> None:
    """Raises ValueError for rows that are no whole groups, and for a reward that needs what the file does not have."""
    if not grader.weights:
        raise ValueError("--reward none grades nothing; name a verifier.")
    if len(cases) % group_size:
        raise ValueError(f"--group_size {group_size}: does not divide the {len(cases)} rows of --input.")
    for i, case in enumerate(cases):
        first = cases[i - i % group_size]
        if (case.answer, question(case)) != (first.answer, question(first)):
            raise ValueError(
                f"--group_size {group_size}: {first.where} and {case.where} would be one group, but are of different "
                "prompts; put the completions of a prompt in consecutive rows, so many of each."
            )
    check_groups(grader, "--group_size", group_size)
    if grader.inputs.token_ids:
        raise ValueError(f"--reward {grader.grading.reward!r} takes token ids, which only a training run has.")


def main() -> None:
    args = parser_of(FLAGS, __doc__.replace("`EXTRAS`", ", ".join(EXTRAS))).parse_args()
    try:
        check_ranges(args, FLAGS)
        check_temporary_folder()
        rows, cases = read_cases(args.input, args.max_completion_tokens)
        check_output(Path(args.output), Path(args.input))
        grading = Grading.from_flags(args)
        grader = Grader(grading, workers_per_engine())
        check_needs(grader, cases, args.group_size)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    size, bad_keys = args.group_size, find_bad_keys(grader, cases)
    for i, reason in list(bad_keys.items()):  # a group has one key
        bad_keys |= dict.fromkeys(range(i // size * size, i // size * size + size), reason)
    for i in sorted(set(range(len(cases))) - set(bad_keys)):
        grader.submit(i, cases[i], size)
    grades = grader.collect() | {i: Grade(0.0, f"bad key: {reason}") for i, reason in bad_keys.items()}
    grader.close()
    with atomic_write(Path(args.output)) as unfinished, unfinished.open("w", encoding="utf-8") as out:
        for i, row in enumerate(rows):
            grade, known = grades[i], {name: value for name, value in row.items() if name not in RUN_COLUMNS}
            reward, is_correct = (None, None) if i in bad_keys else (grade.reward, grade.is_correct)
            graded = {"reward": reward, "is_correct": is_correct, "reward_status": grade.status}
            graded |= {"reward_parts": grade.parts, "read_as": grade.answer}
            out.write(json.dumps(known | graded) + "\n")
    rewards = [grade.reward for grade in grades.values() if not grade.is_failed]
    failed = [f"{cases[i].where}: {grades[i].status}" for i in sorted(grades) if grades[i].is_failed]
    graded = f"{len(rewards)} graded, mean reward {sum(rewards) / max(len(rewards), 1):.4f}"
    bad = f"{len(failed) - len(bad_keys)} failed, {len(bad_keys)} with an answer key that cannot be used"
    print(f"{len(rows)} rows: {graded}; {bad}")
    print("".join(f"  {line}\n" for line in failed[:20]), end="")


if __name__ == "__main__":
    main()
