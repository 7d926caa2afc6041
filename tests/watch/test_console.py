"""What a run tells while it goes and at its end: console, status.json, curves, and trackers, each as it is, offline."""

import json
import os
import re
import sqlite3
import sys
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gate.checks import check_flags
from helpers.made_up import flags
from helpers.runs import ENVIRONMENT, said
from runtime.start import note_reason, tell_end
from watch.console import Console, console_line
from watch.results import Results
from watch.tracker import TRACKERS, Tracker

TIMES = {"time/sample_s": 1.0, "time/rollout_tail_s": 0.5, "time/step_s": 2.0}
STEP = {"reward/mean": 0.5, "policy/loss": float("nan")} | TIMES


def told(folder, capsys, *steps: dict[str, float], quiet: bool) -> list[str]:
    console = Console(folder, 10, quiet)
    for number, metrics in enumerate(steps, start=1):
        console.step(number, metrics)
    return capsys.readouterr().out.splitlines()


def status_in(folder) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_the_status_has_phase_last_step_and_time_left(tmp_path, capsys):
    lines = told(tmp_path, capsys, STEP, STEP | {"time/step_s": 4.0}, quiet=False)
    assert lines[1].endswith("| 0:00:24 left")
    expected = {"now": "log", "step": 2, "last_step": 10, "seconds_left": 24, "reward/mean": 0.5}
    assert expected.items() <= status_in(tmp_path).items()
    assert "policy/loss" not in status_in(tmp_path), "JSON knows no nan"
    console = Console(tmp_path, 10, quiet=False)
    with console.phase("sample", 1):
        with console.phase("reward", 1):
            assert status_in(tmp_path)["now"] == "reward"
        status = status_in(tmp_path)
        assert status["now"] == "sample" and status.keys() == {"now", "in_step", "since", "pid"}


@pytest.mark.parametrize(("how", "now"), [
    (lambda: tell_end("stopped"), "stopped after step 7"),
    (lambda: note_reason("no room", "mistake"), "failed: no room"),
    (lambda: [note_reason(text, "error") for text in ("KeyError: 'x'", "closed by peer")], "failed: KeyError: 'x'"),
    (lambda: None, "load"),
])  # fmt: skip
def test_the_status_says_how_a_run_has_ended_first_reason_first(how, now, tmp_path, monkeypatch):
    monkeypatch.delenv("GRPO_LAUNCH_FOLDER", raising=False)
    monkeypatch.setattr("runtime.start.ON_END", (hears := []))
    monkeypatch.setattr("watch.console.ON_END", hears)
    console = Console(tmp_path, 10, quiet=False)
    with console.phase("load", 7):
        how()
    assert status_in(tmp_path).items() >= {"now": now, "in_step": 7, "pid": os.getpid()}.items()
    console.end("done")
    note_reason("too late", "error")
    assert status_in(tmp_path)["now"] == "done"


def test_the_console_shows_what_was_measured_and_quiet_steps_with_an_evaluation(tmp_path, capsys):
    failed = {"eval/heldout/avg@4": 0.05, "eval/heldout/frac_failed": 0.347, "eval/other/frac_failed": 0.0}
    (line,) = told(tmp_path, capsys, STEP, STEP | failed, quiet=True)
    assert line.startswith("step  2/10 |")
    assert "| eval/heldout/frac_failed 0.347, see eval/step_2" in line and "other" not in line
    metrics = {
        "reward/mean": 0.5, "time/sample_s": 1.26, "time/step_s": 2.0, "time/sync_s": 0.01, "time/rollout_tail_s": 1.0,
        "eval/heldout/avg@4": 0.75, "optim/skipped_updates": 2.0, "perf/update_mfu": 0.4,
    }  # fmt: skip
    assert console_line(3, 10, metrics, 14.2) == (
        "step  3/10 | reward 0.500 | MFU 40% | SKIPPED UPDATES: 2 not finite | 2.0s (sample 1.3)"
        " | eval/heldout/avg@4 0.750 | 0:00:14 left"
    )


def test_five_steps_without_signal_are_warned_of_once(tmp_path, capsys):
    console = Console(tmp_path, 20, quiet=True)
    nothing, signal, lone = (0, None), (0.5, 0.1), (None, 0)  # the last: with --group_size 1 no group has a signal
    for step, (share, norm) in enumerate([nothing, signal, *[nothing] * 6, signal, *[lone] * 6], start=1):
        metrics = {"reward/frac_groups_with_signal": share, "optim/grad_norm": norm}
        console.step(step, TIMES | {name: value for name, value in metrics.items() if value is not None})
        said = re.findall("warning: for 5 steps (all rewards|optim/grad_norm is 0)", capsys.readouterr().out)
        assert said == {7: ["all rewards"], 14: ["optim/grad_norm is 0"]}.get(step, [])


def test_files_that_a_run_can_miss_cost_a_warning(tmp_path, capsys):
    (tmp_path / "status.json").mkdir()
    (status,) = told(tmp_path, capsys, STEP, STEP, quiet=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean: 0.5}\n')
    Results(tmp_path).end("done")
    curves = capsys.readouterr().out
    assert status.startswith(f"warning: {tmp_path}/status.json could not be written")
    assert "curves.png could not be written: " in curves and "line 1, is damaged" in curves


def test_a_tracker_that_fails_costs_its_curves_and_one_that_is_missing_is_named(tmp_path, capsys, monkeypatch):
    tracker, fail = Tracker("wandb", tmp_path), Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: (fail, None))
    for step in (1, 2):
        tracker.step(step, STEP)
    tracker.end("done")
    shown = capsys.readouterr().out
    assert shown.count("warning: --track wandb has failed and is left out from now on: no network") == 1
    check_flags(flags(track="wandb"), num_ranks=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--track wandb: its package is not installed; run `pip install wandb`"):
        check_flags(flags(track="wandb"), num_ranks=1)


LOG = """
import sys
from pathlib import Path
from watch.tracker import TRACKERS

folder, saved, last = sys.argv[1:]
for start in TRACKERS.values():
    log, close = start(Path(folder), int(saved) + 1)
    for step in range(int(saved) + 1, int(last) + 1):
        log(step, {"reward/mean": step / 10 + int(saved)})
    close()
"""


def test_each_tracker_shows_one_curve_of_a_continued_run(tmp_path):
    """Steps 1 to 5, and, after a kill, 4 to 6 again, larger by 3. wandb gets both under one id."""
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
