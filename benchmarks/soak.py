"""Whether a run that is killed again and again ends as the one that nobody disturbs: weights and log, bit for bit.

    python benchmarks/soak.py --kills 100
    python benchmarks/soak.py --kills 10 --servers

A short training of a random model on two ranks is started again after every kill until it is complete, and then another
one is begun, until all kills are used. Each kill comes at a random moment, from the first instant on; its target (a
rank, the launcher, all of them at once) and its signal (TERM, KILL) are drawn, too. Checked after each: everything has
ended within 60 s, no rank outlives its launcher by 5 s, SIGTERM to the launcher is exit status 75 (0 if the run was
complete, 143 while Python starts), and at the end the exported policy and the last line of each step equal the
undisturbed run's.

With --servers two generation servers sample ahead, and a server is a target, too. A run samples anew after each start,
so what is checked at the end is that every prompt of the epoch was trained once, with all its completions, by weights
as old as is allowed.

Prints what was hit and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).parent.parent))

from extras.servers.start import SERVER

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
END_SECONDS = 60.0
ORPHAN_SECONDS = 5.0
TARGETS = ("rank 0", "rank 1", "launcher", "all")
PROMPTS, GROUP = 8, 4  # a step samples so many
SERVERS = ["--engine", "server", "--generation_gpus", "0", "1", "--steps_ahead", "2", "--in_flight"]
REWARD = """
import time
def score(completion, answer, columns):
    time.sleep(0.02)
    return float(len(completion) % 3 == 0)
