"""The memory that is left to this process: of the node, and of the control groups that a container or Slurm puts it in.

Linux, both versions of control groups. No torch: a launcher may ask, too.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
VERSIONS = [  # 2 and 1; files of a group: its limit, what it uses, its events
    ("memory.max", "memory.current", "memory.events"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
]
CACHED = [("inactive_file", "active_file"), ("total_inactive_file", "total_active_file")]  # by version; files can go


def available_bytes() -> tuple[int, int]:
    """(bytes left, bytes in all) of the node or of the group around this process that has the smallest share left."""
    node = _table(PROC / "meminfo")
    bounds = [(1024 * node["MemAvailable"], 1024 * node["MemTotal"])]
    for group in _groups():
        for (limit, usage, _), cached in zip(VERSIONS, CACHED, strict=True):
            with contextlib.suppress(OSError, ValueError):  # of the other version, or "max": no limit
                total = int((group / limit).read_text())
                stat = _table(group / "memory.stat")
                free = total - int((group / usage).read_text()) + sum(stat.get(name, 0) for name in cached)
                bounds.append((free, total))
    return min(bounds, key=lambda bound: bound[0] / bound[1])


def host_bytes() -> int:
    """RAM that this process may use: of the node, or the lowest limit of a group around it."""
    limits = [1024 * _table(PROC / "meminfo")["MemTotal"]]
    for file in [group / version[0] for group in _groups() for version in VERSIONS]:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return min(limits)


def oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory so far: in this process's group, else on the node.

    None where the kernel does not count them. A figure that grew while a process was killed names the killer.
    """
    for file in [*(group / version[2] for group in _groups() for version in VERSIONS), PROC / "vmstat"]:
        with contextlib.suppress(OSError):
            if (count := _table(file).get("oom_kill")) is not None:
                return count
    return None


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


def _table(file: Path) -> dict[str, int]:
    """Name -> number of a file with lines like "MemTotal: 24684084 kB" or "oom_kill 0"."""
    pairs = [line.split()[:2] for line in file.read_text().splitlines() if line.strip()]
    return {name.rstrip(":"): int(value) for name, value in pairs if value.isdigit()}
