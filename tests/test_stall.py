"""The stall doctor and the fingerprint: what they say of ranks that hang, and of ranks that differ."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flags import Stalls, take
from forked import run_ranks
from fsdp_utils import World
from guards import heartbeat
from guards.diagnosis import WAITS, Rank, likely_cause, report, short_stack, stalled_seconds
from guards.doctor import Doctor
from guards.fingerprint import Diverged, check_same_start, check_same_step, differences, digest
from guards.heartbeat import BOARD, Heartbeat, beat, heartbeat_file, in_phase, note, read, state_of, write
from helpers import ROOT, flags, metrics_of, training_flags
from inputs.checks import check_flags
from rollout import Engine

HOST = socket.gethostname()


def make_heartbeat(rank: int = 0, **changes: object) -> Heartbeat:
    values = {
        "run": "a", "rank": rank, "host": HOST, "pid": 100 + rank, "started": "1", "number": 1, "time": "", "step": 3,
        "phase": "update", "phase_seconds": 20.0, "doing": "runs a forward pass", "quiet_seconds": 10.0,
        "resident_bytes": 2**30, "gpu_bytes": 0,
    }  # fmt: skip
    return Heartbeat(**values | changes)


def seen(rank: int, state: str = "S", silent: float = 0.0, **changes: object) -> Rank:
    return Rank(make_heartbeat(rank, **changes), silent, state)


WAITING = {"doing": f"{WAITS} (gather)"}

# What is said -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        ([seen(0), seen(1, "T", 9)], "rank 1 (process 101 on HOST) is stopped .* in update of step 3; the others wait"),
        ([seen(0), seen(1, "X")], r"rank 1 \(.* has ended, in update of step 3"),
        ([seen(0), seen(1, has_ended=True)], r"rank 1 \(.* has ended"),
        ([seen(0), seen(1, "?", 40, host="node7")], r"on node7\) has not been heard of for 40 s: it or its host"),
        ([seen(0), seen(1, "S", 9)], "rank 1 .* is in a call that lets no other Python thread run"),
        ([seen(0), seen(1, "D", 9)], "rank 1 .* waits for a disk or a network file system"),
        ([seen(0, "T"), seen(1, "T"), seen(2)], r"rank 0 .* is stopped .*\(1 more do not run, either\)"),
        ([seen(0, **WAITING), seen(1)], "rank 1 .* runs a forward pass, in update of step 3, .*10 s; the others wait"),
        ([seen(0), seen(1, quiet_seconds=19.0)], "rank 1 .* runs a forward pass, .* 19 s; the others wait"),
        ([seen(0), seen(1)], "runs a forward pass, .*; so do all others"),
        ([seen(0)], "rank 0 .* runs a forward pass, in update of step 3, without progress for 10 s$"),
        ([seen(0, **WAITING), seen(1, **WAITING)], "all ranks wait for each other in update of step 3: .* network"),
        (
            [seen(0, **WAITING), seen(1, **WAITING), seen(2, phase="sync", **WAITING)],
            "different phases, .*: ranks 0-1 in update of step 3; rank 2 in sync of step 3",
        ),
        ([seen(0, phase="checkpoint", doing="writes the checkpoint")], "writes .* the disk may be slow"),
        ([seen(0, **WAITING), seen(1, stopped="7, 8")], "rank 1 .* has started processes that are stopped: 7, 8"),
    ],
)  # fmt: skip
def test_the_likely_cause(ranks, cause):
    assert re.search(cause.replace("(process 101 on HOST)", rf"\(process 101 on {HOST}\)"), likely_cause(ranks))


def test_a_rank_that_waits_while_another_one_works_is_no_stall():
    assert stalled_seconds([seen(0, quiet_seconds=1000), seen(1, quiet_seconds=0.5)]) == 0.5
    assert stalled_seconds([seen(0, quiet_seconds=1000), seen(1, quiet_seconds=700)]) == 700


def test_a_rank_that_does_not_run_is_a_stall_although_another_one_works():
    working = seen(0, quiet_seconds=0.5)
    assert stalled_seconds([working, seen(1, "T", silent=3)]) == 3
    assert stalled_seconds([working, seen(1, "S", silent=30)]) == 30
    assert stalled_seconds([working, seen(1, "S", silent=7)]) == 0.5, "a busy machine"


def test_the_start_may_take_longer():
    assert stalled_seconds([seen(0, phase="start", quiet_seconds=130), seen(1, quiet_seconds=500)]) == 10
    assert stalled_seconds([seen(0, phase="start", quiet_seconds=50)]) == 0
    assert stalled_seconds([seen(0, phase="start"), seen(1, "T", silent=3, phase="start")]) == 3


def test_the_silence_of_a_rank_that_has_ended_is_no_stall():
    assert stalled_seconds([seen(0, quiet_seconds=0.5), seen(1, "X", silent=700, has_ended=True)]) == 0.5


def test_ranks_of_which_the_same_can_be_said_share_a_paragraph():
    ranks = [seen(n, stack="a.py:1 f") for n in range(63)] + [seen(63, stack="b.py:2 g", gpu_bytes=2**31)]
    text = report(ranks, 30, Path("runs/x/stalls/y"))
    assert f"ranks 0-62 on {HOST}, in update of step 3 for 20 s, quiet for 10 s: runs a forward pass" in text
    assert "rank 63 on" in text and "2.0 GiB of tensors on the GPU" in text and "b.py:2 g" in text
    assert len(text.splitlines()) == 7 and text.endswith("all stacks: runs/x/stalls/y")


THREADS = """
import faulthandler, threading

