"""What sampling ahead saves, without a model: a generation server and a trainer that sleep in place of computing.

    python benchmarks/bench_ahead.py

The client, the pacing, the pauses and the transfer of a few small weights are those of a run (`rollout_server.py`,
`sampling.py`); the server is that of `tests/fake_server.py`. Both phases of a step take --phase_s seconds. Runs with
--steps_ahead 0, 1 and 2, with and without --in_flight, take turns; medians of all steps but the first two. The goal is
at most 0.6 of the time of --steps_ahead 0. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from bench_common import parser_of
from fake_server import FakeServer, engine_of, sampler_over, synced

GOAL = 0.6
TOKENS = 10  # of a completion
WAYS = [(0, False), (1, False), (1, True), (2, False), (2, True)]  # --steps_ahead, --in_flight


def seconds_of_steps(ahead: int, in_flight: bool, phase_s: float, steps: int) -> list[float]:
    """Of each step of a run, as `train_grpo.py` goes through it."""
    seconds = []
    with engine_of(FakeServer(phase_s / TOKENS), in_flight=in_flight) as engine:
        sampler = sampler_over(engine, steps_ahead=ahead, max_completion_tokens=TOKENS)
        synced(engine)
        for step in range(1, steps + 1):
            start = time.perf_counter()
            sampler.collect(step)
            sampler.start(step, steps)
            time.sleep(phase_s)
            synced(engine)
            seconds.append(time.perf_counter() - start)
    return seconds[2:]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--phase_s", type=float, default=0.5, help="seconds of sampling a step, and of training it")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    args = parser.parse_args()
    found: dict[tuple[int, bool], list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            found[way] += seconds_of_steps(*way, args.phase_s, args.steps)
    serial = statistics.median(found[0, False])
    print("| --steps_ahead | --in_flight | s a step | of --steps_ahead 0 |\n|---|---|---|---|")
    ratios = {}
    for (ahead, in_flight), seconds in found.items():
        median = statistics.median(seconds)
        ratios[f"{ahead}{' in flight' * in_flight}"] = round(median / serial, 3)
        print(f"| {ahead} | {'yes' if in_flight else 'no'} | {median:.3f} | {median / serial:.2f} |")
    print(json.dumps({"ratio": max(ratio for name, ratio in ratios.items() if name != "0"), "goal": GOAL} | ratios))


if __name__ == "__main__":
    main()
