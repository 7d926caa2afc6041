"""Sizes and limits that several rooms need, and the checks against them. No torch here."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD_CHUNK_LOGITS = 1024 * 152_064  # logits made at a time: 0.6 GiB in fp32. At most two such tensors exist at once.
OPTIMIZER_CHUNK = 2**24  # elements updated at a time, of about 30 bytes each: at most 0.5 GiB

MOST_AT_ONCE = 256  # sequences that run at a time, for each rank of an engine: vLLM's default for offline use on CPU
MOST_ON_GPU = 512  # sequences that an engine runs at a time on GPUs: vLLM's largest batch that has a CUDA graph
CPU_BLOCK = 32  # tokens of a cache block on CPU, the fewest that vLLM takes: 128 are no faster (benchmarks/README.md)
CPU_CACHE = 2**30  # bytes of that cache in a rank, at most; the environment's VLLM_CPU_KVCACHE_SPACE (GiB) replaces it


def check_path(path: str) -> None:
    """Raises FileNotFoundError if a model is neither in a folder nor can be on the hub. Asks nobody."""
    folder = Path(path)
    config = folder / "config.json"
    if folder.is_dir() and not config.exists():
        adapter = "; an adapter alone is no model" if (folder / "adapter_config.json").exists() else ""
        raise FileNotFoundError(f"--model {path!r} is no folder with a model: it has no config.json{adapter}.")
    if config.exists() and '"out_dir":' in config.read_text("utf-8", errors="replace"):  # by a run
        newest_first = sorted(folder.glob("step_*"), key=lambda step: -step.stat().st_mtime)
        saved = [policy for policy in (folder / "final", *newest_first) if policy.exists()]
        policy = f"its policy is {saved[0]}" if saved else "it has saved no policy yet"
        raise FileNotFoundError(f"--model {path!r} is the folder of a run, not of a model; {policy}.")
    is_hub_id = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path)
    # Beside other folders it is a folder that is misspelt, although a hub id may look like it.
    is_hub_id = is_hub_id and not (folder.parent.name and folder.parent.is_dir())
    if not folder.exists() and not is_hub_id:
        raise FileNotFoundError(
            f"--model {path!r}: no such folder ({folder.absolute()}), and not of the form of a hub id (owner/name)."
        )


@cache
def has_hub() -> bool:
    """Whether the hub answers within 5 s. If not, its libraries, which would try for a minute, use their caches."""
    from huggingface_hub import constants, errors, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except (errors.HTTPError, OSError):
        constants.HF_HUB_OFFLINE = True  # what the environment variable of this name sets
    return not constants.HF_HUB_OFFLINE


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


# What is refused: attributes of a config, values that are allowed, and how another one is called.
# The trainer, with its packed attention and chunked head, would not compute what the engine samples
# from.
REFUSED = (
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (0, 1), "{value} experts"),
    (("attn_logit_softcapping", "final_logit_softcapping"), (), "{name} = {value}"),
    (("logits_scaling", "logit_scale", "lm_head_multiplier"), (1,), "{name} = {value}"),
    (("dropout",), (0,), "{name} = {value}"),
    (("quantization_config",), (), "quantized weights"),
    (("kv_lora_rank",), (), "latent attention"),
    (("is_heterogeneous",), (False,), "layers of different sizes"),
    (("use_bidirectional_attention",), (False,), "attention to tokens that follow"),
    (("dual_chunk_attention_config",), (), "dual chunk attention"),
)
# Mixtures of experts, and models with linear attention in most layers, that are implemented; and the values of their
# configs that transformers and vLLM compute alike.
# Windows, for example, vLLM does not know here, and transformers does not hand Qwen2-MoE's to the attention.
WITH_EXPERTS = {"use_sliding_window": False, "attention_bias": False, "hidden_act": "silu"}
MIXTURES = {
    "qwen3_moe": WITH_EXPERTS | {"shared_expert_intermediate_size": 0},
    "qwen2_moe": WITH_EXPERTS | {"qkv_bias": True},
    "olmoe": WITH_EXPERTS | {
        "clip_qkv": None, "norm_topk_prob": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
}  # fmt: skip
HYBRIDS = {"qwen3_5_text": {"attention_bias": False, "hidden_act": "silu", "output_gate_type": "swish"}}
# Types of which the text part alone is trained and run: type -> the architecture of that part. The tower is left out.
TEXT_ALONE = {"qwen3_5": "Qwen3_5ForCausalLM"}
# Types of models that were tried here. Apertus: vLLM keeps parameters of its activation in bf16.
# DiffLlama, Doge: vLLM does not start. Nemotron: attention that is not told of the packing. Cohere 2:
# vLLM's windows are a token longer.
NOT_ALIKE = {"apertus", "cohere2", "diffllama", "doge", "nemotron"}
LAYERS = {"full_attention", "sliding_attention", "attention"}  # kinds of layers that are implemented
# Types with one window for all layers, in transformers' code (the first four) or in vLLM's (Qwen).
ONE_WINDOW = {"mistral", "ministral3", "phi3", "starcoder2", "qwen2", "qwen2_5_vl_text", "qwen3"}
# Word of the type that is refused, or of a reason -> what computes most alike.
NEAREST = {
    "gemma": "Gemma 3", "gpt_oss": "OLMo 3", "experts": "Qwen3-30B-A3B", "linear_attention": "Qwen3.5-0.8B to 27B",
}  # fmt: skip


def check_architecture(path: str, config: PretrainedConfig) -> None:
    """Raises ValueError for a model that trainer and engine do not compute alike, with the reasons."""
    text = config.get_text_config()
    own_scale = "logits_scaling" if text.model_type == "granite" else None  # see `Policy`
    parts = config, text, getattr(text, "ffn_config", None)  # DBRX has a config of its own for what has the experts
    reasons = []
    for names, allowed, words in REFUSED[text.model_type in MIXTURES :]:  # the first are the experts
        for part, name in itertools.product(parts, names):
            value = getattr(part, name, None)
            if name != own_scale and value not in (None, *allowed):
                reasons.append(words.format(name=name, value=value))
                break
    beside = "experts" if text.model_type in MIXTURES else "linear_attention"
    for name, value in (MIXTURES | HYBRIDS).get(text.model_type, {}).items():
        if getattr(text, name, value) != value:
            found = f"{name} = {getattr(text, name)} beside {beside}"
            reasons.append(f"{found}, where {value} alone is computed alike")
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    known = LAYERS | ({"linear_attention"} if text.model_type in HYBRIDS else set())
    reasons += [f"layers of the kind {kind}" for kind in sorted(set(kinds) - known)]
    if text.model_type in ONE_WINDOW and len(set(kinds)) > 1:
        reasons.append("windows in some layers alone, which trainer or engine would not compute")
    if getattr(text, "num_attention_heads", None) is None:
        reasons.append("no attention heads")
    if text.model_type in NOT_ALIKE:
        reasons.append("parts that trainer and engine do not compute alike")
    if reasons:
        found = f"({text.model_type}) has {' and '.join(reasons)}"
        near = [name for word, name in NEAREST.items() if word in found]
        raise ValueError(
            f"--model {path} {found}; needed is a dense model, Qwen3-MoE, Qwen2-MoE or OLMoE, with attention in all "
            "layers or as in Qwen3.5, plain logits, and weights in bf16 or fp32: use "
            f"{', '.join([*near, 'Qwen3-0.6B to 32B'])}, Qwen2.5 or Llama, for example."
        )


def check_context(path: str, config: PretrainedConfig, limits: tuple[int, int]) -> None:
    """Raises ValueError for sequences that trainer and engine would not compute alike.

    They are beyond the context, or their rotary angles depend, in the trainer alone, on the longest
    sequence of a batch. The context is the one that vLLM computes. For yarn it is the length of
    vLLM's table of angles: vLLM takes yarn's `max_position_embeddings` for the length after
    scaling, but in Qwen's model cards it is the one before.
    """
    longest = sum(limits)
    most = getattr(config, "model_max_length", None) or getattr(config, "max_position_embeddings", None) or math.inf
    given = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in given.values() if isinstance(each, dict)]  # those of each kind of layer, as in Gemma 3
    for rope in by_kind or [given]:
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings", 0)
        context = original if kind == "yarn" else most
        # Gemma 3 gives the length after linear scaling.
        if kind == "yarn" or (kind == "linear" and not by_kind):
            context *= rope.get("factor") or 1
        if longest > context:
            raise ValueError(
                f"--max_prompt_tokens {limits[0]} + a completion of {limits[1]} tokens = {longest} is beyond "
                f"the context of --model {path}, {context:g} tokens; lower them by {longest - context:g}."
            )
        if (kind == "longrope" and longest > original) or (kind == "dynamic" and "alpha" not in rope):
            advice = f"keep prompt and completion within {original} tokens, or use" if kind == "longrope" else "use"
            raise ValueError(
                f"--model {path}: its rotary angles ({kind}) change with the longest sequence of a batch, "
                f"which trainer and engine would not do alike; {advice} another model."
            )


def check_parallel(config: PretrainedConfig, size: int) -> None:
    """Raises ValueError if vLLM cannot divide the model among so many ranks."""
    text, tower = config.get_text_config(), getattr(config, "vision_config", None)
    heads, kv = text.num_attention_heads, kv_heads(text)
    inner = [getattr(text, f"{part}intermediate_size", None) for part in ("", "moe_", "shared_expert_")]
    inner = list(dict.fromkeys(filter(None, inner)))
    rows = -(-text.vocab_size // 64) * 64  # the head's: vLLM pads them
    divided = [heads, *inner, rows, getattr(tower, "num_heads", 0), getattr(tower, "intermediate_size", 0)]
    linear = [getattr(text, f"linear_num_{part}_heads", 0) for part in ("key", "value")]
    divided += linear
    sizes = []
    for ranks in range(1, heads + 1):
        divides_kv = max(kv, ranks) % min(kv, ranks) == 0  # a rank has some of their heads, or several ranks have one
        if divides_kv and not any(count % ranks for count in divided):
            sizes.append(ranks)
    if size not in sizes:
        linear_heads = f", {linear[0]} and {linear[1]} heads of linear attention" if any(linear) else ""
        raise ValueError(
            f"--tensor_parallel_size {size} cannot divide {heads} attention heads, {kv} heads of keys and values, "
            f"{' or '.join(map(str, inner))} units of an MLP{linear_heads} and {rows} logits; "
            f"use one of {', '.join(map(str, sizes))}."
        )


def check_cpu_kernels(path: str, config: PretrainedConfig, dtype: str, tensor_parallel_size: int) -> None:
    """Raises ValueError for experts or linear attention that vLLM's kernels for CPUs do not know."""
    text = config.get_text_config()
    if text.model_type in HYBRIDS:
        widths = text.linear_key_head_dim, text.linear_value_head_dim
        if dtype != "bfloat16" or widths not in ((64, 64), (128, 128)):
            raise ValueError(
                f"--model {path}: on CPUs vLLM has linear attention in --dtype bfloat16, and for heads of 64 or 128 "
                f"numbers, not in {dtype} for {widths[0]} and {widths[1]}; give that dtype, or use another model."
            )
    sizes = [text.hidden_size, expert_width(text) / tensor_parallel_size] if text.model_type in MIXTURES else []
    if any(size % 32 for size in sizes):
        raise ValueError(
            f"--model {path}: on CPUs vLLM needs a hidden size and, in each rank, a width of experts that are "
            f"multiples of 32, not {sizes[0]} and {sizes[1]:g}; use GPUs, another model, or fewer ranks an engine."
        )


