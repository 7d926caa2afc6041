"""The memory that a run takes, phase by phase, beside what the dry run predicts: the loop's door to it.

`watch_memory` refuses a run that cannot fit, before its weights are read. `Run` calls the other
functions of the watch. On CUDA a phase's figure is all that is taken on the GPU: what torch holds,
the engine awake or asleep, CUDA's own. On the CPU it is the resident memory of the rank.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from batch import Metrics
from fsdp_utils import World, gather_from_ranks
from model.sizes import cpu_cache_bytes
from model.weights import load_config
from plan.dry_run import setup_of
from plan.memory import (
    ENGINE,
    FRAGMENTATION,
    checkpoint_bytes,
    disk_bytes,
    gpu_phases,
    host_phases,
    misfits,
    needed,
    total,
    without,
)  # fmt: skip
from plan.setup import GIB, Setup
from run import Observer
from runtime.machine import host_bytes, local_world_size

# Phase of the loop -> phases of the planner. What comes before the first phase is "load": also the
# engine's start.
PHASES = {
    "load": ("load", "rollout"),
    "sample": ("rollout",),
    "logprobs": ("logprobs",),
    "update": ("update", "optimizer"),
    "sync": ("sync", "rollout"),  # at its end the engine is awake
    "evaluate": ("rollout",),
    "checkpoint": (),
}
INNER_PHASES = {"pack": "update", "sleep": "sync"}  # phase without figures of its own -> the one that has its flags
NEAR = 0.95  # the share of the limit that is warned of
# CPU, fitted to runs of 135 M parameters: the engine's libraries, and what the allocator keeps of the weights that vLLM
# has repacked, as a share of them.
ENGINE_LIBRARIES, KEPT_WEIGHTS = GIB / 3, 0.5
RANKS, ENGINE_SHARE = "start fewer ranks", "lower --gpu_memory_utilization"
BATCH, PASSES = "lower --micro_batch_tokens", "lower --micro_batch_tokens, add --gradient_checkpointing"
WAYS_OUT = {  # phase -> what to change: on a GPU; on a CPU, where there is nothing to offload
    "load": (f"{ENGINE_SHARE}, or give --offload optimizer", f"{RANKS}, or give --param_dtype bfloat16"),
    "sample": (ENGINE_SHARE, f"lower --max_completion_tokens, or {RANKS}"),
    "evaluate": (ENGINE_SHARE, f"lower --eval_max_completion_tokens, or {RANKS}"),
    "sync": (ENGINE_SHARE, RANKS),
    "logprobs": (f"{BATCH}, or add --offload_reference", BATCH),
    "update": (f"{PASSES}, or --offload optimizer", f"{PASSES}, or give --param_dtype bfloat16"),
    "checkpoint": (BATCH, RANKS),
    "host": ("use less of --offload, or fewer --reward_workers", f"{RANKS}, or fewer --reward_workers"),
}
# torch, its allocators and CUDA's libraries have no common class of errors; cudaError 2 is
# cudaErrorMemoryAllocation.
NO_MEMORY = re.compile(
    r"out of memory|can(?:no|')t allocate memory|unable to allocate|bad_alloc|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Registering memory failed with cudaError: 2\b",
    re.IGNORECASE,
)


class MemoryWatch(Observer):
    """Peaks of the phases of this rank's step, and what they are compared with."""

    def __init__(self, world: World, predicted: dict[str, float]) -> None:
        """`predicted`: phase -> bytes of a rank, and "host" -> bytes of a node; {}: not known for this model."""
        self.world = world
        self.is_cuda = world.device.type == "cuda"
        self.host_limit = host_bytes()
        self.limit = torch.cuda.mem_get_info()[1] if self.is_cuda else self.host_limit / local_world_size()
        self.predicted = predicted
        self.current: str | None = "load"
        self.peaks: dict[str, tuple[int, int]] = {}  # phase -> bytes taken, bytes of them that tensors or engine hold
        self.host_peak = 0
        self.is_reported = False
        self.warned: set[str] = set()  # phases that were warned of

    @contextmanager
    def phase(self, name: str, step: int = 0) -> Iterator[None]:
        """Keeps the peak of the block; a phase without a name in `PHASES` belongs to the one around it.

        Raises MemoryError with a sentence in the place of an error that says that memory ran out.
        """
        outer = self.current
        if name == "sync" and self.is_cuda:  # as the engine does when it wakes: the peak is that of what follows
            torch.cuda.empty_cache()
        self._note()
        self.current = name if name in PHASES else outer
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            # A MemoryError with a cause is such a sentence: the engine's, or that of a phase
            # inside.
            is_sentence = isinstance(error, MemoryError) and error.__cause__ is not None
            if is_sentence or not lacks_memory(error):
                raise
            raise MemoryError(self._sentence(name, error)) from error
        self._note()
        self.current = None if outer == "load" and name != "load" else outer

    def _note(self) -> None:
        """Adds the peak since the last call to the phase that it belongs to."""
        self.host_peak = max(self.host_peak, peak_resident())
        if self.current is not None:
            self.peaks[self.current] = max(self.peaks.get(self.current, (0, 0)), peak(self.world.device))
        restart(self.world.device)

    def step(self, step: int, metrics: Metrics) -> Metrics:
        metrics = self.metrics()
        for remark in self.remarks(metrics):
            if self.world.is_main:
                print(remark, flush=True)
        return metrics

    def metrics(self) -> dict[str, float]:
        """`memory/` metrics since the last call, in GiB: the same on every rank; all ranks call it."""
        ranks = gather_from_ranks((self.peaks, self.host_peak + resident_of_children()))
        metrics = {}
        for name in self.peaks:
            taken, held = max(peaks.get(name, (0, 0)) for peaks, _ in ranks)
            metrics[f"memory/{name}_gib"] = taken / GIB
            if self.is_cuda:
                metrics[f"memory/{name}_allocated_gib"] = held / GIB
        metrics["memory/peak_gib"] = max(metrics.values(), default=0.0)
        metrics["memory/host_gib"] = largest_node([on_host for _, on_host in ranks]) / GIB
        self.peaks, self.host_peak = {}, 0
        return metrics

    def remarks(self, metrics: dict[str, float]) -> list[str]:
        """After the first update, prediction against truth; and a warning for each phase that comes near the limit."""
        remarks = []
        if not self.is_reported and "memory/update_gib" in metrics:
            self.is_reported = True
            remarks.append(self._report(metrics))
        for name in (*PHASES, "host"):
            limit = (self.host_limit if name == "host" else self.limit) / GIB
            taken = metrics.get(f"memory/{name}_gib", 0)
            if taken > NEAR * limit and name not in self.warned:
                self.warned.add(name)
                remarks.append(
                    f"warning: {name} takes {taken:.1f} of {limit:.1f} GiB; "
                    f"before memory runs out: {self._ways_out(name)}."
                )
        return remarks

    def _ways_out(self, name: str) -> str:
        """The flags to change for a phase of the loop, or for the "host"."""
        on_gpu, on_cpu = WAYS_OUT.get(INNER_PHASES.get(name, name), WAYS_OUT["host"])
        return on_gpu if self.is_cuda else on_cpu

    def _sentence(self, name: str, error: BaseException) -> str:
        """Where memory ran out, which flag to change, and what the error says, for example of the size."""
        kind = memory_kind(error, self.is_cuda)
        advice = self._ways_out("host" if kind == "host" and self.is_cuda else name)
        if kind == "GPU or pinned host":
            advice += f"; or {self._ways_out('host')}"
        first_line = str(error).partition("\n")[0]
        rank = self.world.trainer_rank
        return f"{kind} memory ran out on rank {rank} in phase {name}; {advice} ({first_line})."

    def _report(self, metrics: dict[str, float]) -> str:
        """The peaks of the phases, each beside its prediction."""
        figures = []
        for name in (*PHASES, "host"):
            if f"memory/{name}_gib" in metrics:
                figure = f"{name} {metrics[f'memory/{name}_gib']:.2f}"
                if name in self.predicted:
                    figure += f" ({self.predicted[name] / GIB:.2f})"
                figures.append(figure)
        where = "GPU" if self.is_cuda else "rank"
        known = "in brackets what the dry run predicts" if self.predicted else "the dry run has no figures for it"
        return f"memory, GiB per {where} at the peak, host per node; {known}: {', '.join(figures)}"


