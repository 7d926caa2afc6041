"""Is the difference between two sides noise? `python report.py --compare a1 a2 a3 -- b1 b2 b3` says so, in words.

The steps of a run depend on each other, so a run is one draw: each gives one number for each
metric, its mean over the last tenth of its points and over all of them. Two sides are compared by

- Student's interval of the differences of pairs, if both have the same seeds;
- Welch's interval, if the seeds differ; the variance of several seeds stands for that of a single one, too;
- the sampling error of a held-out accuracy, if each has a single run and both have evaluated the same problems: that of
  their differences (Miller 2024, arXiv 2411.00640). What another seed would give is not known then.

Runs of one seed count as one.
"""

import fnmatch
import math
import statistics
from collections import defaultdict

import numpy as np

from runtime.history import History, but_for_the_seed, read_lines
from runtime.tables import in_columns

Side = list[History]  # the runs of A, or of B
# * stands for any text.
METRICS = (
    "reward/mean", "eval/*/avg@*", "completion/tokens_mean", "policy/kl_ref", "policy/entropy",
    "time/step_s", "sampling/prompts",  # what a step costs
)  # fmt: skip
GRADED_BY = ("--reward", "--environment", "--tools")
SAMPLED_BY = ("--temperature", "--max_completion_tokens")
EVAL_SAMPLED_BY = ("--eval_temperature", "--eval_top_p", "--eval_max_completion_tokens")
MEASURED_BY = {  # namespace of metrics whose verdict is "better" or "worse" -> flags that decide what they measure
    "reward": (*GRADED_BY, *SAMPLED_BY, "--train_data", "--truncated", "--overlong_cache_tokens"),
    "eval": (*GRADED_BY, *EVAL_SAMPLED_BY, "--eval_data"),
}
COPIED = ("reward/", "completion/")  # metrics that a replay does not measure
TITLES = {  # the points are cut into so many parts, of which the last one is taken
    10: "At the end: mean of the last tenth of the points that all runs have.",
    1: "Over the whole curve: mean of all points that all runs have.",
}
CONFIDENCE = 0.95


def namespace(name: str) -> str:
    """The part of a metric's name before the first slash."""
    return name.partition("/")[0]


def means_by_seed(side: Side, name: str, steps: list[int]) -> dict[object, float]:
    """Seed -> the metric's mean over these steps. Runs of one seed are one draw: what they differ by is no spread."""
    values = defaultdict(list)
    for run in side:
        points = run.points(name)
        values[run.seed] += [points[step] for step in steps]
    return {seed: statistics.mean(each) for seed, each in values.items()}


def difference(a: Side, b: Side, name: str, steps: list[int]) -> tuple[float, float, float]:
    """The metric's means over these steps on both sides, and half the width of the interval of B - A.

    The last is nan if no error is known.
    """
    means_a, means_b = (means_by_seed(side, name, steps) for side in (a, b))
    if means_a.keys() == means_b.keys():
        margin = margin_of_mean([means_b[seed] - mean for seed, mean in means_a.items()])
    else:
        margin = margin_of_difference([*means_a.values()], [*means_b.values()])
    if math.isnan(margin) and namespace(name) == "eval" and len(a) == len(b) == 1:
        scores_a, scores_b = (problem_scores(run, name, steps) for run in (*a, *b))
        if scores_a.keys() == scores_b.keys():  # else they have not answered the same
            margin = margin_of_mean([scores_b[problem] - score for problem, score in scores_a.items()])
    return statistics.mean(means_a.values()), statistics.mean(means_b.values()), margin


def common_steps(runs: Side, name: str) -> list[int]:
    """The steps where every run has a number: runs may differ in length and in the period of evaluation.

    [] if step 0 is the only one: an evaluation before training says nothing of the runs.
    """
    steps = sorted(set.intersection(*(set(run.points(name)) for run in runs)))
    return steps if steps != [0] else []


