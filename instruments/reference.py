"""Does a run reproduce what was published? `python report.py runs/x --reference NAME` says reached, not reached or
cannot be judged, with the figures side by side. A run belongs to references/NAME.json if it is trained as that says.

A reference has `training` (the flags that make a run this set-up), `figures` and `curves`, or the reason why nothing
`cannot_be_judged`. A figure is read from metrics.jsonl, as the mean over its `steps`, or from the results.json that the
script `evaluated_by` leaves in a checkpoint. It counts only if it was sampled as its `protocol` says, on as many
problems. Texts in `training`, `model` and `metric` are patterns: * stands for any text.
"""

from __future__ import annotations

import json
import math
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import numpy as np

from inputs.sources import name_of_source
from instruments.history import History, in_columns

FOLDER = Path(__file__).parent.parent / "references"
REACHED, NOT_REACHED, UNKNOWN = "reached", "not reached", "cannot be judged"
SAMPLING = ("samples", "temperature", "top_p", "max_completion_tokens")  # of a protocol; it also has `problems`


class Judgement(NamedTuple):
    """One figure, as published and of the run."""

    figure: dict
    found: float | None
    verdict: str
    reason: str = ""  # why it cannot be judged


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def belongs_to(config: dict[str, object]) -> str | None:
    """The name of the reference whose training this is; None if there is none."""
    return next((name for name in names() if config and not other_flags(load(name), config)), None)


def other_flags(reference: dict, config: dict[str, object]) -> list[str]:
    """The flags that are not as the reference has them, in words."""
    wanted = [(name, config.get(name), value) for name, value in reference["training"].items()]
    return [f"--{name} {found!r}, not {value!r}" for name, found, value in wanted if not is_as_wanted(found, value)]


def is_as_wanted(found: object, wanted: object) -> bool:
    """Compares texts by pattern, a list by its only member, all else exactly."""
    if isinstance(found, list):
        return len(found) == 1 and is_as_wanted(found[0], wanted)
    return fnmatch(found, wanted) if isinstance(found, str) and isinstance(wanted, str) else found == wanted


def of_model(entries: list[dict], config: dict[str, object]) -> list[dict]:
    """The figures or curves that are about the run's model."""
    model = config.get("model")
    return [entry for entry in entries if is_as_wanted(model, entry.get("model", model))]


def published_curves(run: History) -> dict[str, dict]:
    """Metric of the run -> {"label", "points": [[step, value], ...]}, as its own reference has published it."""
    name = belongs_to(run.config)
    curves = of_model(load(name)["curves"], run.config) if name else []
    return {metric: curve for curve in curves for metric in run.names if fnmatch(metric, curve["metric"])}


def judge(reference: dict, run: History) -> list[Judgement]:
    """Every figure that was published for the run's model."""
    other, judgements = "; ".join(other_flags(reference, run.config)), []
    another = other and f"another training: {other}"
    for figure in of_model(reference["figures"], run.config):
        found, problem = evaluated(figure, run) if "evaluated_by" in figure else logged(figure, run)
        reason = figure.get("cannot_be_judged") or another or problem
        low, high = bounds(figure)
        verdict = UNKNOWN if reason else REACHED if low <= found <= high else NOT_REACHED
        judgements.append(Judgement(figure, found, verdict, reason))
    return judgements


def bounds(figure: dict) -> tuple[float, float]:
    """The lowest and the highest value with which the figure is reached."""
    value, tolerance = figure["value"], figure.get("tolerance", math.nan)
    return value - tolerance, value + tolerance if figure.get("is") == "equal" else math.inf


def logged(figure: dict, run: History) -> tuple[float | None, str]:
    """The mean of a metric over the figure's steps, and why it cannot be compared, or ""."""
    first, last = figure["steps"]
    if run.last_step < last:
        return None, f"the run is at step {run.last_step} of {last}"
    for name in sorted(name for name in run.names if fnmatch(name, figure["metric"])):
        if values := [value for step, value in run.points(name).items() if first <= step <= last]:
            problem = other_protocol(figure, protocol_of(run, name, last)) if name.startswith("eval/") else ""
            return float(np.mean(values)), problem
    return None, f"metrics.jsonl has no {figure['metric']} at step {last}"


