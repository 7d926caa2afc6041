"""Attention that sees each packed sequence alone, registered with transformers under the name "packed".

`make_layout` says where the sequences of a micro-batch lie, in the form that the device's kernel
wants; `Policy` passes it through the model to `packed_attention`. Any architecture that uses the
attention interface of transformers works unchanged. Dimensions: `batch.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from model.layout import Layout, Segment

RECTANGLE_PADDING = 128  # padding slots of a rectangle, at most; of 32 to 1,024, 64 and 128 are fast at all lengths


def make_layout(segments: tuple[Segment, ...], device: torch.device) -> Layout:
    """The layout of segments that lie end to end, on the device."""
    if device.type == "cpu":
        return padded_layout(segments)
    make_rows = cache(lambda: padded_layout(segments).to(device))
    return replace(varlen_layout(segments).to(device), make_rows=make_rows)


def varlen_layout(segments: tuple[Segment, ...]) -> Layout:
    """For CUDA: keys are gathered only where sequences share a prompt."""
    lengths_S, stops_S = torch.tensor([(segment.length, segment.stop) for segment in segments]).T
    cu_seqlens = F.pad(lengths_S.cumsum(0), (1, 0)).int()
    cu_seqlens_k = F.pad(stops_S.cumsum(0), (1, 0)).int()
    positions_M = None
    if cu_seqlens_k[-1] > cu_seqlens[-1]:
        sequences_M = torch.repeat_interleave(stops_S)  # the sequence of each slot
        offsets_M = torch.arange(len(sequences_M)) - cu_seqlens_k[sequences_M]
        positions_M = _positions(segments, sequences_M, offsets_M)
    return Layout(
        max_length=int(stops_S.max()), cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, positions_M=positions_M
    )


def padded_layout(segments: tuple[Segment, ...]) -> Layout:
    """For the CPU: each sequence whole, with the prompt that it shares; similar lengths share a rectangle."""
    stops_S = torch.tensor([segment.stop for segment in segments])
    rectangles, positions, is_real = [], [], []
    for group in group_by_length(stops_S.tolist()):
        members, stops = torch.tensor(group)[:, None], stops_S[group, None]
        offsets = torch.arange(int(stops[-1]))
        rectangles.append((len(group), len(offsets)))
        is_real.append((offsets < stops).flatten())
        positions.append(_positions(segments, members, offsets.minimum(stops - 1)).flatten())
    positions_M = torch.cat(positions)
    slots = torch.cat(is_real).nonzero()[:, 0]
    _, first = np.unique(positions_M[slots].numpy(), return_index=True)
    return Layout(max_length=int(stops_S.max()), rectangles=rectangles, positions_M=positions_M, slots_N=slots[first])


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """The indices of the sequences that share a rectangle, for each rectangle; the shortest first."""
    groups, padding, longest = [[]], 0, 0
    for s in sorted(range(len(lengths)), key=lambda s: lengths[s]):
        padding += len(groups[-1]) * (lengths[s] - longest)  # that this one brings to the members so far
        if padding > RECTANGLE_PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(s)
        longest = lengths[s]
    return groups


def _positions(segments: tuple[Segment, ...], sequences: Tensor, offsets: Tensor) -> Tensor:
    """The packed positions of these offsets from the beginning of these sequences: in the prefix, or their own."""
    lengths_S = torch.tensor([segment.length for segment in segments])
    starts_S = lengths_S.cumsum(0) - lengths_S
    before_S = torch.tensor([segment.start for segment in segments])
    holders_S = torch.tensor([s if segment.prefix is None else segment.prefix for s, segment in enumerate(segments)])
    prefix_S, own_S = starts_S[holders_S], starts_S - before_S
    return offsets + torch.where(offsets < before_S[sequences], prefix_S[sequences], own_S[sequences])


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, as transformers calls it; `options` has layout and window.

    Query [1, heads, N, head_dim], key and value [1, kv_heads, N, head_dim] -> [1, N, heads, head_dim].
    """
    layout = options.get("layout")
    assert isinstance(layout, Layout), "call the model through Policy, which passes the layout"
    # Configs or layers of most such models show it, before they are loaded: this is for one that does not.
    ignored = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    if False in (options.get("is_causal"), getattr(module, "is_causal", None)):
        ignored.append("tokens that follow")
    if ignored:
        raise ValueError(f"this model's attention uses {', '.join(ignored)}; packed attention does not implement it.")
    # The tokens that one sees: itself and those before. None: no sequence is longer, or the layer has no window, which
    # a 0 means, too.
    window = options.get("sliding_window") or None
    if window is not None and window >= layout.max_length:
        window = None
    attend = _attend_rectangles if layout.cu_seqlens is None else _attend_varlen
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(query, key, value, layout, options.get("scaling"), window)[None], None


AttentionInterface.register("packed", packed_attention)


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, window: int | None
) -> Tensor:
    """CUDA: torch's FlashAttention kernel. With more keys than queries, the last query sees the last key."""
    if layout.positions_M is not None:  # by `index_select`: the backward pass of x[positions] sorts them
        key, value = (x.index_select(0, layout.positions_M) for x in (key, value))
    before = -1 if window is None else window - 1  # the kernel counts the tokens before one, without itself
    return varlen_attn(
        query, key, value, layout.cu_seqlens, layout.cu_seqlens_k, layout.max_length, layout.max_length,
        scale=scaling, window_size=(before, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


@torch.compiler.disable  # its lengths are Python numbers, which differ by micro-batch: --compile cuts a layer here
def _attend_rectangles(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, window: int | None
) -> Tensor:
    """CPU: padded rectangles, exact because a causal query of a right-padded row sees no padding.

    A shared prompt has queries for each sequence: the causal mask needs as many queries as keys.
    """
    sizes = [count * length for count, length in layout.rectangles]
    in_slots = (x.index_select(0, layout.positions_M).split(sizes) for x in (query, key, value))
    rows = []
    for shape, *parts in zip(layout.rectangles, *in_slots, strict=True):
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)  # [S, heads, L, head_dim]
        is_grouped = q.shape[1] != k.shape[1]
        band = None  # then the kernel masks by itself, which is faster
        if window is not None and window < shape[1]:
            band = torch.ones(shape[1], shape[1], dtype=torch.bool).tril().triu(1 - window)  # a query sees these keys
        out = F.scaled_dot_product_attention(
            q, k, v, band, is_causal=band is None, scale=scaling, enable_gqa=is_grouped
        )
        rows.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(rows).index_select(0, layout.slots_N)