def other_thread():
    ready.release()
    release.wait()

def work():
    faulthandler.dump_traceback()

ready, release = threading.Semaphore(0), threading.Event()
threads = [threading.Thread(target=other_thread) for _ in range({})]
for thread in threads:
    thread.start()
    ready.acquire()
work()
release.set()
"""


def dump_beside(num_threads: int) -> str:
    """What faulthandler writes in a process whose main thread calls `work` of threads.py, beside others."""
    program = f"exec(compile({THREADS.format(num_threads)!r}, 'threads.py', 'exec'))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr


def test_the_stack_is_the_main_threads_innermost_frame_and_our_own():
    dump = dump_beside(2)
    assert dump.count("in other_thread") == 2
    assert short_stack(dump) == "threads.py:9 work < threads.py:16 <module>"
    assert short_stack("") == ""


def test_a_dump_without_the_main_thread_gives_no_stack_of_another_one():
    dump = dump_beside(100)
    assert "in work" not in dump and short_stack(dump) == ""


# Heartbeats -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def board(monkeypatch):
    board = heartbeat.Board()
    monkeypatch.setattr(heartbeat, "BOARD", board)
    return board


def test_phases_nest_and_the_phase_of_an_exception_stays(board):
    with in_phase("sample", 3):
        with in_phase("reward", 3):
            assert (board.phase, board.step) == ("reward", 3)
        assert board.phase == "sample"
    assert board.phase == "loop"
    with pytest.raises(KeyError), in_phase("update", 4):
        raise KeyError
    assert (board.phase, board.step) == ("update", 4)


def test_a_note_is_no_progress_and_a_beat_costs_nothing(board):
    start = time.perf_counter()
    for _ in range(100_000):
        beat("works")
    assert time.perf_counter() - start < 1.0, "more than 10 microseconds each"
    note("waits")
    assert (board.count, board.doing) == (100_000, "waits")


def test_a_heartbeat_is_read_as_it_was_written_or_not_at_all(tmp_path):
    file = tmp_path / "rank_0.json"
    assert read(file) is None
    for doing in ("x" * 500, "short"):
        write(make_heartbeat(doing=doing), file)
        assert read(file) == make_heartbeat(doing=doing)
    file.write_bytes(file.read_bytes()[:-5])
    assert read(file) is None


def test_a_process_is_not_taken_for_an_earlier_one_of_its_number():
    started = heartbeat.process_fields(os.getpid())[19]
    assert state_of(make_heartbeat(pid=os.getpid(), started=started)) in "RS"
    assert state_of(make_heartbeat(pid=os.getpid(), started="1")) == "X"
    assert state_of(make_heartbeat(host="another")) == "?"


def test_files_of_an_earlier_start_are_not_heartbeats(tmp_path):
    doctor = Doctor(tmp_path, World(0, 2, 1, torch.device("cpu")), Stalls(1.0), run="now")
    write(make_heartbeat(1, run="earlier", phase="sync"), heartbeat_file(tmp_path, 1))
    doctor._look_at(1, 1.0)
    doctor._look_at(1, 1.0)
    assert doctor.others[1].heartbeat.phase == BOARD.phase and doctor.others[1].silent_seconds == 1.0
    write(make_heartbeat(1, run="now", phase="sync"), heartbeat_file(tmp_path, 1))
    doctor._look_at(1, 1.0)
    assert doctor.others[1].heartbeat.phase == "sync" and doctor.others[1].silent_seconds == 0.0
    doctor.end()
    assert read(heartbeat_file(tmp_path, 0)).has_ended


def test_writing_or_reading_a_large_file_is_progress_and_a_heartbeat_is_none(tmp_path):
    doctor = Doctor(tmp_path, World(0, 1, 1, torch.device("cpu")), Stalls(100.0), run="now")
    doctor.tick()

    def quiet_seconds() -> float:
        time.sleep(0.05)
        doctor.tick()
        return doctor.heartbeat.quiet_seconds

    assert quiet_seconds() > 0
    (tmp_path / "shard").write_bytes(bytes(2**21))
    assert quiet_seconds() == 0
    assert quiet_seconds() > 0
    (tmp_path / "shard").read_bytes()
    assert quiet_seconds() == 0
    doctor.end()


def test_an_engine_step_without_a_token_is_no_progress():
    detokenizer = SimpleNamespace(num_output_tokens=lambda: 5)
    states = {"12-x": SimpleNamespace(external_req_id="12", detokenizer=detokenizer)}
    processor = SimpleNamespace(request_states=states)
    engine = SimpleNamespace(llm=SimpleNamespace(llm_engine=SimpleNamespace(output_processor=processor)))
    rows = [SimpleNamespace(where=f"line {n}") for n in range(4)]
    before = Engine.tell_progress(engine, rows, 10, None)
    count = BOARD.count
    assert "1 requests unfinished, the oldest (line 2) has 5 tokens" in BOARD.doing
    assert Engine.tell_progress(engine, rows, 10, before) == before and BOARD.count == count
    detokenizer.num_output_tokens = lambda: 6
    assert Engine.tell_progress(engine, rows, 10, before) != before and BOARD.count == count + 1


def test_the_report_comes_before_the_collectives_time_out(monkeypatch):
    assert take(Stalls, flags()).seconds == 600
    assert take(Stalls, flags(timeout_minutes=1)).seconds == 48
    assert take(Stalls, flags(timeout_minutes=1, stall_seconds=59)).seconds == 59
    wrong = flags(model="Qwen/Qwen3-4B", timeout_minutes=1, stall_seconds=60)
    check_flags(wrong, num_ranks=1)
    with pytest.raises(ValueError, match="--stall_seconds 60: --timeout_minutes 1 would end .* use less than 60"):
        check_flags(wrong, num_ranks=2)


# The fingerprint ------------------------------------------------------------------------------------------------------


def test_the_rank_that_differs_is_named():
    assert differences([{"--seed": "1"}] * 4) == ""
    three_of_four = [{"--seed": "1"}, {"--seed": "2"}, {"--seed": "1"}, {"--seed": "1"}]
    assert differences(three_of_four) == "rank 1 has --seed 2 (the others: 1)"
    assert differences([{"a": "1"}, {}]) == "rank 1 has a none (the others: 1)"
    many = [{str(n): "x" for n in range(6)}, {str(n): "y" for n in range(6)}]
    assert differences(many).endswith("2 y (the others: x), and 3 more differences")


def test_a_digest_sees_every_byte_and_every_border():
    pieces = [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([], np.int32)]
    others = [[np.array([1, 2, 3], np.int32)], pieces[:2], [pieces[1], pieces[0], pieces[2]], [b"", *pieces]]
    assert digest(pieces) == digest([piece.copy() for piece in pieces])
    assert len({digest(each) for each in [pieces, *others]}) == 5


def test_flags_code_and_batch_are_compared(monkeypatch):
    told = []

    def gather(own: dict[str, str]) -> list[dict[str, str]]:
        told.append(own)
        return [own, own | change]

    change = {"--group_size": "4"}
    monkeypatch.setattr("guards.fingerprint.gather_from_ranks", gather)
    with pytest.raises(
        ValueError, match=r"^rank 1 has --group_size 4 \(the others: 8\); start all ranks with the same"
    ):
        check_same_start({"group_size": 8})
    assert {"run.py", "guards/doctor.py", "torch"} < told[0].keys()
    change = {}
    check_same_start({"group_size": 8})
    check_same_step(prompts=[np.arange(3)])
    assert {"step", "phase", "flags", "code", "prompts"} == told[-1].keys()
    change = {"prompts": "another"}
    with pytest.raises(Diverged, match=r"rank 1 has prompts another"):
        check_same_step(prompts=[np.arange(3)])


# Whole runs -----------------------------------------------------------------------------------------------------------

STOPS = {"sample": 1, "reward": 0, "logprobs": 1, "update": 0, "sync": 1, "evaluate": 0, "log": 0, "checkpoint": 1}
COMPUTED = ("reward/", "completion/", "policy/", "optim/", "eval/")
STALL_SECONDS = 2
SHORT = {
    "total_steps": 2, "eval_every": 1, "save_every": 1, "eval_before_training": None, "stall_seconds": STALL_SECONDS,
}  # fmt: skip


def reports_of(out_dir: Path) -> list[str]:
    return [file.read_text() for file in sorted(out_dir.glob("stalls/*/report.txt"))]


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> float:
    """The seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, what
        time.sleep(0.05)
    return time.monotonic() - start


