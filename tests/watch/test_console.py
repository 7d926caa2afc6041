"""What a run tells while it goes: the console, status.json, and trackers, each of them as it is, offline."""

import json
import os
import sqlite3
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flags import Recording
from gate.checks import check_flags
from helpers.made_up import flags
from helpers.runs import ENVIRONMENT, said
from runtime.start import note_reason, tell_end
from watch.console import Console
from watch.curves import seconds_of_phases

TIMES = {"time/sample_s": 1.0, "time/rollout_tail_s": 0.5, "time/step_s": 2.0}
STEP = {"reward/mean": 0.5, "policy/loss": float("nan")} | TIMES


def tell(folder, capsys, *steps: dict[str, float], **flags) -> list[str]:
    """The lines that the console shows of a run of 10 steps."""
    console = Console(folder, True, Recording(**flags))
    console.say("begins")
    for number, metrics in enumerate(steps, start=1):
        console.tell_step(number, 10, metrics, seconds_of_phases(metrics))
    return capsys.readouterr().out.splitlines()


def status_in(folder) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_the_status_has_phase_last_step_and_time_left(tmp_path, capsys):
    """The status says what is done now, and below it the last step and the time that is left."""
    lines = tell(tmp_path, capsys, STEP, STEP | {"time/step_s": 4.0})
    assert lines[0] == "begins" and lines[2].endswith("| 0:00:24 left")
    expected = {"now": "log", "step": 2, "last_step": 10, "seconds_left": 24, "reward/mean": 0.5}
    assert expected.items() <= status_in(tmp_path).items()
    assert "policy/loss" not in status_in(tmp_path), "JSON knows no nan"
    Console(tmp_path, True, Recording()).tell_phase("sample", 1)
    assert status_in(tmp_path).keys() == {"now", "in_step", "since", "pid"}


@pytest.mark.parametrize(("how", "now"), [
    (lambda: tell_end("stopped"), "stopped after step 7"),
    (lambda: note_reason("no room", "mistake"), "failed: no room"),
    (lambda: [note_reason(text, "error") for text in ("KeyError: 'x'", "closed by peer")], "failed: KeyError: 'x'"),
    (lambda: None, "load"),
])  # fmt: skip
def test_the_status_says_how_a_run_has_ended_first_reason_first(how, now, tmp_path, monkeypatch):
    """The status says how a run has ended, and the first reason counts."""
    monkeypatch.delenv("GRPO_LAUNCH_FOLDER", raising=False)
    monkeypatch.setattr("runtime.start.ON_END", (hears := []))
    monkeypatch.setattr("watch.console.ON_END", hears)
    Console(tmp_path / "of another rank", False, Recording()).tell_phase("load", 7)
    console = Console(tmp_path, True, Recording())
    console.tell_phase("load", 7)
    how()
    assert status_in(tmp_path).items() >= {"now": now, "in_step": 7, "pid": os.getpid()}.items()
    console.finish("done")
    note_reason("too late", "error")
    assert status_in(tmp_path)["now"] == "done"


def test_quiet_shows_steps_with_an_evaluation_and_its_failures(tmp_path, capsys):
    """With --quiet the console shows the steps with an evaluation, and what could not be graded."""
    failed = {"eval/heldout/avg@4": 0.05, "eval/heldout/frac_failed": 0.347, "eval/other/frac_failed": 0.0}
    begins, line = tell(tmp_path, capsys, STEP, STEP | failed, quiet=True)
    assert begins == "begins" and line.startswith("step  2/10 |")
    assert "| eval/heldout/frac_failed 0.347, see eval/step_2" in line and "other" not in line


def test_a_tracker_that_fails_costs_its_curves_and_no_step(tmp_path, capsys):
    console = Console(tmp_path, True, Recording(track="wandb"))

    def fail(step, metrics):
        raise ConnectionError("no network")

    console.tracker = fail, lambda: None
    for step in (1, 2):
        console.tell_step(step, 10, STEP, seconds_of_phases(STEP))
    console.finish("done")
    shown = capsys.readouterr().out
    assert shown.count("warning: --track wandb has failed and is left out from now on: no network") == 1
    assert "step  2/10" in shown


def test_a_package_or_a_key_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # without a .netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ValueError, match="--track wandb: no key is known"):
        check_flags(flags(track="wandb"), num_ranks=1)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_flags(flags(track="wandb"), num_ranks=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--track wandb: its package is not installed; run `pip install wandb`"):
        check_flags(flags(track="wandb"), num_ranks=1)


LOG = """
import sys
from pathlib import Path
from watch.console import TRACKERS

folder, saved, last = sys.argv[1:]
for start in TRACKERS.values():
    log, close = start(Path(folder), int(saved))
    for step in range(int(saved) + 1, int(last) + 1):
        log(step, {"reward/mean": step / 10 + int(saved)})
    close()
"""


def test_each_tracker_shows_one_curve_of_a_continued_run(tmp_path):
    """Each tracker shows one curve of a run that was continued. Steps 1 to 5, and, after a kill, 4 to 6 again:
    their values are larger by 3. wandb gets both under one id.
    """
    (tmp_path / "config.json").write_text(json.dumps({"seed": 1}))
    offline = ENVIRONMENT | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for saved, last in (("0", "5"), ("3", "6")):
        said([sys.executable, "-c", LOG, str(tmp_path), saved, last], offline)
    expected = {1: 0.1, 2: 0.2, 3: 0.3, 4: 3.4, 5: 3.5, 6: 3.6}
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {x.step: pytest.approx(x.value) for x in events.Scalars("reward/mean")} == expected
    with sqlite3.connect(tmp_path / "trackio" / "grpo.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, *_ in rows} == {tmp_path.name}
    assert {step: json.loads(metrics)["reward/mean"] for _, step, metrics in rows} == expected
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    assert all(file.stat().st_size > 500 and b"reward/mean" in file.read_bytes() for file in files)
