"""Whole runs that are killed, stopped and stalled end as the one that nobody disturbs; and what listens meanwhile.

Starts are what these tests take: each is a phase, or a way to end, that no other one has.
"""

import json
import os
import random
import re
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1
from unittest.mock import patch

import psutil
import pytest

import soak
from helpers.made_up import command_line
from helpers.runs import GUARD_SECONDS, Forked, begin, copy_at, launched, wait_for

SAID = r"""error: rank 1 \(step \d+, \w+\) was ended by signal 9 \(SIGKILL\) by someone.*
restart 1 of 2, . steps after.*
error: no progress .*; then rank 0 \(step \d+, \w+\) .*[Tt]imed out.*
restart 2 of 2.*"""


@pytest.fixture(scope="module")
def flags(policy, tmp_path_factory) -> list[str]:
    """A run on two ranks, half a second a step, of three epochs and more, in which prompts are dropped as solved; bf16,
    which some CPUs emulate, is for others to test.
    """
    (reward := tmp_path_factory.mktemp("reward") / "slow_reward.py").write_text(soak.REWARD)
    changes = {"dtype": "float32", "reward": f"{reward}:score", "hint_column": "@group", "max_prompt_tokens": 100}
    changes |= {"train_data": f"{policy}/train.jsonl#24", "drop_solved": 0.5}
    moving = {"kl_coef": 1, "reference_every": 1, "reference_mixup": 0.5}  # what a resume must not lose
    return [*soak.flags_of(policy, steps=10), *command_line(changes | moving)]


@pytest.fixture(scope="module", autouse=True)
def forks(flags):
    """Not the real launcher, which the run of test_main_job.py has."""

    def start(out_dir: Path, flags: list[str], output: Path) -> Forked:
        return begin(launched(2, "train_grpo.py", *flags, "--out_dir", out_dir), output, output, has_own_workers=True)

    # Not the benchmark's bounds, which a busy machine misses: a test fails by what is wrong, and not by the clock.
    with patch.multiple(soak, start=start, END_SECONDS=GUARD_SECONDS, ORPHAN_SECONDS=GUARD_SECONDS / 10):
        yield


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory) -> tuple[Path, set[str]]:
    """Its folder, and the addresses on which it listened."""
    out_dir, addresses = tmp_path_factory.mktemp("undisturbed") / "run", set()
    launcher = soak.start(out_dir, flags, out_dir.with_suffix(".log"))
    run = psutil.Process(launcher.pid)
    while launcher.poll() is None:
        with suppress(psutil.Error, subprocess.TimeoutExpired):  # a rank has just ended; 0.1 s are over
            ports = [port for process in (run, *run.children()) for port in process.net_connections("inet")]
            addresses.update(port.laddr.ip for port in ports if port.status == psutil.CONN_LISTEN)
            launcher.wait(0.1)
    assert launcher.returncode == 0, out_dir.with_suffix(".log").read_text()[-3000:]
    return out_dir, addresses


def end_by_signal(number: int, phase: str, out_dir: Path, flags: list[str], rank: int | None = None) -> int:
    """The last step of a run that gets the signal in this phase, by its launcher or a rank: that step is saved."""
    log, before = out_dir.with_suffix(".log"), len(soak.last_lines(out_dir))
    run = soak.start(out_dir, flags, log)

    def is_there() -> bool:
        assert run.poll() is None, f"it never came to {phase}"
        now = f'"now": "{phase}"'
        return len(soak.last_lines(out_dir)) > before and now in (out_dir / "status.json").read_text()

    wait_for(is_there)
    os.kill(run.pid if rank is None else soak.ranks_of(run)[rank], number)
    assert run.wait(GUARD_SECONDS) == 75, log.read_text()[-3000:]
    last = max(soak.last_lines(out_dir))
    assert (out_dir / f"step_{last}/trainer/progress.json").exists() and f"{last}, which is saved" in log.read_text()
    assert json.loads((out_dir / "status.json").read_text())["now"] == f"stopped after step {last}"
    return last


