"""The policy, a Hugging Face causal LM that returns the log-probabilities of a packed batch. The door to `model/`.

`build_policy` makes the sharded policy, its reference and its optimizer; the loop knows the model
through `Policy` alone. Two things differ from the model as it comes: attention sees each packed
sequence alone (`model/attention.py`), and the head never holds the full logits (`model/head.py`).
After an update the weights go this way: `optimizer.step` -> `Policy.full_weights` ->
`fsdp_utils.full_tensors`, one parameter at a time -> `Engine.sync`. Dimensions: `batch.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from batch import Batch
from flags import Lora, Memory
from fsdp_utils import World, full_tensors, shard
from model.attention import make_layout
from model.head import Distilled, HeadSettings, TokenScores, chunked_logprobs
from model.optimizer import make_optimizer
from model.sizes import active_share, attention_layers, head_dim
from model.weights import fill, in_files, load_config, model_from_config, tower_of, without_storage
from runtime.parts import part
from runtime.progress import OFF
from runtime.rank import beat
from schedule import Plan


class Policy(nn.Module):
    """The policy, or the reference, which is the same but frozen."""

    # For `fsdp_utils.shard`: these, too, need gathered parameters.
    forward_methods = ("hidden_states",)
    head_dtype: torch.dtype | None = None  # the logits'; None: as the head's weights
    head_growth = 1  # the size of a chunk of logits, over the least (`HeadSettings`)

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> None:
        """`dtype`: of the arithmetic, the engine and the exported weights. The parameters may have another."""
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.adapter = None  # `Adapter` of extras/models/lora.py; None: all is trained
        self.expert_loads = None  # counts the tokens of each expert; None: the model has none
        if any(hasattr(getattr(layer, "mlp", None), "experts") for layer in self.layers):
            experts = part("extras.models.experts", "--model: a mixture of experts")
            self.expert_loads = experts.ExpertLoads(self.layers)
        if any(hasattr(layer, "linear_attn") for layer in self.layers):
            part("extras.models.linear_attention", "--model: linear attention").run_in_rows(self.layers)
        # The reference, if it moves (--reference_every): in a list, so that it is no part of this module.
        self.moving_references: list[Policy] = []
        self.beside = {}  # name -> what is trained and saved with it, such as a `Critic` of extras/critic/
        config = model.config.get_text_config()
        matrices = model.get_output_embeddings().weight.numel()
        for layer in self.layers:
            matrices += sum(weight.numel() * active_share(config, weight.ndim) for weight in layer.parameters())
        # FLOPs forwards: matrices 2 x numbers x tokens; attention 2 x length^2 x width a layer.
        self.flops_per_token = 2 * matrices
        # Granite divides its logits. Here the temperature does it, in one division.
        self.logits_divisor = config.logits_scaling if config.model_type == "granite" else 1.0
        # Length at which attention costs as much as the matrices, for `packing.training_costs`.
        self.parity_length = matrices / (attention_layers(config) * config.num_attention_heads * head_dim(config))

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, the units of sharding."""
        return list(self.model.get_decoder().layers)

    def forward(self, batch: Batch, temperature: float, teacher: tuple | None = None) -> TokenScores:
        """The scores of the labels; constant zeros where the loss mask is false."""
        trained_K, head = batch.trained_K, self.model.get_output_embeddings()
        hidden_KD, labels_K = self._trained_hidden(batch), batch.labels_N.index_select(0, trained_K)
        temperature *= self.logits_divisor  # a teacher's has its own divisor in it
        # Not `head(hidden)`: the logits of all positions would take more memory than the model.
        if teacher:
            settings = HeadSettings(temperature, self.head_dtype or head.weight.dtype)
            distilled_logprobs = part("extras.teacher.head", "--kl_over vocabulary").distilled_logprobs
            scores = distilled_logprobs(hidden_KD, head.weight, labels_K, settings, teacher)
        else:
            scores = chunked_logprobs(hidden_KD, head, labels_K, temperature, self.head_dtype, self.head_growth)
        # Back to all positions, so that whatever adds up over them needs one kind of index.
        zeros_N = torch.zeros(len(batch.labels_N), device=trained_K.device)

        def spread(values_K: Tensor) -> Tensor:
            return zeros_N.index_copy(0, trained_K, values_K)

        distilled = scores.distilled and Distilled(*map(spread, scores.distilled))
        return TokenScores(spread(scores.logprobs_N), spread(scores.entropies_N), distilled)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(hidden_KD, weight_VD): what the head multiplies at the trained positions. A `Teacher` is made of them."""
        hidden_KD = self._trained_hidden(batch)
        return hidden_KD, self.model.get_output_embeddings().weight.clone()  # FSDP will free the weight

    def _trained_hidden(self, batch: Batch) -> Tensor:
        """Runs the decoder; returns its output at the trained positions: the head runs on these alone."""
        beat()
        inputs = {"input_ids": batch.input_ids_N[None]}
        for optional in batch.parts:
            inputs |= optional.inputs(self.model, batch)
        output = self.model.get_decoder()(
            **inputs,
            position_ids=batch.position_ids_N.unsqueeze(-2),  # [1, N], with images [3, 1, N]
            use_cache=False,  # every position is computed at once
            layout=batch.layout or make_layout(batch.segments_S, batch.input_ids_N.device),
        )
        return output.last_hidden_state[0].index_select(0, batch.trained_K)

    @property
    def has_dropout(self) -> bool:
        """Whether the update drops inputs, so that its log-probs differ from the sampling policy's."""
        return self.adapter is not None and self.adapter.has_dropout

    def adapter_off(self) -> AbstractContextManager[None]:
        """Makes a policy with an adapter its base model, the reference, in the block."""
        return self.adapter.off() if self.adapter else nullcontext()

    def dropout_on(self, seed: tuple[int, ...], world: World) -> AbstractContextManager[None]:
        """Has a policy with dropout drop inputs in the block, drawn from the seed and the rank."""
        return self.adapter.dropout_on(seed, world) if self.adapter else nullcontext()

    def named_weights(self) -> list[tuple[str, nn.Parameter, nn.Module | None]]:
        """(Hugging Face name, parameter, layer whose adapter is merged into it) of all but adapters."""
        layers = self.adapter.layers if self.adapter else {}
        named = []
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:  # an adapter is no weight of its own to the engine, nor in a checkpoint
                named.append((in_files(name), parameter, layers.get(name)))
        return named

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the engine's dtype) of each parameter, LoRA merged: for sync and export.

        While the caller uses one, the next one is gathered; all ranks must run through it together.
        Tied parameters come once, under their first name.
        """
        named = self.named_weights()
        # What is merged keeps its own dtype until then: the sum alone is rounded.
        wanted = ((parameter, self.dtype if layer is None else parameter.dtype) for _, parameter, layer in named)
        for (name, _, layer), full in zip(named, full_tensors(wanted), strict=True):
            yield name, full if layer is None else self.adapter.merged(layer, full, self.dtype)


def build_policy(
    path: str, memory: Memory, lora: Lora, plan: Plan, world: World
) -> tuple[Policy, Policy | None, Optimizer]:
    """The sharded policy, the sharded frozen reference (None without a KL term), and the policy's optimizer.

    With LoRA a reference of the policy's own path costs nothing: it is the policy itself, with its adapter off.
    """
    dtype = getattr(torch, memory.dtype)
    # Masters in --param_dtype keep updates that --dtype would lose; a frozen base needs none.
    param_dtype = dtype if lora.lora_rank else getattr(torch, memory.param_dtype)
    policy = empty_policy(path, param_dtype, dtype, memory.gradient_checkpointing)
    if lora.lora_rank:
        policy.adapter = part("extras.models.lora", "--lora_rank").add_adapter(policy.model, lora, plan.seed, path)
    shard_and_fill(policy, path, world, memory.offload == "all", memory.communicate_once)
    reference, followed = policy if plan.reference else None, plan.reference
    if followed and (followed.path != path or not lora.lora_rank):
        # It is never trained: no masters, and no recomputation in a backward pass.
        own_dtype = dtype if followed.reference_mixup == 1 else torch.float32
        reference = empty_policy(followed.path, own_dtype, dtype).requires_grad_(False)
        shard_and_fill(reference, followed.path, world, memory.offload_reference)
        policy.moving_references = [reference] if followed.reference_every else []
    for model in {policy, reference} - {None}:  # with LoRA they may be one
        model.head_dtype, model.head_growth = getattr(torch, memory.head_dtype or memory.dtype), memory.head_growth
        if memory.compile:
            part("extras.models.compiled", "--compile").compile_layers(model.layers)
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    # Last: the weights are loaded before its state takes memory.
    return policy, reference, make_optimizer(trained, plan.adamw, memory)


def place(batch: Batch, device: torch.device) -> Batch:
    """The batch with its layout, on the device: made in a pass, the layout would be copied there in each."""
    return replace(batch.to(device), layout=make_layout(batch.segments_S, device))


def empty_policy(
    path: str,
    param_dtype: torch.dtype,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
    make_model: Callable = model_from_config,
) -> Policy:
    """The model at `path` (folder or hub id), without storage yet. `dtype`: the policy's, not of its parameters."""
    if os.environ.get(OFF) or not sys.stderr.isatty():  # a bar would fill a log file
        transformers.utils.logging.disable_progress_bar()
    # A tower keeps torch's attention: its images are not packed. "" is a model of one part.
    attention = {"": "packed", "text_config": "packed", "vision_config": "sdpa"}
    with without_storage():
        model = make_model(load_config(path), dtype=param_dtype, attn_implementation=attention)
    model.eval()  # as from_pretrained leaves it: no dropout
    # vLLM, where it runs transformers' decoder, changes that class, in this process, to compile it.
    model.get_decoder().do_not_compile = True
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in model.get_decoder().layers:
            # Checkpointing needs it. What is in the layer stays in evaluation: no dropout.
            layer.training = True
    if (tower := tower_of(model)) is not None:
        tower.eval().requires_grad_(False)
    return Policy(model, dtype)


def shard_and_fill(
    policy: Policy, path: str, world: World, on_host: bool = False, stays_gathered: bool = False
) -> Policy:
    """The policy, sharded and with the weights at `path`; for the two switches see `fsdp_utils.shard`."""
    # Sharded first: no rank then ever holds all of the model.
    device = shard(policy, policy.layers, world, policy.dtype, on_host, stays_gathered)
    fill(policy, policy.model, path, device)
    return policy
