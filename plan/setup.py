"""The planner's input as frozen dataclasses, and what follows from it alone.

`dry_run.setup_of` makes a `Setup` from the flags; the other functions of the planner take it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torch import nn
from transformers import PretrainedConfig

from flags import EngineSettings, Lora, Memory, Servers, Settings
from model.sizes import (
    HYBRIDS,
    MIXTURES,
    active_share,
    attention_layers,
    expert_width,
    head_dim,
    linear_widths,
    state_bytes,
)
from model.weights import model_of_shapes, tower_of
from schedule import Plan

GIB = 1024**3
NORMS_IN_FP32 = ("gemma3_text", "olmo3", *HYBRIDS)  # these normalize in fp32 to the end
SMALL_PRODUCTS = 0.4  # share of `FLOPS_SHARE` that products with many small experts reach; an assumption


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder (Llama, Mistral, Qwen2, Qwen3, Gemma 3, OLMo 3, their mixtures of experts, Qwen3.5; the text
    part of Qwen2.5-VL).
    """

    name: str
    layers: int
    attention_layers: int  # those without linear attention
    linear_keys: int  # width of all keys of a layer of linear attention; 0: there is none
    linear_values: int
    hidden: int
    intermediate: int  # inner numbers of a token in a layer, in all of its experts
    experts: int  # experts that a token meets in a layer, each with a copy of its hidden state; 0: a dense model
    heads: int
    kv_heads: int
    head_dim: int
    has_head_norms: bool  # norms of queries and keys, as in Qwen3
    norms: int  # the others of a layer
    norm_bytes: int  # that a trained norm of any kind saves for a number
    vocab: int
    projections: dict[str, tuple[int, int]]  # name -> (inputs, outputs) of each matrix of the layers
    num_projections: dict[str, int]  # name -> layers that have it
    layer_parameters: int
    layer_matrices: int  # parameters of a layer that a token is multiplied by
    largest: int  # parameters of a layer's largest tensor
    # Not in a layer: embedding, head, last norm, vision tower. FSDP gathers them as one unit.
    root_parameters: int
    # What follows from these:
    q: int  # width of all query heads
    kv: int
    table: int  # parameters of the embedding, and as many of the head
    root_trained: int  # parameters outside the layers that are trained without LoRA
    parameters: int
    active_parameters: int  # parameters that a token meets
    kv_per_token: int  # numbers in the cache of keys and values
    state_bytes: int  # of a sequence in the cache, beside them

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one table."""
        return self.root_trained < 2 * self.table


def shape_of(config: PretrainedConfig, name: str) -> ModelShape:
    """The shape of the model `name`, without storage. Raises ValueError for one that the formulas do not cover."""
    text, model = config.get_text_config(), model_of_shapes(config)
    known = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl_text", "gemma3_text", "olmo3", *MIXTURES, *HYBRIDS)
    if text.model_type not in known or (text is not config and config.model_type != "qwen2_5_vl"):
        raise ValueError(
            f"{name}: the dry run knows the architectures {', '.join(known)}, "
            f"not {config.model_type!r}, which it can neither plan nor rule out."
        )
    tower = tower_of(model)
    tower_parameters = 0 if tower is None else num_parameters(tower)
    layers = model.get_decoder().layers
    root_parameters = num_parameters(model) - num_parameters(layers)
    layer = max(layers, key=num_parameters)  # some have no experts
    paths = {path for each in layers for path, _ in each.named_modules()}
    tensors = list(layers.parameters())
    intermediate, experts, left_out = text.intermediate_size, 0, 0
    if text.model_type in MIXTURES:
        left_out = sum(tensor.numel() * (1 - active_share(text, 3)) for tensor in tensors if tensor.ndim == 3)
        experts = text.num_experts_per_tok
        intermediate = experts * expert_width(text) + getattr(text, "shared_expert_intermediate_size", 0)
    projections, num_projections = {}, Counter()
    for path, module in layers.named_modules():
        if isinstance(module, nn.Linear):
            own_name = path.rpartition(".")[2]
            projections[own_name] = (module.in_features, module.out_features)
            num_projections[own_name] += 1
    width = head_dim(text)
    kv = text.num_key_value_heads * width
    linear_keys, linear_values = linear_widths(text)
    return ModelShape(
        name=name, layers=text.num_hidden_layers, hidden=text.hidden_size, intermediate=intermediate,
        attention_layers=attention_layers(text), linear_keys=linear_keys, linear_values=linear_values,
        experts=experts, heads=text.num_attention_heads, kv_heads=text.num_key_value_heads, head_dim=width,
        has_head_norms=any(path.endswith("q_norm") for path in paths), vocab=text.vocab_size,
        norms=sum(path.endswith("norm") and "." not in path for path in paths),
        norm_bytes=8 if text.model_type in NORMS_IN_FP32 else 6,
        projections=projections, num_projections=num_projections, layer_parameters=num_parameters(layer),
        root_parameters=root_parameters,
        layer_matrices=round(sum(x.numel() * active_share(text, x.ndim) for x in tensors) / len(layers)),
        largest=max(tensor.numel() for tensor in tensors),
        q=text.num_attention_heads * width, kv=kv, table=text.vocab_size * text.hidden_size,
        root_trained=root_parameters - tower_parameters, parameters=num_parameters(model),
        active_parameters=num_parameters(model) - round(left_out), kv_per_token=2 * attention_layers(text) * kv,
        state_bytes=state_bytes(text),
    )  # fmt: skip


def critic_shape(config: PretrainedConfig, name: str) -> ModelShape:
    """The shape of a value model: the decoder with a head of one number. Raises ValueError."""
    shape = shape_of(config, name)
    head = (0 if shape.is_tied else shape.table) - shape.hidden
    names = "parameters", "active_parameters", "root_parameters", "root_trained"
    return replace(shape, vocab=1, **{each: getattr(shape, each) - head for each in names})


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class RunShape(Settings, kw_only=True):
    """A step as the flags describe it, beside `Plan`, `Memory`, `EngineSettings` and `Servers`."""

    num_rows: int | None  # usable training rows; None: not known
    longest_prompt: int  # tokens
    longest_completion: int
    mean_prompt_tokens: float  # assumed, as --plan_prompt_tokens and --plan_completion_tokens say
    mean_completion_tokens: float
    has_kl: bool
    over_vocabulary: bool  # the KL is taken over all tokens: the reference runs beside the update
    needs_first_logprobs: bool  # old log-probs are computed for the first update, too
    old_logprobs: str
    partial_rollouts: bool
    num_checkpoints: int  # on the disk at a time, at most


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machines. Bytes, bytes per second, FLOPs per second; of one GPU unless said."""

    name: str
    gpus: int  # all GPUs of the ranks
    nodes: int
    gpu_bytes: float  # memory that a process can take
    host_bytes: float  # the RAM of a node
    flops: float  # dense bf16
    flops_share: float  # the share of these that passes over whole sequences reach
    memory_speed: float
    link_speed: float  # to the other GPUs of the node, in one direction
    network_speed: float  # to other nodes
    host_speed: float  # to host RAM, in one direction
    generation_gpus: int  # GPUs of generation servers, beside the ranks'; 0: the ranks sample

    @property
    def ranks_per_node(self) -> int:
        return self.gpus // self.nodes


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that the formulas need."""

    model: ModelShape
    memory: Memory
    lora: Lora
    engine: EngineSettings
    servers: Servers
    plan: Plan
    run: RunShape
    hardware: Hardware
    teacher: ModelShape | None  # the model of --reference; None: the reference has the policy's shape
    critic: ModelShape | None  # None: there is none
    critic_passes: int  # its updates for each of the policy

    @property
    def has_servers(self) -> bool:
        return self.hardware.generation_gpus > 0

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the trainer's arithmetic, in the engine and in its cache."""
        return 4 if self.engine.dtype == "float32" else 2

    @property
    def logit_bytes(self) -> int:
        """Bytes of a logit in the head's dtype."""
        return 4 if self.memory.head_dtype == "float32" else self.compute_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model in --dtype."""
        return self.model.parameters * self.compute_bytes

    @property
    def flops(self) -> float:
        """FLOPs per second that passes over whole sequences reach on a GPU."""
        share = self.hardware.flops_share * (SMALL_PRODUCTS if self.model.experts else 1)
        return self.hardware.flops * share

    @property
    def table_bytes(self) -> int:
        """Bytes of the embedding in --dtype, and of the head."""
        return self.model.table * self.compute_bytes

    @property
    def counted_tokens(self) -> int:
        """Tokens of a micro-batch. In float32 each counts for two: the formulas of activations are for bf16,
        in which only norms and logits are fp32, so this is an upper bound.
        """
        return self.memory.micro_batch_tokens * self.compute_bytes // 2

    @property
    def num_shards(self) -> int:
        """GPUs that share a copy of the policy, its gradients, its optimizer and the reference."""
        return self.memory.shard_ranks or self.hardware.gpus

    @property
    def is_plain(self) -> bool:
        """Whether one GPU holds plain tensors, adapters apart: FSDP gathers nothing of them (`fsdp_utils.shard`)."""
        has_host = self.memory.offload == "all" or self.memory.offload_reference
        is_same = self.trained_bytes == self.compute_bytes and not self.memory.communicate_once
        return self.hardware.gpus == 1 and (is_same or self.has_lora) and not has_host

    @property
    def num_engines(self) -> int:
        """Engines in the ranks, or generation servers."""
        return (self.hardware.generation_gpus or self.hardware.gpus) // self.servers.tensor_parallel_size

    @property
    def completions_per_engine(self) -> float:
        return self.plan.completions_per_step / self.num_engines

    @property
    def has_lora(self) -> bool:
        return self.lora.lora_rank > 0

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return self.lora.lora_targets or tuple(self.model.projections)

    @property
    def adapters(self) -> int:
        """Parameters of all adapters; 0 without LoRA."""
        m = self.model
        widths = [sum(m.projections[name]) * m.num_projections[name] for name in self.lora_targets]
        return self.lora.lora_rank * sum(widths)

    @property
    def adapter_per_layer(self) -> float:
        """The mean of the layers, which may be of two kinds."""
        return self.adapters / self.model.layers

    @property
    def trainable(self) -> int:
        m = self.model
        return self.adapters if self.has_lora else m.parameters - m.root_parameters + m.root_trained

    @property
    def head_gradient_bytes(self) -> int:
        """Bytes of the gradient of the whole head, which adapters leave frozen."""
        return 0 if self.has_lora else self.table_bytes

    @property
    def old_logprob_passes(self) -> float:
        """Passes of the policy over a rollout for old log-probs, which the first update may make by itself."""
        if self.run.old_logprobs == "rollout":
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
    def reference_bytes(self) -> int:
        """Bytes of one copy of a reference that is a model of its own."""
        return self.reference_setup.model.parameters * self.reference_itemsize

    @property
    def reference_itemsize(self) -> int:
        reference = self.plan.reference
        return self.compute_bytes if reference is None or reference.reference_mixup == 1 else 4

    @property
    def reference_setup(self) -> Setup:
        """This setup with the reference in the place of the policy: for its passes."""
        return replace(self, model=self.teacher or self.model)

    @property
    def critic_setup(self) -> Setup:
        """This setup with the critic in the place of the policy, for its own update."""
        plan = replace(self.plan, reference=None)
        alone = replace(self.run, has_kl=False, over_vocabulary=False)
        return replace(self, model=self.critic, plan=plan, run=alone, teacher=None, critic=None)

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained parameter, and of its gradient. Adapters are fp32."""
        return 2 if self.memory.param_dtype == "bfloat16" and not self.has_lora else 4

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of one copy; its trained parameters take as many."""
        return self.trainable * self.trained_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of one copy's parameters as the trainer keeps them. With LoRA the frozen ones are in --dtype."""
        if self.has_lora:
            return self.weight_bytes + self.gradient_bytes
        return self.model.parameters * self.trained_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one copy's optimizer: two moments; with bf16 parameters also remainders (`model/optimizer.py`)."""
        return self.trainable * (8 if self.trained_bytes == 4 else 6)

    @property
    def routes_bytes(self) -> float:
        """Bytes of the routes that a rank trains by in a step of the longest sequences; 0 without --router_replay. One
        byte a token, layer and expert that the token meets.
        """
        tokens = self.plan.completions_per_step / self.hardware.gpus * self.engine.max_model_len
        return self.engine.router_replay * tokens * self.model.layers * self.model.experts

    @property
    def sharers(self) -> int:
        """Completions of mean length that share their prompt in a micro-batch."""
        if not self.memory.share_prompts:
            return 1
        room = self.memory.micro_batch_tokens - self.run.mean_prompt_tokens
        return max(1, min(self.plan.group_size, int(room // self.run.mean_completion_tokens)))

    @property
    def keys_per_position(self) -> float:
        """Copies of a key for each position, at most: attention repeats a shared prompt's keys for each completion.

        The most are made where completions have one token.
        """
        prompt = self.run.longest_prompt
        sharers = self.plan.group_size if self.memory.share_prompts else 1
        return sharers * (prompt + 1) / (prompt + sharers)
