"""Everything that says "rank": start-up, sharding, gathering, collectives. On a single process each verb is a no-op.

The other files ask for what they need in the language of the algorithm ("the sum over ranks", "is this the main process"),
so that nothing else in the project has to know how many processes there are. FSDP2 (`fully_shard`) does the sharding.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.cuda._pin_memory_utils import pin_memory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """Where this process stands. Ranks are grouped into engines of `tp_size` consecutive ranks."""

    rank: int
    size: int
    local_rank: int
    tp_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def trainer_rank(self) -> int:
        return self.rank

    @property
    def num_trainers(self) -> int:
        return self.size

    @property
    def num_engines(self) -> int:
        return self.size // self.tp_size

    @property
    def engine_index(self) -> int:
        return self.rank // self.tp_size

    @property
    def is_engine_leader(self) -> bool:
        """True on one rank per engine; the other ranks of the engine sample the same completions."""
        return self.rank % self.tp_size == 0


def launched_world_size() -> int:
    """Number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """True on rank 0, known before the process group exists."""
    return os.environ.get("RANK", "0") == "0"


def is_engine_leader_process(tp_size: int) -> bool:
    """True on the first rank of each engine, known before the process group exists."""
    return int(os.environ.get("RANK", "0")) % tp_size == 0


def exit_with_error(error: Exception) -> NoReturn:
    """Ends the process with the error's sentence, no traceback: for mistakes of the user. Many ranks find the same one: the first speaks.

    torchrun stops the others when the first has exited; one that is still there after some seconds has an error of its own (a file
    that is missing on its node only) and tells it.
    """
    if not is_main_process():
        time.sleep(10)
    sys.exit(f"error: {error}")


def check_launch(tp_size: int, dtype: str) -> None:
    """Raises ValueError if the launch leaves visible GPUs idle, has more ranks than GPUs or no whole engines, or wants fp32 on CUDA.

    Reads the environment only: nothing is started and no GPU memory is taken.
    """
    world_size = launched_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count()
    if num_gpus > local_size:
        ids = ",".join(map(str, range(local_size)))
        raise ValueError(
            f"{num_gpus} GPUs are visible but the world size is {world_size}: start it with the script or torchrun "
            f"(torchrun --nproc_per_node {num_gpus} {Path(sys.argv[0]).name} ...), or hide the others with CUDA_VISIBLE_DEVICES={ids}."
        )
    if 0 < num_gpus < local_size:
        raise ValueError(
            f"{local_size} processes were started on this node but only {num_gpus} GPUs are visible; one rank needs one GPU."
        )
    if num_gpus and dtype == "float32":
        raise ValueError(
            "--dtype float32: the packed attention kernel of CUDA computes in bfloat16; leave --dtype out."
        )
    check_whole_engines(tp_size, world_size)


def check_whole_engines(tp_size: int, world_size: int) -> None:
    """Raises ValueError if so many ranks are no whole number of engines."""
    if tp_size < 1 or world_size % tp_size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"--tensor_parallel_size {tp_size} does not divide the world size {world_size}; use one of {', '.join(map(str, divisors))}."
        )


def init_world(tp_size: int, timeout_minutes: float) -> World:
    """Joins the process group (gloo on CPU, NCCL on CUDA with gloo beside it for CPU tensors) and returns this process's place.

    A collective that waits longer than `timeout_minutes` raises instead of hanging for ever.
    """
    _die_with_launcher()
    if "RANK" not in os.environ:  # plain `python train_grpo.py`: a world of one, with a free port of our own
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        avoid_broken_amx()
        device = torch.device("cpu")
        backend = "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    return World(dist.get_rank(), dist.get_world_size(), local_rank, tp_size, device)


def avoid_broken_amx() -> None:
    """CPU: keeps torch and vLLM off the AMX tile unit where the processor announces it but the (virtual) machine traps its instructions.

    Without this the first bf16 matrix product there ends the process with SIGILL. Found out in a forked child, and to be called before
    the first one: oneDNN, which both libraries bring, reads its limit once.
    """
    if not torch.cpu._is_amx_tile_supported():
        return
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        child = os.fork()
        if child == 0:
            operand = torch.ones(64, 64, dtype=torch.bfloat16)
            _ = operand @ operand
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # for the matrix products of torch and vLLM
    if "AMX" not in os.environ["ONEDNN_MAX_CPU_ISA"]:
        torch.cpu._is_amx_tile_supported = lambda: False  # what vLLM asks before it chooses its attention kernel


def _die_with_launcher() -> None:
    """Linux: SIGTERM when torchrun dies, however it died, so that even `kill -9` of the launcher leaves no orphan on the GPUs."""
    if sys.platform == "linux" and "RANK" in os.environ:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def close_world() -> None:
    """Leaves the process group. Call after the engine is closed: vLLM's own groups live inside this one."""
    if dist.is_initialized():
        dist.destroy_process_group()


# Sharding ------------------------------------------------------------------------------------------------------------------------


