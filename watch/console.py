"""The voice of a run while it goes: a line a step, OUT_DIR/status.json for `watch`, and its tracker. docs/runs.md"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

from batch import Metrics
from flags import Recording
from runtime.files import best_effort, end_status, write
from runtime.start import ON_END

ON_CONSOLE = {  # metric -> how the console shows it
    "reward/mean": "reward {:.3f}", "completion/tokens_mean": "tokens {:.1f}", "policy/entropy": "entropy {:.3f}",
    "policy/kl_ref": "kl {:.4f}", "policy/clip_frac": "clip {:.3f}", "policy/rollout_gap_mean": "gap {:.5f}",
    "optim/grad_norm": "grad {:.3f}", "optim/lr": "lr {:.2e}", "perf/update_mfu": "MFU {:.0%}",
    "memory/peak_gib": "mem {:.1f} GiB",
}  # fmt: skip
STEPS_OF_FORECAST = 20  # the last ones: answers get longer, so that early steps say little
Log = Callable[[int, Metrics], None]  # (step, metrics)
Close = Callable[[], None]


@dataclass
class Console:
    """Only the main process speaks; all other ranks call the same methods, and are silent."""

    out_dir: Path
    is_main: bool
    recording: Recording
    # The time of each of the last steps.
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_OF_FORECAST))
    tracker: tuple[Log, Close] | None = None
    done: dict[str, object] = field(default_factory=dict)  # the last step that is done, in status.json

    def start(self, saved_step: int) -> None:
        """Starts the tracker, which continues after this step."""
        if self.is_main and self.recording.track != "none":
            self.tracker = TRACKERS[self.recording.track](self.out_dir, saved_step)

    def say(self, text: str) -> None:
        if self.is_main:
            print(text, flush=True)

    def tell_step(self, step: int, last_step: int, metrics: Metrics, phases: dict[str, float]) -> None:
        """Prints the step's line; with --quiet only if the step has an evaluation or updates that were left out."""
        if not self.is_main:
            return
        if step:  # 0: before training
            self.seconds.append(metrics["time/step_s"])
        left = 0.0
        if self.seconds:
            left = (last_step - step) * statistics.mean(self.seconds)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.done = {"step": step, "last_step": last_step, "time": _clock(), "seconds_left": round(left), **finite}
        self.tell_phase("log", step)
        if self.tracker is not None:
            self._track(step, finite)
        is_notable = any(name.startswith("eval/") for name in metrics) or metrics.get("optim/skipped_updates")
        if is_notable or not self.recording.quiet:
            print(console_line(step, last_step, metrics, phases, left), flush=True)

    def tell_phase(self, name: str, step: int) -> None:
        """Writes status.json: what is done now, in which step; below it the last step that is done."""
        if not self.is_main:
            return

        def end(how: str) -> None:
            end_status(self.out_dir, f"stopped after step {step}" if how == "stopped" else how)

        ON_END[:] = [end]
        status = {"now": name, "in_step": step, "since": _clock(), "pid": os.getpid()} | self.done
        file = self.out_dir / "status.json"
        with best_effort(str(file)):
            write(file, json.dumps(status, indent=1) + "\n")

    def _track(self, step: int, metrics: Metrics) -> None:
        try:
            log, _ = self.tracker
            log(step, metrics)
        except Exception as error:  # noqa: BLE001  the tracker's program may raise anything
            self.tracker = None
            self.say(f"warning: --track {self.recording.track} has failed and is left out from now on: {error}")

    def finish(self, how: str) -> None:
        ON_END.clear()
        if self.tracker is not None:
            _, close = self.tracker
            close()
        if self.is_main:
            end_status(self.out_dir, how)


def console_line(step: int, last_step: int, metrics: Metrics, phases: dict[str, float], seconds_left: float) -> str:
    """The step in one readable line, with the seconds of its phases; what it did not measure is left out."""
    parts = [f"step {step:>{len(str(last_step))}}/{last_step}"]
    parts += [form.format(metrics[name]) for name, form in ON_CONSOLE.items() if name in metrics]
    if metrics.get("optim/skipped_updates"):
        not_finite, beyond = metrics["optim/skipped_not_finite"], metrics["optim/skipped_max_kl"]
        parts.append(f"SKIPPED UPDATES: {not_finite:.0f} not finite, {beyond:.0f} beyond --max_kl")
    times = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items() if seconds >= 0.05)
    parts.append(f"{metrics['time/step_s']:.1f}s ({times})")
    parts += [f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/") and "/avg@" in name]
    for name, value in metrics.items():
        if name.endswith("/frac_failed") and value:
            parts.append(f"{name} {value:.3f}, see eval/step_{step}")
    if seconds_left:
        parts.append(f"{timedelta(seconds=round(seconds_left))} left")
    return " | ".join(parts)


def _clock() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


# Trackers -------------------------------------------------------------------------------------------------------------
# Each is installed by whoever wants it. A run that is continued adds to the curves that it has.


def tensorboard(out_dir: Path, saved_step: int) -> tuple[Log, Close]:
    """Event files in OUT_DIR/tensorboard. What was logged after the checkpoint is hidden: those steps come again."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out_dir / "tensorboard"), purge_step=saved_step + 1)

    def log(step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def curves(package: str, out_dir: Path, saved_step: int) -> tuple[Log, Close]:
    """wandb or trackio, project WANDB_PROJECT or TRACKIO_PROJECT. A step that comes again keeps its values in wandb.

    With WANDB_MODE=offline all is in OUT_DIR/wandb; trackio stays on this machine unless the environment names a Space.
    """
    tracker = importlib.import_module(package)
    options = {}
    if package == "wandb":  # the same folder is the same run
        options = {"id": hashlib.sha256(os.fsencode(out_dir.resolve())).hexdigest()[:16], "dir": str(out_dir)}
    tracker.init(
        project=os.environ.get(f"{package.upper()}_PROJECT", "grpo"),
        name=out_dir.name,
        config=json.loads((out_dir / "config.json").read_text("utf-8")),
        resume="allow",
        **options,
    )
    return lambda step, metrics: tracker.log(metrics, step=step), tracker.finish


TRACKERS = {"tensorboard": tensorboard, "wandb": partial(curves, "wandb"), "trackio": partial(curves, "trackio")}
