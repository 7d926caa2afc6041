"""Weights from disk into shards: a model is built without storage, sharded, and filled one parameter at a time.

    with without_storage(): model = ...   # parameters on the meta device, buffers (rotary frequencies) real
    shard(...)                            # FSDP2 divides shapes, not yet bytes
    fill(root, model, path, device)       # rank 0 reads, every rank keeps its shard

The files are mapped into memory: a model costs no host RAM beyond its shards, one full parameter,
and a copy of that on the way. The parameters get the same bits as by `from_pretrained`.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key
from transformers.models.auto import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import cached_file

from fsdp_utils import fill_from_main, gather_from_ranks, is_main_process
from model.sizes import MIXTURES, TEXT_ALONE
from runtime.hub import has_hub
from runtime.progress import progress

NAMES = ("model.safetensors", "model.safetensors.index.json")
MOVED_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # in old files; as in `from_pretrained`


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
    if config.model_type not in TEXT_ALONE:
        return config
    text = config.get_text_config()
    text.architectures = [TEXT_ALONE[config.model_type]]
    return text


def load_generation_config(path: str, config: PretrainedConfig, stop_ids: list[int]) -> GenerationConfig:
    """The generation_config.json of a folder or hub id, with more ids at which a completion ends."""
    derived = GenerationConfig.from_model_config(config)
    try:
        stored = GenerationConfig.from_pretrained(path)
    except OSError:
        stored = derived
    ends = derived.eos_token_id if stored.eos_token_id is None else stored.eos_token_id
    if not isinstance(ends, list):
        ends = [] if ends is None else [ends]
    ends = list(dict.fromkeys([*ends, *stop_ids]))  # each once, in this order
    kept = GenerationConfig()
    for name, value in stored.to_diff_dict().items():
        wider = copy.deepcopy(kept)
        setattr(wider, name, value)
        with suppress(ValueError):  # what is invalid could not be saved again
            wider.validate(strict=True)
            kept = wider
    kept.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    return kept


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id. Raises ValueError if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {path!r} has no tokenizer that could be read: {error}") from None
    if len(tokenizer.added_tokens_decoder) == len(tokenizer):  # what transformers makes of a folder without its files
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
    wanted = names_to_fill(model)
    # As `to_empty`, but not for buffers.
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    model.tie_weights()  # an unsharded parameter has now a tensor for each of its names
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    targets = {in_files(name): tensor for name, tensor in tensors.items()}
    problem, weights = None, {}
    if is_main_process():
        try:
            stored = open_weights(path)
            sources = match_names(model, wanted, stored)
            weights = {name: pieces_of(stored, keys, targets[name].shape) for name, keys in sources.items()}
        except (ValueError, OSError) as error:
            problem = f"the model {path!r}: {error}"
    problem, names = gather_from_ranks((problem, list(weights)))[0]
    if problem is not None:
        raise ValueError(problem)
    for name in progress("load weights", items=names):
        pieces = weights.get(name, [None])
        full = pieces[0] if len(pieces) == 1 else torch.cat(pieces).view(targets[name].shape)
        fill_from_main(targets[name], full)


def in_files(name: str) -> str:
    """The name that a parameter has without LoRA, whose adapters stand around the layers of the model."""
    return name.replace(".base_layer.", ".")


def names_to_fill(model: nn.Module) -> list[list[str]]:
    """The names in files of each parameter without storage (several if tied) and of each buffer that is saved."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    aliases = defaultdict(list)  # id of a parameter -> its names
    for name, parameter in parameters.items():
        if parameter.is_meta:
            aliases[id(parameter)].append(in_files(name))
    buffers = [[in_files(name)] for name in model.state_dict() if name not in parameters]
    return [*aliases.values(), *buffers]


def pieces_of(stored: dict[str, Tensor], keys: list[str], shape: torch.Size) -> list[Tensor]:
    """The pieces of the tensor of this shape, in a row: its experts' matrices, if it is [expert, out, in].

    Any other is one piece. It has several keys if the parameter is tied and stored under each of its names.
    """
    full = stored[keys[0]]
    if len(shape) == 3 and full.ndim == 2:
        pieces = [stored[key] for key in keys]
        rows = sum(len(piece) for piece in pieces)
        if rows != shape[0] * shape[1] or any(piece.shape[1:] != shape[2:] for piece in pieces):
            raise ValueError(
                f"{keys[0]} and its like have {rows} rows in the files, but {shape[0]} x {shape[1]} of {shape[2]} "
                "numbers by config.json."
            )
        return pieces
    if full.shape != shape:
        raise ValueError(f"{keys[0]} has the shape {list(full.shape)} in the files, but {list(shape)} by config.json.")
    for key in keys[1:]:
        if not torch.equal(full, stored[key]):
            raise ValueError(
                f"{keys[0]} and {key} differ in the files, but config.json ties them; set tie_word_embeddings to false."
            )
    return [full]


def open_weights(path: str) -> dict[str, Tensor]:
    """All tensors at `path` (folder or hub id) by their keys. The files are mapped: they are read where they are used.

    Raises OSError if there are none, ValueError if they cannot be read.
    """
    stored: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            stored |= load_file(file)
        except SafetensorError as error:
            raise ValueError(
                f"{file} is damaged ({error}); download or copy it again "
                "(a small file is a pointer of Git LFS: git lfs pull)."
            ) from None
    return stored


def weight_files(path: str) -> list[Path]:
    """The weights' files of a folder or hub id, downloaded if need be."""
    for name in NAMES:
        try:
            file = Path(cached_file(path, name))
        except OSError as error:
            missing = error
            continue
        if file.suffix != ".json":
            return [file]
        parts = set(json.loads(file.read_text("utf-8"))["weight_map"].values())
        return [Path(cached_file(path, part)) for part in sorted(parts)]
    why = "" if Path(path).is_dir() else f": {missing}"
    raise OSError(f"{path} has no weights in safetensors: none of {', '.join(NAMES)} was found{why}")


def match_names(model: PreTrainedModel, wanted: list[list[str]], keys: Iterable[str]) -> dict[str, list[str]]:
    """First name of each wanted tensor -> the keys that hold it, renamed as transformers does while loading.

    Matrices of experts are in the order of their stack; nothing else is converted. Raises ValueError,
    with the names, for weights that are missing, not the model's, or must be converted.
    """
    known = dict.fromkeys((name for names in wanted for name in names), True)
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if not isinstance(transform, WeightRenaming)]
    keys_of_name, converted = defaultdict(list), []
    for key in sorted(keys, key=dot_natural_key):  # expert 2 before 10, and its gate_proj before its up_proj
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        keys_of_name[name].append(key)
        if pattern is not None and model.config.model_type not in MIXTURES:
            converted.append(key)
    if converted:
        raise ValueError(f"its weights ({_some(converted)}) must be converted to the model's layout: not implemented.")
    sources = {names[0]: [key for name in names for key in keys_of_name.get(name, ())] for names in wanted}
    missing = [name for name, stored in sources.items() if not stored]
    ignored = re.compile("|".join([*MOVED_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ())]))
    unexpected = [keys[0] for name, keys in keys_of_name.items() if name not in known and not ignored.search(name)]
    if missing or unexpected:
        raise ValueError(
            f"its files do not fit its config.json: {len(missing)} weights are missing ({_some(missing)}), "
            f"{len(unexpected)} are not the model's ({_some(unexpected)})."
        )
    return sources


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "none"