# How much is taken, and what is said when there is none left -------------------------------------------------------


def restart(device: torch.device) -> None:
    """Lets peaks be counted from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # where the kernel does not allow it, the peak is that since the start
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> tuple[int, int]:
    """(bytes taken on the GPU, bytes of them that are in use) at the peak. On the CPU twice what is resident."""
    if device.type == "cpu":
        return peak_resident(), peak_resident()
    free, size = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)  # they count what a sleeping engine has given back: only differences hold
    reserved, allocated = stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]
    taken = size - free + reserved - stats["reserved_bytes.all.current"]
    return taken, taken - (reserved - allocated)


def peak_resident() -> int:
    """Resident bytes of this process at their peak."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def resident_of_children() -> int:
    """Bytes of the processes below this one, which grade. Pages that they share count in each."""
    size = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            size += child.memory_info().rss
    return size


def largest_node(bytes_by_rank: list[int]) -> int:
    """The bytes of the node with the most: the sum over its ranks."""
    size = local_world_size()
    return max(sum(bytes_by_rank[i : i + size]) for i in range(0, len(bytes_by_rank), size))


def lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY.search(str(error)) is not None


def memory_kind(error: BaseException, is_cuda: bool) -> str:
    """Which memory ran out: "GPU", "host", or "GPU or pinned host" where CUDA does not tell."""
    text = str(error)
    if not is_cuda or "Registering memory" in text:
        return "host"
    if isinstance(error, torch.OutOfMemoryError) or re.search("GPU memory|CUBLAS|cumem", text):
        return "GPU"
    return "GPU or pinned host" if "CUDA" in text else "host"