def check_experts(path: str, config: PretrainedConfig, router_replay: bool, compiled_dtype: str | None = None) -> None:
    """Raises ValueError for --router_replay of a model without experts, and for experts that --compile does not know.

    `compiled_dtype`: --dtype, with --compile. In float32 torch cannot compile the experts' matrices: transformers then
    multiplies them one by one, outside of the graph.
    """
    kind = config.get_text_config().model_type
    if router_replay and kind not in MIXTURES:
        raise ValueError(f"--router_replay: --model {path} ({kind}) has no experts to choose from; leave it out.")
    if compiled_dtype == "float32" and kind in MIXTURES:
        raise ValueError(
            f"--compile with --dtype float32: the experts of --model {path} ({kind}) are compiled in bfloat16 alone; "
            "use --dtype bfloat16, or leave --compile out."
        )


def check_config(path: str, config: PretrainedConfig, limits: tuple[int, int], tensor_parallel_size: int) -> None:
    """Raises ValueError if the model cannot be trained: context, attention heads, attention or logits do not fit.

    `limits`: most tokens of a prompt, and of a completion in training or evaluation.
    """
    check_architecture(path, config)
    check_parallel(config, tensor_parallel_size)
    check_context(path, config.get_text_config(), limits)


def cpu_cache_bytes(
    config: PretrainedConfig, max_model_len: int, itemsize: int, tp_size: int, most_sequences: int | None = None
) -> int:
    """CPU: room for the sequences that run at once, at most `most_sequences` and `CPU_CACHE`.

    vLLM goes round all the blocks it has: all of them would soon be resident, however few are in
    use.
    """
    config = config.get_text_config()
    heads = max(kv_heads(config) // tp_size, 1)
    per_token = 2 * attention_layers(config) * heads * head_dim(config) * itemsize
    tokens = -(-max_model_len // CPU_BLOCK) * CPU_BLOCK
    sequences = min(MOST_AT_ONCE * tp_size, most_sequences or math.inf)
    return min(CPU_CACHE, (sequences + 8) * (tokens * per_token + state_bytes(config) // tp_size))
