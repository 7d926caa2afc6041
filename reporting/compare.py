"""Is the difference between two sides noise? `python report.py --compare a1 a2 a3 -- b1 b2 b3` says so, in words.

The steps of a run depend on each other, so a run is one draw: each gives one number for each metric, its mean over the
last tenth of its points and over all of them. Two sides are compared by

- the same seeds on both: Student's interval of the differences of pairs;
- other seeds: Welch's interval; if one side has a single run, the variance of the other stands for both;
- a single run on each: what another seed would give is not known. For held-out accuracy the sampling error of the
  evaluation is: that of the problems' differences if both have evaluated the same ones, else that of each side's
  problems (Miller 2024, arXiv 2411.00640: standard errors over questions, and paired ones for two models).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np

from reporting.history import History, but_for_the_seed, read_lines
from reporting.intervals import CONFIDENCE, margin_of_difference, margin_of_mean

METRICS = ("reward/mean", "eval/*/avg@*", "completion/tokens_mean", "policy/kl_ref", "policy/entropy")  # *: any text
MORE_IS_BETTER = ("reward/", "eval/")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
END = "At the end: mean of the last tenth of the points that all runs have"
WHOLE = "Over the whole curve: mean of all points that all runs have"
ALONE = "; one seed each: only the sampling error of the evaluation is known"


@dataclass(frozen=True)
class Difference:
    """The means of both sides, and half the width of the interval of B - A; nan if no error is known."""

    a: float
    b: float
    margin: float

    @property
    def value(self) -> float:
        return self.b - self.a


def problem_scores(run: History, name: str, steps: list[int]) -> dict[tuple[str, str], float]:
    """(row, answer) of a held-out problem -> its mean score in these evaluations; {} where completions are missing."""
    scores: dict[tuple[str, str], list[float]] = {}
    for step in steps:
        file = run.folder / "eval" / f"step_{step}" / f"{name.split('/')[1]}.jsonl"
        if not file.exists():
            return {}
        for record in read_lines(file):
            score = next(iter(record["reward_parts"].values()), 0.0)  # of the first verifier, as in evaluate.py
            scores.setdefault((record["row"], str(record["answer"])), []).append(score)
    return {problem: float(np.mean(values)) for problem, values in scores.items()}


def shared_seeds(a: list[History], b: list[History]) -> list[object]:
    """The seeds, if both sides have the same ones, each once, and at least two; else []."""
    sides = [[run.seed for run in side] for side in (a, b)]
    is_clear = all(None not in seeds and len(set(seeds)) == len(seeds) >= 2 for seeds in sides)
    return sides[0] if is_clear and set(sides[0]) == set(sides[1]) else []


def common_steps(runs: Iterable[History], name: str) -> list[int]:
    """The steps where every run has a number: runs may differ in length and in the period of evaluation."""
    return sorted(set.intersection(*(set(run.points(name)) for run in runs)))


def difference(a: list[History], b: list[History], name: str, steps: list[int]) -> Difference:
    """Of the metric's mean over these steps."""
    means_a, means_b = ([float(np.mean([run.points(name)[step] for step in steps])) for run in side] for side in (a, b))
    if seeds := shared_seeds(a, b):
        of_seed = dict(zip((run.seed for run in b), means_b, strict=True))
        margin = margin_of_mean([of_seed[seed] - mean for seed, mean in zip(seeds, means_a, strict=True)])
    elif len(a) + len(b) > 2:
        margin = margin_of_difference(means_a, means_b)
    else:
        margin = margin_of_problems(a[0], b[0], name, steps) if name.startswith("eval/") else math.nan
    return Difference(float(np.mean(means_a)), float(np.mean(means_b)), margin)


def margin_of_problems(a: History, b: History, name: str, steps: list[int]) -> float:
    """Half of the interval that another draw of held-out problems leaves; nan where completions are missing."""
    scores_a, scores_b = (problem_scores(run, name, steps) for run in (a, b))
    if scores_a.keys() == scores_b.keys():
        return margin_of_mean([scores_b[problem] - score for problem, score in scores_a.items()])
    is_known = min(len(scores_a), len(scores_b)) >= 2
    return margin_of_difference(list(scores_a.values()), list(scores_b.values())) if is_known else math.nan


# In words -------------------------------------------------------------------------------------------------------------