def train(policy: Path, out_dir: Path, faults: dict[str, object], **changes: object):
    options = training_flags(policy, out_dir, **SHORT | changes)
    return run_ranks(2, str(ROOT / "tests/distributed_doctor.py"), [json.dumps(faults), *options], timeout=200)


def continue_after_report(out_dir: Path, phase: str, rank: int) -> None:
    """Waits until the rank has stopped itself in the phase and is reported; lets it go on."""

    def is_stopped() -> bool:
        found = read(heartbeat_file(out_dir, rank))
        return found is not None and found.phase == phase and state_of(found) == "T"

    def is_reported() -> bool:
        return any(all(each in text for each in words) for text in reports_of(out_dir))

    wait_for(is_stopped, f"rank {rank} does not come to {phase}")
    pid = read(heartbeat_file(out_dir, rank)).pid
    words = f"rank {rank} (process {pid} on {HOST}) is stopped", f"in {phase} of step 1; the others wait for it."
    assert wait_for(is_reported, f"the stop in {phase} is not reported") < STALL_SECONDS + 10
    os.kill(pid, signal.SIGCONT)


def is_reward_reported(out_dir: Path) -> bool:
    first_lines = [text.splitlines()[1] for text in reports_of(out_dir)]
    return any("waits for the reward workers: 16 items left, process " in line for line in first_lines)


