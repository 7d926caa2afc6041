"""--dtype float16: a scale of the loss, which keeps small gradients above the smallest number of float16 (6e-8).

Sampler and trainer round alike, 8 times finer than in bfloat16 (Qi et al., arXiv 2510.26788). `update.make_guard` finds
the guard by name; the scale is multiplied in before a gradient is taken, and taken off when it is clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from batch import Metrics
from schedule import UpdateStep
from update import UpdateGuard, check_gap

GROWTH = 400  # updates in a row without an overflow, after which the scale doubles; as there


@dataclass
class ScalingGuard(UpdateGuard):
    """Halves the scale where gradients overflow, and leaves that update out: no bad one, until the scale is 1."""

    loss_scale: float = 2.0**16  # a power of 2, which rounds nothing
    num_finite: int = 0  # updates in a row

    def state(self) -> dict:
        return super().state() | {"loss_scale": self.loss_scale, "finite_in_a_row": self.num_finite}

    def restore(self, state: dict) -> None:
        super().restore(state)
        self.loss_scale, self.num_finite = state["loss_scale"], state["finite_in_a_row"]

    def judge(self, metrics: Metrics, step: UpdateStep) -> Metrics:
        scale, is_finite = self.loss_scale, math.isfinite(metrics["optim/grad_norm"])
        self.num_finite = self.num_finite + 1 if is_finite else 0
        if is_finite or scale <= 1 or not math.isfinite(metrics["policy/loss"]):
            judged = super().judge(metrics, step)
            self.loss_scale *= 2 if self.num_finite and self.num_finite % GROWTH == 0 else 1
        else:
            check_gap(metrics, step)
            judged, self.loss_scale, self.is_broken = {"optim/skipped_updates": 1.0}, scale / 2, False
        return judged | {"optim/loss_scale": scale}
