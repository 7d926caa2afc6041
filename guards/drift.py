"""Whether the sampler is still the policy that is trained: sums of weights, the gap of log-probs, and what is wrong.

Two comparisons, because neither sees everything. Weights are compared bit by bit, through sums (`add_sums`): a
tensor that is one small step old does not show in the log-probs of a few thousand tokens. Log-probs show what no sum of
weights does: another temperature, a kernel that computes something else. Pure functions; `rollout_checks.py` asks them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from guards.start import RunError

BUCKETS = 16  # sums of a tensor
MOST_ROUNDED = 4  # sums that may differ where LoRA is merged, however small the tensor
MOST_ROUNDED_SHARE = 1e-4  # of its numbers that may be rounded in another way
LEAST_SPREAD = 0.02  # of a token's log-prob, squared: entropies above about 0.05 have more
INTEGERS = {2: torch.int16, 4: torch.int32}  # bytes of a number -> the integer with the same bits


class DriftError(RunError):
    """Sampler and trainer have drifted apart, and the run is to stop."""


@cache
def factors(count: int, start: int, seed: int, device: torch.device) -> Tensor:
    """[count] int32 from 1 to 2^15: a fixed pseudo-random function of start, start + 1, ..."""
    mixed = (torch.arange(start + 1, start + 1 + count, device=device) * 0x9E3779B1 + seed) * 0x85EBCA6B
    return ((mixed >> 15) % 2**15 + 1).int()


@cache
def buckets(count: int, start: int, device: torch.device) -> Tensor:
    """[count] int64: the sum that each row belongs to."""
    return torch.arange(start, start + count, device=device) % BUCKETS


def no_sums(device: torch.device, *shape: int) -> Tensor:
    """[*shape, BUCKETS] int64."""
    return torch.zeros(*shape, BUCKETS, dtype=torch.int64, device=device)


def add_sums(sums: Tensor, rows: Tensor, first_row: int = 0, first_column: int = 0) -> None:
    """Adds to `sums`, [BUCKETS] int64, modulo 2^64: the bits of some rows of a tensor, times factors of row and column.

    Row i counts in sum i % BUCKETS. The sums of the parts of a tensor, cut anyhow, add up to those of the whole, to the
    last bit. A number that changes or moves changes them. A vector is a column; further dimensions count as columns.
    """
    bits = (rows.flatten(1) if rows.ndim > 1 else rows[:, None]).view(INTEGERS[rows.itemsize]).int()
    columns = factors(bits.shape[1], first_column, 1, rows.device)
    of_rows = (bits * columns).sum(1) * factors(len(bits), first_row, 2, rows.device)
    sums.index_add_(0, buckets(len(bits), first_row, rows.device), of_rows)


def differing(own: Tensor, others: Tensor, merged_sizes: Tensor) -> Tensor:
    """bool [tensors]: in one of the engines the sums are not those of the policy.

    `own` [tensors, BUCKETS], `others` [engines, tensors, BUCKETS]. `merged_sizes` [tensors]: numbers in a tensor that
    LoRA is merged into, otherwise 0. There two orders of summation round some numbers to neighbours, about 2^-16 of
    them at most. How many have moved by one step follows from the squares of the differences: factors are uniform, so
    the mean of their products' squares is 2^60 / 9.
    """
    differences = others - own  # [engines, tensors, BUCKETS]
    num_moved = differences.double().square().sum(-1) / (2**60 / 9)
    is_rounding = ((differences != 0).sum(-1) <= MOST_ROUNDED) | (num_moved < MOST_ROUNDED_SHARE * merged_sizes)
    return ((differences != 0).any(-1) & ~((merged_sizes > 0) & is_rounding)).any(0)


@dataclass(frozen=True)
class Gap:
    """Log-probs of sampler and trainer, compared over the tokens of a step."""

    mean: float  # of |p_sampler - p_trainer|, as policy/rollout_gap_mean
    temperature: float = 1.0  # at which the sampler seems to sample, divided by the trainer's
    explained: float = 0.0  # share of the difference that this temperature explains

    def is_beyond(self, bound: float) -> bool:
        """The mean or the temperature is farther off than the bound, or not a number; 0: there is no bound.

        The temperature counts by the share of the difference that it explains: over two hundred tokens of an uncertain
        policy rounding alone has looked like 0.94, which explained half. Faults explain three quarters and more.
        """
        off = abs(self.temperature - 1.0) * self.explained
        return bound > 0 and not (self.mean <= bound and off <= bound)

    def is_of_temperature(self, bound: float) -> bool:
        return self.is_beyond(bound) and self.explained > 0.9


def gap_in(metrics: dict[str, float]) -> Gap:
    """Of one or more updates. Where the loss is not finite it says nothing of the sampler."""
    if not math.isfinite(metrics["policy/loss"]):
        return Gap(0.0)
    return Gap(*(metrics[f"policy/rollout_{name}"] for name in ("gap_mean", "temperature", "temperature_r2")))


def temperature_of(slope: float, spread: float, squares: float) -> tuple[float, float]:
    """(the sampler's temperature / the trainer's, share of the difference that it explains), from the sums of
    `grpo.temperature_terms`, as means over tokens.

    Near 1 where the policy is almost certain of every token: a few rare ones would decide.
    """
    if not spread * squares > 0:  # nothing varies, or nothing differs
        return 1.0, 0.0
    return 1.0 / max(1.0 - slope / (spread + LEAST_SPREAD), 0.1), slope**2 / (spread * squares)


@dataclass(frozen=True)
class Findings:
    """What is known of a drift when it is judged."""

    differing: list[str]  # tensors that were not the policy's before the new sync
    is_unmerged: bool  # those tensors are what they would be without the adapter
    cached_blocks: int  # of keys and values that the engine kept from earlier calls
    gap: Gap | None  # of the step; None: it was found before sampling
    differing_after: list[str]  # tensors that are not the policy's after the new sync
    cached_after: int
    probe: Gap  # of what was sampled after the new sync


def cause_of(found: Findings, bound: float) -> str:
    """What is wrong, by exclusion: adapter, head, transfer, cache, temperature or kernel."""
    if found.differing:
        if found.is_unmerged:
            return "adapter"
        return "head" if all(name.startswith("lm_head.") for name in found.differing) else "transfer"
    if found.cached_blocks:
        return "cache"
    if (found.gap or found.probe).is_of_temperature(bound):
        return "temperature"
    return "kernel" if found.probe.is_beyond(bound) else "cache"


def is_mended(found: Findings, bound: float) -> bool:
    """The new sync helped: weights are equal, nothing is kept, and the probe's log-probs agree."""
    if found.differing_after or found.cached_after or found.probe.is_beyond(bound):
        return False
    return cause_of(found, bound) != "temperature"  # of the calls of this run: a sync does not change it


