"""How much memory is taken: on a GPU by torch, the engine and CUDA; in host RAM by a process and those below it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from model.optimizer import PINNED_IN_PLACE


class GpuMeter:
    """What is taken on this rank's GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total = torch.cuda.mem_get_info(device)[1]

    def release(self) -> None:
        """Gives back what torch holds in reserve, as the engine does when it wakes: the peak is that of what comes."""
        torch.cuda.empty_cache()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> tuple[int, int]:
        """(bytes taken, bytes of them that are in use) at the peak since the restart.

        torch also counts what a sleeping engine has given back, so its own figures are used for differences alone.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats(self.device)
        reserved, allocated = stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]
        taken = total - free + reserved - stats["reserved_bytes.all.current"]
        return taken, taken - (reserved - allocated)


class HostMeter:
    """What is resident of this rank."""

    total = 0  # no limit of its own

    def release(self) -> None: ...

    def restart(self) -> None: ...

    def peak(self) -> tuple[int, int]:
        return peak_resident(), peak_resident()


def status_bytes(pid: int | str, field: str) -> int:
    """A field of /proc/PID/status; 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def peak_resident() -> int:
    return status_bytes("self", "VmHWM")


def restart_peak_resident() -> None:
    with contextlib.suppress(OSError):  # where the kernel does not allow it, the peak is that since the start
        Path("/proc/self/clear_refs").write_text("5")


def resident_of_children() -> int:
    """Of the processes below this one: those that grade. Pages that they share count in each."""
    total, parents = 0, ["self"]
    while parents:
        pid = parents.pop()
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found = file.read_text().split()
                total += sum(status_bytes(child, "VmRSS") for child in found)
                parents += found
    return total


def pinned_bytes() -> int:
    """Host RAM that is page-locked for this rank: torch's blocks, and the optimizer's state."""
    blocks = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if torch.cuda.is_available() else 0
    return blocks + sum(PINNED_IN_PLACE)
