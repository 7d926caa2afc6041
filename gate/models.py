"""Refuses models that would be trained wrongly without a word, or end amid the start, before a weight is read.

There is no list of families that trainer and engine compute alike: the gap of the log-probs decides, in each update
(--max_rollout_gap). docs/data.md names those that were tried. Imports no torch.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from model.sizes import HYBRIDS, MIXTURES, kv_heads
from runtime.parts import part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READ = (".json", ".jinja", ".model", ".txt")  # files that are read before weights
POINTER = b"version https://git-lfs"  # how a file begins that git has left on its server
QUANTIZED = ("quantization_config", "compression_config", "quantization")  # settings of config.json
OVERFLOWING = ("gemma2", "gemma3", "gemma3_text", "glm4")  # in float16, by vllm/config/model.py
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # in configs


def check_path(path: str) -> None:
    """Raises ValueError for the folder of a run, and for files that git has not fetched; `load_config` for others."""
    for file in (*Path(path).glob("*"), *Path(path).glob("additional_chat_templates/*")):
        if file.suffix in READ and file.is_file() and file.open("rb").read(len(POINTER)) == POINTER:
            raise ValueError(f"--model {path!r}: git has not fetched its {file.name}; run `git lfs pull` there.")
    config = Path(path) / "config.json"
    if config.exists() and '"out_dir":' in config.read_text("utf-8", errors="replace"):
        raise ValueError(
            f"--model {path!r} is the folder of a run, not of a model; give its final, or one of its step_N."
        )


def checked_config(path: str) -> PretrainedConfig:
    """The config of a folder or hub id. Raises ValueError for files that are damaged, quantized, or of an adapter."""
    from transformers.utils import cached_file

    from model.weights import load_config

    check_path(path)
    with settings_of(path):
        config = load_config(path)
    find = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    if find("adapter_config.json"):
        raise ValueError(f"--model {path} has an adapter beside its weights; merge it into them, or remove it.")

    def read(name: str) -> dict[str, object]:
        file = find(name)
        try:
            return {} | json.loads(Path(file).read_text("utf-8")) if file else {}
        except (TypeError, ValueError):
            raise ValueError(f"--model {path}: its {name} is damaged; download or copy it again.") from None

    stored = read("config.json")
    for settings, name in product((stored, stored.get("text_config") or {}, read("hf_quant_config.json")), QUANTIZED):
        if settings.get(name) is not None:
            raise ValueError(
                f"--model {path} is quantized ({name}: {str(settings[name])[:60]}), which is not implemented; give the "
                "model in bfloat16. If its weights are that, take the setting out."
            )
    ends = {"eos_token_id": read("generation_config.json").get("eos_token_id")}
    check_ids(path, "generation_config.json", ends, config.get_text_config().vocab_size)
    return config


@contextmanager
def settings_of(path: str) -> Iterator[None]:
    """Raises ValueError where transformers refuses a setting of config.json in the block."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, AttributeError, LookupError, TypeError) as error:
        what = str(error).partition(". Errors")[0]
        raise ValueError(f"--model {path}: its config.json has a setting that transformers refuses: {what}.") from None


def check_ids(path: str, file: str, settings: dict[str, object], num_rows: int) -> None:
    """Raises ValueError if an end or padding token of these settings is none of the model's."""
    for name in ("eos_token_id", "pad_token_id"):
        value = settings.get(name)
        for i in value if isinstance(value, list) else [] if value is None else [value]:
            if type(i) is not int or not 0 <= i < num_rows:
                raise ValueError(f"--model {path}: {name} {value!r} in its {file}; use ids from 0 to {num_rows - 1}.")


def check_model(
    path: str, config: PretrainedConfig, limits: tuple[int, int], tensor_parallel_size: int, router_replay: bool = False
) -> None:
    """Raises ValueError for a model that these flags cannot train, or only sample.

    `limits`: most tokens of a prompt, and of a completion in training or evaluation.
    """
    text = config.get_text_config()
    kind = text.model_type
    is_mixture = any((getattr(text, name, None) or 1) > 1 for name in NUMBERS_OF_EXPERTS)
    if is_mixture and kind not in MIXTURES:
        raise ValueError(f"--model {path} ({kind}) has experts; use one of the types {', '.join(MIXTURES)}.")
    if router_replay and not is_mixture:
        raise ValueError(f"--router_replay: --model {path} ({kind}) has no experts to choose from; leave it out.")
    if getattr(text, "num_attention_heads", None) is None:
        raise ValueError(f"--model {path} ({kind}) has no attention; use a family that docs/data.md lists.")
    check_ids(path, "config.json", vars(text), text.vocab_size)
    check_context(path, text, limits)
    check_parallel(text, tensor_parallel_size)
    check_layers(path, config)


