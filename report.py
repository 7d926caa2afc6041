"""What came out of runs, also while they go on.

    python report.py runs/a runs/b                       a page that compares them, and curves.png of each
    python report.py --compare a1 a2 a3 -- b1 b2 b3      is the difference noise? instruments/compare.py
    python report.py runs/x --reference NAME             reached, not reached, or why it cannot be judged

NAME is a file in references/.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path

from instruments import reference
from instruments.compare import compare
from instruments.history import History, read_config, read_lines
from runtime.files import whole
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
OTHER_SCRIPTS = re.compile("Sans CJK|Han Sans|WenQuanYi|YaHei|SimHei|PingFang|Fallback|Unifont")  # names of fonts


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl by step, of a step the last one; none without the file. ValueError: it is damaged."""
    by_step = {}
    for record in read_lines(file := run_dir / "metrics.jsonl"):
        if type(step := record.get("step")) is not int:
            raise ValueError(f"{file} is damaged: a line of it has no step")
        for name, value in record.items():
            if not isinstance(value, int | float | None):
                raise ValueError(f"{file} is damaged: {name} is no number: {str(value)[:50]!r}")
        by_step[step] = record
    return [by_step[step] for step in sorted(by_step)]


def history(run_dir: Path) -> History:
    """The run as comparisons take it. Raises ValueError if the folder holds no step of a run."""
    run = History(run_dir, read_config(run_dir), read_metrics(run_dir))
    if not run.config or not run.lines:
        missing = "metrics.jsonl with a step" if run.config else "config.json"
        raise ValueError(f"{run_dir} is no run folder with results: it has no {missing}.")
    return run


def judgement(run_dir: Path) -> str:
    """The verdict that a run of a documented set-up ends with; "" of any other run."""
    config = read_config(run_dir)
    name = None if config.get("replay") else reference.belongs_to(config)
    return reference.report(name, history(run_dir)) if name else ""


def seconds_of_phases(metrics: dict[str, float]) -> dict[str, float]:
    """Phase -> seconds, from the `time/<phase>_s` of a step."""
    others = ("time/step_s", "time/rollout_tail_s")
    return {name[5:-2]: x for name, x in metrics.items() if name.startswith("time/") and name not in others}


def drawable(text: str) -> str:
    """The text, in which what the locale could not decode is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def plot(run_dir: Path) -> None:
    """Draws `run_dir`/curves.png: the nine curves to look at first; dashed: what was published of this set-up."""
    from matplotlib import font_manager, rcParams  # here, not above: half a second that most processes never need
    from matplotlib.figure import Figure

    others = sorted(name for name in font_manager.get_font_names() if OTHER_SCRIPTS.search(name))
    rcParams.update({"text.parse_math": False, "font.family": ["DejaVu Sans", *others[:1]]})  # names as they are
    records = read_metrics(run_dir)
    published = reference.published_curves(History(run_dir, read_config(run_dir), records))
    figure = Figure(figsize=(14, 10), layout="constrained")
    *axes, last = figure.subplots(3, 3).flat
    for axis, (title, pattern) in zip(axes, PANELS.items(), strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        for name in sorted({name for record in records for name in record if fnmatch(name, pattern)}):
            points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
            marker, label = "o" if name.startswith("eval/") else None, drawable(name.partition("/")[2])
            (line,) = axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, label=label)
            if curve := published.get(name):
                axis.plot(*zip(*curve["points"], strict=True), ".--", color=line.get_color(), label=curve["label"])
        if len(axis.lines) > 1 or ("*" in pattern and axis.lines):
            axis.legend(fontsize=8)
    last.set(title="seconds per phase", xlabel="step")
    seconds = {record["step"]: seconds_of_phases(record) for record in records if "time/sample_s" in record}
    if seconds:
        phases = list(dict.fromkeys(phase for each in seconds.values() for phase in each))
        heights = [[each.get(phase, 0.0) for each in seconds.values()] for phase in phases]
        last.stackplot(list(seconds), heights, labels=phases)
        last.legend(fontsize=8, loc="upper right", ncols=2)
    figure.suptitle(drawable(str(run_dir)))
    with whole(run_dir / "curves.png") as unfinished, warnings.catch_warnings():
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
            print(compare(*([history(run_dir) for run_dir in side] for side in (args.compare, args.runs))))
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
