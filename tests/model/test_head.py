"""The chunked head: log-probs and entropies are those of the full logits."""

import torch
from transformers import AutoModelForCausalLM

from batch import pack
from helpers import RAGGED, make_rollout
from model import sizes
from policy import load_policy


def test_chunks_of_the_head_change_neither_value_nor_gradient(policy, monkeypatch):
    batch = pack(make_rollout(), list(range(len(RAGGED))))
    results = []
    for chunk in (1024, 5, 1):
        monkeypatch.setattr(sizes, "HEAD_CHUNK_LOGITS", chunk * 64)
        model = load_policy(str(policy), torch.float32)
        logprobs, entropies = model(batch, 1.0)
        logprobs.sum().backward(retain_graph=True)
        gradient = model.model.get_output_embeddings().weight.grad.clone()
        logprobs.sum().backward()  # the last chunk is kept for the first backward pass, not for this one
        results.append(
            (logprobs.detach(), entropies, gradient, model.model.get_output_embeddings().weight.grad - gradient)
        )
    for other in results:
        for found, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(other[3], other[2], atol=1e-5, rtol=1e-5)


def test_entropy_is_that_of_the_tempered_distribution(policy):
    rollout = make_rollout([3])
    model = load_policy(str(policy), torch.float32)
    batch = pack(rollout, [0])
    tokens = torch.tensor([*rollout.rows[0].ids, *rollout.completions[0]])[None]
    plain = AutoModelForCausalLM.from_pretrained(str(policy), dtype=torch.float32)
    expected = torch.distributions.Categorical(logits=plain(tokens).logits[0, 3:6] / 0.5).entropy()
    entropies = model(batch, 0.5)[1]
    torch.testing.assert_close(entropies[batch.loss_mask_N], expected, atol=1e-5, rtol=0)
    assert not entropies.requires_grad, "as a metric it costs no memory for a backward pass"
    model(batch, 0.5, True)[1].sum().backward()
    expected.sum().backward()
    gradients = dict(plain.named_parameters())
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, atol=1e-5, rtol=1e-4)
    assert max(p.grad.abs().max() for p in gradients.values()) > 0.01


def test_prompt_positions_get_no_logprob_and_give_no_gradient_to_the_head(policy):
    model = load_policy(str(policy), torch.float32)
    batch = pack(make_rollout([2, 2]), [0, 1])
    logprobs, entropies = model(batch, 1.0)
    assert logprobs[~batch.loss_mask_N].eq(0).all()
    assert entropies[~batch.loss_mask_N].eq(0).all()
    logprobs[~batch.loss_mask_N].sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())
