"""The memory that a run takes, phase by phase, beside what the dry run predicts: the loop's door to the planner.

    memory = watch_memory(args, num_rows, world)   # refuses a run that cannot fit, before its weights are read
    with memory.phase("update"):                   # `Run.phase` does this
        ...
    line = memory.metrics()                        # of the step, the largest over the ranks

On CUDA a phase's figure is all that is taken on the GPU: what torch holds, the engine awake or asleep, CUDA's own. On
the CPU it is the resident memory of the rank.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fsdp_utils import World, gather_from_ranks
from inputs.checks import launched_world_size
from inputs.machine import local_world_size
from model.sizes import cpu_cache_bytes
from model.weights import load_config
from planner import meter
from planner.dry_run import setup_of
from planner.memory import Phase, gpu_phases, host_phases, sequences_at_once, without
from planner.setup import COMPUTE, GIB, Setup

# Phase of the loop -> phases of the planner. What comes before the first phase is "load": also the engine's start.
PHASES = {
    "load": ("load", "rollout"),
    "sample": ("rollout",),
    "logprobs": ("logprobs",),
    "update": ("update", "optimizer"),
    "sync": ("sync", "rollout"),  # at its end the engine is awake
    "evaluate": ("rollout",),
    "checkpoint": (),
}
NEAR = 0.95  # of the limit: a warning
WAYS_OUT = {  # phase -> what to change
    "load": "lower --gpu_memory_utilization",
    "sample": "lower --gpu_memory_utilization",
    "evaluate": "lower --gpu_memory_utilization",
    "sync": "lower --gpu_memory_utilization",
    "logprobs": "lower --micro_batch_tokens, or add --offload_reference",
    "update": "lower --micro_batch_tokens, add --gradient_checkpointing, or --offload optimizer",
    "checkpoint": "lower --micro_batch_tokens",
    "host": "use less of --offload and --offload_activations, fewer --reward_workers, or no --async_checkpoint",
}

Peaks = dict[str, tuple[int, int]]  # phase -> bytes taken at its peak, and bytes of them that tensors or engine hold


class MemoryWatch:
    """Peaks of the phases of this rank's step, and what they are compared with."""

    def __init__(self, world: World, predicted: dict[str, float]) -> None:
        """`predicted`: phase -> bytes of a rank, and "host" -> bytes of a node; {}: not known for this model."""
        self.meter = meter.GpuMeter(world.device) if world.device.type == "cuda" else meter.HostMeter()
        self.host_limit = meter.host_bytes()
        self.limit = self.meter.total or self.host_limit / local_world_size()
        self.predicted = predicted
        self.current: str | None = "load"
        self.peaks: Peaks = {}
        self.host_peak = 0
        self.has_reported = False
        self.warned: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keeps the peak of the block; a phase without a name in `PHASES` belongs to the one around it."""
        outer = self.current
        if name == "sync":
            self.meter.release()
        self._note()
        self.current = name if name in PHASES else outer
        yield
        self._note()
        self.current = None if outer == "load" else outer

    def _note(self) -> None:
        """Adds the peak since the last call to the phase that it belongs to."""
        self.host_peak = max(self.host_peak, meter.peak_resident())
        if self.current is not None:
            before, now = self.peaks.get(self.current, (0, 0)), self.meter.peak()
            self.peaks[self.current] = max(before, now)
        self.meter.restart()
        meter.restart_peak_resident()

    def metrics(self) -> dict[str, float]:
        """`memory/` metrics since the last call, in GiB: the same on every rank; all ranks call it."""
        of_ranks = gather_from_ranks((self.peaks, self.host_peak + meter.resident_of_children(), meter.pinned_bytes()))
        found = {}
        for name in self.peaks:
            taken, held = max(peaks.get(name, (0, 0)) for peaks, _, _ in of_ranks)
            found[f"memory/{name}_gib"] = taken / GIB
            if self.meter.total:
                found[f"memory/{name}_allocated_gib"] = held / GIB
        found["memory/peak_gib"] = max(found.values(), default=0.0)
        found["memory/host_gib"] = largest_node([each for _, each, _ in of_ranks]) / GIB
        if self.meter.total:
            found["memory/pinned_gib"] = largest_node([each for *_, each in of_ranks]) / GIB
        self.peaks, self.host_peak = {}, 0
        return found

    def remarks(self, metrics: dict[str, float]) -> list[str]:
        """After the first update, prediction against truth; and a warning for each phase that comes near the limit."""
        said = []
        if not self.has_reported and "memory/update_gib" in metrics:
            self.has_reported = True
            said.append(self._report(metrics))
        limits = dict.fromkeys(PHASES, self.limit) | {"host": self.host_limit}
        for name, limit in limits.items():
            taken = metrics.get(f"memory/{name}_gib", 0) * GIB
            if taken > NEAR * limit and name not in self.warned:
                self.warned.add(name)
                where = "a GPU" if self.meter.total else "a rank's share of the host RAM"
                where = "a node's host RAM" if name == "host" else where
                near = f"{name} takes {taken / GIB:.1f} of the {limit / GIB:.1f} GiB of {where}"
                said.append(f"warning: {near}; before it runs out: {WAYS_OUT[name]}.")
        return said

    def _report(self, metrics: dict[str, float]) -> str:
        where = "GPU" if self.meter.total else "rank"
        pairs = []
        for name in (*PHASES, "host"):
            if (found := metrics.get(f"memory/{name}_gib")) is not None:
                expected = self.predicted.get(name)
                pairs.append(f"{name} {found:.2f}" + (f" ({expected / GIB:.2f})" if expected else ""))
        known = "in brackets what the dry run predicts" if self.predicted else "the dry run has no figures for it"
        return f"memory, GiB per {where} at the peak, host per node; {known}: {', '.join(pairs)}"


def largest_node(of_ranks: list[int]) -> int:
    """The sum over the ranks of a node, of the node with the largest."""
    size = local_world_size()
    return max(sum(of_ranks[i : i + size]) for i in range(0, len(of_ranks), size))


# What the dry run says of this machine -------------------------------------------------------------------------------


def watch_memory(args: argparse.Namespace, num_rows: int, world: World) -> MemoryWatch:
    """The watch of this run. Raises ValueError if a GPU or the host cannot hold it."""
    setup = setup_of_machine(args, num_rows, world)
    if setup is None:
        return MemoryWatch(world, {})
    if world.device.type == "cuda":
        check_fit(setup, torch.cuda.mem_get_info()[0])
    return MemoryWatch(world, predicted_bytes(setup, world))


def setup_of_machine(args: argparse.Namespace, num_rows: int, world: World) -> Setup | None:
    """The run on the hardware that is here; None for what the planner's formulas do not cover."""
    if args.dtype == "float32":
        return None
    here = copy.copy(args)
    here.plan_gpus, here.plan_nodes = world.num_trainers, launched_world_size() // local_world_size()
    is_cuda = world.device.type == "cuda"
    here.plan_gpu_memory_gib = (torch.cuda.mem_get_info()[1] if is_cuda else meter.host_bytes()) / GIB
    here.plan_host_memory_gib, here.plan_rows = meter.host_bytes() / GIB, num_rows
    try:
        return setup_of(here, load_config(args.model))
    except ValueError:
        return None


