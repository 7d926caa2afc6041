"""Where the time of a finished run went: seconds and share of each phase, from its metrics.jsonl.

    python benchmarks/bench_phases.py runs/tiny_cpu

The first step is left out, because it fills caches. Prints a table and, last, one JSON line with the share of what is
neither sampling nor learning (reward, packing, advantage, sync and log) in the time of the steps without evaluation and
checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import read_metrics, seconds_of_phases

GOAL = 0.10
OVERHEAD = ("reward", "pack", "advantage", "sync", "log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, help="a run folder")
    records = [record for record in read_metrics(parser.parse_args().run_dir) if record["step"] > 1]
    seconds: dict[str, float] = {}
    for record in records:
        for phase, value in seconds_of_phases(record).items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    total = sum(record["time/step_s"] for record in records)
    seconds["between phases"] = total - sum(seconds.values())
    print(f"{'phase':16}{'seconds':>10}{'share':>8}")
    for phase, value in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{phase:16}{value:10.2f}{value / total:8.1%}")
    step_seconds = total - seconds.get("evaluate", 0.0) - seconds.get("checkpoint", 0.0)
    share = sum(seconds[phase] for phase in OVERHEAD) / step_seconds
    summary = {"ratio": round(share, 4), "goal": GOAL, "steps": len(records)}
    print(json.dumps(summary | {"step_seconds": round(total / len(records), 3)}))


if __name__ == "__main__":
    main()
