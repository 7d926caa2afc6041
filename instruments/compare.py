"""Is the difference between two sides noise? `python report.py --compare a1 a2 a3 -- b1 b2 b3` says so, in words.

The steps of a run depend on each other, so a run is one draw: each gives one number for each metric, its mean over the
last tenth of its points and over all of them. Two sides are compared by

- Student's interval of the differences of pairs, if both have the same seeds;
- Welch's interval, if the seeds differ; the variance of several runs stands for that of a single one, too;
- the sampling error of a held-out accuracy, if each has a single run and both have evaluated the same problems: that of
  their differences (Miller 2024, arXiv 2411.00640). What another seed would give is not known then.
"""

from __future__ import annotations

import math
import re
from fnmatch import fnmatch

import numpy as np

from instruments.history import History, but_for_the_seed, in_columns, read_lines

METRICS = ("reward/mean", "eval/*/avg@*", "completion/tokens_mean", "policy/kl_ref", "policy/entropy")  # *: any text
GRADED_BY = ("--reward", "--list_answers", "--environment", "--tools")
SAMPLED_BY = ("--temperature", "--top_p", "--max_completion_tokens")
MEASURED_BY = {  # metrics whose verdict is "better" or "worse" -> flags that decide what they measure
    "reward/": (*GRADED_BY, *SAMPLED_BY, "--train_data", "--truncated", "--overlong_cache_tokens"),
    "eval/": (*GRADED_BY, *(name.replace("--", "--eval_") for name in SAMPLED_BY), "--eval_data"),
}
COPIED = ("reward/", "completion/")  # metrics that a replay does not measure
TITLES = {  # of so many parts of the points the last one is taken
    10: "At the end: mean of the last tenth of the points that all runs have.",
    1: "Over the whole curve: mean of all points that all runs have.",
}
CONFIDENCE = 0.95


def difference(a: list[History], b: list[History], name: str, steps: list[int]) -> tuple[float, float, float]:
    """The metric's means over these steps on both sides, and half the width of the interval of B - A.

    The last is nan if no error is known.
    """
    means_a, means_b = ([float(np.mean([run.points(name)[step] for step in steps])) for run in side] for side in (a, b))
    if seeds := shared_seeds(a, b):
        of_seed = dict(zip((run.seed for run in b), means_b, strict=True))
        margin = margin_of_mean([of_seed[seed] - mean for seed, mean in zip(seeds, means_a, strict=True)])
    elif len(a) + len(b) > 2:
        margin = margin_of_difference(means_a, means_b)
    else:
        margin = margin_of_problems(a[0], b[0], name, steps) if name.startswith("eval/") else math.nan
    return float(np.mean(means_a)), float(np.mean(means_b)), margin


def shared_seeds(a: list[History], b: list[History]) -> list[object]:
    """The seeds of A, if both sides have the same ones, each once, and at least two; else []."""
    sides = [[run.seed for run in side] for side in (a, b)]
    is_clear = all(None not in seeds and len(set(seeds)) == len(seeds) >= 2 for seeds in sides)
    return sides[0] if is_clear and set(sides[0]) == set(sides[1]) else []


def common_steps(runs: list[History], name: str) -> list[int]:
    """The steps where every run has a number: runs may differ in length and in the period of evaluation.

    None if that before training is the only one: it says nothing of the runs.
    """
    steps = sorted(set.intersection(*(set(run.points(name)) for run in runs)))
    return steps if steps != [0] else []


def margin_of_problems(a: History, b: History, name: str, steps: list[int]) -> float:
    """Half of the interval that another draw of held-out problems leaves; nan if both have not answered the same."""
    scores_a, scores_b = (problem_scores(run, name, steps) for run in (a, b))
    if scores_a.keys() != scores_b.keys():
        return math.nan
    return margin_of_mean([scores_b[problem] - score for problem, score in scores_a.items()])


