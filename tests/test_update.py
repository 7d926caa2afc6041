"""Between rollout and loss: advantages with and without a KL penalty, weights, which log-probs are computed."""

import copy
import math
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import grpo
import update
from batch import Rollout, Update, pack, to_positions
from flags import Lora, Memory, make_plan, take
from fsdp_utils import World
from grpo import Algorithm
from guards.updates import UpdateGuard
from helpers import flags, make_grade, make_rollout, unpacked_logprobs
from inputs.choices import algorithm_of
from model.lora import add_adapter
from model.packed import Packing
from no_waits import NoWaits, run_passes
from policy import Policy, load_policy
from update import add_advantages, compute_advantages, gather_penalties, pack_updates

WORLD = World(rank=0, size=1, tp_size=1, device=torch.device("cpu"))
REWARDS = [1.0, 0.0, 0.0, 1.0]
PENALTIES = [np.array(p, dtype=np.float32) for p in ([0.1, 0.2], [0.3], [0.0, 0.1, 0.1], [0.2, 0.4])]


def graded(rewards: list[float] = REWARDS) -> Rollout:
    return replace(make_rollout([2, 1, 3, 2]), grades=[make_grade(reward) for reward in rewards], advantages=None)


def advantages_of(args, penalties=None, rollout: Rollout | None = None) -> list[list[float]]:
    found = compute_advantages(rollout or graded(), penalties, algorithm_of(args))
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
    algorithm = algorithm_of(flags(kl_coef=0.5, kl_in="reward", kl_estimator="k1"))
    assert algorithm.has_penalties
    found = gather_penalties(rollout, [Update([batch], 8, 2)], algorithm)
    expected = (0.5 * (old - ref)).split(batch.lengths_S)
    for place, b in enumerate([2, 0, 1, 3]):
        assert found[b].tolist() == pytest.approx(expected[place][3:].tolist(), abs=1e-6)
    assert not algorithm_of(flags(kl_coef=0.5)).has_penalties and not algorithm_of(flags()).has_penalties


def test_every_update_has_the_weights_of_its_own_sequences():
    rollout = replace(graded(), is_trained_B=np.array([True, False, True, True]))
    batches = {"prompts_per_step": 2, "prompts_per_update": 1, "group_size": 2, "micro_batch_tokens": 100}
    policy = SimpleNamespace(parity_length=math.inf)
    weights = {}
    for kind, constant in (("token_mean", None), ("seq_mean_token_mean", None), ("seq_mean_token_sum_norm", 10)):
        args = flags(loss_aggregation=kind, loss_constant_tokens=constant, **batches)
        plan, algorithm, memory = make_plan(args, num_rows=2), algorithm_of(args), take(Memory, args)
        updates = pack_updates(rollout, plan, algorithm, memory, policy, WORLD)
        assert [update.num_tokens for update in updates] == [2, 5]
        first, second = (update.batches[0] for update in updates)
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


class StandIn:
    """A policy of which only this is asked."""

    def __init__(self, has_dropout: bool) -> None:
        self.has_dropout, self.is_adapter_off = has_dropout, False

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        self.is_adapter_off = True
        yield
        self.is_adapter_off = False


@pytest.mark.parametrize(
    ("changes", "has_reference", "expected"),
    [
        ({}, False, []),
        ({"kl_coef": 1}, True, ["ref 0", "ref 1"]),
        ({"num_iterations": 2}, False, ["old 0"]),
        ({"kl_in": "reward", "kl_coef": 1}, True, ["old 0", "ref 0", "ref 1"]),
        ({"lora_rank": 8, "lora_dropout": 0.05}, False, ["old 0"]),
    ],
)
def test_only_the_log_probs_that_are_needed_are_computed(changes, has_reference, expected, monkeypatch):
    asked = []

    def logprobs_under(model: StandIn, field: str, each: int, _: Algorithm) -> int:
        assert model.is_adapter_off == (field == "ref_logprobs_N")
        asked.append(f"{field[:3]} {each}")
        return each

    monkeypatch.setattr(update, "logprobs_under", logprobs_under)
    args = flags(**changes)
    policy, reference = (StandIn(has_dropout=args.lora_dropout > 0) for _ in range(2))
    found = update.add_logprobs([0, 1], policy, reference if has_reference else None, algorithm_of(args))
    assert found == [0, 1]
    assert sorted(asked) == sorted([*expected, "old 1"]), "the first update of a step makes its own old log-probs"
    assert not reference.is_adapter_off


def test_advantages_reach_their_positions():
    rollout, packed = graded(), [Update([pack(graded(), [1, 0])], 3, 1)]
    rollout, (found,) = add_advantages(rollout, packed, algorithm_of(flags(advantage="none", group_size=2)))
    assert [x.tolist() for x in rollout.advantages] == [[1, 1], [0], [0, 0, 0], [1, 1]]
    assert found.num_tokens == 3
    assert found.batches[0].advantages_N.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert packed[0].batches[0].advantages_N is None


