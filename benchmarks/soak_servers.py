"""Whether runs with generation servers lose or repeat a prompt when servers and trainers are killed at random moments.

    python benchmarks/soak_servers.py --kills 10

Two kinds of runs, half of each with --steps_ahead 1, half with 2 in flight. In the first a server of two is killed
(SIGKILL) again and again, and must be started again by the run itself; in the second a rank or the launcher, after
which the same command is started again. A run that is complete is checked and followed by another one until all kills
are used.
Checked after each: every step has its line and its completions; of the steps that count (of a step that was trained
again after a kill, the last time) every prompt of the epoch was sampled and graded exactly once, with all its
completions; no token was further behind than --steps_ahead; nothing outlives the run by 15 s. Prints a line per run
and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from generation.start import SERVER
from report import read_steps
from reporting.history import read_lines
from soak import ENVIRONMENT, ROOT, phase_of, ranks_of, run_command

END_SECONDS = 15.0
GRACE = 30  # --grace_seconds of the first start
TRAINERS = ("rank 0", "rank 1", "launcher")
PROMPTS, GROUP = 8, 4  # of a step
ATTEMPT = "SOAK_ATTEMPT"  # environment: which start of a run this is
REWARD = f"""
import os, time
from pathlib import Path

def score(completion, answer, columns):
    time.sleep(0.02)
    with (Path(__file__).parent / f"graded_{{os.environ['{ATTEMPT}']}}.txt").open("a") as file:
        file.write(f"{{columns['number']}}\\n")
    return float(len(completion) % 3 == 0)
"""


def flags_of(model: Path, steps: int, num_servers: int, ahead: int) -> list[str]:
    """Of a run over one epoch, `steps` steps long; with --steps_ahead 2 updates are in flight."""
    flags = {
        "model": model, "train_data": model / "train.jsonl", "reward": f"{model}/listing_reward.py:score",
        "reward_workers": 1, "max_prompt_tokens": 16, "max_completion_tokens": 24, "prompts_per_step": PROMPTS,
        "group_size": GROUP, "prompts_per_update": PROMPTS // 2, "micro_batch_tokens": 512, "learning_rate": 1e-4,
        "total_steps": steps, "save_every": 5, "keep_checkpoints": 2, "engine": "server", "num_servers": num_servers,
        "steps_ahead": ahead,
    }  # fmt: skip
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))] + ["--in_flight"] * (ahead > 1)


def servers_of(launcher: psutil.Process) -> list[psutil.Process]:
    try:
        children = launcher.children(recursive=True)
        return [each for each in children if SERVER in each.cmdline()]
    except psutil.Error:  # one has ended meanwhile
        return []


def is_alive(process: psutil.Process) -> bool:
    """Not if it has ended and nobody has asked yet how."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(out_dir: Path, flags: list[str], attempt: int) -> psutil.Popen:
    """A flag that may change, and changes nothing, tells the starts apart in starts.jsonl."""
    command = run_command(out_dir, [*flags, "--grace_seconds", str(GRACE + attempt)])
    environment = ENVIRONMENT | {ATTEMPT: f"{out_dir.name}_{attempt}"}
    with out_dir.with_suffix(".log").open("ab") as output:
        return psutil.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True)


def failure(out_dir: Path) -> RuntimeError:
    return RuntimeError(f"{out_dir.name} failed: {out_dir.with_suffix('.log').read_text()[-3000:]}")


def kill_servers(out_dir: Path, flags: list[str], rng: random.Random, count: int, longest: float) -> list[str]:
    """Kills servers of one run, at most `count`: the first within `longest` seconds, the next within half of that.

    Returns the phases that rank 0 was in. The run must go on by itself.
    """
    kills: list[str] = []
    run, moment = start(out_dir, flags, 0), rng.uniform(0, longest)
    last = time.monotonic()
    while run.poll() is None:
        time.sleep(0.01)
        if len(kills) < count and time.monotonic() - last >= moment and (servers := servers_of(run)):
            rng.choice(servers).kill()
            kills.append(phase_of(out_dir, 0, run))
            last, moment = time.monotonic(), rng.uniform(0, longest / 2)
    if run.returncode:
        raise failure(out_dir)
    return kills


