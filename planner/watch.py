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
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fsdp_utils import World, gather_from_ranks
from inputs.cgroup import available_bytes, host_bytes
from inputs.checks import launched_world_size
from inputs.command_line import exit_with_error
from inputs.machine import local_world_size
from model.sizes import cpu_cache_bytes
from model.weights import load_config
from planner import meter
from planner.dry_run import setup_of
from planner.memory import Phase, checkpoint_bytes, disk_bytes, gpu_phases, host_phases, sequences_at_once, without
from planner.out_of_memory import (
    OutOfMemory,
    asked_for,
    describe_gpu,
    describe_host,
    lacks_memory,
    line_of,
    place_of,
)
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
LOW = 0.03  # of the node's or the container's memory left: Linux may soon kill a rank, which then can say nothing
SECONDS_BETWEEN_LOOKS = 1.0  # at it
WAYS_OUT = {  # phase -> what to change
    "load": "lower --gpu_memory_utilization, or give --offload optimizer or --param_dtype bfloat16",
    "sample": "lower --gpu_memory_utilization",
    "evaluate": "lower --gpu_memory_utilization",
    "sync": "lower --gpu_memory_utilization",
    "logprobs": "lower --micro_batch_tokens, or add --offload_reference",
    "update": "lower --micro_batch_tokens, add --gradient_checkpointing, or --offload optimizer",
    "checkpoint": "lower --micro_batch_tokens",
    "host": "use less of --offload, or fewer --reward_workers",
}
WAYS_OUT_ON_CPU = {  # where there is nothing to offload
    "load": "start fewer ranks, or give --param_dtype bfloat16",
    "sample": "lower --max_completion_tokens, or start fewer ranks",
    "evaluate": "lower --eval_max_completion_tokens, or start fewer ranks",
    "sync": "start fewer ranks",
    "logprobs": "lower --micro_batch_tokens",
    "update": "lower --micro_batch_tokens, add --gradient_checkpointing, or give --param_dtype bfloat16",
    "checkpoint": "start fewer ranks",
    "host": "start fewer ranks, or fewer --reward_workers",
}

Peaks = dict[str, tuple[int, int]]  # phase -> bytes taken at its peak, and bytes of them that tensors or engine hold


