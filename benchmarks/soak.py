"""Whether a run that is killed again and again ends as the one that nobody disturbs: weights and log, bit for bit.

    python benchmarks/soak.py --kills 100

A short training of a random model on two ranks is started again after every kill until it is complete, and then another
one is begun, until all kills are used. Each kill comes at a random moment, from the first instant on; its target (a
rank, the launcher, all of them at once) and its signal (TERM, KILL) are drawn, too. Checked after each: everything has
ended within 60 s, no rank outlives its launcher by 5 s, SIGTERM to the launcher is exit status 0 (143 while Python
starts), and at the end the exported policy and the last line of each step equal the undisturbed run's.

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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
END_SECONDS = 60.0
ORPHAN_SECONDS = 5.0
TARGETS = ("rank 0", "rank 1", "launcher", "all")
PROMPTS, GROUP = 8, 4  # of a step
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
    where: str  # the phase that the target was in, if the run folder tells
    status: int = 0  # of the launcher


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
    ranks, where = ranks_of(launcher), phase_of(out_dir, index, launcher)
    if launcher.poll() is not None:
        if launcher.returncode:
            raise RuntimeError(f"the run failed by itself: {output.read_text()[-3000:]}")
        return None
    victims = {"launcher": [launcher.pid], "all": [launcher.pid, *ranks]}.get(target, ranks[index : index + 1])
    for pid in victims:
        if is_running(pid):
            os.kill(pid, number)
    kill = Kill(target, number.name, where, launcher.wait(timeout=END_SECONDS))
    end = time.monotonic()
    while any(map(is_running, ranks)):
        if time.monotonic() > end + ORPHAN_SECONDS:
            raise RuntimeError(f"{kill}: a rank has outlived its launcher by {ORPHAN_SECONDS:g} s")
        time.sleep(0.05)
    if (number, target) == (signal.SIGTERM, "launcher") and kill.status not in (0, 75, 143, -signal.SIGTERM):
        raise RuntimeError(f"{kill}: {output.read_text()[-3000:]}")
    return kill


def disturb(
    folder: Path, flags: list[str], undisturbed: Path, rng: random.Random, moments: list[Callable[[], float | str]]
) -> tuple[list[Kill], list[str]]:
    """A kill at each moment, over as many runs as they take, each of which is brought to its end; and what differs."""
    kills: list[Kill] = []
    found = []
    for number in itertools.count():
        out_dir = folder / f"run_{number}"
        while len(kills) < len(moments) and (kill := run_until_killed(out_dir, flags, rng, moments[len(kills)]())):
            kills.append(kill)
        run_to_the_end(out_dir, flags)  # at once, if it is complete
        wrong = differences(out_dir, undisturbed)
        print(f"run {number}: {len(kills)} kills so far, {', '.join(wrong) or 'equal'}", flush=True)
        found += [f"run {number}: {each}" for each in wrong]
        if len(kills) == len(moments):
            break
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
        "reward": f"{model}/slow_reward.py:score", "reward_workers": 1, "max_prompt_tokens": 16,
        "max_completion_tokens": 12, "prompts_per_step": PROMPTS, "group_size": GROUP, "prompts_per_update": 4,
        "micro_batch_tokens": 256, "kl_coef": 0.01, "learning_rate": 1e-3, "total_steps": steps, "eval_every": 5,
        "save_every": 2, "grace_seconds": 30,
    }  # fmt: skip
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help="length of each run")
    args = parser.parse_args()
    from bench_common import save_random_model  # torch

    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="soak_") as temporary:
        folder, model = Path(temporary), Path(temporary) / "model"
        save_random_model(model, hidden=64, layers=2, mean_tokens=8, num_rows=args.steps * PROMPTS)
        (model / "slow_reward.py").write_text(REWARD)
        flags = flags_of(model, args.steps)
        longest = run_to_the_end(folder / "undisturbed", flags)
        print(f"undisturbed: {longest:.0f} s", flush=True)
        moments = [lambda: rng.uniform(0, longest)] * args.kills
        kills, wrong = disturb(folder, flags, folder / "undisturbed", rng, moments)
    for what in ("target", "signal", "where"):
        for value, count in Counter(getattr(kill, what) for kill in kills).most_common():
            print(f"{what:6} {value:12} {count:4} times")
    print(json.dumps({"kills": len(kills), "wrong": wrong, "seed": args.seed, "goal": []}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
