"""The memory that each phase of a step takes at its peak, for the log; where it runs out, a sentence ends the run.

On CUDA a phase's figure is all that is taken on the GPU: what torch holds, the engine awake or asleep, CUDA's own. On
the CPU it is the resident memory of the rank.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from batch import Metrics
from fsdp_utils import World, gather_from_ranks
from run import Observer
from runtime.rank import local_world_size
from runtime.ways_out import WAYS_OUT

GIB = 2**30
# Phases with a figure of their own. What comes before the first one is "load": also the engine's start.
PHASES = ("load", "sample", "logprobs", "update", "sync", "evaluate", "checkpoint")
INNER_PHASES = {"pack": "update", "sleep": "sync"}  # phase without figures of its own -> the one that has its flags
# torch, its allocators and CUDA's libraries have no common class of errors; cudaError 2 is one.
NO_MEMORY = re.compile(
    r"out of memory|can(?:no|')t allocate memory|unable to allocate|bad_alloc|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Registering memory failed with cudaError: 2\b|gpu.memory.utilization",  # the last of vLLM's start
    re.IGNORECASE,
)


class MemoryWatch(Observer):
    """Peaks of the phases of this rank's step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_cuda = world.device.type == "cuda"
        self.current: str | None = "load"
        self.peaks: dict[str, tuple[int, int]] = {}  # phase -> bytes taken, bytes of them that tensors or engine hold
        self.host_peak = 0

    @contextmanager
    def phase(self, name: str, step: int = 0) -> Iterator[None]:
        """Keeps the peak of the block; a phase that is not in `PHASES` belongs to the one around it.

        Raises MemoryError with a sentence in the place of an error that says that memory ran out.
        """
        outer = self.current
        if name == "sync" and self.is_cuda:  # as the engine does when it wakes: the peak counts what follows
            torch.cuda.empty_cache()
        self._note()
        self.current = name if name in PHASES else outer
        try:
            yield
        except (MemoryError, RuntimeError, OSError, ValueError) as error:
            # A MemoryError with a cause is such a sentence: of the engine, or of an inner phase.
            is_sentence = isinstance(error, MemoryError) and error.__cause__ is not None
            lacks_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY.search(str(error))
            if is_sentence or not lacks_memory:
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
        """`memory/` metrics since the last call, in GiB: the same on every rank; all ranks call it."""
        ranks = gather_from_ranks((self.peaks, self.host_peak + resident_of_children()))
        found = {}
        for name in self.peaks:
            taken, held = max(peaks.get(name, (0, 0)) for peaks, _ in ranks)
            found[f"memory/{name}_gib"] = taken / GIB
            if self.is_cuda:
                found[f"memory/{name}_allocated_gib"] = held / GIB
        found["memory/peak_gib"] = max(found.values(), default=0.0)
        found["memory/host_gib"] = largest_node([on_host for _, on_host in ranks]) / GIB
        self.peaks, self.host_peak = {}, 0
        return found

    def _sentence(self, name: str, error: BaseException) -> str:
        """The place where memory ran out, the flags to change, and what the error says of the size.

        On a GPU it names those for the host's memory, too: CUDA does not always tell whose memory it was.
        """
        advice = WAYS_OUT.get(INNER_PHASES.get(name, name), WAYS_OUT["host"])[not self.is_cuda]
        if self.is_cuda:
            advice += f"; if it was the host's, {WAYS_OUT['host'][0]}"
        first_line = str(error).partition("\n")[0]
        return f"memory ran out on rank {self.world.trainer_rank} in phase {name}; {advice} ({first_line})."


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
