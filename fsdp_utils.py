"""Everything that says "rank": start-up, sharding, gathering, collectives. On a single process each verb is a no-op.

The other files ask for what they need in the language of the algorithm ("the sum over trainers",
"is this the main process"). FSDP2 (`fully_shard`) does the sharding. Read `World` first, then
`shard`, then what gathers.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, distribute_tensor

from runtime.machine import choose_interface, prepare_cpu, use_all_cores
from runtime.rank import Stopped, beat, launch_folder, local_world_size, requested

Item = TypeVar("Item")
MAIN_IS_HERE = "the main process has come"  # a key of the store in which the ranks meet


@dataclass(frozen=True)
class World:
    """The place of this process. Every rank trains; `tp_size` consecutive ranks are one engine.

    With generation servers all ranks count as one engine, whose leader is the main rank.
    """

    trainer_rank: int
    num_trainers: int
    tp_size: int
    device: torch.device
    _: KW_ONLY
    shard_ranks: int | None = None  # consecutive ranks that share one copy of the policy; None: all
    timeout: timedelta | None = None  # after which a collective fails
    has_engines: bool = True  # False: generation servers sample

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All trainers. Parameters are sharded along the last dimension and replicated along the first (HSDP)."""
        if self.shard_ranks in (None, self.num_trainers):
            return init_device_mesh(self.device.type, (self.num_trainers,))
        # Neighbours share a copy: within a node their links are the fastest, and they talk most.
        shape = self.num_trainers // self.shard_ranks, self.shard_ranks
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        if self.timeout is not None:
            for group in mesh.get_all_groups():  # they do not take over the timeout of the whole
                _set_pg_timeout(self.timeout, group)
        return mesh

    @property
    def is_main(self) -> bool:
        return self.trainer_rank == 0

    @property
    def engine_index(self) -> int:
        return self.trainer_rank // self.tp_size

    @property
    def num_engines(self) -> int:
        return self.num_trainers // self.tp_size

    @property
    def is_engine_leader(self) -> bool:
        """Whether this rank speaks for its engine: the others of the engine sample the same completions."""
        return self.trainer_rank % self.tp_size == 0


def is_main_process() -> bool:
    """True on rank 0, known before the process group exists."""
    return os.environ.get("RANK", "0") == "0"


def init_world(tp_size: int, timeout_minutes: float, shard_ranks: int | None = None, has_engines: bool = True) -> World:
    """Joins the process group and returns this process's place: gloo on CPU, NCCL on CUDA."""
    if "RANK" not in os.environ:  # plain `python train_grpo.py`: a world of one
        # Not only for us: vLLM's external launcher reads them, too.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        # Gloo for what is gathered as Python objects: no copy to the GPU and back.
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        # What each rank did last, before a collective times out: for torch's `torchfrtrace`.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/nccl_trace_rank_")
        # `Engine` turns segments on, when its CUDA graphs are captured.
        set_allocator(is_expandable=False)
        use_all_cores()
    else:
        device, backend = torch.device("cpu"), "gloo"
        prepare_cpu()
    choose_interface()  # before the first socket is opened
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = meeting_point(rank, size)
    # The others wait for the main process, however long that takes: it may be downloading weights.
    if rank == 0:
        store.set(MAIN_IS_HERE, "")
    while not store.check([MAIN_IS_HERE]):
        time.sleep(0.05)
    timeout = timedelta(minutes=timeout_minutes)
    store.set_timeout(timeout)  # only now: until here the wait has no end
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank, size, tp_size, device, shard_ranks=shard_ranks, timeout=timeout, has_engines=has_engines)


def allocator_settings(is_expandable: bool) -> str:
    """The settings of torch's allocators: the user's PYTORCH_ALLOC_CONF, and expandable segments.

    Segments keep micro-batches of many sizes from fragmenting the GPU's memory. vLLM cannot capture
    its CUDA graphs with them where engines span GPUs, so they are off until the engine is built.
    pinned_max_round_threshold_mb is not set: with it torch 2.13 hands out blocks of pinned memory
    that are too small.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings = dict(setting.strip().split(":", 1) for setting in given.split(",") if ":" in setting)
    is_wanted = settings.get("expandable_segments", "True") == "True"
    settings["expandable_segments"] = str(is_expandable and is_wanted)
    return ",".join(f"{name}:{value}" for name, value in settings.items())


def set_allocator(is_expandable: bool) -> None:
    """On CUDA: passes all of `allocator_settings`, because torch forgets what is not in the string."""
    if torch.cuda.is_available():
        torch._C._accelerator_setAllocatorSettings(allocator_settings(is_expandable))


def meeting_point(rank: int, size: int) -> dist.Store:
    """The store in which the ranks find each other.

    On one node it is a file, so that no port is open; with torchrun it is torchrun's own. That one
    survives a restart of the ranks, with the addresses of the ended ones: each start has a prefix.
    """
    if size == 1:
        return dist.HashStore()  # in memory: a world of one needs neither file nor port
    folder = launch_folder()
    if folder is not None and size == local_world_size():
        return dist.FileStore(str(folder / "store"), size)
    store = next(dist.rendezvous("env://", rank, size))[0]
    return dist.PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def close_world() -> None:
    """Leaves the process group. Call after the engine is closed: vLLM's own groups live inside this one."""
    if dist.is_initialized():  # vLLM may have taken it down
        dist.destroy_process_group()


