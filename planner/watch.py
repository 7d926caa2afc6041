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
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from fsdp_utils import World, gather_from_ranks
from inputs.cgroup import available_bytes, host_bytes
from inputs.command_line import exit_with_error
from inputs.machine import local_world_size
from model.sizes import cpu_cache_bytes
from model.weights import load_config
from planner import meter
from planner.advice import misfits
from planner.dry_run import setup_of
from planner.memory import checkpoint_bytes, disk_bytes, gpu_phases, host_phases, without
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
SECONDS_BETWEEN_LOOKS = 1.0  # at it; a look takes half a millisecond
FEWER = "start fewer ranks"
LESS = "lower --gpu_memory_utilization"
BATCH, SMALLER = "lower --micro_batch_tokens", "lower --micro_batch_tokens, add --gradient_checkpointing"
WAYS_OUT = {  # phase -> what to change: on a GPU; on a CPU, where there is nothing to offload
    "load": (f"{LESS}, or give --offload optimizer", f"{FEWER}, or give --param_dtype bfloat16"),
    "sample": (LESS, f"lower --max_completion_tokens, or {FEWER}"),
    "evaluate": (LESS, f"lower --eval_max_completion_tokens, or {FEWER}"),
    "sync": (LESS, FEWER),
    "logprobs": (f"{BATCH}, or add --offload_reference", BATCH),
    "update": (f"{SMALLER}, or --offload optimizer", f"{SMALLER}, or give --param_dtype bfloat16"),
    "checkpoint": (BATCH, FEWER),
    "host": ("use less of --offload, or fewer --reward_workers", f"{FEWER}, or fewer --reward_workers"),
}

Peaks = dict[str, tuple[int, int]]  # phase -> bytes taken at its peak, and bytes of them that tensors or engine hold


class OutOfMemory(MemoryError):
    """One sentence, with the flags to change."""


