"""The head of a policy that follows another model over the whole vocabulary. As `head.py`, a chunk of tokens at a time.

Beside the chunk of the policy's log-probs there is one of the reference's: neither logits are ever held in full. Both
are made again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from model.head import chunk_logprobs, chunks

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of `grpo.DIVERGENCES`


class Teacher(NamedTuple):
    """The distribution of the reference at the trained tokens of a micro-batch, before its head."""

    hidden_KD: Tensor  # its own width D
    weight_VD: Tensor  # of its head
    divergence: Divergence


def distilled_logprobs(
    hidden: Tensor, head: nn.Linear, labels: Tensor, teacher: Teacher, settings: tuple[float, bool, torch.dtype | None]
) -> tuple[Tensor, ...]:
    """Float32, one per row of `hidden` [T, D]: what `head.chunked_logprobs` returns, then the reference's log-probs of
    the labels, the divergence, and 1 where both models find the same token the likeliest, else 0.

    `settings`: temperature, of both; whether the entropy has a gradient; dtype of the logits. The vocabularies may be
    padded to different sizes: rows that only one has are left out, as if their probability was 0.
    """
    ref_hidden, ref_weight, divergence = teacher
    rows, (*others, head_dtype) = min(len(head.weight), len(ref_weight)), settings
    settings = *others, head_dtype or head.weight.dtype, divergence
    return _Distilled.apply(hidden, head.weight[:rows], labels, ref_hidden, ref_weight[:rows], settings)


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, ref_hidden: Tensor, ref_weight: Tensor,
        settings: tuple[float, bool, torch.dtype, Divergence],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(hidden, weight, labels, ref_hidden, ref_weight)
        ctx.settings = temperature, has_entropy_gradient, head_dtype, divergence = settings
        found = [hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(5)]
        logprobs, entropies, ref_logprobs, values, agrees = found
        for rows in chunks(len(labels), len(weight)):
            log_p = chunk_logprobs(hidden[rows], weight, temperature, head_dtype)
            logprobs[rows] = log_p.gather(-1, labels[rows, None])[:, 0]
            entropies[rows] = -log_p.exp().mul_(log_p).sum(dim=-1)
            log_q = chunk_logprobs(ref_hidden[rows], ref_weight, temperature, head_dtype)
            ref_logprobs[rows] = log_q.gather(-1, labels[rows, None])[:, 0]
            agrees[rows] = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).float()
            values[rows] = divergence(log_p, log_q)[0]
            del log_p, log_q  # before the next ones are made
        ctx.mark_non_differentiable(ref_logprobs, agrees, *([] if has_entropy_gradient else [entropies]))
        return tuple(found)

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropies: Tensor, _: Tensor, grad_values: Tensor, __: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, ref_hidden, ref_weight = ctx.saved_tensors
        temperature, has_entropy_gradient, head_dtype, divergence = ctx.settings
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in chunks(len(labels), len(weight)):
            log_p = chunk_logprobs(hidden[rows], weight, temperature, head_dtype)
            log_q = chunk_logprobs(ref_hidden[rows], ref_weight, temperature, head_dtype)
            slopes = divergence(log_p, log_q)[1].mul_(grad_values[rows, None])
            del log_q
            p = log_p.exp()
            if has_entropy_gradient:  # its slope is -p log p
                slopes.sub_(log_p.mul_(p).mul_(grad_entropies[rows, None]))
            of_label = grad_logprobs[rows, None]
            grad = slopes.sub_(p.mul_(slopes.sum(dim=-1, keepdim=True).add_(of_label)))
            del log_p, p
            grad = grad.scatter_add_(-1, labels[rows, None], of_label).div_(temperature).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[rows])
            del grad, slopes
        return grad_hidden, grad_weight, None, None, None, None
