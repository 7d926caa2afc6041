"""How much memory is taken: on a GPU, in host RAM. And which errors say that there is none left."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil
import torch

from planner.setup import GIB

# torch, its allocators and CUDA's libraries have no common class of errors; cudaError 2 is cudaErrorMemoryAllocation.
SAID = re.compile(
    r"out of memory|can(?:no|')t allocate memory|unable to allocate|bad_alloc|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Registering memory failed with cudaError: 2\b",
    re.IGNORECASE,
)
ASKED = re.compile(r"allocate (\d+ bytes|[\d.]+ [KMGTP]?i?B)\b")


def restart(device: torch.device) -> None:
    """Peaks are counted from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # where the kernel does not allow it, the peak is that since the start
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> tuple[int, int]:
    """(bytes taken on the GPU, bytes of them that are in use) at the peak. On the CPU twice what is resident."""
    if device.type == "cpu":
        return peak_resident(), peak_resident()
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)  # they count what a sleeping engine has given back: only differences hold
    reserved, allocated = stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]
    taken = total - free + reserved - stats["reserved_bytes.all.current"]
    return taken, taken - (reserved - allocated)


def peak_resident() -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def resident_of_children() -> int:
    """Bytes of the processes below this one, which grade. Pages that they share count in each."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            total += child.memory_info().rss
    return total


def lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or SAID.search(str(error)) is not None


def place_of(error: BaseException, is_cuda: bool) -> str:
    """Which memory ran out: "GPU", "host", or "GPU or pinned host" where CUDA does not tell."""
    text = str(error)
    if not is_cuda or "Registering memory" in text:
        return "host"
    if isinstance(error, torch.OutOfMemoryError) or "GPU memory" in text or "CUBLAS" in text:
        return "GPU"
    return "GPU or pinned host" if "CUDA" in text else "host"


def asked_for(error: BaseException) -> str:
    """The size that could not be had, for example "2.00 GiB"."""
    if (found := ASKED.search(str(error))) is None:
        return "a size that the error does not tell"
    size, _, unit = found[1].partition(" ")
    return f"{int(size) / GIB:.2f} GiB" if unit == "bytes" else found[1]
