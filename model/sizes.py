"""Sizes and limits that several rooms need. No torch here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD_CHUNK_LOGITS = 1024 * 152_064  # logits made at a time: 0.6 GiB in fp32. At most two such tensors exist at once.
HEAD_GROWTH = 8  # times as many on CUDA at most, if the dry run finds room: 2.3 GiB in bf16
MERGED_ROWS = 1024  # rows of a matrix that are in fp32 at a time, where LoRA is merged into it
OPTIMIZER_CHUNK = 2**23  # elements updated at a time, of about 30 bytes each: 0.25 GiB, and two chunks are in flight

MOST_AT_ONCE = 256  # sequences that run at a time, for each rank of an engine: vLLM's default for offline use on CPU
MOST_ON_GPU = 512  # sequences that an engine runs at a time on GPUs: vLLM's largest batch that has a CUDA graph
CPU_BLOCK = 32  # tokens of a cache block on CPU, the fewest that vLLM takes: 128 are no faster (benchmarks/README.md)
CPU_CACHE = 2**30  # bytes of that cache in a rank, at most; the environment's VLLM_CPU_KVCACHE_SPACE (GiB) replaces it


def head_dim(config: PretrainedConfig) -> int:
    """The width of one attention head, by the config of a text model."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def expert_width(config: PretrainedConfig) -> int:
    """The inner width of one expert, by the config of a mixture of experts."""
    return getattr(config, "moe_intermediate_size", None) or config.intermediate_size


def active_share(config: PretrainedConfig, ndim: int) -> float:
    """The share of a layer's tensor that a token is multiplied by: a matrix, or its experts' of [expert, out, in]."""
    has_experts = ndim == 3 and config.model_type in MIXTURES  # else three are a convolution's, which is small
    return config.num_experts_per_tok / config.num_experts if has_experts else float(ndim == 2)


def attention_layers(config: PretrainedConfig) -> int:
    """The number of layers with keys and values in a cache, by the config of a text model."""
    return config.num_hidden_layers - (getattr(config, "layer_types", None) or []).count("linear_attention")


def linear_widths(config: PretrainedConfig) -> tuple[int, int]:
    """The widths of all keys and of all values of linear attention, by the config of a text model; 0 without it."""
    if config.model_type not in HYBRIDS:
        return 0, 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, config.linear_num_value_heads * config.linear_value_head_dim


def state_bytes(config: PretrainedConfig) -> int:
    """Bytes that vLLM's cache takes for a sequence beside its keys and values, at most; 0 without linear attention.

    A layer of it has two states, one of them for prompts that begin alike: a matrix for each head, and what the
    convolution looks back on, here all in fp32. Keys and values are kept in blocks of as many bytes as a state, so a
    layer of them is rounded up by one.
    """
    keys, values = linear_widths(config)
    if not values:
        return 0
    state = values * config.linear_key_head_dim + (config.linear_conv_kernel_dim - 1) * (2 * keys + values)
    return 4 * state * (2 * config.num_hidden_layers - attention_layers(config))


def kv_heads(config: PretrainedConfig) -> int:
    """The number of heads of keys and values, by the config of a text model."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


# Mixtures of experts, and models with linear attention in most layers, that are implemented.
MIXTURES = ("qwen3_moe", "qwen2_moe", "olmoe")
HYBRIDS = ("qwen3_5_text",)
# Types of which the text part alone is trained and run: type -> the architecture of that part. The tower is left out.
TEXT_ALONE = {"qwen3_5": "Qwen3_5ForCausalLM"}


def cpu_cache_bytes(
    config: PretrainedConfig, max_model_len: int, itemsize: int, tp_size: int, most_sequences: int | None = None
) -> int:
    """CPU: room for the sequences that run at once, at most `most_sequences` and `CPU_CACHE`.

    vLLM goes round all blocks that it has: all would soon be resident, however few are in use.
    """
    config = config.get_text_config()
    heads = max(kv_heads(config) // tp_size, 1)
    per_token = 2 * attention_layers(config) * heads * head_dim(config) * itemsize
    tokens = -(-max_model_len // CPU_BLOCK) * CPU_BLOCK
    sequences = min(MOST_AT_ONCE * tp_size, most_sequences or math.inf)
    return min(CPU_CACHE, (sequences + 8) * (tokens * per_token + state_bytes(config) // tp_size))