def sentence(found: Findings, bound: float, folder: Path) -> str:
    """What the console says."""
    cause, names = cause_of(found, bound), found.differing
    some = ", ".join(names[:3]) + (f" and others, {len(names)} in all" if len(names) > 3 else "")
    seen = found.gap or found.probe
    what = {
        "adapter": f"tensors of the engine lack the adapter: {some}",
        "head": f"the engine's head is not the policy's: {some}",
        "transfer": f"tensors of the engine are not the policy's: {some}",
        "cache": f"{found.cached_blocks} blocks of keys and values of earlier weights were kept",
        "temperature": f"it samples at {seen.temperature:.3f} times the trainer's temperature",
        "kernel": "weights, caches and temperature are equal, log-probs are not",
    }[cause]
    if cause == "cache" and not found.cached_blocks:
        what = "weights and temperature are equal, and the gap is gone after a new sync"
    of_step = f"; mean gap {seen.mean:.4f}, temperature {seen.temperature:.3f}, bound {bound:g}" if found.gap else ""
    helped = "a new sync helped" if is_mended(found, bound) else "a new sync did not help"
    return f"sampler and trainer have drifted apart ({cause}): {what}{of_step}; {helped}; evidence is in {folder}"


def keep_evidence(folder: Path, found: Findings, bound: float, arrays: dict[str, np.ndarray]) -> None:
    """Writes findings.json and tokens.npz: tokens, and their log-probs by the engine and by the policy."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"cause": cause_of(found, bound), "is_mended": is_mended(found, bound), "bound": bound} | asdict(found)
    (folder / "findings.json").write_text(json.dumps(record, indent=2) + "\n")
    np.savez(folder / "tokens.npz", **arrays)
