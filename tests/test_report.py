"""The pictures of a run, and the command line: what is printed, and which folders are refused."""

import os
import sys
from pathlib import Path

import pytest

import report
from helpers.made_up import write_run
from helpers.runs import ENVIRONMENT
from helpers.runs import said as output_of
from reports.curves import plot
from reports.reference import load
from runtime.history import read_run

RECORDS = [
    {"step": 0, "eval/heldout/avg@4": 0.3, "time/evaluate_s": 1.0, "time/step_s": 1.0},
    {"step": 1, "reward/mean": 0.5, "policy/entropy": None, "time/sample_s": 1.0, "time/step_s": 1.5},
    {"step": 2, "reward/mean": 0.6, "eval/heldout/avg@4": 0.5, "time/sample_s": 1.0, "time/update_s": 2.0},
]  # fmt: skip


def test_curves_are_drawn_also_where_values_are_missing(tmp_path):
    published, pictures = load("tiny_cpu")["training"], set()  # whose curves are drawn, too
    for config, records in (({}, RECORDS[:1]), ({}, RECORDS), (published, RECORDS)):  # before the first step, after it
        plot(read_run(write_run(tmp_path, config, records)))
        pictures.add((tmp_path / "curves.png").read_bytes())
    assert len(pictures) == 3 and all(picture.startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize("name", ["运行_甲", "a$x_y", "проба é", "运行".encode().decode("ascii", "surrogateescape")])
def test_a_name_in_any_script_is_drawn_without_a_warning(name, tmp_path, recwarn, capfd):
    """Also "$", which is no formula, and what the locale could not decode."""
    records = [record | {f"eval/{name}/avg@4": 0.5} for record in RECORDS]
    plot(read_run(write_run(tmp_path / name, {}, records)))
    assert (tmp_path / name / "curves.png").stat().st_size > 10_000
    assert not recwarn.list and capfd.readouterr() == ("", "")


def test_a_locale_of_few_characters_costs_no_traceback(tmp_path):
    """Page, comparison and judgement of a run with a Chinese name and set, where files would be read as ASCII."""
    records = [record | {"eval/中文/avg@4": 0.5} for record in RECORDS]
    run = str(write_run(tmp_path / "运行", {"seed": 1, "out_dir": "运行", "reward": "得分.py:f"}, records))
    few = ENVIRONMENT | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for arguments in ([run], ["--compare", run, "--", run], [run, "--reference", "tiny_cpu"]):
        shown = output_of([sys.executable, "report.py", *arguments], few)
        assert "\\udc" in shown, "what ASCII lacks is escaped"
    assert (tmp_path / "运行" / "report.html").exists()


def test_the_command_prints_what_it_has_found(tmp_path, monkeypatch, capsys):
    run, drawn = str(write_run(tmp_path / "run", {"seed": 1}, RECORDS)), []
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/part/a\u2028b": 0.5}\n{"step": 3, "rew')  # a kill has cut it off
    monkeypatch.setattr(report, "plot", lambda run: drawn.append(run.folder))
    for arguments, said in {
        (run,): f"{run}/report.html\n", (run, "--output", f"{run}/x.html"): f"{run}/x.html\n",
        ("--compare", run, "--", run): f"A: {run} (seed 1, to step 2)",
        (run, "--reference", "tiny_cpu"): f"{run} against tiny_cpu: cannot be judged\n",
    }.items():  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
        report.main()
        assert capsys.readouterr().out.startswith(said)
    assert {"report.html", "x.html"} <= {file.name for file in (tmp_path / "run").iterdir()}
    assert drawn == [Path(run)] * 2


def test_curves_are_drawn_again_only_where_the_log_is_newer(tmp_path, monkeypatch):
    runs, drawn = [write_run(tmp_path / name, {"seed": 1}, RECORDS) for name in "abc"], []
    monkeypatch.setattr(report, "plot", lambda run: drawn.append(run.folder))
    for run, age in zip(runs[:2], (10, -10), strict=True):
        (run / "curves.png").touch()
        logged = (run / "curves.png").stat().st_mtime - age
        os.utime(run / "metrics.jsonl", (logged, logged))
    report.write_pages(runs, tmp_path / "page.html")
    assert drawn == runs[1:], "the second has a newer log, the third no picture"


COMPARED = "--compare RUN -- RUN"


@pytest.mark.parametrize(("file", "content", "arguments", "said"), [
    ("metrics.jsonl", None, COMPARED, "it has no metrics.jsonl with a step"),
    ("metrics.jsonl", '{"step": 1, "reward}\n', COMPARED, "metrics.jsonl, line 1, is damaged: Unterminated string"),
    ("metrics.jsonl", '{"reward/mean": 1.0}\n', COMPARED, "metrics.jsonl is damaged: there is no step"),
    ("metrics.jsonl", '{"step": 9, "a": [1]}\n', COMPARED, "metrics.jsonl is damaged: a is no number"),
    ("config.json", "[1]", COMPARED, "config.json is damaged"),
    ("config.json", '{"model_type": "qwen2"}', "RUN", "is no run"),
    ("config.json", "{}", "--compare a b", "on both sides"),
])  # fmt: skip
def test_what_is_no_run_is_told(file, content, arguments, said, tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", {"seed": 1}, RECORDS)
    (run / file).write_text(content) if content else (run / file).unlink()
    if said == "is no run":
        (run / "metrics.jsonl").unlink()
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments.replace("RUN", str(run)).split()])
    pytest.raises(SystemExit, report.main).match("2")
    error = capsys.readouterr().err
    assert said in error and not (run / "report.html").exists()
    assert "RUN" not in arguments or (error.startswith(f"error: {run}") and error.count("\n") == 1)
