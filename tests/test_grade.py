"""`scripts/grade.py`: a file of completions -> the same rows with their rewards."""

import json
import os
import sys
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

import pytest

import grade
from helpers.runs import ROOT, run_command, succeeded

ROW = {"completion": "4", "answer": "4"}


def flags_of(folder: Path, rows: list[dict] | str, reward: str, *more: object) -> list[str]:
    """To grade the rows, or the text of a file, in `folder`."""
    text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
    (folder / "in.jsonl").write_text(text)
    return ["--reward", reward, "--input", "in.jsonl", "--output", "out.jsonl", *map(str, more)]


def command(folder: Path, *given: object) -> str:
    """What the command says of what `flags_of` is given; in `folder`, where my_reward.py may stand."""
    program = [sys.executable, str(ROOT / "scripts/grade.py"), *flags_of(folder, *given)]
    return succeeded(run_command(program, dict(os.environ), folder)).stdout


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
        {"id": 4, "completion": "\\boxed{\\int_0^{\\pi} \\ln(1+\\sin(x)^3) \\sqrt{x} dx}", "answer": "0"},
        {"id": 5, "completion": "é <answer>7</answer>", "answer": "7"},
        {"id": 6, "completion": "\\boxed{8}", "answer": ["7", "8"]},
    ]
    text = "\ufeff" + "\r\n".join(json.dumps(row) for row in rows) + "\n\n"
    said = command(tmp_path, text, "math", "--reward_timeout", 1)
    out = graded(tmp_path)
    own = ("id", "completion", "answer", "more")
    assert [{key: row[key] for key in own if key in row} for row in out] == rows
    assert [row["is_correct"] for row in out] == [True, False, None, False, True, True]
    assert [row["read_as"] for row in out] == ["1/2", "2", None, None, "7", "8"]
    assert [row["reward"] for row in out] == [1.0, 0.0, None, 0.0, 1.0, 1.0]
    assert [row["reward_status"].partition(":")[0] for row in out] == ["ok", "ok", "bad key", "timeout", "ok", "ok"]
    assert "6 rows: 4 graded, mean reward 0.7500; 1 failed, 1 with an answer key that cannot be used" in said
    assert "line 4: timeout" in said


def test_nothing_of_another_grading_is_left_in_a_row(tmp_path):
    """As in samples.jsonl, eval/ and rollouts/ of a run with another reward: its other columns stay."""
    old_grade = {"reward": 1.0, "is_correct": True, "reward_status": "timeout", "reward_parts": {"length": -1.0}}
    old_grade |= {"read_as": "7", "advantage": 0.5, "advantages": [0.5], "is_trained": True}
    other = ROW | {"step": 3, "is_truncated": False, "num_tokens": 4, "dataset": "MATH"}
    command(tmp_path, [other | old_grade | {"answer": "5"}], "exact")
    new_grade = {"reward": 0.0, "is_correct": False, "reward_status": "ok", "read_as": "4"}
    new_grade |= {"reward_parts": {"exact": 0.0}}
    assert graded(tmp_path) == [other | {"answer": "5"} | new_grade]


def test_the_command_compares_groups_and_grades_truncated_rows_0(tmp_path):
    code = "def score(completions):\n    return [{'reward': len(c), 'of': len(completions)} for c in completions]\n"
    (tmp_path / "my_reward.py").write_text(code)
    rows = [{"completion": "x" * i, "answer": "4", "is_truncated": i == 3} for i in range(4)]
    said = command(tmp_path, rows, "my_reward.py:score", "--group_size", 2, "--truncated", "zero")
    assert "4 graded, mean reward 0.7500; 0 failed" in said
    found = [(row["reward"], row["reward_parts"].get("of")) for row in graded(tmp_path)]
    assert found == [(0, 2), (1, 2), (2, 1), (0, None)]


def test_messages_as_a_prompt_are_a_column_of_the_row(tmp_path):
    code = (
        "def score(completion, columns, max_tokens):\n    return len(columns['prompt'][-1]['content']) + max_tokens\n"
    )
    (tmp_path / "my_reward.py").write_text(code)
    row = ROW | {"prompt": [{"role": "user", "content": "2+2"}], "max_tokens": None}
    command(tmp_path, [row], "format,my_reward.py:score", "--max_completion_tokens", 8)
    assert [(each["reward"], each["reward_status"]) for each in graded(tmp_path)] == [(3 + 8, "ok")]


@pytest.mark.parametrize(("parameters", "size", "words"), [
    ("completions", 1, "--group_size 1: --reward 'my_reward.py:score' takes all completions"),
    ("completions", 3, "does not divide the 2 rows"),
    ("completions, completion_ids", 2, "takes token ids, which only a training run has"),
])  # fmt: skip
def test_a_reward_that_the_file_cannot_serve_is_refused_at_once(parameters, size, words, tmp_path):
    (tmp_path / "my_reward.py").write_text(f"def score({parameters}):\n    return [1.0 for _ in completions]\n")
    assert words in refused(tmp_path, [ROW, ROW], "my_reward.py:score", "--group_size", size)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("column", ["answer", "prompt", "row"])
def test_rows_of_different_prompts_are_not_compared(column, tmp_path):
    (tmp_path / "my_reward.py").write_text("def score(completions):\n    return [1.0 for _ in completions]\n")
    rows = [ROW | {column: str(number // 2)} for number in range(4)]
    command(tmp_path, rows, "my_reward.py:score", "--group_size", 2)
    words = "--group_size 4: in.jsonl, line 1 and in.jsonl, line 3 would be one group, but are of different prompts"
    assert words in refused(tmp_path, rows, "my_reward.py:score", "--group_size", 4)


@pytest.mark.parametrize(("content", "words"), [
    ('{"completion": "1", "answer": "1", "prompt": 7}', ["line 1: `prompt` is '7'", "str"]),
    ('{"completion": "1", "answer": "1", "max_tokens": true}', ["`max_tokens` is 'True'", "int"]),
    ('{"completion": "1", "answer": "1"}\n{"completion": "1", "ans', ["line 2: not valid JSON"]),
    ('{"completion": 1, "answer": "1"}', ["line 1: needs an object with a text `completion`"]),
    ('{"completion": "1"}', ["line 1: needs an object with a text `completion` and an `answer`"]),
    ('{"completion": "1", "answer": []}', ["line 1: the answer is a list without an answer"]),
    ("\n", ["holds no rows"]),
])  # fmt: skip
def test_the_command_names_the_line_that_it_cannot_read(content, words, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious")
    sentence = refused(tmp_path, content, "math")
    assert sentence.startswith("error: ") and all(word in sentence for word in words)
    assert (tmp_path / "out.jsonl").read_text() == "precious"


@pytest.mark.parametrize(("flag", "value", "words"), [
    ("--output", "absent/out.jsonl", "cannot be written; make its folder"),
    ("--output", "folder", "is the input, a folder or a device"),
    ("--output", "in.jsonl", "is the input, a folder or a device"),
    ("--reward_timeout", "0", "0: must be above 0"),
    ("--max_completion_tokens", "0", "0: must be at least 1"),
    ("--reward", "maths", "'maths': "),
])  # fmt: skip
def test_a_wrong_flag_is_refused_before_anything_is_graded(flag, value, words, tmp_path):
    (tmp_path / "folder").mkdir()
    sentence = refused(tmp_path, [ROW], "exact", flag, value)
    assert sentence.startswith(f"error: {flag} ") and words in sentence and "\n" not in sentence
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "in.jsonl"}