# What the dry run says of this machine -------------------------------------------------------------------------------


def watch_memory(
    args: argparse.Namespace, num_rows: int, world: World, most_sequences: int | None = None
) -> MemoryWatch:
    """The watch of this run. Raises ValueError if a GPU, the host or the disk cannot hold it."""
    memory = MemoryWatch(world, {})
    here = argparse.Namespace(**vars(args) | {"plan_gpus": None, "plan_nodes": None, "plan_rows": num_rows})
    try:
        setup = setup_of(here, load_config(args.model))
    except ValueError:  # the formulas do not cover the model
        return memory
    gpu_bytes = memory.limit if memory.is_cuda else memory.host_limit
    hardware = replace(setup.hardware, gpu_bytes=gpu_bytes, host_bytes=memory.host_limit)
    setup = replace(setup, hardware=hardware)
    if memory.is_cuda:
        check_fit(setup, torch.cuda.mem_get_info()[0])
    check_disk(setup, Path(args.out_dir))
    memory.predicted = predicted_bytes(setup, world, most_sequences)
    return memory


def check_fit(setup: Setup, free: float) -> None:
    """Raises ValueError if tensors alone are more than there is. `free`: bytes of this GPU that nobody has taken."""
    if sentences := misfits(setup, free):
        raise ValueError(
            f"the run does not fit, by the formulas of the dry run: {sentences[0]}; "
            "start the same command with --dry_run: it names the fewest changes that make the run fit."
        )


def check_disk(setup: Setup, out_dir: Path) -> None:
    """Raises ValueError, on all ranks, if the checkpoints of the run need more than is free and what they hold already.

    A quota is not seen here.
    """
    files = [*out_dir.glob("step_*/**/*"), *out_dir.glob("unfinished_step_*/**/*")]
    held, free = gather_from_ranks((sum(file.lstat().st_size for file in files), shutil.disk_usage(out_dir).free))[0]
    size = disk_bytes(setup)
    if size > held + free:
        raise ValueError(
            f"the run does not fit on the disk: {setup.run.num_checkpoints} checkpoints of "
            f"{checkpoint_bytes(setup) / GIB:.3g} GiB need {size / GIB:.3g} GiB, and --out_dir {str(out_dir)!r} has "
            f"{free / GIB:.3g} free and holds {held / GIB:.3g} of checkpoints; make room, choose another folder, "
            "or keep fewer (--keep_checkpoints, at least 1; 0 keeps all)."
        )


def predicted_bytes(setup: Setup, world: World, most_sequences: int | None = None) -> dict[str, float]:
    """Phase of the loop -> bytes of a rank, and "host" -> bytes of a node. On a CPU without the reserve."""
    phases, on_host = gpu_phases(setup), host_phases(setup)
    if world.device.type == "cuda":
        sizes = {name: needed(parts) for name, parts in phases.items()}
        host = max(map(total, on_host.values()))
    else:  # what libraries take is there already; nothing is pinned; the engine never sleeps
        tp, ranks = setup.run.tensor_parallel_size, setup.hardware.ranks_per_node
        demand = setup.engine.max_model_len, setup.compute_bytes, tp, most_sequences
        # Beside the embedding and the head, vLLM keeps a repacked copy of each.
        weights = ((1 + KEPT_WEIGHTS) * setup.weight_bytes + 2 * setup.table_bytes) / tp
        engine = weights + cpu_cache_bytes(load_config(setup.model.name), *demand) + ENGINE_LIBRARIES
        engine = 0 if setup.has_servers else engine
        there = total(without(on_host["run"], "processes", "rounding of pinned memory")) / ranks
        there += peak_resident() + engine
        sizes = {name: FRAGMENTATION * total(without(parts, *ENGINE)) + there for name, parts in phases.items()}
        host = (max(sizes.values()) + resident_of_children()) * ranks
    predicted = {}
    for phase, known in PHASES.items():
        if values := [sizes[name] for name in known if name in sizes]:
            predicted[phase] = max(values)
    return predicted | {"host": host}