def test_an_advantage_of_ones_own_that_is_not_finite_or_of_another_shape_is_told():
    rollout, algorithm = graded(), algorithm_of(flags(group_size=2))
    for function, words in (
        (lambda g: g.rewards_PG / 0, "--advantage returned values that are not finite"),
        (lambda g: g.rewards_PG.mean(), r"the shape \[\]; needed is a tensor of the shape \[2, 2\] or \[8\]"),
    ):
        with pytest.raises(ValueError, match=words):
            compute_advantages(rollout, None, replace(algorithm, advantage=function))


def test_reinforce_plus_plus_with_baseline_takes_the_whole_penalty_off_the_reward():
    """Rewards 1, 0 and 0, 1; penalties of 0.3, 0.3 and 0.2, 0.6 in all; completions of 2, 1, 3 and 2 tokens."""
    rollout = graded()
    segments = pack(rollout, [0, 1, 2, 3]).segments_S
    kl_N = to_positions(rollout, segments, [penalty / 0.5 for penalty in PENALTIES])
    batch = replace(pack(rollout, [0, 1, 2, 3]), old_logprobs_N=kl_N - 3, ref_logprobs_N=torch.full_like(kl_N, -3.0))
    # r - mean of group: 0.5, -0.5, -0.3, 0.3 with the penalty and 0.5, -0.5, -0.5, 0.5 without it. Over the 8 tokens
    # the mean is 0.025 and the std sqrt(1.195 / 7) = 0.413176; without it 0 and sqrt(2 / 7) = 0.534522.
    with_penalty = [1.149629] * 2 + [-1.270643] + [-0.786589] * 3 + [0.665575] * 2
    without = [0.935414] * 2 + [-0.935414] * 4 + [0.935414] * 2
    for changes, expected in (({"kl_in": "reward"}, with_penalty), ({"kl_in": "loss"}, without)):
        args = flags(advantage="reinforce++_baseline", group_size=2, kl_coef=0.5, kl_estimator="k1", **changes)
        found, (placed,) = add_advantages(rollout, [Update([batch], 8, 2)], algorithm_of(args))
        assert np.concatenate(found.advantages).tolist() == pytest.approx(expected, abs=1e-5)
        assert placed.batches[0].advantages_N[batch.loss_mask_N].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_rollout_correction_weighs_the_policy_loss_alone():
    """Two tokens: A = 1 and -2, ratio 1, trainer / sampler 1.5 and 8 (at most 2), KL 0.2 and -0.4, entropy 2 and 1."""
    batch = pack(make_rollout([2]), [0])

    def at_tokens(*values: float) -> torch.Tensor:
        return torch.zeros(len(batch.labels_N)).masked_scatter(batch.loss_mask_N, torch.tensor(values))

    logprobs_N, entropies_N = at_tokens(-1.0, -2.0), at_tokens(2.0, 1.0)
    batch = replace(
        batch,
        advantages_N=at_tokens(1.0, -2.0),
        rollout_logprobs_N=logprobs_N - at_tokens(math.log(1.5), math.log(8)),
        ref_logprobs_N=logprobs_N - at_tokens(0.2, -0.4),
    )
    terms = {"kl_coef": 0.5, "kl_estimator": "k1", "entropy_coef": 0.25}
    for correction, expected in (
        ("none", [-1 + 0.5 * 0.2 - 0.25 * 2, 2 - 0.5 * 0.4 - 0.25 * 1]),
        ("token_truncate", [-1 * 1.5 + 0.5 * 0.2 - 0.25 * 2, 2 * 2 - 0.5 * 0.4 - 0.25 * 1]),
    ):
        algorithm = algorithm_of(flags(rollout_correction=correction, **terms))
        loss_N, means, _ = grpo.total_loss(batch, logprobs_N, logprobs_N, entropies_N, algorithm)
        assert loss_N[batch.loss_mask_N].tolist() == pytest.approx(expected, abs=1e-6)
        assert means["policy/kl_ref"][batch.loss_mask_N].tolist() == pytest.approx([0.2, -0.4], abs=1e-6)


# On a real policy -----------------------------------------------------------------------------------------------------


def train_step(policy: Policy, args: Namespace, rollout: Rollout) -> Iterator[tuple[Update, dict[str, float]]]:
    """Steps 2 to 4 of the loop: each update and its metrics. The reference is the policy itself, as it starts."""
    plan, algorithm, memory = make_plan(args, num_rows=args.prompts_per_step), algorithm_of(args), take(Memory, args)
    updates = pack_updates(rollout, plan, algorithm, memory, policy, WORLD)
    updates = update.add_logprobs(updates, policy, policy if args.kl_coef else None, algorithm)
    rollout, updates = add_advantages(rollout, updates, algorithm)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for i, each in enumerate(updates * plan.num_iterations):
        step = plan.update(2, i)
        yield each, update.update_policy(policy, optimizer, each, algorithm, step, memory, UpdateGuard(WORLD))


TWO_UPDATES = {"prompts_per_step": 2, "prompts_per_update": 1, "group_size": 4}