class MemoryWatch:
    """Peaks of the phases of this rank's step, and what they are compared with."""

    def __init__(self, world: World, predicted: dict[str, float]) -> None:
        """`predicted`: phase -> bytes of a rank, and "host" -> bytes of a node; {}: not known for this model."""
        self.world = world
        self.meter = meter.GpuMeter(world.device) if world.device.type == "cuda" else meter.HostMeter()
        self.host_limit = host_bytes()
        self.limit = self.meter.total or self.host_limit / local_world_size()
        self.predicted = predicted
        self.current: str | None = "load"
        self.peaks: Peaks = {}
        self.highest: dict[str, int] = {}  # phase -> bytes taken at its peak since the start
        self.host_peak = 0
        self.has_reported = False
        self.warned: set[str] = set()
        self.next_look = 0.0  # at the memory that is left, by the clock

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The phase before the first one. It also ends the run in a sentence if weights do not fit config.json."""
        try:
            with self.phase("load"):
                yield
        except ValueError as error:
            exit_with_error(error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keeps the peak of the block; a phase without a name in `PHASES` belongs to the one around it.

        Raises OutOfMemory, with a report, in the place of an error that says that memory ran out.
        """
        outer = self.current
        if name == "sync":
            self.meter.release()
        self._note()
        self.current = name if name in PHASES else outer
        try:
            yield
        except OutOfMemory:  # of a phase inside
            raise
        except (MemoryError, RuntimeError, OSError) as error:
            if not lacks_memory(error):
                raise
            raise OutOfMemory(self._out_of_memory(name, error)) from error
        self._note()
        self._warn_of_low_memory(name)
        self.current = None if outer == "load" and name != "load" else outer

    def _note(self) -> None:
        """Adds the peak since the last call to the phase that it belongs to."""
        self.host_peak = max(self.host_peak, meter.peak_resident())
        if self.current is not None:
            before, now = self.peaks.get(self.current, (0, 0)), self.meter.peak()
            self.peaks[self.current] = max(before, now)
            self.highest[self.current] = max(self.highest.get(self.current, 0), now[0])
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
                said.append(f"warning: {near}; before it runs out: {self._ways_out(name)}.")
        return said

    def _ways_out(self, name: str) -> str:
        """The flags to change for a phase of the loop, or for the "host"."""
        ways = WAYS_OUT if self.meter.total else WAYS_OUT_ON_CPU
        return ways.get(name, ways["update" if name == "pack" else "host"])

    def _warn_of_low_memory(self, name: str) -> None:
        """Once, on the first rank of a node: what Linux kills for lack of memory gets no chance to say so."""
        if "left" in self.warned or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        if time.monotonic() < self.next_look:  # a look takes half a millisecond
            return
        self.next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
        left, total = available_bytes()
        if left < LOW * total:
            self.warned.add("left")
            where = f"after phase {name}, {left / GIB:.2f} of {total / GIB:.2f} GiB of host RAM are left"
            way_out = self._ways_out("host")
            print(f"warning: {where}; at 0 Linux kills a rank without a word: {way_out}.", file=sys.stderr, flush=True)

    def _out_of_memory(self, name: str, error: BaseException) -> str:
        """The report: where, what was asked for, who holds the memory, and a sentence that says what to change."""
        self._note()
        place, rank = place_of(error, self.meter.total > 0), self.world.trainer_rank
        found = {f"memory/{phase}_gib": taken / GIB for phase, taken in self.highest.items()}
        lines = [f"out of memory on rank {rank} in phase {name}, at {line_of(error)}; asked for {asked_for(error)}"]
        lines += describe_gpu(self.world.device, name) if self.meter.total else []
        lines += [describe_host(), self._report(found)]
        ways = [self._ways_out(name)] if place != "host" or not self.meter.total else []
        ways += [self._ways_out("host")] if "host" in place and self.meter.total else []
        sentence = f"{place} memory ran out on rank {rank} in phase {name}; {'; or '.join(ways)}."
        if isinstance(error, MemoryError) and error.__cause__ is not None:
            sentence = str(error)  # the engine's, which knows more
        return "\n  ".join(lines) + f"\n{sentence}"

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
    """The watch of this run. Raises ValueError if a GPU, the host or the disk cannot hold it."""
    setup = setup_of_machine(args, num_rows, world)
    if setup is None:
        return MemoryWatch(world, {})
    if world.device.type == "cuda":
        check_fit(setup, torch.cuda.mem_get_info()[0])
    check_disk(setup, Path(args.out_dir))
    return MemoryWatch(world, predicted_bytes(setup, world))


def setup_of_machine(args: argparse.Namespace, num_rows: int, world: World) -> Setup | None:
    """The run on the hardware that is here; None for what the planner's formulas do not cover."""
    if args.dtype == "float32":
        return None
    here = copy.copy(args)
    here.plan_gpus, here.plan_nodes = world.num_trainers, launched_world_size() // local_world_size()
    is_cuda = world.device.type == "cuda"
    here.plan_gpu_memory_gib = (torch.cuda.mem_get_info()[1] if is_cuda else host_bytes()) / GIB
    here.plan_host_memory_gib, here.plan_rows = host_bytes() / GIB, num_rows
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
        if phase.live > free and name != "server":  # whose GPU is another one
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


def check_disk(setup: Setup, out_dir: Path) -> None:
    """Raises ValueError, on all ranks, if the checkpoints of the run need more than is free and what they hold already.

    A quota is not seen here.
    """
    files = (file for pattern in ("step_*", "unfinished_step_*") for file in out_dir.glob(f"{pattern}/**/*"))
    held, free = gather_from_ranks((sum(file.lstat().st_size for file in files), shutil.disk_usage(out_dir).free))[0]
    one, needed = checkpoint_bytes(setup), disk_bytes(setup)
    if needed > held + free:
        count = f"{setup.run.num_checkpoints} checkpoints of {one / GIB:.3g} GiB need {needed / GIB:.3g} GiB"
        has = f"--out_dir {str(out_dir)!r} has {free / GIB:.3g} free and holds {held / GIB:.3g} of checkpoints"
        advice = "make room, choose another folder, or keep fewer (--keep_checkpoints, at least 1; 0 keeps all)"
        raise ValueError(f"the run does not fit on the disk: {count}, and {has}; {advice}.")


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
        of_engine = 0 if setup.has_servers else setup.model.parameters * COMPUTE / tp + cache
        on_cpu = meter.peak_resident() + of_engine
    found = {name: [of(phases[each]) for each in known if each in phases] for name, known in PHASES.items()}
    host = max(sum(parts.values()) for parts in host_phases(setup).values())
    return {name: max(values) for name, values in found.items() if values} | {"host": host}
