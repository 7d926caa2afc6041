"""The memory that control groups of both versions leave to a run."""

from types import SimpleNamespace

import pytest

from inputs import machine

GIB = 2**30
JOB, TOP = "cgroup/slurm/job_7", "cgroup/memory/memory"
VERSION_2 = {  # the limit is that of a group around
    "proc/self/cgroup": "0::/slurm/job_7/step_0",
    f"{JOB}/memory.max": str(40 * GIB),
    f"{JOB}/step_0/memory.max": "max",
}
UNLIMITED = {f"{TOP}.limit_in_bytes": str(2**63 - 4096), "proc/self/cgroup": "4:memory:/"}  # beyond all memory


def version_1(own: str) -> dict[str, str]:
    """In a container that sees its own group as the top."""
    return {f"{TOP}.limit_in_bytes": str(20 * GIB), "proc/self/cgroup": f"5:cpu,cpuacct:/\n4:memory:{own}\n0::/"}


@pytest.mark.parametrize(("files", "expected"), [
    ({}, 100 * GIB),
    (VERSION_2, 40 * GIB),
    (version_1("/docker/abc"), 20 * GIB),
    (version_1("/../outside"), 20 * GIB),
    (UNLIMITED, 100 * GIB),
])  # fmt: skip
def test_the_lowest_limit_of_node_and_groups_counts(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(total=100 * GIB))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert machine.host_bytes() == expected
