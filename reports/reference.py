"""Does a run reproduce what was published? `python report.py runs/x --reference NAME` says reached, not reached or
cannot be judged, with the figures side by side. A run belongs to references/NAME.json if it is
trained as that says.

A reference has `training` (the flags that make a run this set-up), `figures` and `curves`, or the
reason why nothing `cannot_be_judged`. A figure is read from metrics.jsonl, as the mean over its
`steps`, or from the results.json that the script `evaluated_by` leaves in a checkpoint. It counts
only if it was sampled as its `protocol` says, on as many problems. Texts in `training`, `model` and
`metric` are patterns: * stands for any text.
"""

import fnmatch
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.files import numbered
from runtime.history import History
from runtime.sources import name_of_source
from runtime.tables import in_columns

FOLDER = Path(__file__).parent.parent / "references"
REACHED, NOT_REACHED, UNKNOWN = "reached", "not reached", "cannot be judged"
# The keys of a protocol; it also has `problems`.
SAMPLING = ("samples", "temperature", "top_p", "max_completion_tokens")


class Judgement(NamedTuple):
    """One figure: as published, and as the run has it."""

    figure: dict
    value: float | None
    verdict: str
    reason: str  # why it cannot be judged, or ""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def belongs_to(config: dict[str, object]) -> str | None:
    """The name of the reference whose training this is; None if there is none."""
    return next((name for name in names() if config and not other_flags(load(name), config)), None)


def other_flags(reference: dict, config: dict[str, object]) -> list[str]:
    """The flags that are not as the reference has them, in words."""
    return [
        f"--{name} {config.get(name)!r}, not {wanted!r}"
        for name, wanted in reference["training"].items()
        if not is_as_wanted(config.get(name), wanted)
    ]


def is_as_wanted(value: object, wanted: object) -> bool:
    """Compares texts by pattern, a list by its only member, all else exactly."""
    if isinstance(value, list):
        return len(value) == 1 and is_as_wanted(value[0], wanted)
    if isinstance(value, str) and isinstance(wanted, str):
        return fnmatch.fnmatch(value, wanted)
    return value == wanted


def about_model(entries: list[dict], config: dict[str, object]) -> list[dict]:
    """The figures or curves that are about the run's model."""
    model = config.get("model")
    return [entry for entry in entries if is_as_wanted(model, entry.get("model", model))]


def published_curves(run: History) -> dict[str, dict]:
    """Metric of the run -> {"label", "points": [[step, value], ...]}, as its own reference has published it."""
    name = belongs_to(run.config)
    if name is None:
        return {}
    curves = about_model(load(name)["curves"], run.config)
    return {metric: curve for curve in curves for metric in run.names if fnmatch.fnmatch(metric, curve["metric"])}


def judge(reference: dict, run: History) -> list[Judgement]:
    """Every figure that was published for the run's model."""
    other_training = "another training" if other_flags(reference, run.config) else ""
    judgements = []
    for figure in about_model(reference["figures"], run.config):
        value, problem = evaluated(figure, run) if "evaluated_by" in figure else logged(figure, run)
        reason = figure.get("cannot_be_judged") or other_training or problem
        verdict = UNKNOWN
        if not reason:
            low, high = bounds(figure)
            verdict = REACHED if low <= value <= high else NOT_REACHED
        judgements.append(Judgement(figure, value, verdict, reason))
    return judgements


def bounds(figure: dict) -> tuple[float, float]:
    """The lowest and the highest value with which the figure is reached."""
    value, tolerance = figure["value"], figure.get("tolerance", math.nan)
    return value - tolerance, value + tolerance if is_equal(figure) else math.inf


def is_equal(figure: dict) -> bool:
    """Whether the figure has to be equal, as the accuracy before training: then it is no result."""
    return figure.get("is") == "equal"


def logged(figure: dict, run: History) -> tuple[float | None, str]:
    """The mean of a metric over the figure's steps, and why it cannot be compared, or ""."""
    first, last = figure["steps"]
    if run.last_step < last:
        return None, f"the run is at step {run.last_step} of {last}"
    found = []
    for name in fnmatch.filter(sorted(run.names), figure["metric"]):
        values = [value for step, value in run.points(name).items() if first <= step <= last]
        if values:
            is_evaluation = name.startswith("eval/")
            problem = other_protocol(figure, protocol_of(run, name, last)) if is_evaluation else ""
            found.append((float(np.mean(values)), problem))
    missing = None, f"metrics.jsonl has no {figure['metric']} at step {last}"
    return min(found, key=lambda each: each[1] != "", default=missing)  # of several sets the one that fits


