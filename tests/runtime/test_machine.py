"""A rank's share of its machine: cores, memory, network, what its CPU can do."""

import os
import shutil
import socket
import time
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pytest
import torch

import fsdp_utils
from gate import agreement
from helpers.runs import CALL, ROOT, name_of, run_command, torchrun
from runtime import machine


def test_allocators_keep_the_users_settings(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    for is_expandable in (False, True):
        settings = fsdp_utils.allocator_settings(is_expandable)
        assert {f"expandable_segments:{is_expandable}", "max_split_size_mb:512"} <= set(settings.split(","))
        assert "pinned" not in settings, "with it torch 2.13 hands out blocks that are too small"
        torch._C._accelerator_setAllocatorSettings(settings)  # the names are known to this torch
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")  # by the user
    assert "expandable_segments:False" in fsdp_utils.allocator_settings(is_expandable=True)
    torch._C._accelerator_setAllocatorSettings("")


def test_a_silent_gpu_driver_does_not_mean_a_cpu_installation(tmp_path):
    said = "Failed to initialize NVML: Driver/library version mismatch"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{said}'\nexit 18\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    for device, status, error in (("", 2, f"says: {said}. Mend the driver, or set DEVICE=cpu"), ("cpu", 0, "")):
        environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "DEVICE": device}
        done = run_command(["bash", "scripts/setup.sh"], environment)
        assert done.returncode == status and error in done.stderr


FAKE_PYTHON = """#!/bin/sh
case "$*" in
    "-m venv"*) echo made >> made; sleep 1; mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/pip ;;
    *purelib*) echo .venv ;;
esac
"""


def test_two_starts_in_one_folder_make_one_installation(tmp_path):
    """As of two nodes. The second waits for the first, and no run holds the lock."""
    scripts = [ROOT / "scripts" / name for name in ("setup.sh", "torchvision_on_cpu.py")]
    for file in [*ROOT.glob("requirements*.txt"), *scripts]:
        (copy := tmp_path / file.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(file, copy)
    (python := tmp_path / "python").write_text(FAKE_PYTHON)
    python.chmod(0o755)
    command = ["bash", "-c", "source scripts/setup.sh; ! ls -l /proc/$$/fd | grep .venv.lock"]
    environment = os.environ | {"PYTHON": str(python), "DEVICE": "cpu"}
    starts = [Popen(command, cwd=tmp_path, env=environment, stdout=PIPE, text=True) for _ in range(2)]
    said = [start.communicate(timeout=60)[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0]
    assert (tmp_path / "made").read_text() == "made\n" and sorted(map(bool, said)) == [False, True]


@pytest.fixture
def nodes(monkeypatch):
    """A start on two nodes of which this is one."""
    for name, value in (("WORLD_SIZE", "16"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("environment", "chosen"), [
    ({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "8"}, "lo"),  # a single node stays on the loopback
    ({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}, "ib0"),  # by the user
    ({"MASTER_ADDR": "first-node"}, "eth7"),  # under a name of the loopback: its real interface
])  # fmt: skip
def test_nodes_talk_over_the_interface_to_the_first_node(environment, chosen, nodes, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if environment["MASTER_ADDR"] == "first-node":
        answers = {"first-node": "127.0.0.1", "192.0.2.1": "10.0.0.5"}
        monkeypatch.setattr(machine, "own_address", answers.__getitem__)
        monkeypatch.setattr(machine, "interface_of", {"10.0.0.5": "eth7", "127.0.0.1": "lo"}.__getitem__)
    machine.choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == chosen
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={chosen}", "NCCL reads the beginning of a name, but for this"


def test_an_unreachable_main_address_is_refused(nodes, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "no-such-node.invalid")
    with pytest.raises(ValueError, match="MASTER_ADDR=no-such-node.invalid cannot be reached from"):
        machine.choose_interface()
    assert (machine.interface_of("127.0.0.1"), machine.interface_of("198.51.100.7")) == ("lo", None)


def late_start(first: str, second: str) -> None:
    """On two ranks: the main process comes when the other has waited for three hours, and the nodes do not share a
    folder. An hour goes by on the clock of the other rank each time that it waits.
    """
    rank, has_waited, waits = int(os.environ["RANK"]), Path(first).parent / "has_waited", []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            has_waited.touch()
        time.sleep(seconds)

    if rank == 0:
        while not has_waited.exists():
            time.sleep(0.05)
    else:
        fsdp_utils.time = SimpleNamespace(sleep=wait, monotonic=lambda: 3600.0 * len(waits))
    fsdp_utils.init_world(tp_size=1, timeout_minutes=1)
    fsdp_utils.time = time
    agreement.SHOWN_SECONDS = 0.5
    try:
        agreement.check_shared(Path((first, second)[rank]))
    except ValueError as error:
        (Path(first) / f"error_of_rank_{rank}").write_text(str(error))
    fsdp_utils.close_world()


def test_a_late_main_process_is_waited_for(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    torchrun(2, CALL, name_of(late_start), tmp_path / "first", tmp_path / "second")
    assert not list(tmp_path.glob("*/.seen_by_all_*"))
    for rank, name in enumerate(("first", "second")):
        error = (tmp_path / "first" / f"error_of_rank_{rank}").read_text()
        other = f"{tmp_path / name} on the first node is not what {socket.gethostname()} has under this name"
        assert error == f"--out_dir: {other}; it must be on a file system that all nodes share."


@pytest.mark.parametrize("given", [None, "AVX2", "AVX512_CORE_AMX"])
def test_amx_is_left_alone_unless_the_user_names_it(given, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", given or "")
    if not given:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    machine.prepare_cpu()
    assert torch.cpu._is_amx_tile_supported() is (given == "AVX512_CORE_AMX")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == (given or "AVX512_CORE_BF16")
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == os.environ["LRU_CACHE_CAPACITY"] == "64"
