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


def test_the_reason_says_where_the_rank_was_and_which_stall_came_before(launch, tmp_path):
    """By its file, and by the report of the stall (guards/stall.py), if they are of this start."""
    (ranks := tmp_path / "ranks").mkdir()
    body = "[os.utime(f'{sys.argv[-1]}/ranks/{name}') for name in {names}]; sys.exit(3)"
    for name, text in (
        ("rank_0.json", '{"step": 7, "phase": "update", "doi'),
        ("stall.txt", "STALL: it hangs\n  table"),
    ):
        (ranks / name).write_text(text)
        os.utime(ranks / name, (0, 0))
    for names, said in (
        ([], "rank 0 ended with exit status 3."),
        (["rank_0.json"], "rank 0 (step 7, update) ended with exit status 3."),
        (["rank_0.json", "stall.txt"], "STALL: it hangs; then rank 0 (step 7, update) ended with exit status 3."),
    ):
        os.utime(ranks / "rank_0.json", (0, 0))
        out, _ = launch(1, body.replace("{names}", str(names)), arguments=("--out_dir", str(tmp_path))).communicate()
        assert out == f"error: {said}\n"


def test_a_kill_for_lack_of_memory_is_told_as_one():
    assert "by someone" in launch_module.how_it_ended(-9, is_by_linux=False)
    assert "for lack of memory" in launch_module.how_it_ended(-9, is_by_linux=True)


def test_a_rank_that_has_left_its_reason_but_does_not_end_is_ended(launch, tmp_path):
    out, _ = launch(2, "note_reason('OSError: lost', 'error'); time.sleep(600)").communicate(timeout=60)
    assert "ended with OSError: lost" in out.splitlines()[-1]
    wait_until_gone(pids(tmp_path, 2), 1)


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


SAVES = """
listen(); arm({grace})
open(f"{{sys.argv[0]}}_{{rank}}", "w").close()
while not requested():
    time.sleep(0.05)
time.sleep({saving})
print(f"rank {{rank}} has saved")
"""


def armed(tmp_path, launcher) -> list[int]:
    """Its two ranks, when they have something to save."""
    while not all((tmp_path / f"program.py_{rank}").exists() for rank in range(2)):
        assert launcher.poll() is None
        time.sleep(0.02)
    return pids(tmp_path, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_every_rank_and_a_run_that_then_saves_has_not_failed(launch, tmp_path, number):
    launcher = launch(2, SAVES.format(grace=30, saving=0))
    armed(tmp_path, launcher)
    os.killpg(launcher.pid, number)  # as a terminal does: the ranks are in groups of their own
    out, _ = launcher.communicate(timeout=30)
    assert (launcher.returncode, sorted(out.splitlines())) == (0, ["rank 0 has saved", "rank 1 has saved"])


def test_a_signal_to_one_rank_or_to_all_processes_is_one_to_the_run(launch, tmp_path):
    for is_to_all in (False, True):
        launcher = launch(2, SAVES.format(grace=30, saving=1))
        ranks = armed(tmp_path, launcher)
        for pid in [*ranks, launcher.pid] if is_to_all else ranks[1:]:
            os.kill(pid, signal.SIGTERM)
        out, _ = launcher.communicate(timeout=30)
        assert (launcher.returncode, len(out.splitlines())) == (0, 2)
        [(tmp_path / f"program.py_{rank}").unlink() for rank in range(2)]


def test_a_run_that_does_not_save_within_its_grace_ends_with_a_sentence(launch, tmp_path):
    launcher = launch(2, SAVES.format(grace=1, saving=600))
    armed(tmp_path, launcher)
    launcher.terminate()
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert out.startswith("error: SIGTERM: the run could not save within --grace_seconds 1; the same command continues")


def test_a_program_that_saves_nothing_ends_with_the_signal(launch, tmp_path):
    launcher = launch(2, "time.sleep(600)")
    pids(tmp_path, 2)
    launcher.terminate()
    assert launcher.wait(30) == 128 + signal.SIGTERM


def test_a_signal_before_there_is_something_to_save_ends_the_run_well(launch, tmp_path):
    """Also one to a single rank, where the others wait for it and would do so for ever."""
    launcher = launch(2, f"listen(); open(f'{tmp_path}/pid_{{2 + rank}}', 'w').write('1'); time.sleep(600)")
    os.kill(pids(tmp_path, 4)[1], signal.SIGTERM)
    out, _ = launcher.communicate(timeout=30)
    assert (launcher.returncode, out) == (0, "SIGTERM: ended before the first step; nothing is lost\n")


def test_a_second_signal_ends_ranks_that_are_still_saving(launch, tmp_path):
    launcher = launch(2, SAVES.format(grace=60, saving=600))
    ranks = armed(tmp_path, launcher)
    launcher.terminate()
    time.sleep(0.2)
    launcher.terminate()  # too soon: the same one by another way
    time.sleep(0.6)
    assert launcher.poll() is None
    launcher.terminate()
    assert launcher.wait(10) == 128 + signal.SIGTERM
    wait_until_gone(ranks, 1)


def test_without_a_launcher_a_rank_hears_signals_itself(tmp_path):
    for grace, saving, signals, status in ((30, 0, 1, 0), (30, 600, 2, 143), (1, 600, 1, 1)):
        body = PROGRAM.format(
            root=str(ROOT), folder=tmp_path, joins=False, body=SAVES.format(grace=grace, saving=saving)
        )
        command = [sys.executable, "-c", body]
        (file := tmp_path / "-c_0").unlink(missing_ok=True)
        with subprocess.Popen(command, env=os.environ | {"RANK": "0"}, cwd=tmp_path) as rank:
            while not file.exists():
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
        ([[0, 1]], "os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)", 143, 1),  # a signal is no fault
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
        assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith(
            "launch.py: error: --max_restarts is for one node" if wrong is restarts else "launch.py: error: it takes"
        )
