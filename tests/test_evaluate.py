"""Evaluation: the figures against counting by hand, and the command on a checkpoint."""

import itertools
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from batch import Rollout, Row
from data import PromptData
from evaluate import main, new_folder, parse_arguments, table
from evaluation import Evaluator, Result, figures_of, majority_score, pass_at_k
from flags import Sampling
from grading import Case, Grade
from grading.verifiers import load_verifier
from helpers.made_up import ALONE, flags, make_rollout, write_lines
from helpers.runs import ENVIRONMENT, ROOT, lines, run_script, said, succeeded
from test_setups import TELLS


def grade(score: float, answer: str | None = None, status: str = "ok") -> Grade:
    return Grade(score, status, {"math": score} if status == "ok" else {}, answer)


def test_pass_at_k_and_the_majority_are_those_of_counting():
    for num_correct, k in itertools.product(range(6), range(1, 6)):
        subsets = list(itertools.combinations([i < num_correct for i in range(5)], k))
        assert pass_at_k(num_correct, 5, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    right, other, third, none = grade(1.0, "1/2"), grade(0.0, "2"), grade(0.0, "3"), grade(0.0, None)
    for grades, score in (
        ([right, right, other], 1.0), ([right, other, other], 0.0), ([right, other, third], pytest.approx(1 / 3)),
        ([grade(1.0, "0.5"), grade(1.0, "\\frac12"), other, other, third], 0.5),  # correct answers are one answer
        ([right, none, none], 1.0), ([none], None),  # no answer is no vote
    ):  # fmt: skip
        assert majority_score(grades) == score


def test_every_figure_has_its_standard_error_and_the_published_number_beside_it():
    grades = [grade(float(score), score) for score in "110000001111"]
    grades[4] = grade(0.0, None, "timeout")
    figures = figures_of(replace(make_rollout([2, 4, 6, 8] * 3), grades=grades), 4)
    assert list(figures) == ["avg@4", "pass@2", "pass@4", "maj@4", "frac_truncated", "tokens_mean", "frac_failed"]
    assert figures["avg@4"] == pytest.approx((0.5, 0.5 / math.sqrt(3)))
    assert figures["pass@2"] == pytest.approx(((1 - 1 / 6 + 0 + 1) / 3, np.std([5 / 6, 0, 1], ddof=1) / math.sqrt(3)))
    means = {"pass@4": 2 / 3, "maj@4": (0.5 + 0 + 1) / 3, "frac_failed": 1 / 12}
    assert {name: figures[name][0] for name in means} == pytest.approx(means) and figures["tokens_mean"] == (5.0, 0.0)
    metrics = Result(held_out("math500", "1", "2", "3"), Sampling(4, 1.0, 10), figures).metrics()
    found = metrics["eval/math500/avg@4"], metrics["eval/math500/stderr"], metrics["eval/math500/pass@2_stderr"]
    assert found == (*figures["avg@4"], figures["pass@2"][1])
    one = figures_of(replace(make_rollout([3]), grades=[grade(1.0, "1")]), 1)
    assert one["avg@1"][0] == 1.0 and math.isnan(one["avg@1"][1])
    assert list(one) == ["avg@1", "frac_truncated", "tokens_mean", "frac_failed"]
    figures = {"avg@1": (0.7825, 0.0185), "frac_truncated": (0.0, 0.0), "tokens_mean": (512.4, 3.06)}
    shown = table([Result(held_out("math500", *["1"] * 500), Sampling(1, 1.0, 10), figures)], ["78.2"])
    head, row = (" ".join(line.split()) for line in shown.splitlines())
    assert head == "set problems k avg@k pass@k maj@k truncated tokens published"
    assert row == "math500 500 1 78.2 ± 1.8 - - 0.0 ± 0.0 512.4 ± 3.1 78.2"


def held_out(name: str, *answers: str) -> PromptData:
    message = {"role": "user", "content": "?"}
    return PromptData(name, [Row([message], answer, {}, f"{name}, line {i}") for i, answer in enumerate(answers)])


def test_evaluation_is_due_every_few_steps_and_after_the_last_and_may_be_before_the_first(tmp_path):
    for every, is_first, due in ((3, False, [3, 6, 7]), (3, True, [0, 3, 6, 7]), (0, True, [0]), (0, False, [])):
        evaluator = Evaluator([], [], None, tmp_path, every, is_first, seed=1)
        assert [step for step in range(8) if evaluator.is_due(step, is_last=step == 7)] == due


@pytest.mark.parametrize(("given", "words"), [
    ("--data absent.jsonl", "absent.jsonl does not exist"), ("--samples 1 0", "--samples 0: must be at least 1"),
    ("--samples 1 2", "--samples has 2 values for 1 sets; give one for all or one for each"),
    ("--samples 4 --temperature 0", "--samples 4 at --temperature 0 are 4 times the same; use --samples 1"),
    ("--dtype float32 --head_dtype bfloat16", "--head_dtype bfloat16 with --dtype float32: the former would round"),
    ("--environment a.py:A --tools b.py:f", "an environment calls its tools itself"),
    ("--max_turns 3", "--max_turns 3 has no effect here, only with --environment or --tools"),
    ("--data a/test.jsonl b/test.jsonl", "test, test are reported under their names"),
    ("--published 1 2", "--published has 2 numbers for 1 sets"), ("--reward maths", "neither built in"),
    ("--max_completion_tokens 1000", "beyond the context of --model .*, 128 tokens"),
    (f"--out_dir {ROOT}", "is there already and not empty"), ("--like ./x", "--like ./x has no config.json; name"),
    ("--reward exact,pairs.py:score", "--samples 1: --reward 'exact,pairs.py:score' takes all completions of a prompt"),
    ("--reward pairs.py:score --samples 2 --max_prompt_tokens 4", "all 16 prompts are longer than"),
    ("--model run", "--model 'run' is the folder of a run, not of a model; give its final"),
])  # fmt: skip
def test_the_command_tells_mistakes_in_one_line(given, words, policy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    write_lines(tmp_path / "run" / "config.json", [{"out_dir": "run"}])
    (tmp_path / "run" / "final").symlink_to(policy)
    flags = f"--model {policy} --data {policy}/heldout.jsonl --max_prompt_tokens 8 --max_completion_tokens 12 {given}"
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *flags.split()])
    pytest.raises(SystemExit, main)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and re.search(words, line)


