"""Linear attention (the gated delta nets of Qwen3.5) that sees each packed sequence alone.

A recurrence has no mask: over packed sequences it would go on from one into the next. transformers
has `cu_seq_lens_q` for them, which its own code drops without a word: only flash-linear-attention
reads it. So a module runs on rows, one for each whole sequence, whichever code computes it. The
padding is on the right, where no token looks. A shared prompt is computed for each of its
completions. Dimensions: `batch.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from model.packed import Packing


def run_in_rows(layers: list[nn.Module]) -> bool:
    """Has the layers with linear attention compute it in rows, from now on; returns whether there are any."""
    modules = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    for module in modules:
        module.forward = partial(forward_in_rows, module.forward)
    return bool(modules)


@torch.compiler.disable  # as packed attention
def forward_in_rows(
    forward: Callable[[Tensor], Tensor], hidden_states: Tensor, packing: Packing, **unused: object
) -> Tensor:
    """The output of a module of linear attention for packed hidden states, both [1, N, D]."""
    rows = packing.rows or packing
    sizes = [count * length for count, length in rows.rectangles]
    parts = hidden_states[0].index_select(0, rows.positions_M).split(sizes)
    outputs = []
    for shape, part in zip(rows.rectangles, parts, strict=True):
        outputs.append(forward(part.unflatten(0, shape)).flatten(0, 1))
    return torch.cat(outputs).index_select(0, rows.slots_N)[None]
