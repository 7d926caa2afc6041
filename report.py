"""Pictures of a run: curves.png from metrics.jsonl. `python report.py runs/x` draws it, also while the run goes on."""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatch
from pathlib import Path

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


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl by step. The last line of a step counts; a line that a kill cut off is skipped.

    Without such a file there are none.
    """
    file = run_dir / "metrics.jsonl"
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
    figure.savefig(run_dir / "curves.unfinished.png", dpi=90)
    (run_dir / "curves.unfinished.png").replace(run_dir / "curves.png")


if __name__ == "__main__":
    plot(Path(sys.argv[1]))
