"""Log-probabilities of the labels from hidden states, without ever holding the full logits.

The head runs in chunks of tokens that are computed again in the backward pass: the logits of 16,384 tokens and a
vocabulary of 152,064 would take 4.6 GiB in bf16. Peak memory is one chunk's logits, whatever the number of tokens T.

The logits are fp32 from `log_softmax` on. `head_dtype` (`--head_dtype`) is that of the matrix product. Both kinds
multiply bf16 numbers and add in fp32; float32 keeps the sum, bf16 rounds a logit near 20 to a multiple of 0.125, which
changes its probability by up to 6 %. The backward pass is the same for both: it rounds the gradient of the logits to
the weight's dtype for two matrix products, as in every other layer: by at most 0.4 % of each number.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from model import sizes

COPIED_ROWS = 4096  # CPU, fp32 logits of bf16 numbers: rows of the weight that are in fp32 at a time


def chunked_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    temperature: float,
    with_entropy_gradient: bool = False,
    head_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the labels, entropies in nats), float32, one per row of `hidden` [T, D].

    `head_dtype`: of the logits; None: that of the weight.
    """
    assert head.bias is None, "no supported model has a head with a bias"
    settings = temperature, with_entropy_gradient, head_dtype or head.weight.dtype
    return _HeadLogprobs.apply(hidden, head.weight, labels, settings)


class _HeadLogprobs(torch.autograd.Function):
    """`chunked_logprobs` on the head's weight [V, D], in half the passes over the logits that autograd would take.

    The backward pass does not compute the entropy again and makes the gradient of the logits in their own memory. The
    last chunk is kept for it, because it begins with that one.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, settings: tuple[float, bool, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.settings = temperature, has_entropy_gradient, head_dtype = settings
        logprobs, entropies = (hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(2))
        ctx.last_chunk = None
        for rows in chunks(len(labels), len(weight)):
            ctx.last_chunk = None  # before the next one is made
            ctx.last_chunk = all_logprobs = chunk_logprobs(hidden[rows], weight, temperature, head_dtype)
            logprobs[rows] = all_logprobs.gather(-1, labels[rows, None])[:, 0]
            entropies[rows] = -all_logprobs.exp().mul_(all_logprobs).sum(dim=-1)
            del all_logprobs
        if not has_entropy_gradient:  # mostly it is only a metric
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        temperature, has_entropy_gradient, head_dtype = ctx.settings
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in reversed(chunks(len(labels), len(weight))):
            # Becomes the gradient of the logits: g (1[v = label] - p_v), and h p_v (-log p_v - entropy).
            grad, ctx.last_chunk = ctx.last_chunk, None
            if grad is None:
                grad = chunk_logprobs(hidden[rows], weight, temperature, head_dtype)
            if has_entropy_gradient:
                probs = grad.exp()
                entropy = -torch.einsum("tv,tv->t", probs, grad)[:, None]  # a product would be a third such tensor
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
        return grad_hidden, grad_weight, None, None


def chunks(count: int, vocab: int) -> list[slice]:
    size = max(sizes.HEAD_CHUNK_LOGITS // vocab, 1)
    return [slice(start, start + size) for start in range(0, count, size)]


def chunk_logprobs(hidden: Tensor, weight: Tensor, temperature: float, head_dtype: torch.dtype) -> Tensor:
    """Log-probabilities of all tokens [T, V], float32."""
    logits = F.linear(hidden, weight).float() if head_dtype == weight.dtype else _fp32_logits(hidden, weight)
    if temperature != 1:
        logits /= temperature  # the one division by the temperature
    return logits.log_softmax(dim=-1)


def _fp32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [T, V], float32, of bf16 numbers; without a copy of the weight in fp32."""
    if weight.device.type != "cpu":
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    # No CPU kernel keeps its fp32 sums: some rows of the weight at a time are copied.
    hidden = hidden.float()
    logits = hidden.new_empty(len(hidden), len(weight))
    for start in range(0, len(weight), COPIED_ROWS):
        rows = slice(start, start + COPIED_ROWS)
        logits[:, rows] = F.linear(hidden, weight[rows].float())
    return logits
