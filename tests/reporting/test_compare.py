"""Whether the difference of two sides is noise: the intervals hold what they promise, and the words fit them."""

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from made_up_runs import METRICS, history, write_completions, write_run
from reporting.compare import common_steps, compare, difference
from reporting.history import History
from reporting.intervals import margin_of_difference, t_quantile

ROOT = Path(__file__).parent.parent.parent
DRAWS = 2000  # the share of intervals that hold the truth then has a standard error of 0.005


@pytest.mark.parametrize(
    ("confidence", "freedom", "t"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 4, 2.77645), (0.99, 5, 4.03214), (0.95, 1318, 1.96177)],
)
def test_quantiles_are_those_of_the_tables(confidence, freedom, t):
    assert t_quantile(confidence, freedom) == pytest.approx(t, rel=1e-5)


def test_welchs_interval_is_that_of_a_worked_example():
    # By hand: variances 1 and 16, 3 values each: se = sqrt(17 / 3) = 2.3805, freedom = 17^2 / (1 + 256) x 2 = 2.2490.
    found = margin_of_difference([1.0, 2.0, 3.0], [2.0, 6.0, 10.0])
    assert found == pytest.approx(t_quantile(0.95, 2.2490) * 2.3805, rel=1e-3)


def share_that_hold(draw, truth: float) -> float:
    """`draw` makes two sides of runs; the share of draws whose interval holds the truth."""
    found = [difference(*draw(), "reward/mean", [1]) for _ in range(DRAWS)]
    return float(np.mean([abs(each.value - truth) <= each.margin for each in found]))


def test_95_of_100_intervals_over_seeds_hold_the_truth():
    rng = np.random.default_rng(0)

    def side(mean: float, std: float, seeds: range) -> list[History]:
        return [history(value, seed) for value, seed in zip(rng.normal(mean, std, len(seeds)), seeds, strict=True)]

    # Welch's interval is not exact for three values: a little too wide for equal spreads, less so for others.
    assert 0.94 < share_that_hold(lambda: (side(0, 1, range(3)), side(1, 1, range(3, 6))), 1.0) < 0.985
    assert 0.93 < share_that_hold(lambda: (side(0, 1, range(3)), side(1, 3, range(3, 6))), 1.0) < 0.97
    assert 0.935 < share_that_hold(lambda: (side(0, 1, range(1)), side(1, 1, range(1, 5))), 1.0) < 0.965, "exact"


def test_95_of_100_intervals_of_pairs_hold_the_truth():
    rng = np.random.default_rng(1)

    def draw() -> tuple[list[History], list[History]]:
        shared = rng.normal(0, 10, 3)
        a, b = shared + rng.normal(0, 1, 3), shared + rng.normal(0.5, 1, 3)
        return [[history(value, seed) for seed, value in enumerate(side)] for side in (a, b)]

    assert 0.935 < share_that_hold(draw, 0.5) < 0.965, "exact"


def test_95_of_100_intervals_over_problems_hold_the_truth(tmp_path):
    rng, name, held = np.random.default_rng(2), "eval/set/avg@1", []
    for _ in range(300):  # a standard error of 0.013; files are slow
        chance = rng.uniform(0, 1, 150)  # of each problem; B is better by 0.1 where it can be
        runs = []
        for side, chances in (("a", chance), ("b", np.minimum(chance + 0.1, 1))):
            scores = (rng.uniform(0, 1, 150) < chances).astype(float)
            write_completions(tmp_path / side, 1, "set", scores.tolist())
            runs.append(History(tmp_path / side, {"seed": 1}, [{"step": 1, name: float(scores.mean())}]))
        found = difference(runs[:1], runs[1:], name, [1])
        held.append(abs(found.value - 0.095) <= found.margin)  # E min(u + 0.1, 1) - u = 0.1 - 0.005
    assert 0.91 < np.mean(held) < 0.99


def test_the_same_seeds_are_compared_in_pairs():
    a = [history(value, seed) for seed, value in ((1, 0.1), (2, 0.5), (3, 0.9))]
    b = [history(value, seed) for seed, value in ((3, 0.92), (1, 0.121), (2, 0.519))]  # in another order
    found = difference(a, b, "reward/mean", [1])
    assert found.value == pytest.approx(0.02) and found.margin == pytest.approx(
        4.30265 * 0.001 / math.sqrt(3), rel=1e-3
    )
    others = [history(run.records[0]["reward/mean"], seed) for run, seed in zip(b, (4, 5, 6), strict=True)]
    assert difference(a, others, "reward/mean", [1]).margin > 0.8


def test_steps_count_that_every_run_has_with_a_number():
    a = History(Path("a"), {}, [{"step": step, "policy/kl_ref": float(step)} for step in range(1, 7)])
    records = [{"step": 2, "policy/kl_ref": 1.0}, {"step": 3, "policy/kl_ref": None}, {"step": 5, "policy/kl_ref": 1.0}]
    b = History(Path("b"), {}, [*records, {"step": 6, "policy/kl_ref": math.nan}, {"step": 9, "policy/kl_ref": 1.0}])
    assert common_steps([a, b], "policy/kl_ref") == [2, 5]


def runs_of(folder: Path, rewards: dict[int, float], num_steps: int = 40, **config: object) -> list[str]:
    """Folders of runs, seed -> reward; a curve rises to its reward at half the way."""
    paths = []
    for seed, reward in rewards.items():
        records = [
            {"step": step, "eval/test/avg@1": None if step == 20 else reward, "eval/test/stderr": 0.01}
            | {name: reward * min(1, step / num_steps * 2) for name in METRICS}
            for step in range(1, num_steps + 1)
        ]
        paths.append(str(write_run(folder / f"seed{seed}", {"seed": seed, "out_dir": f"seed{seed}"} | config, records)))
    return paths