def test_like_a_run_is_evaluated_as_it_trains(tmp_path, monkeypatch):
    run = vars(flags(reward="math:2,length", prompt_suffix=" Go.", max_completion_tokens=7, eval_samples=2))
    write_lines(tmp_path / "config.json", [run])
    (tmp_path / "step_3").mkdir()
    (tmp_path / "best").symlink_to("step_3")
    command = ["evaluate.py", "--model", str(tmp_path / "best"), "--data", "d", "--like", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--prompt_suffix", " Stop."])
    args = parse_arguments()
    assert (args.reward, args.max_completion_tokens, args.samples) == ("math:2,length", [7], [2])
    assert args.prompt_suffix == " Stop." and args.dtype == run["dtype"]
    assert new_folder(None, args.model).parent == tmp_path / "eval" / "step_3"
    assert new_folder(None, "owner/name").parent == Path("eval/owner--name")


SHORT = ["--max_prompt_tokens", "100", "--max_completion_tokens", "12"]


def test_the_script_of_six_sets_reports_its_completions(policy, tmp_path):
    problems = lines(policy / "heldout.jsonl")
    for name in ("math500", "gsm8k", "minerva", "olympiadbench", "aime24", "amc23"):
        write_lines(tmp_path / f"{name}.jsonl", problems)
    out, given = tmp_path / "out", {"NGPU": "2", "MODEL": str(policy), "DATA": str(tmp_path)}
    command = ["bash", "scripts/eval_qwen7b_simplerl.sh", *SHORT, "--out_dir", str(out)]
    shown = succeeded(run_script(command, ENVIRONMENT | given)).stdout
    cells = {row[0]: row for row in map(str.split, shown.splitlines()) if row}
    assert [cells[name][-1] for name in ("math500", "aime24", "amc23")] == ["78.2", "15.6", "62.5"]
    assert cells["aime24"][2] == "32" and "published" in shown and "±" in shown
    results, rows = json.loads((out / "results.json").read_text()), lines(out / "aime24.jsonl")
    found, suffix = results["sets"]["aime24"], results["flags"]["prompt_suffix"]
    expected = [(f"<user>{row['problem']}{suffix}<assistant>", row["answer"]) for row in problems for _ in range(32)]
    assert "boxed" in suffix and [(row["prompt"], row["answer"]) for row in rows] == expected
    verify = load_verifier("math")
    for row in rows:
        assert row["is_correct"] == (row["reward"] == 1.0) and row["num_tokens"] <= 12
        assert row["reward"] == verify(Case(row["completion"], row["answer"], prompt=row["prompt"])).reward
        assert row["reward_status"] == "ok" and row["row"].startswith(f"{tmp_path}/aime24.jsonl")
    assert found["problems"] == 16 and found["samples"] == 32 and results["sets"]["math500"]["samples"] == 1
    right = np.array([row["is_correct"] for row in rows]).reshape(16, 32)
    assert 0 < found["avg@32"]["mean"] == pytest.approx(right.mean())
    assert found["avg@32"]["stderr"] == pytest.approx(right.mean(axis=1).std(ddof=1) / 4)
    assert found["pass@32"]["mean"] == pytest.approx(right.any(axis=1).mean())


def engine_that_says(*texts: str) -> SimpleNamespace:  # in place of rollout.py
    def sample(rows, sampling, seed, name, on_finished) -> Rollout:
        for b, text in enumerate(texts):
            on_finished(b, text, [1, 2], False)
        return replace(make_rollout([2] * len(rows)), rows=rows, texts=texts)

    return SimpleNamespace(Engine=lambda *_: SimpleNamespace(llm=None, sample=sample, close=lambda: None))


def test_the_script_of_three_verifiers_gives_each_set_its_own(policy, tmp_path, monkeypatch, capsys):
    """What it starts, with an engine that is right once of two times."""
    sets = {
        "gsm8k": ({"question": "1+1", "answer": "It is <<1+1=2>>2.\n#### 2"}, "#### 2", "87.6"),
        "math": ({"problem": "1+1", "answer": "2"}, "\\boxed{\\frac42}", "43.7"),
        "ifeval": ({"prompt": "?", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"letter": None}]},
                   "none", "82.4"),
    }  # fmt: skip
    files = {name.upper(): write_lines(tmp_path / f"{name}.jsonl", [row] * 2) for name, (row, *_) in sets.items()}
    environment = ENVIRONMENT | files | {"MODEL": str(policy), "BASH_FUNC_python%%": TELLS}
    commands = said(["bash", "scripts/eval_tulu8b_rlvr.sh", *SHORT], environment).split("\1")[:-1]
    monkeypatch.setattr("evaluate.init_world", lambda *_, **__: ALONE)
    for command, (name, (_, right, published)) in zip(commands, sets.items(), strict=True):
        monkeypatch.setattr(sys, "argv", [*command.split("\0")[3:-1], "--out_dir", f"{tmp_path}/{name}"])
        monkeypatch.setitem(sys.modules, "rollout", engine_that_says(right, "a, b"))
        monkeypatch.setattr("engine.host_time.shorten", lambda llm: None)
        main()
        shown = capsys.readouterr().out
        assert re.search(rf"^{name} +2 +1 +50\.0 ± 50\.0 .* {published}$", shown, re.MULTILINE), shown
