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
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch._dynamo
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from batch import Batch
from extras.models import lora as adapters
from extras.models.experts import ExpertLoads
from extras.models.linear_attention import run_in_rows
from extras.models.vision import BatchImages, PromptImages, embed, tower_of
from flags import AdamW, Lora, Memory
from fsdp_utils import World, full_tensors, local_shard, own_rows, shard
from model.attention import make_packing
from model.head import Teacher, chunked_logprobs
from model.optimizer import make_optimizer
from model.sizes import active_share, attention_layers, head_dim
from model.weights import fill, in_files, load_config, model_from_config, without_storage
from runtime.progress import OFF
from runtime.stall import beat


class TokenScores(NamedTuple):
    """The results of a pass at each position, float32; constant zeros where the loss mask is false."""

    logprobs_N: Tensor  # those of the labels
    entropies_N: Tensor  # in nats
    # With a teacher: see `Batch`.
    ref_logprobs_N: Tensor | None = None
    kl_N: Tensor | None = None
    agrees_N: Tensor | None = None


class Policy(adapters.WithAdapter):
    """The policy, or the reference, which is the same but frozen."""

    # For `fsdp_utils.shard`: these, too, need gathered parameters.
    forward_methods = ("hidden_states",)
    head_dtype: torch.dtype | None = None  # the logits'; None: that of the head's weights

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> None:
        """`dtype`: of the arithmetic, the engine and the exported weights. The parameters may have another."""
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.expert_loads = ExpertLoads(self.layers)
        self.needs_rows = run_in_rows(self.layers)
        # The reference, if it moves (--reference_every): in a list, so that it is no part of this module.
        self.moving_references: list[Policy] = []
        config = model.config.get_text_config()
        matrices = model.get_output_embeddings().weight.numel()
        for layer in self.layers:
            matrices += sum(weight.numel() * active_share(config, weight.ndim) for weight in layer.parameters())
        # FLOPs of a forward pass: 2 x numbers of the matrices x tokens; causal attention 2 x
        # length^2 x width a layer.
        self.flops_per_token = 2 * matrices
        # Granite divides its logits. Here the temperature does it, in one division.
        self.logits_divisor = config.logits_scaling if config.model_type == "granite" else 1.0
        # At this length attention costs as much as the matrices: flops_per_token x
        # `batch.training_costs` is the sum.
        self.parity_length = matrices / (attention_layers(config) * config.num_attention_heads * head_dim(config))

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, the units of sharding."""
        return list(self.model.get_decoder().layers)

    def forward(
        self, batch: Batch, temperature: float, trains_entropy: bool = False, teacher: Teacher | None = None
    ) -> TokenScores:
        """The scores of the labels; `trains_entropy`: their entropies have a gradient."""
        trained_K, head = batch.trained_K, self.model.get_output_embeddings()
        hidden_KD, labels_K = self._trained_hidden(batch), batch.labels_N.index_select(0, trained_K)
        temperature *= self.logits_divisor
        # Not `head(hidden)`: the logits of all positions would take more memory than the model.
        scores = chunked_logprobs(hidden_KD, head, labels_K, temperature, trains_entropy, self.head_dtype, teacher)
        # Back to all positions, so that whatever adds up over them needs one kind of index.
        zeros_N = torch.zeros(len(batch.labels_N), device=trained_K.device)
        return TokenScores(*(zeros_N.index_copy(0, trained_K, values_K) for values_K in scores))

    def hidden_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(hidden_KD, weight_VD): what the head multiplies at the trained positions. A `Teacher` is made of them."""
        hidden_KD = self._trained_hidden(batch)
        weight_VD = self.model.get_output_embeddings().weight.detach()
        return hidden_KD / self.logits_divisor, weight_VD.clone()  # FSDP will free the weight

    def _trained_hidden(self, batch: Batch) -> Tensor:
        """Runs the decoder; returns its output at the trained positions: the head runs on these alone."""
        beat("runs a forward pass")
        inputs = {"input_ids": batch.input_ids_N[None]}
        if batch.images is not None:
            inputs = {"inputs_embeds": embed(self.model, batch.input_ids_N, batch.images)[None]}
        if batch.routes_NLA is not None:
            inputs["routes_NLA"] = batch.routes_NLA
        packing = batch.packing  # made for the policy: a reference may need more
        if packing is None or (self.needs_rows and not packing.has_rows):
            packing = make_packing(batch.segments_S, batch.input_ids_N.device, self.needs_rows)
        output = self.model.get_decoder()(
            **inputs,
            position_ids=batch.position_ids_N.unsqueeze(-2),  # [1, N], with images [3, 1, N]
            use_cache=False,  # every position is computed at once
            packing=packing,
        )
        return output.last_hidden_state[0].index_select(0, batch.trained_K)

    @torch.no_grad()
    def move_references(self, mixup: float) -> None:
        """reference += mixup x (policy - reference), on the shards of this rank: nothing is communicated.

        With 1 it is the policy, to the bit.
        """
        for reference in self.moving_references:
            for target, parameter in zip(reference.parameters(), self.parameters(), strict=True):
                own = local_shard(target)
                own.lerp_(local_shard(parameter).to(own), mixup)

    def named_weights(self) -> list[tuple[str, nn.Parameter, nn.Module | None]]:
        """(Hugging Face name, parameter, layer whose adapter is merged into it) of all but adapters."""
        layers = adapters.adapted_layers(self.model)
        named = []
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:  # an adapter is no weight of its own to the engine, nor in a checkpoint
                layer = layers.get(name.removesuffix(".base_layer.weight"))
                named.append((in_files(name), parameter, layer))
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
            yield name, full if layer is None else adapters.merged(layer, full, self.dtype)

    def describe_weights(self) -> dict[str, list]:
        """Names, dtypes and shapes of the tensors of `full_weights`, in the form of vLLM's weight transfer."""
        named = self.named_weights()
        return {
            "names": [name for name, _, _ in named],
            "dtype_names": [str(self.dtype).removeprefix("torch.")] * len(named),
            "shapes": [list(parameter.shape) for _, parameter, _ in named],
        }

    def own_rows(self) -> Iterator[tuple[str, bool, Iterator[tuple[Tensor, int]]]]:
        """(Hugging Face name, whether LoRA is merged into it, pieces) of each parameter, as the engine is to hold it.

        A piece is some rows in the engine's dtype and the index of the first. All ranks run through
        the same pieces together. They are made from this rank's shards alone, not by `full_weights`:
        the comparison with the engine is to find a fault in that way, too.
        """
        for name, parameter, layer in self.named_weights():
            if layer is not None:
                yield name, True, adapters.own_merged_rows(layer, parameter, self.dtype)
            else:
                pieces = own_rows(parameter, adapters.MERGED_ROWS)
                yield name, False, ((rows.to(self.dtype), first) for rows, first in pieces)

    def describe(self) -> str:
        """The numbers of parameters and of trained ones, for the first lines of the log."""
        trained = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in self.parameters())
        adapter = f": {self.describe_adapter()}" if self.has_adapter else ""
        return f"trainable: {trained:,} of {total:,} parameters{adapter}"


