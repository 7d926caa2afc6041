"""The launcher, with small programs of the standard library as ranks; whole runs under it are in test_kills.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch as launch_module
from helpers import ROOT

PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from guards.launched import join_launcher, note_reason
if {joins}:
    join_launcher()
rank = int(os.environ["RANK"])
open(f"{folder}/pid_{{rank}}", "w").write(str(os.getpid()))
{body}
"""


@pytest.fixture
def launch(tmp_path):
    """Starts so many ranks that run this body, in which `rank` is known; join: as our programs begin."""
    started = []

    def start(
        num_ranks: int, body: str, *options: str, joins: bool = True, arguments: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(root=str(ROOT), folder=tmp_path, joins=joins, body=body))
        launcher = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--ranks", str(num_ranks), *options]
        started.append(subprocess.Popen(
            [*launcher, str(program), "--flag", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        ))  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def pids(folder: Path, num_ranks: int) -> list[int]:
    """Of the ranks, when all are there."""
    files = [folder / f"pid_{rank}" for rank in range(num_ranks)]
    deadline = time.monotonic() + 30
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(ranks: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline, "a rank is still there"
        time.sleep(0.05)


def test_ranks_know_their_place_and_their_end_is_the_launchers(launch):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    body = f"import json; print(json.dumps([[os.environ[name] for name in {names}], sys.argv[1:]]))"
    done = launch(2, body, "--nodes", "3", "--node_rank", "1", "--master_addr", "10.0.0.1", "--master_port", "5")
    out, _ = done.communicate(timeout=60)
    assert done.returncode == 0
    assert sorted(map(json.loads, out.splitlines())) == [
        [[str(2 + i), str(i), "6", "2", "10.0.0.1", "5"], ["--flag"]] for i in range(2)
    ]


@pytest.mark.parametrize("joins", [True, False])
def test_no_rank_outlives_a_killed_launcher(launch, joins, tmp_path):
    """Also one that never gets as far as to ask for it: what it is started with holds from its first instruction."""
    launcher = launch(2, "time.sleep(600)", joins=joins)
    ranks = pids(tmp_path, 2)
    launcher.kill()
    wait_until_gone(ranks, 5)


def test_a_rank_whose_launcher_died_before_it_could_ask_ends_at_once():
    code = "from guards.launched import die_with_parent; die_with_parent(1); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_the_last_line_is_the_reason_of_the_first_rank_that_failed(launch):
    body = "time.sleep(2 if rank else 0.5); raise ValueError(f'reason of rank {rank}')"
    out, _ = (done := launch(3, body)).communicate(timeout=60)
    assert done.returncode == 1
    assert out.splitlines()[-1] == "error: rank 0 ended with ValueError: reason of rank 0"
    assert "Traceback" in out, "where it happened stands above"


def test_the_others_are_ended_when_one_has_failed(launch, tmp_path):
    out, _ = (done := launch(2, "sys.exit(3) if rank else time.sleep(600)")).communicate(timeout=60)
    assert done.returncode == 1
    assert out.splitlines()[-1] == "error: rank 1 ended with exit status 3."
    wait_until_gone(pids(tmp_path, 2), 1)


def test_the_reason_says_in_which_phase_the_rank_was(launch, tmp_path):
    """By its heartbeat, if it is its own and not one of an earlier start."""
    body = """
import json
(ranks := __import__("pathlib").Path(sys.argv[0]).parent / "ranks").mkdir(exist_ok=True)
beat = {"pid": os.getpid() + rank, "step": 7, "phase": "update"}
(ranks / f"rank_{rank}.json").write_text(json.dumps(beat))
time.sleep(30) if rank == int(os.environ["WAITS"]) else os.kill(os.getpid(), signal.SIGKILL)
"""
    for waits, where in (("1", "rank 0 (step 7, update) was ended by"), ("0", "rank 1 was ended by")):
        os.environ["WAITS"] = waits
        out, _ = launch(2, body, arguments=("--out_dir", str(tmp_path))).communicate(timeout=60)
        assert out.splitlines()[-1].startswith(f"error: {where} signal 9 (SIGKILL)")


def test_a_kill_for_lack_of_memory_is_told_as_one():
    assert "by someone" in launch_module.how_it_ended(-9, oom_kills=0)
    assert "for lack of memory" in launch_module.how_it_ended(-9, oom_kills=1)


def test_a_verdict_on_the_run_is_the_reason_also_where_it_killed_a_rank(launch, tmp_path):
    body = f"""
if rank == 0:
    while not os.path.exists("{tmp_path}/pid_1"):
        time.sleep(0.05)
    time.sleep(0.2)
    note_reason("rank 1 is stopped", "verdict")
    os.kill(int(open("{tmp_path}/pid_1").read()), signal.SIGKILL)
    time.sleep(1)
    sys.exit(1)
time.sleep(600)
"""
    out, _ = launch(2, body).communicate(timeout=60)
    assert out.splitlines()[-1] == "error: rank 1 is stopped"


def test_a_mistake_of_the_user_is_told_once_without_a_rank(launch):
    body = "note_reason('--clip_low 3: must be at most 1.', 'mistake'); sys.exit(1)"
    out, _ = (done := launch(4, body)).communicate(timeout=60)
    assert (done.returncode, out) == (1, "error: --clip_low 3: must be at most 1.\n")


@pytest.mark.parametrize("said", ["raise RuntimeError('closed')", "note_reason('closed', 'mistake'); sys.exit(1)"])
def test_a_killed_rank_is_the_reason_and_not_what_the_others_say_because_of_it(said, launch, tmp_path):
    body = f"""
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while os.path.exists("/proc/" + open("{tmp_path}/pid_1").read()):
    time.sleep(0.05)
{said}
"""
    (tmp_path / "pid_1").write_text("1")
    out, _ = launch(2, body).communicate(timeout=60)
    assert out.splitlines()[-1].startswith("error: rank 1 was ended by signal 9 (SIGKILL)")


def test_a_signal_reaches_every_rank_and_a_run_that_then_ends_well_has_not_failed(launch, tmp_path):
    body = f"""
def note(number, frame):
    open("{tmp_path}/signals", "a").write(f"{{rank}} {{number}};")
    sys.exit(0)
signal.signal(signal.SIGTERM, note)
open("{tmp_path}/pid_" + str(2 + rank), "w").write("1")
while True:  # a signal in the instant before a sleep does not end it
    time.sleep(0.05)
"""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        launcher = launch(2, body)
        pids(tmp_path, 4)
        os.killpg(launcher.pid, number)  # as a terminal does: the ranks are in groups of their own
        assert launcher.wait(30) == 0
        assert sorted((tmp_path / "signals").read_text().split(";")) == ["", "0 15", "1 15"], "once each"
        for file in tmp_path.glob("pid_*"):
            file.unlink()
        (tmp_path / "signals").unlink()


def test_a_program_that_saves_nothing_ends_with_the_signal(launch, tmp_path):
    launcher = launch(2, "time.sleep(600)")
    pids(tmp_path, 2)
    launcher.terminate()
    assert launcher.wait(30) == 128 + signal.SIGTERM


def test_a_signal_to_one_rank_is_one_to_the_run(launch, tmp_path):
    """Also where the others wait for that rank and would do so for ever; it does not get the signal a second time."""
    body = f"""
from guards import signals
signals.listen()
open("{tmp_path}/pid_" + str(2 + rank), "w").write("1")
time.sleep(600)
"""
    launcher = launch(2, body)
    ranks = pids(tmp_path, 4)
    os.kill(ranks[1], signal.SIGTERM)
    out, _ = launcher.communicate(timeout=30)
    assert (launcher.returncode, out) == (0, "SIGTERM: ended before the first step; nothing is lost\n")


def test_a_second_signal_ends_ranks_that_do_not_listen(launch, tmp_path):
    launcher = launch(2, f"signal.signal(15, lambda *_: None); open('{tmp_path}/pid_{{}}'.format(2 + rank), 'w').write("
                         "'1'); [time.sleep(600) for _ in range(9)]")  # fmt: skip
    pids(tmp_path, 4)
    launcher.terminate()
    time.sleep(0.2)
    launcher.terminate()  # too soon: the same one by another way
    time.sleep(0.6)
    assert launcher.poll() is None
    launcher.terminate()
    assert launcher.wait(10) == 128 + signal.SIGTERM
    wait_until_gone(pids(tmp_path, 2), 1)


def test_wrong_numbers_are_refused():
    for wrong in (["--ranks", "0", "x.py"], ["--nodes", "2", "--node_rank", "2", "x.py"], []):
        command = [sys.executable, str(ROOT / "scripts" / "launch.py"), *wrong]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith("launch.py: error: it takes")