# Sharding -------------------------------------------------------------------------------------------------------------


def shard(
    root: nn.Module,
    layers: list[nn.Module],
    world: World,
    compute_dtype: torch.dtype,
    on_host: bool = False,
    stays_gathered: bool = False,
) -> torch.device:
    """Shards in place (FSDP2): a unit per decoder layer and one for the rest. Returns the device of the shards.

    Parameters keep their dtype; computation runs in `compute_dtype`, gradients are reduced in fp32.
    `on_host`: shards and gradients live in host RAM (pinned on CUDA). `stays_gathered`: a forward
    pass leaves each layer gathered, until the backward pass or `release_gathered`.

    On one rank a parameter in `compute_dtype` stays a plain tensor: there is nothing to gather, cast
    or reduce, and FSDP's copies are saved. Gradients add up in that dtype, as FSDP adds up shards.
    With `stays_gathered` it adds whole gradients up in fp32, so what is trained stays FSDP's.
    """
    plain = {x for x in root.parameters() if x.dtype == compute_dtype and not (x.requires_grad and stays_gathered)}
    if world.num_trainers > 1 or on_host:
        plain = set()
    if plain == set(root.parameters()):
        return world.device
    # fp32: a sum of bf16 gradients over many ranks would lose their small parts.
    dtypes = fsdp.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = fsdp.CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if on_host else fsdp.OffloadPolicy()
    divide = partial(fsdp.fully_shard, mesh=world.mesh, mp_policy=dtypes, offload_policy=offload, ignored_params=plain)
    for layer in layers:
        divide(layer, reshard_after_forward=not stays_gathered)
    # Gathered while this one computes, as FSDP does by itself backwards.
    for layer, after in pairwise(layers):
        layer.set_modules_to_forward_prefetch([after])
    # Last: its unit is what no layer has taken, the embedding, the last norm and the head.
    divide(root)
    # FSDP gathers in `forward`; of other methods it has to be told.
    for name in getattr(root, "forward_methods", ()):
        fsdp.register_fsdp_forward_method(root, name)
    return torch.device("cpu") if on_host else world.device


