"""Whether the host memory of a run grows: MB a step, of each rank and of the processes below the ranks.

    python benchmarks/bench_leak.py                       # 300 steps of a tiny model on 2 ranks, about 5 minutes
    python benchmarks/bench_leak.py --steps 1000 --flags --lora_rank 8

The lengths of the completions vary, so every step packs other shapes; each tenth step evaluates and saves. What is
measured is the anonymous memory (RssAnon of Linux: neither files nor what processes share) when a step's line is
written. The growth is the slope of a line through the last 80 % of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from bench_common import ROOT, parser_of, print_table, save_random_model

MB = 10**6
WARM_UP = 0.2  # share of the steps that the line leaves out
GOAL = 1.0  # MB a step
SETTINGS = """--max_prompt_tokens 16 --max_completion_tokens 48 --prompts_per_step 8 --group_size 8
    --prompts_per_update 4 --micro_batch_tokens 512 --kl_coef 0.001 --learning_rate 1e-12 --reward_workers 1
    --eval_every 10 --save_every 10 --keep_checkpoints 1"""


def anonymous(process: psutil.Process) -> int:
    """RssAnon in bytes; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def sizes(launcher: psutil.Process) -> list[int]:
    """Of the ranks in the order of their start, and last of all processes below them together."""
    ranks = sorted(launcher.children(), key=lambda process: process.pid)
    below = [child for rank in ranks for child in rank.children(recursive=True)]
    return [*map(anonymous, ranks), sum(map(anonymous, below))]


def watch(command: list[str], metrics: Path, output: Path) -> tuple[list[int], np.ndarray]:
    """(steps, sizes in bytes at the end of each) of the run. Raises RuntimeError if it fails."""
    settings = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    settings.setdefault("OMP_NUM_THREADS", "1")
    steps, found = [], []
    with output.open("w") as out:
        launcher = psutil.Popen(command, cwd=ROOT, env=settings, stdout=out, stderr=subprocess.STDOUT)
        while launcher.poll() is None:
            count = metrics.read_text().count("\n") if metrics.exists() else 0
            if count > (steps[-1] if steps else 0):
                steps.append(count)
                found.append(sizes(launcher))
            time.sleep(0.02)
    if launcher.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {launcher.returncode}:\n{output.read_text()[-20000:]}")
    return steps[:-1], np.array(found[:-1])  # at the last step the run is ending


def growth(steps: list[int], sizes_SR: np.ndarray) -> np.ndarray:
    """MB a step of each column."""
    is_counted = np.array(steps) > WARM_UP * steps[-1]
    return np.polyfit(np.array(steps)[is_counted], sizes_SR[is_counted] / MB, deg=1)[0]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=300, help="steps of the run")
    add("--ranks", type=int, default=2, help="ranks of the run")
    add("--flags", nargs=argparse.REMAINDER, default=[], help="all that follows goes to train_grpo.py")
    return parser.parse_args()


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        model, out_dir = Path(folder) / "model", Path(folder) / "run"
        save_random_model(model, hidden=128, layers=3, ffn=384, num_rows=4096, mean_tokens=20)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
        data = ["--train_data", f"{model}/train.jsonl", "--eval_data", f"{model}/train.jsonl#64"]
        flags = ["--model", f"{model}", *data, "--out_dir", f"{out_dir}", "--reward", f"{model}/reward.py:score"]
        flags += [*SETTINGS.split(), "--total_steps", str(args.steps), *args.flags]
        metrics = out_dir / "metrics.jsonl"
        steps, sizes_SR = watch([*launcher, "train_grpo.py", *flags], metrics, Path(folder) / "output")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    slopes = growth(steps, sizes_SR)
    names = [f"rank {i}" for i in range(args.ranks)] + ["below the ranks"]
    marks = [0, len(steps) // 5, -1]
    rows = []
    for name, sizes_S, slope in zip(names, sizes_SR.T / MB, slopes, strict=True):
        rows.append([name, *(f"{sizes_S[i]:.0f}" for i in marks), f"{slope:.3f}"])
    print_table(["process", *(f"MB, step {steps[i]}" for i in marks), "MB a step"], rows)
    seconds = statistics.median(line["time/step_s"] for line in lines)
    largest = round(float(slopes[:-1].max()), 3)
    print(json.dumps({"steps": args.steps, "mb_per_step": largest, "goal": GOAL, "median_step_s": round(seconds, 3)}))


if __name__ == "__main__":
    main()
