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
from guards.start import arm, join_launcher, listen, note_reason, requested
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
    code = "from guards.start import die_with_parent; die_with_parent(1); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


KILLED = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not (pid := os.path.exists("FOLDER/pid_1") and open("FOLDER/pid_1").read()) or os.path.exists(f"/proc/{pid}"):
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("body", "last_line"),
    [
        ("time.sleep(2 - rank); raise ValueError(f'said by {rank}')", "rank 1 ended with ValueError: said by 1"),
        ("sys.exit(3) if rank else time.sleep(600)", "rank 1 ended with exit status 3."),
        ("note_reason('--clip_low 3: must be at most 1.', 'mistake'); sys.exit(1)", "--clip_low 3: must be at most 1."),
        ("note_reason('OSError: lost', 'error') if rank else 0; time.sleep(600)", "rank 1 ended with OSError: lost"),
        (KILLED + "raise RuntimeError('closed')", "rank 1 was ended by signal 9 (SIGKILL)"),
        (KILLED + "note_reason('closed', 'mistake'); sys.exit(1)", "rank 1 was ended by signal 9 (SIGKILL)"),
    ],
)
def test_the_last_line_is_the_reason_of_the_first_rank_that_failed_and_all_are_ended(body, last_line, launch, tmp_path):
    """Also of one that has left its reason and does not end; a killed rank, not what others say because of it."""
    out, _ = (done := launch(2, body.replace("FOLDER", str(tmp_path)))).communicate(timeout=60)
    assert done.returncode == 1
    assert out.splitlines()[-1].startswith(f"error: {last_line}") and out.count(last_line) <= 1 + ("raise" in body)
    assert ("Traceback" in out) == ("raise" in body), "where it happened stands above"
    wait_until_gone(pids(tmp_path, 2), 1)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ([], "rank 0 ended with"),
        (["rank_0.json"], "rank 0 (step 7, update) ended with"),
        (["rank_0.json", "stall.txt"], "STALL: it hangs; then rank 0 (step 7, update) ended with"),
    ],
)
def test_the_reason_says_where_the_rank_was_and_which_stall_came_before(written, said, launch, tmp_path):
    """By the files of guards/stall.py, if they are of this start."""
    (ranks := tmp_path / "ranks").mkdir()
    for name, text in (("rank_0.json", '{"step": 7, "phase": "update", "d'), ("stall.txt", "STALL: it hangs\n  table")):
        (ranks / name).write_text(text)
        os.utime(ranks / name, (0, 0))
    body = f"[os.utime('{ranks}/' + name) for name in {written}]; sys.exit(3)"
    out, _ = launch(1, body, arguments=("--out_dir", str(tmp_path))).communicate(timeout=60)
    assert out == f"error: {said} exit status 3.\n"


def test_a_kill_for_lack_of_memory_is_told_as_one():
    assert "by someone" in launch_module.how_it_ended(-9, is_by_linux=False)
    assert "for lack of memory" in launch_module.how_it_ended(-9, is_by_linux=True)


SAVES = """
listen()
arm({grace}) if {grace} else None
open(f"{folder}/pid_{{2 + rank}}", "w").write("1")
while not requested():
    time.sleep(0.05)
time.sleep({saving})
print("saved", flush=True)
"""


@pytest.mark.parametrize(
    ("grace", "saving", "signals", "status", "said"),
    [  # to the launcher's process group, as a terminal does
        (30, 0, [signal.SIGINT], 0, ["saved", "saved"]),
        (30, 0, [signal.SIGUSR1], 0, ["saved", "saved"]),
        (30, 0, [signal.SIGHUP], 0, ["saved", "saved"]),
        (30, 0, [signal.SIGTERM, signal.SIGTERM], 0, ["saved", "saved"]),  # too soon: the same one by another way
        (30, 0, ["rank 1"], 0, ["saved", "saved"]),
        (30, 1, ["rank 1", "rank 0", signal.SIGTERM], 0, ["saved", "saved"]),  # as Slurm does
        (30, 600, [signal.SIGTERM, "wait", signal.SIGTERM], 143, ["ended by a second signal"]),
        (1, 600, [signal.SIGTERM], 1, ["error: SIGTERM: the run could not save within --grace_seconds 1; the same "]),
        (0, 0, ["rank 1"], 0, ["SIGTERM: ended before the first step; nothing is lost"]),
    ],
)
def test_a_signal_asks_every_rank_to_save_and_to_end(grace, saving, signals, status, said, launch, tmp_path):
    launcher = launch(2, SAVES.format(grace=grace, saving=saving, folder=tmp_path))
    ranks = pids(tmp_path, 4)[:2]
    for number in signals:
        if number == "wait":
            time.sleep(0.7)
        elif isinstance(number, str):
            os.kill(ranks[int(number[-1])], signal.SIGTERM)
        else:
            os.killpg(launcher.pid, number)
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == status
    assert [line.partition("command")[0] for line in out.splitlines()] == said
    wait_until_gone(ranks, 1)


