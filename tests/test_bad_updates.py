"""Bad updates, and a sampler that is not the policy: what they leave behind, when they end the run."""

import copy
import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nan

from algorithm import algorithm_of
from flags import Memory
from helpers.made_up import ALONE, flags, load_policy, make_rollout
from packing import pack
from runtime.rank import RunError
from schedule import UpdateStep
from update import MOST_SKIPPED, UpdateGuard, check_gap, update_policy, with_advantages

GOOD = {
    "policy/loss": 0.5, "optim/grad_norm": 1.0, "policy/approx_kl": 0.01,
    "policy/rollout_gap_mean": 0.0, "policy/rollout_temperature": 1.0, "policy/rollout_temperature_r2": 0.0,
}  # fmt: skip
NAN, FAR = GOOD | {"policy/loss": math.nan}, GOOD | {"policy/approx_kl": 1.0}


def at(step: int, number: int = 1) -> UpdateStep:
    return UpdateStep(2 * step + number - 3, 1e-3, number == 1, 1.0, 1, step, number)


def test_too_many_bad_updates_in_a_row_end_the_run_and_first_ones_blame_the_model():
    guard, steep = UpdateGuard(ALONE), GOOD | {"optim/grad_norm": math.inf}
    found = [guard.judge(metrics, at(3))["optim/skipped_updates"] for metrics in (NAN, FAR, NAN, steep, NAN)]
    assert found == [1, 0, 1, 1, 1]
    resumed = UpdateGuard(ALONE)
    resumed.restore(json.loads(json.dumps(guard.state() | {"prompts_drawn": 3})))
    said = "step 4, update 2 is left out, as 3 before it: the loss is nan, the gradient norm 1; lower --learning_rate"
    with pytest.raises(RunError, match=said):
        resumed.judge(NAN, at(4, 2))
    for first, blamed in ((1, "--model, --reference or a loss of your own is not finite"), (3, "--learning_rate")):
        with pytest.raises(RunError, match=blamed):
            UpdateGuard(ALONE, num_skipped=MOST_SKIPPED).judge(NAN, at(first, 2))


def test_a_step_without_a_finite_update_is_not_to_be_saved():
    cases = (([NAN], True), ([NAN, NAN], True), ([NAN, GOOD], False), ([GOOD, NAN], False), ([FAR], False))
    for updates, is_broken in cases:
        guard = UpdateGuard(ALONE)
        for number, metrics in enumerate(updates, start=1):
            guard.judge(metrics, at(2, number))
        assert guard.state()["is_broken"] == is_broken


def test_a_bad_update_changes_no_bit_and_the_next_one_is_made(policy):
    """Four micro-batches of two sequences; an old log-prob of a token of the third one is wrong."""
    model, rollout = load_policy(policy), make_rollout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    algorithm, memory, guard = algorithm_of(flags()), Memory.from_flags(flags()), UpdateGuard(ALONE)

    def train(change: float, step: int) -> float:
        batches = [with_advantages(rollout, pack(rollout, [2 * i, 2 * i + 1])) for i in range(4)]
        with torch.no_grad():
            batches = [replace(batch, old_logprobs_N=model(batch, 1.0)[0].clone()) for batch in batches]
        batches[2].old_logprobs_N[batches[2].trained_K[1]] -= change
        tokens = sum(rollout.completion_lengths_B)
        update = [replace(batch, update_tokens=tokens) for batch in batches]
        metrics = update_policy(model, optimizer, update, algorithm, at(step, 2), memory, guard)
        return metrics["optim/skipped_updates"]

    assert train(0.0, 1) == 0
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert train(math.nan, 2) == 1
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, atol=0, rtol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert train(0.0, 3) == 0
    assert not any(new.equal(old) for new, old in zip(model.state_dict().values(), before[0].values(), strict=True))


# Of clean steps with two hundred tokens of an uncertain policy: a temperature counts by what it explains.
CLEAN = [(0.0035, 1.053, 0.14), (0.0069, 0.939, 0.51), (0.0126, 1.088, 0.3)]


@pytest.mark.parametrize("gap", [*CLEAN, (0.02, 0.93, 0.8), (0.06, 1.0, 0.0), (nan, 1.0, 0.0), (0.01, nan, nan)])
def test_no_update_is_made_if_log_probs_are_beyond_the_bound(gap):
    names = ("gap_mean", "temperature", "temperature_r2")
    metrics = {f"policy/rollout_{name}": x for name, x in zip(names, gap, strict=True)} | {"policy/loss": 1.0}
    free, bounded = (UpdateStep(0, 1e-3, True, 1.0, 1, 3, 2, max_rollout_gap=bound) for bound in (0.0, 0.05))
    with nullcontext() if gap in CLEAN else pytest.raises(RunError, match="step 3, update 2 .*rollout_gap 0.05"):
        check_gap(metrics, bounded)
    check_gap(metrics, free)
    check_gap(metrics | {"policy/loss": nan}, bounded)  # then log-probs say nothing of the sampler
