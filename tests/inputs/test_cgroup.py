"""What control groups of both versions say of memory: limits, what is left, how many processes Linux has killed."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from inputs import cgroup

GIB = 2**30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes files of /proc and /sys/fs/cgroup: a node of 100 GiB, of which 60 are available."""
    monkeypatch.setattr(cgroup, "PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroup, "CGROUPS", tmp_path / "cgroup")
    node = SimpleNamespace(available=60 * GIB, total=100 * GIB)
    monkeypatch.setattr(cgroup.psutil, "virtual_memory", lambda: node)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")

    return write


def test_without_groups_the_node_counts(system):
    assert cgroup.available_bytes() == (60 * GIB, 100 * GIB)
    assert cgroup.host_bytes() == 100 * GIB
    assert cgroup.oom_kills() is None
    system({"proc/vmstat": "nr_free_pages 12\noom_kill 3"})
    assert cgroup.oom_kills() == 3


def test_version_2_the_limit_may_be_that_of_a_group_around(system):
    """Cached files count as left: Linux drops them before it kills."""
    job = "cgroup/slurm/job_7"
    system({
        "proc/self/cgroup": "0::/slurm/job_7/step_0", "proc/vmstat": "oom_kill 9",
        f"{job}/memory.max": str(40 * GIB), f"{job}/memory.current": str(38 * GIB),
        f"{job}/memory.stat": f"anon {30 * GIB}\ninactive_file {2 * GIB}\nactive_file {3 * GIB}",
        f"{job}/step_0/memory.max": "max", f"{job}/step_0/memory.current": str(38 * GIB),
        f"{job}/step_0/memory.stat": "anon 0", f"{job}/step_0/memory.events": "low 0\noom 4\noom_kill 2",
    })  # fmt: skip
    assert cgroup.available_bytes() == (7 * GIB, 40 * GIB)
    assert cgroup.host_bytes() == 40 * GIB
    assert cgroup.oom_kills() == 2


@pytest.mark.parametrize("own", ["/docker/abc", "/../outside"])
def test_version_1_in_a_container_that_sees_its_own_group_as_the_top(own, system):
    system({
        "proc/self/cgroup": f"5:cpu,cpuacct:/\n4:memory:{own}\n0::/",
        "cgroup/memory/memory.limit_in_bytes": str(20 * GIB), "cgroup/memory/memory.usage_in_bytes": str(19 * GIB),
        "cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0",
        "cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1",
    })  # fmt: skip
    assert cgroup.available_bytes() == (1.5 * GIB, 20 * GIB)
    assert cgroup.host_bytes() == 20 * GIB
    assert cgroup.oom_kills() == 1


def test_no_limit_of_version_1_is_a_number_beyond_all_memory(system):
    system({
        "proc/self/cgroup": "4:memory:/", "cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "cgroup/memory/memory.usage_in_bytes": str(GIB), "cgroup/memory/memory.stat": "total_cache 0",
    })  # fmt: skip
    assert cgroup.available_bytes() == (60 * GIB, 100 * GIB)
    assert cgroup.host_bytes() == 100 * GIB


def test_this_machine_is_read_without_torch():
    code = "import sys; from inputs.cgroup import *; print(*available_bytes(), host_bytes(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    left, total, node, has_torch = done.stdout.split()
    assert 0 < int(left) <= int(total) <= 2**62 and int(node) > 2**28 and has_torch == "False"