"""


class Kill(NamedTuple):
    """One of them."""

    target: str
    signal: str
    where: str  # the phase that the run was in, if its folder tells


def start(out_dir: Path, flags: list[str], output: Path) -> subprocess.Popen[bytes]:
    """Starts train_grpo.py on two ranks, by this project's launcher."""
    launcher = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--ranks", "2"]
    command = [*launcher, "train_grpo.py", *flags, "--out_dir", str(out_dir)]
    with output.open("ab") as file:
        return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=file, start_new_session=True)


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """The process ids of its children, in the order of their starts."""
    try:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    except OSError:
        return []
    return sorted(map(int, children.split()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def phase_of(out_dir: Path, launcher: subprocess.Popen[bytes]) -> str:
    """What the run does, by its main rank; "start-up" if that has said nothing in this start."""
    try:
        status = json.loads((out_dir / "status.json").read_text())
    except (OSError, ValueError):
        return "start-up"
    return status["now"] if status["pid"] in ranks_of(launcher) else "start-up"


def hit(
    launcher: subprocess.Popen[bytes], out_dir: Path, rng: random.Random, moment: float | str, targets: Sequence[str]
) -> tuple[Kill, list[psutil.Process]] | None:
    """Kills a target so many seconds from now, or in a phase; and what the launcher had started by then.

    None if the run has ended before.
    """
    target, number, begin = rng.choice(targets), rng.choice([signal.SIGTERM, signal.SIGKILL]), time.monotonic()
    rank = int(target.removeprefix("rank ")) if target.startswith("rank") else 0
    victims: list[int] = []
    while not victims:
        time.sleep(0.005)
        if launcher.poll() is not None:
            return None
        now, seconds = phase_of(out_dir, launcher), time.monotonic() - begin
        is_time = now == moment if isinstance(moment, str) else seconds >= moment
        with suppress(psutil.Error):  # one of them has just ended
            if is_time:
                started = psutil.Process(launcher.pid).children(recursive=True)
                servers = [each.pid for each in started if SERVER in each.cmdline()]
                ranks = ranks_of(launcher)
                pids = {"launcher": [launcher.pid], "all": [launcher.pid, *ranks], "server": servers[-1:]}
                victims = pids.get(target, ranks[rank : rank + 1])
    for pid in filter(is_running, victims):
        os.kill(pid, number)
    return Kill(target, number.name, now), started


def bring_to_its_end(
    out_dir: Path, kills: list[Kill], flags: list[str], rng: random.Random,
    moments: list[Callable[[], float | str]], targets: Sequence[str] = TARGETS,
) -> None:  # fmt: skip
    """Starts a run until it is complete, with a kill at each of the moments that are left, which it adds to `kills`.

    Raises RuntimeError if the run fails by itself, hangs, ends with the wrong status, or if something outlives it.
    """
    output, patience = out_dir.with_suffix(".log"), ORPHAN_SECONDS * (3 if "server" in targets else 1)
    while True:
        launcher, kill, seen = start(out_dir, flags, output), None, []
        if len(kills) < len(moments) and (outcome := hit(launcher, out_dir, rng, moments[len(kills)](), targets)):
            kill, seen = outcome
            kills.append(kill)
        status = launcher.wait(END_SECONDS if kill else None)
        if left := [each for each in psutil.wait_procs(seen, patience)[1] if is_running(each.pid)]:
            raise RuntimeError(f"{kill}: {left} have outlived their launcher by {patience:g} s")
        is_stopped = kill is not None and (kill.target, kill.signal) == ("launcher", "SIGTERM")
        if (kill is None and status) or (is_stopped and status not in (0, 75, 143, -signal.SIGTERM)):
            raise RuntimeError(f"{kill or 'the run failed by itself'}: {output.read_text()[-3000:]}")
        if kill is None:
            return


def disturb(
    folder: Path, most: int, run: Callable[[Path, list[Kill]], None], check: Callable[[Path], list[str]]
) -> tuple[list[Kill], list[str]]:
    """So many kills, over as many runs as they take, and what was wrong. `run`: `bring_to_its_end` of these kills."""
    kills, all_faults = [], []
    for number in itertools.count():
        run(out_dir := folder / f"run_{number}", kills)
        faults = check(out_dir)
        print(f"run {number}: {len(kills)} kills so far, {', '.join(faults) or 'nothing wrong'}", flush=True)
        all_faults += [f"run {number}: {each}" for each in faults]
        if len(kills) >= most:
            break
    return kills, all_faults


def run_to_the_end(out_dir: Path, flags: list[str]) -> float:
    """Its seconds. Raises RuntimeError if it fails."""
    begin, output = time.monotonic(), out_dir.with_suffix(".log")
    if start(out_dir, flags, output).wait():
        raise RuntimeError(f"the run failed: {output.read_text()[-3000:]}")
    return time.monotonic() - begin


def differences(out_dir: Path, undisturbed: Path) -> list[str]:
    """What is not equal: the exported weights, or the last line of a step but for times, speeds and memory."""
    faults = []
    if (out_dir / "final/model.safetensors").read_bytes() != (undisturbed / "final/model.safetensors").read_bytes():
        faults.append("weights")
    expected, lines = last_lines(undisturbed), last_lines(out_dir)
    return faults + [f"step {step}" for step in sorted(expected | lines) if expected.get(step) != lines.get(step)]


def last_lines(out_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> the last line of metrics.jsonl about it, but for times, speeds and memory."""
    path, by_step = out_dir / "metrics.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.endswith("}"):  # not cut off by a kill
            record = json.loads(line)
            exact = {name: x for name, x in record.items() if not name.startswith(("time/", "perf/", "memory/"))}
            by_step[record["step"]] = exact
    return by_step


def flags_of(model: Path, steps: int) -> list[str]:
    flags = {
        "model": model, "train_data": model / "train.jsonl", "eval_data": model / "train.jsonl#8",
        "reward": f"{model}/slow_reward.py:score", "max_prompt_tokens": 16,
        "max_completion_tokens": 12, "prompts_per_step": PROMPTS, "group_size": GROUP, "prompts_per_update": 4,
        "micro_batch_tokens": 256, "kl_coef": 0.01, "learning_rate": 1e-3, "total_steps": steps, "eval_every": 5,
        "save_every": 2, "grace_seconds": 30,
    }  # fmt: skip
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def wrong_use_of_prompts(out_dir: Path) -> list[str]:
    """What is wrong with the completions of a complete run on servers. A kill may have cost a step its file."""
    lines, config = last_lines(out_dir), json.loads((out_dir / "config.json").read_text())
    lags = {step: lines[step]["rollout/lag_max"] for step in range(1, config["total_steps"] + 1)}
    faults = [f"step {step} is {lag} behind" for step, lag in lags.items() if lag > config["steps_ahead"]]
    files = list((out_dir / "rollouts").glob("step_*.parquet"))
    counts = Counter(row for file in files for row in parquet.read_table(file, columns=["row"])["row"].to_pylist())
    faults += [f"{row} was trained {count} times" for row, count in counts.items() if count != GROUP]
    return faults + [f"{len(counts)} prompts in {len(files)} steps"] * (len(counts) != PROMPTS * len(files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help="length of each run")
    parser.add_argument("--servers", action="store_true", help="runs with generation servers")
    args = parser.parse_args()
    from bench_common import save_random_model  # torch

    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="soak_") as temporary:
        folder, model = Path(temporary), Path(temporary) / "model"
        save_random_model(model, hidden=64, layers=2, mean_tokens=8, num_rows=args.steps * PROMPTS)
        (model / "slow_reward.py").write_text(REWARD)
        flags = [*flags_of(model, args.steps), *(SERVERS if args.servers else [])]
        longest = run_to_the_end(folder / "undisturbed", flags)
        print(f"undisturbed: {longest:.0f} s", flush=True)
        moments = [lambda: rng.uniform(0, longest)] * args.kills
        targets = ("rank 0", "rank 1", "launcher", "server", "server") if args.servers else TARGETS
        run = partial(bring_to_its_end, flags=flags, rng=rng, moments=moments, targets=targets)
        check = wrong_use_of_prompts if args.servers else partial(differences, undisturbed=folder / "undisturbed")
        kills, all_faults = disturb(folder, args.kills, run, check)
    for what in ("target", "signal", "where"):
        for value, count in Counter(getattr(kill, what) for kill in kills).most_common():
            print(f"{what:6} {value:12} {count:4} times")
    print(json.dumps({"kills": len(kills), "wrong": all_faults, "seed": args.seed, "goal": []}))
    sys.exit(bool(all_faults))


if __name__ == "__main__":
    main()
