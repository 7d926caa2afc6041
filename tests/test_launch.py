"""The launcher, with small programs as ranks; whole runs under it are in test_kills.py."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1
from types import SimpleNamespace

import pytest

from helpers.runs import GUARD_SECONDS, ROOT, run_command, wait_for
from runtime.signals import SignalRecord
from soak import is_running

LAUNCHER = [sys.executable, str(ROOT / "scripts" / "launch.py")]
PROGRAM = """
import json, os, signal, sys, time
from runtime.rank import PLACE, requested
from runtime.signals import arm, listen
from runtime.stall import watch
from runtime.start import join_launcher, note_reason
rank, folder = int(os.environ["RANK"]), sys.argv[-1]
signal.alarm(120)  # whatever becomes of the test
ready = lambda: open(f"{folder}/pid_{rank}", "w").write(str(os.getpid()))
"""
KILLED = """os.kill(os.getpid(), signal.SIGKILL) if rank else 0
while not os.path.exists(folder + "/pid_1") or os.path.exists("/proc/" + open(folder + "/pid_1").read()):
    time.sleep(0.05)"""
HEARD_OF = "while not os.path.exists(os.environ['GRPO_LAUNCH_FOLDER'] + '/reason_{}.json'): time.sleep(0.05)\n"
AFTER = f"if not rank:\n    {HEARD_OF.format(1)}"
SLOWLY_KILLED = f"""if rank:
    {HEARD_OF.format(0)}    os.kill(os.getpid(), signal.SIGKILL)  # its sockets were closed before
