"""The memory that is left to this process: of the node, and of the control groups that a container or Slurm puts it in.

Linux, both versions of control groups.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
VERSIONS = [  # 2 and 1; files of a group: its limit, what it uses; prefix in its statistics
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
]


def available_bytes() -> tuple[int, int]:
    """(bytes left, bytes in all) of the node or of the group around this process that has the smallest share left."""
    return min(_bounds(), key=lambda bound: bound[0] / bound[1])


def host_bytes() -> int:
    """RAM that this process may use: of the node, or the lowest limit of a group around it."""
    return min(total for _, total in _bounds())


def _bounds() -> list[tuple[int, int]]:
    """(bytes left, bytes in all) of the node, and of each group around this process that has a limit."""
    node = psutil.virtual_memory()
    bounds = [(node.available, node.total)]
    for group in _groups():
        for limit, usage, prefix in VERSIONS:
            with contextlib.suppress(OSError, ValueError):  # of the other version, or "max": no limit
                total, used = int((group / limit).read_text()), int((group / usage).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))  # they can go
                bounds.append((total - used + files, total))
    return bounds


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
