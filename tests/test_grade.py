"""`scripts/grade.py`: a file of completions -> the same rows with their rewards."""

import json
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

import pytest

import grade
from helpers import ROOT

ROW = {"completion": "4", "answer": "4"}


def flags_of(folder: Path, rows: list[dict] | str, reward: str, *more: object) -> list[str]:
    """To grade the rows, or the text of a file, in `folder`."""
    text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
    (folder / "in.jsonl").write_text(text)
    return ["--reward", reward, "--input", "in.jsonl", "--output", "out.jsonl", *map(str, more)]


def command(folder: Path, *given: object) -> subprocess.CompletedProcess[str]:
    """Grades what `flags_of` is given; in `folder`, where my_reward.py may stand."""
    program = [sys.executable, str(ROOT / "scripts/grade.py"), *flags_of(folder, *given)]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)


def refused(folder: Path, *given: object) -> str:
    """The sentence with which the command refuses that, in this process."""
    program = ["grade.py", *flags_of(folder, *given)]
    with chdir(folder), patch.object(sys, "argv", program), pytest.raises(SystemExit) as ended:
        grade.main()
    return str(ended.value)


def graded(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_the_command_grades_a_file_in_order(tmp_path):
    rows = [
        {"id": 1, "completion": "\\boxed{0.5}", "answer": "\\frac12"},
        {"id": 2, "completion": "\\boxed{2}", "answer": 3, "more": {"nested": [1, None]}},
        {"id": 3, "completion": "\\boxed{2}", "answer": "\\frac{1}{"},
        {"id": 4, "completion": "\\boxed{\\prod_{k=1}^{1000000000} k}", "answer": "0"},
        {"id": 5, "completion": "é <answer>7</answer>", "answer": "7"},
        {"id": 6, "completion": "\\boxed{8}", "answer": ["7", "8"]},
    ]
    text = "\ufeff" + "\r\n".join(json.dumps(row) for row in rows) + "\n\n"
    done = command(tmp_path, text, "math", "--reward_timeout", 1)
    assert done.returncode == 0, done.stderr
    out = graded(tmp_path)
    assert [{key: row[key] for key in row if not key.startswith("re")} for row in out] == rows
    assert [row["read_as"] for row in out] == ["1/2", "2", None, None, "7", "8"]
    assert [row["reward"] for row in out] == [1.0, 0.0, None, 0.0, 1.0, 1.0]
    assert [row["reward_status"].partition(":")[0] for row in out] == ["ok", "ok", "bad key", "timeout", "ok", "ok"]
    assert "6 rows: 4 graded, mean reward 0.7500; 1 failed, 1 with an answer key that cannot be used" in done.stdout
    assert "line 4: timeout" in done.stdout


def test_what_counts_as_0_in_training_counts_as_0_here_and_is_no_failure(tmp_path):
    rows = [ROW, ROW | {"is_truncated": True}]
    assert "2 graded, mean reward 0.5000; 0 failed" in command(tmp_path, rows, "exact", "--truncated", "zero").stdout


def test_the_command_compares_the_rows_of_a_group(tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "def score(completions):\n    return [{'reward': len(c), 'share': 1 / len(completions)} for c in completions]\n"
    )
    rows = [{"completion": "x" * i, "answer": "4"} for i in range(4)]
    done = command(tmp_path, rows, "my_reward.py:score", "--group_size", 2)
    assert done.returncode == 0, done.stderr
    assert [(row["reward"], row["reward_parts"]["share"]) for row in graded(tmp_path)] == [(i, 0.5) for i in range(4)]
    for size, words in {1: "give --group_size", 3: "does not divide the 4 rows"}.items():
        done = command(tmp_path, rows, "my_reward.py:score", "--group_size", size)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_prompts_that_are_messages_are_a_column_and_empty_fields_are_missing(tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "def score(completions, columns, max_tokens):\n"
        "    return [len(c['prompt'][-1]['content']) + m for c, m in zip(columns, max_tokens)]\n"
    )
    row = ROW | {"prompt": [{"role": "user", "content": "2+2"}], "max_tokens": None}
    flags = ("--group_size", 2, "--max_completion_tokens", 8)
    done = command(tmp_path, [row, row], "format,my_reward.py:score", *flags)
    assert done.returncode == 0, done.stderr
    assert [(each["reward"], each["reward_status"]) for each in graded(tmp_path)] == [(3 + 8, "ok")] * 2


def test_a_reward_that_takes_token_ids_is_refused_before_anything_is_graded(tmp_path):
    code = "def score(completions, completion_ids):\n    return [1.0 for _ in completions]\n"
    (tmp_path / "my_reward.py").write_text(code)
    done = command(tmp_path, [ROW, ROW], "my_reward.py:score", "--group_size", 2)
    assert done.returncode == 1 and "takes token ids, which only a training run has" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"completion": "1", "answer": "1", "prompt": 7}', ["line 1: `prompt` is '7'", "str"]),
        ('{"completion": "1", "answer": "1", "num_tokens": "7"}', ["`num_tokens` is '7'", "int"]),
        ('{"completion": "1", "answer": "1", "max_tokens": true}', ["`max_tokens` is 'True'", "int"]),
        ('{"completion": "1", "answer": "1", "is_truncated": 1}', ["`is_truncated` is '1'", "bool"]),
        ('{"completion": "1", "answer": "1"}\n{"completion": "1", "ans', ["line 2: not valid JSON"]),
        ('{"completion": 1, "answer": "1"}', ["line 1: needs an object with a text `completion`"]),
        ('["1"]', ["line 1: expected a JSON object"]),
        ('{"completion": "1", "completion": "2", "answer": "1"}', ["line 1: not valid JSON (a key appears twice"]),
        ('{"completion": "1", "answer": []}', ["line 1: the answer is a list without an answer"]),
        ("\n", ["holds no rows"]),
        ("version https://git-lfs.github.com/spec/v1", ["in.jsonl is a pointer of Git LFS"]),
        ('{"completion": "1"}', ["line 1: needs an object with a text `completion` and an `answer`"]),
    ],
)
def test_the_command_names_the_line_it_cannot_read_and_writes_nothing(content, words, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious")
    sentence = refused(tmp_path, content, "math")
    assert sentence.startswith("error: ") and all(word in sentence for word in words)
    assert (tmp_path / "out.jsonl").read_text() == "precious"


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--output", "absent/out.jsonl", "cannot be written (No such file or directory); make its folder"),
        ("--output", "folder", "is the input, a folder or a device"),
        ("--output", "in.jsonl", "is the input, a folder or a device"),
        ("--output", "in.jsonl/out.jsonl", "cannot be written (Not a directory)"),
        ("--output", "/dev/null", "is the input, a folder or a device"),
        ("--output", "x" * 256, "cannot be written (File name too long)"),
        ("--reward_timeout", "-1", "-1: must be above 0"),
        ("--reward_timeout", "0", "0: must be above 0"),
        ("--reward_workers", "-2", "-2: must be at least 0"),
        ("--reward_in_flight", "0", "0: must be at least 1"),
        ("--max_completion_tokens", "0", "0: must be at least 1"),
        ("--reward", "maths", "'maths': "),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_is_graded(flag, value, words, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "my_reward.py").write_text("open('graded', 'w').close()\ndef score(completion): return 1.0\n")
    sentence = refused(tmp_path, [ROW], "my_reward.py:score", flag, value)
    assert sentence.startswith(f"error: {flag} ") and words in sentence, sentence
    assert "\n" not in sentence and json.loads((tmp_path / "in.jsonl").read_text()) == ROW
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "in.jsonl", "my_reward.py"}
