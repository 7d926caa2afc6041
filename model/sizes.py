"""Sizes that the code uses and the planner's estimate counts on. Imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD_CHUNK_LOGITS = 1024 * 152_064  # logits made at a time: 0.6 GiB in fp32. At most two such tensors exist at once.
OPTIMIZER_CHUNK = 2**24  # elements updated at a time, of about 30 bytes each: at most 0.5 GiB


def head_dim(config: PretrainedConfig) -> int:
    """The width of one attention head, by the config of a text model."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
