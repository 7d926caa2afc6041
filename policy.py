"""The policy: a Hugging Face causal LM that returns per-token log-probabilities of a packed micro-batch.

Two things differ from calling the model as it comes. Attention sees each packed sequence alone (`packed_attention`, registered
with transformers, so any architecture that goes through its attention interface works unchanged). And the head runs in token
chunks that are computed again in the backward pass (`chunked_logprobs`), so the full logits of a micro-batch never exist: 16,384
tokens of a 152,064-word vocabulary would be 4.6 GiB in bf16. Dimensions: `batch.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from batch import Batch, Segment
from model.weights import fill, without_storage

HEAD_CHUNK_LOGITS = 1024 * 152_064  # 0.6 GiB in fp32, 1,024 tokens of Qwen2.5; there are two such tensors at most
RECTANGLE_PADDING = (
    128  # padding slots of a rectangle (CPU), at most: of 32 to 1,024, 64 and 128 are fast for short and long sequences
)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a micro-batch lie, in the form that the attention kernel of the device wants."""

    max_length: int  # of a sequence
    # CUDA: the queries of sequence s are at positions cu_seqlens[s] .. cu_seqlens[s + 1], its keys in slots cu_seqlens_k[s] .. [s + 1]
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    # CPU: sequences of similar length share a padded rectangle, and the rectangles lie end to end in M slots
    rectangles: list[tuple[int, int]]  # sequences and slots of each: M is the sum of the products
    positions_M: (
        Tensor | None
    )  # the packed position in each slot; in padding some position of the same sequence; None: slot m has m
    slots_N: Tensor | None  # the slot of each packed position; the first one where several sequences share it


def make_packing(segments: tuple[Segment, ...], device: torch.device) -> Packing:
    """The packing of segments that lie end to end."""
    if device.type != "cuda":
        return padded_packing(segments)
    packing = varlen_packing(segments)
    tensors = {name: x.to(device, non_blocking=True) for name, x in vars(packing).items() if isinstance(x, Tensor)}
    return replace(packing, **tensors)


def varlen_packing(segments: tuple[Segment, ...]) -> Packing:
    """For CUDA: keys are gathered only where sequences share a prompt."""
    lengths_S, stops_S = (torch.tensor(values) for values in ([x.length for x in segments], [x.stop for x in segments]))
    cu_seqlens, cu_seqlens_k = (F.pad(counts_S.cumsum(0), (1, 0)).int() for counts_S in (lengths_S, stops_S))
    positions_M = None
    if cu_seqlens_k[-1] > cu_seqlens[-1]:
        sequence_of_slot = torch.repeat_interleave(stops_S)
        offsets = torch.arange(len(sequence_of_slot)) - cu_seqlens_k[sequence_of_slot]
        positions_M = _positions(segments, sequence_of_slot, offsets)
    return Packing(int(stops_S.max()), cu_seqlens, cu_seqlens_k, [], positions_M, None)


def padded_packing(segments: tuple[Segment, ...]) -> Packing:
    """For the CPU: each sequence whole, with the prompt that it shares; those of similar length share a rectangle."""
    groups: list[list[int]] = []
    padding = 0
    for s in sorted(range(len(segments)), key=lambda s: segments[s].stop):
        padding += len(groups[-1]) * (segments[s].stop - segments[groups[-1][-1]].stop) if groups else 0
        if not groups or padding > RECTANGLE_PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(s)
    rectangles, positions, is_real = [], [], []
    for group in groups:
        members, stops = torch.tensor(group)[:, None], torch.tensor([segments[s].stop for s in group])[:, None]
        offsets = torch.arange(int(stops[-1]))
        rectangles.append((len(group), len(offsets)))
        is_real.append((offsets < stops).flatten())
        positions.append(_positions(segments, members, offsets.minimum(stops - 1)).flatten())
    positions_M = torch.cat(positions)
    slots = torch.cat(is_real).nonzero()[:, 0]
    _, first = np.unique(positions_M[slots].numpy(), return_index=True)
    return Packing(int(stops[-1]), None, None, rectangles, positions_M, slots[first])


