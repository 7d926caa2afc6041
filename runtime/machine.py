"""Whether the launch fits the machine, what memory it leaves to the run, and what it announces but cannot do.

Each check ends the run in one sentence before any weight is read. docs/hardware.md explains those of GPUs.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

import psutil
import torch

from runtime.start import check_divides, launched_world_size

GIB = 2**30
DRIVER = Path("/proc/driver/nvidia")  # what it says of itself


def check_launch(tp_size: int, dtype: str, gpu_memory_utilization: float, server_gpus: int = 0) -> None:
    """Raises ValueError if GPUs stay idle, are too few or cannot be used. `server_gpus`: how many servers take."""
    world_size, local_size = launched_world_size(), local_world_size()
    num_gpus = usable_gpus()
    if num_gpus > local_size + server_gpus:
        raise ValueError(
            f"{num_gpus} GPUs are visible but the world size is {world_size}: "
            f"start it with its script or scripts/launch.py --ranks {num_gpus} {Path(sys.argv[0]).name} ..., "
            f"or hide the others with CUDA_VISIBLE_DEVICES={','.join(map(str, range(local_size)))}."
        )
    if 0 < num_gpus < local_size + server_gpus:
        for_servers = f" and {server_gpus} GPUs are for servers" if server_gpus else ""
        raise ValueError(
            f"{local_size} processes were started{for_servers} on this node, "
            f"but only {num_gpus} GPUs are visible; a MIG slice is none."
        )
    if num_gpus and dtype == "float32":
        raise ValueError("--dtype float32: packed attention on CUDA computes in bfloat16; give --dtype bfloat16.")
    check_divides("--tensor_parallel_size", tp_size, "the world size", world_size)
    if num_gpus:
        check_gpu(int(os.environ.get("LOCAL_RANK", "0")), world_size, gpu_memory_utilization)


def check_server(tp_size: int, gpu_memory_utilization: float) -> bool:
    """Whether a server runs on GPUs. Raises ValueError if these are too few or cannot be used."""
    num_gpus = usable_gpus()
    if 0 < num_gpus < tp_size:
        raise ValueError(f"--tensor_parallel_size {tp_size}: only {num_gpus} GPUs are visible.")
    for index in range(tp_size if num_gpus else 0):
        check_gpu(index, tp_size, gpu_memory_utilization)
    return num_gpus > 0


def usable_gpus() -> int:
    """The number of GPUs that this process sees. Raises ValueError if it could not use them."""
    num_gpus, num_installed = torch.cuda.device_count(), len(list(DRIVER.glob("gpus/*")))
    is_hidden = not torch.version.cuda or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if num_gpus or (num_installed and not is_hidden):  # the driver has some, but answers nobody
        check_driver(num_gpus or num_installed)
        check_compiler()
    return num_gpus


def local_world_size() -> int:
    """Processes that the launcher started on this node; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_driver(num_gpus: int) -> None:
    """Raises ValueError if torch cannot use all GPUs that the driver has: else the run would be one on the CPU."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        file = DRIVER / "version"
        version = re.search(r" (\d+\.[\d.]+) ", file.read_text()) if file.exists() else None
        raise ValueError(
            f"the driver has {num_gpus} GPUs, but torch cannot use them "
            f"({str(error).splitlines()[0]}; driver {version[1] if version else 'unknown'}): "
            f"torch {torch.__version__} was made for CUDA {torch.version.cuda} (13 needs driver 580 or newer). "
            "Update the driver; "
            "for a run on the CPU use DEVICE=cpu bash scripts/setup.sh and set CUDA_VISIBLE_DEVICES= (empty)."
        ) from None
    if (usable := torch.cuda.device_count()) < num_gpus:
        raise ValueError(
            f"the driver has {num_gpus} GPUs, but CUDA can use {usable} "
            f"(of MIG slices CUDA uses one, of failed GPUs none); start {usable} ranks."
        )


def check_compiler() -> None:
    """Raises ValueError if Triton, which vLLM's kernels on CUDA need, could not build its launcher."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton looks for them
    if not any(map(shutil.which, compilers)):
        raise ValueError(f"vLLM's kernels need a C compiler, and {' or '.join(compilers)} was not found; install gcc.")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        version = sysconfig.get_python_version()
        raise ValueError(f"vLLM's kernels need {header}, which is missing; install python{version}-dev (or -devel).")


