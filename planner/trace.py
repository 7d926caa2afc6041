"""The memory of a pass, traced: the real model under fake tensors, sharded over a fake process group (flag `--trace`).

Nothing is computed or allocated: a fake tensor has a shape and no data. What counts is which storages are alive at
once, and that is up to the real code: the Hugging Face model, `fully_shard`, `chunked_logprobs`, autograd. Stand-ins
for attention and LoRA keep what the GPU's kernels keep. The fake device is the CPU, because fake CUDA tensors fail in
the autograd of a CPU build. Private interfaces of torch are used: its version is pinned, and a test runs them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, PretrainedConfig

import fsdp_utils
from flags import Lora
from fsdp_utils import World, begin_micro_batch, release_gathered, shard
from model.head import chunked_logprobs
from model.lora import target_names
from model.vision import tower_of
from model.weights import model_from_config
from planner.setup import Setup
from policy import Policy


def trace_update(setup: Setup, config: PretrainedConfig) -> dict[str, int]:
    """Phase -> peak bytes of live tensors on one GPU: "static" (what is there all the time), "logprobs", "update".

    Two micro-batches stand for any larger number: in the second one all gradients are there from the start. Where
    parameters stay gathered until the last backward pass, it takes three.
    """
    stays_gathered = setup.memory.communicate_once
    num_micros = 3 if stays_gathered else 2
    with fake_world(setup.num_trainers) as tracker:
        policy = build(setup, config)
        moments = [torch.zeros_like(x) for x in policy.parameters() if x.requires_grad for _ in range(2)]  # AdamW's
        peaks = {"static": tracker.live}
        ids_N = torch.zeros(setup.memory.micro_batch_tokens, dtype=torch.int64)
        num_keys = int(len(ids_N) * setup.keys_per_position)
        positions_M = torch.zeros(num_keys, dtype=torch.int64) if num_keys > len(ids_N) else None

        tracker.restart()
        policy.eval()  # adapters drop nothing here
        with torch.no_grad():
            policy(ids_N, positions_M)
        release_gathered(policy)
        policy.train()
        peaks["logprobs"] = tracker.peak

        tracker.restart()
        for i in range(num_micros):
            is_last = i == num_micros - 1
            begin_micro_batch(policy, stays_gathered, is_last)
            outputs = policy(ids_N, positions_M, setup.run.trains_entropy)
            sum(output.sum() for output in outputs if output.requires_grad).backward()
            del outputs
        peaks["update"] = tracker.peak
        del moments
    return peaks


class Tracker(TorchDispatchMode):
    """Counts the bytes of live storages, fake or real, and their maximum; not what a kernel takes and frees inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # of the storages that are alive
        self.live = self.peak = 0

    def __enter__(self) -> Tracker:
        resize_ = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> object:  # FSDP frees what it gathered in this way
            result = resize_(storage, size)
            if storage._cdata in self.sizes:
                self.resize(storage._cdata, size)
            return result

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", counted)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.patch.stop()

    def __torch_dispatch__(self, op: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        result = op(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.watch(tensor)
        return result

    def watch(self, tensor: Tensor) -> None:
        storage = fsdp_utils.local_shard(tensor).untyped_storage()
        if storage._cdata not in self.sizes:
            self.resize(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self.forget, storage._cdata)

    def resize(self, key: int, size: int) -> None:
        self.live += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.live)

    def forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def restart(self) -> None:
        self.peak = self.live


@contextlib.contextmanager
def fake_world(num_ranks: int) -> Iterator[Tracker]:
    """This process is rank 0 of `num_ranks`, without the others. Tensors are fake, and the tracker counts them."""
    tracker = Tracker()
    shapes = "_propagate_tensor_meta_non_cached"  # makes tensors of the global shape, only to see their shapes
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with (
            mock.patch.object(ShardingPropagator, shapes, outside(getattr(ShardingPropagator, shapes))),
            mock.patch.object(fsdp_utils, "init_device_mesh", outside(fsdp_utils.init_device_mesh)),
            FakeTensorMode(allow_non_fake_inputs=True),
            tracker,
        ):
            yield tracker
    finally:
        dist.destroy_process_group()


def outside(function: Callable) -> Callable:
    """The function, run as if there were no fake tensors and nobody counted."""

    def run(*args: object, **kwargs: object) -> object:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def build(setup: Setup, config: PretrainedConfig) -> TracedPolicy:
    """The sharded policy of this setup."""
    master = {2: torch.bfloat16, 4: torch.float32}[setup.trained_bytes]
    AttentionInterface.register("kernel", kernel_attention)
    stored = torch.bfloat16 if setup.has_lora else master
    model = model_from_config(config, attn_implementation="kernel", dtype=stored)
    if setup.has_lora:
        model.requires_grad_(False)
        for name in target_names(model, setup.lora.lora_targets):
            model.set_submodule(name, LoraLinear(model.get_submodule(name), setup.lora, master))
    if (tower := tower_of(model)) is not None:
        tower.requires_grad_(False)
    if setup.memory.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    traced = TracedPolicy(model.train())
    cpu, shard_ranks = torch.device("cpu"), setup.memory.shard_ranks
    world = World(rank=0, size=setup.num_trainers, tp_size=1, device=cpu, shard_ranks=shard_ranks)
    shard(traced, traced.layers, world, torch.bfloat16, stays_gathered=setup.memory.communicate_once)
    return traced


class TracedPolicy(Policy):
    """`Policy` without what depends on data: all positions are completion tokens of one packed batch."""

    def forward(
        self, ids_N: Tensor, positions_M: Tensor | None, with_entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        output = self.model.get_decoder()(
            input_ids=ids_N[None], position_ids=torch.arange(len(ids_N))[None], use_cache=False,
            attention_mask={"full_attention": None}, positions_M=positions_M,
        )  # fmt: skip
        hidden, head = output.last_hidden_state[0], self.model.get_output_embeddings()
        return chunked_logprobs(hidden, head, ids_N, 1.0, with_entropy_gradient)


def kernel_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, positions_M: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    """An attention function for transformers, with its shapes; `positions_M` as in `attention.packed_attention`."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if positions_M is not None:
        key, value = (x.index_select(0, positions_M) for x in (key, value))
    return KernelAttention.apply(query, key, value)[None], None


class KernelAttention(torch.autograd.Function):
    """Keeps and takes what the variable-length FlashAttention kernel does, for tensors [N, heads, head_dim]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        log_sums = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        accumulators = [torch.empty_like(query, dtype=torch.float32)]
        if key.shape[1] != query.shape[1]:  # grouped queries: first a gradient of keys and values for each query head
            accumulators += [query.new_empty(len(key), *query.shape[1:]) for _ in range(2)]
        del accumulators
        return grads


class LoraLinear(nn.Module):
    """A frozen matrix with an adapter, as peft's: y = x W + (dropout(x) A) B s."""

    def __init__(self, base: nn.Linear, lora: Lora, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, lora.lora_rank, bias=False, dtype=dtype)
        self.b = nn.Linear(lora.lora_rank, base.out_features, bias=False, dtype=dtype)
        self.dropout = lora.lora_dropout

    def forward(self, x: Tensor) -> Tensor:
        is_on = self.dropout and self.training
        dropped = torch.native_dropout(x, self.dropout, True)[0] if is_on else x  # CUDA's: the mask has a byte a number
        return self.base(x) + self.b(self.a(dropped)) * 2.0