note_reason('closed by peer', 'error'); sys.exit(1)"""
LOST = "note_reason('OSError: lost', 'error') if rank else 0; time.sleep(3600)"
EXITS = "sys.exit(3) if rank else time.sleep(3600)"
IN_UPDATE = "PLACE.step, PLACE.phase = 7, 'update'\n"
STALLED = "os.utime(folder + '/ranks/rank_1.txt'); "
SAVES = """while not requested(): time.sleep(0.05)
open(f"{folder}/asked_{rank}", "w").close()
time.sleep(seconds); os.write(1, b'saved\\n')"""
ARMED, BRIEFLY, SAVED = "listen(); arm(30)", "listen(); arm(1)", ["saved", "saved"]
LATE = "SIGTERM: the run could not save within --grace_seconds 1; the same "
EARLY, SECOND = ["SIGTERM: ended before the first step; nothing is lost"], ["ended by a second signal"]
LOGS = """
open(folder + "/starts", "a").write("x")
start = len(open(folder + "/starts").read())
for step in steps[start - 1]: print('{"step": %d, "loss": 1}' % step, file=open(folder + "/metrics.jsonl", "a"))"""


def launch(folder: Path, num_ranks: int, body: str, options: str = "") -> subprocess.Popen[str]:
    """Ranks that run this body, which knows `rank`, `folder`, `ready`; 0: one without a launcher."""
    (program := folder / "program.py").write_text(PROGRAM + body)
    launcher = [*LAUNCHER, "--ranks", str(num_ranks), *options.split()] if num_ranks else [sys.executable]
    return subprocess.Popen(
        [*launcher, program, "--out_dir", folder], env=os.environ | {"RANK": "0", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def pids(folder: Path, num_ranks: int = 2) -> list[int]:
    files = [folder / f"pid_{rank}" for rank in range(num_ranks)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def test_ranks_know_their_place_and_end_with_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "0")  # they read UTF-8 all the same
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    said = f"json.dumps([os.environ[name] for name in {names}] + sys.argv[1:] + [sys.flags.utf8_mode]) + chr(10)"
    body = f"sys.stdout.write({said})"  # in one write: two ranks share the pipe
    done = launch(tmp_path, 2, body, "--nodes 3 --node_rank 1 --master_addr 10.0.0.1 --master_port 5")
    out, _ = done.communicate(timeout=GUARD_SECONDS)
    common = ["6", "2", "10.0.0.1", "5", "--out_dir", str(tmp_path), 1]
    assert sorted(map(json.loads, out.splitlines())) == [["2", "0", *common], ["3", "1", *common]]
    assert done.returncode == 0


def test_wrong_numbers_are_refused():
    for wrong in ("", "--ranks 0 x.py", "--nodes 2 --node_rank 2 x.py", "--nodes 2 --max_restarts 1 x.py"):
        done = run_command([*LAUNCHER, *wrong.split()], dict(os.environ))
        said = "it takes a program, --ranks of 1 or more, --node_rank below --nodes, --max_restarts on one node"
        assert done.returncode == 2 and f"launch.py: error: {said}" in done.stderr


def test_no_rank_outlives_its_launcher(tmp_path):
    """Also one that does not ask for it, and one that asks when it is late."""
    launcher = launch(tmp_path, 2, "join_launcher() if rank else 0; ready(); time.sleep(3600)")
    ranks = pids(tmp_path)
    launcher.kill()
    wait_for(lambda: not any(map(is_running, ranks)))
    late = launch(tmp_path, 0, "os.environ['GRPO_LAUNCHER_PID'] = '1'; join_launcher(); print('lives')")
    assert late.communicate(timeout=GUARD_SECONDS)[0] == "" and late.returncode == 1


@pytest.mark.parametrize(("body", "last_line"), [
    (AFTER + "raise ValueError(f'said by {rank}')", "rank 1 (step 0, start) ended with ValueError: said by 1"),
    ("note_reason('--clip_low 3: must be at most 1.', 'mistake'); sys.exit(1)", "--clip_low 3: must be at most 1."),
    (IN_UPDATE + LOST, "rank 1 (step 7, update) ended with OSError: lost"),
    (IN_UPDATE + KILLED + "\nraise RuntimeError('closed')", "rank 1 (step 7, update) was ended by signal 9 ("),
    (SLOWLY_KILLED, "rank 1 (step 0, start) was ended by signal 9 (SIGKILL) by someone, or by Linux"),
    (EXITS, "rank 1 ended with exit status 3."),  # the stacks are of an earlier start
    (STALLED + EXITS, "no progress (stacks: FOLDER/ranks); then rank 1 ended with exit status 3."),
])  # fmt: skip
def test_the_last_line_is_the_reason_of_the_first_failed_rank(body, last_line, tmp_path):
    """With its place, and the stall before; of a killed rank, not what others say then."""
    (stacks := tmp_path / "ranks").mkdir()
    (stacks / "rank_0.txt").touch()
    (stacks / "rank_1.txt").write_text("Timeout (0:10:00)!")
    os.utime(stacks / "rank_1.txt", (0, 0))
    out, _ = (done := launch(tmp_path, 2, f"join_launcher(); ready()\n{body}")).communicate(timeout=GUARD_SECONDS)
    assert done.returncode == 1 and not any(map(is_running, pids(tmp_path)))
    last_line = last_line.replace("FOLDER", str(tmp_path))
    assert out.splitlines()[-1].startswith(f"error: {last_line}") and out.count(last_line) <= 1 + ("raise" in body)
    assert ("Traceback" in out) == ("raise" in body), "where it happened stands above"


@pytest.mark.parametrize(("writes", "then", "now"), [
    ("os.getpid()", "sys.exit(3)", "failed: rank 0 ended with exit status 3."),
    ("os.getpid()", "os.kill(os.getpid(), signal.SIGSEGV)", "failed: rank 0 was ended by signal 11 (SIGSEGV)"),
    ("1", "sys.exit(3)", "update"),  # another run's, into whose folder this one may not write
    ("os.getpid()", "sys.exit(0)", "update"),  # what has ended in order has said so itself
])  # fmt: skip
def test_the_launcher_says_in_the_runs_status_why_it_failed(writes, then, now, tmp_path):
    body = f"json.dump({{'now': 'update', 'pid': {writes}, 'step': 4}}, open(folder + '/status.json', 'w')); {then}"
    launch(tmp_path, 1, body).communicate(timeout=GUARD_SECONDS)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["now"].startswith(now) and status["step"] == 4


def test_only_a_later_signal_is_a_second_one(monkeypatch):
    """A terminal and a launcher may both send the same one, and Slurm sends two."""
    times, signals = iter([100.0, 100.4, 104.9, 100.6, 105.1]), SignalRecord()
    monkeypatch.setattr("runtime.signals.time", SimpleNamespace(monotonic=lambda: next(times)))  # not all clocks
    found = [signals.classify(number) for number in (SIGTERM, SIGTERM, SIGUSR1, SIGTERM, SIGUSR1)]
    assert found == ["first", "again", "again", "second", "second"]


@pytest.mark.parametrize(("num_ranks", "begin", "seconds", "signals", "status", "said"), [
    *((2, ARMED, 0, [number], 0, SAVED) for number in (SIGINT, SIGUSR1, SIGHUP)),
    (2, ARMED, 0, ["rank 1"], 0, SAVED),
    (2, ARMED, 600, [SIGTERM, "wait", SIGTERM], 143, SECOND),
    (2, BRIEFLY, 600, [SIGTERM], 1, [f"error: {LATE}"]),
    (2, "listen()", 0, ["rank 1"], 75, EARLY),
    (2, "", 0, [SIGTERM], 143, []),
    (0, ARMED, 0, [SIGTERM], 0, ["saved"]),  # without a launcher a rank does it itself
    (0, ARMED, 600, [SIGTERM, "wait", SIGTERM], 143, SECOND),
    (0, BRIEFLY, 600, [SIGTERM], 1, [LATE]),
])  # fmt: skip
def test_a_signal_asks_every_rank_to_save_and_to_end(num_ranks, begin, seconds, signals, status, said, tmp_path):
    launcher = launch(tmp_path, num_ranks, f"seconds = {seconds}; join_launcher(); {begin or 0}; ready()\n{SAVES}")
    ranks = pids(tmp_path, num_ranks or 1)
    for each in signals:
        if each == "rank 1":
            os.kill(ranks[1], SIGTERM)
        elif each == "wait":  # a second one of the same kind counts half a second after the first
            wait_for(lambda: len([*tmp_path.glob("asked_*")]) == (num_ranks or 1))
            time.sleep(1.5)
        else:  # to the launcher's process group, as a terminal does
            os.killpg(launcher.pid, each)
    out, _ = launcher.communicate(timeout=GUARD_SECONDS)
    assert [line.partition("command")[0] for line in out.splitlines()] == said
    assert launcher.returncode == status and not any(map(is_running, ranks))


@pytest.mark.parametrize(("steps", "then", "status", "restarts"), [
    ([[0, 1, 2], [3], []], "sys.exit(start < 3)", 0, ["1 of 3, 2 steps", "2 of 3, 1 steps"]),
    ([[0, 1], [2], [3], [4]], "sys.exit(1)", 1, [f"{number} of 3, 1 steps" for number in (1, 2, 3)]),
    ([[0, 1], []], "os.kill(os.getpid(), signal.SIGKILL)", 1, ["1 of 3, 1 steps"]),  # it comes back at once
    ([[0]], "note_reason('--clip_low 3: must be at most 1.', 'mistake'); sys.exit(1)", 1, []),
    ([[0, 1]], "listen(); arm(1); os.kill(os.getppid(), 15); time.sleep(3600)", 1, []),  # it ends by a signal
])  # fmt: skip
def test_what_had_done_a_step_is_started_again(steps, then, status, restarts, tmp_path):
    body = f"steps = {steps}{LOGS}\n{then}"
    out, _ = (done := launch(tmp_path, 1, body, "--max_restarts 3")).communicate(timeout=GUARD_SECONDS)
    assert done.returncode == status and re.findall(r"restart (\d of \d, \d steps)", out) == restarts
    assert (tmp_path / "starts").read_text() == "x" * (1 + len(restarts))
    assert status == 0 or out.splitlines()[-1].startswith("error: ")
