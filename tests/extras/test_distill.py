"""A reference that is followed over the whole vocabulary: values and gradients are those of full logits in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from extras.teacher.divergences import forward, jsd, reverse
from extras.teacher.head import Teacher, distilled_logprobs
from model import sizes
from model.head import HeadSettings

V, REF_V, T = 64, 70, 20  # the reference's vocabulary is padded to more rows


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum(dim=-1)


def mixed(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


EXPECTED = {"reverse": (reverse, kl), "forward": (forward, lambda log_p, log_q: kl(log_q, log_p))}
EXPECTED |= {f"jsd {beta}": (partial(jsd, beta=beta), partial(mixed, beta=beta)) for beta in (0.3, 0.9)}


@pytest.mark.parametrize("trains_entropy", [False, True])
@pytest.mark.parametrize("name", EXPECTED)
def test_value_and_gradient_are_those_of_full_logits_in_float64(name, trains_entropy, monkeypatch):
    """Logits of a spread of 2; chunks of 7 tokens, of which the last one has 6."""
    monkeypatch.setattr(sizes, "HEAD_CHUNK_LOGITS", 7 * V)
    torch.manual_seed(0)
    hidden, ref_hidden = torch.randn(T, 16, requires_grad=True), torch.randn(T, 24)
    head, ref_weight, labels = nn.Linear(16, V, bias=False), torch.randn(REF_V, 24) * 0.2, torch.randint(V, (T,))
    nn.init.normal_(head.weight, std=0.25)
    divergence, plain = EXPECTED[name]
    teacher = Teacher(ref_hidden, ref_weight, divergence, 0.7)
    settings = HeadSettings(0.7, torch.float32)
    scores = distilled_logprobs(hidden, head.weight, labels, settings, teacher)
    found = scores.logprobs_N, scores.entropies_N, *scores.distilled
    exact = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    log_p = (exact[0] @ exact[1].T / 0.7).log_softmax(dim=-1)
    log_q = (ref_hidden.double() @ ref_weight[:V].double().T / 0.7).log_softmax(dim=-1)
    entropies = -(log_p.exp() * log_p).sum(dim=-1)
    logprobs, ref_logprobs = (x.gather(-1, labels[:, None])[:, 0] for x in (log_p, log_q))
    agrees = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).double()
    expected = logprobs, entropies, ref_logprobs, plain(log_p, log_q), agrees
    torch.testing.assert_close([x.double() for x in found], [*expected], atol=1e-6, rtol=1e-6)
    weights, gradients = torch.randn(3, T) / T, []
    for sums, tensors in ((found, (hidden, head.weight)), (expected, exact)):
        terms = sums[0] * weights[0] + sums[3] * weights[1] + (sums[1] * weights[2] if trains_entropy else 0)
        gradients.append(torch.autograd.grad(terms.sum(), tensors))
    ours, wanted = gradients
    assert all(gradient.abs().max() > 0.01 for gradient in wanted)
    torch.testing.assert_close([x.double() for x in ours], [*wanted], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_token_ruled_out_by_one_model_has_a_finite_gradient(name):
    logits = torch.tensor([[0.0, -200.0, 1.0], [0.0, 1.0, -200.0]], requires_grad=True)
    values = EXPECTED[name][0](logits.log_softmax(dim=-1), logits.detach().flip(0).log_softmax(dim=-1))
    (slopes,) = torch.autograd.grad(values.sum(), logits)
    assert values.isfinite().all() and slopes.isfinite().all() and (values > 0.1).all()