def compare(a: list[History], b: list[History]) -> str:
    """The whole answer; each side holds at least one run."""
    runs = [*a, *b]
    names = set().union(*(run.names for run in runs))
    found = [name for pattern in METRICS for name in sorted(names) if fnmatch(name, pattern)]
    steps = {name: common_steps(runs, name) for name in found}
    compared = [name for name in found if steps[name]]
    lines = [*described("A", a), *described("B", b), *changed_flags(a, b), method(a, b)]
    for title, is_end in ((END, True), (WHOLE, False)):
        rows = [["", "A", "B", "B - A, and what holds"]]
        for name in compared:
            chosen = steps[name][-math.ceil(len(steps[name]) / 10) :] if is_end else steps[name]
            found_out = difference(a, b, name, chosen)
            digits = digits_of(found_out)
            means = [f"{mean:.{digits}f}" for mean in (found_out.a, found_out.b)]
            rows.append([name, *means, verdict(name, found_out, len(a), len(b))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", f"{title}.", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]
    if compared:
        lines += ["", f"In brackets: {CONFIDENCE:.0%} confidence intervals; one of twenty misses the truth."]
    for name in found:
        lacking = [str(run.folder) for run in runs if not run.points(name)]
        if not steps[name]:
            why = f"missing in {', '.join(lacking)}" if lacking else "no step has it in every run"
            lines.append(f"Not compared: {name}, {why}.")
    return "\n".join(lines if found else [*lines, f"Nothing to compare: no run has one of {', '.join(METRICS)}."])


def verdict(name: str, found: Difference, num_a: int, num_b: int) -> str:
    """What holds, in a sentence."""
    digits, alone = digits_of(found), num_a == num_b == 1
    size, margin = abs(found.value), found.margin
    if math.isnan(margin):
        return f"{found.value:+.{digits}f}; {'one seed each: ' if alone else ''}its error is not known"
    if size <= margin or size == 0:
        low, high = found.value - margin, found.value + margin
        seeds = f"{count(num_a)} seeds" if num_a == num_b else f"{count(num_a)} against {count(num_b)} seeds"
        who = "this evaluation" if alone else seeds
        interval = f"{found.value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
        seen = f"no difference can be seen; {who} would show one of {margin:.{digits}f} or more"
        return f"{interval}: {seen}{ALONE if alone else ''}"
    words = ("better", "worse") if name.startswith(MORE_IS_BETTER) else ("higher", "lower")
    interval = f"{size:.{digits}f} ({size - margin:.{digits}f} to {size + margin:.{digits}f})"
    return f"B is {words[found.value < 0]} by {interval}{ALONE if alone else ''}"


def digits_of(found: Difference) -> int:
    """Decimals that show about three figures of the means."""
    size = max(abs(found.a), abs(found.b))
    return next((digits for digits, least in ((1, 100), (2, 10), (3, 0.1), (5, 1e-9)) if size >= least), 3)


def count(number: int) -> str:
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def described(side: str, runs: list[History]) -> list[str]:
    """The side's runs, and what speaks against taking them for repetitions of one."""
    seeds = [run.seed for run in runs]
    each = [f"{run.folder} (seed {run.seed}, to step {run.last_step})" for run in runs]
    lines = [f"{side}: {', '.join(each)}"]
    if len(set(seeds)) < len(seeds):
        lines.append(f"{side} has the same seed twice: these runs are no independent repetitions.")
    flags = [but_for_the_seed(run.config) for run in runs]
    names = {name for each in flags for name in each}
    if differing := [f"--{name}" for name in sorted(names) if len({repr(each.get(name)) for each in flags}) > 1]:
        lines.append(f"{side}'s runs differ in more than the seed: {', '.join(differing)}.")
    return lines


def changed_flags(a: list[History], b: list[History]) -> list[str]:
    """The flags in which the first run of B differs from the first of A."""
    before, after = but_for_the_seed(a[0].config), but_for_the_seed(b[0].config)
    pairs = [(name, before.get(name), after.get(name)) for name in sorted(set(before) | set(after))]
    changed = [f"--{name} {there!r} -> {here!r}" for name, there, here in pairs if there != here]
    return [f"From A to B: {', '.join(changed)}."] if changed else ["A and B have the same flags."]


def method(a: list[History], b: list[History]) -> str:
    """How the intervals are made."""
    if shared_seeds(a, b):
        return "Both sides have the same seeds: intervals are of the differences of pairs."
    if len(a) + len(b) == 2:
        return "One seed each: what another seed would give is not known."
    if min(len(a), len(b)) == 1:
        return "One side has one run: its variance is taken to be that of the other side."
    return "The seeds differ, or do not make pairs: Welch's intervals."
