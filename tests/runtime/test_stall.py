"""What a rank says of itself, and what is said of ranks that come to a halt."""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest

from flags import stall_limit
from helpers.made_up import flags
from helpers.runs import ENVIRONMENT, PROGRAMS, ROOT, wait_for
from runtime import stall
from runtime.stall import WAITS, Board, Rank, StallWatch, beat, in_phase, report

FAULTS = {  # a fault of rank 1 of 3 -> what is said of it
    "hang": "rank 1 runs a backward pass on HOST, in update of step 3, at tests/helpers/programs.py:97 hang; the",
    "stop": "rank 1 does not answer: its process PID is stopped (`kill -CONT PID` resumes it), was killed, or hangs in "
    "a call on HOST, in update of step 3",
    "exception": "rank 1 has ended on HOST, in update of step 3",
}


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    """For each fault: the folder of `halt`, with what its ranks have `said`, and the ranks."""
    started = {fault: (tmp_path_factory.mktemp("ranks"), []) for fault in FAULTS}
    for fault, (folder, ranks) in started.items():
        command, output = [sys.executable, ROOT / PROGRAMS, "halt", fault, folder], folder / "said"
        ranks += [subprocess.Popen([*command, rank], env=ENVIRONMENT, stdout=output.open("a")) for rank in "012"]
    yield started
    for rank in [rank for _, ranks in started.values() for rank in ranks]:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_that_the_others_wait_for_is_named(fault, halted):
    folder, ranks = halted[fault]
    wait_for(lambda: (folder / "stall.txt").exists() and (folder / "stall.txt").read_text())
    report = (folder / "said").read_text()
    cause = FAULTS[fault].replace("HOST", stall.socket.gethostname()).replace("PID", str(ranks[1].pid))
    assert f" s: {cause}" in report.partition("\n")[0]
    assert "each of the ranks 0, 2 waits for the other ranks (gather)" in report
    assert (folder / "stall.txt").read_text() == report.strip()


def test_the_table_names_the_first_rank_that_came_to_a_halt():
    """The table names the first rank that came to a halt, or says that all wait."""
    ranks = [Rank(rank, "node", line=f"{rank == 1}.py", quiet_seconds=10 + rank % 2) for rank in range(3)]
    first = "rank 1 starts on node, in start of step 0, at True.py"
    assert f"10 s: {first}; the others wait\n  {first}\n  each of the ranks 0, 2 starts on" in report(ranks, 10)
    waiting = [Rank(rank, step=3, phase="update", doing=f"{WAITS} (gather)") for rank in range(2)]
    found = report([waiting[0], replace(waiting[1], phase="sync")], 10)
    assert "all ranks wait for each other: look at the network" in found
    assert "in sync of step 3" in found and "in update of step 3" in found


@pytest.fixture
def board(monkeypatch) -> Board:
    monkeypatch.setattr(stall, "BOARD", Board())
    return stall.BOARD


def test_phases_nest_and_a_note_is_no_progress(board):
    """A note is no progress, phases nest, and the phase of an exception stays."""
    beat("works")
    beat("waits", is_progress=False)
    assert (board.count, board.doing) == (1, "waits")
    with in_phase("sample", 3):
        with in_phase("reward", 3):
            assert (board.phase, board.step) == ("reward", 3)
        assert board.phase == "sample"
    assert board.phase == "loop"
    with pytest.raises(KeyError), in_phase("update", 4):
        raise KeyError
    assert (board.phase, board.step) == ("update", 4)


def test_a_stall_and_its_end_are_each_reported_once(board, tmp_path, capsys):
    """A stall is reported once, and so is its end; neither a large file nor a pause of all ranks is a stall."""
    watch = StallWatch(tmp_path, 0, 1, limit=5.0)

    def tick(seconds: float = 2.0) -> tuple[float, str]:  # seconds without progress, what is said
        watch.tick(seconds)
        return json.loads((tmp_path / "rank_0.json").read_text())["quiet_seconds"], capsys.readouterr().out

    assert [tick(), tick()] == [(2.0, ""), (4.0, "")]
    (tmp_path / "shard").write_bytes(bytes(2**21))
    assert tick() == (0.0, "")
    (tmp_path / "shard").read_bytes()
    assert [tick(), tick(600.0)] == [(0.0, ""), (2.0, "")], "it was stopped for 598 s"
    assert tick() == (4.0, "")
    assert "s: rank 0 starts on " in (report := tick()[1])
    assert tick()[1] == "" and (tmp_path / "stall.txt").read_text() == report.strip()
    beat("computes")
    assert tick() == (0.0, "STALL: over, the run continues\n") and (tmp_path / "stall.txt").read_text() == ""


def test_the_report_comes_before_the_collectives_time_out():
    given = {}, {"timeout_minutes": 1}, {"timeout_minutes": 1, "stall_seconds": 40}
    assert [stall_limit(flags(**changes)) for changes in given] == [600, 48, 40]


def test_the_file_of_a_rank_that_fails_has_its_last_phase(board, tmp_path, monkeypatch):
    """However short that was: the launcher names it."""
    errors = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: errors.append(error))
    StallWatch(tmp_path / "ranks", 0, 1, 60.0)
    with suppress(ValueError), in_phase("sample", 3), in_phase("update", 3):
        raise ValueError("wrong")
    sys.excepthook(ValueError, ValueError("wrong"), None)
    found = json.loads((tmp_path / "ranks" / "rank_0.json").read_text())
    assert (board.phase, found["phase"], found["problem"], len(errors)) == ("update", "update", "has ended", 1)