def moved(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """The tensor on the device that computes, converted there: in one step torch converts on the host, on one core."""
    return tensor.to(device, non_blocking=True).to(dtype)


@torch.no_grad()
def fill_from_main(target: Tensor, full: Tensor | None) -> None:
    """Fills a sharded parameter, or a tensor that every rank holds whole, with `full` of rank 0 (None elsewhere)."""
    beat()
    is_sharded = isinstance(target, DTensor)
    # Collectives run on the device that computes, also where the shards live in host RAM.
    device = torch.device(target.device_mesh.device_type) if is_sharded else target.device
    if full is None:  # rank 0 alone reads files: the others receive
        full = torch.empty(target.shape, dtype=target.dtype, device=device)
    full = moved(full, device, target.dtype)
    if is_sharded:
        sharded = distribute_tensor(full, target.device_mesh, target.placements)
        target.to_local().copy_(sharded.to_local())
        return
    if dist.is_initialized():
        dist.broadcast(full, src=0)
    target.copy_(full)


def release_gathered(root: nn.Module) -> None:
    """Frees the parameters that FSDP keeps gathered for a backward pass that will not come."""
    for unit in root.modules():
        if isinstance(unit, fsdp.FSDPModule):  # a model on one process, as in tests, may have none
            unit.reshard()  # not recursive


def begin_micro_batch(root: nn.Module, communicates_once: bool, is_last: bool) -> None:
    """Makes the next backward pass reduce its gradients and free the gathered parameters at its end.

    With `communicates_once` only that of the last micro-batch does; until then each rank adds up
    whole gradients. Copies of the policy (HSDP) always add theirs up in the last one alone.
    """
    if isinstance(root, fsdp.FSDPModule):
        root.set_requires_gradient_sync(is_last or not communicates_once)
        root.set_reshard_after_backward(is_last or not communicates_once)
        root.set_requires_all_reduce(is_last)


def full_tensor(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole of a sharded parameter in this dtype, on the device that computes. All ranks call it together."""
    return begin_gather(parameter, dtype)()


def full_tensors(parameters: Iterable[tuple[Tensor, torch.dtype]]) -> Iterator[Tensor]:
    """The whole of each parameter in its dtype, in turn; while the caller uses one, the next one is gathered."""
    begun = deque()  # popped: the caller alone holds the result
    for parameter, dtype in parameters:
        begun.append(begin_gather(parameter, dtype))
        if len(begun) > 1:  # two at a time: this one and the next, however large the model is
            yield begun.popleft()()
    if begun:
        yield begun.popleft()()


def begin_gather(parameter: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Starts `full_tensor`; the function that is returned waits for the result and returns it.

    Replicas (HSDP) hold the same, so it gathers over the mesh dimension that is sharded. DTensor's
    own asynchronous `redistribute` is not used: with torch 2.13 and gloo it corrupted the heap of a
    rank, about once in 1,000 syncs.
    """
    beat()
    local = parameter.detach()
    if not isinstance(local, DTensor):
        return partial(local.to, dtype)
    mesh, num_rows = local.device_mesh, len(local)
    sharded = [dim for dim, place in enumerate(local.placements) if not place.is_replicate() and mesh.size(dim) > 1]
    if not sharded:
        return partial(moved, local.to_local(), mesh.device_type, dtype)
    (dim,) = sharded
    assert local.placements[dim].is_shard(0), "FSDP2 shards the rows, over one dimension of the mesh"
    # Converted before it is sent: bf16 is half the bytes of an fp32 master.
    own = moved(local.to_local(), mesh.device_type, dtype)
    # A collective wants as many rows of each rank: the last ranks' are padded, and cut off again.
    rows = -(-num_rows // mesh.size(dim))
    if len(own) < rows:
        own = torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])
    gathered = own.new_empty(rows * mesh.size(dim), *own.shape[1:])
    # Asynchronous: it runs while the caller uses the tensor before.
    work = dist.all_gather_single(gathered, own, group=mesh.get_group(dim), async_op=True)

    def finish() -> Tensor:
        work.wait()
        return gathered[:num_rows]

    return finish


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm(model: nn.Module, max_norm: float, loss_scale: float = 1.0) -> Tensor:
    """The global gradient norm before clipping, an fp32 scalar, the same on every rank. Scales gradients in place.

    `loss_scale`: of the loss whose gradients they are; it is taken off. It works on the shards of all at once, and sums
    over ranks once: DTensor would go one by one.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    shards = [local_shard(gradient) for gradient in gradients]
    squares = torch.stack(torch._foreach_norm(shards, 2, torch.float32)) ** 2
    mesh = gradients[0].device_mesh if isinstance(gradients[0], DTensor) else None
    if mesh is not None:
        (placements,) = {gradient.placements for gradient in gradients}  # FSDP shards all alike
        # A rank has shards of all gradients, so squares add up over ranks: one sum for all.
        for dim, place in enumerate(placements):
            if not place.is_replicate():  # copies (HSDP) hold the same
                dist.all_reduce(squares, group=mesh.get_group(dim))
    norm = torch.linalg.vector_norm(squares**0.5) / loss_scale
    # Copies may add in another order, would clip differently, and drift apart.
    if mesh is not None and mesh.ndim > 1:
        dist.broadcast(norm, src=0)
    # Scaled without asking whether it has to be: the host would wait for the GPU's answer. 1e-6 is
    # from torch's own clipping.
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale)
    return norm


# Collectives ----------------------------------------------------------------------------------------------------------


def is_alone() -> bool:
    """Whether there is no other rank to talk to."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def sum_over_trainers(values: Tensor) -> Tensor:
    """The elementwise sum over all trainers, on every rank; the input is left as it was."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def max_over_trainers(values: Tensor) -> Tensor:
    """The elementwise maximum over all trainers, on every rank; the input is left as it was."""
    return _all_reduce(values, dist.ReduceOp.MAX)


def _all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    reduced = values.clone()  # torch's works in place
    if dist.is_initialized():
        dist.all_reduce(reduced, op=operation)
    return reduced


def gather_from_ranks(item: Item) -> list[Item]:
    """The items of all ranks in rank order, on every rank: picklable host data (arrays, strings), not CUDA tensors."""
    if is_alone():
        return [item]
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items  # type: ignore[return-value]


def end_if_requested() -> None:
    """Raises Stopped on every rank if a signal has asked any of them to end. All ranks call it together."""
    # Each rank hears its own signals: if one left alone, the others would wait in a collective.
    if any(gather_from_ranks(requested())):
        raise Stopped


def broadcast_from_main(item: Item | None) -> Item:
    """The main rank's item, on every rank: picklable host data. All ranks call it; the others' items are ignored."""
    items = [item]
    if not is_alone():
        dist.broadcast_object_list(items, src=0)
    return items[0]  # type: ignore[return-value]


def wait_for_all() -> None:
    """Returns when every rank has come here."""
    if dist.is_initialized():
        dist.barrier()
