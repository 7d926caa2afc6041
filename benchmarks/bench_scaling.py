"""Whether the time of a step is linear in its tokens: seconds per token at one and two ranks, and as P, G and lengths grow.

    python benchmarks/bench_scaling.py

Each row is a run of `train_grpo.py` (fp32, FSDP2, vLLM, one thread per rank, one update a step) on a random model whose completions all
have the length of their limit; the median of the steps after the first two counts. Sampling and learning are the phases `sample` and
`update`. Relative is the time per token of the whole step over that of the smallest run with as many ranks. Rows are repeated --rounds
times, in turn, and the median is taken. The goal: no row with more than 1.1 times the time per token of the smallest, ranks apart: more
tokens cost at most in proportion. Prints a table and, last, one JSON line, which also has the speed of two ranks over one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench_common import print_table, save_random_model, train

GOAL = 1.1
SIZES = {  # name -> (P, G, tokens of a completion), as multiples of the smallest
    "smallest": (1, 1, 1),
    "P x 2": (2, 1, 1),
    "P x 4": (4, 1, 1),
    "G x 2": (1, 2, 1),
    "G x 4": (1, 4, 1),
    "lengths x 2": (1, 1, 2),
    "lengths x 4": (1, 1, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--hidden", type=int, default=256, help="hidden size; the FFN has 4 times that, a head 64; vocabulary 64"
    )
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--prompts", type=int, default=16, help="P of the smallest run")
    parser.add_argument("--group_size", type=int, default=8, help="G of the smallest run")
    parser.add_argument("--max_tokens", type=int, default=32, help="tokens of a completion of the smallest run")
    parser.add_argument("--micro_batch_tokens", type=int, default=4096, help="of all runs")
    parser.add_argument("--steps", type=int, default=5, help="steps of a run, the first two of which are not counted")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row, in turn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--only", nargs="*", help="names of sizes to run; default: all")
    args = parser.parse_args()

    sizes = {
        name: factors for name, factors in SIZES.items() if args.only is None or name in args.only or name == "smallest"
    }
    per_token: dict[tuple[int, str], list[tuple[float, float, float]]] = {
        (ranks, name): [] for ranks in args.ranks for name in sizes
    }
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_random_model(model, args.hidden, args.layers, 4 * args.hidden)
        for round_index in range(args.rounds):
            for ranks, name in per_token:
                p, g, length = (
                    a * b for a, b in zip(sizes[name], (args.prompts, args.group_size, args.max_tokens), strict=True)
                )
                flags = {
                    "prompts_per_step": p,
                    "group_size": g,
                    "max_completion_tokens": length,
                    "total_steps": args.steps,
                }
                out_dir = Path(folder) / f"{ranks}_{name}_{round_index}".replace(" ", "_")
                steps, _ = train(model, out_dir, ranks, flags | {"micro_batch_tokens": args.micro_batch_tokens})
                columns = ("time/step_s", "time/sample_s", "time/update_s")
                times = [
                    statistics.median(step[column] for step in steps) / (p * g * length) * 1e6 for column in columns
                ]
                per_token[ranks, name].append(tuple(times))
                print(
                    f"round {round_index + 1}: {ranks} ranks, {name}: {times[0]:.0f} us a token",
                    file=sys.stderr,
                    flush=True,
                )
    medians = {
        key: [statistics.median(column) for column in zip(*runs, strict=True)] for key, runs in per_token.items()
    }
    relative = {key: values[0] / medians[key[0], "smallest"][0] for key, values in medians.items()}
    rows = [[f"{ranks} ranks, {name}", *medians[ranks, name], relative[ranks, name]] for ranks, name in medians]
    print_table(["us per completion token", "step", "sampling", "learning", "relative"], rows)
    larger = [value for (_, name), value in relative.items() if name != "smallest"]
    summary: dict[str, object] = {"ratio": round(max(larger, default=1.0), 3), "goal": GOAL}
    if {1, 2} <= set(args.ranks):
        speed = [medians[1, name][0] / medians[2, name][0] for name in sizes]
        summary["speed_of_two_ranks"] = round(statistics.median(speed), 2)
    print(json.dumps(summary | {"rounds": args.rounds}))


if __name__ == "__main__":
    main()
