"""What a run says when memory runs out, on a GPU or in host RAM: where, who holds it, and what was predicted.

`MemoryWatch.phase` makes one `OutOfMemory` of every such error that leaves a phase of the loop.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

from inputs.cgroup import available_bytes
from planner import meter
from planner.setup import GIB

ROOT = Path(__file__).parent.parent
# torch, its allocators and CUDA's libraries have no common class of errors; cudaError 2 is cudaErrorMemoryAllocation.
SAID = re.compile(
    r"out of memory|can(?:no|')t allocate memory|unable to allocate|bad_alloc|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Registering memory failed with cudaError: 2\b",
    re.IGNORECASE,
)
ASKED = re.compile(r"allocate (\d+ bytes|[\d.]+ [KMGTP]?i?B)\b")
COUNTERS = "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current"
ENGINE = {  # phase -> what it does on CUDA; in all others it is awake
    "load": "being started", "sleep": "going to sleep", "pack": "asleep", "logprobs": "asleep", "advantage": "asleep",
    "update": "asleep", "sync": "waking up",
}  # fmt: skip


class OutOfMemory(MemoryError):
    """The report of it; the last line is a sentence with the flags to change."""


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
    """The size that could not be had, as "2.00 GiB", say."""
    if (found := ASKED.search(str(error))) is None:
        return "a size that the error does not tell"
    size, _, unit = found[1].partition(" ")
    return f"{int(size) / GIB:.2f} GiB" if unit == "bytes" else found[1]


def line_of(error: BaseException) -> str:
    """The innermost line of this program that the error came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(ROOT) and ".venv" not in file.parts:
            return f"{file.relative_to(ROOT)}:{frame.lineno}, {frame.name}"
    return "outside this program"


def describe_host() -> str:
    left, total = available_bytes()
    rank, below, pinned = meter.status_bytes("self", "VmRSS"), meter.resident_of_children(), meter.pinned_bytes()
    pinned_too = f", {pinned / GIB:.2f} of it pinned" if pinned else ""
    own = f"this rank has {rank / GIB:.2f}{pinned_too}, the processes below it {below / GIB:.2f}"
    return f"host, GiB: {left / GIB:.2f} of {total / GIB:.2f} are left; {own}"


def describe_gpu(device: torch.device, phase: str) -> list[str]:
    """The allocator's state, in lines. Blocks: of torch's own pool, without those of the engine and of CUDA graphs."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    allocated, peak, reserved = (stats[name] / GIB for name in COUNTERS)
    segments = [x for x in torch.cuda.memory_snapshot() if tuple(x.get("segment_pool_id", (0, 0))) == (0, 0)]
    blocks = sorted((block["size"], block["state"]) for segment in segments for block in segment["blocks"])
    used = [f"{size / GIB:.2f}" for size, state in reversed(blocks) if state == "active_allocated"]
    unused = max((size for size, state in blocks if state == "inactive"), default=0) / GIB
    return [
        f"GPU, GiB: {free / GIB:.2f} of {total / GIB:.2f} are free; the engine is {ENGINE.get(phase, 'awake')}",
        f"torch, GiB: allocated {allocated:.2f} (peak {peak:.2f}), reserved {reserved:.2f}",
        f"blocks, GiB: largest in use {', '.join(used[:5]) or 'none'}; largest unused {unused:.2f}",
    ]
