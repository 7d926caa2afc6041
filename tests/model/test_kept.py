"""--top_p and --top_k: what the trainer finds that was kept, and log-probs, entropies and gradients over it, are those
of their definition in float64, also when the policy has moved since.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import rollout as _  # noqa: F401  it prepares vLLM
from algorithm import algorithm_of
from batch import Rollout, Row
from helpers.made_up import ALONE, flags, load_policy, make_rollout, train_once, whole_update
from model import sizes
from model.head import HeadOptions, chunked_logprobs, find_kept, keep
from update import add_logprobs

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
def test_the_likeliest_are_kept(cut):
    """The k likeliest, then of these the likeliest that reach p. tests/test_rollout.py asks vLLM."""
    torch.manual_seed(2)
    logits = torch.randn(200, V) * torch.linspace(0.1, 5, 200)[:, None]
    wanted = by_definition(logits, *cut)
    assert keep(logits, *cut).equal(wanted) and wanted.sum(-1).min() < V


@pytest.mark.parametrize("top_p", [0.9, 0.99, 0.999])
def test_a_large_vocabulary_is_cut_as_vllm_cuts_it(top_p):
    """At most one token at the border differs, of up to 80,000 that are kept: sums that begin with the largest lose
    hundreds.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    torch.manual_seed(0)
    logits = torch.randn(2, 152_000) * 3
    theirs = apply_top_k_top_p_pytorch(logits.clone(), None, torch.full((2,), top_p)).isfinite()
    assert (keep(logits, 0, top_p) ^ theirs).sum(dim=-1).max() <= 1


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


def over(kept: Tensor, model: nn.Module, rollout: Rollout) -> Tensor:
    """The log-probs of the completions' tokens over these tokens [T, V], in float64, by the definition."""
    logits, labels = logits_of(model, rollout), torch.from_numpy(np.concatenate(rollout.completions)).long()
    return logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@torch.no_grad()
def logits_of(model: nn.Module, rollout: Rollout) -> Tensor:
    """[T, V], float64, at the temperature: sequence after sequence."""
    pieces = []
    for row, completion in zip(rollout.rows, rollout.completions, strict=True):
        tokens = torch.tensor([*row.ids, *completion])[None]
        pieces.append(model(tokens).logits[0, len(row.ids) - 1 : -1].double() / TEMPERATURE)
    return torch.cat(pieces)


def moved(path: Path, seed: int) -> nn.Module:
    """The model at the path, a little off."""
    model, generator = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), torch.Generator()
    generator.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)
    return model


@pytest.mark.parametrize("is_hinted", [False, True])
def test_later_policies_and_the_reference_are_compared_over_what_the_first_one_kept(is_hinted, policy):
    """Prompts are shared, and the second policy is another one, as the second update of a step has it. The metrics
    are those of the definition within 1e-5. With hints the reference reads longer prompts.
    """
    changes = {"temperature": TEMPERATURE, "top_k": 8, "top_p": 0.8, "kl_coef": 0.1, "share_prompts": True}
    args, rollout = flags(micro_batch_tokens=40, group_size=4, **changes), make_rollout(group_size=4)
    if is_hinted:
        hinted_rows = [Row([], "", {}, "", ids=x.ids, hinted_ids=np.append(x.ids, [5, 9])) for x in rollout.rows]
        rollout = replace(rollout, rows=hinted_rows)
    model, reference = load_policy(policy), load_policy(policy)
    first, later, other = (moved(policy, seed) for seed in range(3))
    labels = torch.from_numpy(np.concatenate(rollout.completions)).long()[:, None]
    wanted = by_definition(logits_of(first, rollout), 8, 0.8)
    missed = 1 - wanted.gather(-1, labels).double().mean().item()
    wanted.scatter_(-1, labels, True)
    model.model.load_state_dict(first.state_dict())
    reference.model.load_state_dict(other.state_dict())
    (update,) = add_logprobs([whole_update(rollout, args, model, ALONE)], model, reference, algorithm_of(args))
    model.model.load_state_dict(later.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = train_once(model, optimizer, update, args, is_first=False)
    old, new = (over(wanted, each, rollout) for each in (first, later))
    ref = over(wanted, other, rollout.hinted() or rollout)
    sampled = torch.from_numpy(np.concatenate(rollout.rollout_logprobs))
    expected = {
        "approx_kl": old - new, "kl_ref": new - ref, "rollout_gap_mean": (old.exp() - sampled.exp()).abs(),
        "kept_mean": wanted.sum(-1).double(),
    }  # fmt: skip
    means = {f"policy/{name}": values.mean().item() for name, values in expected.items()}
    assert {name: found[name] for name in means} == pytest.approx(means, abs=1e-5)
    assert found["policy/kept_missed"] == pytest.approx(missed, abs=1e-6) and 0.5 < missed < 1
    assert found["policy/ratio_max"] == pytest.approx((new - old).max().exp().item(), rel=1e-4)
    own = by_definition(logits_of(later, rollout), 8, 0.8).scatter_(-1, labels, True)
    assert (over(own, later, rollout) - new).abs().max() > 0.1, "over what it would keep itself"
