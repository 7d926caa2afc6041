"""What a user looks at: a few completions of each step, those that could not be graded, rows that cannot be used."""

from dataclasses import replace

import numpy as np

from batch import Row
from data import PromptData
from gate.describe import describe_data
from helpers.made_up import make_rollout
from helpers.runs import lines
from reward import Grade
from run import StepRecord
from warm_start import build_tokenizer
from watch.samples import Samples


def row_of(line: int) -> Row:
    return Row([{"role": "user", "content": "?"}], "4", {}, f"train.jsonl, line {line}")


def sampled(step: int, grades: list[Grade], group_size: int = 2) -> StepRecord:
    """Completions "a", "b", ..., two of each row; all but the first group are trained on."""
    numbers = range(len(grades))
    rows, texts = [row_of(7 + b // 2) for b in numbers], [chr(ord("a") + b) for b in numbers]
    rollout = replace(make_rollout([2 + b for b in numbers]), texts=texts, rows=rows, grades=grades)
    used_B = np.arange(group_size, len(grades))
    advantages = [np.full(1, b, np.float32) for b in used_B]
    return StepRecord(step, group_size, rollout, np.zeros(len(grades)), used_B, advantages)


def test_rows_that_cannot_be_used_are_listed_once(tmp_path):
    tokenizer, file = build_tokenizer(), tmp_path / "excluded_rows.jsonl"
    excluded = [("line 1", "no answer")]
    train, test = (PromptData(name, [row_of(2)], excluded=excluded) for name in ("train", "test"))
    for _ in range(2):  # the second start of a run
        said = describe_data([train, test], tokenizer, file)
    assert lines(file) == [{"set": name, "row": "line 1", "reason": "no answer"} for name in ("train", "test")]
    assert "data test: 1 rows; 0 dropped (too many tokens), 1 excluded" in said
    assert said[-1] == "first prompt: ''"
    test = replace(test, rows=[row_of(2), replace(row_of(2), ids=np.ones(1, np.int32))])
    said = describe_data([train, test], tokenizer, file)
    assert "warning: 1 of 2 prompts of test are training prompts" in said


def test_failed_gradings_are_kept_and_the_first_three_named(tmp_path, capsys):
    statuses = ["timeout", "error: no", "truncated", "ok", *["timeout"] * 2]
    Samples(tmp_path).rollout(sampled(3, [Grade(0.0, status) for status in statuses]))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 3: reward timeout, of train.jsonl, line 7: 'a'" and "error: no" in said[1]
    assert len(said) == 4 and said[-1].startswith("step 3: 4 completions were not graded; all are in")
    found = lines(tmp_path / "reward_failures.jsonl")
    expected = {"step": 3, "row": "train.jsonl, line 7", "reward_status": "timeout", "answer": "4", "completion": "a"}
    assert found[0].items() >= expected.items() and [each["completion"] for each in found] == ["a", "b", "e", "f"]


def test_two_completions_of_two_trained_groups_are_kept_as_samples(tmp_path):
    grades = [Grade(float(b), "ok", {"math": 1.0}, str(b)) for b in range(9)]
    Samples(tmp_path).rollout(sampled(5, grades, group_size=3))
    records = lines(tmp_path / "samples.jsonl")
    assert [record["completion"] for record in records] == ["d", "e", "g", "h"]
    assert [(record["reward"], record["read_as"]) for record in records] == [(3, "3"), (4, "4"), (6, "6"), (7, "7")]
    assert [record["advantage"] for record in records] == [3, 4, 6, 7]
    assert (records[0]["step"], records[0]["reward_status"], records[0]["is_truncated"]) == (5, "ok", False)
