"""The policy as a whole: its memory switches, and updates with it."""

import copy
from dataclasses import replace

import torch

from batch import pack
from helpers import RAGGED, flags, make_rollout, train_once
from policy import compile_layers, load_policy
from update import Update, with_advantages


def test_compiled_layers_give_the_same_numbers_for_all_lengths_from_one_compilation(policy):
    """By the backend that traces but leaves the arithmetic to PyTorch: no compiler is needed."""
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


def test_an_empty_batch_runs_and_has_zero_gradient(policy):
    model = load_policy(str(policy), torch.float32)
    model(pack(make_rollout(), []), 1.0)[0].sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())


def whole() -> Update:
    rollout = make_rollout()
    return Update([with_advantages(rollout, pack(rollout, list(range(8))))], sum(RAGGED))


def test_an_update_that_is_not_finite_leaves_policy_and_optimizer_untouched(policy):
    args = flags()
    model = load_policy(str(policy), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    good = whole()
    (batch,) = good.batches
    bad = Update([batch, replace(batch, advantages_N=batch.advantages_N * float("inf"))], sum(RAGGED))
    assert train_once(model, optimizer, good, args, rate=1e-3)["optim/skipped_updates"] == 0
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert train_once(model, optimizer, bad, args, rate=1e-3)["optim/skipped_updates"] == 1
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, atol=0, rtol=0)
    metrics = train_once(model, optimizer, good, args, rate=1e-3)
    assert metrics["optim/skipped_updates"] == 0, "the bad gradient did not stay behind"
    assert metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0


def test_the_logged_learning_rate_is_the_one_that_is_used(policy):
    args = flags()
    model = load_policy(str(policy), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    before = copy.deepcopy(model.state_dict())
    metrics = train_once(model, optimizer, whole(), args, rate=0.0)
    assert metrics["optim/lr"] == 0.0
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    train_once(model, optimizer, whole(), args, rate=1e-2)
    moved = max((model.state_dict()[name] - before[name]).abs().max().item() for name in before)
    assert 0.005 < moved < 0.02, "one AdamW step moves a parameter by about the learning rate"
