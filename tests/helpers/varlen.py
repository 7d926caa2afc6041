"""torch's kernel for packed attention on CUDA, computed on CPUs by its documentation, below the same custom operator.

What is packed for a GPU can so be trained, and compiled, without one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

import policy
from model.attention import make_packing
from model.packed import Packing

Place = tuple[slice, slice, Tensor]  # queries and keys of a sequence, and which of the latter each of the former sees
windows: set[int] = set()  # of the calls so far: keys before a query; -1: all


def places(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, window: list[int]) -> Iterator[Place]:
    """Causal: the last query sees the last key. The window is the number of keys before a query."""
    before, after = window
    windows.add(before)
    assert after == 0 and max_q >= cu_q.diff().max() and max_k >= cu_k.diff().max()
    bounds = (cu.unfold(0, 2, 1).tolist() for cu in (cu_q, cu_k))
    for (first_q, end_q), (first_k, end_k) in zip(*bounds, strict=True):
        num_k = end_k - first_k
        distances = torch.arange(num_k - (end_q - first_q), num_k)[:, None] - torch.arange(num_k)
        seen = (distances >= 0) & (distances <= (num_k if before == -1 else before))
        yield slice(first_q, end_q), slice(first_k, end_k), seen


def by_head(x: Tensor, num_heads: int) -> Tensor:
    """[N, heads, head_dim] -> [num_heads, N, head_dim], each head of keys for its group of queries."""
    return x.transpose(0, 1).repeat_interleave(num_heads // x.shape[1], 0)


def attend(query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, window, *_):
    assert cu_q[-1] == len(query) and cu_k[-1] == len(key) == len(value)
    out, heads = torch.empty_like(query), query.shape[1]
    for q, k, seen in places(cu_q, cu_k, max_q, max_k, window):
        scores = by_head(query[q], heads) @ by_head(key[k], heads).mT * scale
        out[q] = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ by_head(value[k], heads)).transpose(0, 1)
    return out, torch.zeros(heads, len(query)), torch.zeros(2, dtype=torch.uint64)


def backward(grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng_state, scale, window):
    heads = query.shape[1]
    grads = torch.zeros_like(query), *(key.new_zeros(len(key), heads, key.shape[2]) for _ in range(2))
    for q, k, seen in places(cu_q, cu_k, max_q, max_k, window):
        parts = (query[q], key[k], value[k], grad[q])
        queries, keys, values, slopes = (by_head(part, heads) for part in parts)
        weights = (queries @ keys.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
        by_weight = slopes @ values.mT
        by_score = weights * (by_weight - (weights * by_weight).sum(-1, keepdim=True)) * scale
        for whole, part, at in zip(
            grads, (by_score @ keys, by_score.mT @ queries, weights.mT @ slopes), (q, k, k), strict=True
        ):
            whole[at] += part.transpose(0, 1)
    return grads[0], *(each.unflatten(1, (key.shape[1], -1)).sum(2) for each in grads[1:])


def pack_as_on_cuda(patch: pytest.MonkeyPatch) -> None:
    """While it is patched, policies pack for the kernel."""
    varlen._varlen_attn.register_kernel("cpu")(attend)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    patch.setattr(Packing, "to", lambda packing, device: packing)
    patch.setattr(policy, "make_packing", lambda segments, _: make_packing(segments, torch.device("cuda")))