def _positions(segments: tuple[Segment, ...], sequences: Tensor, offsets: Tensor) -> Tensor:
    """The packed positions of these offsets from the beginning of these sequences: in the prefix, or their own."""
    starts = np.cumsum([0, *(x.length for x in segments)]).tolist()
    before_S = torch.tensor([x.start for x in segments])
    own_S = torch.tensor(starts[:-1]) - before_S
    prefix_S = torch.tensor([starts[s if x.prefix is None else x.prefix] for s, x in enumerate(segments)])
    return offsets + torch.where(offsets < before_S[sequences], prefix_S[sequences], own_S[sequences])


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence; the signature is that of a transformers attention function.

    Shapes: query [1, heads, N, head_dim], key and value [1, kv_heads, N, head_dim] -> [1, N, heads, head_dim]. CUDA: the
    variable-length FlashAttention kernel of torch itself, whose last query sees the last key where there are more keys than queries
    (`check_alignment`). CPU: padded rectangles, exact because a causal query of a right-padded row sees no padding; the queries of a shared
    prompt are there once for each sequence that begins with it, because that kernel's causal mask is for as many queries as keys.
    """
    assert packing is not None, "call the model through Policy, which passes the packing"
    ignored = [name for name in ("softcap", "s_aux") if unused.get(name) is not None]
    if ignored:
        raise ValueError(
            f"this model's attention uses {', '.join(ignored)}, which packed attention does not implement."
        )
    if sliding_window is not None and sliding_window < packing.max_length:
        raise ValueError(
            f"sliding-window attention of {sliding_window} tokens is not supported for sequences of {packing.max_length}."
        )
    if packing.cu_seqlens is not None:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if packing.positions_M is not None:
            key, value = key[packing.positions_M], value[packing.positions_M]
        out = varlen_attn(
            query, key, value, packing.cu_seqlens, packing.cu_seqlens_k, packing.max_length, packing.max_length,
            scale=scaling, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return out[None], None
    sizes = [count * length for count, length in packing.rectangles]
    in_slots = (
        x[0].transpose(0, 1).index_select(0, packing.positions_M) for x in (query, key, value)
    )  # [M, heads, head_dim]
    rows = []
    for shape, *parts in zip(packing.rectangles, *(x.split(sizes) for x in in_slots), strict=True):
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)  # [S, heads, L, head_dim]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        rows.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(rows).index_select(0, packing.slots_N)[None], None


AttentionInterface.register("packed", packed_attention)


def check_alignment(device: torch.device) -> None:
    """Raises RuntimeError if the kernel's causal mask does not let the last query see the last key, as FlashAttention's does since 2.1."""
    if device.type != "cuda":
        return
    queries, keys = (torch.zeros(n, 1, 64, dtype=torch.bfloat16, device=device) for n in (2, 3))
    values = torch.tensor([0, 2, 4], dtype=torch.bfloat16, device=device).view(3, 1, 1).repeat(1, 1, 64)
    ends = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (2, 3))
    seen = varlen_attn(queries, keys, values, *ends, 2, 3, window_size=(-1, 0))[:, 0, 0].tolist()
    if seen != [1, 2]:
        raise RuntimeError(
            f"--share_prompts: of the values 0, 2, 4 varlen_attn of torch {torch.__version__} makes {seen} for two queries, not [1, 2]: "
            "its causal mask does not end with the last key, as this flag needs. Leave the flag out, or use the torch of requirements.txt."
        )


class _HeadLogprobs(torch.autograd.Function):
    """Hidden states [T, D] and head weight [V, D] -> log-probabilities of the labels and entropies, chunk by chunk.

    Autograd over recomputed chunks would do the same with twice the passes over the logits: here the entropy is not computed again, the
    gradient of the logits is made in their own memory, and the last chunk, with which the backward pass begins, is kept for it.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.settings = temperature, with_entropy_gradient
        logprobs, entropies = (hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(2))
        ctx.last_chunk = None
        for rows in _chunks(len(labels), len(weight)):
            ctx.last_chunk = None  # before the next one is made
            ctx.last_chunk = all_logprobs = _chunk_logprobs(hidden[rows], weight, temperature)
            logprobs[rows] = all_logprobs.gather(-1, labels[rows, None])[:, 0]
            entropies[rows] = -all_logprobs.exp().mul_(all_logprobs).sum(dim=-1)
            del all_logprobs
        if not with_entropy_gradient:  # mostly it is only a metric
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        temperature, with_entropy_gradient = ctx.settings
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in reversed(_chunks(len(labels), len(weight))):
            grad, ctx.last_chunk = ctx.last_chunk, None  # becomes that of the logits: g (1[v = label] - p_v), and ...
            if grad is None:
                grad = _chunk_logprobs(hidden[rows], weight, temperature)
            if with_entropy_gradient:  # ... h p_v (-log p_v - entropy)
                probs = grad.exp()
                entropy = -torch.einsum("tv,tv->t", probs, grad)[
                    :, None
                ]  # a product of its own would be a third such tensor
                grad = probs.mul_(grad.add_(entropy).mul_(-grad_entropies[rows, None]).sub_(grad_logprobs[rows, None]))
                del probs  # or its memory would still be held when the next chunk is computed
            else:
                grad.exp_().mul_(-grad_logprobs[rows, None])
            grad.scatter_add_(-1, labels[rows, None], grad_logprobs[rows, None])
            grad = grad.div_(temperature).to(weight.dtype) if temperature != 1 else grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[rows])
            del grad
        return grad_hidden, grad_weight, None, None, None


