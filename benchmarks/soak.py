"""Whether a run that is killed again and again ends as the one that nobody disturbs: weights and log, bit for bit.

    python benchmarks/soak.py --kills 100

A short training of a random model on two ranks is started again after every kill until it is complete, and then another
one is begun, until all kills are used. Each kill comes at a random moment, from the first instant on; its target (a
rank, the launcher, all of them at once) and its signal (TERM, KILL) are drawn, too. Checked after each: everything has
ended within 60 s, no rank outlives its launcher by 5 s, SIGTERM to the launcher is exit status 0 (143 while Python
starts), and at the end the exported policy and the last line of each step equal the undisturbed run's. Prints a table
of what was hit and, last, one JSON line.

With --servers two generation servers sample ahead, and SIGKILL hits one of them, a rank or the launcher. A run that
goes on with the other server is left to go on, and hit again. It samples anew after each start, so what is checked at
the end is that every prompt of the epoch was trained once, with all its completions, by weights as old as is allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from generation.start import SERVER

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
END_SECONDS = 60.0
ORPHAN_SECONDS = 5.0
TARGETS = ("rank 0", "rank 1", "launcher", "all")
REWARD = """
import time
def score(completion, answer, columns):
    time.sleep(0.02)
    return float(len(completion) % 3 == 0)
"""


class Kill(NamedTuple):
    """One of them."""

    seconds: float  # after the start
    target: str
    signal: int
    where: str  # the phase that the target was in, if the run folder tells
    status: int  # of the launcher


def run_command(out_dir: Path, flags: list[str], num_ranks: int = 2) -> list[str]:
    """A start of train_grpo.py, by this project's launcher."""
    launcher = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--ranks", str(num_ranks)]
    return [*launcher, "train_grpo.py", *flags, "--out_dir", str(out_dir)]


