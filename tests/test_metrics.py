"""The run's records: derived numbers, the append-only log, and the curves."""

import gzip
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data import Row
from helpers import make_rollout
from metrics import PhaseTimer, RunLog, console_line, plot_curves, read_metrics, reward_metrics, rollout_metrics
from reward import Grade
from update import merge_updates


def test_rollout_metrics_count_groups_lengths_and_truncation():
    rollout = replace(
        make_rollout([2, 4, 6, 8, 10, 12]),
        rewards_B=np.array([1, 1, 0.1, 0, 1, 0], dtype=np.float32),
        is_right_B=np.array([1, 1, 0, 0, 1, 0], dtype=bool),
        is_truncated_B=np.array([0, 0, 0, 0, 0, 1], dtype=bool),
    )
    metrics = rollout_metrics(rollout, group_size=2)
    assert metrics["reward/mean"] == pytest.approx(3.1 / 6)
    assert metrics["reward/frac_groups_all_right"] == pytest.approx(1 / 3)
    assert metrics["reward/frac_groups_all_wrong"] == pytest.approx(1 / 3)
    assert metrics["reward/frac_groups_with_signal"] == pytest.approx(2 / 3), (
        "equal rewards, not equal verdicts, are what has no signal"
    )
    assert metrics["completion/tokens_mean"] == 7
    assert metrics["completion/tokens_right_mean"] == pytest.approx(16 / 3)
    assert metrics["completion/tokens_wrong_mean"] == pytest.approx(26 / 3)
    assert metrics["completion/frac_truncated"] == pytest.approx(1 / 6)


def test_what_could_not_be_graded_is_counted_named_and_kept(tmp_path, capsys):
    grades = [
        Grade(0.0, "timeout"),
        Grade(0.0, "error: no"),
        Grade(0.0, "truncated"),
        Grade(1.5, "ok", {"math": 1.0, "format": 1.0}),
    ]
    assert reward_metrics(grades) == {
        "reward/timeouts": 1,
        "reward/errors": 1,
        "reward/part/math": 0.25,
        "reward/part/format": 0.25,
    }
    assert "reward/part/math" not in reward_metrics([Grade(1.0, "ok", {"math": 1.0})]), "one part is the reward itself"
    rollout = replace(make_rollout([2, 4, 6, 8]), texts=["a", "b", "c", "d"])
    rows = [Row([{"role": "user", "content": "?"}], "4", {}, f"train.jsonl, line {i}") for i in (7, 9)]
    RunLog(tmp_path, is_main=True, total_steps=1).reward_failures(3, rollout, grades, rows, group_size=2)
    said = capsys.readouterr().out
    assert "step 3: reward timeout, of train.jsonl, line 7: 'a'" in said and "'c'" not in said
    records = [json.loads(line) for line in (tmp_path / "reward_failures.jsonl").read_text().splitlines()]
    assert [(record["row"], record["status"], record["completion"]) for record in records] == [
        ("train.jsonl, line 7", "timeout", "a"),
        ("train.jsonl, line 7", "error: no", "b"),
    ]


def test_a_step_of_several_updates_is_merged_by_what_the_number_means():
    updates = [
        {
            "policy/loss": 1.0,
            "policy/ratio_max": 2.0,
            "policy/ratio_min": 0.5,
            "optim/lr": 0.1,
            "optim/skipped_updates": 1.0,
        },
        {
            "policy/loss": 3.0,
            "policy/ratio_max": 1.5,
            "policy/ratio_min": 0.7,
            "optim/lr": 0.2,
            "optim/skipped_updates": 1.0,
        },
    ]
    extremes = {"policy/ratio_max": 2.0, "policy/ratio_min": 0.5}
    assert merge_updates(updates) == {"policy/loss": 2.0, "optim/lr": 0.2, "optim/skipped_updates": 2.0} | extremes


def test_the_log_is_only_appended_to_and_the_last_line_of_a_step_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.1}\n{"step": 2, "rewa'
    )  # a run that was killed in mid-line
    log = RunLog(tmp_path, is_main=True, total_steps=3)
    for step, reward in ((1, 0.2), (2, math.nan)):
        log.log(step, {"reward/mean": reward, "time/step_s": 1.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[:2] == ['{"step": 1, "reward/mean": 0.1}', '{"step": 2, "rewa']
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["reward/mean"] == 0.2
    assert records[1]["reward/mean"] is None, "nan is no JSON"
    json.loads(lines[2])


def test_other_processes_write_nothing(tmp_path, capsys):
    RunLog(tmp_path, is_main=False, total_steps=1).log(1, {"reward/mean": 1.0, "time/step_s": 1.0})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_the_console_line_shows_what_was_measured():
    line = console_line(
        3, 10, {"reward/mean": 0.5, "time/sample_s": 1.26, "time/step_s": 2.0, "eval/heldout/avg@4": 0.75}
    )
    assert line == "step  3/10 | reward 0.500 | 2.0s (sample 1.3) | eval/heldout/avg@4 0.750"


def test_phases_add_up_and_start_afresh_each_step(tmp_path):
    timer = PhaseTimer([], tmp_path, 0)
    for _ in range(2):
        with timer.phase("sample"):
            pass
    first = timer.take()
    assert first.keys() == {"time/sample_s", "time/step_s"}
    assert 0 <= first["time/sample_s"] <= first["time/step_s"]
    assert timer.take().keys() == {"time/step_s"}


def test_a_step_to_profile_leaves_a_trace_with_its_phases(tmp_path):
    timer = PhaseTimer([2], tmp_path / "profile", rank=3)
    for step in (1, 2, 3):
        timer.begin(step)
        with timer.phase("update"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        timer.take()
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "step_2_rank_3.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"update", "aten::mm"} <= names


def test_curves_are_drawn_also_where_values_are_missing(tmp_path):
    records = [
        {"step": 0, "eval/heldout/avg@4": 0.3, "time/evaluate_s": 1.0, "time/step_s": 1.0},
        {"step": 1, "reward/mean": 0.5, "policy/entropy": None, "time/sample_s": 1.0, "time/step_s": 1.5},
        {
            "step": 2,
            "reward/mean": 0.6,
            "eval/heldout/avg@4": 0.5,
            "time/sample_s": 1.0,
            "time/update_s": 2.0,
            "time/step_s": 3.0,
        },
    ]
    plot_curves(records, tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "curves.unfinished.png").exists()
