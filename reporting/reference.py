"""Does a run reproduce what was published? `python report.py runs/x --reference NAME` says reached, not reached or
cannot be judged, with the figures side by side. A run belongs to references/NAME.json if it is trained as that says.

A reference has `training` (the flags that make a run this set-up), `figures` and `curves`, or the reason why nothing
`cannot_be_judged`. A figure is read from metrics.jsonl, as the mean over its `steps`, or from the results.json that the
script `evaluated_by` leaves in a checkpoint. It counts only if it was sampled as its `protocol` says, on as many
problems. Texts in `training`, `model` and `metric` are patterns: * stands for any text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from inputs.records import name_of_source
from reporting.history import History

FOLDER = Path(__file__).parent.parent / "references"
REACHED, NOT_REACHED, UNKNOWN = "reached", "not reached", "cannot be judged"
SAMPLING = ("samples", "temperature", "top_p", "max_completion_tokens")  # of a protocol; it also has `problems`


@dataclass(frozen=True)
class Judgement:
    """One figure, as published and of the run."""

    figure: dict
    found: float | None
    verdict: str
    reason: str = ""  # why it cannot be judged


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def belongs_to(config: dict[str, object]) -> str | None:
    """The name of the reference whose training this is; None if there is none."""
    found = [name for name in names() if config and not other_flags(load(name), config)]
    return found[0] if found else None


def other_flags(reference: dict, config: dict[str, object]) -> list[str]:
    """The flags that are not as the reference has them, in words."""
    wanted = reference["training"].items()
    differing = [(name, value) for name, value in wanted if not is_as_wanted(config.get(name), value)]
    return [f"--{name} {config.get(name)!r}, not {value!r}" for name, value in differing]


def is_as_wanted(found: object, wanted: object) -> bool:
    """Texts by pattern, a list by its only member, all else exactly."""
    if isinstance(found, list):
        return len(found) == 1 and is_as_wanted(found[0], wanted)
    return fnmatch(found, wanted) if isinstance(found, str) and isinstance(wanted, str) else found == wanted


def of_model(entries: list[dict], config: dict[str, object]) -> list[dict]:
    """The figures or curves that are about the run's model."""
    return [entry for entry in entries if is_as_wanted(config.get("model"), entry.get("model", config.get("model")))]


def published_curves(run: History) -> dict[str, dict]:
    """Metric of the run -> {"label", "points": [[step, value], ...]}, as its own reference has published it."""
    name = belongs_to(run.config)
    curves = of_model(load(name)["curves"], run.config) if name else []
    pairs = [(metric, curve) for curve in curves for metric in run.names if fnmatch(metric, curve["metric"])]
    return {metric: {"label": curve["label"], "points": curve["points"]} for metric, curve in pairs}


# Judging --------------------------------------------------------------------------------------------------------------


def judge(reference: dict, run: History) -> list[Judgement]:
    """Every figure that was published for the run's model."""
    other = other_flags(reference, run.config)
    return [judge_figure(figure, other, run) for figure in of_model(reference["figures"], run.config)]


def judge_figure(figure: dict, other: list[str], run: History) -> Judgement:
    """`other`: the flags in which the run is another training."""
    found, problem = evaluated(figure, run) if "evaluated_by" in figure else logged(figure, run)
    another = f"another training: {'; '.join(other)}" if other else ""
    if reason := figure.get("cannot_be_judged") or another or problem:
        return Judgement(figure, found, UNKNOWN, reason)
    low, high = bounds(figure)
    is_reached = found >= low and (figure["is"] == "at least" or found <= high)
    return Judgement(figure, found, REACHED if is_reached else NOT_REACHED)


def bounds(figure: dict) -> tuple[float, float]:
    return figure["value"] - figure["tolerance"], figure["value"] + figure["tolerance"]


def logged(figure: dict, run: History) -> tuple[float | None, str]:
    """The mean of a metric over the figure's steps, and why it cannot be compared, or ""."""
    first, last = figure["steps"]
    if run.last_step < last:
        return None, f"the run is at step {run.last_step} of {last}"
    for name in sorted(name for name in run.names if fnmatch(name, figure["metric"])):
        points = {step: value for step, value in run.points(name).items() if first <= step <= last}
        if points:
            lacking = last - first + 1 - len(points)
            gaps = f"{lacking} of the steps {first} to {last} lack it" if lacking > len(points) / 9 else ""  # a tenth
            is_evaluation = name.startswith("eval/")
            problem = other_protocol(figure, protocol_of(run, name, last)) if is_evaluation else ""
            return float(np.mean(list(points.values()))), gaps or problem
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    return None, f"metrics.jsonl has no {figure['metric']} at {steps}"


