"""Bad updates: which they are, and what is done about them.

An update is judged when its gradient is there, before the optimizer's step, by metrics that are the same on every rank.
A bad one is left out, ends the run, or sends policy and optimizer back to the last checkpoint (`--on_bad_update`). Its
micro-batches are kept (`evidence.py`); scripts/replay_update.py runs them again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flags import UpdateStep, settings
from fsdp_utils import World
from guards.drift import gap_in
from guards.evidence import Fault, keep_evidence
from guards.start import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from batch import Pass, State

HISTORY = 50  # gradient norms that the median is taken of
NEEDED = 10  # of them: before, a norm is not compared
IN_A_STEP = ("policy/approx_kl", "policy/ratio_max")  # they start afresh with the next rollout
WAY_OUT = "lower --learning_rate in a new --out_dir, or look at the micro-batches with scripts/replay_update.py."
ROLLOUT_IS_OVER = Fault("", "its rollout was sampled by weights that are gone")
DRIFTED = Fault("", "the sampler has drifted away")  # what is wrong with it is found and told after the next sync


class BadUpdate(RunError):
    """Ends the run. The message says why, and how to go on."""


@settings
class Bounds:  # of an update; 0: none
    max_kl: float
    max_ratio: float
    max_grad_norm_factor: float
    on_bad_update: str
    max_skipped_updates: int


def find_fault(metrics: dict[str, float], grad_norms: list[float], bounds: Bounds) -> Fault | None:
    """What is wrong with an update of these metrics; None: nothing. `grad_norms`: of the updates before it.

    The ratio is bounded above alone: it is a factor of the gradient, so a token whose ratio is near 0 has almost none.
    Tokens that moved so far down raise the KL, the mean of log(pi_old / pi).
    """
    loss, norm = metrics["policy/loss"], metrics["optim/grad_norm"]
    if not math.isfinite(loss):
        return Fault("policy/loss", f"the loss is {loss}")
    if not math.isfinite(norm):
        return Fault("optim/grad_norm", f"the loss is finite, but the gradient norm is {norm}")
    kl, ratio = metrics["policy/approx_kl"], metrics["policy/ratio_max"]
    if bounds.max_kl and not kl <= bounds.max_kl:  # also of nan
        return Fault("policy/approx_kl", f"the KL to the policy that sampled is {kl:.3g}; --max_kl {bounds.max_kl:g}")
    if bounds.max_ratio and not ratio <= bounds.max_ratio:
        reason = f"the largest ratio pi / pi_old is {ratio:.4g}; --max_ratio {bounds.max_ratio:g}"
        return Fault("policy/ratio_max", reason, bounds.max_ratio)
    factor = bounds.max_grad_norm_factor
    if factor and len(grad_norms) >= NEEDED and norm > factor * (median := statistics.median(grad_norms)):
        usual = f"the median of the last {len(grad_norms)} updates, {median:.3g}"
        times = f"{norm / median:.3g} times {usual}"
        return Fault("optim/grad_norm", f"the gradient norm {norm:.3g} is {times}; --max_grad_norm_factor {factor:g}")
    return None


@dataclass
class UpdateGuard:
    """Judges the updates of a run, and deals with the bad ones. The same on every rank."""

    world: World
    bounds: Bounds = Bounds()
    out_dir: Path | None = None  # None: nothing is kept of bad updates
    tokenizer: PreTrainedTokenizerBase | None = None
    way_back: Callable[[], tuple[Path | None, State]] | None = None  # loads the last checkpoint, if there is one
    grad_norms: list[float] = field(default_factory=list)  # of the last good updates, without those of 0
    num_skipped: int = 0  # in a row
    num_rollbacks: int = 0  # to `target`
    target: Path | None = None
    is_rolled_back: bool = False  # in this step

    def state(self) -> State:
        """What a resumed run needs: goes into the checkpoint. Rollbacks are counted from one checkpoint to the next."""
        return {"grad_norms": self.grad_norms, "skipped_in_a_row": self.num_skipped}

    def restore(self, state: State) -> State:
        """Takes its part of the state; returns all of it. A checkpoint of an older version has none."""
        self.grad_norms, self.num_skipped = state.get("grad_norms", []), state.get("skipped_in_a_row", 0)
        return state

    def judge(self, metrics: dict[str, float], step: UpdateStep) -> Fault | None:
        """Why the update must not be made; None: it is made, and enters the history."""
        self.is_rolled_back = self.is_rolled_back and not step.is_first
        if self.is_rolled_back:
            return ROLLOUT_IS_OVER
        if step.max_rollout_gap and gap_in(metrics).is_beyond(step.max_rollout_gap):
            return DRIFTED
        fault = find_fault(metrics, self.grad_norms, self.bounds)
        if fault is None:
            self.num_skipped = 0
            norm = metrics["optim/grad_norm"]  # 0: no group has a signal; a median of 0 would forbid every other norm
            self.grad_norms = [*self.grad_norms, *[norm] * (norm > 0)][-HISTORY:]
        return fault

    def handle(self, fault: Fault, step: UpdateStep, metrics: dict[str, float], passes: list[Pass]) -> bool:
        """Keeps the evidence, then does what --on_bad_update says; true if policy and optimizer went back.

        Called when the gradient is freed. Raises BadUpdate to end the run.
        """
        if fault is ROLLOUT_IS_OVER:
            return False
        if fault is DRIFTED:
            self._skip(fault, f"step {step.step}, update {step.number} is left out: {fault.reason}")
            return False
        said = f"step {step.step}, update {step.number} is bad: {fault.reason}"
        if self.out_dir is not None:
            folder = self.out_dir / "bad_updates" / f"step_{step.step}_update_{step.number}"
            said += keep_evidence(folder, fault, metrics, passes, self.tokenizer, self.world)
        if self.bounds.on_bad_update == "stop":
            raise BadUpdate(f"{said}. The same command would meet it again; to go on, give --on_bad_update skip.")
        is_rollback = self.bounds.on_bad_update == "rollback"
        said += self._roll_back(said) if is_rollback else self._skip(fault, said)
        if self.world.is_main:
            print(said, flush=True)
        return is_rollback

    def _skip(self, fault: Fault, said: str) -> str:
        """Counts the update. One that is beyond a bound for a rollout ends with the rollout: it is not counted."""
        self.num_skipped += fault.metric not in IN_A_STEP
        if self.num_skipped >= self.bounds.max_skipped_updates:
            count = f"{self.num_skipped} in a row (--max_skipped_updates {self.bounds.max_skipped_updates})"
            raise BadUpdate(f"{said}. These are {count}; {WAY_OUT}")
        return "; it is left out"

    def _roll_back(self, said: str) -> str:
        """Policy, optimizer and history go back to the last checkpoint; steps and data go on."""
        folder, state = self.way_back()
        if folder is None:
            raise BadUpdate(f"{said}. There is no checkpoint yet to go back to; to go on, give --on_bad_update skip.")
        self.restore(state)
        self.is_rolled_back = True
        self.num_rollbacks = self.num_rollbacks + 1 if folder == self.target else 1
        self.target = folder
        if self.num_rollbacks >= self.bounds.max_skipped_updates:
            count = f"{self.num_rollbacks} since {folder} (--max_skipped_updates {self.bounds.max_skipped_updates})"
            raise BadUpdate(f"{said}. These are {count}; {WAY_OUT}")
        return f"; policy and optimizer go back to {folder}, the rest of the step is left out"