def kill_trainers(out_dir: Path, flags: list[str], rng: random.Random, count: int, longest: float) -> list[str]:
    """Starts a run again until it is complete; kills a rank or the launcher of the first starts, at most `count`.

    Returns what was hit. Raises RuntimeError if a process outlives its run, servers and their workers included.
    """
    kills: list[str] = []
    while True:
        run = start(out_dir, flags, len(kills))
        moment = time.monotonic() + (rng.uniform(0, longest) if len(kills) < count else math.inf)
        while run.poll() is None and time.monotonic() < moment:
            time.sleep(0.01)
        if run.poll() is None:
            seen, ranks, which = run.children(recursive=True), ranks_of(run), rng.randrange(3)
            which = which if len(ranks) == 2 else 2
            where = phase_of(out_dir, which % 2, run)
            os.kill([*ranks, run.pid][which] if len(ranks) == 2 else run.pid, signal.SIGKILL)
            kills.append(f"{where} ({TRAINERS[which]})")
            run.wait(60)
            if left := [each for each in psutil.wait_procs(seen, timeout=END_SECONDS)[1] if is_alive(each)]:
                raise RuntimeError(f"{left} have outlived their run by {END_SECONDS:g} s")
        elif run.returncode:
            raise failure(out_dir)
        else:
            return kills


def faults_of(out_dir: Path, model: Path, steps: int, ahead: int) -> list[str]:
    """What is wrong with a complete run; see above."""
    records = read_steps(out_dir / "metrics.jsonl")
    trained = [record for record in records if "policy/loss" in record]
    found = []
    if [record["step"] for record in trained] != list(range(1, steps + 1)):
        found.append(f"it has steps {[record['step'] for record in trained]}")
    if (lag := max(record["rollout/lag_max"] for record in trained)) > ahead:
        found.append(f"a token is {lag:.0f} steps behind")
    starts = read_lines(out_dir / "starts.jsonl")
    by_step: dict[int, list[str]] = {}
    for started in starts:  # a start grades its steps one after the other; the last one it may have left unfinished
        command = started["command"]
        attempt = int(command[command.index("--grace_seconds") + 1]) - GRACE
        file = model / f"graded_{out_dir.name}_{attempt}.txt"
        graded = file.read_text().split() if file.exists() else []
        for i in range(0, len(graded), PROMPTS * GROUP):
            by_step[started["resumed_from"] + 1 + i // (PROMPTS * GROUP)] = graded[i : i + PROMPTS * GROUP]
    count = Counter(number for numbers in by_step.values() for number in numbers)
    expected = {str(number): GROUP for number in range(steps * PROMPTS)}
    wrong = sorted(number for number in {**count, **expected} if count[number] != expected.get(number, 0))
    return found + [f"prompt {number} was sampled {count[number]} times, not {GROUP}" for number in wrong[:5]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="how many servers are killed, and how many trainers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="length of each run: one epoch")
    parser.add_argument("--only", choices=("servers", "trainers"), help="kill these alone")
    args = parser.parse_args()
    from bench_common import save_random_model  # torch

    rng = random.Random(args.seed)
    done: Counter[str] = Counter()
    found: list[str] = []
    runs = 0
    with tempfile.TemporaryDirectory(prefix="soak_") as temporary:
        folder = Path(temporary)
        model = folder / "model"
        save_random_model(model, hidden=64, layers=2, ffn=128, mean_tokens=8)
        (model / "listing_reward.py").write_text(REWARD)
        rows = [{"problem": f"{i % 89}+{i}", "answer": "1", "number": i} for i in range(args.steps * PROMPTS)]
        (model / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        begin = time.monotonic()
        kill_servers(folder / "undisturbed", flags_of(model, args.steps, 1, 1), rng, 0, 0.0)
        longest = time.monotonic() - begin
        print(f"undisturbed: {longest:.0f} s", flush=True)
        for kind, kill, num_servers in (("servers", kill_servers, 2), ("trainers", kill_trainers, 1)):
            for ahead in (1, 2):
                left = args.kills // 2 if args.only in (None, kind) else 0
                while left:
                    out_dir, runs = folder / f"run_{runs}_{kind}_{ahead}", runs + 1
                    kills = kill(out_dir, flags_of(model, args.steps, num_servers, ahead), rng, left, longest)
                    left -= len(kills)
                    done[kind] += len(kills)
                    wrong = faults_of(out_dir, model, args.steps, ahead)
                    where = ", ".join(f"{count} x {place}" for place, count in Counter(kills).most_common())
                    print(
                        f"{ahead} ahead, {len(kills)} kills of {kind}: {where}: {wrong or 'nothing wrong'}", flush=True
                    )
                    found += [f"{out_dir.name}: {each}" for each in wrong]
    print(json.dumps({"kills": done, "wrong": found, "seed": args.seed, "goal": []}))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
