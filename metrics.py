"""What a run tells about itself: phase times, `metrics.jsonl`, sampled completions, one console line a step, `curves.png`.

Names are `namespace/name`; the README lists them. `metrics.jsonl` is only ever appended to. After a resume, steps that were trained
again appear again: the last line of a step is the one that counts (`read_metrics`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from batch import Rollout
from data import Row
from reward import Grade

Metrics = dict[str, float]


class PhaseTimer:
    """Seconds per named phase of the current step; of the steps in `profile_steps` also a trace, which any Chrome trace viewer opens.

    The traces are `folder`/step_N_rank_R.json.gz, one per rank, with the phases as named ranges, without checkpoint.
    """

    def __init__(self, profile_steps: list[int], folder: Path, rank: int) -> None:
        self.seconds: dict[str, float] = {}
        self.start = time.perf_counter()
        self.profile_steps, self.folder, self.rank = profile_steps, folder, rank
        self.profiler: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Starts the trace if the step has one; `take` ends it."""
        if step in self.profile_steps:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"step_{step}_rank_{self.rank}.json.gz"
            self.profiler = torch.profiler.profile(
                on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file))
            )
            self.profiler.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the wall time of the block to `name`; on CUDA the queued work is waited for, so that it counts where it belongs."""
        start = time.perf_counter()
        with torch.profiler.record_function(name):
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> Metrics:
        """`time/<phase>_s` of every phase since the last call, and the wall time since then as `time/step_s`."""
        now = time.perf_counter()
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
        taken = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()} | {
            "time/step_s": now - self.start
        }
        self.seconds, self.start = {}, now
        return taken


def rollout_metrics(rollout: Rollout, group_size: int) -> Metrics:
    """Rewards and lengths (in tokens) of a step's completions."""
    assert rollout.rewards_B is not None and rollout.is_right_B is not None, "graded before it is described"
    rewards_PG = rollout.rewards_B.reshape(-1, group_size)
    is_right_PG = rollout.is_right_B.reshape(-1, group_size)
    lengths_B = rollout.completion_lengths_B
    is_right_B = rollout.is_right_B
    metrics = {
        "reward/mean": float(rewards_PG.mean()),
        "reward/std": float(rewards_PG.std()),
        "reward/frac_groups_all_right": float(is_right_PG.all(axis=1).mean()),
        "reward/frac_groups_all_wrong": float((~is_right_PG).all(axis=1).mean()),
        "reward/frac_groups_with_signal": float((rewards_PG.max(axis=1) > rewards_PG.min(axis=1)).mean()),
        "completion/tokens_mean": float(lengths_B.mean()),
        "completion/tokens_max": float(lengths_B.max()),
        "completion/frac_truncated": float(rollout.is_truncated_B.mean()),
    }
    if is_right_B.any():
        metrics["completion/tokens_right_mean"] = float(lengths_B[is_right_B].mean())
    if not is_right_B.all():
        metrics["completion/tokens_wrong_mean"] = float(lengths_B[~is_right_B].mean())
    return metrics


def reward_metrics(grades: list[Grade]) -> Metrics:
    """What could not be graded, as counts, and the mean of each part where the reward is a sum of several."""
    metrics = {
        "reward/timeouts": float(sum(grade.status == "timeout" for grade in grades)),
        "reward/errors": float(sum(grade.is_failed for grade in grades)),
    }
    metrics["reward/errors"] -= metrics["reward/timeouts"]
    names = dict.fromkeys(name for grade in grades for name in grade.parts)
    if len(names) > 1:
        metrics |= {
            f"reward/part/{name}": sum(grade.parts.get(name, 0.0) for grade in grades) / len(grades) for name in names
        }
    return metrics


