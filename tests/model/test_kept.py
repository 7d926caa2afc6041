"""--top_p and --top_k: what the trainer finds that the sampler kept is what vLLM keeps, and log-probs, entropies and
gradients over it are those of their definition in float64, also when the policy has moved since.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from batch import pack
from helpers.made_up import RAGGED, load_policy, make_rollout
from model import sizes
from model.head import HeadOptions, chunked_logprobs, find_kept, keep

V, T, TEMPERATURE = 64, 20, 0.7
CUTS = [(0, 0.9), (5, 1.0), (8, 0.6), (1, 1.0), (100, 1e-6)]


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    head = nn.Linear(16, V, bias=False)
    head.weight.data.normal_()
    return head


def random_labels() -> tuple[Tensor, Tensor]:
    """(hidden states, labels)."""
    torch.manual_seed(1)
    return torch.randn(T, 16), torch.randint(V, (T,))


def by_definition(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """bool [T, V], token by token: the likeliest until they are k, or have reached the share p."""
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, places in zip(logits.double(), is_kept, strict=True):
        likeliest = row.argsort(descending=True)[: top_k or None]
        reached = 0.0
        for token, p in zip(likeliest, row[likeliest].softmax(-1), strict=True):
            if top_p < 1 and reached >= top_p:
                break
            places[token], reached = True, reached + p.item()
    return is_kept


@pytest.mark.parametrize("cut", CUTS)
def test_the_kept_tokens_are_those_of_vllm(cut):
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    torch.manual_seed(2)
    logits = torch.randn(200, V) * torch.linspace(0.1, 5, 200)[:, None]
    top_k, top_p = cut
    wanted = by_definition(logits, *cut)
    k, p = torch.full((200,), min(top_k or V, V)), torch.full((200,), top_p)
    theirs = apply_top_k_top_p_pytorch(logits.clone(), k, p if top_p < 1 else None, allow_cpu_sync=True)
    assert keep(logits, *cut).equal(wanted) and theirs.isfinite().equal(wanted)
    assert wanted.sum(-1).min() < V


def test_what_is_as_likely_as_the_last_is_kept_too():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    assert keep(logits, 2, 1.0).tolist() == keep(logits, 4, 0.8).tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("has_entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_a_softmax_over_what_was_kept(cut, has_entropy_gradient, head, monkeypatch):
    """What was kept is found at other hidden states, as a policy has them that has moved. Within 1e-5; exactly 0 is
    the gradient of what no place has kept.
    """
    monkeypatch.setattr(sizes, "HEAD_CHUNK_LOGITS", 8 * 6 * V)  # to find it takes an eighth
    hidden, labels = random_labels()
    old = hidden + 0.3 * torch.randn(T, 16)
    kept = find_kept(old, head.weight.detach(), labels, TEMPERATURE, cut, None)
    is_kept = by_definition(old @ head.weight.detach().T / TEMPERATURE, *cut)
    assert kept.is_missed_T.equal(~is_kept.gather(-1, labels[:, None])[:, 0]) and kept.is_missed_T.any()
    is_kept.scatter_(-1, labels[:, None], True)
    monkeypatch.setattr(sizes, "HEAD_CHUNK_LOGITS", 6 * V)
    ours = [hidden.clone().requires_grad_(), head.weight]
    options = HeadOptions(kept=kept)
    logprobs, entropies = chunked_logprobs(ours[0], head, labels, TEMPERATURE, has_entropy_gradient, options)
    exact = [hidden.double().requires_grad_(), head.weight.detach().double().requires_grad_()]
    logits = (exact[0] @ exact[1].T / TEMPERATURE).masked_fill(~is_kept, -torch.inf)
    log_p = logits.log_softmax(-1)
    wanted = log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p.masked_fill(~is_kept, 0)).sum(-1)
    torch.testing.assert_close((logprobs.double(), entropies.double()), wanted, atol=1e-5, rtol=0)
    weights = torch.randn(2, T)
    ((weights[0] * logprobs).sum() + has_entropy_gradient * (weights[1] * entropies).sum()).backward()
    ((weights[0] * wanted[0]).sum() + has_entropy_gradient * (weights[1] * wanted[1]).sum()).backward()
    torch.testing.assert_close([x.grad.double() for x in ours], [x.grad for x in exact], atol=1e-5, rtol=0)
    assert not head.weight.grad[~is_kept.any(0)].any()


def test_without_labels_nothing_is_kept(head):
    hidden, labels = random_labels()
    kept = find_kept(hidden[:0], head.weight, labels[:0], 1.0, (5, 1.0), None)
    assert [len(values) for values in kept] == [0, 0, 0]
    scores = chunked_logprobs(hidden[:0], head, labels[:0], 1.0, options=HeadOptions(kept=kept))
    assert [len(values) for values in scores] == [0, 0]


def test_a_later_policy_is_compared_over_what_the_first_one_kept(policy):
    """The set of the batch stays; over its own the policy would give other log-probs."""
    model, batch = load_policy(policy), pack(make_rollout(), list(range(len(RAGGED))))
    batch = replace(batch, cut=(4, 0.8))
    with torch.no_grad():
        first = model(batch, TEMPERATURE)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        later, own = model(replace(batch, kept=first.kept), TEMPERATURE), model(batch, TEMPERATURE)
    assert all(a.equal(b) for a, b in zip(later.kept, first.kept, strict=True))
    assert (later.logprobs_N - own.logprobs_N).abs().max() > 0.1
    assert (first.logprobs_N[batch.loss_mask_N] <= 0).all() and not first.logprobs_N[~batch.loss_mask_N].any()