def build_policy(
    path: str, memory: Memory, lora: Lora, adamw: AdamW, reference_path: str | None, seed: int, world: World
) -> tuple[Policy, Policy | None, Optimizer]:
    """The sharded policy, the sharded frozen reference (None without a KL term), and the policy's optimizer.

    With LoRA a reference of the policy's own path is the policy itself, with its adapter off.
    `seed`: of the adapter's first values.
    """
    dtype = getattr(torch, memory.dtype)
    # Masters in --param_dtype keep updates that --dtype would lose; a frozen base needs none.
    param_dtype = dtype if lora.lora_rank else getattr(torch, memory.param_dtype)
    policy = empty_policy(path, param_dtype, dtype, memory.gradient_checkpointing)
    policy.head_dtype = getattr(torch, memory.head_dtype or memory.dtype)
    if lora.lora_rank:
        adapters.add_adapter(policy.model, lora, seed, path)
    shard_and_fill(policy, path, world, memory.offload == "all", memory.communicate_once)
    reference = policy if reference_path else None
    if reference_path and (reference_path != path or not lora.lora_rank):
        # It is never trained: no masters, and no recomputation in a backward pass.
        own_dtype = dtype if memory.reference_mixup == 1 else torch.float32
        reference = empty_policy(reference_path, own_dtype, dtype).requires_grad_(False)
        reference.head_dtype = policy.head_dtype
        shard_and_fill(reference, reference_path, world, memory.offload_reference)
        policy.moving_references = [reference] if memory.reference_every else []
    if memory.compile:
        for model in {policy, reference} - {None}:  # with LoRA they may be one
            compile_layers(model)
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    # Last: the weights are loaded before its state takes memory.
    return policy, reference, make_optimizer(trained, adamw, memory)


