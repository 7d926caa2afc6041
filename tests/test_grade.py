"""`scripts/grade.py`: a file of completions -> the same rows with their rewards."""

import json
import subprocess
import sys

import pytest

from helpers import ROOT


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/grade.py", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_grades_a_file_in_order(tmp_path):
    rows = [
        {"id": 1, "completion": "\\boxed{0.5}", "answer": "\\frac12"},
        {"id": 2, "completion": "\\boxed{2}", "answer": 3, "more": {"nested": [1, None]}},
        {"id": 3, "completion": "\\boxed{2}", "answer": "\\frac{1}{"},
        {"id": 4, "completion": "\\boxed{\\prod_{k=1}^{1000000000} k}", "answer": "0"},
        {"id": 5, "completion": "é <answer>7</answer>", "answer": "7"},
    ]
    (tmp_path / "in.jsonl").write_text("\ufeff" + "\r\n".join(json.dumps(row) for row in rows) + "\n\n")
    done = command(
        "--reward", "math", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--reward_timeout", 1
    )
    assert done.returncode == 0, done.stderr
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{key: row[key] for key in row if not key.startswith("reward")} for row in out] == rows
    assert [row["reward"] for row in out] == [1.0, 0.0, None, 0.0, 1.0]
    assert [row["reward_status"].partition(":")[0] for row in out] == ["ok", "ok", "bad key", "timeout", "ok"]
    assert "5 rows: 3 graded, mean reward 0.6667; 1 failed, 1 with an answer key that cannot be used" in done.stdout
    assert "line 4: timeout" in done.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"completion": "1", "answer": "1"}\n{"completion": "1", "ans', "line 2: not valid JSON"),
        ('{"completion": 1, "answer": "1"}', "line 1: needs an object with a text `completion`"),
        ('["1"]', "line 1: needs an object"),
        ('{"completion": "1"}', "line 1: needs an object with a text `completion` and an `answer`"),
    ],
)
def test_the_command_names_the_line_it_cannot_read_and_writes_nothing(content, words, tmp_path):
    (tmp_path / "in.jsonl").write_text(content)
    (tmp_path / "out.jsonl").write_text("precious")
    done = command("--reward", "math", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def test_the_command_does_not_write_over_its_input(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"completion": "1", "answer": "1"}\n')
    done = command("--reward", "math", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "in.jsonl")
    assert done.returncode == 1 and "is the input" in done.stderr
