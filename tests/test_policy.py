"""The policy as a whole: its memory switches, and updates with it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batch import Update, pack
from helpers import RAGGED, flags, make_rollout, train_once, unpacked_logprobs
from policy import load_policy
from update import with_advantages


def test_an_empty_batch_runs_and_has_zero_gradient(policy):
    model = load_policy(str(policy), torch.float32)
    model(pack(make_rollout(), []), 1.0)[0].sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())


def whole() -> Update:
    rollout = make_rollout()
    return Update([with_advantages(rollout, pack(rollout, list(range(8))))], sum(RAGGED), 2)


def test_an_update_that_is_not_finite_leaves_policy_and_optimizer_untouched(policy):
    args = flags()
    model = load_policy(str(policy), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    good = whole()
    (batch,) = good.batches
    bad = Update([batch, replace(batch, advantages_N=batch.advantages_N * float("inf"))], sum(RAGGED), 2)
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


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("micros", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[5, 0, 1], [4], [7, 2, 3, 6], []]])
def test_standard_errors_are_made_from_the_sums_of_prompts_however_they_are_packed(policy, micros, share):
    """Of the gap to the sampler, by its definition; two completions for each prompt, one of which is not trained."""
    rollout = replace(make_rollout(group_size=2), is_trained_B=np.array([1, 1, 1, 0, 1, 1, 1, 1], dtype=bool))
    model = load_policy(str(policy), torch.float32)
    batches = [with_advantages(rollout, pack(rollout, micro, share)) for micro in micros]
    update = Update(batches, int(rollout.trained_lengths_B.sum()), num_prompts=6)  # of these, two are of other updates
    metrics = train_once(model, torch.optim.AdamW(model.parameters()), update, flags(group_size=2))
    own = unpacked_logprobs(AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32), rollout, 1.0)
    gap_T = (own.exp() - torch.from_numpy(np.concatenate(rollout.rollout_logprobs)).exp()).abs().detach().numpy()
    gaps = np.split(gap_T, np.cumsum(rollout.completion_lengths_B)[:-1])
    of_prompts = [np.concatenate(pair) for pair in ([gaps[0], gaps[1]], [gaps[2]], gaps[4:6], gaps[6:8])]
    mean = np.concatenate(of_prompts).mean()
    deviations = np.array([(gap - mean).sum() for gap in of_prompts])
    assert metrics["policy/rollout_gap_mean"] == pytest.approx(mean, rel=1e-4)
    expected = np.sqrt((deviations**2).sum() * 4 / 3) / update.num_tokens
    assert metrics["policy/rollout_gap_mean_stderr"] == pytest.approx(expected, rel=1e-4)
    assert {f"policy/{name}_stderr" for name in ("entropy", "clip_frac", "approx_kl", "rollout_kl")} <= set(metrics)