def check_fit(setup: Setup, free: float) -> None:
    """Raises ValueError if tensors alone, without what the dry run keeps in reserve, are more than there is.

    `free`: bytes of this rank's GPU that nobody has taken.
    """
    advice = "Start the same command with --dry_run: it names the fewest changes that make the run fit."
    for name, phase in gpu_phases(setup).items():
        if phase.live > free:
            has = f"{free / GIB:.1f} of a GPU's {setup.hardware.gpu_bytes / GIB:.1f} are free"
            needs = f"{phase.live / GIB:.1f} GiB, and {has}"
            raise ValueError(f"the run does not fit: by the formulas of the dry run, {name} needs {needs}. {advice}")
    if sequences_at_once(setup) < 1:
        share = f"--gpu_memory_utilization {setup.engine.gpu_memory_utilization:g}"
        cache = f"no cache for one sequence of {setup.engine.max_model_len} tokens"
        raise ValueError(f"the run does not fit: beside the weights, {share} leaves the engine {cache}. {advice}")
    for name, parts in host_phases(setup).items():
        needed = sum(without(parts, "processes").values())
        if needed > setup.hardware.host_bytes:
            needs = f"{needed / GIB:.0f} GiB of host RAM on a node, which has {setup.hardware.host_bytes / GIB:.0f}"
            raise ValueError(f"the run does not fit: by the formulas of the dry run, {name} needs {needs}. {advice}")


def predicted_bytes(setup: Setup, world: World) -> dict[str, float]:
    """Phase of the loop -> bytes of a rank, and "host" -> bytes of a node."""
    phases = gpu_phases(setup)

    def of(phase: Phase) -> float:
        if world.device.type == "cuda":
            return phase.needed
        return sum(phase.trainer.values()) + on_cpu

    on_cpu = 0.0
    if world.device.type == "cpu":  # what libraries take is there already; the engine never sleeps
        tp = setup.run.tensor_parallel_size
        cache = cpu_cache_bytes(load_config(setup.model.name), setup.engine.max_model_len, COMPUTE, tp)
        on_cpu = meter.peak_resident() + setup.model.parameters * COMPUTE / tp + cache
    found = {name: [of(phases[each]) for each in known if each in phases] for name, known in PHASES.items()}
    host = max(sum(parts.values()) for parts in host_phases(setup).values())
    return {name: max(values) for name, values in found.items() if values} | {"host": host}
