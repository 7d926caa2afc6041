"""Weights from disk into shards: a model is built without storage, sharded, and filled one parameter at a time.

    with without_storage(): model = ...   # parameters on the meta device, buffers (rotary frequencies) real
    shard(...)                            # FSDP2 divides shapes, not yet bytes
    fill(root, model, path, device)       # rank 0 reads, every rank keeps its shard

transformers reads on rank 0: names, experts and tied weights are its business. The files are mapped into memory, so
a dense model costs no host RAM beyond the shards and a parameter on its way; experts are stacked in a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import cached_file

from fsdp_utils import fill_from_main, gather_from_ranks, is_main_process
from model.sizes import TEXT_ALONE
from runtime.hub import has_hub
from runtime.progress import progress


def load_config(path: str) -> PretrainedConfig:
    """The config of a folder or hub id. Raises ValueError if there is none."""
    is_cut_off = not Path(path).exists() and not has_hub()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)  # nor is anybody asked
    except (OSError, ValueError) as error:
        reason = f"is neither a folder with a model nor a model that the hub has: {error}"
        if "custom code" in str(error):
            reason = "needs code of its own, which is never run; use one that transformers knows."
        elif is_cut_off:
            reason = "is no folder, nor in the cache of the hub, which cannot be reached."
        raise ValueError(f"--model {path!r} {reason}") from None
    config._attn_implementation = "eager"  # a policy has its own: that of the file may not be installed
    if config.model_type not in TEXT_ALONE:
        return config
    text = config.get_text_config()
    text.architectures = [TEXT_ALONE[config.model_type]]
    return text


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id. Raises ValueError if there is none.

    Where tokenizer.json exists, it decides: of the class that tokenizer_config.json names, or of the model's type,
    transformers would take parts of its own instead, which split texts otherwise, or lose their spaces.
    """
    kind, options = AutoTokenizer, {"trust_remote_code": False}
    try:
        if cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False):
            kind = PreTrainedTokenizerFast
            options = {"added_tokens_decoder": {}, "split_special_tokens": False, "clean_up_tokenization_spaces": False}
        tokenizer = kind.from_pretrained(path, **options)
    except Exception as error:  # noqa: BLE001  what the library of tokenizers raises for a damaged file
        raise ValueError(f"--model {path!r} has no tokenizer that could be read: {error}") from None
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder) + 1:  # what transformers makes without its files
        raise ValueError(
            f"--model {path!r} has no tokenizer; copy that of the base model into it "
            "(tokenizer.json, tokenizer_config.json, chat_template.jinja)."
        )
    return tokenizer


def model_from_config(config: PretrainedConfig, **options: object) -> PreTrainedModel:
    """A new model of this architecture with its language-model head."""
    auto = AutoModelForCausalLM if getattr(config, "vision_config", None) is None else AutoModelForImageTextToText
    return auto.from_config(config, **options)


def model_of_shapes(config: PretrainedConfig) -> PreTrainedModel:
    """The model as names and shapes alone."""
    with torch.device("meta"):
        return model_from_config(config)


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """The vision tower of Qwen2.5-VL; None of a model without vision."""
    return getattr(model.base_model, "visual", None)


@contextmanager
def without_storage() -> Iterator[None]:
    """Puts new parameters of the block on the meta device. Buffers are real: no file has their values."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # on meta already: a tied one, which must stay the same object
            return None
        return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def fill(root: nn.Module, model: PreTrainedModel, path: str, device: torch.device) -> None:
    """Makes storage on `device` for what has none in `root`, and fills its part `model` with the weights at `path`.

    All ranks call it; rank 0 reads. Raises ValueError, on all, if files are missing or do not fit.
    """
    # As `to_empty`, but not for buffers.
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    model.tie_weights()  # an unsharded parameter has now a tensor for each of its names
    problem, weights = "", {}
    if is_main_process():
        try:
            weights = read_weights(path, model)
        except (ValueError, OSError) as error:
            problem = f"the model {path!r}: {error}"
    if problem := gather_from_ranks(problem)[0]:
        raise ValueError(problem)
    targets = model.state_dict(keep_vars=True)
    own = {name: target for name, target in targets.items() if ".lora_" not in name}
    for name in progress("load weights", items=own):
        fill_from_main(own[name], weights.pop(in_files(name), None))


def read_weights(path: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights at `path` (folder or hub id), by their names in this model. Raises OSError or ValueError."""
    options = {"dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    options["generation_config"] = GenerationConfig()  # that of the files may be invalid
    config = load_config(path)
    config.dtype = None  # then "auto" is that of the files, which stay mapped; a copy would be converted in memory
    try:
        loaded, found = type(model).from_pretrained(path, config=config, **options)
    except SafetensorError as error:
        raise ValueError(f"a file is damaged ({error}); download or copy it again (git lfs pull).") from None
    except RuntimeError as error:  # a matrix of an expert is missing, or has another shape
        raise ValueError(f"its files do not fit its config.json: they cannot be stacked: {error}") from None
    if wrong := {kind: names for kind, names in found.items() if names}:
        named = {kind.replace("_", " "): sorted(map(str, names))[:5] for kind, names in wrong.items()}
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in named.items())
        raise ValueError(f"its files do not fit its config.json: {listed}.")
    return loaded.state_dict()


def in_files(name: str) -> str:
    """The name that a parameter has without LoRA, whose adapters stand around the layers of the model."""
    return name.replace(".base_layer.", ".")