def evaluated(figure: dict, run: History) -> tuple[float | None, str]:
    """The same from evaluate.py's results.json: of `best`, if there is one, else of the last step that has results."""
    _, set_name, metric = figure["metric"].split("/")
    places = run.folder / "eval"
    steps = sorted(places.glob("step_*"), key=lambda folder: int(folder.name.partition("_")[2]), reverse=True)
    for folder in [places / (run.folder / "best").resolve().name, *steps]:
        for file in sorted(folder.glob("*/results.json"), reverse=True):  # the latest first
            result = json.loads(file.read_text("utf-8"))["sets"].get(set_name, {})
            if metric in result:
                return result[metric]["mean"], other_protocol(figure, result)
    checkpoint = run.folder / ("best" if run.config.get("keep_best") else "final")
    return None, f"no results; make them: MODEL={checkpoint} bash {figure['evaluated_by']}"


def protocol_of(run: History, name: str, step: int) -> dict[str, object]:
    """How training has sampled a held-out set; {} if unknown. Its flags have one value for all sets, or one each."""
    set_name = name.split("/")[1]
    sets = [name_of_source(str(source)) for source in run.config.get("eval_data", [])]
    file = run.folder / "eval" / f"step_{step}" / f"{set_name}.jsonl"
    values = {key: run.config.get(f"eval_{key}") for key in SAMPLING}
    if set_name not in sets or not all(values.values()) or not file.exists():
        return {}
    protocol = {key: each[sets.index(set_name) % len(each)] for key, each in values.items()}
    return protocol | {"problems": len(file.read_text("utf-8").splitlines()) // protocol["samples"]}


def other_protocol(figure: dict, found: dict[str, object]) -> str:
    """In what an evaluation differs from the published one, or ""."""
    wanted = [(key, found.get(key, "not known"), value) for key, value in figure.get("protocol", {}).items()]
    words = [f"{key} {given}, not {value}" for key, given, value in wanted if given != value]
    return f"another evaluation: {'; '.join(words)}" if words else ""


def report(name: str, run: History) -> str:
    """The whole answer: "not reached" if a figure is not, else "cannot be judged" if a result cannot.

    A figure that has to be equal, as the accuracy before training, is no result.
    """
    if run.config.get("replay"):
        raise ValueError(f"{run.folder} is a replay: its completions and rewards are those of another run; judge that.")
    reference = load(name)
    judgements = judge(reference, run)
    verdicts = [each.verdict for each in judgements]
    results = [each.verdict for each in judgements if each.figure.get("is") != "equal"]
    overall = NOT_REACHED if NOT_REACHED in verdicts else UNKNOWN if UNKNOWN in results else REACHED
    if not judgements:
        nothing = f"nothing is published for --model {run.config.get('model')}"
        overall = f"{UNKNOWN}: {reference.get('cannot_be_judged', nothing)}"
    lines, rows = [f"{run.folder} against {name}: {overall}"], [row_of(each) for each in judgements]
    lines += in_columns([["", "published", "this run", "reached if", ""], *rows]) if rows else []
    for reason in dict.fromkeys(each.reason for each in judgements if each.reason):
        figures = [each.figure["what"] for each in judgements if each.reason == reason]
        lines.append(f"{UNKNOWN} ({reason}): {'; '.join(figures)}")
    return "\n".join([*lines, f"source: {reference['source']}"])


def row_of(judgement: Judgement) -> list[str]:
    figure, found, verdict, _ = judgement
    low, high = bounds(figure)
    condition = f"at least {low:.4g}" if high == math.inf else f"{low:.4g} to {high:.4g}"
    condition = "-" if "cannot_be_judged" in figure else condition
    return [figure["what"], f"{figure['value']:.4g}", "-" if found is None else f"{found:.4g}", condition, verdict]
