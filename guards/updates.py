"""Which updates are left out: what is not finite, and what has moved too far from the policy that sampled.

An update is judged when its gradient is there, before the optimizer's step, by metrics that are the same on every rank.
Left out, it changes no bit of policy and optimizer. It does not end the run, because a resumed one would meet it again;
many in a row do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from batch import Metrics, State
from flags import UpdateStep, settings
from fsdp_utils import World
from guards.drift import check_gap
from guards.start import RunError

NOT_FINITE, BEYOND_KL = "optim/skipped_not_finite", "optim/skipped_max_kl"  # metrics: updates of a step, by reason


@settings
class Bounds:  # of updates
    max_kl: float
    max_skipped_updates: int


def find_fault(metrics: Metrics, bounds: Bounds) -> tuple[str, str] | None:
    """(the metric that counts it, what is wrong) of an update with these metrics; None: nothing."""
    loss, norm, kl = (metrics[name] for name in ("policy/loss", "optim/grad_norm", "policy/approx_kl"))
    for what, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            return NOT_FINITE, f"the {what} is {value}"
    if bounds.max_kl and not kl <= bounds.max_kl:  # also of nan
        return BEYOND_KL, f"the KL to the policy that sampled is {kl:.3g}; --max_kl {bounds.max_kl:g}"
    return None


@dataclass
class UpdateGuard:  # the same on every rank
    world: World
    bounds: Bounds = Bounds()
    num_skipped: int = 0  # in a row
    is_broken: bool = False  # none of the step's updates was finite: no checkpoint of it is written

    def state(self) -> State:
        """What a resumed run needs: goes into the checkpoint."""
        return {"skipped_in_a_row": self.num_skipped, "is_broken": self.is_broken}

    def restore(self, state: State) -> State:
        """Takes its part of the state; returns all of it."""
        self.num_skipped = state.get("skipped_in_a_row", 0)
        return state

    def judge(self, metrics: Metrics, step: UpdateStep) -> Metrics:
        """How often the update was left out, 0 or 1, and why, as metrics.

        Raises RunError if it is one too many, or if the sampler has drifted away from the policy.
        """
        check_gap(metrics, step)
        fault = find_fault(metrics, self.bounds)
        self.num_skipped = self.num_skipped + 1 if fault else 0
        self.is_broken = fault is not None and fault[0] == NOT_FINITE and (step.number == 1 or self.is_broken)
        if self.num_skipped > self.bounds.max_skipped_updates:
            count = f"{self.num_skipped} in a row (--max_skipped_updates {self.bounds.max_skipped_updates})"
            way_out = f"These are {count}; to continue, raise that, or lower --learning_rate in a new --out_dir"
            if fault[0] == NOT_FINITE and step.index < self.num_skipped:  # no weight has changed yet
                way_out = f"These are the first {count}: --model, --reference or a loss of your own is not finite"
            raise RunError(f"step {step.step}, update {step.number} is left out: {fault[1]}. {way_out}.")
        counted = {name: float(fault is not None and fault[0] == name) for name in (NOT_FINITE, BEYOND_KL)}
        return {"optim/skipped_updates": float(fault is not None)} | counted