def _chunks(count: int, vocab: int) -> list[slice]:
    """Rows that are computed at a time."""
    size = max(HEAD_CHUNK_LOGITS // vocab, 1)
    return [slice(start, start + size) for start in range(0, count, size)]


def _chunk_logprobs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of all tokens [T, V], float32."""
    logits = F.linear(hidden, weight).float()
    if temperature != 1:
        logits /= temperature  # the one division by the temperature
    return logits.log_softmax(dim=-1)


def chunked_logprobs(
    hidden: Tensor, head: nn.Linear, labels: Tensor, temperature: float, with_entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the labels, entropies in nats of the whole distribution), float32, one per row of `hidden` [T, D].

    Peak memory is that of one chunk's logits, whatever T: the backward pass computes all chunks but the last one again.
    """
    assert head.bias is None, "no supported model has a head with a bias"
    return _HeadLogprobs.apply(hidden, head.weight, labels, temperature, with_entropy_gradient)


class Policy(nn.Module):
    """A causal LM whose forward pass is "log-probabilities of this packed batch". Also the reference: the same, frozen."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        matrices = sum(weight.numel() for layer in self.layers for weight in layer.parameters() if weight.ndim == 2)
        matrices += model.get_output_embeddings().weight.numel()
        # FLOPs of a forward pass: 2 a number of a matrix and token; causal attention 2 x length^2 x width a layer, as half is masked.
        self.flops_per_token = 2 * matrices
        # At this length attention costs as much as the matrices; flops_per_token x `batch.training_costs` is the sum of both.
        self.parity_length = matrices / (len(self.layers) * config.num_attention_heads * head_dim)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, the units of sharding."""
        return list(self.model.get_decoder().layers)

    def forward(self, batch: Batch, temperature: float, with_entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropies_N), float32: of the labels where the loss mask is true, zero (without gradient) elsewhere."""
        inputs = {"inputs_embeds": self.embed(batch)[None]} if batch.pixels else {"input_ids": batch.input_ids_N[None]}
        output = self.model.get_decoder()(
            **inputs,
            position_ids=batch.position_ids_N.unsqueeze(-2),  # [1, N], with images [3, 1, N]
            use_cache=False,
            packing=make_packing(batch.segments_S, batch.input_ids_N.device),
        )
        mask_N = batch.loss_mask_N
        hidden = output.last_hidden_state[0][mask_N]  # the head runs on completion positions only
        head = self.model.get_output_embeddings()
        logprobs, entropies = chunked_logprobs(hidden, head, batch.labels_N[mask_N], temperature, with_entropy_gradient)
        zeros_N = torch.zeros(len(mask_N), device=mask_N.device)
        return zeros_N.masked_scatter(mask_N, logprobs), zeros_N.masked_scatter(mask_N, entropies)

    def embed(self, batch: Batch) -> Tensor:
        """Shape [N, D]: embeddings of the tokens, and of the images in the place of theirs.

        The tower is frozen, and its parameters are gathered with the rest of the root unit before this runs: a rank without images has
        no collective to miss.
        """
        tower, device = tower_of(self.model), batch.input_ids_N.device
        embedded_ND = self.model.get_input_embeddings()(batch.input_ids_N)
        with torch.no_grad():
            pixels = torch.cat([each.to(device, tower.dtype, non_blocking=True) for each in batch.pixels])
            images = tower(pixels, grid_thw=torch.tensor(batch.grids, device=device)).pooler_output
        return embedded_ND.masked_scatter(batch.is_image_N[:, None], images.to(embedded_ND.dtype))


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """The vision tower of Qwen2.5-VL; None of a model that sees nothing."""
    return getattr(model.base_model, "visual", None)


def model_from_config(config: PretrainedConfig, **options: object) -> PreTrainedModel:
    """A new model of this architecture with its language-model head."""
    auto = AutoModelForCausalLM if getattr(config, "vision_config", None) is None else AutoModelForImageTextToText
    return auto.from_config(config, **options)


def empty_policy(path: str, dtype: torch.dtype, gradient_checkpointing: bool = False) -> Policy:
    """The model described at `path` (a folder in Hugging Face format or a hub id), its parameters in `dtype` and without storage yet."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path)
    sees = getattr(config, "vision_config", None) is not None
    attention = {"text_config": "packed", "vision_config": "sdpa"} if sees else "packed"
    with without_storage():
        model = model_from_config(config, dtype=dtype, attn_implementation=attention)
    model.eval()  # as from_pretrained leaves it
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only; the supported models have no dropout
    if (tower := tower_of(model)) is not None:
        tower.eval().requires_grad_(False)
    return Policy(model)


def compile_layers(policy: Policy, backend: str = "inductor") -> None:
    """Lets torch.compile work on each decoder layer at its first call: once for all layers and lengths."""
    for layer in policy.layers:
        layer.compile(dynamic=True, backend=backend)


def load_policy(path: str, dtype: torch.dtype, gradient_checkpointing: bool = False) -> Policy:
    """The policy with its weights, whole and on the CPU: for a single process. Ranks shard `empty_policy` and then `fill` it."""
    policy = empty_policy(path, dtype, gradient_checkpointing)
    fill(policy, policy.model, path, torch.device("cpu"))
    return policy
