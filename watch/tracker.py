"""--track: the metrics of each step, also for wandb, tensorboard or trackio. docs/runs.md

Each is installed by whoever wants it. A run that is continued adds to the curves that it has.
"""

import hashlib
import importlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from batch import Metrics
from run import Observer

Log = Callable[[int, Metrics], None]  # (step, metrics)
Close = Callable[[], None]


@dataclass
class Tracker(Observer):
    """Sends the metrics of each step, on the main process. A tracker that fails costs its curves, no step."""

    name: str  # in `TRACKERS`
    out_dir: Path
    started: tuple[Log, Close] | None = None
    has_failed: bool = False

    def step(self, step: int, metrics: Metrics) -> None:
        if self.has_failed:
            return
        try:
            self.started = self.started or TRACKERS[self.name](self.out_dir, step)
            log, _ = self.started
            log(step, {name: value for name, value in metrics.items() if math.isfinite(value)})
        except Exception as error:  # noqa: BLE001  the tracker's program may raise anything
            self.has_failed = True
            print(f"warning: --track {self.name} has failed and is left out from now on: {error}", flush=True)

    def end(self, how: str) -> None:
        if self.started and not self.has_failed:
            _, close = self.started
            close()


def tensorboard(out_dir: Path, first_step: int) -> tuple[Log, Close]:
    """Event files in OUT_DIR/tensorboard. What was logged of this step and later ones is hidden: they come again."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out_dir / "tensorboard"), purge_step=first_step)

    def log(step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def curves(package: str, out_dir: Path, first_step: int) -> tuple[Log, Close]:
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