def graded_rollout() -> Rollout:
    """Two prompts of four completions each, of which every second one is correct."""
    return replace(make_rollout(group_size=4), grades=[make_grade(b % 2) for b in range(8)], advantages=None)


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2}, {"kl_in": "reward"}])
def test_each_pass_of_the_trainer_is_at_the_temperature_of_the_sampler(changes, policy):
    """The update's, that of old log-probs, that of the reference. fp32; the rate is 0, so no weight changes."""
    plain, rollout = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32), graded_rollout()
    with torch.no_grad():
        sampled, others = (unpacked_logprobs(plain, rollout, temperature) for temperature in (0.7, 1.0))
    assert (sampled.exp() - others.exp()).abs().max() > 0.05, "another temperature would go unnoticed"
    pieces = sampled.split(rollout.completion_lengths_B.tolist())
    rollout = replace(rollout, rollout_logprobs=[piece.numpy() for piece in pieces])
    args = flags(temperature=0.7, kl_coef=0.1, learning_rate=0, **TWO_UPDATES, **changes)
    found = [metrics for _, metrics in train_step(load_policy(str(policy), torch.float32), args, rollout)]
    assert len(found) == 2 * args.num_iterations
    for metrics in found:
        assert metrics["policy/rollout_gap_max"] < 1e-5
        assert metrics["policy/kl_ref"] == pytest.approx(0, abs=1e-6)
        assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert metrics["policy/ratio_min"] == pytest.approx(1, abs=1e-5)


def test_a_second_pass_takes_its_ratio_against_the_log_probs_from_before_the_first(policy):
    model, rollout = load_policy(str(policy), torch.float32), graded_rollout()
    args = flags(
        num_iterations=2, learning_rate=1e-2, clip_low=0.01, clip_high=0.01, **TWO_UPDATES
    )  # fmt: skip
    start = copy.deepcopy(model).requires_grad_(False)
    before = copy.deepcopy(start)
    for i, (each, metrics) in enumerate(train_step(model, args, rollout)):
        (batch,) = each.batches
        old_N, now_N = (weights(batch, 1.0)[0][batch.loss_mask_N] for weights in (start, before))
        assert batch.old_logprobs_N[batch.loss_mask_N].equal(old_N)
        ratio_N = (now_N - old_N).exp()
        assert metrics["policy/ratio_max"] == pytest.approx(ratio_N.max().item(), rel=1e-5)
        assert metrics["policy/ratio_min"] == pytest.approx(ratio_N.min().item(), rel=1e-5)
        assert (metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1) == (i == 0)
        assert (metrics["policy/ratio_max"] > 1.05 and metrics["policy/clip_frac"] > 0.05) == (i > 0)
        before.load_state_dict(model.state_dict())


# Waiting for the device -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"share_prompts": True, "entropy_coef": 0.01},
        {"lora_rank": 4, "lora_dropout": 0.5, "share_prompts": True},
    ],
)
def test_the_passes_never_wait_for_the_device(changes, policy, monkeypatch):
    args = flags(model=str(policy), group_size=4, micro_batch_tokens=40, kl_coef=0.1, **changes)
    model = load_policy(str(policy), torch.float32, args.gradient_checkpointing)
    if args.lora_rank:
        add_adapter(model.model, take(Lora, args), args.seed, args.model)
    assert run_passes(model, args, make_rollout(group_size=4), monkeypatch) > 1


@pytest.mark.parametrize(
    "changes",
    [{"policy_loss": name} for name in grpo.LOSSES]
    + [{"rollout_correction": name} for name in grpo.CORRECTIONS]
    + [{"kl_estimator": name, "kl_coef": 0.1} for name in grpo.KL],
    ids=lambda changes: next(iter(changes.values())),
)
def test_no_term_of_the_loss_waits_for_the_device(changes):
    algorithm = algorithm_of(flags(**changes))
    rollout = make_rollout([3, 2])
    logprobs_N = torch.randn(11, device="meta", requires_grad=True)
    known = {name: torch.zeros(11) for name in ("advantages_N", "old_logprobs_N", "ref_logprobs_N")}
    batch = replace(pack(rollout, [0, 1]), **known).to(torch.device("meta"))
    with NoWaits([]):
        loss_N, _, _ = grpo.total_loss(batch, logprobs_N, batch.old_logprobs_N, batch.old_logprobs_N, algorithm)
        grpo.masked_sum(loss_N, batch.loss_mask_N).backward()


def test_a_batch_that_is_packed_for_an_update_has_what_its_passes_need(policy):
    """On a CPU a pass that makes its packing itself computes the same: only the time is lost."""
    args = flags(model=str(policy), share_prompts=True, **TWO_UPDATES | {"prompts_per_update": 2})
    model = load_policy(str(policy), torch.float32)
    plan, algorithm, memory = make_plan(args, num_rows=2), algorithm_of(args), take(Memory, args)
    (packed,) = pack_updates(graded_rollout(), plan, algorithm, memory, model, WORLD)
    (batch,) = packed.batches
    assert isinstance(batch.packing, Packing)
    assert batch.trained_K.tolist() == torch.arange(len(batch.labels_N))[batch.loss_mask_N].tolist()
    for found, wanted in zip(model(batch, 1.0), model(replace(batch, packing=None), 1.0), strict=True):
        assert found.equal(wanted)