class MemoryWatch:
    """Peaks of the phases of this rank's step, and what they are compared with."""

    def __init__(self, world: World, predicted: dict[str, float]) -> None:
        """`predicted`: phase -> bytes of a rank, and "host" -> bytes of a node; {}: not known for this model."""
        self.world = world
        self.is_cuda = world.device.type == "cuda"
        self.host_limit, share = host_bytes(), host_bytes() / local_world_size()
        self.limit = torch.cuda.mem_get_info(world.device)[1] if self.is_cuda else share
        self.predicted = predicted
        self.current: str | None = "load"
        self.peaks: Peaks = {}
        self.host_peak = 0
        self.has_reported = False
        self.warned: set[str] = set()
        self.next_look = 0.0 if os.environ.get("LOCAL_RANK", "0") == "0" else math.inf  # by the clock

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

        Raises OutOfMemory in the place of an error that says that memory ran out.
        """
        outer = self.current
        if name == "sync" and self.is_cuda:  # as the engine does when it wakes: the peak is that of what comes
            torch.cuda.empty_cache()
        self._note()
        self.current = name if name in PHASES else outer
        try:
            yield
        except OutOfMemory:  # of a phase inside
            raise
        except (MemoryError, RuntimeError, OSError) as error:
            if not meter.lacks_memory(error):
                raise
            raise OutOfMemory(self._out_of_memory(name, error)) from error
        self._note()
        self._warn_of_low_memory(name)
        self.current = None if outer == "load" and name != "load" else outer

    def _note(self) -> None:
        """Adds the peak since the last call to the phase that it belongs to."""
        self.host_peak = max(self.host_peak, meter.peak_resident())
        if self.current is not None:
            before, now = self.peaks.get(self.current, (0, 0)), meter.peak(self.world.device)
            self.peaks[self.current] = max(before, now)
        meter.restart(self.world.device)

    def metrics(self) -> dict[str, float]:
        """`memory/` metrics since the last call, in GiB: the same on every rank; all ranks call it."""
        of_ranks = gather_from_ranks((self.peaks, self.host_peak + meter.resident_of_children(), meter.pinned_bytes()))
        found = {}
        for name in self.peaks:
            taken, held = max(peaks.get(name, (0, 0)) for peaks, _, _ in of_ranks)
            found[f"memory/{name}_gib"] = taken / GIB
            if self.is_cuda:
                found[f"memory/{name}_allocated_gib"] = held / GIB
        found["memory/peak_gib"] = max(found.values(), default=0.0)
        found["memory/host_gib"] = largest_node([each for _, each, _ in of_ranks]) / GIB
        if self.is_cuda:
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
                near = f"{name} takes {taken / GIB:.1f} of {limit / GIB:.1f} GiB"
                said.append(f"warning: {near}; before memory runs out: {self._ways_out(name)}.")
        return said

    def _ways_out(self, name: str) -> str:
        """The flags to change for a phase of the loop, or for the "host"."""
        ways = WAYS_OUT.get(name, WAYS_OUT["update" if name == "pack" else "host"])
        return ways[0 if self.is_cuda else 1]

    def _warn_of_low_memory(self, name: str) -> None:
        """Once, on the first rank of a node: what Linux kills for lack of memory gets no chance to say so."""
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
        left, total = available_bytes()
        if left < LOW * total:
            self.next_look = math.inf
            where = f"after phase {name}, {left / GIB:.2f} of {total / GIB:.2f} GiB of host RAM are left"
            way_out = self._ways_out("host")
            print(f"warning: {where}; at 0 Linux kills a rank without a word: {way_out}.", file=sys.stderr, flush=True)

    def _out_of_memory(self, name: str, error: BaseException) -> str:
        """Where memory ran out, what was asked for, and which flag to change."""
        if isinstance(error, MemoryError) and error.__cause__ is not None:
            return str(error)  # the engine's own sentence, which knows more
        place = meter.place_of(error, self.is_cuda)
        ways = [self._ways_out(name)] if place != "host" or not self.is_cuda else []
        ways += [self._ways_out("host")] if "host" in place and self.is_cuda else []
        asked = f"{meter.asked_for(error)} in phase {name}"
        return f"{place} memory ran out on rank {self.world.trainer_rank}, asked for {asked}; {'; or '.join(ways)}."

    def _report(self, metrics: dict[str, float]) -> str:
        where = "GPU" if self.is_cuda else "rank"
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
    here = argparse.Namespace(**vars(args) | {"plan_gpus": None, "plan_nodes": None, "plan_rows": num_rows})
    try:
        setup = setup_of(here, load_config(args.model))
    except ValueError:
        return None
    host = host_bytes()
    gpu = torch.cuda.mem_get_info()[1] if world.device.type == "cuda" else host
    return replace(setup, hardware=replace(setup.hardware, gpu_bytes=gpu, host_bytes=host))


def check_fit(setup: Setup, free: float) -> None:
    """Raises ValueError if tensors alone are more than there is. `free`: bytes of this GPU that nobody has taken."""
    if found := misfits(setup, free):
        advice = "start the same command with --dry_run: it names the fewest changes that make the run fit"
        raise ValueError(f"the run does not fit, by the formulas of the dry run: {found[0]}; {advice}.")


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
    """Phase of the loop -> bytes of a rank, and "host" -> bytes of a node. On a CPU without what is kept in reserve."""
    phases, on_host = gpu_phases(setup), host_phases(setup)
    if world.device.type == "cuda":
        sizes = {name: phase.needed for name, phase in phases.items()}
        host = max(sum(parts.values()) for parts in on_host.values())
    else:  # what libraries take is there already; nothing is pinned; the engine never sleeps
        tp, ranks = setup.run.tensor_parallel_size, setup.hardware.gpus // setup.hardware.nodes
        cache = cpu_cache_bytes(load_config(setup.model.name), setup.engine.max_model_len, COMPUTE, tp)
        engine = 0 if setup.has_servers else setup.model.parameters * COMPUTE / tp + cache
        there = sum(without(on_host["run"], "processes", "rounding of pinned memory").values()) / ranks
        there += meter.peak_resident() + engine
        sizes = {name: sum(phase.trainer.values()) + there for name, phase in phases.items()}
        host = max(sizes.values()) * ranks
    found = {name: [sizes[each] for each in known if each in sizes] for name, known in PHASES.items()}
    return {name: max(values) for name, values in found.items() if values} | {"host": host}