def check_cpp_compiler() -> None:
    """Raises ValueError if --compile could not build its kernels on a CPU."""
    compiler = os.environ.get("CXX", "g++")  # as torch looks for it
    if not shutil.which(compiler):
        raise ValueError(
            f"--compile needs a C++ compiler on CPUs, and {compiler} was not found; "
            "install g++, set CXX, or leave the flag out."
        )


def check_gpu(index: int, world_size: int, gpu_memory_utilization: float) -> None:
    """Raises ValueError if this rank's GPU is too old, a slice that NCCL cannot connect, or taken by others."""
    gpu = f"GPU {index} ({torch.cuda.get_device_name(index)})"
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        raise ValueError(
            f"{gpu} has compute capability {major}.{minor}; bfloat16 and FlashAttention need 8.0 (Ampere) or newer."
        )
    if " MIG " in gpu and world_size > 1:
        raise ValueError(
            f"{gpu} is a MIG slice, which NCCL does not connect to others; start one rank (NGPU=1), or switch MIG off."
        )
    free, total = torch.cuda.mem_get_info(index)
    wanted = gpu_memory_utilization * total
    if free < wanted:
        raise ValueError(
            f"{gpu}: {(total - free) / GIB:.1f} of {total / GIB:.1f} GiB are taken by other processes, "
            f"see nvidia-smi; --gpu_memory_utilization {gpu_memory_utilization:g} wants {wanted / GIB:.1f}. "
            "End them, choose other GPUs, or lower it."
        )


def use_all_cores() -> None:
    """CUDA: the cores of the node, divided by its ranks. torchrun leaves one, and AdamW may work on the host."""
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        threads = max(1, len(os.sched_getaffinity(0)) // local_world_size())
        os.environ["OMP_NUM_THREADS"] = str(threads)  # else vLLM sets them to 1 when it has started
        torch.set_num_threads(threads)


def choose_interface(towards: str | None = None) -> None:
    """Names the interface to gloo and NCCL, unless the user has: one node, the loopback; else that towards MASTER_ADDR.

    gloo by itself takes the one that the host's own name leads to: on one node it may be open to others, on several it
    is often the loopback. `towards`: another machine to reach. Raises ValueError if MASTER_ADDR is no address.
    """
    address = towards or "127.0.0.1"
    if not towards and launched_world_size() > local_world_size():
        address = os.environ["MASTER_ADDR"]
    try:
        own = own_address(address)
        if own.startswith("127.") and address != "localhost" and not address.startswith("127."):
            own = own_address("192.0.2.1")  # the first node, under a name that Debian gives to the loopback
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR={address} cannot be reached from {socket.gethostname()} ({error.strerror}); "
            "use the first node's address."
        ) from None
    if name := interface_of(own):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # this one, not all that begin so


def own_address(target: str) -> str:
    """The IPv4 address under which this node would talk to the target."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [own.address for own in addresses]:
            return name
    return None


def prepare_cpu() -> None:
    """CPU: settings that oneDNN, and torch above it (ideep), read once. Call this before the first matrix product.

    The AMX tile unit stays unused: some virtual machines announce it, but end with SIGILL at its first use. Few kernels
    are kept: packed micro-batches have new shapes in every step, and 1,024 kernels in two caches grew to a gigabyte.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    if "AMX" not in os.environ["ONEDNN_MAX_CPU_ISA"]:
        torch.cpu._is_amx_tile_supported = lambda: False  # what vLLM asks before it chooses its attention kernel
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")