def length_limits(args: Namespace) -> tuple[int, int]:
    """The most tokens of a prompt, and of a completion in training or evaluation."""
    return args.max_prompt_tokens, max(args.max_completion_tokens, *args.eval_max_completion_tokens)


def check_trained(args: Namespace, config: PretrainedConfig) -> None:
    """Raises ValueError for a config of --model that these flags cannot train."""
    check_model(args.model, config, length_limits(args), args.tensor_parallel_size, args.router_replay)
    check_range_of(f"--model {args.model}", config, args.dtype)
    if args.compile:
        check_compile(args.model, config, args.dtype)
    if args.lora_targets:
        from model.weights import model_of_shapes

        part("extras.models.lora", "--lora_rank").target_names(model_of_shapes(config), args.lora_targets)


def check_range_of(given: str, config: PretrainedConfig, dtype: str) -> None:
    """Raises ValueError for a model whose activations are known to exceed 65,504, the largest number of float16."""
    if dtype == "float16" and config.model_type in OVERFLOWING:
        raise ValueError(
            f"--dtype float16: {given} ({config.model_type}) overflows in it, says vLLM of {', '.join(OVERFLOWING)}; "
            "use --dtype bfloat16."
        )


def check_compile(path: str, config: PretrainedConfig, dtype: str) -> None:
    """Raises ValueError for experts that --compile does not know: torch compiles their matrices in bfloat16 alone.

    Otherwise transformers would multiply them one by one, outside of the graph.
    """
    kind = config.get_text_config().model_type
    if kind in MIXTURES and dtype != "bfloat16":
        raise ValueError(
            f"--compile with --dtype {dtype}: the experts of --model {path} ({kind}) are compiled in bfloat16 alone; "
            "use --dtype bfloat16, or leave --compile out."
        )


def check_layers(path: str, config: PretrainedConfig) -> None:
    """Raises ValueError for attention that cannot be told of packed sequences, or no layers to shard."""
    from model.weights import model_of_shapes

    with settings_of(path):
        model = model_of_shapes(config)
    has_interface = model._supports_attention_backend or config.model_type in HYBRIDS  # these have it without saying so
    if not (has_interface and hasattr(model.get_decoder(), "layers")):
        raise ValueError(
            f"--model {path} ({config.model_type}) has layers or attention outside the interface of transformers; "
            "use a family that docs/data.md lists, Qwen3, Llama or OLMo 3 for example."
        )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(
            f"--model {path} ({config.model_type}) has a head with a bias, which is not implemented; use a family that "
            "docs/data.md lists."
        )


def check_context(path: str, config: PretrainedConfig, limits: tuple[int, int]) -> None:
    """Raises ValueError for sequences beyond the context, where trainer and engine agree, but no model makes sense.

    The context is the one that vLLM computes. For yarn it is the length of vLLM's table of angles: vLLM takes yarn's
    `max_position_embeddings` for the length after scaling, but in Qwen's model cards it is the one before.
    """
    longest = sum(limits)
    most = getattr(config, "model_max_length", None) or getattr(config, "max_position_embeddings", None) or math.inf
    given = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in given.values() if isinstance(each, dict)]  # one for each kind of layer, as in Gemma 3
    for rope in by_kind or [given]:
        kind = rope.get("rope_type")
        context = rope.get("original_max_position_embeddings", 0) if kind == "yarn" else most
        # Gemma 3 gives the length after linear scaling.
        if kind == "yarn" or (kind == "linear" and not by_kind):
            context *= rope.get("factor") or 1
        if longest > context:
            raise ValueError(
                f"--max_prompt_tokens {limits[0]} + a completion of {limits[1]} tokens = {longest} is beyond "
                f"the context of --model {path}, {context:g} tokens; lower them by {longest - context:g}."
            )


def check_parallel(config: PretrainedConfig, size: int) -> None:
    """Raises ValueError if vLLM cannot divide the attention heads among so many ranks."""
    heads, kv = config.num_attention_heads, kv_heads(config)
    if heads % size or max(kv, size) % min(kv, size):  # a rank has some of the heads of keys, or several ranks have one
        raise ValueError(
            f"--tensor_parallel_size {size} cannot divide {heads} attention heads and {kv} heads of keys and values; "
            "use a smaller one that divides both."
        )
