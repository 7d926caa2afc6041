"""Whole runs that are killed: by `benchmarks/soak.py`, and under torchrun; and what listens while one goes."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import soak
from helpers import ENVIRONMENT, ROOT

STEPS = 10


@pytest.fixture(scope="module")
def flags(policy, tmp_path_factory) -> list[str]:
    """Of a run on two ranks, half a second a step."""
    reward = tmp_path_factory.mktemp("reward") / "slow_reward.py"
    reward.write_text(soak.REWARD)
    flags = soak.flags_of(policy, STEPS)
    flags[flags.index("--reward") + 1] = f"{reward}:score"
    return flags


def listening_addresses(pids: list[int]) -> set[str]:
    """The IPv4 and IPv6 addresses, as /proc/net prints them, that these processes listen on."""
    by_inode = {}
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                by_inode[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                found.add(by_inode.get(str(link.readlink()), ""))
            except OSError:
                continue
    return found - {""}


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory) -> tuple[Path, set[str]]:
    """Its folder, and the addresses on which it listened."""
    out_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    launcher = soak.start(out_dir, flags, out_dir.with_suffix(".log"))
    addresses: set[str] = set()

    def watch() -> None:
        while launcher.poll() is None:
            addresses.update(listening_addresses([launcher.pid, *soak.ranks_of(launcher)]))
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert launcher.wait(300) == 0, out_dir.with_suffix(".log").read_text()[-3000:]
    watcher.join()
    return out_dir, addresses


def test_on_one_node_nothing_listens_beyond_the_loopback(undisturbed):
    """gloo listens; that it was seen shows that the test looks at the right processes."""
    _, addresses = undisturbed
    assert addresses == {"0100007F"}


def test_a_run_that_is_killed_in_eight_phases_ends_like_the_undisturbed_one(flags, undisturbed, tmp_path):
    """Targets and signals are drawn. A phase may be over when the signal comes: they last some milliseconds."""
    rng = random.Random(19)
    starting_up = lambda: rng.uniform(0, 3)  # noqa: E731  # seconds: Python and torch are being imported
    phases = ["start", "sample", "checkpoint", "reward", "update", "evaluate", "sync"]
    moments = [starting_up, *(lambda phase=phase: phase for phase in phases)]
    kills, differences = soak.disturb(tmp_path, flags, undisturbed[0], rng, moments)
    assert len(kills) == 8
    assert kills[0].where == "start-up"
    assert differences == []


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def read_status(out_dir: Path) -> dict[str, object]:
    return json.loads((out_dir / "status.json").read_text())


def test_a_signal_in_any_phase_saves_the_run_and_it_continues_bit_for_bit(flags, undisturbed, tmp_path):
    """It is given up before its update, or finished; an evaluation that was given up is made at the next start."""
    out_dir = tmp_path / "run"
    flags = [*flags, "--save_every", "0"]  # whatever is saved is saved because of the signal
    of_phases = {
        "sample": signal.SIGINT, "update": signal.SIGTERM, "reward": signal.SIGTERM, "evaluate": signal.SIGUSR1,
    }  # fmt: skip
    for phase, number in of_phases.items():
        launcher = soak.start(out_dir, flags, out_dir.with_suffix(".log"))
        deadline, steps_before = time.monotonic() + 120, len(soak.last_lines(out_dir))
        # status.json, not the heartbeat: it is written as soon as a phase begins.
        while len(soak.last_lines(out_dir)) < steps_before + 1 or read_status(out_dir)["now"] != phase:
            assert time.monotonic() < deadline and launcher.poll() is None, f"it never came to {phase}"
            time.sleep(0.005)
        launcher.send_signal(number)
        assert launcher.wait(60) == 0, out_dir.with_suffix(".log").read_text()[-3000:]
        last = max(soak.last_lines(out_dir))
        assert (out_dir / f"step_{last}" / "trainer" / "progress.json").exists(), f"{phase}: step {last} is not saved"
    soak.run_to_the_end(out_dir, flags)
    assert soak.differences(out_dir, undisturbed[0]) == []


def test_an_engine_over_two_ranks_gives_its_requests_up_when_one_of_them_gets_a_signal(flags, policy, tmp_path):
    """Both ranks must leave the engine at the same of its steps."""
    out_dir = tmp_path / "run"
    flags = [*flags, "--tensor_parallel_size", "2", "--max_completion_tokens", "100", "--temperature", "2"]
    launcher = soak.start(out_dir, flags, out_dir.with_suffix(".log"))
    deadline = time.monotonic() + 120
    while soak.phase_of(out_dir, 1, launcher) != "sample" or len(soak.last_lines(out_dir)) < 2:
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.005)
    os.kill(soak.ranks_of(launcher)[1], signal.SIGTERM)
    assert launcher.wait(60) == 0, out_dir.with_suffix(".log").read_text()[-3000:]
    last = max(soak.last_lines(out_dir))
    assert f"after step {last}, which is saved" in out_dir.with_suffix(".log").read_text()
    soak.run_to_the_end(out_dir, [*flags, "--stop_after", str(last + 1)])
    assert max(soak.last_lines(out_dir)) == last + 1


def test_the_launcher_starts_a_run_again_after_a_kill_and_after_a_stall(flags, undisturbed, tmp_path):
    """Rank 1 is killed in its update, and in a later one stopped, until the collectives of the others time out."""
    out_dir, output = tmp_path / "run", tmp_path / "said"
    flags = [*flags, "--timeout_minutes", "0.5", "--stall_seconds", "5", "--reward_timeout", "5"]
    command = soak.run_command(out_dir, flags)
    command[2:2] = ["--max_restarts", "2"]
    with (
        output.open("w") as file,
        subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=file) as run,
    ):
        for number, after in ((signal.SIGKILL, 2), (signal.SIGSTOP, 5)):
            wait_for(lambda: run.poll() is None and len(soak.last_lines(out_dir)) >= after, 200)  # noqa: B023
            wait_for(lambda: soak.phase_of(out_dir, 1, run) == "update", 60)
            os.kill(soak.ranks_of(run)[1], number)
        assert run.wait(300) == 0, output.read_text()[-3000:]
    said = [line for line in output.read_text().splitlines() if line.startswith(("error: ", "restart "))]
    assert re.match(
        r"error: rank 1 \(step \d, update\) was ended by signal 9 \(SIGKILL\) by someone; the same", said[0]
    )
    assert re.match(r"restart 1 of 2, \d steps after the last start", said[1])
    assert re.match(r"error: STALL: no progress for \d+ s: rank 1 is stopped, by SIGSTOP .* in update of step", said[2])
    assert re.search(r"; then rank 0 \(step \d, update\) ended with .*[Tt]imed out", said[2])
    assert len(said) == 4 and said[3].startswith("restart 2 of 2")
    assert soak.differences(out_dir, undisturbed[0]) == []


def test_torchrun_starts_a_run_again_after_a_kill(flags, undisturbed, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, "--max_restarts", "1", str(ROOT / "train_grpo.py"), *flags, "--out_dir", tmp_path / "run"]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "step_4").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        os.kill(soak.ranks_of(process)[1], signal.SIGKILL)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said[-3000:]
    assert "continues from" in said
    assert soak.differences(tmp_path / "run", undisturbed[0]) == []
