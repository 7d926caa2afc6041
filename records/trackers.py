"""`--track`: the metrics of each step go to wandb, TensorBoard or trackio, too. docs/metrics.md

Each is installed by who wants it. metrics.jsonl stays the record of the run: a tracker that fails costs its own curves.
A run that is continued adds to the curves that it has.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

Log = Callable[[int, dict[str, float]], None]  # (step, metrics)
Close = Callable[[], None]
PROJECT = "grpo"


def tensorboard(out_dir: Path, saved_step: int) -> tuple[Log, Close]:
    """Event files in OUT_DIR/tensorboard. What was logged after the checkpoint is hidden: those steps come again."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out_dir / "tensorboard"), purge_step=saved_step + 1)

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def wandb(out_dir: Path, saved_step: int) -> tuple[Log, Close]:
    """Project WANDB_PROJECT; WANDB_MODE=offline: all in OUT_DIR/wandb. A step that comes again keeps its values."""
    import wandb

    config, project = json.loads((out_dir / "config.json").read_text()), os.environ.get("WANDB_PROJECT", PROJECT)
    name = hashlib.sha256(str(out_dir.resolve()).encode()).hexdigest()[:16]  # the same folder is the same run
    run = wandb.init(project=project, name=out_dir.name, id=name, resume="allow", dir=str(out_dir), config=config)
    return lambda step, metrics: run.log(metrics, step=step), run.finish


def trackio(out_dir: Path, saved_step: int) -> tuple[Log, Close]:
    """Project TRACKIO_PROJECT, on this machine unless the environment names a Space."""
    import trackio

    config, project = json.loads((out_dir / "config.json").read_text()), os.environ.get("TRACKIO_PROJECT", PROJECT)
    trackio.init(project=project, name=out_dir.name, config=config, resume="allow")
    return lambda step, metrics: trackio.log(metrics, step=step), trackio.finish


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}
