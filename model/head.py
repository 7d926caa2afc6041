"""Log-probabilities of the labels from hidden states, without ever holding the full logits.

The head runs in chunks of tokens that are computed again in the backward pass: the logits of 16,384 tokens and a
vocabulary of 152,064 would take 4.6 GiB in bf16. Peak memory is one chunk's logits, whatever the number of tokens T.

The logits are fp32 from `log_softmax` on. `head_dtype` (`--head_dtype`) is that of the matrix product. Both kinds
multiply bf16 numbers and add in fp32; float32 keeps the sum, bf16 rounds a logit near 20 to a multiple of 0.125, which
changes its probability by up to 6 %. The backward pass is the same for both: it rounds the gradient of the logits to
the weight's dtype for two matrix products, as in every other layer: by at most 0.4 % of each number.

With a `Teacher`, a reference that is followed over the whole vocabulary, there is a chunk of its logits, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from model import sizes


class Teacher(NamedTuple):
    """The distribution of the reference at the same tokens, before its head."""

    hidden_TD: Tensor  # its own width D
    weight_VD: Tensor  # of its head; what it has beyond the policy's rows is left out, as if its probability was 0
    divergence: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of `grpo.DIVERGENCES`


def chunked_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    temperature: float,
    with_entropy_gradient: bool = False,
    head_dtype: torch.dtype | None = None,
    teacher: Teacher | None = None,
) -> tuple[Tensor, ...]:
    """(log-probabilities of the labels, entropies in nats), float32, one per row of `hidden` [T, D].

    With a teacher also its log-probabilities of the labels, at the same temperature; the divergence; and 1 where both
    models find the same token the likeliest, else 0. `head_dtype`: of the logits; None: that of the weight.
    """
    assert head.bias is None, "no supported model has a head with a bias"
    settings = temperature, with_entropy_gradient, head_dtype or head.weight.dtype, teacher and teacher.divergence
    of_teacher = (teacher.hidden_TD, teacher.weight_VD[: len(head.weight)]) if teacher else ()
    return _HeadLogprobs.apply(hidden, head.weight, labels, settings, *of_teacher)


class _HeadLogprobs(torch.autograd.Function):
    """`chunked_logprobs` on the head's weight [V, D], in half the passes over the logits that autograd would take.

    The backward pass does not compute the entropy again and makes the gradient of the logits in memory that it has. The
    last chunk is kept for it, because it begins with that one.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, settings: tuple, *of_teacher: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, labels, *of_teacher)
        ctx.settings = temperature, has_entropy_gradient, head_dtype, divergence = settings
        found = [hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(5 if of_teacher else 2)]
        ctx.last_chunk = None
        for rows in chunks(len(labels), len(weight)):
            ctx.last_chunk = None  # before the next one is made
            ctx.last_chunk = log_p = chunk_logprobs(hidden[rows], weight, temperature, head_dtype)
            values = [log_p.gather(-1, labels[rows, None])[:, 0], -log_p.exp().mul_(log_p).sum(dim=-1)]
            if of_teacher:
                log_q = chunk_logprobs(of_teacher[0][rows], of_teacher[1], temperature, head_dtype)
                agrees = log_p.argmax(dim=-1) == log_q.argmax(dim=-1)
                values += [log_q.gather(-1, labels[rows, None])[:, 0], divergence(log_p, log_q)[0], agrees]
                del log_q
            for each, of_chunk in zip(found, values, strict=True):
                each[rows] = of_chunk
            del log_p
        # The entropy is mostly only a metric.
        ctx.mark_non_differentiable(*found[2:3], *found[4:], *([] if has_entropy_gradient else [found[1]]))
        return tuple(found)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, *of_teacher = ctx.saved_tensors
        temperature, has_entropy_gradient, head_dtype, divergence = ctx.settings
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in reversed(chunks(len(labels), len(weight))):
            log_p, ctx.last_chunk, slopes = ctx.last_chunk, None, None  # slopes: see `grpo.DIVERGENCES`
            if log_p is None:
                log_p = chunk_logprobs(hidden[rows], weight, temperature, head_dtype)
            if of_teacher:
                log_q = chunk_logprobs(of_teacher[0][rows], of_teacher[1], temperature, head_dtype)
                slopes = divergence(log_p, log_q)[1].mul_(gradients[3][rows, None])
                del log_q
            p = log_p.exp() if has_entropy_gradient else log_p.exp_()
            if has_entropy_gradient:  # its slopes are -p log p
                of_entropy = log_p.mul_(p).mul_(-gradients[1][rows, None])
                slopes = of_entropy if slopes is None else slopes.add_(of_entropy)
                del of_entropy
            of_label = gradients[0][rows, None]
            if slopes is None:
                grad = p.mul_(-of_label)
            else:
                grad = slopes.sub_(p.mul_(slopes.sum(dim=-1, keepdim=True).add_(of_label)))
            del log_p, p, slopes  # or their memory would still be held when the next chunk is computed
            grad.scatter_add_(-1, labels[rows, None], of_label)
            grad = grad.div_(temperature).to(weight.dtype) if temperature != 1 else grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[rows])
            del grad
        return grad_hidden, grad_weight, *[None] * (2 + len(of_teacher))


def chunks(count: int, vocab: int) -> list[slice]:
    size = max(sizes.HEAD_CHUNK_LOGITS // vocab, 1)
    return [slice(start, start + size) for start in range(0, count, size)]


def chunk_logprobs(hidden: Tensor, weight: Tensor, temperature: float, head_dtype: torch.dtype) -> Tensor:
    """Log-probabilities of all tokens [T, V], float32."""
    if head_dtype == weight.dtype:
        logits = F.linear(hidden, weight).float()
    elif weight.device.type == "cpu":  # no kernel there keeps its fp32 sums of bf16 numbers: the weight is copied
        logits = F.linear(hidden.float(), weight.float())
    else:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    if temperature != 1:
        logits /= temperature  # the one division by the temperature
    return logits.log_softmax(dim=-1)
