"""Activations that wait for the backward pass in host RAM (`--offload_activations`), copied while the GPU computes.

    forward    compute 1 | compute 2 | compute 3        backward    3 comes | compute 3 | compute 2 | compute 1
                         | 1 goes    | 2 goes                               | 2 comes   | 1 comes

Copies have a stream of their own, beside the one that computes. A tensor goes while the GPU computes the next one,
which waits for it at its end: so one at a time is on its way, and its memory is free afterwards. The backward pass
needs them in the reverse order: whichever is used brings the one before it. So two are on the device then; with
gradient checkpointing these are the input of a layer and that of the layer before it.

Why not torch's `save_on_cpu`: it copies each gathered weight, too, and on the stream that computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn


class Streams:
    """The stream that computes (the current one), and one for copies. On a CPU one thing is done after the other."""

    def __init__(self, device: torch.device) -> None:
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Starts a copy, after all that was to be computed until now; returns its end. Both tensors must outlive it."""
        if self.copies is None:
            target.copy_(source)
            return None
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            target.copy_(source, non_blocking=True)
            return self.copies.record_event()

    def wait(self, copied: torch.cuda.Event | None) -> None:
        """What is computed from now on comes after the copy. So its tensors may be freed from now on: for the allocator
        they belong to the stream that computes, and whatever gets their memory runs there.
        """
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)


class OnHost:
    """A tensor in host RAM. Autograd holds it until the backward pass is done with it."""

    def __init__(self, saved: Tensor, number: int) -> None:
        self.device, self.number = saved.device, number
        self.tensor = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=saved.is_cuda)


class Offload:
    """What a forward pass saves: on its way to the host, there, or on its way back."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.numbers = streams, itertools.count()
        self.leaving: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.waiting: WeakValueDictionary[int, OnHost] = WeakValueDictionary()  # not used yet
        self.coming: dict[OnHost, tuple[Tensor, torch.cuda.Event | None]] = {}

    def pack(self, saved: Tensor) -> Tensor | OnHost:
        """What autograd keeps in the place of a tensor: itself, or its copy on the host."""
        if stays_on_device(saved):
            return saved
        self.finish()
        saved = saved.detach()  # without its graph, which holds these hooks: they would keep each other alive
        packed = OnHost(saved, next(self.numbers))
        self.leaving = saved, self.streams.copy(saved, packed.tensor)
        self.waiting[packed.number] = packed
        return packed

    def finish(self) -> None:
        """Nothing is on its way to the host any more."""
        if self.leaving is not None:
            self.streams.wait(self.leaving[1])
            self.leaving = None

    def unpack(self, packed: Tensor | OnHost) -> Tensor:
        """The tensor on its device again; the last one before it that was not used yet is on its way from now on."""
        if not isinstance(packed, OnHost):
            return packed
        self.bring(packed)
        tensor, copied = self.coming.pop(packed)
        self.streams.wait(copied)
        self.waiting.pop(packed.number, None)
        following = self.waiting.get(max(self.waiting.keys(), default=-1))
        if following is not None:
            self.bring(following)
        return tensor

    def bring(self, packed: OnHost) -> None:
        """Starts its way back, if it has not begun yet."""
        if packed not in self.coming:
            tensor = torch.empty_like(packed.tensor, device=packed.device)
            self.coming[packed] = tensor, self.streams.copy(packed.tensor, tensor)

    def __del__(self) -> None:
        """What came and was not used is not freed while it is being copied."""
        for _, copied in self.coming.values():
            self.streams.wait(copied)


def stays_on_device(saved: Tensor) -> bool:
    """Weights stay, and views of them: FSDP frees and gathers them. So do indices: the batch holds them anyway."""
    is_weight = isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter)
    return is_weight or not (saved.is_floating_point() or saved.dtype == torch.bool)


@contextmanager
def activations_on_host(is_on: bool, device: torch.device) -> Iterator[None]:
    """While it is open, what the backward pass needs goes to host RAM (page-locked on CUDA), but for the weights."""
    if not is_on:
        yield
        return
    offload = Offload(streams_of(device))
    with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
        yield
    offload.finish()


@cache
def streams_of(device: torch.device) -> Streams:
    """One object for all passes: also the copies of two micro-batches then come one after the other."""
    return Streams(device)
