"""What the planner is told, as frozen dataclasses, and what follows from it alone.

    ModelShape      the sizes in a config.json
    Memory, Lora    what is trained and where it lives, as in `flags.py`
    EngineSettings  the engine, as in `flags.py`
    RunShape        what the other flags say of a step
    Hardware        GPUs, nodes, host RAM, speeds

A `Setup` holds all of them. `dry_run.setup_of` makes it from the flags, and the functions of the planner take it.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from flags import EngineSettings, Lora, Memory
from model.sizes import head_dim

GIB = 1024**3
COMPUTE = 2  # bytes of a bf16 number: the trainer's arithmetic, the engine, its cache
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
    vocab: int
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    tower_parameters: int  # of the vision tower, which is never trained; 0: there is none

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Name -> (inputs, outputs) of each matrix of a layer."""
        h, i = self.hidden, self.intermediate
        sizes = [(h, self.q), (h, self.kv), (h, self.kv), (self.q, h), (h, i), (h, i), (i, h)]
        return dict(zip(PROJECTIONS, sizes, strict=True))

    @property
    def layer_matrices(self) -> int:
        """Numbers in the matrices of a layer."""
        return sum(inputs * outputs for inputs, outputs in self.projections.values())

    @property
    def layer_parameters(self) -> int:
        biases = (self.q + 2 * self.kv) * self.has_qkv_bias
        norms = 2 * self.hidden + 2 * self.head_dim * self.has_qk_norm
        return self.layer_matrices + biases + norms

    @property
    def table(self) -> int:
        """Parameters of the embedding, and as many of the head."""
        return self.vocab * self.hidden

    @property
    def root_parameters(self) -> int:
        """What is not in a decoder layer: embedding, head, last norm, vision tower. FSDP gathers it as one unit."""
        return (1 if self.is_tied else 2) * self.table + self.hidden + self.tower_parameters

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv * COMPUTE


def shape_of(config: PretrainedConfig, name: str) -> ModelShape:
    """The shape that a config describes. Raises ValueError for an architecture that the formulas do not cover."""
    text = config.get_text_config()
    known = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl_text")
    if text.model_type not in known:
        others = f"not {text.model_type!r}"
        raise ValueError(f"--model {name}: the dry run knows the architectures {', '.join(known)}, {others}.")
    tower = getattr(config, "vision_config", None)
    return ModelShape(
        name=name, layers=text.num_hidden_layers, hidden=text.hidden_size, intermediate=text.intermediate_size,
        heads=text.num_attention_heads, kv_heads=text.num_key_value_heads, head_dim=head_dim(text),
        vocab=text.vocab_size, is_tied=bool(text.tie_word_embeddings),
        has_qkv_bias=text.model_type.startswith("qwen2") or bool(getattr(text, "attention_bias", False)),
        has_qk_norm=text.model_type == "qwen3", tower_parameters=0 if tower is None else tower_parameters(tower),
    )  # fmt: skip


def tower_parameters(tower: PretrainedConfig) -> int:
    """Parameters of Qwen2.5-VL's vision tower: patches, blocks of attention and gated MLP with biases, the merger."""
    d, i, merged = tower.hidden_size, tower.intermediate_size, tower.hidden_size * tower.spatial_merge_size**2
    patches = 3 * tower.temporal_patch_size * tower.patch_size**2 * d
    block = 2 * d + (d * 3 * d + 3 * d) + (d * d + d) + (3 * d * i + 2 * i + d)
    merger = d + (merged * merged + merged) + (merged * tower.out_hidden_size + tower.out_hidden_size)
    return patches + tower.depth * block + merger


@dataclass(frozen=True)
class RunShape:
    """What the flags say of a step, beside `Memory` and `EngineSettings`."""

    prompts_per_step: int
    group_size: int
    updates_per_iteration: int
    num_iterations: int  # passes over a rollout
    max_prompt_tokens: int
    max_completion_tokens: int
    tensor_parallel_size: int
    has_kl: bool
    needs_first_logprobs: bool  # old log-probs are computed for the first update, too
    trains_entropy: bool  # the entropy is part of the loss
    async_checkpoint: bool

    @property
    def completions(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def updates(self) -> int:
        return self.updates_per_iteration * self.num_iterations

    @property
    def old_logprob_passes(self) -> float:
        """Passes of the policy over a rollout for old log-probs, which the first update may make by itself."""
        return 1 if self.needs_first_logprobs else 1 - 1 / self.updates_per_iteration


@dataclass(frozen=True)
class Hardware:
    """The machines. Bytes, bytes per second, FLOPs per second; of one GPU unless said."""

    name: str
    gpus: int  # of all nodes
    nodes: int
    gpu_bytes: float  # that a process can take
    host_bytes: float  # of a node
    flops: float  # dense bf16
    memory_speed: float
    link_speed: float  # to the other GPUs of the node, in one direction
    network_speed: float  # to other nodes
    host_speed: float  # to host RAM, in one direction


@dataclass(frozen=True)
class Setup:
    """All that the formulas need."""

    model: ModelShape
    memory: Memory
    lora: Lora
    engine: EngineSettings
    run: RunShape
    hardware: Hardware

    @property
    def num_trainers(self) -> int:
        """GPUs that train: all of them, as all of them sample."""
        return self.hardware.gpus

    @property
    def num_engines(self) -> int:
        return self.hardware.gpus // self.run.tensor_parallel_size

    @property
    def has_lora(self) -> bool:
        return self.lora.lora_rank > 0

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return self.lora.lora_targets or PROJECTIONS

    @property
    def trained_per_layer(self) -> int:
        """Trained parameters of a decoder layer."""
        if self.has_lora:
            return self.lora.lora_rank * sum(sum(self.model.projections[name]) for name in self.lora_targets)
        return self.model.layer_parameters

    @property
    def trainable(self) -> int:
        of_root = 0 if self.has_lora else self.model.root_parameters - self.model.tower_parameters
        return self.model.layers * self.trained_per_layer + of_root

    @property
    def has_reference_model(self) -> bool:
        """With LoRA the reference is the policy without its adapter."""
        return self.run.has_kl and not self.has_lora

    @property
    def trained_bytes(self) -> int:
        """Of a trained parameter, and of its gradient. Adapters are fp32."""
        return 2 if self.memory.param_dtype == "bfloat16" and not self.has_lora else 4

    @property
    def stored_bytes(self) -> int:
        """All parameters as the trainer keeps them, over all ranks. With LoRA the frozen ones are bf16."""
        if self.has_lora:
            return self.model.parameters * COMPUTE + self.trainable * self.trained_bytes
        return self.model.parameters * self.trained_bytes

    @property
    def state_bytes(self) -> int:
        """Of the optimizer: two moments; with bf16 parameters also the remainders (`model/optimizer.py`)."""
        return self.trainable * {4: 8, 2: 6}[self.trained_bytes]

    def sharers(self, length: float = 1.0) -> int:
        """Completions that share their prompt in a micro-batch, where lengths are this share of their limits."""
        room = int(self.memory.micro_batch_tokens / length - self.run.max_prompt_tokens)
        of_prompt = min(self.run.group_size, room // self.run.max_completion_tokens)
        return max(1, of_prompt) if self.memory.share_prompts else 1

    @property
    def keys_per_position(self) -> float:
        """Size of attention's copy of keys and values, which repeats a shared prompt for each completion.

        An upper bound, reached where completions have one token.
        """
        prompt, sharers = self.run.max_prompt_tokens, self.run.group_size if self.memory.share_prompts else 1
        return sharers * (prompt + 1) / (prompt + sharers)