def start(out_dir: Path, flags: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(
            run_command(out_dir, flags), cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=file, start_new_session=True
        )


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


def phase_of(out_dir: Path, rank: int, launcher: subprocess.Popen[bytes]) -> str:
    """What the rank's last heartbeat says; "start-up" if there is none of this start."""
    try:
        heartbeat = json.loads((out_dir / "ranks" / f"rank_{rank}.json").read_text())
    except (OSError, ValueError):
        return "start-up"
    return heartbeat["phase"] if heartbeat["pid"] in ranks_of(launcher) else "start-up"


def run_until_killed(out_dir: Path, flags: list[str], rng: random.Random, moment: float | str) -> Kill | None:
    """One start, killed so many seconds after it, or in a phase; None if the run was complete before.

    Raises RuntimeError if something is left, hangs or ends with the wrong status.
    """
    target, number = rng.choice(TARGETS), rng.choice([signal.SIGTERM, signal.SIGKILL])
    index = int(target.removeprefix("rank ")) if target.startswith("rank") else 0
    output = out_dir.with_suffix(".log")
    launcher, begin = start(out_dir, flags, output), time.monotonic()

    def is_time() -> bool:
        if isinstance(moment, str):
            return phase_of(out_dir, index, launcher) == moment
        return time.monotonic() >= begin + moment

    while not is_time() and launcher.poll() is None:
        time.sleep(0.005)
    seconds, ranks, where = time.monotonic() - begin, ranks_of(launcher), phase_of(out_dir, index, launcher)
    if launcher.poll() is not None:
        if launcher.returncode:
            raise RuntimeError(f"the run failed by itself: {output.read_text()[-3000:]}")
        return None
    victims = {"launcher": [launcher.pid], "all": [launcher.pid, *ranks]}.get(target, ranks[index : index + 1])
    for pid in victims:
        if is_running(pid):
            os.kill(pid, number)
    kill = Kill(seconds, target, number, where, launcher.wait(timeout=END_SECONDS))
    time_of_end = time.monotonic()
    while any(map(is_running, ranks)):
        if time.monotonic() > time_of_end + ORPHAN_SECONDS:
            raise RuntimeError(f"{kill}: a rank has outlived its launcher by {ORPHAN_SECONDS:g} s")
        time.sleep(0.05)
    if number == signal.SIGTERM and target == "launcher" and kill.status not in (0, 143, -signal.SIGTERM):
        raise RuntimeError(f"{kill}: exit status {kill.status}: {output.read_text()[-3000:]}")
    return kill


def disturb(
    folder: Path, flags: list[str], undisturbed: Path, rng: random.Random, moments: list[Callable[[], float | str]]
) -> tuple[list[Kill], list[str]]:
    """A kill at each moment, over as many runs as they take, each of which is brought to its end; and what differs."""
    kills: list[Kill] = []
    found, runs = [], 0
    while len(kills) < len(moments):
        out_dir, begun = folder / f"run_{runs}", len(kills)
        while len(kills) < len(moments) and (kill := run_until_killed(out_dir, flags, rng, moments[len(kills)]())):
            kills.append(kill)
        run_to_the_end(out_dir, flags)  # at once, if it is complete
        wrong = differences(out_dir, undisturbed)
        print(f"run {runs}: {len(kills) - begun} kills, {', '.join(wrong) or 'equal'}", flush=True)
        found += [f"run {runs}: {each}" for each in wrong]
        runs += 1
    return kills, found


def run_to_the_end(out_dir: Path, flags: list[str]) -> float:
    """Its seconds. Raises RuntimeError if it fails."""
    begin, output = time.monotonic(), out_dir.with_suffix(".log")
    if start(out_dir, flags, output).wait():
        raise RuntimeError(f"the run failed: {output.read_text()[-3000:]}")
    return time.monotonic() - begin


def differences(out_dir: Path, undisturbed: Path) -> list[str]:
    """What is not equal: the exported weights, or the last line of a step but for times, speeds and memory."""
    found = []
    if (out_dir / "final/model.safetensors").read_bytes() != (undisturbed / "final/model.safetensors").read_bytes():
        found.append("weights")
    expected, lines = last_lines(undisturbed), last_lines(out_dir)
    return found + [f"step {step}" for step in sorted(expected | lines) if expected.get(step) != lines.get(step)]


def last_lines(out_dir: Path) -> dict[int, dict[str, float]]:
    by_step = {}
    if not (out_dir / "metrics.jsonl").exists():
        return by_step
    for line in (out_dir / "metrics.jsonl").read_text().splitlines():
        if line.endswith("}"):  # not cut off by a kill
            record = json.loads(line)
            exact = {name: x for name, x in record.items() if not name.startswith(("time/", "perf/", "memory/"))}
            by_step[record["step"]] = exact
    return by_step


def flags_of(model: Path, steps: int) -> list[str]:
    flags = {
        "model": model, "train_data": model / "train.jsonl", "eval_data": model / "train.jsonl#8",
        "reward": f"{model}/slow_reward.py:score", "reward_workers": 1, "max_prompt_tokens": 16,
        "max_completion_tokens": 12, "prompts_per_step": 8, "group_size": 4, "prompts_per_update": 4,
        "micro_batch_tokens": 256, "kl_coef": 0.01, "learning_rate": 1e-3, "total_steps": steps, "eval_every": 5,
        "save_every": 2, "grace_seconds": 30,
    }  # fmt: skip
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


PROMPTS, GROUP = 8, 4  # of a step, as above
WORKS_AHEAD = {1: ["--steps_ahead", "1"], 2: ["--steps_ahead", "2", "--in_flight"]}


def kill_with_servers(out_dir: Path, flags: list[str], rng: random.Random, most: int, longest: float) -> list[str]:
    """Brings a run to its end; what was killed meanwhile, at most so many times.

    Raises RuntimeError if the run ends by itself, or if something outlives it.
    """
    hit: list[str] = []
    while True:
        launcher, begun = start(out_dir, flags, out_dir.with_suffix(".log")), len(hit)
        seen: list[psutil.Process] = []
        while launcher.poll() is None:
            moment = time.monotonic() + rng.uniform(0, longest)
            while launcher.poll() is None and (time.monotonic() < moment or len(hit) >= most):
                time.sleep(0.01)
            if launcher.poll() is None:
                children = psutil.Process(launcher.pid).children(recursive=True)
                servers = [each.pid for each in children if SERVER in each.cmdline()]
                name, pids = rng.choice(
                    [("launcher", [launcher.pid]), ("rank", ranks_of(launcher)), ("server", servers)]
                )
                seen += children
                if pids:
                    hit.append(f"{name} in {phase_of(out_dir, 0, launcher)}")
                    os.kill(rng.choice(pids), signal.SIGKILL)
        if left := [each for each in psutil.wait_procs(seen, timeout=3 * ORPHAN_SECONDS)[1] if is_running(each.pid)]:
            raise RuntimeError(f"{left} have outlived their run")
        if launcher.returncode == 0:
            return hit
        if len(hit) == begun:
            raise RuntimeError(f"the run failed by itself: {out_dir.with_suffix('.log').read_text()[-3000:]}")


def wrong_use_of_prompts(out_dir: Path, steps: int, ahead: int) -> list[str]:
    """What is wrong with the completions of a complete run. A kill may have cost a step its file."""
    import pyarrow.parquet

    lines = last_lines(out_dir)
    found = [f"step {step} is {lines[step]['rollout/lag_max']} behind" for step in range(1, steps + 1)
             if lines[step]["rollout/lag_max"] > ahead]  # fmt: skip
    files = list((out_dir / "rollouts").glob("step_*.parquet"))
    rows = [pyarrow.parquet.read_table(file, columns=["row"])["row"].to_pylist() for file in files]
    counts = Counter(row for of_step in rows for row in of_step)
    found += [f"{row} was trained {count} times" for row, count in counts.items() if count != GROUP]
    return found + [f"{len(counts)} prompts in {len(files)} steps"] * (len(counts) != PROMPTS * len(files))


def soak_servers(folder: Path, model: Path, rng: random.Random, kills: int, steps: int) -> tuple[list[str], list[str]]:
    """What was killed over as many runs as it takes, and what was wrong."""
    of_servers = [*flags_of(model, steps), "--engine", "server", "--generation_gpus", "0", "1"]
    longest = run_to_the_end(folder / "undisturbed", [*of_servers, *WORKS_AHEAD[1]])
    print(f"undisturbed: {longest:.0f} s", flush=True)
    hit, wrong, runs = [], [], 0
    while len(hit) < kills:
        out_dir, ahead = folder / f"run_{runs}", 1 + runs % 2
        hit += kill_with_servers(out_dir, [*of_servers, *WORKS_AHEAD[ahead]], rng, kills - len(hit), longest)
        found = wrong_use_of_prompts(out_dir, steps, ahead)
        print(f"run {runs}, {ahead} ahead: {len(hit)} kills so far, {found or 'nothing wrong'}", flush=True)
        wrong += [f"run {runs}: {each}" for each in found]
        runs += 1
    return hit, wrong


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
        folder = Path(temporary)
        sizes = {"num_rows": args.steps * PROMPTS} if args.servers else {}
        save_random_model(folder / "model", hidden=64, layers=2, ffn=128, mean_tokens=8, **sizes)
        (folder / "model" / "slow_reward.py").write_text(REWARD)
        if args.servers:
            hit, wrong = soak_servers(folder, folder / "model", rng, args.kills, args.steps)
            for what, count in Counter(hit).most_common():
                print(f"{count:4} x {what}")
            print(json.dumps({"kills": len(hit), "wrong": wrong, "seed": args.seed, "goal": []}))
            sys.exit(bool(wrong))
        flags = flags_of(folder / "model", args.steps)
        longest = run_to_the_end(folder / "undisturbed", flags)
        print(f"undisturbed: {longest:.0f} s", flush=True)
        moments = [lambda: rng.uniform(0, longest)] * args.kills
        kills, wrong = disturb(folder, flags, folder / "undisturbed", rng, moments)
    for kill, count in sorted(Counter((k.target, signal.Signals(k.signal).name) for k in kills).items()):
        print(f"{count:4} x {kill[1]} to {kill[0]}")
    for where, count in Counter(kill.where for kill in kills).most_common():
        print(f"{count:4} x in {where}")
    print(json.dumps({"kills": len(kills), "differences": wrong, "seed": args.seed, "goal": []}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
