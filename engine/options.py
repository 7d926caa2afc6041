"""The engine's settings, as plain values for `vllm.LLM`, and checks of its start. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from flags import EngineSettings
from model.sizes import CPU_BLOCK, HYBRIDS, MOST_ON_GPU, TEXT_ALONE, cpu_cache_bytes
from model.weights import load_config


class EngineDemand(NamedTuple):
    """The most that the calls of a run ask of one engine."""

    sequences: int | None = None  # completions of a call; None: any number
    images: dict[str, object] = {}  # noqa: RUF012  arguments for images: `data.image_options`


ANY_TEXT = EngineDemand()


def largest_share(calls: list[tuple[int, int]], num_engines: int) -> int:
    """The most completions that one engine makes in a call, from the (prompts, samples of each) of every call."""
    return max(-(-prompts // num_engines) * num_samples for prompts, num_samples in calls)


def engine_options(
    model_path: str, settings: EngineSettings, is_cuda: bool, tp_size: int, demand: EngineDemand = ANY_TEXT
) -> dict[str, object]:
    """The arguments of `vllm.LLM`."""
    config = load_config(model_path)
    options = {
        "model": model_path,
        "load_format": settings.load_format,
        "dtype": settings.dtype,
        "tensor_parallel_size": tp_size,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": settings.max_model_len,
        "enforce_eager": settings.enforce_eager or not is_cuda,
        "enable_sleep_mode": is_cuda,
        "logprobs_mode": "processed_logprobs",  # after the temperature: what the tokens were really drawn from
        "seed": 0,  # external_launcher wants the same one on every rank; Engine.sample sets its own
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    overrides = {} if settings.head_dtype is None else {"head_dtype": settings.head_dtype}
    if config.model_type in HYBRIDS:
        # The files may be of a model with a tower.
        overrides["architectures"] = config.architectures or list(TEXT_ALONE.values())
    if overrides:
        options["hf_overrides"] = overrides
    if is_cuda:
        options |= {
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            # vLLM's default differs by GPU (256 or 1,024); batches above 512 have no CUDA graph.
            "max_num_seqs": min(MOST_ON_GPU, demand.sequences or MOST_ON_GPU),
            "enable_return_routed_experts": settings.router_replay,
            "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},  # FlashInfer's: see vllm_setup.py
            # FlashInfer tries kernels before a barrier, which a node without nvcc never reaches.
            # It also changes the layout of experts, into which a sync writes: theirs are Triton's.
            "kernel_config": {"enable_flashinfer_autotune": False, "moe_backend": "triton"},
            "gdn_prefill_backend": "triton",  # linear attention: FlashInfer's would be compiled, by nvcc
        }
    else:
        itemsize = getattr(torch, settings.dtype).itemsize
        options["block_size"] = CPU_BLOCK
        options["kv_cache_memory_bytes"] = cpu_cache_bytes(
            config, settings.max_model_len, itemsize, tp_size, demand.sequences
        )
    return options | demand.images


def stop_ids(tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[str]) -> list[int]:
    """The ids of --stop_tokens. Raises ValueError for a text that is not one token."""
    vocabulary = tokenizer.get_vocab() if stop_tokens else {}
    if unknown := [token for token in stop_tokens if token not in vocabulary]:
        known = ", ".join(tokenizer.all_special_tokens)
        raise ValueError(f"--stop_tokens {unknown[0]!r}: no token of the tokenizer, whose special ones are {known}.")
    return [vocabulary[token] for token in stop_tokens]


def check_head(dtypes: list[str], settings: EngineSettings) -> None:
    """Raises ValueError if the `head_dtypes` of the engine are not --head_dtype: vLLM only warns and takes another."""
    if settings.head_dtype is not None and dtypes != [settings.head_dtype]:
        raise ValueError(
            f"--head_dtype {settings.head_dtype}: vLLM computes the logits of this model, on this machine, "
            f"in {', '.join(dtypes) or 'no layer that knows it'}; leave the flag out."
        )


def head_dtypes(model: nn.Module) -> list[str]:
    """The dtypes of the logits of vLLM's model: one, if all is well."""
    known = {module.head_dtype for module in model.modules() if hasattr(module, "head_dtype")}
    return sorted(str(dtype).removeprefix("torch.") for dtype in known)