def compile_layers(policy: Policy) -> None:
    """Puts the decoder layers under torch.compile, in place. One compilation serves all of them and all lengths.

    It is their `forward` alone: FSDP's hooks and the recomputation stay around it, and no parameter
    gets another name.
    """
    for layer in policy.layers:
        # A graph for each state: gradients, adapter on or off, kind of layer, some ranges of
        # lengths.
        compiled = torch.compile(layer.forward, dynamic=True, recompile_limit=64)
        # On CPUs `Engine` disables compilation in the whole process, for vLLM.
        layer.forward = torch._dynamo.config.patch(disable=False)(compiled)


def add_packing(batch: Batch, needs_rows: bool) -> Batch:
    """The batch with its packing on the device: made in a pass, it would be copied there in each."""
    hinted = batch.hinted and add_packing(batch.hinted, needs_rows)
    return replace(batch, packing=make_packing(batch.segments_S, batch.input_ids_N.device, needs_rows), hinted=hinted)


def add_images(batch: Batch, images_of_sequences: list[PromptImages | None]) -> Batch:
    """The batch with the images of its sequences, their places, and positions in three rows; as it is without images.

    The list has one entry per sequence of the rollout.
    """
    segments = batch.segments_S
    images_S = [None if segment.index is None else images_of_sequences[segment.index] for segment in segments]
    if not any(images_S):
        return batch
    positions_S, is_image_S, prompts = [], [], []
    for segment, images in zip(segments, images_S, strict=True):
        positions, is_image = np.tile(np.arange(segment.stop), (3, 1)), np.zeros(segment.stop, dtype=bool)
        if images is not None:
            positions, flags = images.positions(segment.stop), images.is_image()
            is_image[: len(flags)] = flags
            if segment.prefix is None:  # sequences that share a prompt have its images once
                prompts.append(images)
        positions_S.append(positions[:, segment.start :])
        is_image_S.append(is_image[segment.start :])
    places_I = torch.from_numpy(np.flatnonzero(np.concatenate(is_image_S)))
    position_ids_N = torch.from_numpy(np.concatenate(positions_S, axis=1))
    return replace(batch, position_ids_N=position_ids_N, images=BatchImages(prompts, places_I))


def empty_policy(
    path: str, param_dtype: torch.dtype, dtype: torch.dtype, gradient_checkpointing: bool = False
) -> Policy:
    """The model at `path` (folder or hub id), without storage yet. `dtype`: the policy's, not of its parameters."""
    if os.environ.get(OFF) or not sys.stderr.isatty():  # a bar would fill a log file
        transformers.utils.logging.disable_progress_bar()
    # A tower has images of its own, which are not packed: it keeps torch's attention. "" is a
    # model of one part.
    attention = {"": "packed", "text_config": "packed", "vision_config": "sdpa"}
    with without_storage():
        model = model_from_config(load_config(path), dtype=param_dtype, attn_implementation=attention)
    model.eval()  # as from_pretrained leaves it: no dropout
    # For some families vLLM runs transformers' decoder: it changes that class, in this process, to
    # compile its calls.
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
