"""What a rank says of itself, and what is said of ranks that come to a halt."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from flags import Stalls, take
from guards import stall
from guards.stall import WAITS, Board, Rank, Watch, beat, in_phase, note, report
from helpers import ENVIRONMENT, ROOT, flags
from inputs.checks import check_flags
from rollout import Engine

FAULTS = {  # of rank 1 of 3 -> what is said of it
    "hang": "rank 1 runs a backward pass on HOST, in update of step 3, at tests/distributed_stall.py:25 hang; the",
    "stop": "rank 1 is stopped, by SIGSTOP or a debugger (`kill -CONT PID` lets it go on) on HOST, in update of step 3",
    "exception": "rank 1 has ended on HOST, in update of step 3",
    "kill": "rank 1 was killed on HOST, in update of step 3",
    "hold": "rank 1 is in a call that lets no other Python thread run (all its stacks: ranks/rank_1.txt) on HOST, in",
    "all wait": "all ranks wait for each other: look at the network between them",
    "phases": "all ranks wait for each other: they are in sync of step 3 and update of step 3",
}


class Halted(NamedTuple):
    """Ranks of tests/distributed_stall.py."""

    folder: Path
    ranks: list[subprocess.Popen[bytes]]

    def of_rank(self, rank: int) -> dict[str, object]:
        return json.loads((self.folder / f"rank_{rank}.json").read_text())

    def said(self) -> list[str]:
        """What each rank has printed."""
        return [(self.folder / f"said_{rank}").read_text() for rank in range(3)]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def halted(tmp_path_factory) -> dict[str, Halted]:
    """Of each fault, with 6 s to a stall; "together": of a hang, with 8 s."""
    started = {}
    for name in ["together", *FAULTS]:
        folder = tmp_path_factory.mktemp("ranks")
        fault, limit = ("hang", "8") if name == "together" else (name, "6")
        command = [sys.executable, str(ROOT / "tests/distributed_stall.py"), fault, str(folder), limit]
        started[name] = Halted(folder, [])
        for rank in range(3):
            place = ENVIRONMENT | {"RANK": str(rank), "WORLD_SIZE": "3"}
            with (folder / f"said_{rank}").open("w") as output:
                started[name].ranks.append(subprocess.Popen(command, env=place, stdout=output))
    yield started
    for rank in [rank for each in started.values() for rank in each.ranks]:
        rank.kill()
        rank.wait()


def test_time_in_which_all_ranks_are_stopped_together_is_no_stall(halted):
    together = halted["together"]
    file = together.folder / "rank_2.json"
    wait_for(lambda: file.exists() and WAITS in file.read_text())
    for number, seconds in ((signal.SIGSTOP, 12), (signal.SIGCONT, 2)):
        for rank in together.ranks:
            rank.send_signal(number)
        time.sleep(seconds)
    assert together.said() == ["", "", ""]
    wait_for(lambda: "STALL" in together.said()[0])


@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_that_the_others_wait_for_is_named_once(fault, halted):
    ranks = halted[fault]
    wait_for(lambda: any(ranks.said()))
    time.sleep(2)
    told, *others = ranks.said()
    first, *table = told.splitlines()
    cause = FAULTS[fault].replace("HOST", ranks.of_rank(0)["host"]).replace("PID", str(ranks.ranks[1].pid))
    assert first.startswith("STALL: no progress for ") and f" s: {cause}" in first
    waiting = "0, 1, 2" if fault == "all wait" else "0, 2"
    assert any(line.startswith(f"  each of the ranks {waiting} waits for the other ranks (gather)") for line in table)
    assert others == ["", ""] and (ranks.folder / "stall.txt").read_text() == told.strip()
    if fault == "hold":
        assert "distributed_stall.py" in (ranks.folder / "rank_1.txt").read_text(), "stacks, by faulthandler's thread"


def test_of_ranks_that_all_work_the_first_that_came_to_a_halt_is_named_first():
    ranks = [Rank(rank, "node", phase="update", doing="runs a backward pass", line=f"{rank == 1}.py:1 f",
                  quiet_seconds=10 + rank % 2) for rank in range(3)]  # fmt: skip
    assert report(ranks, 10).splitlines() == [
        "STALL: no progress for 10 s: rank 1 runs a backward pass on node, in update of step 0, at True.py:1 f"
        "; the others wait",
        "  rank 1 runs a backward pass on node, in update of step 0, at True.py:1 f",
        "  each of the ranks 0, 2 runs a backward pass on node, in update of step 0, at False.py:1 f",
    ]  # fmt: skip


def test_a_host_that_is_gone_is_told_from_one_that_is_slow():
    assert stall.problem_of(Rank(1, "another"), silent=4.9) == ""
    assert stall.problem_of(Rank(1, "another"), silent=5.0).startswith("has not been heard of")


# One rank, in this process --------------------------------------------------------------------------------------------


@pytest.fixture
def board(monkeypatch) -> Board:
    board = Board()
    monkeypatch.setattr(stall, "BOARD", board)
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


def test_a_stall_is_told_once_and_its_end_too_and_a_large_file_is_progress(board, tmp_path, capsys):
    watch = Watch(tmp_path, 0, 1, limit=10.0)
    said = lambda: capsys.readouterr().out  # noqa: E731

    def tick(seconds: float) -> float:
        watch.tick(seconds)
        return json.loads((tmp_path / "rank_0.json").read_text())["quiet_seconds"]

    assert tick(6.0) == 6.0
    (tmp_path / "shard").write_bytes(bytes(2**21))
    assert tick(6.0) == 0.0
    (tmp_path / "shard").read_bytes()
    assert tick(6.0) == 0.0
    assert tick(6.0) == 6.0 and said() == ""
    tick(6.0)
    assert "s: rank 0 starts on " in (told := said())
    tick(60.0)
    assert said() == "" and (tmp_path / "stall.txt").read_text() == told.strip()
    beat("computes")
    assert tick(1.0) == 0.0
    assert said() == "STALL: over, the run goes on\n" and (tmp_path / "stall.txt").read_text() == ""


def test_an_engine_step_without_a_token_is_no_progress(board):
    detokenizer = SimpleNamespace(num_output_tokens=lambda: 5)
    states = {"12-x": SimpleNamespace(external_req_id="12", detokenizer=detokenizer)}
    processor = SimpleNamespace(request_states=states)
    engine = SimpleNamespace(llm=SimpleNamespace(llm_engine=SimpleNamespace(output_processor=processor)))
    rows = [SimpleNamespace(where=f"line {n}") for n in range(4)]
    before = Engine.tell_progress(engine, rows, 10, None)
    assert "1 requests unfinished, the oldest (line 2) has 5 tokens" in board.doing and board.count == 1
    assert Engine.tell_progress(engine, rows, 10, before) == before and board.count == 1
    detokenizer.num_output_tokens = lambda: 6
    assert Engine.tell_progress(engine, rows, 10, before) != before and board.count == 2


def test_the_report_comes_before_the_collectives_time_out():
    assert take(Stalls, flags()).seconds == 600
    assert take(Stalls, flags(timeout_minutes=1)).seconds == 48
    assert take(Stalls, flags(timeout_minutes=1, stall_seconds=59)).seconds == 59
    wrong = flags(model="Qwen/Qwen3-4B", timeout_minutes=1, stall_seconds=60)
    check_flags(wrong, num_ranks=1)
    with pytest.raises(ValueError, match=r"--stall_seconds 60.0: --timeout_minutes 1.0 would end .* use less than 60"):
        check_flags(wrong, num_ranks=2)