def shard(
    root: nn.Module,
    layers: list[nn.Module],
    world: World,
    compute_dtype: torch.dtype,
    on_host: bool = False,
    stays_gathered: bool = False,
) -> torch.device:
    """FSDP2 full shard, in place: one all-gather unit per decoder layer and one for the rest. Returns the device of the shards.

    Parameters stay in the dtype they have (fp32 masters, say); computation runs in `compute_dtype`, gradients are reduced in fp32.
    `on_host`: shards and gradients live in host RAM (pinned on CUDA); only what is gathered for a layer's computation is on the device.
    `stays_gathered`: a forward pass leaves each layer gathered, for the backward pass or for `release_gathered`.
    """
    mesh: DeviceMesh = init_device_mesh(world.device.type, (world.size,))
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if on_host else OffloadPolicy()
    for layer in layers:
        fully_shard(
            layer, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=not stays_gathered
        )
    for layer, after in pairwise(layers):
        layer.set_modules_to_forward_prefetch(
            [after]
        )  # the next layer is gathered while this one computes, as FSDP does backwards
    fully_shard(root, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return torch.device("cpu") if on_host else world.device


@torch.no_grad()
def fill_from_main(target: Tensor, full: Tensor | None) -> None:
    """Fills a sharded parameter, or a tensor that every rank holds whole, with `full` of rank 0 (None elsewhere), cast to its dtype.

    The full tensor is on the device while this runs, and nothing of it afterwards but the shards.
    """
    if not isinstance(target, DTensor):
        full = torch.empty_like(target) if full is None else full.to(target.device, target.dtype)
        if dist.is_initialized():
            dist.broadcast(full, src=0)
        target.copy_(full)
        return
    device = target.device_mesh.device_type
    full = (
        torch.empty(target.shape, dtype=target.dtype, device=device) if full is None else full.to(device, target.dtype)
    )
    target.to_local().copy_(distribute_tensor(full, target.device_mesh, target.placements).to_local())


def release_gathered(root: nn.Module) -> None:
    """Frees what FSDP keeps gathered after a forward pass for a backward pass that will not come: the root unit's parameters, at least."""
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # not recursive


def reduce_gradients(root: nn.Module, is_on: bool) -> None:
    """Whether backward passes reduce their gradients over the ranks. Off: whole gradients are kept, and added up, until one does."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(is_on)


def keep_gathered(root: nn.Module, is_on: bool) -> None:
    """Whether backward passes leave the parameters gathered, for another micro-batch before they change."""
    if isinstance(root, FSDPModule):
        root.set_reshard_after_backward(not is_on)


def activations_on_host(is_on: bool) -> AbstractContextManager[object]:
    """While it is open, what the backward pass needs is put into host RAM (page-locked on CUDA) and fetched when it is its turn.

    Not the weights, which it needs, too: torch's own `save_on_cpu` would copy each gathered one.
    """

    def pack(saved: Tensor) -> tuple[torch.device | None, Tensor]:
        if isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter):
            return None, saved
        return saved.device, _to_host(saved)

    def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
        device, saved = packed
        return saved if device is None else saved.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack) if is_on else nullcontext()


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def full_tensor(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole of a sharded parameter in `dtype`, to which it is cast before it is gathered, on the device that computes.

    All ranks call it together. Shards that live on the host go to the device first, because NCCL gathers there.
    """
    return begin_gather(parameter, dtype)()


def full_tensors(parameters: Iterable[tuple[Tensor, torch.dtype]]) -> Iterator[Tensor]:
    """The whole of each parameter in its dtype, in turn; while the caller uses one, the next one is gathered."""
    finish = None
    for parameter, dtype in parameters:
        finish_next = begin_gather(parameter, dtype)
        if finish is not None:
            yield finish()
        finish = finish_next
        del finish_next  # nothing is held by two names
    if finish is not None:
        yield finish()


def begin_gather(parameter: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Starts what `full_tensor` does; the function that is returned waits for it and gives the whole.

    Not DTensor's own asynchronous `redistribute`: with torch 2.13 and gloo that corrupted the heap of a rank, about once in 1,000 syncs.
    """
    local = parameter.detach()
    if not isinstance(local, DTensor):
        return partial(local.to, dtype)
    mesh, num_rows = local.device_mesh, len(local)
    if mesh.size() == 1:
        return partial(local.to_local().to, mesh.device_type, dtype)
    rows = -(-num_rows // mesh.size())  # of each rank; the last ones may have fewer
    own = local.to_local().to(mesh.device_type, dtype)
    if len(own) < rows:
        own = torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])
    gathered = own.new_empty(rows * mesh.size(), *own.shape[1:])
    work = dist.all_gather_single(gathered, own, group=mesh.get_group(), async_op=True)

    def finish() -> Tensor:
        work.wait()
        return gathered[:num_rows]

    return finish


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pin_in_place(tensor: Tensor) -> None:
    """CUDA: page-locks this rank's part of a host tensor that lives as long as the process, so that copies to the device are fast.

    Not by `pin_memory`, whose allocator rounds each size up to a power of two: for some shapes nearly twice the host RAM.
    """
    local = local_shard(tensor)
    if local.numel():
        pin_memory(local.data_ptr(), local.nbytes)


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """The global gradient norm before clipping, an fp32 scalar that is the same on every rank; gradients are scaled in place."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) for parameter in parameters]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# Collectives ---------------------------------------------------------------------------------------------------------------------


def sum_over_trainers(values: Tensor) -> Tensor:
    """The elementwise sum over all ranks, on every rank; the input is left as it was."""
    total = values.clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


def max_over_trainers(values: Tensor) -> Tensor:
    """The elementwise maximum over all ranks, on every rank; the input is left as it was."""
    largest = values.clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def gather_from_ranks(item: Item) -> list[Item]:
    """The items of all ranks in rank order, on every rank. For picklable host data (numpy arrays, strings), not for CUDA tensors."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [item]
    items: list[Item | None] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items  # type: ignore[return-value]


def map_over_ranks(function: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    """`[function(x) for x in items]` on every rank, the work divided: `items` must be the same list on all of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [function(item) for item in items]
    world_size = dist.get_world_size()
    shares = gather_from_ranks([function(item) for item in items[dist.get_rank() :: world_size]])
    return [shares[i % world_size][i // world_size] for i in range(len(items))]


def new_host_group() -> dist.ProcessGroup | None:
    """A process group of all ranks for a thread of its own, over gloo: collectives of two threads must not meet in one group."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def wait_for_all() -> None:
    """Returns when every rank has come here."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
