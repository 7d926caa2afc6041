"""Our mathematical verifier against math-verify alone, on written cases: mistakes and time, case by case in turn.

    python benchmarks/bench_math.py                      # tests/grading/math_cases.jsonl
    python benchmarks/bench_math.py --cases mine.jsonl   # rows with kind, answer, completion, is_right

Ours runs as in training, in a worker process with a time-out; math-verify runs in this process with its own time-outs
of 5 s. Times leave the hostile cases out. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from math_verify import parse, verify

from flags import Grading
from grading import Case
from reward import Grader

CASES = Path(__file__).parent.parent / "tests" / "grading" / "math_cases.jsonl"
OURS, THEIRS = "ours", "math-verify alone"


def is_equal_to_math_verify(key: str, completion: str) -> bool:
    """What a user of the library would write; it reads a bare LaTeX key only inside a box or dollar signs."""
    is_marked = "\\boxed" in key or re.search(r"(?<!\\)\$", key)
    return bool(verify(parse(key if is_marked else f"\\boxed{{{key}}}"), parse(completion)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=Path, default=CASES, help="a .jsonl file of cases (default: %(default)s)")
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    cases = [json.loads(line) for line in args.cases.read_text().splitlines()]
    grader = Grader(Grading("math"), num_workers=1)
    judges = {
        OURS: lambda case: grader.grade([Case(case["completion"], case["answer"])])[0].is_correct,
        THEIRS: lambda case: is_equal_to_math_verify(case["answer"], case["completion"]),
    }
    seconds, positives, negatives = dict.fromkeys(judges, 0.0), dict.fromkeys(judges, 0), dict.fromkeys(judges, 0)
    for case in cases:
        for name, judge in judges.items():
            start = time.perf_counter()
            is_correct = judge(case)
            if "hostile" not in case["kind"]:
                seconds[name] += time.perf_counter() - start
            positives[name] += is_correct and not case["is_right"]
            negatives[name] += not is_correct and case["is_right"]
    grader.close()
    print(f"{'':20}{'as the author says':>20}{'false positives':>17}{'false negatives':>17}{'seconds':>10}")
    for name in judges:
        agrees = len(cases) - positives[name] - negatives[name]
        print(f"{name:20}{agrees:20}{positives[name]:17}{negatives[name]:17}{seconds[name]:10.1f}")
    mistakes = positives[OURS] + negatives[OURS]
    summary = {"cases": len(cases), "mistakes": mistakes, "false_positives": positives[OURS]}
    print(json.dumps(summary | {"ratio": round(seconds[OURS] / seconds[THEIRS], 3), "goal": 1.0}))


if __name__ == "__main__":
    main()
