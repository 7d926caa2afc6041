"""The curves of a run."""

import json
import subprocess
import sys

from helpers import ROOT
from report import plot, plot_timeline, read_metrics, seconds_of_phases

RECORDS = [
    {"step": 0, "eval/heldout/avg@4": 0.3, "time/evaluate_s": 1.0, "time/step_s": 1.0},
    {"step": 1, "reward/mean": 0.5, "policy/entropy": None, "time/sample_s": 1.0, "time/step_s": 1.5},
    {"step": 2, "reward/mean": 0.6, "eval/heldout/avg@4": 0.5, "time/sample_s": 1.0, "time/update_s": 2.0},
]  # fmt: skip


def test_curves_are_drawn_also_where_values_are_missing(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "metrics.jsonl").write_text(lines)
    plot(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "curves.unfinished.png").exists()
    drawn = (tmp_path / "curves.png").read_bytes()
    (tmp_path / "metrics.jsonl").write_text(lines.splitlines()[0] + "\n")
    plot(tmp_path)
    assert (tmp_path / "curves.png").read_bytes() != drawn, "before the first step there is less to see"


def test_the_command_draws_the_curves_of_a_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(RECORDS[1]) + "\n")
    command = [sys.executable, "report.py", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert said == f"{tmp_path / 'report.html'}\n" and (tmp_path / "report.html").exists()
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_timeline_shows_who_does_what_when(tmp_path):
    plot_timeline(tmp_path)
    assert not (tmp_path / "timeline.png").exists(), "nothing is known"
    update = {"who": "ranks", "what": "update", "begin": 1000.0, "end": 1002.0}
    sampling = {"who": "server 0", "what": "sample 3", "begin": 1000.0, "end": 1003.0}
    steps = [{"step": step, "spans": [update, sampling]} for step in range(10)]
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    plot_timeline(tmp_path)
    drawn = (tmp_path / "timeline.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    sampling["end"] = 1001.0
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    plot_timeline(tmp_path)
    assert (tmp_path / "timeline.png").read_bytes() != drawn


def test_the_last_line_of_a_step_counts_and_a_line_cut_off_by_a_kill_is_skipped(tmp_path):
    lines = ['{"step": 2, "reward/mean": 0.1}', '{"step": 1, "reward/mean": 0.2}', '{"step": 2, "rewa', '{"step": 2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert read_metrics(tmp_path) == [{"step": 1, "reward/mean": 0.2}, {"step": 2}]


def test_phases_are_the_times_without_the_whole_step_and_the_tail():
    metrics = {"time/sample_s": 1.0, "time/rollout_tail_s": 0.5, "time/step_s": 3.0, "perf/idle_frac": 0.1}
    assert seconds_of_phases(metrics) == {"sample": 1.0}
