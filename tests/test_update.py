"""What lies between the rollout and the loss: advantages with and without a KL penalty, weights, which log-probs are computed."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import update
from batch import Rollout, pack
from fsdp_utils import World
from helpers import flags, make_rollout
from plan import Plan
from update import add_advantages, compute_advantages, gather_penalties, pack_updates

WORLD = World(rank=0, size=1, tp_size=1, device=torch.device("cpu"))
REWARDS = [1.0, 0.0, 0.0, 1.0]
PENALTIES = [np.array(p, dtype=np.float32) for p in ([0.1, 0.2], [0.3], [0.0, 0.1, 0.1], [0.2, 0.4])]


def graded(rewards: list[float] = REWARDS) -> Rollout:
    return replace(make_rollout([2, 1, 3, 2]), rewards_B=np.array(rewards, dtype=np.float32), advantages=None)


def advantages_of(args, penalties=None, rollout: Rollout | None = None) -> list[list[float]]:
    found = compute_advantages(rollout or graded(), penalties, args).advantages
    assert [len(x) for x in found] == [2, 1, 3, 2]
    return [x.tolist() for x in found]


def test_a_group_advantage_is_the_same_at_every_token_of_a_completion():
    assert advantages_of(flags(advantage="dr_grpo", group_size=2)) == [
        [0.5, 0.5],
        [-0.5],
        [-0.5, -0.5, -0.5],
        [0.5, 0.5],
    ]


def test_a_kl_penalty_is_taken_off_the_reward_before_groups_are_compared():
    found = advantages_of(flags(advantage="dr_grpo", group_size=2), PENALTIES)
    rewards = [1 - 0.3, 0 - 0.3, 0 - 0.2, 1 - 0.6]
    means = [(rewards[0] + rewards[1]) / 2] * 2 + [(rewards[2] + rewards[3]) / 2] * 2
    for b in range(4):
        assert found[b] == pytest.approx([rewards[b] - means[b]] * len(PENALTIES[b]), abs=1e-6)


@pytest.mark.parametrize("has_penalties", [False, True])
def test_reinforce_plus_plus_standardises_returns_over_all_tokens(has_penalties):
    found = advantages_of(flags(advantage="reinforce++", group_size=2), PENALTIES if has_penalties else None)
    returns = []
    for reward, penalties in zip(REWARDS, PENALTIES, strict=True):
        for t in range(len(penalties)):
            returns.append(reward - (sum(penalties[t:]) if has_penalties else 0))
    mean = sum(returns) / 8
    std = (sum((x - mean) ** 2 for x in returns) / 7) ** 0.5
    assert sum(found, []) == pytest.approx([(x - mean) / (std + 1e-6) for x in returns], abs=1e-5)


def test_the_baseline_variant_takes_the_group_mean_off_first():
    rewards = [3.0, 1.0, 0.5, 0.0]
    found = advantages_of(flags(advantage="reinforce++_baseline", group_size=2), rollout=graded(rewards))
    centred = [1.0] * 2 + [-1.0] + [0.25] * 3 + [-0.25] * 2
    mean = sum(centred) / 8
    std = (sum((x - mean) ** 2 for x in centred) / 7) ** 0.5
    assert sum(found, []) == pytest.approx([(x - mean) / (std + 1e-6) for x in centred], abs=1e-5)


def test_what_is_left_out_of_the_loss_does_not_enter_the_statistics_of_tokens():
    rollout = replace(graded([1.0, 0.0, 100.0, 0.0]), is_trained_B=np.array([True, True, False, True]))
    found = advantages_of(flags(advantage="reinforce++", group_size=2), rollout=rollout)
    assert found[2] == [0, 0, 0]
    assert sum(sum(found, [])) == pytest.approx(0, abs=1e-5)
    assert max(sum(found, [])) < 2


@pytest.mark.parametrize(
    "advantage", ["grpo", "grpo_batch_std", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"]
)
def test_equal_rewards_give_exactly_no_advantage(advantage):
    assert set(sum(advantages_of(flags(advantage=advantage, group_size=2), rollout=graded([0.1] * 4)), [])) == {0.0}


def test_penalties_are_the_coefficient_times_the_kl_of_each_completion_token():
    rollout = replace(graded(), advantages=None)
    batch = pack(rollout, [2, 0, 1, 3])
    old, ref = torch.randn(len(batch.labels_N)), torch.randn(len(batch.labels_N))
    batch = replace(batch, old_logprobs_N=old, ref_logprobs_N=ref)
    found = gather_penalties(rollout, [[batch]], flags(kl_coef=0.5, kl_in="reward", kl_estimator="k1"))
    expected = (0.5 * (old - ref)).split(batch.lengths_S)
    for place, b in enumerate([2, 0, 1, 3]):
        assert found[b].tolist() == pytest.approx(expected[place][3:].tolist(), abs=1e-6)
    assert gather_penalties(rollout, [[batch]], flags(kl_coef=0.5)) is None


def test_every_update_has_the_weights_of_its_own_sequences():
    rollout = replace(graded(), is_trained_B=np.array([True, False, True, True]))
    plan = Plan(4, 2, 2, 1, 1, 2, 0)
    weights = {}
    for kind, constant in (("token_mean", None), ("seq_mean_token_mean", None), ("seq_mean_token_sum_norm", 10)):
        args = flags(loss_aggregation=kind, loss_constant_tokens=constant, micro_batch_tokens=100)
        first, second = (batches[0] for batches in pack_updates(rollout, plan, args, WORLD))
        weights[kind] = [
            float(batch.loss_weights_N[batch.sequence_ids_N == s][0]) for batch in (first, second) for s in range(2)
        ]
        assert {x.index for x in first.segments_S} == {0, 1} and {x.index for x in second.segments_S} == {2, 3}
    longest_first = [1 / 2, 1 / 2, 1 / 5, 1 / 5]
    assert weights["token_mean"] == pytest.approx(longest_first), (
        "2 trained tokens in the first update, 5 in the second"
    )
    assert weights["seq_mean_token_mean"][0] == pytest.approx(1 / 2), "one trained sequence of 2 tokens"
    assert weights["seq_mean_token_mean"][2:] == pytest.approx([1 / 6, 1 / 4]), "two sequences of 3 and 2 tokens"
    assert weights["seq_mean_token_sum_norm"][0] == pytest.approx(1 / 10)
    assert weights["seq_mean_token_sum_norm"][2:] == pytest.approx([1 / 20, 1 / 20])


@pytest.mark.parametrize(
    ("changes", "has_reference", "expected"),
    [
        ({}, False, []),
        ({}, True, ["ref 0", "ref 1"]),
        ({"passes_per_step": 2}, False, ["old 0"]),
        ({"kl_in": "reward", "kl_coef": 1}, True, ["old 0", "ref 0", "ref 1"]),
        ({"lora_rank": 8, "lora_dropout": 0.05}, False, ["old 0"]),
    ],
)
def test_only_the_log_probs_that_are_needed_are_computed(changes, has_reference, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(
        update, "logprobs_under", lambda model, field, batches, _: asked.append(f"{field[:3]} {batches[0]}") or batches
    )
    reference = SimpleNamespace(adapter_off=nullcontext) if has_reference else None
    update.add_logprobs([[0], [1]], torch.nn.Module(), reference, flags(**changes))
    assert sorted(asked) == sorted([*expected, "old 1"]), "the first update of a step makes its own old log-probs"


def test_advantages_reach_their_positions():
    rollout = compute_advantages(graded(), None, flags(advantage="none", group_size=2))
    ((batch,),) = add_advantages([[pack(rollout, [1, 0])]], rollout)
    assert batch.advantages_N.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]
