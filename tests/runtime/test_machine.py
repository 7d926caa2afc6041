"""The launch fits the machine, or is refused in one sentence; what a machine announces but cannot do is left alone.

GPUs are faked by what torch says of them.
"""

import os
import re
import socket
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from io import StringIO

import pytest
import torch

import fsdp_utils
import serve
from fsdp_utils import allocator_settings
from gate import load_inputs as load
from helpers.made_up import flags
from helpers.runs import PROGRAMS, run_command, torchrun
from runtime import machine
from runtime.machine import check_launch, choose_interface, interface_of, prepare_cpu

GIB = 2**30


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch see 8 H100 and torchrun's start of 8 ranks; takes changes of what torch says."""

    def fake(count=8, name="NVIDIA H100 80GB HBM3", capability=(9, 0), free=78 * GIB, init=lambda: None):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 79 * GIB))

    for name, value in (("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "8"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    fake()
    return fake


def check(**asked: object) -> None:
    check_launch(**{"tp_size": 1, "dtype": "bfloat16", "gpu_memory_utilization": 0.6} | asked)


def too_old() -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nSee https://...")


V100, SLICE = "Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
REFUSED = [  # what torch says, number of ranks, what is asked for, what the sentence says
    ({}, 1, {}, "8 GPUs are visible but the world size is 1: start it .*--ranks 8 .*CUDA_VISIBLE_DEVICES=0"),
    ({"count": 2}, 8, {}, "8 processes were started on this node, but only 2 GPUs are visible"),
    ({}, 8, {"dtype": "float32"}, "--dtype float32: packed attention on CUDA computes in bfloat16"),
    ({"init": too_old}, 8, {}, r"driver has 8 GPUs, but torch cannot use them \(The NVIDIA .*12040.*Update the driver"),
    ({"name": V100, "capability": (7, 0)}, 8, {}, r"GPU 3 \(Tesla .*\) has compute capability 7.0; bfloat16"),
    ({"name": SLICE}, 8, {}, "is a MIG slice, which NCCL does not connect to others; start one rank"),
    ({"free": 40 * GIB}, 8, {}, "GPU 3 .* 39.0 of 79.0 GiB are taken by other .*utilization 0.6 wants 47.4"),
]
TAKEN = [
    ({}, 8, {"tp_size": 4}, None),
    ({"free": 40 * GIB}, 8, {"gpu_memory_utilization": 0.5}, None),
    ({"count": 1, "name": SLICE}, 1, {}, None),
    ({}, 16, {"tp_size": 8}, None),  # all ranks of a node of several
]


@pytest.mark.parametrize(("seen", "num_ranks", "asked", "said"), REFUSED + TAKEN)
def test_a_launch_that_does_not_fit_the_gpus_is_refused(seen, num_ranks, asked, said, gpus, monkeypatch):
    """A launch that does not fit the GPUs is refused in a sentence."""
    gpus(**seen)
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(num_ranks, 8)))
    with pytest.raises(ValueError, match=f"^.*{said}.*$") if said else nullcontext():  # one line
        check(**asked)


SERVERS = [  # what torch says, GPUs of a server, what the sentence says; None: it is started as on GPUs
    ({}, 8, None),
    ({"free": 40 * GIB}, 1, r"GPU 0 .* are taken by other .*utilization 0.9 wants 71.1"),
    ({"count": 2}, 4, "--tensor_parallel_size 4: only 2 GPUs are visible"),
    ({"init": too_old}, 1, r"driver has 8 GPUs, but torch cannot use them \(The NVIDIA .*12040.*Update the driver"),
    ({"name": V100, "capability": (7, 0)}, 2, r"GPU 0 \(Tesla .*\) has compute capability 7.0; bfloat16"),
    ({"name": SLICE}, 2, "is a MIG slice, which NCCL does not connect to others"),
    ({"count": 0}, 1, "no GPU: as on a CPU"),
]


