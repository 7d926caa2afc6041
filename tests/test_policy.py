"""The packed forward pass against the Hugging Face model run on each sequence alone. float32, tolerance 1e-5."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import fsdp_utils
import policy as policy_module
from batch import Batch, pack
from helpers import ALONE, RAGGED, flags, make_rollout, unpacked_logprobs
from policy import compile_layers, load_policy
from update import add_advantages, update_policy

SEVERAL_RECTANGLES = [70, 5, 100, 30, 66]  # on CPU: of lengths so different that they do not all share one


def random_model(folder: Path, architecture: str) -> Path:
    """A folder with a random model that has what is particular to its architecture: grouped queries, a norm of queries and keys, biases."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **sizes, num_key_value_heads=2, head_dim=32, initializer_range=0.12)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "model, temperature",
    [("policy", 1.0), ("policy", 0.7), ("untied_policy", 1.0), ("llama", 0.7), ("qwen3", 0.7), ("mistral", 1.0)],
)
@pytest.mark.parametrize(
    "gradient_checkpointing, lengths, prompt_length, group_size",
    [(False, RAGGED, 4, 1), (True, RAGGED, 4, 1), (False, SEVERAL_RECTANGLES, 4, 1)]
    + [(False, RAGGED, 4, 4), (True, RAGGED, 50, 3), (False, SEVERAL_RECTANGLES, 40, 2), (False, RAGGED, 1, 8)],
)
def test_packed_logprobs_and_gradients_equal_those_of_each_sequence_alone(
    model, temperature, gradient_checkpointing, lengths, prompt_length, group_size, request, tmp_path
):
    """Where completions have the same prompt, its positions are shared, but for a prompt of one token, which has none to share."""
    path = str(request.getfixturevalue(model) if "policy" in model else random_model(tmp_path, model))
    packed = load_policy(path, torch.float32, gradient_checkpointing)
    alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rollout = make_rollout(lengths, prompt_length, group_size=group_size)
    batch = pack(rollout, list(range(len(lengths))), group_size)
    num_shared = (prompt_length - 1) * (len(lengths) - -(-len(lengths) // group_size))
    assert len(batch.labels_N) == rollout.sequence_lengths_B.sum() - num_shared
    weights = torch.randn(sum(lengths))
    logprobs = packed(batch, temperature)[0][batch.loss_mask_N]
    expected = unpacked_logprobs(alone, rollout, temperature)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, found), wanted in zip(packed.model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad, wanted.grad, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_rectangles_hold_sequences_of_similar_length():
    """With prompts of 4 tokens: 8 and 33 positions; then 69, 73 and 103, where the first two would bring 95 + 70 padding slots to 103."""
    batch = pack(make_rollout(SEVERAL_RECTANGLES), [0, 1, 2, 3, 4])
    assert policy_module.padded_packing(batch.segments_S).rectangles == [(4, 73), (1, 103)]
    equal = pack(make_rollout([9] * 50), list(range(50)))
    assert policy_module.padded_packing(equal.segments_S).rectangles == [(50, 12)]


def test_packing_for_cuda_gives_the_kernel_what_the_rectangles_give_the_cpu(policy, monkeypatch):
    """The kernel's part by its documentation: queries and keys by cumulative lengths, causal, the last query sees the last key."""

    def varlen_attn(query, key, value, cu_seqlens, cu_seqlens_k, max_q, max_k, scale, window_size, enable_gqa):
        assert window_size == (-1, 0) and max_q >= cu_seqlens.diff().max() and max_k >= cu_seqlens_k.diff().max()
        assert cu_seqlens[-1] == len(query) and cu_seqlens_k[-1] == len(key) == len(value)
        out, pairs = [], ((query, cu_seqlens), (key, cu_seqlens_k), (value, cu_seqlens_k))
        for q, k, v in zip(*(x.split(cu.diff().tolist()) for x, cu in pairs), strict=True):
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out.append(
                F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)
            )
        return torch.cat(out)

    model = load_policy(str(policy), torch.float32)
    rollout = make_rollout(SEVERAL_RECTANGLES, 40, group_size=2)
    for group_size in (1, 2):
        batch, found = pack(rollout, [3, 0, 4, 2, 1], group_size), []
        for kernel in (False, True):
            with monkeypatch.context() as patch:
                if kernel:
                    patch.setattr(policy_module, "varlen_attn", varlen_attn)
                    patch.setattr(policy_module, "padded_packing", policy_module.varlen_packing)
                logprobs = model(batch, 1.0)[0]
            model.zero_grad()
            logprobs.square().sum().backward()
            found.append([logprobs.detach(), *(p.grad.clone() for p in model.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 * a.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_activations_go_to_the_host_and_weights_do_not(policy, gradient_checkpointing, monkeypatch):
    model, moved = load_policy(str(policy), torch.float32, gradient_checkpointing), []
    to_host = fsdp_utils._to_host
    monkeypatch.setattr(fsdp_utils, "_to_host", lambda tensor: moved.append(tensor) or to_host(tensor))
    batch = pack(make_rollout(), list(range(len(RAGGED))))
    with fsdp_utils.activations_on_host(True):
        logprobs = model(batch, 1.0)[0]
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not [tensor.shape for tensor in moved if tensor.untyped_storage().data_ptr() in weights]
    inputs_of_layers = [tensor for tensor in moved if tensor.shape == (1, len(batch.labels_N), 64)]
    assert len(inputs_of_layers) >= 2, "two layers"
    assert (len(moved) < 20) == gradient_checkpointing, "without it, what is inside the layers goes, too"
    logprobs.sum().backward()
    plain = load_policy(str(policy), torch.float32)
    plain(batch, 1.0)[0].sum().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, atol=1e-5, rtol=1e-5)


def test_compiled_layers_give_the_same_numbers_for_all_lengths_from_one_compilation(policy):
    """By the backend that traces and differentiates but leaves the arithmetic to PyTorch: no compiler is needed, and no bit may differ."""
    compiled, plain = (
        load_policy(str(policy), torch.float32, gradient_checkpointing=True),
        load_policy(str(policy), torch.float32),
    )
    compile_layers(compiled, backend="aot_eager")
    num_graphs = []
    for lengths in ([12, 7, 3], [30, 4, 9, 11], [5, 5, 5, 40]):
        batch = pack(make_rollout(lengths), list(range(len(lengths))))
        for model in (compiled, plain):
            model(batch, 1.0)[0].sum().backward()
        for found, wanted in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, atol=1e-4, rtol=1e-4)
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert num_graphs[0] >= 1 and len(set(num_graphs)) == 1


def test_chunks_of_the_head_change_neither_value_nor_gradient(policy, monkeypatch):
    batch = pack(make_rollout(), list(range(len(RAGGED))))
    results = []
    for chunk in (1024, 5, 1):
        monkeypatch.setattr(policy_module, "HEAD_CHUNK_LOGITS", chunk * 64)
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
    tokens = torch.tensor([*rollout.prompts[0], *rollout.completions[0]])[None]
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


def test_an_empty_batch_runs_and_has_zero_gradient(policy):
    model = load_policy(str(policy), torch.float32)
    model(pack(make_rollout(), []), 1.0)[0].sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())


def test_a_sliding_window_shorter_than_a_sequence_is_refused(policy):
    model = load_policy(str(policy), torch.float32)
    for layer in model.layers:
        layer.self_attn.sliding_window = 8
    with pytest.raises(ValueError, match="sliding-window attention of 8 tokens"):
        model(pack(make_rollout(), [0]), 1.0)


def whole_batch() -> Batch:
    rollout = make_rollout()
    return add_advantages([[pack(rollout, list(range(8)))]], rollout)[0][0]


def test_an_update_that_is_not_finite_leaves_policy_and_optimizer_untouched(policy):
    args = flags()
    model = load_policy(str(policy), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    good = whole_batch()
    bad = replace(good, advantages_N=good.advantages_N * float("inf"))
    assert update_policy(model, optimizer, [good], sum(RAGGED), True, 1e-3, args, ALONE)["optim/skipped_updates"] == 0
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert (
        update_policy(model, optimizer, [good, bad], sum(RAGGED), True, 1e-3, args, ALONE)["optim/skipped_updates"] == 1
    )
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, atol=0, rtol=0)
    metrics = update_policy(model, optimizer, [good], sum(RAGGED), True, 1e-3, args, ALONE)
    assert metrics["optim/skipped_updates"] == 0, "the bad gradient did not stay behind"
    assert metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0


def test_the_logged_learning_rate_is_the_one_that_is_used(policy):
    args = flags()
    model = load_policy(str(policy), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    before = copy.deepcopy(model.state_dict())
    metrics = update_policy(model, optimizer, [whole_batch()], sum(RAGGED), True, 0.0, args, ALONE)
    assert metrics["optim/lr"] == 0.0
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    update_policy(model, optimizer, [whole_batch()], sum(RAGGED), True, 1e-2, args, ALONE)
    moved = max((model.state_dict()[name] - before[name]).abs().max().item() for name in before)
    assert 0.005 < moved < 0.02, "one AdamW step moves a parameter by about the learning rate"
