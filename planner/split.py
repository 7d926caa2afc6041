"""How many of N GPUs should train, and how many should sample? `--plan_split`: every split is planned, none is run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from planner.advice import misfits
from planner.setup import Setup
from planner.time import Assumed, phase_seconds, step_seconds, waiting_seconds


@dataclass(frozen=True)
class Split:
    """One way to use the GPUs."""

    ranks: int  # GPUs that train
    generation_gpus: int  # that sample; 0: colocated, the ranks do both in turn
    step_seconds: float
    seconds: dict[str, float]  # by phase
    waits: dict[str, float]  # seconds of a step in which "ranks" and "servers" wait for each other
    fits: bool


def splits_of(setup: Setup, assumed: Assumed) -> list[Split]:
    """All splits of the setup's GPUs, colocated ones too, the fastest that fits first.

    With servers at the setup's --steps_ahead, or 1. Colocated: as many GPUs as the prompts of a step can be divided by.
    """
    tp, total = setup.run.tensor_parallel_size, setup.hardware.gpus + setup.hardware.generation_gpus
    together = [n for n in range(tp, total + 1, tp) if setup.plan.prompts_per_step % (n // tp) == 0]
    setups = [with_split(setup, n, 0) for n in together[-1:]]
    setups += [with_split(setup, total - n, n) for n in range(tp, total, tp)]
    found = [split_of(each, assumed) for each in setups]
    return sorted(found, key=lambda split: (not split.fits, split.step_seconds))


def with_split(setup: Setup, ranks: int, generation_gpus: int) -> Setup:
    """The setup on other numbers of GPUs."""
    h = setup.hardware
    per_node = math.ceil((h.gpus + h.generation_gpus) / h.nodes)
    hardware = replace(h, gpus=ranks, generation_gpus=generation_gpus, nodes=math.ceil(ranks / per_node))
    shard_ranks = setup.memory.shard_ranks
    memory = replace(setup.memory, shard_ranks=None if shard_ranks and ranks % shard_ranks else shard_ranks)
    ahead = max(1, setup.run.steps_ahead) if generation_gpus else 0
    return replace(setup, hardware=hardware, memory=memory, run=replace(setup.run, steps_ahead=ahead))


def split_of(setup: Setup, assumed: Assumed) -> Split:
    return Split(
        ranks=setup.hardware.gpus,
        generation_gpus=setup.hardware.generation_gpus,
        step_seconds=step_seconds(setup, assumed),
        seconds=phase_seconds(setup, assumed),
        waits=waiting_seconds(setup, assumed) or {},
        fits=not misfits(setup),
    )


def text_of_splits(setup: Setup, splits: list[Split]) -> str:
    """A table for people, the best split marked."""
    ahead = f"with servers --steps_ahead {max(1, setup.run.steps_ahead)}{' --in_flight' * setup.run.in_flight}"
    lines = [f"splits of {setup.hardware.gpus + setup.hardware.generation_gpus} GPUs; {ahead}", ""]
    lines.append(f"  {'train':>6}{'sample':>8}{'step':>9}{'rollout':>9}{'training':>10}{'sync':>7}  who waits")
    for i, split in enumerate(splits):
        training = sum(split.seconds.values()) - split.seconds["rollout"] - split.seconds["sync"]
        times = f"{split.step_seconds:8.1f}s{split.seconds['rollout']:9.1f}{training:10.1f}{split.seconds['sync']:7.1f}"
        mark = "*" if i == 0 and split.fits else " "
        where = f"{split.generation_gpus:8}" if split.generation_gpus else "    same"
        lines.append(f"{mark} {split.ranks:6}{where}{times}  {'; '.join(remarks(split))}".rstrip())
    return "\n".join([*lines, "", verdict(splits)])


def remarks(split: Split) -> list[str]:
    waits = [f"{who} {seconds:.1f} s" for who, seconds in split.waits.items() if seconds >= 0.05]
    return [*waits, *([] if split.fits else ["does not fit"])]


def verdict(splits: list[Split]) -> str:
    best = splits[0]
    if not best.fits:
        return "none fits; the same command without --plan_split says what would have to change"
    if not best.generation_gpus:
        return f"best: colocated, {best.ranks} GPUs do both in turn"
    colocated = next((split for split in splits if not split.generation_gpus and split.fits), None)
    gain = f", {colocated.step_seconds / best.step_seconds:.2f} times as fast as colocated" if colocated else ""
    trains = f"{best.ranks} GPU trains" if best.ranks == 1 else f"{best.ranks} GPUs train"
    samples = f"{best.generation_gpus} {'samples' if best.generation_gpus == 1 else 'sample'}"
    return f"best: {trains} and {samples}{gain}"
