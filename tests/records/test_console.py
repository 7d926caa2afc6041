"""What a run tells while it goes: the console, status.json, and trackers, each of them as it is, offline."""

import json
import sqlite3
import subprocess
import sys

import pytest

from flags import Recording
from helpers import ROOT
from inputs.checks import check_tracker
from records.console import Console
from records.trackers import TRACKERS

STEP = {"reward/mean": 0.5, "policy/loss": float("nan"), "time/sample_s": 1.0, "time/step_s": 2.0}


def tell(folder, capsys, *steps: dict[str, float], **flags) -> list[str]:
    """The lines that the console shows of a run of 10 steps."""
    console = Console(folder, True, Recording(**flags))
    console.say("begins")
    for number, metrics in enumerate(steps, start=1):
        console.tell_step(number, 10, metrics)
    return capsys.readouterr().out.splitlines()


def test_the_status_has_the_last_step_and_the_time_that_is_left(tmp_path, capsys):
    lines = tell(tmp_path, capsys, STEP, STEP | {"time/step_s": 4.0})
    assert lines[0] == "begins" and lines[2].endswith("| 24 s left")
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["step"], status["last_step"], status["seconds_left"], status["reward/mean"]) == (2, 10, 24, 0.5)
    assert "policy/loss" not in status, "JSON knows no nan"


def test_an_evaluation_that_could_not_grade_says_so(tmp_path, capsys):
    failed = {"eval/heldout/avg@4": 0.05, "eval/heldout/frac_failed": 0.347, "eval/other/frac_failed": 0.0}
    (_, line) = tell(tmp_path, capsys, STEP | failed)
    assert "| eval/heldout/frac_failed 0.347, see eval/step_1" in line and "other" not in line


def test_the_status_says_what_is_done_now_above_the_last_step(tmp_path, capsys):
    console = Console(tmp_path, True, Recording())
    console.tell_phase("sample", 1)
    assert json.loads((tmp_path / "status.json").read_text()).keys() == {"now", "in_step", "since"}
    console.tell_step(1, 10, STEP)
    console.tell_phase("update", 2)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["now"], status["in_step"], status["step"]) == ("update", 2, 1)


def test_quiet_shows_the_steps_with_an_evaluation(tmp_path, capsys):
    lines = tell(tmp_path, capsys, STEP, STEP | {"eval/heldout/avg@4": 0.75}, quiet=True)
    assert [line.split(" |")[0] for line in lines] == ["begins", "step  2/10"]
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 2


def test_the_json_log_has_an_object_for_each_step_and_message(tmp_path, capsys):
    lines = list(map(json.loads, tell(tmp_path, capsys, STEP, json_log=True)))
    assert lines[0]["message"] == "begins" and lines[1]["step"] == 1 and lines[1]["reward/mean"] == 0.5


def test_a_tracker_that_fails_costs_its_curves_and_no_step(tmp_path, capsys):
    console = Console(tmp_path, True, Recording(track="wandb"))

    def fail(step, metrics):
        raise ConnectionError("no network")

    console.tracker = fail, lambda: None
    console.tell_step(1, 10, STEP)
    console.tell_step(2, 10, STEP)
    console.finish()
    said = capsys.readouterr().out
    assert said.count("warning: --track wandb has failed and is left out from now on: no network") == 1
    assert "step  2/10" in said


def test_a_package_that_is_missing_is_named(monkeypatch):
    for name in TRACKERS:
        check_tracker(name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tracker("none")
    with pytest.raises(ValueError, match="--track wandb: its package is not installed; run `pip install wandb`"):
        check_tracker("wandb")


LOG = """
import sys
from pathlib import Path
from records.trackers import TRACKERS

kind, folder, saved, last = sys.argv[1:]
log, close = TRACKERS[kind](Path(folder), int(saved))
for step in range(int(saved) + 1, int(last) + 1):
    log(step, {"reward/mean": step / 10 + int(saved)})
close()
"""


def tracked(kind, folder, monkeypatch) -> None:
    """Steps 1 to 5, and, after a kill, 4 to 6 again: their values are larger by 3."""
    (folder / "config.json").write_text(json.dumps({"seed": 1}))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    for saved, last in ((0, 5), (3, 6)):
        command = [sys.executable, "-c", LOG, kind, str(folder), str(saved), str(last)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)


EXPECTED = {1: 0.1, 2: 0.2, 3: 0.3, 4: 3.4, 5: 3.5, 6: 3.6}


def test_tensorboard_shows_one_curve_of_a_run_that_was_continued(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked("tensorboard", tmp_path, monkeypatch)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {x.step: pytest.approx(x.value) for x in events.Scalars("reward/mean")} == EXPECTED


def test_trackio_has_one_run_that_was_continued(tmp_path, monkeypatch):
    tracked("trackio", tmp_path, monkeypatch)
    with sqlite3.connect(tmp_path / "trackio" / "grpo.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, *_ in rows} == {tmp_path.name}
    assert {step: json.loads(metrics)["reward/mean"] for _, step, metrics in rows} == EXPECTED


def test_wandb_gets_both_starts_under_one_id(tmp_path, monkeypatch):
    tracked("wandb", tmp_path, monkeypatch)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    assert all(file.stat().st_size > 500 and b"reward/mean" in file.read_bytes() for file in files)
