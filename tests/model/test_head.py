"""The chunked head: log-probs and entropies are those of the full logits."""

from functools import cache, partial

import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

import model.head
from helpers.made_up import RAGGED, load_policy, make_rollout
from model import sizes
from model.head import chunked_logprobs
from packing import pack


def test_chunks_of_the_head_change_neither_value_nor_gradient(policy, monkeypatch):
    """Prompt positions have no log-prob and no gradient, here of the tied embedding."""
    batch, results = pack(make_rollout(), list(range(len(RAGGED)))), []
    for chunk in (1024, 5, 1):
        monkeypatch.setattr(sizes, "HEAD_CHUNK_LOGITS", chunk * 64)
        model = load_policy(policy)
        weight = model.model.get_output_embeddings().weight
        logprobs, entropies, *_ = model(batch, 1.0)
        (gradient,) = torch.autograd.grad(logprobs.sum(), weight, retain_graph=True)
        prompts = [values[~batch.loss_mask_N] for values in (logprobs, entropies)]
        prompts += torch.autograd.grad(prompts[0].sum(), weight, retain_graph=True)
        assert not any(values.any() for values in prompts)
        (again,) = torch.autograd.grad(logprobs.sum(), weight)  # the last chunk is not kept for it
        torch.testing.assert_close(again, gradient, atol=1e-5, rtol=1e-5)
        results.append((logprobs.detach(), entropies, gradient))
    torch.testing.assert_close(results[1:], results[:1] * 2, atol=1e-5, rtol=1e-5)


def test_entropy_is_that_of_the_tempered_distribution(policy):
    model, rollout = load_policy(policy), make_rollout([3])
    batch = pack(rollout, [0])
    tokens = torch.tensor([*rollout.rows[0].ids, *rollout.completions[0]])[None]
    plain = AutoModelForCausalLM.from_pretrained(str(policy), dtype=torch.float32)
    expected = torch.distributions.Categorical(logits=plain(tokens).logits[0, 3:6] / 0.5).entropy()
    entropies = model(batch, 0.5)[1]
    torch.testing.assert_close(entropies[batch.loss_mask_N], expected, atol=1e-5, rtol=0)
    entropies.sum().backward()
    expected.sum().backward()
    found, wanted = ({name: p.grad for name, p in x.named_parameters()} for x in (model.model, plain))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert max(gradient.abs().max() for gradient in wanted.values()) > 0.01


def test_a_gradient_of_the_entropies_costs_a_pass_where_something_needs_it(policy, monkeypatch):
    """As a metric alone they give the head none; with one of 0 the others' gradient is the same."""
    batch, given, gradients = pack(make_rollout(), list(range(len(RAGGED)))), [], []
    plain = model.head.replace_by_gradient

    def noted(settings, logits, labels, *grads):
        given.append(len(grads))
        return plain(settings, logits, labels, *grads)

    monkeypatch.setattr(model.head, "replace_by_gradient", noted)
    for factor in (None, 0.0):
        own = load_policy(policy)
        scores = own(batch, 1.0)
        (scores.logprobs_N if factor is None else scores.logprobs_N + factor * scores.entropies_N).sum().backward()
        gradients.append(own.model.get_output_embeddings().weight.grad)
    assert given == [1] * (len(given) // 2) + [2] * (len(given) // 2) and given
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_fp32_logits_are_exact_where_bf16_rounds_them(qwen3_policy):
    """Against an fp64 head on the same hidden states. In bf16, logits near 13 have steps of 0.06."""
    policy, batch, hidden = load_policy(qwen3_policy, torch.bfloat16), pack(make_rollout(), list(range(8))), []
    policy.model.get_decoder().register_forward_hook(lambda module, args, out: hidden.append(out.last_hidden_state[0]))
    mask, errors = batch.loss_mask_N, []
    for head_dtype in (None, torch.bfloat16, torch.float32):
        policy.head_dtype = head_dtype
        with torch.no_grad():
            logprobs, entropies, *_ = policy(batch, 0.7)
            logits = hidden[-1].double() @ policy.model.lm_head.weight.double().T
        exact = torch.distributions.Categorical(logits=logits / 0.7)
        pairs = (logprobs, exact.log_prob(batch.labels_N)), (entropies, exact.entropy())
        errors.append([(ours[mask] - wanted[mask]).abs().max().item() for ours, wanted in pairs])
    assert logits.mean() > 10
    assert errors[0] == errors[1] and min(errors[0]) > 0.01 and max(errors[2]) < 1e-5


def test_the_gradient_of_fp32_logits_is_wrong_by_rounding_alone(monkeypatch):
    """Logits near 32 in bf16 make gradients wrong by 2 %, rounding the gradient of fp32 ones by 0.4 %."""
    monkeypatch.setattr(sizes, "HEAD_CHUNK_LOGITS", 10 * 300)  # four chunks, of which one is kept
    torch.manual_seed(0)
    hidden, head = torch.randn(40, 64).bfloat16(), nn.Linear(64, 300, bias=False).bfloat16()
    head.weight.data.normal_(std=0.3)
    hidden[:, 0], head.weight.data[:, 0] = 8.0, 4.0
    labels, weights, errors = torch.randint(300, (40,)), torch.randn(40), []
    exact = [hidden.double().requires_grad_(), head.weight.detach().double().requires_grad_()]
    logprobs = (exact[0] @ exact[1].T).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    (logprobs * weights).sum().backward()
    for head_dtype in (torch.bfloat16, torch.float32):
        ours = [hidden.clone().requires_grad_(), head.weight]
        head.weight.grad = None
        (chunked_logprobs(ours[0], head, labels, 1.0, head_dtype=head_dtype)[0] * weights).sum().backward()
        assert [x.grad.dtype for x in ours] == [torch.bfloat16] * 2
        errors.append([((a.grad - b.grad).norm() / b.grad.norm()).item() for a, b in zip(ours, exact, strict=True)])
    assert max(errors[1]) < 0.005 and min(errors[0]) > 0.015


def test_larger_chunks_are_not_compiled_again(monkeypatch):
    """Whatever is free: one graph each way serves all numbers of rows, with the same values."""
    monkeypatch.setattr(model.head, "FUSED_ON", {"cpu"})
    monkeypatch.setattr(model.head, "compiled", cache(partial(torch.compile, backend="aot_eager")))
    torch.manual_seed(0)
    hidden, head, labels = torch.randn(40, 16), nn.Linear(16, 300, bias=False), torch.randint(300, (40,))
    torch._dynamo.reset()
    counters.clear()
    found = []
    for rows in (40, 5, 10, 20):
        monkeypatch.setattr(model.head, "logits_at_once", lambda *_, rows=rows: rows * 300)
        own, head.weight.grad = hidden.clone().requires_grad_(), None
        logprobs = chunked_logprobs(own, head, labels, 1.0).logprobs_N
        logprobs.sum().backward()
        found.append([logprobs.detach(), own.grad, head.weight.grad])
    torch.testing.assert_close(found[1:], found[:1] * 3, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2
