"""The memory that this process may use: of the node, or of the control groups that a container or Slurm puts it in.

Linux, both versions of control groups.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of versions 2 and 1


def host_bytes() -> int:
    """RAM that this process may use: of the node, or the lowest limit of a group around it."""
    limits = [psutil.virtual_memory().total]
    for file in [group / name for group in _groups() for name in LIMITS]:
        with contextlib.suppress(OSError, ValueError):  # of the other version, or "max": no limit
            limits.append(int(file.read_text()))
    return min(limits)


def _groups() -> list[Path]:
    """The folders of this process's group and of those around it, as far as they can be seen, innermost first."""
    found = []
    with contextlib.suppress(OSError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                top = CGROUPS / controllers
                own = top / path.lstrip("/")
                around = [own, *own.parents][: len(own.parts) - len(top.parts)]
                found += [folder for folder in [*around, top] if folder.is_dir()]
    return found
