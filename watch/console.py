"""The voice of a run while it goes: a line a step, and OUT_DIR/status.json for `watch`. docs/runs.md"""

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from batch import Metrics
from run import Observer
from runtime.files import best_effort, end_status, write
from runtime.history import seconds_of_phases
from runtime.start import ON_END

ON_CONSOLE = {  # metric -> how the console shows it
    "reward/mean": "reward {:.3f}", "completion/tokens_mean": "tokens {:.1f}", "policy/entropy": "entropy {:.3f}",
    "policy/kl_ref": "kl {:.4f}", "policy/clip_frac": "clip {:.3f}", "policy/rollout_gap_mean": "gap {:.5f}",
    "optim/grad_norm": "grad {:.3f}", "optim/lr": "lr {:.2e}", "perf/update_mfu": "MFU {:.0%}",
    "memory/peak_gib": "mem {:.1f} GiB",
}  # fmt: skip
ALARMS = {  # what a line also says, with --quiet too, if it is not 0
    "reward/left_out": "NOT GRADED: {:.0f} left out", "optim/skipped_updates": "SKIPPED UPDATES: {:.0f} not finite",
}  # fmt: skip
STEPS_OF_FORECAST = 20  # the last ones: answers get longer, so that early steps say little
IDLE_STEPS = 5  # in a row, of which the console warns


@dataclass
class Console(Observer):
    """Prints a line a step, and keeps status.json, on the main process."""

    out_dir: Path
    total_steps: int
    quiet: bool  # a line only for steps that have an evaluation, or have left out updates or completions
    # The time of each of the last steps.
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_OF_FORECAST))
    now: str = ""  # the phase; "" between two phases
    done: dict[str, object] = field(default_factory=dict)  # the last step that is done, in status.json
    num_idle: int = 0  # steps in a row without an advantage or a gradient

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """After an exception the phase stays: it is where the run ended."""
        outer = self.now
        self.tell_phase(name, step)
        yield
        self.now = outer
        if outer:
            self.tell_phase(outer, step)

    def tell_phase(self, name: str, step: int) -> None:
        """Writes status.json: what is done now, in which step; below it the last step that is done."""

        def end(how: str) -> None:
            end_status(self.out_dir, f"stopped after step {step}" if how == "stopped" else how)

        self.now, ON_END[:] = name, [end]
        status = {"now": name, "in_step": step, "since": _clock(), "pid": os.getpid()} | self.done
        file = self.out_dir / "status.json"
        with best_effort(str(file)):
            write(file, json.dumps(status, indent=1) + "\n")

    def step(self, step: int, metrics: Metrics) -> None:
        """Prints the step's line, and says it once when nothing was there to learn for some steps."""
        if step:  # 0: before training
            self.seconds.append(metrics["time/step_s"])
        left = 0.0
        if self.seconds:
            left = (self.total_steps - step) * statistics.mean(self.seconds)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        done = {"step": step, "last_step": self.total_steps, "time": _clock(), "seconds_left": round(left)}
        self.done = done | finite
        with self.phase("log", step):
            is_loud = any(name.startswith("eval/") or (name in ALARMS and metrics[name]) for name in metrics)
            if is_loud or not self.quiet:
                print(console_line(step, self.total_steps, metrics, left), flush=True)
        self.warn_of_idle_steps(metrics)

    def warn_of_idle_steps(self, metrics: Metrics) -> None:
        has_signal = metrics.get("reward/frac_groups_with_signal") != 0
        is_idle = not has_signal or metrics.get("optim/grad_norm") == 0
        self.num_idle = self.num_idle + 1 if is_idle else 0
        if self.num_idle == IDLE_STEPS:
            reason = "optim/grad_norm is 0, although rewards differ: see docs/symptoms.md, The reward does not rise"
            if not has_signal:
                reason = "all rewards of a group are the same: see docs/symptoms.md, The reward is always 0"
            print(f"warning: for {IDLE_STEPS} steps {reason}", flush=True)

    def end(self, how: str) -> None:
        ON_END.clear()
        end_status(self.out_dir, how)


def console_line(step: int, last_step: int, metrics: Metrics, seconds_left: float) -> str:
    """The step in one readable line, with the seconds of its phases; what it did not measure is left out."""
    parts = [f"step {step:>{len(str(last_step))}}/{last_step}"]
    parts += [form.format(metrics[name]) for name, form in ON_CONSOLE.items() if name in metrics]
    parts += [form.format(metrics[name]) for name, form in ALARMS.items() if metrics.get(name)]
    phases = seconds_of_phases(metrics)
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
