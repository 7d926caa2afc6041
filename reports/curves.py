"""curves.png: the nine curves of a run to look at first."""

import fnmatch
import itertools
import warnings

from reports import reference
from runtime.files import atomic_write
from runtime.history import History, seconds_of_phases

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


def plot(run: History) -> None:
    """Draws curves.png in the run's folder: the nine curves to look at first; dashed: what was published."""
    from matplotlib import rcParams  # here, not above: half a second that most processes never need
    from matplotlib.figure import Figure

    rcParams["text.parse_math"] = False  # names as they are
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
    figure.suptitle(drawable(str(run.folder)))
    with atomic_write(run.folder / "curves.png") as unfinished, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # what the font lacks are boxes
        figure.savefig(unfinished, format="png", dpi=90)


def drawable(text: str) -> str:
    """The text, in which what the locale could not decode is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
