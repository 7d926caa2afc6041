"""Where the sequences of a micro-batch lie: in its positions, and in the slots of its attention. See `batch.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Segment(NamedTuple):
    """A sequence in a micro-batch: its positions from `start` on. Attention sees those before `start`, too."""

    index: int | None  # of the sequence in the rollout; None: an empty batch
    start: int
    stop: int  # its length
    prefix: int | None = None  # the segment whose first positions are those before `start`; None: there are none

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a micro-batch lie. Attention works on M slots, which hold the N packed positions."""

    max_length: int  # of a sequence
    # CUDA: sequence s has queries cu_seqlens[s] .. cu_seqlens[s + 1] and the keys of slots cu_seqlens_k[s] .. [s + 1].
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    # CPU: sequences of similar length share a padded rectangle; the rectangles lie end to end.
    rectangles: list[tuple[int, int]]  # sequences and slots of each: M is the sum of the products
    positions_M: Tensor | None  # the packed position in each slot; padding has one of its sequence; None: slot m has m
    slots_N: Tensor | None  # the slot of each packed position; the first one where several sequences share it
