"""Linear attention (the gated delta nets of Qwen3.5), asked for by the model: it sees each packed sequence alone.

A recurrence has no mask: over packed sequences it would go on from one into the next. transformers
has `cu_seq_lens_q` for them, which its own code drops without a word: only flash-linear-attention
reads it. So a module runs on rows, one for each whole sequence, whichever code computes it. The
padding is on the right, where no token looks. A shared prompt is computed for each completion.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from model.layout import Layout


def run_in_rows(layers: list[nn.Module]) -> None:
    """Has the layers with linear attention compute it in rows, from now on."""
    for layer in layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.forward = partial(forward_in_rows, layer.linear_attn.forward)


@torch.compiler.disable  # as packed attention
def forward_in_rows(
    forward: Callable[[Tensor], Tensor], hidden_states: Tensor, layout: Layout, **unused: object
) -> Tensor:
    """The output of a module of linear attention for packed hidden states, both [1, N, D]."""
    rows = layout.make_rows() if layout.make_rows else layout
    sizes = [count * length for count, length in rows.rectangles]
    parts = hidden_states[0].index_select(0, rows.positions_M).split(sizes)
    outputs = []
    for shape, part in zip(rows.rectangles, parts, strict=True):
        outputs.append(forward(part.unflatten(0, shape)).flatten(0, 1))
    return torch.cat(outputs).index_select(0, rows.slots_N)[None]


def leave_tower_out() -> None:
    """Has vLLM's text model of Qwen3.5 skip the tower's weights in published files, as it skips MTP's."""
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
    from vllm.model_executor.models.utils import WeightsMapper

    Qwen3_5ForCausalLM.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_prefix={"model.visual.": None})
