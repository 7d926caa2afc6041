"""Evaluation: the figures against counting by hand, the settings, and the command on a checkpoint."""

import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from evaluate import Result, Settings, check_names, figures_of, majority_score, pass_at_k, settings_per_set, table
from helpers import ENVIRONMENT, ROOT, make_rollout, start
from reward import Grade


def grade(score: float, answer: str | None = None, status: str = "ok") -> Grade:
    return Grade(score, status, {"math": score} if status == "ok" else {}, answer)


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num_right, k):
    samples = [i < num_right for i in range(5)]
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(num_right, 5, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_the_majority_is_the_most_frequent_answer_and_ties_count_in_part():
    right, other, third = grade(1.0, "1/2"), grade(0.0, "2"), grade(0.0, "3")
    assert majority_score([right, right, other]) == 1.0
    assert majority_score([grade(1.0, "0.5"), grade(1.0, "\\frac12"), other, other, third]) == 0.5, (
        "right answers are one answer"
    )
    assert majority_score([right, other, other]) == 0.0
    assert majority_score([right, other, third]) == pytest.approx(1 / 3)
    assert majority_score([right, grade(0.0, None), grade(0.0, None)]) == 1.0, "no answer is no vote"
    assert majority_score([grade(0.0, None)]) is None


def test_every_figure_has_its_standard_error_over_problems():
    scores = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    grades = [grade(float(score), str(score)) for row in scores for score in row]
    grades[4] = grade(0.0, None, "timeout")
    figures = figures_of(grades, make_rollout([2, 4, 6, 8] * 3), 4)
    assert list(figures) == ["avg@4", "pass@2", "pass@4", "maj@4", "frac_truncated", "tokens_mean", "frac_failed"]
    assert figures["avg@4"] == pytest.approx((0.5, 0.5 / math.sqrt(3)))
    assert figures["pass@2"] == pytest.approx(((1 - 1 / 6 + 0 + 1) / 3, np.std([5 / 6, 0, 1], ddof=1) / math.sqrt(3)))
    assert figures["pass@4"][0] == pytest.approx(2 / 3)
    assert figures["maj@4"][0] == pytest.approx((0.5 + 0 + 1) / 3)
    assert figures["tokens_mean"] == (5.0, 0.0)
    assert figures["frac_failed"][0] == pytest.approx(1 / 12)
    metrics = Result("math500", 3, Settings(4, 1.0, 1.0, 10), figures).metrics()
    assert metrics["eval/math500/avg@4"] == 0.5 and metrics["eval/math500/stderr"] == figures["avg@4"][1]
    assert metrics["eval/math500/pass@2_stderr"] == figures["pass@2"][1]


def test_one_problem_tells_no_standard_error_and_one_sample_no_pass_at_k():
    figures = figures_of([grade(1.0, "1")], make_rollout([3]), 1)
    assert figures["avg@1"][0] == 1.0 and math.isnan(figures["avg@1"][1])
    assert not [name for name in figures if "pass" in name or "maj" in name]


def test_settings_are_one_for_all_sets_or_one_for_each():
    given = {"samples": [1, 32], "temperature": [0.6], "top_p": [0.95], "max_completion_tokens": [100, 200]}
    assert settings_per_set(2, "eval_", **given) == [Settings(1, 0.6, 0.95, 100), Settings(32, 0.6, 0.95, 200)]
    given |= {"samples": [1], "max_completion_tokens": [100]}
    for change, words in (
        ({"samples": [1, 2]}, "--eval_samples has 2 values for 3 sets"),
        ({"samples": [0]}, "--eval_samples 0: must be at least 1"),
        ({"top_p": [1.5]}, "--eval_top_p 1.5: must be at least 1e-09 and at most 1"),
        ({"temperature": [float("nan")]}, "--eval_temperature nan"),
        ({"temperature": [0.0], "samples": [4]}, "--eval_samples 4 at --eval_temperature 0 are 4 times the same"),
    ):
        with pytest.raises(ValueError, match=words):
            settings_per_set(3, "eval_", **given | change)


def test_sets_of_the_same_name_are_refused():
    check_names(["a/test.jsonl", "b/test.jsonl@train", "owner/test@test"])
    with pytest.raises(ValueError, match="test, test are reported under their names"):
        check_names(["a/test.jsonl", "b/test.jsonl"])


def test_the_table_has_the_published_numbers_beside_ours():
    figures = {"avg@1": (0.7825, 0.0185), "frac_truncated": (0.0, 0.0), "tokens_mean": (512.4, 3.06)}
    lines = table([Result("math500", 500, Settings(1, 1.0, 1.0, 10), figures)], ["78.2"]).splitlines()
    assert lines[0].split() == ["set", "problems", "k", "avg@k", "pass@k", "maj@k", "truncated", "tokens", "published"]
    assert lines[1].split() == [
        "math500",
        "500",
        "1",
        "78.2",
        "±",
        "1.8",
        "-",
        "-",
        "0.0",
        "±",
        "0.0",
        "512.4",
        "±",
        "3.1",
        "78.2",
    ]


def command(policy, *arguments: object) -> subprocess.CompletedProcess[str]:
    flags = ["--model", policy, "--max_prompt_tokens", 8, "--max_completion_tokens", 12, *arguments]
    return subprocess.run(
        [sys.executable, "evaluate.py", *map(str, flags)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_evaluates_several_sets_and_keeps_every_completion(policy, tmp_path):
    sets = [policy / "heldout.jsonl", f"{policy / 'train.jsonl'}@train#6"]
    done = command(
        policy,
        "--data",
        *sets,
        "--samples",
        4,
        1,
        "--reward",
        "exact",
        "--out_dir",
        tmp_path / "out",
        "--published",
        "50.0",
        "-",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "out" / "heldout.jsonl").read_text().splitlines()]
    assert len(rows) == 16 * 4 and len((tmp_path / "out" / "train_train.jsonl").read_text().splitlines()) == 6
    found = results["sets"]["heldout"]
    assert found["problems"] == 16 and found["samples"] == 4 and results["sets"]["train_train"]["samples"] == 1
    right = np.array([row["is_correct"] for row in rows]).reshape(16, 4)
    assert found["avg@4"]["mean"] == pytest.approx(right.mean())
    assert found["avg@4"]["stderr"] == pytest.approx(right.mean(axis=1).std(ddof=1) / 4)
    assert found["pass@4"]["mean"] == pytest.approx(right.any(axis=1).mean())
    for row in rows:
        assert row["is_correct"] == (row["completion"].strip() == row["answer"]) == (row["reward"] == 1.0)
        assert (
            row["num_tokens"] <= 12
            and row["reward_status"] == "ok"
            and row["row"].startswith(str(policy / "heldout.jsonl"))
        )
    assert "heldout" in done.stdout and "published" in done.stdout and "±" in done.stdout
    again = command(policy, "--data", *sets, "--out_dir", tmp_path / "out")
    assert (
        again.returncode == 1 and "is there already and not empty" in again.stderr and "Traceback" not in again.stderr
    )


def test_two_ranks_evaluate_the_same_problems_once(policy, tmp_path):
    flags = [
        "--model",
        policy,
        "--max_prompt_tokens",
        8,
        "--max_completion_tokens",
        12,
        "--samples",
        2,
        "--reward",
        "exact",
    ]
    done = start(2, "evaluate.py", *flags, "--data", policy / "heldout.jsonl", "--out_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "heldout.jsonl").read_text().splitlines()]
    problems = [json.loads(line) for line in (policy / "heldout.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["answer"]) for row in rows] == [
        (p["problem"], p["answer"]) for p in problems for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "absent.jsonl"], "absent.jsonl does not exist"),
        (["--data", "{policy}/heldout.jsonl", "--samples", "1", "2"], "--samples has 2 values for 1 sets"),
        (["--data", "{policy}/heldout.jsonl", "--published", "1", "2"], "--published has 2 numbers for 1 sets"),
        (["--data", "{policy}/heldout.jsonl", "--max_completion_tokens", "1000"], "beyond the model's context of 128"),
        (["--data", "{policy}/heldout.jsonl", "--reward", "maths"], "neither built in"),
        (["--data", "{policy}/heldout.jsonl", "--answer_column", "solution"], "no column 'solution'"),
        (["--data", "{policy}/heldout.jsonl", "--model", "./nowhere"], "--model './nowhere'"),
    ],
)
def test_the_command_tells_mistakes_in_one_line(arguments, words, policy):
    done = command(policy, *[argument.format(policy=policy) for argument in arguments])
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, done.stderr[-2000:]


def run_script(name: str, *flags: object, **environment: object) -> str:
    """A script of scripts/ on one rank, with short limits."""
    short = ["--max_prompt_tokens", 100, "--max_completion_tokens", 12, *flags]
    done = subprocess.run(
        ["bash", f"scripts/{name}", *map(str, short)],
        cwd=ROOT,
        env=ENVIRONMENT | {"NGPU": "1"} | {key: str(value) for key, value in environment.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_script_of_six_sets_runs_as_it_is_and_shows_the_published_numbers(policy, tmp_path):
    for name in ("math500", "gsm8k", "minerva", "olympiadbench", "aime24", "amc23"):
        (tmp_path / f"{name}.jsonl").write_text((policy / "heldout.jsonl").read_text())
    out = run_script("eval_qwen7b_simplerl.sh", "--out_dir", tmp_path / "out", MODEL=policy, DATA=tmp_path)
    table = {
        line.split()[0]: line.split()
        for line in out.splitlines()
        if line.split() and line.split()[0] in ("math500", "aime24", "amc23")
    }
    assert [row[-1] for row in table.values()] == ["78.2", "15.6", "62.5"]
    assert table["aime24"][2] == "32" and len((tmp_path / "out" / "aime24.jsonl").read_text().splitlines()) == 16 * 32
    assert "boxed" in json.loads((tmp_path / "out" / "results.json").read_text())["flags"]["prompt_suffix"]


def test_the_script_of_three_verifiers_runs_as_it_is(policy, tmp_path):
    rows = {
        "gsm8k": {"question": "1+1", "answer": "It is <<1+1=2>>2.\n#### 2"},
        "math": {"problem": "1+1", "answer": "2"},
        "ifeval": {"prompt": "no", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    out = run_script("eval_tulu8b_rlvr.sh", MODEL=policy, **{name.upper(): tmp_path / f"{name}.jsonl" for name in rows})
    for name, published in (("gsm8k", "87.6"), ("math", "43.7"), ("ifeval", "82.4")):
        assert any(line.startswith(name) and line.endswith(published) for line in out.splitlines()), out
