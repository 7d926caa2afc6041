"""A rank knows its phase, and leaves its stacks in a file if it makes no progress."""

import faulthandler
import signal
import subprocess
import sys

import pytest

from helpers.runs import ENVIRONMENT, wait_for
from runtime.rank import PLACE, Place, beat
from runtime.stall import in_phase, watch

HANGS = """
import sys, time
from pathlib import Path
from runtime.rank import beat
from runtime.stall import watch

def work() -> None:
    for _ in range(15):
        time.sleep(0.1)
        beat()
def hang() -> None:
    time.sleep(600)
watch(Path(sys.argv[1]), 3, timeout_minutes=1 / 48)  # its stacks come after a second
work()
print("has worked", flush=True)
hang()
"""


def test_a_rank_that_hangs_leaves_its_stacks(tmp_path):
    """Longer work leaves nothing as long as it has a beat; nor does the run end by a stall."""
    command = [sys.executable, "-c", HANGS, tmp_path / "ranks"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE)
    file = tmp_path / "ranks" / "rank_3.txt"
    process.stdout.readline()
    assert file.read_text() == ""
    wait_for(lambda: "in <module>" in file.read_text())
    stacks = file.read_text()
    assert stacks.startswith("Timeout (0:00:01)!") and ", line 12 in hang" in stacks and "in work" not in stacks
    assert process.poll() is None
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.fixture
def place(monkeypatch) -> Place:
    for name, value in vars(Place()).items():
        monkeypatch.setattr(PLACE, name, value)
    return PLACE


def test_phases_nest_that_of_an_exception_stays_and_stacks_come_before_a_time_out(place, tmp_path):
    beat()  # nobody watches
    with in_phase("sample", 3):
        with in_phase("reward", 3):
            assert (place.phase, place.step) == ("reward", 3)
        assert place.phase == "sample"
    assert place.phase == "loop"
    with pytest.raises(KeyError), in_phase("update", 4):
        raise KeyError
    assert (place.phase, place.step) == ("update", 4)
    for timeout_minutes, seconds in ((30, 600), (1, 48)):
        watch(tmp_path, 0, timeout_minutes)
        assert place.stall_seconds == seconds
    faulthandler.cancel_dump_traceback_later()
