"""What the planner is told, as frozen dataclasses, and what follows from it alone.

    ModelShape    the sizes in a config.json
    MemoryPolicy  where parameters and optimizer state are kept
    RunShape      what the flags say of batches and of the engine
    Hardware      GPUs, nodes, host RAM, speeds

A `Setup` is the four together: the argument of all of `memory.py` and `roofline.py`.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from transformers import PretrainedConfig

from model.sizes import head_dim

GIB = 1024**3
COMPUTE = 2  # bytes of a bf16 number: trainer's arithmetic, engine, cache
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Name -> memory that a process can take (GiB), dense bf16 TFLOP/s, memory TB/s, and GB/s one way to the other GPUs and to the host, from
# the data sheets.
GPUS = {
    "H100-80GB": (79.0, 989, 3.35, 450, 55),
    "H200-141GB": (139.5, 989, 4.8, 450, 55),
    "A100-80GB": (79.0, 312, 2.04, 300, 25),
    "A100-40GB": (39.3, 312, 1.56, 300, 25),
    "L40S-48GB": (44.3, 362, 0.86, 25, 25),
}


@dataclass(frozen=True)
class VisionShape:
    """The vision tower of Qwen2.5-VL, frozen."""

    parameters: int
    pixels_per_token: int  # of an image: patch and merge sizes, squared


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
    vision: VisionShape | None

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
    def layer_parameters(self) -> int:
        bias = (self.q + 2 * self.kv) * self.has_qkv_bias
        return (
            sum(n * m for n, m in self.projections.values())
            + bias
            + 2 * self.hidden
            + 2 * self.head_dim * self.has_qk_norm
        )

    @property
    def root_parameters(self) -> int:
        """What is no decoder layer: embedding, head, last norm, vision tower. FSDP gathers it as one unit."""
        tower = self.vision.parameters if self.vision else 0
        return (1 if self.is_tied else 2) * self.vocab * self.hidden + self.hidden + tower

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv * COMPUTE

    def lora_layer_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        return rank * sum(sum(self.projections[name]) for name in targets)


def shape_of(config: PretrainedConfig, name: str) -> ModelShape:
    """The shape that a config describes. Raises ValueError for an architecture that the closed form does not know."""
    text = config.get_text_config()
    known = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl_text")
    if text.model_type not in known:
        raise ValueError(
            f"--model {name}: the dry run knows the architectures {', '.join(known)}, not {text.model_type!r}."
        )
    tower = getattr(config, "vision_config", None)
    return ModelShape(
        name=name,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=head_dim(text),
        vocab=text.vocab_size,
        is_tied=bool(text.tie_word_embeddings),
        has_qkv_bias=text.model_type.startswith("qwen2") or bool(getattr(text, "attention_bias", False)),
        has_qk_norm=text.model_type == "qwen3",
        vision=vision_of(tower) if tower is not None else None,
    )


def vision_of(tower: PretrainedConfig) -> VisionShape:
    """The tower's parameters: patches, blocks of windowed attention and gated MLP with biases, and the merger into the text's width."""
    d, i, merged = tower.hidden_size, tower.intermediate_size, tower.hidden_size * tower.spatial_merge_size**2
    patches = 3 * tower.temporal_patch_size * tower.patch_size**2 * d
    block = 2 * d + (d * 3 * d + 3 * d) + (d * d + d) + (3 * d * i + 2 * i + d)
    merger = d + (merged * merged + merged) + (merged * tower.out_hidden_size + tower.out_hidden_size)
    return VisionShape(patches + tower.depth * block + merger, (tower.patch_size * tower.spatial_merge_size) ** 2)


@dataclass(frozen=True)
class MemoryPolicy:
    """Where and how parameters and optimizer state are kept. The last four are choices of other codebases, to show what they lead to."""

    param_dtype: str = (
        "float32"  # masters; with LoRA they are those of the adapters, always fp32, on a frozen base in bf16
    )
    offload: str = "none"  # to host RAM: none, optimizer (state only), all (parameters, gradients, state)
    offload_reference: bool = False
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    reduce_gradients_once: bool = False  # whole gradients on every GPU until the last micro-batch
    gather_parameters_once: bool = False  # and all layers' parameters
    async_checkpoint: bool = False
    lora_rank: int = 0  # 0: full fine-tuning
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = PROJECTIONS
    loads_on_every_rank: bool = False  # each rank reads the whole model into host RAM; otherwise rank 0 streams it
    sleep_level: int = 2  # 1: the sleeping engine keeps a copy of its weights in host RAM
    syncs_whole_model: bool = False  # gathers all parameters at once instead of one at a time
    keeps_full_logits: bool = False  # no chunked head


def memory_policy(args: Namespace) -> MemoryPolicy:
    """The flags as a MemoryPolicy: the only place of the planner that knows their names."""
    return MemoryPolicy(
        param_dtype=args.param_dtype,
        offload=args.offload,
        offload_reference=args.offload_reference,
        gradient_checkpointing=args.gradient_checkpointing,
        offload_activations=args.offload_activations,
        reduce_gradients_once=args.reduce_gradients_once,
        gather_parameters_once=args.gather_parameters_once,
        async_checkpoint=args.async_checkpoint,
        lora_rank=args.lora_rank,
        lora_dropout=args.lora_dropout,
        lora_targets=tuple(args.lora_targets or PROJECTIONS),
    )


@dataclass(frozen=True)
class RunShape:
    """What the flags say of batches and engine."""

    prompts_per_step: int
    group_size: int
    updates_per_pass: int
    passes_per_step: int
    micro_batch_tokens: int
    max_prompt_tokens: int
    max_completion_tokens: int
    max_model_len: int  # of the engine
    tensor_parallel_size: int
    gpu_memory_utilization: float
    enforce_eager: bool
    has_kl: bool
    needs_first_logprobs: bool  # the first update's old log-probs are computed, too
    share_prompts: bool = False
    trains_entropy: bool = False  # the entropy is part of the loss
    generation_gpus: int = 0  # GPUs that only sample; 0: every rank samples and trains

    @property
    def completions(self) -> int:
        return self.prompts_per_step * self.group_size

    def sharers(self, length: float = 1.0) -> int:
        """Completions of a prompt that share it in a micro-batch, where lengths are this share of their limits."""
        room = int(self.micro_batch_tokens / length - self.max_prompt_tokens) // self.max_completion_tokens
        return max(1, min(self.group_size, room)) if self.share_prompts else 1

    @property
    def keys_per_position(self) -> float:
        """Attention's copy of keys and values, which has a shared prompt's once for each completion. At most: completions of one token."""
        prompt, sharers = self.max_prompt_tokens, self.group_size if self.share_prompts else 1
        return sharers * (prompt + 1) / (prompt + sharers)


@dataclass(frozen=True)
class Hardware:
    """The machines. Bytes, bytes per second, FLOPs per second; of one GPU unless said."""

    name: str
    gpus: int  # over all nodes
    nodes: int
    gpu_bytes: float  # that a process can take
    host_bytes: float  # of a node
    flops: float  # dense bf16
    memory_speed: float
    link_speed: float  # to the other GPUs of the node, one direction
    network_speed: float  # to other nodes
    host_speed: float  # to host RAM, one direction


@dataclass(frozen=True)
class Setup:
    """All that the closed form needs."""

    model: ModelShape
    policy: MemoryPolicy
    run: RunShape
    hardware: Hardware

    @property
    def ranks(self) -> int:
        """GPUs that train."""
        return self.hardware.gpus - self.run.generation_gpus

    @property
    def engines(self) -> int:
        return (self.run.generation_gpus or self.hardware.gpus) // self.run.tensor_parallel_size

    @property
    def trainable(self) -> int:
        if self.policy.lora_rank:
            return self.model.layers * self.model.lora_layer_parameters(self.policy.lora_rank, self.policy.lora_targets)
        return self.model.parameters - self.frozen_tower

    @property
    def frozen_tower(self) -> int:
        """Parameters of the vision tower, which is never trained; it is kept like the other parameters."""
        return self.model.vision.parameters if self.model.vision else 0

    @property
    def has_reference_model(self) -> bool:
        """With LoRA the reference is the policy without its adapter."""
        return self.run.has_kl and not self.policy.lora_rank

    @property
    def trained_bytes(self) -> int:
        """Of a trained parameter, and of its gradient. Adapters are fp32."""
        return 2 if self.policy.param_dtype == "bfloat16" and not self.policy.lora_rank else 4

    @property
    def stored_bytes(self) -> int:
        """All parameters as the trainer keeps them, over all ranks."""
        frozen = self.model.parameters * COMPUTE if self.policy.lora_rank else self.frozen_tower * self.trained_bytes
        return frozen + self.trainable * self.trained_bytes

    @property
    def state_bytes(self) -> int:
        """Of the optimizer: AdamW's two moments; for bf16 parameters in bf16, with the lower halves of fp32 parameters."""
        return self.trainable * {4: 8, 2: 6}[self.trained_bytes]