def said(*arguments: str) -> str:
    command = [sys.executable, "report.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_command_says_that_b_is_better(tmp_path):
    a = runs_of(tmp_path / "a", {1: 0.50, 2: 0.51, 3: 0.49}, learning_rate=1e-4)
    b = runs_of(tmp_path / "b", {1: 0.60, 2: 0.612, 3: 0.59}, learning_rate=3e-4)
    text = said("--compare", *a, "--", *b)
    assert "From A to B: --learning_rate 0.0001 -> 0.0003." in text
    assert "Both sides have the same seeds: intervals are of the differences of pairs." in text
    # Differences 0.1, 0.102, 0.1: mean 0.1007, s = 0.001155, margin 4.303 x 0.001155 / sqrt(3) = 0.0029.
    end, whole = text.split("Over the whole curve")
    assert re.search(r"^reward/mean +0\.500 +0\.601 +B is better by 0\.101 \(0\.098 to 0\.104\)$", end, re.MULTILINE)
    assert re.search(r"^eval/test/avg@1 +0\.500 +0\.601 +B is better by 0\.101", end, re.MULTILINE)
    assert re.search(r"^policy/entropy +0\.500 +0\.601 +B is higher by 0\.101", end, re.MULTILINE)
    assert re.search(r"^reward/mean +0\.381 +0\.458 +B is better by 0\.077", whole, re.MULTILINE)  # 0.5 x 0.7625
    assert "stderr" not in text


def test_the_command_says_that_no_difference_can_be_seen(tmp_path):
    a = runs_of(tmp_path / "a", {1: 0.50, 2: 0.55, 3: 0.45})
    b = runs_of(tmp_path / "b", {4: 0.51, 5: 0.56, 6: 0.46})
    text = said("--compare", *a, "--", *b)
    # s = 0.05 on both sides, freedom 4: 2.776 x 0.05 x sqrt(2 / 3) = 0.113.
    expected = "+0.010 (-0.103 to +0.123): no difference can be seen; three seeds would show one of 0.113 or more\n"
    assert expected in text
    assert "The seeds differ, or do not make pairs: Welch's intervals." in text
    worse = said("--compare", *b, "--", *runs_of(tmp_path / "c", {7: 0.1}))
    assert "One side has one run" in worse and "B is worse by 0.410" in worse


def test_of_one_seed_each_only_the_error_of_the_evaluation_is_known(tmp_path):
    (a,), (b,) = runs_of(tmp_path / "a", {1: 0.5}, 10), runs_of(tmp_path / "b", {2: 0.6}, 10)
    text = said("--compare", a, "--", b).split("Over the whole curve")[0]
    assert text.count("+0.100; one seed each: its error is not known") == 5, "without completions of all five"
    for run, correct in ((a, 50), (b, 60)):
        write_completions(Path(run), 10, "test", [1.0] * correct + [0.0] * (100 - correct))
    text = said("--compare", a, "--", b).split("Over the whole curve")[0]
    # 10 of 100 problems differ, all in B's favour: s = 0.3015, margin 1.984 x 0.03015 = 0.060.
    alone = "one seed each: only the sampling error of the evaluation is known"
    assert f"B is better by 0.100 (0.040 to 0.160); {alone}" in text
    assert text.count("+0.100; one seed each: its error is not known") == 4
    write_completions(Path(b), 10, "test", [0.0, *[1.0] * 60, *[0.0] * 40])  # 101 problems: other ones
    text = said("--compare", a, "--", b)
    assert f"no difference can be seen; this evaluation would show one of 0.139 or more; {alone}" in text


def test_what_speaks_against_a_comparison_is_said(tmp_path):
    a = runs_of(tmp_path / "a", {1: 0.5, 2: 0.6}) + runs_of(tmp_path / "c", {2: 0.6}, 60, group_size=4)
    b = runs_of(tmp_path / "b", {1: 0.5, 2: 0.6}, 20)
    file = Path(b[0]) / "metrics.jsonl"
    file.write_text(file.read_text().replace("policy/kl_ref", "policy/other"))
    text = said("--compare", *a, "--", *b)
    assert "A has the same seed twice" in text and "A's runs differ in more than the seed: --group_size." in text
    assert f"Not compared: policy/kl_ref, missing in {b[0]}." in text
    assert "(seed 2, to step 60)" in text and "(seed 1, to step 20)" in text
    assert "three against two seeds would show" in text
    empty = History(tmp_path, {}, [{"step": 1}])
    assert "Nothing to compare" in compare([empty], [empty])


def test_a_policy_that_is_named_after_the_seed_is_no_other_flag(tmp_path):
    runs = []
    for seed in (1, 2, 3):
        names = {"model": f"runs/policy_seed{seed}", "train_data": [f"runs/policy_seed{seed}/train.jsonl"]}
        runs += runs_of(tmp_path, {seed: 0.5 + seed / 100}, **names, group_size=8 if seed < 3 else 4)
    text = said("--compare", *runs[:2], "--", runs[2])
    assert "A's runs differ" not in text and "From A to B: --group_size 8 -> 4." in text


def test_a_folder_that_is_no_run_is_named_in_a_sentence(tmp_path):
    (run,) = runs_of(tmp_path, {1: 0.5})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text('{"seed": 1}')
    for name, sentence in {
        "nothing": "is no run folder with results: it has no config.json.",
        "begun": "is no run folder with results: it has no metrics.jsonl with a step.",
        "damaged": "cannot be read",
    }.items():
        command = [sys.executable, "report.py", "--compare", run, "--", str(tmp_path / name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {tmp_path / name} {sentence}")
        assert len(done.stderr.splitlines()) == 1