def evaluated(figure: dict, run: History) -> tuple[float | None, str]:
    """As `logged`, from evaluate.py's results.json: of `best`, if there is one, else of the last step with results."""
    _, set_name, metric = figure["metric"].split("/")
    evaluations = run.folder / "eval"
    last_first = reversed(numbered(evaluations).values())
    for folder in [evaluations / (run.folder / "best").resolve().name, *last_first]:
        for file in sorted(folder.glob("*/results.json"), reverse=True):  # the latest first
            result = json.loads(file.read_text("utf-8"))["sets"].get(set_name, {})
            if metric in result:
                return result[metric]["mean"], other_protocol(figure, result)
    checkpoint = run.folder / ("best" if run.config.get("keep_best") else "final")
    return None, f"no results; make them: MODEL={checkpoint} bash {figure['evaluated_by']}"


def protocol_of(run: History, name: str, step: int) -> dict[str, object]:
    """Settings by which training has sampled a held-out set; {} if unknown. A flag has one value, or one a set."""
    set_name = name.split("/")[1]
    sets = [name_of_source(str(source)) for source in run.config.get("eval_data", [])]
    file = run.folder / "eval" / f"step_{step}" / f"{set_name}.jsonl"
    if set_name not in sets or not file.exists():
        return {}
    protocol = {}
    for key in SAMPLING:
        values = run.config.get(f"eval_{key}")
        if not values:
            return {}
        protocol[key] = values[sets.index(set_name) % len(values)]
    num_completions = len(file.read_text("utf-8").splitlines())
    return protocol | {"problems": num_completions // protocol["samples"]}


def other_protocol(figure: dict, protocol: dict[str, object]) -> str:
    """A sentence on how an evaluation differs from the published one, or ""."""
    words = []
    for key, wanted in figure.get("protocol", {}).items():
        value = protocol.get(key, "not known")
        if value != wanted:
            words.append(f"{key} {value}, not {wanted}")
    return f"another evaluation: {'; '.join(words)}" if words else ""


def report(name: str, run: History) -> str:
    """The whole answer: "not reached" if a figure is not, else "cannot be judged" if a result cannot."""
    if run.config.get("replay"):
        raise ValueError(f"{run.folder} is a replay: its completions and rewards are those of another run; judge that.")
    reference = load(name)
    judgements = judge(reference, run)
    verdicts = {judgement.verdict for judgement in judgements if not is_equal(judgement.figure)}
    overall = UNKNOWN if UNKNOWN in verdicts else REACHED
    if any(judgement.verdict == NOT_REACHED for judgement in judgements):
        overall = NOT_REACHED
    rows = [["", "published", "this run", "reached if", ""], *map(row_of, judgements)]
    if not judgements:
        nothing = f"nothing is published for --model {run.config.get('model')}"
        overall, rows = f"{UNKNOWN}: {reference.get('cannot_be_judged', nothing)}", []
    lines = [f"{run.folder} against {name}: {overall}", *in_columns(rows)]
    if differences := other_flags(reference, run.config):
        lines.append(f"another training: {'; '.join(differences)}")
    return "\n".join([*lines, f"source: {reference['source']}"])


def row_of(judgement: Judgement) -> list[str]:
    figure = judgement.figure
    low, high = bounds(figure)
    condition = "-"
    if "cannot_be_judged" not in figure:
        condition = f"at least {low:.4g}" if high == math.inf else f"{low:.4g} to {high:.4g}"
    value = "-" if judgement.value is None else f"{judgement.value:.4g}"
    verdict = ": ".join(filter(None, [judgement.verdict, judgement.reason]))
    return [figure["what"], f"{figure['value']:.4g}", value, condition, verdict]


def judgement(run: History) -> str:
    """The verdict that a run of a documented set-up ends with; "" for any other run."""
    name = None if run.config.get("replay") else belongs_to(run.config)
    return report(name, run) if name else ""
