"""The cost of the guard against drift: a clean run of `train_grpo.py` on a random model in bf16. A false alarm ends it.

    OMP_NUM_THREADS=1 python benchmarks/bench_drift.py --steps 1000
    OMP_NUM_THREADS=1 python benchmarks/bench_drift.py --steps 1000 --lora_rank 8

Gives the median share of a step that the comparison takes (`time/drift_s`; on the CPU the engine's sums are made during
the sync and cost at most as much again). The goal is a share below 0.01. Prints, last, one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench_common import parser_of, save_random_model, train

GOAL = 0.01


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--hidden", type=int, default=128, help="hidden size; the FFN has 4 times that")
    add("--layers", type=int, default=2, help="decoder layers")
    add("--steps", type=int, default=1000, help="steps of the run")
    add("--prompts", type=int, default=8, help="prompts of a step")
    add("--group_size", type=int, default=4, help="completions of each")
    add("--max_tokens", type=int, default=32, help="token limit of a completion; it is reached")
    add("--lora_rank", type=int, default=0, help="0: all weights are trained")
    add("--ranks", type=int, default=1, help="ranks; each has an engine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_drift_") as folder:
        model, out_dir = Path(folder) / "model", Path(folder) / "run"
        save_random_model(model, args.hidden, args.layers, 4 * args.hidden)
        flags = {
            "prompts_per_step": args.prompts, "group_size": args.group_size, "lora_rank": args.lora_rank,
            "max_completion_tokens": args.max_tokens, "total_steps": args.steps, "dtype": "bfloat16",
            "learning_rate": 1e-6,
        }  # fmt: skip
        metrics, _ = train(model, out_dir, args.ranks, flags)
    shares = [each["time/drift_s"] / each["time/step_s"] for each in metrics]
    gaps = [each["policy/rollout_gap_mean"] for each in metrics]
    temperatures = [each["policy/rollout_temperature"] for each in metrics]
    summary = {
        "ratio": round(statistics.median(shares), 5), "goal": GOAL, "steps": args.steps,
        "step_s": round(statistics.median(each["time/step_s"] for each in metrics), 3),
        "drift_s": round(statistics.median(each["time/drift_s"] for each in metrics), 5),
        "largest_gap": round(max(gaps), 5), "temperatures": [round(min(temperatures), 4), round(max(temperatures), 4)],
    }  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
