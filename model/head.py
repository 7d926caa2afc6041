"""Log-probabilities of the labels from hidden states, without ever holding the full logits.

The head runs in token chunks that are computed again in the backward pass: the logits of 16,384 tokens and a vocabulary
of 152,064 would take 4.6 GiB in bf16. Peak memory is that of one chunk's logits, whatever the number of tokens T.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from model import sizes


def chunked_logprobs(
    hidden: Tensor, head: nn.Linear, labels: Tensor, temperature: float, with_entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the labels, entropies in nats), float32, one per row of `hidden` [T, D]."""
    assert head.bias is None, "no supported model has a head with a bias"
    return _HeadLogprobs.apply(hidden, head.weight, labels, temperature, with_entropy_gradient)


class _HeadLogprobs(torch.autograd.Function):
    """The function behind `chunked_logprobs`, on the head's weight [V, D].

    Autograd over recomputed chunks would take twice the passes over the logits. Here the entropy is not computed again,
    the gradient of the logits is made in their own memory, and the last chunk is kept for the backward pass, which
    begins with it.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, has_entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.settings = temperature, has_entropy_gradient
        logprobs, entropies = (hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(2))
        ctx.last_chunk = None
        for rows in _chunks(len(labels), len(weight)):
            ctx.last_chunk = None  # before the next one is made
            ctx.last_chunk = all_logprobs = _chunk_logprobs(hidden[rows], weight, temperature)
            logprobs[rows] = all_logprobs.gather(-1, labels[rows, None])[:, 0]
            entropies[rows] = -all_logprobs.exp().mul_(all_logprobs).sum(dim=-1)
            del all_logprobs
        if not has_entropy_gradient:  # mostly it is only a metric
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        temperature, has_entropy_gradient = ctx.settings
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in reversed(_chunks(len(labels), len(weight))):
            # Becomes the gradient of the logits: g (1[v = label] - p_v), and h p_v (-log p_v - entropy).
            grad, ctx.last_chunk = ctx.last_chunk, None
            if grad is None:
                grad = _chunk_logprobs(hidden[rows], weight, temperature)
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
        return grad_hidden, grad_weight, None, None, None


def _chunks(count: int, vocab: int) -> list[slice]:
    """The rows that are computed at a time."""
    size = max(sizes.HEAD_CHUNK_LOGITS // vocab, 1)
    return [slice(start, start + size) for start in range(0, count, size)]


def _chunk_logprobs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of all tokens [T, V], float32."""
    logits = F.linear(hidden, weight).float()
    if temperature != 1:
        logits /= temperature  # the one division by the temperature
    return logits.log_softmax(dim=-1)