def start_again(launcher: list[str], signals: list[int], out_dir: Path, flags: list[str]) -> str:
    """What a run says whose rank 1 gets these signals, each after another step, in or after an update. It ends well."""
    program, said_in = ["train_grpo.py", *flags, "--out_dir", str(out_dir)], out_dir.with_suffix(".said")
    run = begin([*launcher, *program], said_in, said_in, has_own_workers=True)
    for number in signals:
        before = len(soak.last_lines(out_dir))
        wait_for(lambda before=before: len(soak.last_lines(out_dir)) > before)
        wait_for(lambda: '"now": "update"' in (out_dir / "status.json").read_text())
        os.kill((ranks := soak.ranks_of(run))[1], number)
        wait_for(lambda ranks=ranks: not set(ranks) & set(soak.ranks_of(run)))
    assert run.wait(GUARD_SECONDS) == 0, said_in.read_text()[-3000:]
    assert "continues from" in (text := said_in.read_text())
    return text


def test_on_one_node_nothing_listens_beyond_the_loopback(undisturbed):
    assert undisturbed[1] == {"127.0.0.1"}, "gloo listens: the test looks at the right processes"


def test_eight_kills_change_no_result_of_a_run(flags, undisturbed, tmp_path):
    """In eight phases; targets and signals are drawn. A phase, of milliseconds, may be over when the signal comes."""
    rng, phases = random.Random(19), ["load", "sample", "checkpoint", "reward", "update", "evaluate", "sync"]
    moments = [lambda: rng.uniform(0, 0.5), *(lambda phase=phase: phase for phase in phases)]
    run = partial(soak.bring_to_its_end, flags=flags, rng=rng, moments=moments)
    kills, wrong = soak.disturb(tmp_path, 8, run, partial(soak.differences, undisturbed=undisturbed[0]))
    assert (len(kills), wrong) == (8, [])
    solved = [line.get("sampling/prompts_solved", 0) for line in soak.last_lines(undisturbed[0]).values()]
    assert 0 < solved[0] < solved[-1] == 24 - 8, "the last ones that a step needs are left"


def test_signals_a_kill_and_a_stall_change_no_result_of_a_run(flags, undisturbed, tmp_path):
    """A step is given up before its update, or finished; an evaluation that was given up is made at the next start.
    Ranks that wait for one that stands still end by the timeout of their collectives.
    """
    out_dir, unsaved = tmp_path / "run", [*flags, "--save_every", "0"]  # what is saved is saved because of the signal
    for number, phase in ((SIGINT, "sample"), (SIGTERM, "update"), (SIGUSR1, "evaluate"), (SIGTERM, "reward")):
        end_by_signal(number, phase, out_dir, unsaved)
    patience = ["--timeout_minutes", "0.25", "--reward_timeout", "5"]
    said = start_again(launched(2, "--max_restarts", 2), [SIGKILL, SIGSTOP], out_dir, [*flags, *patience])
    assert re.fullmatch(SAID, "\n".join(re.findall("^(?:error|restart).*", said, re.M)))
    assert soak.differences(out_dir, undisturbed[0]) == []


def test_torchrun_starts_a_run_again(flags, undisturbed, tmp_path):
    """It goes on from step 8 of the undisturbed run, and is killed in or after the update of the next one."""
    out_dir = copy_at(8, undisturbed[0], tmp_path / "run")
    log = (out_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out_dir / "metrics.jsonl").write_text("".join(log[:8]))
    start_again(["torchrun", "--standalone", "--nproc_per_node=2", "--max_restarts=1"], [SIGKILL], out_dir, flags)
    assert soak.differences(out_dir, undisturbed[0]) == []


def test_a_signal_to_one_of_an_engines_ranks_aborts_its_requests(flags, tmp_path):
    """Both ranks must leave the engine at the same of its steps, or none would save. The completions are long."""
    long = ["--max_prompt_tokens", "28", "--max_completion_tokens", "100", "--temperature", "2"]
    end_by_signal(SIGTERM, "sample", tmp_path / "run", [*flags, "--tensor_parallel_size", "2", *long], rank=1)
