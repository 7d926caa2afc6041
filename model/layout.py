"""The places of a micro-batch's sequences: in its positions, and in the slots of attention. See `batch.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """A sequence in a micro-batch: its positions from `start` on. Attention sees those before `start`, too.

    >>> Segment(index=1, start=2, stop=5, prefix=0).length  # its first two positions are those of segment 0
    3
    """

    index: int | None  # the sequence's in the rollout; None: an empty batch
    start: int
    stop: int  # its length
    prefix: int | None = None  # the segment whose first positions are those before `start`; None: there are none

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The places of the sequences of a micro-batch. Attention works on M slots, which hold the N packed positions."""

    max_length: int  # of the longest sequence
    # CUDA: sequence s has queries cu_seqlens[s] .. [s + 1], keys in slots cu_seqlens_k[s] .. [s + 1].
    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    # CPU: sequences of similar length share a padded rectangle; the rectangles lie end to end.
    rectangles: Sequence[tuple[int, int]] = ()  # (sequences, slots of each): M is the sum of the products
    positions_M: Tensor | None = None  # the packed position in each slot; padding repeats one; None: slot m has m
    slots_N: Tensor | None = None  # the slot of each packed position; the first one where several sequences share it
    make_rows: Callable[[], Layout] | None = None  # CUDA: rectangles, too, which linear attention alone needs

    def to(self, device: torch.device) -> Layout:
        """The layout with its tensors on the device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved)
