"""The small frozen objects in which flags travel."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import TypeVar

Flags = TypeVar("Flags")


@dataclass(frozen=True)
class PromptFormat:  # how a row becomes a prompt
    prompt_column: str = "problem"
    answer_column: str = "answer"
    image_column: str | None = None
    prompt_format: str = "chat"
    system_prompt: str | None = None
    prompt_suffix: str = ""
    max_prompt_tokens: int = 1024
    max_pixels: int | None = None


@dataclass(frozen=True)
class Lora:
    lora_rank: int = 0  # 0: all weights are trained
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Memory:  # precision, and what lives where
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    offload: str = "none"
    offload_reference: bool = False
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    compile_layers: bool = False
    reduce_gradients_once: bool = False
    gather_parameters_once: bool = False
    micro_batch_tokens: int = 8192
    share_prompts: bool = False


@dataclass(frozen=True)
class AdamW:
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class EngineSettings:
    max_model_len: int  # tokens of prompt and completion together
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.6
    enforce_eager: bool = False
    seed: int = 1


@dataclass(frozen=True)
class Sampling:  # how a set of prompts is sampled: training, or one held-out set
    num_samples: int
    temperature: float
    max_completion_tokens: int
    top_p: float = 1.0


def from_args(kind: type[Flags], args: Namespace, **given: object) -> Flags:
    """The object of these flags; until every flag is declared in this file."""
    values = {field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)}
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in (values | given).items()})
