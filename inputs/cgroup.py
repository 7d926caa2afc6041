"""The memory that is left to this process: of the node, and of the control groups that a container or Slurm puts it in.

Linux, both versions of control groups. No torch: a launcher may ask, too.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
VERSIONS = [  # 2 and 1; files of a group: its limit, what it uses, its events; prefix in its statistics
    ("memory.max", "memory.current", "memory.events", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_"),
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
        for limit, usage, _, prefix in VERSIONS:
            with contextlib.suppress(OSError, ValueError):  # of the other version, or "max": no limit
                total, used = int((group / limit).read_text()), int((group / usage).read_text())
                stat = _table(group / "memory.stat")
                cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)  # files can go
                bounds.append((total - used + cached, total))
    return bounds


def oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory so far: in this process's group, else on the node.

    None where the kernel does not count them. A figure that grew while a process was killed names the killer.
    """
    for file in [*(group / version[2] for group in _groups() for version in VERSIONS), PROC / "vmstat"]:
        with contextlib.suppress(OSError, ValueError):
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
    """Name -> number of a file with lines like "oom_kill 0"."""
    return {name: int(value) for name, value in map(str.split, file.read_text().splitlines())}
