"""The head beside a teacher: a KL over the whole vocabulary, by autograd, chunk by chunk. `Policy.forward` asks for it.

A chunk's logits are computed again in the backward pass. There are about four tensors of their size at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model import sizes
from model.head import Distilled, HeadSettings, TokenScores, chunks, log_probabilities


class Teacher(NamedTuple):
    """The distribution of the reference at the same tokens, before its head."""

    hidden_TD: Tensor  # its own width D
    weight_VD: Tensor  # its head's; rows beyond the policy's are left out, as if their probability was 0
    divergence: Callable[[Tensor, Tensor], Tensor]  # of `divergences.py`
    temperature: float  # with the divisor of its own logits in it


def distilled_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, settings: HeadSettings, teacher: Teacher
) -> TokenScores:
    """As `model.head.chunked_logprobs`, with the fields of `Distilled`."""
    weights = weight, teacher.weight_VD[: len(weight)]

    def scores(hidden: Tensor, ref_hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        pairs = zip((hidden, ref_hidden), weights, strict=True)
        logits = [F.linear(x.to(settings.dtype), w.to(settings.dtype)) for x, w in pairs]
        log_p = log_probabilities(logits[0], settings.temperature)
        log_q = log_probabilities(logits[1], teacher.temperature)
        entropies = -(log_p.exp() * log_p).sum(dim=-1)
        logprobs, ref_logprobs = (x.gather(-1, labels[:, None])[:, 0] for x in (log_p, log_q))
        agrees = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).float()
        return logprobs, entropies, ref_logprobs, teacher.divergence(log_p, log_q), agrees

    pieces = []  # half of a chunk without a teacher, which holds two such tensors; an empty batch is one empty piece
    for rows in chunks(len(labels), len(weight), sizes.HEAD_CHUNK_LOGITS // 2) or [slice(0)]:
        pieces.append(checkpoint(scores, hidden[rows], teacher.hidden_TD[rows], labels[rows], use_reentrant=False))
    logprobs, entropies, *distilled = map(torch.cat, zip(*pieces, strict=True))
    return TokenScores(logprobs, entropies, Distilled(*distilled))
