"""The machine of a process: its memory, cores, network interface, and what a CPU announces but cannot do."""

import os
import socket

import psutil
import torch

from runtime.rank import launched_world_size, local_world_size


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
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if address in [own.address for own in addresses]), None)


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
