"""Whether the time of a step is linear in its tokens: seconds per token at one and two ranks, as P, G and lengths grow.

    python benchmarks/bench_scaling.py

Each row is a run of `train_grpo.py` (fp32, FSDP2, vLLM, one thread per rank, one update a step) on a random model whose
completions all have the length of their limit; the median of the steps after the first two counts. Sampling and
learning are the phases `sample` and `update`. Relative is the time per token of the whole step over that of the
smallest run with as many ranks. Rows are repeated --rounds times, in turn, and the median is reported. The goal: for
each number of ranks, no row takes more than 1.1 times the time per token of the smallest one, so more tokens cost at
most in proportion. Prints a table and, last, one JSON line, which also has the speed of two ranks over one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench_common import parser_of, print_table, save_random_model, train

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
PHASES = ("time/step_s", "time/sample_s", "time/update_s")


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    hidden = "hidden size; the FFN has 4 times that, a head 64; vocabulary 64"
    add("--hidden", type=int, default=256, help=hidden)
    add("--layers", type=int, default=4, help="decoder layers")
    add("--prompts", type=int, default=16, help="P of the smallest run")
    add("--group_size", type=int, default=8, help="G of the smallest run")
    add("--max_tokens", type=int, default=32, help="tokens of a completion of the smallest run")
    add("--micro_batch_tokens", type=int, default=4096, help="token cap of all runs")
    add("--steps", type=int, default=5, help="steps of a run, the first two of which are not counted")
    add("--rounds", type=int, default=3, help="runs of each row, in turn")
    add("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    add("--only", nargs="*", help="names of sizes to run; default: all")
    args = parser.parse_args()

    chosen = {"smallest", *(SIZES if args.only is None else args.only)}
    sizes = {name: factors for name, factors in SIZES.items() if name in chosen}
    smallest = (args.prompts, args.group_size, args.max_tokens)
    per_token: dict[tuple[int, str], list[list[float]]] = {(ranks, name): [] for ranks in args.ranks for name in sizes}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_random_model(model, args.hidden, args.layers, 4 * args.hidden)
        for round_index in range(args.rounds):
            for ranks, name in per_token:
                p, g, length = (a * b for a, b in zip(sizes[name], smallest, strict=True))
                flags = {"prompts_per_step": p, "group_size": g, "max_completion_tokens": length}
                flags |= {"total_steps": args.steps, "micro_batch_tokens": args.micro_batch_tokens}
                out_dir = Path(folder) / f"{ranks}_{name}_{round_index}".replace(" ", "_")
                steps, _ = train(model, out_dir, ranks, flags)
                times = [statistics.median(step[phase] for step in steps) / (p * g * length) * 1e6 for phase in PHASES]
                per_token[ranks, name].append(times)
                told = f"{ranks} ranks, {name}: {times[0]:.0f} us a token"
                print(f"round {round_index + 1}: {told}", file=sys.stderr, flush=True)
    medians = {key: [statistics.median(times) for times in zip(*runs, strict=True)] for key, runs in per_token.items()}
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
