"""The mathematical verifier: mistakes on written cases, and CPU time, ours and math-verify alone.

    python benchmarks/bench_grading.py                               # tests/grading/math_cases.jsonl
    python benchmarks/bench_grading.py --cases mine.jsonl            # rows with kind, answer, completion, is_right

Both grade case by case in processes of their own, ours as a worker does, math-verify with its own time-outs; the rounds
run in turn. Hostile cases are left out: they wait for time-outs. Prints a table and a JSON line.
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


def judge(name: str, cases: list[dict]) -> None:
    """Prints the CPU seconds and the verdicts of our code, or of math-verify alone."""
    if name == "ours":
        sys.path.insert(0, str(ROOT))
        from grading.score import Case, Handler

        handler = Handler("math", None)
        is_right = [lambda case=case: handler(("grade", Case(case["completion"], case["answer"]))) for case in cases]
    else:
        is_right = [lambda case=case: is_equal_to_math_verify(case["answer"], case["completion"]) for case in cases]
        is_equal_to_math_verify("1", "\\boxed{1}")
    start = time.process_time()
    verdicts = [grade() for grade in is_right]
    seconds = time.process_time() - start
    print(json.dumps([seconds, [bool(each.is_correct if name == "ours" else each) for each in verdicts]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--cases", type=Path, default=ROOT / "tests/grading/math_cases.jsonl", help="a .jsonl file of cases")
    add("--rounds", type=int, default=3, help="times that each grades all cases")
    add("--judge", help=argparse.SUPPRESS)  # the process of one of them
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    cases = [json.loads(line) for line in args.cases.read_text().splitlines()]
    cases = [case for case in cases if "hostile" not in case.get("kind", "")]
    if args.judge is not None:
        judge(args.judge, cases)
        return
    seconds: dict[str, list[float]] = {"ours": [], "math-verify alone": []}
    for round_index in range(args.rounds):
        for name, times in seconds.items():
            command = [sys.executable, __file__, "--cases", str(args.cases), "--judge", name]
            used, verdicts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            times.append(used)
            if round_index == 0:
                pairs = [(is_right, case["is_right"]) for is_right, case in zip(verdicts, cases, strict=True)]
                positives, negatives = pairs.count((True, False)), pairs.count((False, True))
                agrees = len(pairs) - positives - negatives
                counts = f"{agrees:6} as the author says, {positives} false positives, {negatives} negatives"
                print(f"{name:20}{counts}", flush=True)
    medians = {name: round(statistics.median(times), 2) for name, times in seconds.items()}
    print(json.dumps({"cases": len(cases), "cpu_seconds": medians, "rounds": args.rounds}))


if __name__ == "__main__":
    main()