@pytest.mark.parametrize(("seen", "tp_size", "said"), SERVERS)
def test_a_server_that_does_not_fit_the_gpus_is_refused_too(seen, tp_size, said, gpus, policy, monkeypatch):
    """A server that does not fit the GPUs is refused as a run is. With an old driver, for one, its GPU build would
    be started with a CPU's options.
    """
    gpus(**{"free": 79 * GIB} | seen)
    flags_of_it = f"serve.py --model {policy} --max_model_len 64 --tensor_parallel_size {tp_size} --dtype bfloat16"
    monkeypatch.setattr("sys.argv", flags_of_it.split())
    monkeypatch.setattr(os, "execve", lambda program, command, environment: print(*command))
    monkeypatch.delenv("RANK", raising=False)
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors, suppress(SystemExit):
        serve.main()
    if seen == {"count": 0}:
        assert '{"backend": "gloo"}' in out.getvalue()
    elif said is None:
        assert '{"backend": "nccl_with_deadline"}' in out.getvalue()
    else:
        assert re.fullmatch(f"error: .*{said}.*\n", errors.getvalue()) and not out.getvalue()


def test_a_servers_flags_are_checked_before_torch_is_imported():
    """The flags of a server are checked before torch is imported. That takes seconds, on a busy machine a
    minute.
    """
    program = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('scripts/serve.py', run_name='__main__')"
    for wrong, said in (
        ("--model m", "the following arguments are required: --max_model_len"),
        ("--model m --max_model_len 0", "--max_model_len 0: must be at least 1"),
        ("--model /nowhere --max_model_len 8", "--model '/nowhere': no such folder"),
    ):
        done = run_command([sys.executable, "-c", program, *wrong.split()])
        assert done.returncode and done.stderr.startswith(f"error: {said}")


def test_a_silent_gpu_driver_does_not_mean_a_run_on_the_cpu(gpus, monkeypatch, tmp_path):
    """GPUs whose driver does not answer are an error, and no reason to run on the CPU. After an upgrade of the
    driver without a restart: neither nvidia-smi nor CUDA see a GPU.
    """
    for address in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / "gpus" / address).mkdir(parents=True)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\n")
    monkeypatch.setattr(machine, "DRIVER", tmp_path)
    gpus(count=0, init=too_old)
    with pytest.raises(ValueError, match=r"the driver has 2 GPUs.*found version 12040.*; driver 570.86.15\)"):
        check()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check()  # the user wants the CPU


def test_lost_gpus_and_a_missing_compiler_or_header_are_named(gpus, monkeypatch, tmp_path):
    """GPUs that CUDA leaves out, a missing compiler and missing headers are each named."""
    counts = iter([8, 1])
    for called, answer, words in (
        ("torch.cuda.device_count", lambda: next(counts), r"has 8 GPUs, but CUDA can use 1 \(of MIG slices CUDA"),
        ("shutil.which", lambda _: None, "need a C compiler, and gcc or clang was not found; install gcc"),
        ("sysconfig.get_path", lambda _: str(tmp_path), r"Python.h, which is missing; install python3\.\d+-dev"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=words):
            patch.setattr(called, answer)
            check()


def test_without_a_cpp_compiler_compile_is_refused_on_a_cpu(policy, monkeypatch):
    monkeypatch.setenv("CXX", "no_such_compiler")
    load_flags = flags(model=policy, compile=True)
    with pytest.raises(
        ValueError, match=r"--compile needs a C\+\+ compiler on CPUs, and no_such_compiler was not found"
    ):
        load.load_inputs(load_flags)


def test_allocators_keep_the_users_settings(monkeypatch):
    """Allocators keep the user's settings, and expand their segments only after the engine is built."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    for is_expandable in (False, True):
        settings = allocator_settings(is_expandable)
        assert {f"expandable_segments:{is_expandable}", "max_split_size_mb:512"} <= set(settings.split(","))
        assert "pinned" not in settings, "with it torch 2.13 hands out blocks that are too small"
        torch._C._accelerator_setAllocatorSettings(settings)  # the names are known to this torch
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")  # by the user
    assert "expandable_segments:False" in allocator_settings(is_expandable=True)
    torch._C._accelerator_setAllocatorSettings("")


def test_threads_of_a_gpu_rank_are_its_share_of_the_cores(gpus, monkeypatch):
    """The threads of a rank on GPUs are its share of the cores, not torchrun's one."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # by torchrun
    machine.use_all_cores()
    assert os.environ["OMP_NUM_THREADS"] == "8" and chosen == [8], "vLLM respects the variable"


def test_a_gpu_rank_sets_its_allocator_its_threads_and_device(gpus, monkeypatch):
    """A rank on a GPU starts with its allocator, threads and device."""
    called = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called.append(str(device)))
    monkeypatch.setattr(fsdp_utils, "set_allocator", lambda is_expandable: called.append(is_expandable))
    monkeypatch.setattr(fsdp_utils, "use_all_cores", lambda: called.append("cores"))
    monkeypatch.setattr(fsdp_utils, "meeting_point", lambda rank, size: torch.distributed.HashStore())
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: called.append(backend))
    world = fsdp_utils.init_world(tp_size=1, timeout_minutes=1)
    assert called == ["cuda:3", False, "cores", "cpu:gloo,cuda:nccl"]
    assert world.device == torch.device("cuda", 3)


