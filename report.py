"""Shows and compares runs, also while they go on.

    python report.py runs/a runs/b                       a page that compares them, and curves.png of each
    python report.py --compare a1 a2 a3 -- b1 b2 b3      is the difference noise? instruments/compare.py
    python report.py runs/x --reference NAME             reached, not reached, or why it cannot be judged

NAME is a file in references/.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import os
import re
import sys
import warnings
from pathlib import Path

from instruments import reference
from instruments.compare import compare
from instruments.history import History, read_config, read_lines
from runtime.files import atomic_write
from runtime.start import print_any_text

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
# Fonts that have more than Latin letters.
WIDE_FONTS = re.compile("Sans CJK|Han Sans|WenQuanYi|YaHei|SimHei|PingFang|Fallback|Unifont")


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl by step, the last one of each; none without the file. ValueError: it is damaged."""
    file = run_dir / "metrics.jsonl"
    line_by_step = {}
    for line in read_lines(file):
        if type(line.get("step")) is not int:
            raise ValueError(f"{file} is damaged: a line of it has no step")
        for name, value in line.items():
            if not isinstance(value, int | float | None):
                raise ValueError(f"{file} is damaged: {name} is no number: {str(value)[:50]!r}")
        line_by_step[line["step"]] = line
    return [line_by_step[step] for step in sorted(line_by_step)]


def history(run_dir: Path) -> History:
    """The run as comparisons take it. Raises ValueError if the folder holds no step of a run."""
    run = History(run_dir, read_config(run_dir), read_metrics(run_dir))
    if not run.config or not run.lines:
        missing = "metrics.jsonl with a step" if run.config else "config.json"
        raise ValueError(f"{run_dir} is no run folder with results: it has no {missing}.")
    return run


def judgement(run_dir: Path) -> str:
    """The verdict that a run of a documented set-up ends with; "" for any other run."""
    config = read_config(run_dir)
    name = None if config.get("replay") else reference.belongs_to(config)
    return reference.report(name, history(run_dir)) if name else ""


def seconds_of_phases(metrics: dict[str, float]) -> dict[str, float]:
    """Phase -> seconds, from the `time/<phase>_s` of a step."""
    no_phases = ("time/step_s", "time/rollout_tail_s")
    return {name[5:-2]: x for name, x in metrics.items() if name.startswith("time/") and name not in no_phases}


def drawable(text: str) -> str:
    """The text, in which what the locale could not decode is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def plot(run_dir: Path) -> None:
    """Draws `run_dir`/curves.png: the nine curves to look at first; dashed: what was published of this set-up."""
    from matplotlib import font_manager, rcParams  # here, not above: half a second that most processes never need
    from matplotlib.figure import Figure

    wide_fonts = sorted(filter(WIDE_FONTS.search, font_manager.get_font_names()))
    rcParams.update({"text.parse_math": False, "font.family": ["DejaVu Sans", *wide_fonts[:1]]})  # names as they are
    run = History(run_dir, read_config(run_dir), read_metrics(run_dir))
    published = reference.published_curves(run)
    figure = Figure(figsize=(14, 10), layout="constrained")
    *axes, last = figure.subplots(3, 3).flat
    for axis, (title, pattern) in zip(axes, PANELS.items(), strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        for name in sorted(fnmatch.filter(run.names, pattern)):
            points = run.points(name)
            marker = "o" if name.startswith("eval/") else None
            label = drawable(name.partition("/")[2])
            (line,) = axis.plot(list(points), list(points.values()), marker=marker, label=label)
            if name in published:
                curve = published[name]
                axis.plot(*zip(*curve["points"], strict=True), ".--", color=line.get_color(), label=curve["label"])
        if len(axis.lines) > 1 or ("*" in pattern and axis.lines):
            axis.legend(fontsize=8)
    last.set(title="seconds per phase", xlabel="step")
    trained = [line for line in run.lines if "time/sample_s" in line]
    if trained:
        seconds = [seconds_of_phases(line) for line in trained]
        phases = list(dict.fromkeys(itertools.chain(*seconds)))
        heights = [[by_phase.get(phase, 0.0) for by_phase in seconds] for phase in phases]
        last.stackplot([line["step"] for line in trained], heights, labels=phases)
        last.legend(fontsize=8, loc="upper right", ncols=2)
    figure.suptitle(drawable(str(run_dir)))
    with atomic_write(run_dir / "curves.png") as unfinished, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # without such a font they are boxes
        figure.savefig(unfinished, format="png", dpi=90)


def main() -> None:
    """The command line. Ends with exit status 2 and a sentence for what cannot be read."""
    print_any_text()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders; after --compare A... -- those of B")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: report.html in the first run)")
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument("--compare", nargs="+", type=Path, metavar="A", help="compare these runs with those after --")
    answers.add_argument("--reference", choices=reference.names(), metavar="NAME", help="judge each run by it")
    args = parser.parse_args()
    if not args.runs:
        parser.error("name one or more run folders; with --compare A... -- B... on both sides")
    try:
        if args.compare:
            print(compare([history(run_dir) for run_dir in args.compare], [history(run_dir) for run_dir in args.runs]))
        elif args.reference:
            print("\n\n".join(reference.report(args.reference, history(run_dir)) for run_dir in args.runs))
        else:
            write_pages(args.runs, args.output or args.runs[0] / "report.html")
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, OverflowError) as error:
        parser.exit(2, f"error: {error}\n")


def write_pages(runs: list[Path], file: Path) -> None:
    """The page that compares the runs, and the curves of each. Raises ValueError or OSError."""
    for run_dir in runs:
        if not (run_dir / "metrics.jsonl").exists() and "out_dir" not in read_config(run_dir):  # a model has one, too
            raise ValueError(f"{run_dir} is no run: it holds neither metrics.jsonl nor config.json of a run.")
    from instruments.page import write_page  # here, not above: training imports this file, and needs no pyarrow

    write_page(file, {run_dir: read_metrics(run_dir) for run_dir in runs})
    for run_dir in runs:
        plot(run_dir)
    print(file)


if __name__ == "__main__":
    main()
