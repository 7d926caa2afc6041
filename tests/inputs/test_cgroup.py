"""What control groups of both versions say of memory: the limit, and what is left."""

from types import SimpleNamespace

import pytest

from inputs import cgroup

GIB = 2**30
JOB, TOP = "cgroup/slurm/job_7", "cgroup/memory/memory"
VERSION_2 = {  # the limit is that of a group around; cached files count as left: Linux drops them before it kills
    "proc/self/cgroup": "0::/slurm/job_7/step_0",
    f"{JOB}/memory.max": str(40 * GIB), f"{JOB}/memory.current": str(38 * GIB),
    f"{JOB}/memory.stat": f"anon {30 * GIB}\ninactive_file {2 * GIB}\nactive_file {3 * GIB}",
    f"{JOB}/step_0/memory.max": "max", f"{JOB}/step_0/memory.current": str(38 * GIB),
    f"{JOB}/step_0/memory.stat": "anon 0",
}  # fmt: skip
VERSION_1 = {f"{TOP}.limit_in_bytes": str(20 * GIB), f"{TOP}.usage_in_bytes": str(19 * GIB)} | {
    f"{TOP}.stat": f"cache 5\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0"
}
UNLIMITED = {f"{TOP}.limit_in_bytes": str(2**63 - 4096), f"{TOP}.usage_in_bytes": str(GIB)}  # beyond all memory
OF_NODE = (60 * GIB, 100 * GIB)


@pytest.mark.parametrize(("files", "expected"), [
    ({}, OF_NODE),
    (VERSION_2, (7 * GIB, 40 * GIB)),
    # In a container that sees its own group as the top.
    *((VERSION_1 | {"proc/self/cgroup": f"5:cpu,cpuacct:/\n4:memory:{own}\n0::/"}, (1.5 * GIB, 20 * GIB))
      for own in ("/docker/abc", "/../outside")),
    (UNLIMITED | {f"{TOP}.stat": "total_cache 0", "proc/self/cgroup": "4:memory:/"}, OF_NODE),
])  # fmt: skip
def test_the_smallest_share_of_node_and_groups_counts(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroup, "CGROUPS", tmp_path / "cgroup")
    node = SimpleNamespace(available=OF_NODE[0], total=OF_NODE[1])
    monkeypatch.setattr(cgroup.psutil, "virtual_memory", lambda: node)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert (cgroup.available_bytes(), cgroup.host_bytes()) == (expected, expected[1])


def test_this_machine_is_read():
    left, total = cgroup.available_bytes()
    assert 0 < left <= total <= 2**62 and cgroup.host_bytes() > 2**28