def test_only_the_main_process_fetches_weights_before_ranks_meet(policy, monkeypatch, tmp_path):
    """The main process alone fetches the weights, before the ranks meet. Else the others would wait for a download
    in a collective, and its time-out would end the run.
    """
    fetched = []
    monkeypatch.setattr(load, "weight_files", lambda path: fetched.append(path) or [])
    files = {"model": policy, "train_data": policy / "train.jsonl", "out_dir": tmp_path}
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        load.load_inputs(flags(**files, max_prompt_tokens=8, max_completion_tokens=12)).grader.close()
        assert fetched == ([str(policy)] if rank == "0" else [])


def test_a_silent_gpu_driver_does_not_mean_a_cpu_installation(tmp_path):
    """A driver that does not answer is no reason to install for the CPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    program.chmod(0o755)
    for device, status, error in (
        ("", 2, "says: Failed to initialize NVML: Driver/library version mismatch. Mend the driver, or set DEVICE=cpu"),
        ("cpu", 0, ""),
    ):
        environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "DEVICE": device}
        done = run_command(["bash", "scripts/setup.sh"], environment)
        assert done.returncode == status and error in done.stderr


# Several nodes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(monkeypatch):
    """A start on two nodes of which this is one."""
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")  # restored after the test
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(("environment", "chosen"), [
    ({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "8"}, "lo"),  # a single node stays on the loopback
    ({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}, "ib0"),  # by the user
    ({"MASTER_ADDR": "first-node"}, "eth7"),  # under a name of the loopback: its real interface
])  # fmt: skip
def test_nodes_talk_over_the_interface_to_the_first_node(environment, chosen, nodes, monkeypatch):
    """Nodes talk over the interface that leads to the first one."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if environment["MASTER_ADDR"] == "first-node":
        answers = {"first-node": "127.0.0.1", "192.0.2.1": "10.0.0.5"}
        monkeypatch.setattr(machine, "own_address", answers.__getitem__)
        monkeypatch.setattr(machine, "interface_of", {"10.0.0.5": "eth7", "127.0.0.1": "lo"}.__getitem__)
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == chosen
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={chosen}", "NCCL reads the beginning of a name, but for this"


def test_an_unreachable_main_address_is_refused(nodes, monkeypatch):
    """An address that leads nowhere is refused, and interfaces are found by their address."""
    monkeypatch.setenv("MASTER_ADDR", "no-such-node.invalid")
    with pytest.raises(ValueError, match="MASTER_ADDR=no-such-node.invalid cannot be reached from"):
        choose_interface()
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.7") is None


def test_a_late_main_process_is_waited_for(tmp_path):
    """A late main process is waited for beyond the time-out, and a folder that a node lacks is named."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    torchrun(2, PROGRAMS, "late_start", tmp_path / "first", tmp_path / "second")
    assert not list(tmp_path.glob("*/.seen_by_all_*"))
    for rank, name in enumerate(("first", "second")):
        error = (tmp_path / "first" / f"error_of_rank_{rank}").read_text()
        other = f"{tmp_path / name} on the first node is not what {socket.gethostname()} has under this name"
        assert error == f"--out_dir: {other}; it must be on a file system that all nodes share."


# The CPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "AVX2", "AVX512_CORE_AMX"])
def test_amx_is_left_alone_unless_the_user_names_it(given, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", given or "")
    if not given:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    prepare_cpu()
    assert torch.cpu._is_amx_tile_supported() is (given == "AVX512_CORE_AMX")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == (given or "AVX512_CORE_BF16")
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == os.environ["LRU_CACHE_CAPACITY"] == "64"