def test_a_program_that_does_not_listen_ends_with_the_signal(launch, tmp_path):
    launcher = launch(2, "time.sleep(600)")
    pids(tmp_path, 2)
    launcher.terminate()
    assert launcher.wait(30) == 143


@pytest.mark.parametrize(
    ("grace", "saving", "signals", "status"), [(30, 0, 1, 0), (30, 600, 2, 143), (1, 600, 1, 1), (0, 0, 1, 0)]
)
def test_without_a_launcher_a_rank_does_it_itself(grace, saving, signals, status, tmp_path):
    body = SAVES.format(grace=grace, saving=saving, folder=tmp_path)
    program = PROGRAM.format(root=str(ROOT), folder=tmp_path, joins=False, body=body)
    with subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"RANK": "0"}) as rank:
        while not (tmp_path / "pid_2").exists():
            time.sleep(0.02)
        for _ in range(signals):
            rank.terminate()
            time.sleep(0.7)
        assert rank.wait(10) == status


LOGS = """
log = sys.argv[-1] + "/metrics.jsonl"
starts = open(sys.argv[-1] + "/starts", "a"); starts.write("x"); starts.close()
num_starts = len(open(starts.name).read())
for step in {steps}[num_starts - 1]:
    print('{{"step": %d, "loss": 1}}' % step, file=open(log, "a"))
{then}
"""


@pytest.mark.parametrize(
    ("steps", "then", "status", "num_starts"),
    [
        ([[0, 1, 2], [3], []], "sys.exit(num_starts < 3)", 0, 3),
        ([[0, 1], [2], [3], [4], [5]], "sys.exit(1)", 1, 4),  # --max_restarts 3
        ([[0, 1], []], "os.kill(os.getpid(), signal.SIGKILL)", 1, 2),  # it comes back at once
        ([[0]], "note_reason('--clip_low 3: must be at most 1.', 'mistake'); sys.exit(1)", 1, 1),
        ([[0, 1]], "listen(); arm(1); os.kill(os.getppid(), 15); time.sleep(60)", 1, 1),  # it ends by a signal
    ],
)
def test_what_had_done_a_step_is_started_again(steps, then, status, num_starts, launch, tmp_path):
    body = LOGS.format(steps=steps, then=then)
    launcher = launch(1, body, "--max_restarts", "3", arguments=("--out_dir", str(tmp_path)))
    out, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, len((tmp_path / "starts").read_text())) == (status, num_starts)
    restarts = [line for line in out.splitlines() if line.startswith("restart ")]
    assert len(restarts) == num_starts - 1
    if restarts:
        assert restarts[0] == f"restart 1 of 3, {len([x for x in steps[0] if x])} steps after the last start"
    assert status != 1 or out.splitlines()[-1].startswith("error: ")


def test_wrong_numbers_are_refused():
    restarts = ["--nodes", "2", "--max_restarts", "1", "x.py"]
    for wrong in (["--ranks", "0", "x.py"], ["--nodes", "2", "--node_rank", "2", "x.py"], [], restarts):
        command = [sys.executable, str(ROOT / "scripts" / "launch.py"), *wrong]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = "--max_restarts is for one node; on several use torchrun" if wrong is restarts else "it takes a program"
        assert done.returncode == 2 and f"launch.py: error: {said}" in done.stderr
