r"""What published methods do on the CPU job: docs/methods.png and the table of docs/papers.md.

    .venv/bin/python benchmarks/method_curves.py                     # all of METHODS, three seeds each
    .venv/bin/python benchmarks/method_curves.py --methods gspo dapo # trains some of them
    .venv/bin/python benchmarks/method_curves.py --methods           # trains none: picture and table of what is there

Each is `scripts/paper.sh NAME scripts/tiny_cpu.sh` with the job's batch, rate and 15 steps, and an evaluation after
each step: the 256 held-out sums, one completion each. Started again, it skips what is complete. One run takes about a
minute on two quiet cores; the curves do not depend on how fast the machine is.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from bench_common import ROOT, parser_of
from runtime.history import read_config, read_metrics

METHODS = {  # a name of scripts/paper.sh -> what the CPU job cannot take of its flags
    "grpo": "",
    "dr_grpo": "",
    "dapo": "--reward exact,length --overlong_cache_tokens 12",  # its own: of 20,480 tokens the last 4,096
    "lite_ppo": "",
    "rloo": "",
    "reinforce++": "",
    "reinforce++_baseline": "",
    "maxrl": "",
    "opo": "",
    "gpg": "",
    "gspo": "",
    "cispo": "",
    "sapo": "",
    "dppo_tv": "",
}
EVALUATION = "--eval_every 1 --eval_samples 1 --save_every 15"
ACCURACY = "eval/heldout/avg@1"
GOAL = 0.9


@dataclass(frozen=True)
class Curve:
    """One run: its held-out accuracy by step, from 0, and the tokens that it has sampled for its updates."""

    accuracies: list[float]
    tokens: float

    @property
    def steps_to_goal(self) -> int | None:
        return next((step for step, accuracy in enumerate(self.accuracies) if accuracy >= GOAL), None)


def read_curve(run_dir: Path) -> Curve | None:
    """What a complete run has logged; None if it is not complete."""
    lines = read_metrics(run_dir)
    config = read_config(run_dir)
    if len(lines) <= config["total_steps"]:
        return None
    sampled = [line.get("sampling/prompts", config["prompts_per_step"]) * config["group_size"] for line in lines[1:]]
    lengths = [line["completion/tokens_mean"] for line in lines[1:]]
    tokens = sum(number * length for number, length in zip(sampled, lengths, strict=True))
    return Curve([line[ACCURACY] for line in lines], tokens)


def train(method: str, seed: int, folder: Path) -> None:
    """Runs the method, as a user would."""
    flags = [*METHODS[method].split(), *EVALUATION.split(), "--seed", str(seed)]
    command = ["bash", "scripts/paper.sh", method, "scripts/tiny_cpu.sh", *flags]
    environment = os.environ | {"OUT_DIR": str(folder / f"{method}_seed{seed}")}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)


def draw(curves: dict[str, list[Curve]], file: Path) -> None:
    """A panel for each method: its seeds in colour, the mean of GRPO's in grey."""
    figure = Figure(figsize=(14, 2.1 * -(-len(curves) // 5)), layout="constrained")
    axes = figure.subplots(-(-len(curves) // 5), 5, sharex=True, sharey=True).flat
    grpo = zip(*(run.accuracies for run in curves.get("grpo", [])), strict=True)
    mean = [statistics.mean(accuracies) for accuracies in grpo]
    for (method, runs), axis in zip(curves.items(), axes, strict=False):
        axis.axhline(GOAL, color="black", linewidth=0.5)
        axis.plot(mean, color="grey", linewidth=3, alpha=0.5)
        for run in runs:
            axis.plot(run.accuracies, linewidth=1)
        axis.set(title=method, ylim=(0, 1))
    for axis in list(axes):  # without a method
        axis.axis("off")
    figure.supxlabel("step")
    figure.supylabel("held-out accuracy")
    figure.savefig(file, dpi=80)


def table_row(method: str, runs: list[Curve]) -> str:
    """The method, its accuracy after the last step, and of each seed the steps to GOAL and the tokens sampled."""
    finals = [run.accuracies[-1] for run in runs]
    accuracy = f"{statistics.mean(finals):.3f} ({min(finals):.3f} to {max(finals):.3f})"
    steps = ", ".join(str(run.steps_to_goal or "never") for run in runs)
    tokens = statistics.mean(run.tokens for run in runs) / 1000
    return f"| `{method}` | {accuracy} | {steps} | {tokens:.0f} |"


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--methods", nargs="*", default=list(METHODS), choices=METHODS, help="methods to train; may be none")
    add("--seeds", type=int, default=3, help="runs of each method")
    add("--folder", type=Path, default=ROOT / "runs" / "methods", help="folder of the runs")
    add("--picture", type=Path, default=ROOT / "docs" / "methods.png", help="file of the picture")
    args = parser.parse_args()
    for seed, method in itertools.product(range(1, args.seeds + 1), args.methods):
        train(method, seed, args.folder)
    curves = {}
    for method in METHODS:
        runs = [read_curve(folder) for folder in sorted(args.folder.glob(f"{method}_seed*"))]
        if complete := [run for run in runs if run]:
            curves[method] = complete
    if not curves:
        parser.error(f"--folder {args.folder} holds no complete run of {EVALUATION}; leave --methods out to make them.")
    draw(curves, args.picture)
    print(f"| `paper.sh` | held-out after the last step | steps to {GOAL}, each seed | 1,000 tokens |")
    print("|---|---|---|---|")
    print(*(table_row(method, runs) for method, runs in curves.items()), sep="\n")


if __name__ == "__main__":
    main()
