"""Passes on the meta device, where nothing can be waited for: what the tests of the loop over micro-batches share."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import update
from batch import Rollout
from flags import Memory, UpdateStep, take
from fsdp_utils import World
from guards.updates import UpdateGuard
from helpers import whole_update
from inputs.choices import algorithm_of
from policy import Policy

META = World(rank=0, size=1, tp_size=1, device=torch.device("meta"))
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class NoWaits(TorchDispatchMode):
    """Fails where the host would wait for a GPU, for which meta stands.

    Meta itself raises where a value is read (`item`, `tolist`, `if`), or a size that depends on values (`nonzero`).
    Refused here are copies from host memory that is not page-locked, and masked_scatter, whose backward pass selects by
    the mask.
    """

    def __init__(self, pinned: list[Tensor]) -> None:
        super().__init__()
        self.pinned = {tensor.data_ptr() for tensor in pinned}

    def __torch_dispatch__(self, op: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        result = op(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.is_meta]
        from_host = [x for x in tensors if x.dim() or op in COPIES]  # a number alone is passed to the kernel
        if any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves(result)):
            pageable = [tuple(x.shape) for x in from_host if x.data_ptr() not in self.pinned]
            assert not pageable, f"{op} copies {pageable} to the device, and the host waits"
            assert op != torch.ops.aten.masked_scatter.default
        return result


class LoopIsOver(Exception):
    """Raised after the last micro-batch of an update."""


def run_passes(policy: Policy, args: Namespace, rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> int:
    """The passes for log-probs and the update's loop over micro-batches; returns how many of these there were."""
    policy.to("meta")
    algorithm, memory = algorithm_of(args), take(Memory, args)
    packed = whole_update(rollout, args, policy, META)
    pixels = [each for batch in packed.batches if batch.images for each in batch.images.pixels]

    def over(*_: object) -> None:
        raise LoopIsOver

    monkeypatch.setattr(update, "clip_grad_norm", over)
    step = UpdateStep(index=0, rate=0.0, is_first=False, max_grad_norm=1.0, seed=0)
    with NoWaits(pixels):
        for field in ("old_logprobs_N", "ref_logprobs_N"):
            packed = update.logprobs_under(policy, field, packed, algorithm)
    with NoWaits(pixels), pytest.raises(LoopIsOver):
        update.update_policy(policy, None, packed, algorithm, step, memory, UpdateGuard(META))
    assert all(parameter.grad is not None for parameter in policy.parameters() if parameter.requires_grad)
    return len(packed.batches)
