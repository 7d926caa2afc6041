"""The planner's input as frozen dataclasses, and what follows from it alone.

`dry_run.setup_of` makes a `Setup` from the flags; the other functions of the planner take it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn
from transformers import PretrainedConfig

from flags import EngineSettings, Lora, Memory, Plan, Settings
from model.sizes import head_dim
from model.vision import tower_of
from model.weights import model_of_shapes

GIB = 1024**3


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder (Llama, Mistral, Qwen2, Qwen3; the text part of Qwen2.5-VL)."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    has_head_norms: bool  # of each query and key head, as Qwen3
    vocab: int
    projections: dict[str, tuple[int, int]]  # name -> (inputs, outputs) of each matrix of a layer
    layer_parameters: int
    root_parameters: int  # not in a layer: embedding, head, last norm, vision tower. FSDP gathers them as one unit
    tower_parameters: int  # of the vision tower, which is never trained; 0: there is none
    # What follows from these:
    q: int  # width of all query heads
    kv: int
    table: int  # parameters of the embedding, and as many of the head
    root_trained: int  # parameters outside the layers that are trained without LoRA
    parameters: int
    kv_per_token: int  # numbers in the cache of keys and values


def shape_of(config: PretrainedConfig, name: str) -> ModelShape:
    """The shape of the model `name`, without storage. Raises ValueError for one that the formulas do not cover."""
    text = config.get_text_config()
    known = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl_text")
    if text.model_type not in known or (text is not config and config.model_type != "qwen2_5_vl"):
        others = f"not {config.model_type!r}, which it can neither plan nor rule out"
        raise ValueError(f"{name}: the dry run knows the architectures {', '.join(known)}, {others}.")
    model = model_of_shapes(name, config)
    layers, tower = model.get_decoder().layers, tower_of(model)
    linear = {path.rpartition(".")[2]: each for path, each in layers[0].named_modules() if isinstance(each, nn.Linear)}
    root, of_tower = num_parameters(model) - num_parameters(layers), 0 if tower is None else num_parameters(tower)
    heads, kv_heads, width = text.num_attention_heads, text.num_key_value_heads, head_dim(text)
    return ModelShape(
        name=name, layers=text.num_hidden_layers, hidden=text.hidden_size, intermediate=text.intermediate_size,
        heads=heads, kv_heads=kv_heads, head_dim=width,
        has_head_norms=any(path.endswith("q_norm") for path, _ in layers[0].named_modules()), vocab=text.vocab_size,
        projections={key: (each.in_features, each.out_features) for key, each in linear.items()},
        layer_parameters=num_parameters(layers[0]), root_parameters=root, tower_parameters=of_tower,
        q=heads * width, kv=kv_heads * width, table=text.vocab_size * text.hidden_size, root_trained=root - of_tower,
        parameters=num_parameters(model), kv_per_token=2 * text.num_hidden_layers * kv_heads * width,
    )  # fmt: skip


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class RunShape(Settings, kw_only=True):
    """What the flags say of a step, beside `Plan`, `Memory` and `EngineSettings`."""

    num_rows: int | None  # usable training rows; None: not known
    max_prompt_tokens: int
    max_completion_tokens: int
    mean_prompt_tokens: float  # assumed, as --plan_prompt_tokens and --plan_completion_tokens say
    mean_completion_tokens: float
    tensor_parallel_size: int
    has_kl: bool
    over_vocabulary: bool  # that KL: the reference runs beside the update
    needs_first_logprobs: bool  # old log-probs are computed for the first update, too
    in_flight: bool
    num_checkpoints: int  # on the disk at a time, at most


@dataclass(frozen=True)
class Hardware:
    """The machines. Bytes, bytes per second, FLOPs per second; of one GPU unless said."""

    name: str
    gpus: int  # of the ranks, on all nodes
    nodes: int
    gpu_bytes: float  # that a process can take
    host_bytes: float  # of a node
    flops: float  # dense bf16
    flops_share: float  # of these that passes over whole sequences reach
    memory_speed: float
    link_speed: float  # to the other GPUs of the node, in one direction
    network_speed: float  # to other nodes
    host_speed: float  # to host RAM, in one direction
    generation_gpus: int = 0  # of generation servers, beside those of the ranks; 0: the ranks sample


@dataclass(frozen=True)
class Setup:
    """All that the formulas need."""

    model: ModelShape
    memory: Memory
    lora: Lora
    engine: EngineSettings
    plan: Plan
    run: RunShape
    hardware: Hardware
    teacher: ModelShape | None = None  # the reference of --reference; None: it is that of the policy

    @property
    def has_servers(self) -> bool:
        return self.hardware.generation_gpus > 0

    @property
    def compute_bytes(self) -> int:
        """Of a number in the trainer's arithmetic, in the engine and in its cache."""
        return 4 if self.engine.dtype == "float32" else 2

    @property
    def counted_tokens(self) -> int:
        """Of a micro-batch. In float32 each counts for two: the formulas of activations are those of bf16, in which
        only norms and logits are fp32, so this is an upper bound.
        """
        return self.memory.micro_batch_tokens * self.compute_bytes // 2

    @property
    def num_shards(self) -> int:
        """GPUs that share a copy of the policy: parameters, gradients, optimizer and reference are divided by it."""
        return self.memory.shard_ranks or self.hardware.gpus

    @property
    def num_copies(self) -> int:
        return self.hardware.gpus // self.num_shards

    @property
    def num_engines(self) -> int:
        """Engines in the ranks, or generation servers."""
        return (self.hardware.generation_gpus or self.hardware.gpus) // self.run.tensor_parallel_size

    @property
    def has_lora(self) -> bool:
        return self.lora.lora_rank > 0

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return self.lora.lora_targets or tuple(self.model.projections)

    @property
    def trained_per_layer(self) -> int:
        """Trained parameters of a decoder layer."""
        if self.has_lora:
            return self.lora.lora_rank * sum(sum(self.model.projections[name]) for name in self.lora_targets)
        return self.model.layer_parameters

    @property
    def trainable(self) -> int:
        return self.model.layers * self.trained_per_layer + (0 if self.has_lora else self.model.root_trained)

    @property
    def old_logprob_passes(self) -> float:
        """Passes of the policy over a rollout for old log-probs, which the first update may make by itself."""
        if self.plan.old_logprobs == "rollout":
            return 0
        return 1 if self.run.needs_first_logprobs else 1 - 1 / self.plan.updates_per_pass

    @property
    def reference_passes(self) -> int:
        """Passes of the reference over a rollout; over the vocabulary it runs beside each pass of updates."""
        return self.run.has_kl * (self.plan.num_iterations if self.run.over_vocabulary else 1)

    @property
    def has_reference_model(self) -> bool:
        """With LoRA the reference is the policy without its adapter, but for one of --reference."""
        return self.run.has_kl and (not self.has_lora or self.teacher is not None)

    @property
    def of_reference(self) -> Setup:
        """The same with the reference in the place of the policy: for its passes."""
        return replace(self, model=self.teacher or self.model)

    @property
    def trained_bytes(self) -> int:
        """Of a trained parameter, and of its gradient. Adapters are fp32."""
        return 2 if self.memory.param_dtype == "bfloat16" and not self.has_lora else 4

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients of one copy; its trained parameters take as many bytes."""
        return self.trainable * self.trained_bytes

    @property
    def stored_bytes(self) -> int:
        """Of one copy's parameters as the trainer keeps them. With LoRA the frozen ones are as in the passes."""
        if self.has_lora:
            return self.model.parameters * self.compute_bytes + self.gradient_bytes
        return self.model.parameters * self.trained_bytes

    @property
    def state_bytes(self) -> int:
        """Of one copy's optimizer: two moments; with bf16 parameters also the remainders (`model/optimizer.py`)."""
        return self.trainable * {4: 8, 2: 6}[self.trained_bytes]

    @property
    def sharers(self) -> int:
        """Completions of mean length that share their prompt in a micro-batch."""
        room = self.memory.micro_batch_tokens - self.run.mean_prompt_tokens
        of_prompt = min(self.plan.group_size, int(room // self.run.mean_completion_tokens))
        return max(1, of_prompt) if self.memory.share_prompts else 1

    @property
    def keys_per_position(self) -> float:
        """At most, where completions have one token: attention repeats a shared prompt's keys for each completion."""
        prompt, sharers = self.run.max_prompt_tokens, self.plan.group_size if self.memory.share_prompts else 1
        return sharers * (prompt + 1) / (prompt + sharers)
