"""What sampling ahead costs in accuracy: the CPU job, colocated and with a generation server, several seeds each.

    python benchmarks/compare_ahead.py --seeds 1 2 3

Each run is `bash scripts/tiny_cpu.sh` with the flags of its way. They go into --out_dir, one folder each; one that is
complete there is not run again. For each way the table has the means over the seeds: the last accuracy on held-out
problems, that of all evaluations from step 10 on (the learning curve), and how far they are from the colocated run's.
"noise" is twice the standard error of such a difference: that of the runs, by the spread over the seeds of all ways, or
that of the sampled answers, whichever is larger. "wasted" is the share of the tokens that the server has sampled, by
its own count, which no step trained and no evaluation graded. Prints the table and, last, one JSON line; exit status 1
if a way's last accuracy is further than the noise below the colocated one, or 2 % are wasted.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import psutil

from bench_common import ROOT, parser_of
from generation.start import SERVER
from report import read_metrics

WITH_SERVER = ["--engine", "server"]
WAYS = {
    "colocated": [],
    "0 ahead": [*WITH_SERVER, "--steps_ahead", "0"],
    "1 ahead": [*WITH_SERVER, "--steps_ahead", "1"],
    "2 ahead": [*WITH_SERVER, "--steps_ahead", "2"],
    "1 ahead, in flight": [*WITH_SERVER, "--steps_ahead", "1", "--in_flight"],
    "2 ahead, in flight": [*WITH_SERVER, "--steps_ahead", "2", "--in_flight"],
}
ACCURACY, STDERR = "eval/heldout/avg@4", "eval/heldout/stderr"
EVALUATED, TRAINED = 256 * 4, 32 * 8  # completions of an evaluation, and of a step
FIRST_OF_CURVE = 10
GOAL_WASTED = 0.02
COUNT = "vllm:generation_tokens_total"


def server_of(run: psutil.Process) -> tuple[str, str] | None:
    """(address, key) of the server that the run has started; None before and after."""
    try:
        for process in run.children(recursive=True):
            command = process.cmdline()
            if SERVER in command:
                port = command[command.index("--port") + 1]
                return f"http://127.0.0.1:{port}/metrics", process.environ()["VLLM_API_KEY"]
    except psutil.Error:  # one has ended meanwhile
        pass
    return None


def tokens_sampled(address: str, key: str) -> float | None:
    """By the server's own count; None if it does not answer."""
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"})
    try:
        lines = urllib.request.urlopen(request, timeout=2).read().decode().splitlines()
    except OSError:
        return None
    return sum(float(line.split()[-1]) for line in lines if line.startswith(COUNT))


def train(seed: int, flags: list[str], out_dir: Path) -> None:
    """One run. Leaves the count of its server's tokens in sampled.json. Raises RuntimeError if it fails."""
    environment = os.environ | {"SEED": str(seed), "OUT_DIR": str(out_dir)}
    log, sampled = (
        out_dir.with_suffix(".log"),
        {},
    )  # address of a server -> its tokens; one that is started again is new
    with log.open("a") as output:
        command = ["bash", "scripts/tiny_cpu.sh", *flags]
        run = psutil.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        while run.poll() is None:
            if server := server_of(run):
                sampled[server[0]] = tokens_sampled(*server) or sampled.get(server[0], 0.0)
            time.sleep(0.5)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: {log.read_text()[-3000:]}")
    (out_dir.with_suffix(".sampled.json")).write_text(json.dumps(sum(sampled.values())))


def summary(out_dir: Path) -> dict[str, float]:
    """Of one run: what the table is made from."""
    lines = read_metrics(out_dir)
    evaluations = [line for line in lines if ACCURACY in line]
    steps = [line for line in lines if "policy/loss" in line]
    used = sum(round(line["eval/heldout/tokens_mean"] * EVALUATED) for line in evaluations)
    used += sum(round(line["completion/tokens_mean"] * TRAINED) for line in steps)
    sampled = json.loads(out_dir.with_suffix(".sampled.json").read_text())
    return {
        "last": evaluations[-1][ACCURACY],
        "stderr": evaluations[-1][STDERR],
        "curve": float(np.mean([line[ACCURACY] for line in evaluations if line["step"] >= FIRST_OF_CURVE])),
        "lag": float(np.mean([line.get("rollout/lag_mean", 0.0) for line in steps])),
        "lag_max": max(line.get("rollout/lag_max", 0) for line in steps),
        "step_s": float(np.median([line["time/step_s"] - line.get("time/evaluate_s", 0.0) for line in steps[2:]])),
        "wasted": 1 - used / sampled if sampled else 0.0,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out_dir", type=Path, default=ROOT / "runs" / "compare_ahead")
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
    for seed in args.seeds:
        for way, runs in found.items():
            out_dir = args.out_dir / f"{way.replace(', ', '_').replace(' ', '_')}_seed{seed}"
            if not out_dir.with_suffix(".sampled.json").exists():
                train(seed, WAYS[way], out_dir)
            runs.append(summary(out_dir))
            print(f"seed {seed}, {way}: {json.dumps({name: round(x, 4) for name, x in runs[-1].items()})}", flush=True)
    mean = {way: {name: np.mean([run[name] for run in runs]) for name in runs[0]} for way, runs in found.items()}
    by_sampling = np.sqrt(np.mean([run["stderr"] ** 2 for runs in found.values() for run in runs]))
    by_run = {
        name: np.sqrt(np.mean([np.var([run[name] for run in runs], ddof=1) for runs in found.values()]))
        for name in ("last", "curve")
    }
    of_difference = 2 * math.sqrt(2 / len(args.seeds))
    noise = {"last": of_difference * max(by_run["last"], by_sampling), "curve": of_difference * by_run["curve"]}
    base = mean[args.ways[0]]
    print(f"noise: {noise['last']:.4f} of the last accuracy, {noise['curve']:.4f} of the curve\n")
    print(f"| way | last accuracy | less {args.ways[0]} | curve | less | tokens behind | s a step | wasted |")
    print("|---|---|---|---|---|---|---|---|")
    for way, x in mean.items():
        differences = [x["last"] - base["last"], x["curve"] - base["curve"]]
        print(
            f"| {way} | {x['last']:.4f} | {differences[0]:+.4f} | {x['curve']:.4f} | {differences[1]:+.4f} "
            f"| {x['lag']:.2f} (at most {x['lag_max']:.0f}) | {x['step_s']:.2f} | {x['wasted']:.2%} |"
        )
    worst = min(x["last"] - base["last"] for x in mean.values())
    wasted = max(run["wasted"] for runs in found.values() for run in runs)
    print(json.dumps({"worst": round(worst, 4), "noise": round(noise["last"], 4), "wasted": round(wasted, 4),
                      "goal": {"worst": -round(noise["last"], 4), "wasted": GOAL_WASTED}}))  # fmt: skip
    sys.exit(worst < -noise["last"] or wasted >= GOAL_WASTED)


if __name__ == "__main__":
    main()