class RunLog:
    """Writes the run folder's logs and the console line; on the main process only, elsewhere every call does nothing."""

    def __init__(self, out_dir: Path, is_main: bool, total_steps: int) -> None:
        self.out_dir = out_dir
        self.is_main = is_main
        self.total_steps = total_steps

    def say(self, text: str) -> None:
        """One line on the console."""
        if self.is_main:
            print(text, flush=True)

    def log(self, step: int, metrics: Metrics) -> None:
        """Appends the step's line to metrics.jsonl and prints its summary."""
        if not self.is_main:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON knows no nan
        self._append("metrics.jsonl", {"step": step, **finite})
        self.say(console_line(step, self.total_steps, metrics))

    def samples(
        self, step: int, rollout: Rollout, grades: list[Grade], rows: list[Row], group_size: int, num_groups: int = 2
    ) -> None:
        """Appends the first completions of the first groups, with prompts, answers and rewards, to samples.jsonl."""
        if not self.is_main:
            return
        assert rollout.advantages is not None, "samples are written when the advantages are known"
        for b in [
            group * group_size + g for group in range(min(num_groups, len(rows))) for g in range(min(2, group_size))
        ]:
            row = rows[b // group_size]
            shown = {"step": step, "prompt": row.prompt, "answer": row.answer, "completion": rollout.texts[b]}
            scores = {
                "reward": grades[b].reward,
                "reward_status": grades[b].status,
                "read_as": grades[b].answer,
                "advantage": round(float(rollout.advantages[b].mean()), 4),
            }
            self._append("samples.jsonl", shown | scores | {"is_truncated": bool(rollout.is_truncated_B[b])})

    def excluded(self, rows: list[tuple[str, str, str]]) -> None:
        """Writes excluded_rows.jsonl: (set, row, reason) of what cannot be used; the console names only the first."""
        if self.is_main and rows:
            lines = [json.dumps({"set": name, "row": where, "reason": reason}) + "\n" for name, where, reason in rows]
            (self.out_dir / "excluded_rows.jsonl").write_text("".join(lines))

    def reward_failures(
        self, step: int, rollout: Rollout, grades: list[Grade], rows: list[Row], group_size: int
    ) -> None:
        """Appends each completion that could not be graded to reward_failures.jsonl and names the first three on the console."""
        failed = [b for b, grade in enumerate(grades) if grade.is_failed] if self.is_main else []
        for b in failed:
            row = rows[b // group_size]
            record = {
                "step": step,
                "row": row.where,
                "status": grades[b].status,
                "answer": row.answer,
                "completion": rollout.texts[b],
            }
            self._append("reward_failures.jsonl", record)
        for b in failed[:3]:
            self.say(
                f"step {step}: reward {grades[b].status}, of {rows[b // group_size].where}: {rollout.texts[b][-100:]!r}"
            )
        if len(failed) > 3:
            self.say(
                f"step {step}: {len(failed)} of {len(grades)} completions could not be graded; all are in reward_failures.jsonl"
            )

    def plot(self) -> None:
        """Draws curves.png from metrics.jsonl."""
        if self.is_main:
            plot_curves(read_metrics(self.out_dir), self.out_dir)

    def _append(self, name: str, record: dict[str, object]) -> None:
        file = self.out_dir / name
        with file.open("a+b") as out:
            if out.tell() and not _ends_with_newline(
                file
            ):  # a kill in the middle of a line: keep what is whole apart from what is not
                out.write(b"\n")
            out.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _ends_with_newline(file: Path) -> bool:
    with file.open("rb") as content:
        content.seek(-1, 2)
        return content.read(1) == b"\n"


def console_line(step: int, total_steps: int, metrics: Metrics) -> str:
    """The step in one readable line; what was not measured in this step is left out."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for name, label, form in (
        ("reward/mean", "reward", ".3f"),
        ("completion/tokens_mean", "tokens", ".1f"),
        ("policy/entropy", "entropy", ".3f"),
        ("policy/kl_ref", "kl", ".4f"),
        ("policy/clip_frac", "clip", ".3f"),
        ("policy/rollout_gap_mean", "gap", ".5f"),
        ("optim/grad_norm", "grad", ".3f"),
        ("optim/lr", "lr", ".2e"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    if metrics.get("optim/skipped_updates"):
        parts.append(f"SKIPPED UPDATES {metrics['optim/skipped_updates']:.0f}")
    if "perf/update_mfu" in metrics:
        parts.append(f"MFU {metrics['perf/update_mfu']:.0%}")
    times = [f"{name[5:-2]} {metrics[name]:.1f}" for name in phase_names(metrics) if metrics[name] >= 0.05]
    parts.append(f"{metrics['time/step_s']:.1f}s ({', '.join(times)})")
    parts += [f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/") and "/avg@" in name]
    return " | ".join(parts)


def phase_names(metrics: Metrics) -> list[str]:
    """The `time/<phase>_s` among the names, without the whole step's."""
    return [name for name in metrics if name.startswith("time/") and name not in ("time/step_s", "time/rollout_tail_s")]


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl in order of step, one per step (the last written); a line cut off by a kill is passed over."""
    by_step: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        by_step[int(record["step"])] = record
    return [by_step[step] for step in sorted(by_step)]


def plot_curves(records: list[dict[str, float]], run_dir: Path) -> None:
    """Draws `run_dir`/curves.png: the eight curves to look at first."""
    import matplotlib  # here, not above: half a second that most processes never need

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    eval_names = sorted({name for record in records for name in record if name.startswith("eval/") and "/avg@" in name})
    panels = [
        ("reward", ["reward/mean"]),
        ("held-out accuracy", eval_names),
        (
            "completion tokens",
            ["completion/tokens_mean", "completion/tokens_right_mean", "completion/tokens_wrong_mean"],
        ),
        ("KL to the reference", ["policy/kl_ref"]),
        ("entropy, nats", ["policy/entropy"]),
        ("clipped tokens, share", ["policy/clip_frac"]),
        ("sampler-trainer gap", ["policy/rollout_gap_mean"]),
    ]
    figure, axes = plt.subplots(2, 4, figsize=(17, 7.5), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, panels, strict=False):
        for name in names:
            points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
            if points:
                axis.plot(
                    *zip(*points, strict=True), marker="o" if name in eval_names else None, label=name.partition("/")[2]
                )
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if axis.lines and (len(names) > 1 or names == eval_names):
            axis.legend(fontsize=8)
    _plot_times(axes.flat[-1], records)
    figure.suptitle(str(run_dir))
    unfinished = run_dir / "curves.unfinished.png"
    figure.savefig(unfinished, dpi=90)
    unfinished.replace(run_dir / "curves.png")
    plt.close(figure)


def _plot_times(axis: object, records: list[dict[str, float]]) -> None:
    trained = [record for record in records if "time/sample_s" in record]
    phases = list(dict.fromkeys(name for record in trained for name in phase_names(record)))
    if trained:
        seconds = np.array([[record.get(name, 0.0) for record in trained] for name in phases])
        axis.stackplot([record["step"] for record in trained], seconds, labels=[name[5:-2] for name in phases])
        axis.legend(fontsize=8, loc="upper right", ncols=2)
    axis.set(title="seconds per phase", xlabel="step")
    axis.grid(alpha=0.3)
