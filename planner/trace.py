"""The memory of an update, traced: the real model under fake tensors, sharded over a fake process group (flag `--trace`).

Nothing is computed or allocated: a fake tensor has a shape, no data. What counts is which storages are alive at once, and that is up to
the real code: the Hugging Face model, `fully_shard`, `chunked_logprobs`, autograd, AdamW. Two things stand for the GPU's: attention,
which keeps what the variable-length kernel keeps, and LoRA's dropout. The fake device is the CPU, because fake CUDA tensors fail in the
autograd of a CPU build. Private interfaces of torch are used: its version is pinned, and a test runs them.
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, PretrainedConfig

import fsdp_utils
from fsdp_utils import World, keep_gathered, release_gathered, shard
from model.head import chunked_logprobs
from model.vision import tower_of
from model.weights import model_from_config
from planner.setup import Setup
from policy import Policy


class Tracker(TorchDispatchMode):
    """Counts the bytes of live storages, fake or real, each once, and their maximum. What a kernel takes and frees inside is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def __enter__(self) -> Tracker:
        resize_ = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> object:  # how FSDP frees what it gathered
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

    def __torch_dispatch__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.watch(tensor)
        return result

    def watch(self, tensor: Tensor) -> None:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0
            weakref.finalize(storage, self.resize, key, None)
            self.resize(key, storage.nbytes())

    def resize(self, key: int, size: int | None) -> None:
        """A storage has a new size; None: it is gone."""
        self.live += (size or 0) - self.sizes.get(key, 0)
        if size is None:
            self.sizes.pop(key, None)
        elif key in self.sizes:
            self.sizes[key] = size
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        self.peak = self.live


class KernelAttention(torch.autograd.Function):
    """Attention that keeps and takes what the variable-length FlashAttention kernel does: [N, heads, head_dim], log-sums [heads, N]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
        )
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        accumulators = [torch.empty_like(query, dtype=torch.float32)]
        if key.shape[1] != query.shape[1]:  # grouped queries: gradients of keys and values per query head first
            accumulators += [query.new_empty(len(key), *query.shape[1:]) for _ in range(2)]
        del accumulators
        return grads


def kernel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    positions_M: Tensor | None = None,
    **unused: object,
) -> tuple:
    """The signature of a transformers attention function; shapes as in `attention.packed_attention`."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if positions_M is not None:
        key, value = key[positions_M], value[positions_M]
    return KernelAttention.apply(query, key, value)[None], None


class LoraLinear(nn.Module):
    """A frozen matrix with an adapter, as peft's: y = x W + (dropout(x) A) B s."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.b = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        dropped = (
            torch.native_dropout(x, self.dropout, True)[0] if self.dropout and self.training else x
        )  # CUDA's: a mask of one byte a number
        return self.base(x) + self.b(self.a(dropped)) * 2.0


class TracedPolicy(Policy):
    """`Policy.forward` without what depends on data: all positions are completion tokens of one packed batch."""

    def forward(
        self, ids_N: Tensor, positions_M: Tensor | None, with_entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        output = self.model.get_decoder()(
            input_ids=ids_N[None],
            position_ids=torch.arange(len(ids_N))[None],
            use_cache=False,
            attention_mask={"full_attention": None},
            positions_M=positions_M,
        )
        return chunked_logprobs(
            output.last_hidden_state[0], self.model.get_output_embeddings(), ids_N, 1.0, with_entropy_gradient
        )


def outside(function: Callable) -> Callable:
    """The function, run as if there were no fake tensors and nobody counted."""

    def run(*args: object, **kwargs: object) -> object:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[Tracker]:
    """Rank 0 of so many, without any other; every tensor made inside is fake, and counted by the tracker."""
    propagate = (
        ShardingPropagator._propagate_tensor_meta_non_cached
    )  # makes tensors of the global shape only to see their shapes
    tracker = Tracker()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with (
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", outside(propagate)),
            mock.patch.object(fsdp_utils, "init_device_mesh", outside(fsdp_utils.init_device_mesh)),
            FakeTensorMode(allow_non_fake_inputs=True),
            tracker,
        ):
            yield tracker
    finally:
        dist.destroy_process_group()


def build(setup: Setup, config: PretrainedConfig) -> tuple[TracedPolicy, AdamW]:
    """The sharded policy of this setup with seeded optimizer state."""
    policy, master = setup.policy, {2: torch.bfloat16, 4: torch.float32}[setup.trained_bytes]
    AttentionInterface.register("kernel", kernel_attention)
    model = model_from_config(
        config, attn_implementation="kernel", dtype=torch.bfloat16 if policy.lora_rank else master
    )
    if policy.lora_rank:
        model.requires_grad_(False)
        for layer in model.get_decoder().layers:
            for block in (layer.self_attn, layer.mlp):
                for name, module in list(block.named_children()):
                    if name in policy.lora_targets:
                        setattr(block, name, LoraLinear(module, policy.lora_rank, policy.lora_dropout, master))
    if (tower := tower_of(model)) is not None:
        tower.requires_grad_(False)
    if policy.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    traced = TracedPolicy(model.train())
    world = World(rank=0, size=setup.ranks, tp_size=1, device=torch.device("cpu"))
    shard(traced, traced.layers, world, torch.bfloat16, stays_gathered=policy.gather_parameters_once)
    trained = [parameter for parameter in traced.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=1e-6, fused=True)
    for parameter in trained:  # as after the first update
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return traced, optimizer


def trace_update(setup: Setup, config: PretrainedConfig) -> dict[str, int]:
    """Phase -> peak bytes of live tensors on one GPU: "static" (what is there all the time), "logprobs", "update", "optimizer".

    Two micro-batches stand for any larger number: from the second on, the gradients of all layers are there from the start. Where
    parameters stay gathered until the last one begins its backward pass, it takes a third.
    """
    num_micros = 3 if setup.policy.gather_parameters_once else 2
    with fake_world(setup.ranks) as tracker:
        policy, optimizer = build(setup, config)
        peaks = {"static": tracker.live}
        ids_N = torch.zeros(setup.run.micro_batch_tokens, dtype=torch.int64)
        keys = int(len(ids_N) * setup.run.keys_per_position)
        positions_M = torch.zeros(keys, dtype=torch.int64) if keys > len(ids_N) else None

        tracker.restart()
        policy.eval()  # adapters drop nothing here
        with torch.no_grad():
            policy(ids_N, positions_M)
        release_gathered(policy)
        policy.train()
        peaks["logprobs"] = tracker.peak

        tracker.restart()
        for i in range(num_micros):
            keep_gathered(policy, setup.policy.gather_parameters_once and i < num_micros - 1)
            outputs = policy(ids_N, positions_M, setup.run.trains_entropy)
            sum(output.sum() for output in outputs if output.requires_grad).backward()
            del outputs
        peaks["update"] = tracker.peak

        tracker.restart()
        optimizer.step()
        peaks["optimizer"] = tracker.peak
    return peaks
