"""Whether the difference of two sides is noise: the intervals hold what they promise, and the words fit them."""

import json
import math
import re
from pathlib import Path

import pytest

from helpers.made_up import write_completions, write_run
from reports.compare import common_steps, compare, margin_of_difference, t_quantile
from reports.page import describe, seed_groups
from runtime.history import History, read_run

EVAL, NO_MORE = "eval/test/avg@1", {}
A, B = {1: 0.50, 2: 0.51, 3: 0.49}, {1: 0.60, 2: 0.612, 3: 0.59}  # seed -> reward
METRICS = ("reward/mean", "completion/tokens_mean", "policy/kl_ref", "policy/entropy")


def test_quantiles_are_those_of_tables_and_welchs_interval_that_of_a_worked_example():
    for confidence, freedom, t in ((0.95, 1, 12.7062), (0.95, 4, 2.77645), (0.95, 1318, 1.96177), (0.99, 5, 4.03214)):
        assert t_quantile(confidence, freedom) == pytest.approx(t, rel=1e-5)
    # By hand: variances 1 and 16, 3 values each: se = sqrt(17 / 3) = 2.3805, freedom = 17^2 / (1 + 256) x 2 = 2.2490.
    assert margin_of_difference([1.0, 2.0, 3.0], [2.0, 6.0, 10.0]) == pytest.approx(3.8769 * 2.3805, rel=1e-3)
    # The variance 4 of three values, for both means: se = 2 x sqrt(1 + 1 / 3), freedom = 2.
    for sides in (([1.0], [2.0, 4.0, 6.0]), ([2.0, 4.0, 6.0], [1.0])):
        assert margin_of_difference(*sides) == pytest.approx(4.30265 * 2 * math.sqrt(4 / 3), rel=1e-4)


def runs_of(
    folder: Path, rewards: dict[int, float], num_steps: int = 40, more: dict = NO_MORE, **config: object
) -> list[Path]:
    """Folders of runs, seed -> reward; a curve rises to its reward at half the way."""
    paths = []
    for seed, reward in rewards.items():
        records = [
            {"step": step, EVAL: None if step == 20 else reward, "eval/test/stderr": 0.01, **more}
            | {name: reward * min(1, step / num_steps * 2) for name in METRICS}
            for step in range(1, num_steps + 1)
        ]
        paths.append(write_run(folder / f"seed{seed}", {"seed": seed, "out_dir": f"seed{seed}"} | config, records))
    return paths


def said(a: list[Path], b: list[Path]) -> str:
    return compare([read_run(run) for run in a], [read_run(run) for run in b])


def test_the_verdict_is_better_worse_or_no_visible_difference(tmp_path):
    a = runs_of(tmp_path / "a", A, learning_rate=1e-4)
    text = said(a, runs_of(tmp_path / "b", B, learning_rate=3e-4))
    assert "From A to B: --learning_rate 0.0001 -> 0.0003." in text and "differences of pairs" in text
    # Differences 0.1, 0.102, 0.1: mean 0.1007, s = 0.001155, margin 4.303 x 0.001155 / sqrt(3) = 0.0029.
    end, whole = text.split("Over the whole curve")
    for name, word in {"reward/mean": "better", EVAL: "better", "policy/entropy": "higher"}.items():
        line = rf"^{name} +0\.500 +0\.601 +\+0\.101 \(\+0\.098 to \+0\.104\): B is {word}$"
        assert re.search(line, end, re.MULTILINE), end
    assert re.search(r"^reward/mean +0\.381 +0\.458 +\+0\.077", whole, re.MULTILINE)  # 0.5 x 0.7625
    text = said(a, runs_of(tmp_path / "c", {4: 0.51, 5: 0.52, 6: 0.50}))
    # s = 0.01 on both sides, freedom 4: 2.776 x 0.01 x sqrt(2 / 3) = 0.0227.
    assert "+0.010 (-0.013 to +0.033): no difference can be seen; one of 0.023 or more would show" in text
    assert "Welch's intervals" in text
    assert re.search(r"^reward/mean +0\.500 +0\.500 +the same$", said(a, a), re.MULTILINE)
    text = said(a, runs_of(tmp_path / "d", {7: 0.1}))
    assert "One side has one seed" in text and "B is worse" in text and "B is lower" in text


def test_with_one_seed_each_only_the_evaluations_error_is_known(tmp_path):
    a, b = runs_of(tmp_path, {1: 0.5, 2: 0.6}, 10)
    unknown = "+0.100: its error is not known"
    for run, correct in ((a, 50), (b, 60)):
        write_completions(run, 10, "test", [1.0] * correct + [0.0] * (100 - correct))
    text = said([a], [b]).split("Over the whole curve")[0]
    # 10 of 100 problems differ, all in B's favour: s = 0.3015, margin 1.984 x 0.03015 = 0.060.
    assert "+0.100 (+0.040 to +0.160): B is better" in text and text.count(unknown) == 4
    assert "One seed each: a verdict on two runs, not on what they differ by; intervals hold" in text
    write_completions(b, 10, "test", [0.0, *[1.0] * 60, *[0.0] * 40])  # 101 problems: other ones
    assert said([a], [b]).split("Over the whole curve")[0].count(unknown) == 5


