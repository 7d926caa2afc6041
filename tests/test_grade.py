"""`scripts/grade.py`: a file of completions -> the same rows with their rewards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT


def command(*arguments: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command, started in `folder`."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/grade.py"), *map(str, arguments)],
        cwd=folder,
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
        {"id": 6, "completion": "\\boxed{8}", "answer": ["7", "8"]},
    ]
    (tmp_path / "in.jsonl").write_text("\ufeff" + "\r\n".join(json.dumps(row) for row in rows) + "\n\n")
    done = command(
        "--reward", "math", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--reward_timeout", 1
    )
    assert done.returncode == 0, done.stderr
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{key: row[key] for key in row if not key.startswith("re")} for row in out] == rows
    assert [row["read_as"] for row in out] == ["1/2", "2", None, None, "7", "8"]
    assert [row["reward"] for row in out] == [1.0, 0.0, None, 0.0, 1.0, 1.0]
    assert [row["reward_status"].partition(":")[0] for row in out] == ["ok", "ok", "bad key", "timeout", "ok", "ok"]
    assert "6 rows: 4 graded, mean reward 0.7500; 1 failed, 1 with an answer key that cannot be used" in done.stdout
    assert "line 4: timeout" in done.stdout


def test_the_command_compares_the_rows_of_a_group(tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "def score(completions):\n    return [{'reward': len(c), 'share': 1 / len(completions)} for c in completions]\n"
    )
    rows = [{"completion": "x" * i, "answer": "4"} for i in range(4)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = (
        "--reward",
        f"{tmp_path}/my_reward.py:score",
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out",
    )
    done = command(*flags, "--group_size", 2)
    assert done.returncode == 0, done.stderr
    out = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(row["reward"], row["reward_parts"]["share"]) for row in out] == [(i, 0.5) for i in range(4)]
    for size, words in {
        1: "compares completions of a prompt; give --group_size",
        3: "does not divide the 4 rows",
    }.items():
        done = command(*flags, "--group_size", size)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_prompts_that_are_messages_are_a_column_and_empty_fields_are_missing(tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "def score(completions, columns, max_tokens):\n"
        "    return [len(c['prompt'][-1]['content']) + m for c, m in zip(columns, max_tokens)]\n"
    )
    row = {"completion": "4", "answer": "4", "prompt": [{"role": "user", "content": "2+2"}], "max_tokens": None}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))
    done = command(
        "--reward", f"format,{tmp_path}/my_reward.py:score", "--input", tmp_path / "in.jsonl", "--output",
        tmp_path / "out", "--group_size", 2, "--max_completion_tokens", 8,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(each["reward"], each["reward_status"]) for each in out] == [(3 + 8, "ok")] * 2


def test_a_reward_that_takes_token_ids_is_refused_before_anything_is_graded(tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "def score(completions, completion_ids):\n    return [1.0 for _ in completions]\n"
    )
    (tmp_path / "in.jsonl").write_text('{"completion": "4", "answer": "4"}\n' * 2)
    done = command(
        "--reward", f"{tmp_path}/my_reward.py:score", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out",
        "--group_size", 2,
    )  # fmt: skip
    assert done.returncode == 1 and "takes token ids, which only a training run has" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"completion": "1", "answer": "1", "prompt": 7}', "line 1: `prompt` is '7'; needed is a text"),
        ('{"completion": "1", "answer": "1", "num_tokens": "7"}', "`num_tokens` is '7'; needed is a whole number"),
        ('{"completion": "1", "answer": "1", "max_tokens": true}', "`max_tokens` is 'True'; needed is a whole number"),
        ('{"completion": "1", "answer": "1", "is_truncated": 1}', "`is_truncated` is '1'; needed is true or false"),
        ('{"completion": "1", "answer": "1"}\n{"completion": "1", "ans', "line 2: not valid JSON"),
        ('{"completion": 1, "answer": "1"}', "line 1: needs an object with a text `completion`"),
        ('["1"]', "line 1: expected a JSON object"),
        ('{"completion": "1", "completion": "2", "answer": "1"}', "line 1: not valid JSON (a key appears twice"),
        ('{"completion": "1", "answer": []}', "line 1: the answer is a list without an answer"),
        ("\n", "holds no rows"),
        ("version https://git-lfs.github.com/spec/v1", "in.jsonl is a pointer of Git LFS"),
        ('{"completion": "1"}', "line 1: needs an object with a text `completion` and an `answer`"),
    ],
)
def test_the_command_names_the_line_it_cannot_read_and_writes_nothing(content, words, tmp_path):
    (tmp_path / "in.jsonl").write_text(content)
    (tmp_path / "out.jsonl").write_text("precious")
    done = command("--reward", "math", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def refusal(tmp_path, *arguments: object) -> str:
    """What the command says to a good input; it must not start to grade, and leave the input as it is."""
    row = '{"completion": "1", "answer": "1"}\n'
    (tmp_path / "in.jsonl").write_text(row)
    (tmp_path / "rewards.py").write_text(
        "open('graded', 'w').close()\ndef score(completion, answer, row): return 1.0\n"
    )
    reward = ["--reward", f"{tmp_path / 'rewards.py'}:score", "--input", tmp_path / "in.jsonl"]
    done = command(*reward, *arguments, folder=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: --") and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "graded").exists() and (tmp_path / "in.jsonl").read_text() == row
    return done.stderr


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("absent/out.jsonl", "cannot be written (No such file or directory); make its folder"),
        ("folder", "is a folder or a device"),
        ("in.jsonl", "is the input"),
        ("in.jsonl/out.jsonl", "cannot be written (Not a directory)"),
        ("blocked", "cannot be written (Is a directory)"),
        ("/dev/null", "is a folder or a device"),
        ("x" * 250, "cannot be written (File name too long)"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_graded(output, words, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "blocked.unfinished").mkdir()
    before = {"folder", "blocked.unfinished", "in.jsonl", "rewards.py"}
    said = refusal(tmp_path, "--output", tmp_path / output)
    assert "--output" in said and words in said
    assert {path.name for path in tmp_path.iterdir()} == before, "a refused start leaves nothing behind"


def test_an_output_whose_unfinished_file_would_be_the_input_is_refused(tmp_path):
    (tmp_path / "out.jsonl.unfinished").symlink_to("in.jsonl")
    assert "is the input, or" in refusal(tmp_path, "--output", tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--reward_timeout", "-1", "-1: must be above 0"),
        ("--reward_timeout", "0", "0: must be above 0"),
        ("--reward_workers", "-2", "-2: must be at least 0"),
        ("--reward_in_flight", "0", "0: must be at least 1"),
        ("--max_completion_tokens", "0", "0: must be at least 1"),
        ("--reward", "maths", "'maths': "),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_is_graded(flag, value, words, tmp_path):
    assert f"{flag} {words}" in refusal(tmp_path, "--output", tmp_path / "out.jsonl", flag, value)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "rewards.py"}
