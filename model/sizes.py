"""Sizes that the code uses and the planner's estimate counts on. Imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD_CHUNK_LOGITS = 1024 * 152_064  # logits made at a time: 0.6 GiB in fp32. At most two such tensors exist at once.
OPTIMIZER_CHUNK = 2**24  # elements updated at a time, of about 30 bytes each: at most 0.5 GiB

# Name -> memory that a process can take (GiB), dense bf16 TFLOP/s, memory TB/s, and GB/s in one direction to the other
# GPUs of the node and to host RAM. From the data sheets.
GPUS = {
    "H100-80GB": (79.0, 989, 3.35, 450, 55),
    "H200-141GB": (139.5, 989, 4.8, 450, 55),
    "A100-80GB": (79.0, 312, 2.04, 300, 25),
    "A100-40GB": (39.3, 312, 1.56, 300, 25),
    "L40S-48GB": (44.3, 362, 0.86, 25, 25),
}


def head_dim(config: PretrainedConfig) -> int:
    """The width of one attention head, by the config of a text model."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