def test_what_a_step_costs_is_compared_and_how_far_a_run_has_come_is_not(tmp_path):
    costs = ({"time/step_s": 2.0, "sampling/prompts": 2}, {"time/step_s": 2.6, "sampling/prompts": 4})
    text = said(*(runs_of(tmp_path / str(i), {1: 0.5, 2: 0.6}, more=each) for i, each in enumerate(costs)))
    for name, difference in {"time/step_s": "0.600", "sampling/prompts": "2.000"}.items():
        assert re.search(rf"^{name} .*\+{difference}: its error is not known$", text, re.MULTILINE), text
    a, b = runs_of(tmp_path / "a", {1: 0.5}, stop_after=None), runs_of(tmp_path / "b", {2: 0.5}, 10, stop_after=10)
    assert "From A to B: the same flags." in said(a, b)
    assert seed_groups([describe(read_run(run)) for run in a + b]) == [[0, 1]]
    runs = [History(Path("c"), {}, [{"step": step, "eval/x/avg@1": 0.5} for step in (0, last)]) for last in (3, 4)]
    assert common_steps(runs, "eval/x/avg@1") == [], "both have the same weights then"


def test_runs_without_a_spread_have_no_interval(tmp_path):
    """Seeds that say the same have none; runs of one seed, which differ by rounding, are one draw."""
    for i, (a, b) in enumerate((({1: 0.5, 2: 0.5}, {3: 0.6, 4: 0.6}), ({1: 0.5}, {1: 0.6}), ({1: 0.5}, {2: 0.6}))):
        sides = [[], []]
        for copy in range(2 if i else 1):
            for side, rewards in zip(sides, (a, b), strict=True):
                near = {seed: reward + 1e-6 * copy for seed, reward in rewards.items()}
                side += runs_of(tmp_path / f"{i}{copy}{len(sides[0])}{side is sides[0]}", near)
        text = said(*sides)
        assert "B is" not in text and text.count("its error is not known") > 2
        assert i == 0 or "One seed each" in text and "A has the same seed twice: its runs count as one." in text


def test_what_speaks_against_a_comparison_is_said(tmp_path):
    a = runs_of(tmp_path / "a", {1: 0.5, 2: 0.6}) + runs_of(tmp_path / "c", {2: 0.6}, 60, group_size=4)
    b = runs_of(tmp_path / "b", {1: 0.5, 2: 0.6}, 20, reward="math")
    file = b[0] / "metrics.jsonl"
    file.write_text(file.read_text().replace("policy/kl_ref", "policy/other"))
    text = said(a, b)
    assert "A has the same seed twice" in text and "A's runs differ in more than the seed: --group_size." in text
    assert "Not compared, because no step of training has it in every run: policy/kl_ref." in text
    assert "not measured alike: --reward" in text
    pytest.raises(ValueError, said, [b[0], b[0]], b[1:]).match("seed1, .*seed1: one run is there twice")
    replay = write_run(tmp_path / "r", {"replay": "runs/x"}, [{"step": 1, "reward/mean": 0.5, "policy/entropy": 1.0}])
    text = said(a[:1], [replay])
    assert f"a replay ({replay}) copies" in text and "reward/" not in text and "policy/entropy" in text


@pytest.mark.parametrize(("flags_of_a", "flags_of_b", "why_reward", "why_eval"), [
    ({"reward": "exact,length"}, {"reward": "length,exact"}, "--reward", "--reward"),
    ({"temperature": 1.0}, {"temperature": 0.6}, "--temperature", ""),
    ({"eval_temperature": [1.0]}, {"eval_temperature": [0.0]}, "", "--eval_temperature"),
    ({"train_data": ["a.jsonl"]}, {"train_data": ["b.jsonl"]}, "--train_data", ""),
    ({"truncated": "zero"}, {"truncated": "score"}, "--truncated", ""),
    ({"environment": "a.py:A"}, {"environment": "a.py:B"}, "--environment", "--environment"),
    ({"learning_rate": 1.0}, {"learning_rate": 2.0}, "", ""),
])  # fmt: skip
def test_what_is_not_measured_alike_has_no_verdict(flags_of_a, flags_of_b, why_reward, why_eval, tmp_path):
    text = said(runs_of(tmp_path / "a", A, **flags_of_a), runs_of(tmp_path / "b", B, **flags_of_b))
    for name, why in {"reward/mean": why_reward, EVAL: why_eval}.items():
        holds = rf"not measured alike: {why}" if why else r"\+0\.101 .*: B is better"
        assert re.search(rf"^{name} +0\.500 +0\.601 +{holds}$", text, re.MULTILINE), text
    assert re.search(r"^policy/entropy .*: B is higher$", text, re.MULTILINE), "it says what it says of both"


def test_other_contents_under_the_same_name_are_a_difference(tmp_path):
    """By inputs.json. But what a seed draws is none: `policy_seed1`, `#10`."""
    runs = []
    for seed, digest in ((1, "1f"), (2, "1f"), (3, "2f")):
        runs += runs_of(tmp_path, {seed: 0.5}, model=f"policy_seed{seed}", reward="my.py:f")
        inputs = {"--model": f"w{seed}", "my.py": digest, "rows.jsonl": "1f", "more.jsonl#10": f"d{seed}"}
        (runs[-1] / "inputs.json").write_text(json.dumps(inputs))
    assert "From A to B: the same flags." in said(runs[:1], runs[1:2])
    text = said(runs[:1], runs[2:])
    assert "From A to B: contents of my.py '1f' -> '2f'." in text
    assert text.count("not measured alike: contents of my.py") == 2 * 2, "for both metrics of each table"
    assert seed_groups([describe(read_run(run)) for run in runs]) == [[0, 1], [2]]
