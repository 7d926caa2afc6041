"""What keeping the rollouts of a step costs: seconds that the loop waits, seconds in the background, bytes on the disk.

    python benchmarks/bench_keep.py

Random tokens and log-probs, which compress worse than real ones: --completions of --mean_tokens each. "The loop waits"
is the time in which `records/rollouts.py` takes the step over. Medians of --rounds. Prints a table and, last, one JSON
line.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from batch import Sampled
from bench_common import make_rollout, parser_of, print_table
from grading import Grade
from records.rollouts import Keeper, file_of

GOAL = 0.1  # seconds that the loop waits, at most


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--mean_tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = rng.integers(args.mean_tokens // 4, args.mean_tokens * 7 // 4, args.completions).tolist()
    rollout = replace(
        make_rollout(lengths, vocab=150_000, prompt_tokens=300, group_size=8),
        rollout_logprobs=[-rng.exponential(0.3, length).astype(np.float32) for length in lengths],
        grades=[Grade(1.0, "ok", {"math": 1.0}, "4")] * args.completions,
        texts=["word " * length for length in lengths],
    )
    logprobs = {b: values + rng.normal(0, 1e-3) for b, values in enumerate(rollout.rollout_logprobs)}
    indices_B, advantages = np.arange(args.completions), [np.full(length, 0.1, np.float32) for length in lengths]
    waits, writes = [], []
    with tempfile.TemporaryDirectory(prefix="bench_keep_") as folder:
        keeper = Keeper(Path(folder), max_gib=100.0, tokens=[b"token"] * 150_000)
        for step in range(args.rounds):
            start = time.perf_counter()
            keeper.keep(Sampled(step, 8, rollout, np.zeros_like(indices_B), indices_B, advantages, logprobs))
            waits.append(time.perf_counter() - start)
            keeper.wait()
            writes.append(time.perf_counter() - start)
        size = file_of(Path(folder), 0).stat().st_size / 1e6
    found = [sum(lengths) / 1e6, statistics.median(waits), statistics.median(writes), size]
    print_table(["million tokens", "the loop waits, s", "in the background, s", "MB"], [found])
    print(
        json.dumps({"seconds": round(max(waits), 4), "goal": GOAL, "mb_per_million_tokens": round(size / found[0], 2)})
    )


if __name__ == "__main__":
    main()
