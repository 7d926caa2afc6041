"""The mathematical verifier: mistakes on written cases, and CPU time, ours, math-verify alone and another version's.

    python benchmarks/bench_grading.py                               # tests/grading/math_cases.jsonl
    python benchmarks/bench_grading.py --cases mine.jsonl            # rows with kind, answer, completion, is_right
    git worktree add ../former cdc7f01
    python benchmarks/bench_grading.py --former ../former            # the ratio of times, of this tree over that one

All grade case by case in processes of their own, ours and the former one's as a worker does, math-verify with its own
time-outs; the rounds run in turn. Hostile cases are left out: they wait for time-outs. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def is_equal_to_math_verify(key: str, completion: str) -> bool:
    """What a user of the library would write; it reads a bare LaTeX key only inside a box or dollar signs."""
    from math_verify import parse, verify

    is_marked = "\\boxed" in key or re.search(r"(?<!\\)\$", key)
    return bool(verify(parse(key if is_marked else f"\\boxed{{{key}}}"), parse(completion)))


def judge(tree: str, cases: list[dict]) -> None:
    """Prints the CPU seconds and the verdicts of the code in this folder; without a folder, of math-verify alone."""
    is_right = is_equal_to_math_verify
    if tree:
        sys.path.insert(0, tree)
        from grading import score

        worker_class = getattr(score, "RewardWorker", None) or score.Handler  # its name in a former version
        worker = worker_class("math", None)

        def is_right(key: str, completion: str) -> bool:
            return worker(("grade", score.Case(completion, key))).is_correct

    is_right("1", "\\boxed{1}")  # imports what it needs
    start = time.process_time()
    verdicts = [is_right(case["answer"], case["completion"]) for case in cases]
    print(json.dumps([time.process_time() - start, verdicts]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--cases", type=Path, default=ROOT / "tests/grading/math_cases.jsonl", help="a .jsonl file of cases")
    add("--former", help="the folder of another version, such as a git worktree")
    add("--rounds", type=int, default=3, help="times that each grades all cases")
    add("--judge", help=argparse.SUPPRESS)  # the process of one of them
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    cases = [json.loads(line) for line in args.cases.read_text().splitlines()]
    cases = [case for case in cases if "hostile" not in case.get("kind", "")]
    if args.judge is not None:
        judge(args.judge, cases)
        return
    trees = {"ours": str(ROOT), "math-verify alone": ""} | ({"former": args.former} if args.former else {})
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(args.rounds):
        for name, tree in trees.items():
            command = [sys.executable, __file__, "--cases", str(args.cases), "--judge", tree]
            used, verdicts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            seconds[name].append(used)
            if len(seconds[name]) == 1:
                pairs = [(is_right, case["is_right"]) for is_right, case in zip(verdicts, cases, strict=True)]
                positives, negatives = pairs.count((True, False)), pairs.count((False, True))
                agrees = f"{len(pairs) - positives - negatives:6} as the author says"
                print(f"{name:20}{agrees}, {positives} false positives, {negatives} negatives", flush=True)
    summary = {"cpu_seconds": {name: round(statistics.median(times), 2) for name, times in seconds.items()}}
    for name, times in list(seconds.items())[1:]:
        ratio = statistics.median(a / b for a, b in zip(seconds["ours"], times, strict=True))
        summary[f"over {name}"] = round(ratio, 3)
    print(json.dumps({"cases": len(cases), "rounds": args.rounds} | summary))


if __name__ == "__main__":
    main()