def problem_scores(run: History, name: str, steps: list[int]) -> dict[tuple[str, str], float]:
    """(row, answer) of a held-out problem -> its mean score in these evaluations; {} without their completions."""
    scores: dict[tuple[str, str], list[float]] = {}
    for step in steps:
        for record in read_lines(run.folder / "eval" / f"step_{step}" / f"{name.split('/')[1]}.jsonl"):
            score = next(iter(record["reward_parts"].values()), 0.0)  # of the first verifier, as in evaluate.py
            scores.setdefault((record["row"], str(record["answer"])), []).append(score)
    return {problem: float(np.mean(values)) for problem, values in scores.items()}


def t_quantile(confidence: float, freedom: float) -> float:
    """The t that Student's |T| stays below with this probability; degrees of freedom: 1 or more, also fractions.

    With T = sqrt(freedom) tan(angle), the density of the angle is proportional to cos(angle)^(freedom-1).
    """
    angles = np.linspace(0.0, math.pi / 2, 10_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(np.interp(confidence * mass[-1], mass, angles))


def margin_of_mean(values: list[float]) -> float:
    """Half of Student's interval of the mean (1908); nan for fewer than two values."""
    if len(values) < 2:
        return math.nan
    return t_quantile(CONFIDENCE, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def margin_of_difference(a: list[float], b: list[float]) -> float:
    """Half of Welch's interval (1947) of mean(b) - mean(a): the variances may differ.

    One value on one side: the variance of the other side is taken for both, s sqrt(1 + 1/n). One on each: nan.
    """
    if min(len(a), len(b)) < 2:
        several = max(a, b, key=len)
        return margin_of_mean(several) * math.sqrt(len(several) + 1)
    variances = [float(np.var(side, ddof=1)) / len(side) for side in (a, b)]  # of the means
    if not any(variances):
        return 0.0
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / (len(a) - 1) + variances[1] ** 2 / (len(b) - 1))
    return t_quantile(CONFIDENCE, freedom) * math.sqrt(sum(variances))


def compare(a: list[History], b: list[History]) -> str:
    """The whole answer; each side holds at least one run. Raises ValueError if a side holds a run twice."""
    for side in (a, b):
        if len({run.folder.resolve() for run in side}) < len(side):
            raise ValueError(f"{', '.join(str(run.folder) for run in side)}: one run is there twice; name each once.")
    runs = [*a, *b]
    replays = [str(run.folder) for run in runs if run.config.get("replay")]
    names = sorted(set().union(*(run.names for run in runs)))
    names = [name for name in names if not (replays and name.startswith(COPIED))]
    steps = {name: common_steps(runs, name) for pattern in METRICS for name in names if fnmatch(name, pattern)}
    differences = differing([a[0], b[0]])
    changed = [f"{name} {there!r} -> {here!r}" for name, (there, here) in differences.items()]
    lines = [*described("A", a), *described("B", b)]
    lines += [f"From A to B: {', '.join(changed) or 'the same flags'}.", *cost(a, b), method(a, b)]
    unlike = {kind: not_alike(kind, [a[0], b[0]], differences) for kind in MEASURED_BY}
    if found := dict.fromkeys(sum(unlike.values(), [])):
        lines.append(f"Careful: the rewards of A and B are not measured alike: {', '.join(found)}.")
    for parts, title in TITLES.items():
        rows = [["", "A", "B", "B - A, and what holds"]]
        for name in filter(steps.get, steps):
            chosen = steps[name][-math.ceil(len(steps[name]) / parts) :]
            rows.append([name, *verdict(name, *difference(a, b, name, chosen), "B" if len(runs) > 2 else "run B")])
            if why := unlike.get(f"{name.partition('/')[0]}/"):
                rows[-1][-1] = f"not measured alike: {', '.join(why)}"
        lines += ["", title, *in_columns(rows)]
    lines += ["", f"In brackets: {CONFIDENCE:.0%} confidence intervals; one of twenty misses the truth."]
    if replays:
        lines.append(f"Rewards and lengths are left out: a replay ({', '.join(replays)}) copies those of its run.")
    if missing := [name for name in steps if not steps[name]]:
        lines.append(f"Not compared, because no step of training has it in every run: {', '.join(missing)}.")
    return "\n".join(lines) if steps else f"Nothing to compare: no run has one of {', '.join(METRICS)}."


def not_alike(kind: str, runs: list[History], differences: dict[str, list[object]]) -> list[str]:
    """Those of the differences by which these metrics measure another thing; contents are those of what a flag names.

    A held-out accuracy is the score of the first verifier of --reward, without its weight.
    """
    named = str([run.config.get(flag[2:]) for run in runs for flag in MEASURED_BY[kind]])
    found = [name for name in differences if name in MEASURED_BY[kind] or name.removeprefix("contents of ") in named]
    first = {re.match(r"[^,:]*((?<=\.py):\w+)?", each or "")[0] for each in differences.get("--reward", [])}
    return [name for name in found if name != "--reward" or kind != "eval/" or len(first) > 1]


def verdict(name: str, a: float, b: float, margin: float, side: str) -> list[str]:
    """Both means, and what holds. `side`: how B is called."""
    value, size = b - a, max(abs(a), abs(b))
    digits = 5 if size < 0.1 else 3 if size < 10 else 2
    means = [f"{mean:.{digits}f}" for mean in (a, b)]
    if math.isnan(margin):
        return [*means, f"{value:+.{digits}f}: its error is not known"]
    if value == margin == 0:
        return [*means, "the same"]
    words = ("better", "worse") if name.startswith(tuple(MEASURED_BY)) else ("higher", "lower")
    unseen = f"no difference can be seen; one of {margin:.{digits}f} or more would show"
    holds = unseen if abs(value) <= margin else f"{side} is {words[value < 0]}"
    return [*means, f"{value:+.{digits}f} ({value - margin:+.{digits}f} to {value + margin:+.{digits}f}): {holds}"]


def cost(a: list[History], b: list[History]) -> list[str]:
    """What the steps that all runs have took, as a mean over the runs of a side; nothing where that is not known."""
    steps = common_steps([*a, *b], "time/step_s")
    sums = [np.mean([run.cost(steps) for run in side], axis=0) for side in (a, b)]
    if not np.all(sums):
        return []
    (count_a, seconds_a), (count_b, seconds_b) = sums
    took = f"A {count_a:,.0f} completions in {seconds_a:,.0f} s, B {count_b:,.0f} in {seconds_b:,.0f} s"
    words = f"B sampled {count_b / count_a:.2g} x as many and took {seconds_b / seconds_a:.2g} x as long"
    return [f"Cost of the {len(steps)} steps that all runs have: {took}; {words}."]


def described(side: str, runs: list[History]) -> list[str]:
    """The side's runs, and what speaks against taking them for repetitions of one."""
    each = [f"{run.folder} (seed {run.seed}, to step {run.last_step})" for run in runs]
    lines = [f"{side}: {', '.join(each)}"]
    if len({run.seed for run in runs}) < len(runs):
        lines.append(f"{side} has the same seed twice: these runs are no independent repetitions.")
    if found := differing(runs):
        lines.append(f"{side}'s runs differ in more than the seed: {', '.join(found)}.")
    return lines


def differing(runs: list[History]) -> dict[str, list[object]]:
    """Flag -> its value in each of the runs, where they differ in more than the seed; file -> digest of its contents.

    The contents of a file that not all of them name are no difference beside that of the flag.
    """
    flags = [{f"--{name}": value for name, value in but_for_the_seed(run.config).items()} for run in runs]
    values = {name: [each.get(name) for each in flags] for name in sorted(set().union(*flags))}
    contents = {name: [run.contents.get(name) for run in runs] for name in runs[0].contents}
    values |= {name: found for name, found in contents.items() if None not in found}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def method(a: list[History], b: list[History]) -> str:
    """How the intervals are made."""
    if shared_seeds(a, b):
        return "Both sides have the same seeds: intervals are of the differences of pairs."
    if len(a) + len(b) == 2:
        known = "intervals hold the error of the evaluation; what another seed gives is not known"
        return f"One seed each: a verdict on two runs, not on what they differ by; {known}."
    if min(len(a), len(b)) == 1:
        return "One side has one run: its variance is taken to be that of the other side."
    return "The seeds differ, or do not make pairs: Welch's intervals."