def test_stops_in_every_phase_and_a_slow_reward_are_named_and_change_nothing(policy, tmp_path):
    is_slow = tmp_path / "is_slow"
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def score(completion, answer, columns):\n"
        f"    while Path('{is_slow}').exists(): time.sleep(0.05)\n"
        "    return float(len(completion) % 3 == 0)\n"
    )
    options = {"reward": f"{tmp_path}/slow.py:score", "reward_timeout": 60}
    is_slow.touch()
    with ThreadPoolExecutor() as pool:
        disturbed = pool.submit(train, policy, tmp_path / "disturbed", {"stop": STOPS}, **options)
        try:
            for phase, rank in STOPS.items():
                continue_after_report(tmp_path / "disturbed", phase, rank)
                if phase == "reward":
                    took = wait_for(lambda: is_reward_reported(tmp_path / "disturbed"), "the reward is not reported")
                    assert took < STALL_SECONDS + 10
                    is_slow.unlink()
        finally:
            is_slow.unlink(missing_ok=True)
        done = disturbed.result()
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("STALL: no progress for") == len(reports_of(tmp_path / "disturbed")) > len(STOPS)
    assert done.stdout.count("the run goes on, after") >= len(STOPS)
    assert f"{policy / 'train.jsonl'}, line" in done.stdout, "the row that is being graded"
    assert "reward.py:" in done.stdout and "sample_round" in done.stdout, "stacks"

    done = train(policy, tmp_path / "undisturbed", {}, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    both = [tmp_path / "disturbed", tmp_path / "undisturbed"]
    for step in (1, 2):
        values = [{name: x for name, x in metrics_of(each)[step].items() if name.startswith(COMPUTED)} for each in both]
        assert values[0] == values[1] and len(values[0]) > 20
    assert len({(each / "final" / "model.safetensors").read_bytes() for each in both}) == 1


@pytest.mark.parametrize(
    ("fault", "cause", "stack"),
    [
        ("hang", "begins to sample 16 completions, in sample of step 1", "distributed_doctor.py:32 hang"),
        ("hold", "is in a call that lets no other Python thread run, in update of step 1", "act"),
    ],
)
def test_a_rank_that_hangs_ends_the_run_where_asked_to(fault, cause, stack, policy, tmp_path):
    done = train(policy, tmp_path / "run", {fault: 1}, on_stall="stop", stall_seconds=5)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: rank 1 (process ") and cause in error
    assert error.endswith("the same command continues from the last checkpoint.")
    (text,) = reports_of(tmp_path / "run")
    assert stack in text and "(most recent call first)" in next(tmp_path.glob("run/stalls/*/rank_1.txt")).read_text()


def test_a_rank_with_another_batch_ends_the_run_and_is_named(policy, tmp_path):
    done = train(policy, tmp_path / "run", {"reward": 1})
    assert done.returncode == 1
    assert "error: the ranks have diverged (step 1, sample): rank 1 has rewards " in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "before anything is trained on it"