def evaluated(figure: dict, run: History) -> tuple[float | None, str]:
    """The same from results.json in a checkpoint: in `best`, if there is one, else in the last that has results."""
    _, set_name, metric = figure["metric"].split("/")
    steps = sorted(run.folder.glob("step_*"), key=lambda folder: int(folder.name.partition("_")[2]), reverse=True)
    for folder in [run.folder / "best", *steps]:
        for file in sorted(folder.glob("eval/*/results.json"), reverse=True):  # the latest first
            result = json.loads(file.read_text())["sets"].get(set_name, {})
            if metric in result:
                return result[metric]["mean"], other_protocol(figure, result)
    checkpoint = run.folder / ("best" if run.config.get("keep_best") else "final")
    return None, f"no results; make them: MODEL={checkpoint} bash {figure['evaluated_by']}"


def protocol_of(run: History, name: str, step: int) -> dict[str, object]:
    """How training has sampled a held-out set, {} if unknown. Its flags have one value for all sets, or one each."""
    set_name = name.split("/")[1]
    sets = [name_of_source(str(source)) for source in run.config.get("eval_data", [])]
    file = run.folder / "eval" / f"step_{step}" / f"{set_name}.jsonl"
    values = {key: run.config.get(f"eval_{key}") for key in SAMPLING}
    if set_name not in sets or not all(values.values()) or not file.exists():
        return {}
    protocol = {key: each[sets.index(set_name) % len(each)] for key, each in values.items()}
    return protocol | {"problems": len(file.read_text().splitlines()) // protocol["samples"]}


def other_protocol(figure: dict, found: dict[str, object]) -> str:
    """In what an evaluation differs from the published one, or ""."""
    differing = [(key, value) for key, value in figure.get("protocol", {}).items() if found.get(key) != value]
    words = [f"{key} {found.get(key, 'not known')}, not {value}" for key, value in differing]
    return f"another evaluation: {'; '.join(words)}" if words else ""


# In words -------------------------------------------------------------------------------------------------------------


def report(name: str, run: History) -> str:
    """The whole answer."""
    reference = load(name)
    judgements = judge(reference, run)
    rows = [["", "published", "this run", "reached if", ""]]
    for each in judgements:
        found = "-" if each.found is None else f"{each.found:.4g}"
        rows.append([each.figure["what"], f"{each.figure['value']:.4g}", found, condition(each.figure), each.verdict])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{run.folder} against {name}: {overall(reference, judgements, run)}"]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows] if judgements else []
    for reason in dict.fromkeys(each.reason for each in judgements if each.reason):
        figures = [each.figure["what"] for each in judgements if each.reason == reason]
        which = "all figures" if len(figures) == len(judgements) else "; ".join(figures)
        lines.append(f"{UNKNOWN} ({reason}): {which}")
    return "\n".join([*lines, f"source: {reference['source']}"])


def condition(figure: dict) -> str:
    """When the figure is reached."""
    if "cannot_be_judged" in figure:
        return "-"
    low, high = bounds(figure)
    return f"at least {low:.4g}" if figure["is"] == "at least" else f"{low:.4g} to {high:.4g}"


def overall(reference: dict, judgements: list[Judgement], run: History) -> str:
    """The verdict on the run, in words. A figure that is not reached decides; then a result that cannot be judged:
    what has to be equal, as the start, tells nothing of the end.
    """
    if not judgements:
        nothing = f"nothing is published for --model {run.config.get('model')}"
        return f"{UNKNOWN}: {reference.get('cannot_be_judged', nothing)}"
    number = {each: sum(one.verdict == each for one in judgements) for each in (NOT_REACHED, REACHED, UNKNOWN)}
    counts = ", ".join(f"{count} {verdict}" for verdict, count in number.items() if count)
    results = [each.verdict for each in judgements if each.figure.get("is") != "equal"]
    verdict = NOT_REACHED if number[NOT_REACHED] else UNKNOWN if UNKNOWN in results else REACHED
    return f"{verdict} (figures: {counts})"
