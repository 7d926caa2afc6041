"""What came out of runs, also while they go on: `python report.py runs/a runs/b ...`.

It writes one page that compares them (`reporting/page.py`), and draws of each run curves.png from metrics.jsonl and
timeline.png from timeline.jsonl.
"""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS_OF_TIMELINE = 6  # the last ones
PANELS = {  # title -> the metrics that it shows; * stands for any text
    "reward": "reward/mean",
    "held-out accuracy": "eval/*/avg@*",
    "completion tokens": "completion/tokens_*mean",
    "KL to the reference": "policy/kl_ref",
    "entropy, nats": "policy/entropy",
    "clipped tokens, share": "policy/clip_frac",
    "sampler-trainer gap": "policy/rollout_gap_mean",
    "memory at the peak, GiB": "memory/*_gib",
}


class Span(NamedTuple):
    """A time in which somebody did one thing."""

    who: str  # "ranks", or a generation server
    what: str  # the phase
    begin: float  # by the clock, in seconds
    end: float


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl by step. The last line of a step counts; a line that a kill cut off is skipped.

    Without such a file there are none.
    """
    return read_steps(run_dir / "metrics.jsonl")


def read_steps(file: Path) -> list[dict]:
    """The same of any file with a line for each step."""
    lines = file.read_text().splitlines() if file.exists() else []
    by_step = {record["step"]: record for record in (json.loads(line) for line in lines if line.endswith("}"))}
    return [by_step[step] for step in sorted(by_step)]


def seconds_of_phases(metrics: dict[str, float]) -> dict[str, float]:
    """Phase -> seconds, from the `time/<phase>_s` of a step."""
    times = {name[5:-2]: value for name, value in metrics.items() if name.startswith("time/")}
    return {phase: seconds for phase, seconds in times.items() if phase not in ("step", "rollout_tail")}


def plot(run_dir: Path) -> None:
    """Draws `run_dir`/curves.png: the nine curves to look at first."""
    from matplotlib.figure import Figure  # here, not above: half a second that most processes never need

    records = read_metrics(run_dir)
    figure = Figure(figsize=(14, 10), layout="constrained")
    for axis, title in zip(figure.subplots(3, 3).flat, [*PANELS, "seconds per phase"], strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        pattern = PANELS.get(title, "")
        for name in sorted({name for record in records for name in record if fnmatch(name, pattern)}):
            points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
            marker = "o" if name.startswith("eval/") else None
            axis.plot(*zip(*points, strict=True), marker=marker, label=name.partition("/")[2])
        if "*" in pattern and axis.lines:
            axis.legend(fontsize=8)
    seconds = {record["step"]: seconds_of_phases(record) for record in records if "time/sample_s" in record}
    if seconds:  # in the last panel
        phases = list(dict.fromkeys(phase for each in seconds.values() for phase in each))
        heights = [[each.get(phase, 0.0) for each in seconds.values()] for phase in phases]
        axis.stackplot(list(seconds), heights, labels=phases)
        axis.legend(fontsize=8, loc="upper right", ncols=2)
    figure.suptitle(str(run_dir))
    save(figure, run_dir / "curves.png")


def plot_timeline(run_dir: Path) -> None:
    """Draws `run_dir`/timeline.png: who does what when, in the last steps. A phase inside another one covers it."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    records = read_steps(run_dir / "timeline.jsonl")[-STEPS_OF_TIMELINE:]
    spans = [Span(**span) for record in records for span in record["spans"]]
    if not spans:
        return
    names = sorted({span.who for span in spans}, key=lambda who: (who != "ranks", who))
    kinds = dict.fromkeys(span.what.split()[0] for span in spans)
    colors = {kind: colormaps["tab20"](i % 20) for i, kind in enumerate(kinds)}
    start, labels = min(span.begin for span in spans), set()
    figure = Figure(figsize=(14, 1.5 + 0.6 * len(names)), layout="constrained")
    axis = figure.subplots()
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        kind = span.what.split()[0]
        label = None if kind in labels else kind
        labels.add(kind)
        place = [(span.begin - start, span.end - span.begin)]
        axis.broken_barh(place, (names.index(span.who) - 0.4, 0.8), color=colors[kind], label=label)
        if kind != span.what and span.end - span.begin > 0.03 * (spans[-1].end - start):
            axis.text(span.begin - start, names.index(span.who), f" {span.what.partition(' ')[2]}", va="center", size=8)
    axis.set(yticks=range(len(names)), yticklabels=names, xlabel="seconds", ylim=(len(names) - 0.5, -0.5))
    figure.legend(loc="outside upper center", ncols=8, fontsize=8)
    axis.set_title(f"{run_dir}, steps {records[0]['step']} to {records[-1]['step']}", loc="left", fontsize=9)
    save(figure, run_dir / "timeline.png")


def save(figure: Figure, file: Path) -> None:
    """Whole or not at all."""
    figure.savefig(file.with_suffix(".unfinished.png"), dpi=90)
    file.with_suffix(".unfinished.png").replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a page that compares runs, and draws the pictures of each.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: report.html in the first run)")
    args = parser.parse_args()
    for folder in args.runs:
        if not (folder / "metrics.jsonl").exists() and not (folder / "config.json").exists():
            parser.exit(2, f"error: {folder} is no run: it holds neither metrics.jsonl nor config.json.\n")
    from reporting.page import write_page  # here, not above: training imports this file, and needs no pyarrow

    file = args.output or args.runs[0] / "report.html"
    write_page(file, {folder: read_metrics(folder) for folder in args.runs})
    print(file, flush=True)
    for folder in args.runs:
        plot(folder)
        plot_timeline(folder)


if __name__ == "__main__":
    main()