def problem_scores(run: History, name: str, steps: list[int]) -> dict[tuple[str, str], float]:
    """(row, answer) of a held-out problem -> its mean score in these evaluations; {} without their completions."""
    set_name = name.split("/")[1]
    scores = defaultdict(list)
    for step in steps:
        for completion in read_lines(run.folder / "eval" / f"step_{step}" / f"{set_name}.jsonl"):
            score = next(iter(completion["reward_parts"].values()), 0.0)  # the first verifier's, as in evaluate.py
            scores[completion["row"], str(completion["answer"])].append(score)
    return {problem: statistics.mean(values) for problem, values in scores.items()}


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
    return t_quantile(CONFIDENCE, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def margin_of_difference(a: list[float], b: list[float]) -> float:
    """Half of Welch's interval (1947) of mean(b) - mean(a): the variances may differ.

    One value on one side: the variance of the other side is taken for both, s sqrt(1 + 1/n). One on each: nan.
    """
    if min(len(a), len(b)) < 2:
        several = max(a, b, key=len)
        return margin_of_mean(several) * math.sqrt(len(several) + 1)
    variance_a, variance_b = (statistics.variance(values) / len(values) for values in (a, b))  # of the mean
    variance = variance_a + variance_b
    if variance == 0:  # a metric that is always the same
        return 0.0
    freedom = variance**2 / (variance_a**2 / (len(a) - 1) + variance_b**2 / (len(b) - 1))
    return t_quantile(CONFIDENCE, freedom) * math.sqrt(variance)


def compare(a: Side, b: Side) -> str:
    """The whole answer; each side holds at least one run. Raises ValueError if a side holds a run twice."""
    for side in (a, b):
        if len({run.folder.resolve() for run in side}) < len(side):
            raise ValueError(f"{', '.join(str(run.folder) for run in side)}: one run is there twice; name each once.")
    runs = [*a, *b]
    replays = [str(run.folder) for run in runs if run.config.get("replay")]
    names = sorted(set().union(*(run.names for run in runs)))
    if replays:
        names = [name for name in names if not name.startswith(COPIED)]
    steps = {}
    for pattern in METRICS:
        steps |= {name: common_steps(runs, name) for name in fnmatch.filter(names, pattern)}
    differences = differing([a[0], b[0]])
    changes = [f"{name} {there!r} -> {here!r}" for name, (there, here) in differences.items()]
    changed = ", ".join(changes) or "the same flags"
    lines = [*described("A", a), *described("B", b), f"From A to B: {changed}.", method(a, b)]
    unlike = {kind: not_alike(kind, [a[0], b[0]], differences) for kind in MEASURED_BY}
    for parts, title in TITLES.items():
        rows = [["", "A", "B", "B - A, and what holds"]]
        for name, common in steps.items():
            if not common:
                continue
            last_steps = common[-math.ceil(len(common) / parts) :]
            row = verdict(name, *difference(a, b, name, last_steps))
            if reasons := unlike.get(namespace(name)):
                row[-1] = f"not measured alike: {', '.join(reasons)}"
            rows.append([name, *row])
        lines += ["", title, *in_columns(rows)]
    lines += ["", f"In brackets: {CONFIDENCE:.0%} confidence intervals; one of twenty misses the truth."]
    if replays:
        lines.append(f"Rewards and lengths are left out: a replay ({', '.join(replays)}) copies those of its run.")
    if missing := [name for name, common in steps.items() if not common]:
        lines.append(f"Not compared, because no step of training has it in every run: {', '.join(missing)}.")
    return "\n".join(lines)


def not_alike(kind: str, runs: Side, differences: dict[str, list[object]]) -> list[str]:
    """The differences that change what these metrics measure; contents count if such a flag names the file."""
    flags = MEASURED_BY[kind]
    named = str([run.config.get(flag[2:]) for run in runs for flag in flags])
    return [name for name in differences if name in flags or name.removeprefix("contents of ") in named]


def verdict(name: str, a: float, b: float, margin: float) -> list[str]:
    """Both means, and what holds."""
    value = b - a
    size = max(abs(a), abs(b))
    digits = 5 if size < 0.1 else 3 if size < 10 else 2
    plain, signed = f".{digits}f", f"+.{digits}f"
    means = [f"{mean:{plain}}" for mean in (a, b)]
    if value == margin == 0:
        return [*means, "the same"]
    if math.isnan(margin) or margin == 0:  # equal values are no spread to judge by
        return [*means, f"{value:{signed}}: its error is not known"]
    if abs(value) <= margin:
        holds = f"no difference can be seen; one of {margin:{plain}} or more would show"
    elif namespace(name) in MEASURED_BY:
        holds = "B is better" if value > 0 else "B is worse"
    else:
        holds = "B is higher" if value > 0 else "B is lower"
    return [*means, f"{value:{signed}} ({value - margin:{signed}} to {value + margin:{signed}}): {holds}"]


def described(side: str, runs: Side) -> list[str]:
    """Lines that name the side's runs, and say why they are no repetitions of one."""
    texts = [f"{run.folder} (seed {run.seed}, to step {run.last_step})" for run in runs]
    lines = [f"{side}: {', '.join(texts)}"]
    if len({run.seed for run in runs}) < len(runs):
        lines.append(f"{side} has the same seed twice: its runs count as one.")
    if differences := differing(runs):
        lines.append(f"{side}'s runs differ in more than the seed: {', '.join(differences)}.")
    return lines


def differing(runs: Side) -> dict[str, list[object]]:
    """Flag -> its value in each of the runs, where they differ in more than the seed; file -> digest of its contents.

    If not all of them name a file, the flag is the difference, and the contents are not listed.
    """
    flags = [but_for_the_seed(run.config) for run in runs]
    values = {f"--{name}": [own.get(name) for own in flags] for name in sorted(set().union(*flags))}
    contents = [run.contents for run in runs]
    for name in contents[0]:
        digests = [own.get(name) for own in contents]
        if None not in digests:
            values[name] = digests
    return {name: given for name, given in values.items() if any(value != given[0] for value in given)}


def method(a: Side, b: Side) -> str:
    """The sentence on how the intervals are made."""
    seeds_a, seeds_b = ({run.seed for run in side} for side in (a, b))
    if len(seeds_a) + len(seeds_b) == 2:
        return (
            "One seed each: a verdict on two runs, not on what they differ by; "
            "intervals hold the error of the evaluation; what another seed gives is not known."
        )
    if seeds_a == seeds_b:
        return "Both sides have the same seeds: intervals are of the differences of pairs."
    if min(len(seeds_a), len(seeds_b)) == 1:
        return "One side has one seed: its variance is taken to be that of the other side."
    return "The seeds differ: Welch's intervals."
