"""Log-probabilities of the labels from hidden states, without ever holding the full logits.

The head runs in chunks of tokens that are computed again in the backward pass: the logits of 16,384
tokens and a vocabulary of 152,064 would take 4.6 GiB in bf16. Peak memory is one chunk's logits,
whatever the number of tokens T: their gradient takes their place. A run on CUDA may decide, once,
that a chunk has up to `sizes.HEAD_GROWTH` times as many: then fewer are computed again.

Two functions work row by row in fp32: `score` and `replace_by_gradient`. On CUDA torch.compile
makes a kernel of each, which reads the logits and writes their gradient, and nothing of that size
between. On CPU the same lines run in eager mode, on pieces of a chunk.

`head_dtype` (`--head_dtype`) is that of the matrix product. Both kinds multiply bf16 numbers and
add in fp32; float32 keeps the sum, bf16 rounds a logit near 20 to a multiple of 0.125, which
changes its probability by up to 6 %. The backward pass is the same for both: it rounds the gradient
of the logits to the weight's dtype for two matrix products, as in every other layer: by at most 0.4
% of each number. The weight's gradient adds its chunks up in that dtype, too: in bf16 it is off by
0.2 % of its norm with one chunk, 0.5 % with 16, 0.6 to 0.8 % with 64 (against float64). A sum in
fp32 would take 4 more bytes a number: 2 GiB for a 7B model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from model import sizes

FUSED_ON = {"cuda"}  # kinds of devices on which torch.compile makes the kernels
EAGER_PIECES = 8  # pieces of a chunk in eager mode: each number takes about 20 bytes for a moment


class Distilled(NamedTuple):
    """A KL over the whole vocabulary, float32, at each of N places."""

    ref_logprobs_N: Tensor  # the teacher's of the labels, at the same temperature
    kl_N: Tensor
    agrees_N: Tensor  # 1 where both models find the same token the likeliest


class TokenScores(NamedTuple):
    """The results of a pass, float32, at each of N places."""

    logprobs_N: Tensor  # of the labels
    entropies_N: Tensor  # in nats
    distilled: Distilled | None = None  # None: without a teacher


class HeadSettings(NamedTuple):
    """The settings of the head, in both passes."""

    temperature: float
    dtype: torch.dtype  # of the logits
    growth: int = 1  # of a chunk, times `sizes.HEAD_CHUNK_LOGITS`; last bits of the weight's gradient depend on it


def chunked_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    temperature: float,
    head_dtype: torch.dtype | None = None,
    growth: int = 1,
) -> TokenScores:
    """The scores of the labels, one per row of `hidden` [T, D]. `head_dtype`: None: as the head's weight."""
    assert head.bias is None, "no supported model has a head with a bias"
    settings = HeadSettings(temperature, head_dtype or head.weight.dtype, growth)
    return TokenScores(*_HeadLogprobs.apply(hidden, head.weight, labels, settings))


class _HeadLogprobs(torch.autograd.Function):
    """`chunked_logprobs` on the head's weight [V, D], in half the passes over the logits that autograd would take.

    The logits of the last chunk are kept for the backward pass, because it begins with that one.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        settings: HeadSettings,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.set_materialize_grads(False)  # the entropy is mostly only a metric: then its gradient is None
        ctx.settings = settings
        outputs = [hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(2)]
        ctx.last_chunk = None
        for rows in chunks(len(labels), len(weight), settings.growth * sizes.HEAD_CHUNK_LOGITS):
            ctx.last_chunk = None  # before the next one is made
            ctx.last_chunk = logits = chunk_logits(hidden[rows], weight, settings.dtype)
            for output, values in zip(outputs, by_rows(score, settings, logits, labels[rows]), strict=True):
                output[rows] = values
            del logits
        return tuple(outputs)

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        settings = ctx.settings
        if grad_logprobs is None:  # a loss of entropies alone
            grad_logprobs = torch.zeros_like(grad_entropies)
        gradients = [grad_logprobs] if grad_entropies is None else [grad_logprobs, grad_entropies]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in reversed(chunks(len(labels), len(weight), settings.growth * sizes.HEAD_CHUNK_LOGITS)):
            logits, ctx.last_chunk = ctx.last_chunk, None
            if logits is None:
                logits = chunk_logits(hidden[rows], weight, settings.dtype)
            grads = [gradient[rows] for gradient in gradients]
            by_rows(replace_by_gradient, settings, logits, labels[rows], *grads)
            grad = logits.to(weight.dtype)
            del logits
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[rows])
            del grad
        return grad_hidden, grad_weight, None, None


def chunks(count: int, vocab: int, most: int) -> list[slice]:
    """Rows whose logits are at most so many."""
    size = max(most // vocab, 1)
    return [slice(start, start + size) for start in range(0, count, size)]


def chunk_logits(hidden: Tensor, weight: Tensor, head_dtype: torch.dtype) -> Tensor:
    """Logits of all tokens [T, V], in `head_dtype`."""
    if head_dtype == weight.dtype:
        return F.linear(hidden, weight)
    if weight.device.type == "cpu":  # no kernel there keeps its fp32 sums of bf16 numbers: the weight is copied
        return F.linear(hidden.float(), weight.float())
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


# Row by row -----------------------------------------------------------------------------------------------------------


def by_rows(
    function: Callable[..., list[Tensor]], settings: HeadSettings, logits: Tensor, *inputs: Tensor
) -> list[Tensor]:
    """Runs `score` or `replace_by_gradient` on the rows of these tensors; returns what it returns."""
    tensors = logits, *inputs
    if logits.device.type in FUSED_ON:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one compilation for all numbers of rows
        return compiled(function)(settings, *tensors)
    pieces = []
    for rows in chunks(*logits.shape, logits.numel() // EAGER_PIECES):
        pieces.append(function(settings, *(tensor[rows] for tensor in tensors)))
    return [torch.cat(values) for values in zip(*pieces, strict=True)]


@cache
def compiled(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    return torch.compile(function)


def score(settings: HeadSettings, logits: Tensor, labels: Tensor) -> list[Tensor]:
    """The log-probs of the labels and the entropies, for some of the rows."""
    log_p = log_probabilities(logits, settings.temperature)
    return [log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)]


def replace_by_gradient(settings: HeadSettings, logits: Tensor, labels: Tensor, *gradients: Tensor) -> list[Tensor]:
    """Writes over the logits their gradient, by the gradients of what `score` returns; returns nothing more.

    That of the entropies may be left out: it costs a second pass over the logits.
    """
    temperature, grad_logprob = settings.temperature, gradients[0][:, None]
    log_p = log_probabilities(logits, temperature)
    p = log_p.exp()
    grad = p * -grad_logprob
    if len(gradients) == 2:
        slopes = log_p * p * -gradients[1][:, None]
        grad = slopes - p * (slopes.sum(dim=-1, keepdim=True) + grad_logprob)
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    grad = torch.where(is_label, grad + grad_logprob, grad)
    logits.copy_(grad / temperature if temperature != 1 else grad)
    return []


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """The log-probabilities of all tokens [T, V], float32, at the temperature: the one division by it."""
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    return logits.log_softmax(dim=-1)
