"""The files of losses/: each is short and gives what its paper's formula gives in floats."""

import math
from dataclasses import replace
from itertools import combinations
from statistics import fmean, pstdev, stdev
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from algorithm import algorithm_of
from grading import Grade
from grpo import Groups, Loss, Tokens, as_loss
from helpers.made_up import flags, make_rollout
from helpers.runs import ROOT
from update import compute_advantages

LENGTHS = [5, 3, 4, 2]  # tokens of sequences; the last token of the first is not trained
SEQUENCES = [[0, 1, 2, 3], [5, 6, 7], [8, 9, 10, 11], [12, 13]]  # the trained tokens
TOKENS = sum(SEQUENCES, [])
TOOLS = f"{ROOT}/docs/environments/calculator.py:calculator"
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 2.0}


def make_case(advantages: list[float] = (1.5, -0.5, 0.7, -2.0), scale: float = 0.5) -> SimpleNamespace:
    """Log-probs (new, old, sampler), entropies, and `a`, the advantage of the sequence, of 14 tokens."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(14, generator=generator, dtype=torch.float64) * 0.5 - 3.0
    new, sampler = (old + scale * torch.randn(14, generator=generator, dtype=torch.float64) for _ in range(2))
    entropies = torch.rand(14, generator=generator, dtype=torch.float64)
    a = torch.repeat_interleave(torch.tensor(advantages, dtype=torch.float64), torch.tensor(LENGTHS))
    return SimpleNamespace(old=old, new=new, sampler=sampler, entropies=entropies, a=a)


def loss_of(case: SimpleNamespace, given: str, **changes: object) -> tuple[Loss, Tensor]:
    """(the loss, the gradient of the sum over trained tokens by log-prob)."""
    function = algorithm_of(flags(policy_loss=given, **changes)).policy_loss
    logprobs, mask = case.new.clone().requires_grad_(), torch.arange(14) != 4
    t = Tokens(
        logprobs=logprobs, old_logprobs=case.old, rollout_logprobs=case.sampler, ref_logprobs=case.sampler, mask=mask,
        advantages=case.a, sequence_ids=torch.repeat_interleave(torch.tensor(LENGTHS)), entropies=case.entropies,
    )  # fmt: skip
    loss = as_loss(function(t), t)
    (gradient,) = torch.autograd.grad(torch.where(mask, loss.per_token, 0.0).sum(), logprobs)
    return loss, gradient


def naive_clip(case: SimpleNamespace, t: int) -> float:
    """PPO's loss of a token, with DAPO's bounds and the dual clip."""
    ratio, a = math.exp(case.new[t] - case.old[t]), case.a[t].item()
    loss = max(-a * ratio, -a * min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"]))
    return min(loss, -a * CLIP["dual_clip"]) if a < 0 else loss


def covariances_of(case: SimpleNamespace) -> dict[int, float]:
    """(A - mean) (log-prob - mean) of each trained token."""
    a, x = (fmean(values[t].item() for t in TOKENS) for values in (case.a, case.new))
    return {t: (case.a[t].item() - a) * (case.new[t].item() - x) for t in TOKENS}


def assert_trained(found: Tensor, expected: dict[int, float]) -> None:
    assert {t: found[t].item() for t in TOKENS} == pytest.approx(expected, abs=1e-9, rel=1e-9)


def test_vespo_weighs_a_token_by_its_sequences_gamma_kernel():
    case, expected = make_case(), {}
    loss, gradient = loss_of(case, "vespo")
    for own in SEQUENCES:
        w = math.exp(sum((case.new[t] - case.old[t]).item() for t in own))
        k, decay = (2.0, 3.0) if case.a[own[0]] > 0 else (3.0, 2.0)
        expected |= {t: -case.a[t].item() * w**k * math.exp(decay * (1.0 - w)) for t in own}
    assert_trained(gradient, expected)
    assert_trained(loss.per_token, {t: slope * case.new[t].item() for t, slope in expected.items()})


def test_gmpo_is_the_geometric_mean_of_clipped_token_ratios():
    case, expected, slopes = make_case(), {}, {}
    loss, gradient = loss_of(case, "gmpo", clip_low=0.4, clip_high=0.4)
    for own in SEQUENCES:
        sign = math.copysign(1.0, case.a[own[0]])
        logs = [sign * (case.new[t] - case.old[t]).item() for t in own]
        clipped_logs = [min(x, min(max(x, -0.4), 0.4)) for x in logs]  # in the paper: min(w^sgn, clip(w^sgn))^sgn
        value = -case.a[own[0]].item() * math.exp(sign * fmean(clipped_logs))
        expected |= dict.fromkeys(own, value)  # at each token: the mean over tokens is it, and so is the gradient
        slopes |= {t: value if x == y else 0.0 for t, x, y in zip(own, logs, clipped_logs, strict=True)}
    assert_trained(loss.per_token, expected)
    assert_trained(gradient, slopes)
    clipped = {t for t in slopes if (loss.is_low | loss.is_high)[t]}
    assert clipped == {t for t, slope in slopes.items() if slope == 0.0} != set()


def test_off_policy_sequences_of_negative_advantage_are_left_out():
    case = make_case(advantages=[1.0, -1.0, -1.0, -1.0])
    case.sampler = case.new + torch.repeat_interleave(torch.tensor([2.0, 0.4, 0.6, -2.0]), torch.tensor(LENGTHS))
    loss, _ = loss_of(case, "off_policy_mask", **CLIP)
    left_out = set(SEQUENCES[2])  # the mean of log(sampler / new) is above 0.5 and A < 0
    assert_trained(loss.per_token, {t: 0.0 if t in left_out else naive_clip(case, t) for t in TOKENS})
    assert set(loss.metrics["off_policy_frac"].nonzero()[:, 0].tolist()) == left_out


def test_the_80_20_rule_trains_the_tokens_of_highest_entropy():
    case = make_case()
    case.entropies[4] = 9.0  # not trained: does not count
    loss, _ = loss_of(case, "high_entropy", **CLIP)
    chosen = sorted(TOKENS, key=lambda t: case.entropies[t])[-3:]  # rank 0.8 x 12 = 9.6 and above
    assert_trained(loss.per_token, {t: naive_clip(case, t) if t in chosen else 0.0 for t in TOKENS})


def test_clip_cov_leaves_out_some_tokens_of_high_covariance_that_are_not_clipped():
    case = make_case(scale=0.05)
    loss, _ = loss_of(case, "clip_cov:ratio=0.16,low=0.1,high=1", **CLIP)
    window = {t for t, covariance in covariances_of(case).items() if 0.1 < covariance < 1.0}
    left_out = {t for t in TOKENS if loss.per_token[t] == 0}
    assert len(left_out) == 2 < len(window) and left_out < window, "0.16 x 13 tokens"
    assert_trained(loss.per_token, {t: 0.0 if t in left_out else naive_clip(case, t) for t in TOKENS})
    # By default: no covariance is above 1. And 0.13 tokens are one.
    for given, count in (("clip_cov", 0), ("clip_cov:ratio=0.01,low=0.1,high=1", 1)):
        assert (loss_of(case, given, **CLIP)[0].per_token[TOKENS] == 0).sum() == count
    # Tokens that the clip has left without a gradient are no part of the share.
    case, tight = make_case(), CLIP | {"clip_low": 0.01, "clip_high": 0.01}
    plain, _ = loss_of(case, "clip", **tight)
    is_clipped = (plain.is_low | plain.is_high)[TOKENS]
    loss, _ = loss_of(case, "clip_cov:ratio=1,low=-100,high=100", **tight)
    assert is_clipped.any() and (loss.per_token[TOKENS] == 0).equal(~is_clipped) and not is_clipped.all()


def advantages(given: str, rewards: list[list[float]], **fields: object) -> list[float]:
    """Of groups of completions, with 1, 2, 3, ... tokens."""
    rewards_PG = torch.tensor(rewards)
    lengths_B = torch.arange(rewards_PG.numel()) + 1
    returns_T = torch.repeat_interleave(rewards_PG.flatten(), lengths_B)
    known = {"returns_T": returns_T, "lengths_B": lengths_B, "mask_T": returns_T >= 0, "is_correct_PG": rewards_PG == 1}
    function = algorithm_of(flags(advantage=given, group_size=len(rewards[0]), tools=TOOLS)).advantage
    return function(Groups(rewards_PG=rewards_PG, **known | fields)).flatten().tolist()


def standardised(value: float, values: list[float]) -> float:
    return (value - fmean(values)) / (stdev(values) + 1e-6)


def test_gdpo_compares_each_part_of_the_reward_by_itself():
    right, form = [[1.0, 0.0, 0.0, 1.0], [0.0] * 4], [[10.0, 20.0, 10.0, 30.0], [0.0, 5.0, 5.0, 5.0]]
    sums = []
    for groups in zip(right, form, strict=True):
        scaled = [[standardised(x, part) for x in part] for part in groups]
        sums += [sum(each) for each in zip(*scaled, strict=True)]
    found = advantages("gdpo", right, parts={"math": torch.tensor(right), "format": torch.tensor(form)})
    assert found == pytest.approx([standardised(x, sums) for x in sums], abs=1e-6)


def test_pass_at_k_is_the_mean_advantage_over_subsets():
    rewards, expected = [[1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 6, [1.0] * 6, [1.0] + [0.0] * 5], []
    for group in rewards:
        values = {subset: max(group[i] for i in subset) for subset in combinations(range(6), 4)}
        mean, std = fmean(values.values()), pstdev(values.values())
        means = [fmean(value for subset, value in values.items() if i in subset) for i in range(6)]
        expected += [(value - mean) / std if std else 0.0 for value in means]
    assert advantages("pass_at_k", rewards) == pytest.approx(expected, abs=1e-6)


def test_opo_takes_off_the_mean_that_is_weighted_by_length():
    a, b = (1 * 1.0 + 2 * 0.0 + 3 * 0.5) / 6, (6 * 3.0) / 15
    found = advantages("opo", [[1.0, 0.0, 0.5], [0.0, 0.0, 3.0]])
    assert found == pytest.approx([1.0 - a, -a, 0.5 - a, -b, -b, 3.0 - b], abs=1e-6)


def test_gigpo_compares_turns_that_began_in_the_same_state():
    """Two groups of two episodes; the first has rewards 1 and 0 and meets the state "x" three times."""
    states, lengths = [[b"", b"x", b"x"], [b"", b"x"], [b""], [b"", b"x"]], torch.tensor([3, 2, 1, 2])
    turns_T, rewards = torch.cat([torch.arange(n) for n in lengths]), [[1.0, 0.0], [2.0, 2.0]]
    fields = {"lengths_B": lengths, "turns_T": turns_T, "mask_T": turns_T >= 0, "states_B": states}
    # The returns of turns before which nothing was said; in the state "x"; first ones of the second group.
    first, same, other = [0.95**2, 0.0], [0.95, 1.0, 0.0], [2.0, 0.95 * 2.0]
    turns = [(1.0, first[0], first), (1.0, 0.95, same), (1.0, 1.0, same), (0.0, 0.0, first), (0.0, 0.0, same)]
    expected = [standardised(reward, rewards[0]) + standardised(x, among) for reward, x, among in turns]
    expected += [*(standardised(x, other) for x in other), 0.0]
    assert advantages("gigpo", rewards, **fields) == pytest.approx(expected, abs=1e-5)
    # Without any reply each episode is its first turn, and compared twice.
    grades = [Grade(reward, "ok", {"tools": reward}) for reward in (1.0, 0.0)]
    rollout = replace(make_rollout([2, 3], group_size=2), grades=grades)
    algorithm = algorithm_of(flags(advantage="gigpo", group_size=2, tools=TOOLS))
    first, second = compute_advantages(rollout, None, algorithm)
    assert first == pytest.approx([2 * 0.5**0.5] * 2, abs=1e-5)
    assert second == pytest.approx([-2 * 0.5**0.5] * 3, abs=1e-5)


def test_gpg_scales_the_gradient_up_for_groups_without_one():
    found = advantages("gpg", [[1.0, 0.0], [1.0, 1.0], [0.0, 2.0], [0.0, 0.0]])
    assert found == pytest.approx([1.0, -1.0, 0.0, 0.0, -2.0, 2.0, 0.0, 0.0], abs=1e-6)
    assert advantages("gpg", [[1.0, 1.0]]) == [0.0, 0.0]


def test_a_star_po_is_a_regression_of_the_log_ratio_with_a_value_from_rewards_of_the_start():
    """beta log(mean of exp(r / beta)) of completions of the starting policy, which are in a column."""
    columns = [{"start_rewards": [1.0, 0.0, 0.0, 1.0]}, {"start_rewards": 0.25}]
    value = 0.5 * math.log((2 * math.exp(2.0) + 2) / 4)
    found = advantages("a_star_po", [[1.0, 0.0], [0.0, 1.0]], columns=columns)
    assert found == pytest.approx([1 - value, -value, -0.25, 0.75], abs=1e-6)
    case, expected, slopes = make_case(), {}, {}
    loss, gradient = loss_of(case, "a_star_po:beta_2=0.1", kl_coef=1.0, kl_estimator="none")
    for own in SEQUENCES:
        error = 0.1 * sum((case.new[t] - case.sampler[t]).item() for t in own) - case.a[own[0]].item()
        expected |= dict.fromkeys(own, error**2)
        slopes |= dict.fromkeys(own, 2 * error * 0.1 * len(own))  # each loss depends on all of them
    assert_trained(loss.per_token, expected)
    assert_trained(gradient, slopes)


def test_kl_cov_holds_the_tokens_of_largest_covariance():
    case = make_case()
    loss, _ = loss_of(case, "kl_cov:share=0.25,penalty=0.5")
    held = sorted(TOKENS, key=covariances_of(case).get)[-3:]  # a quarter of 13
    logs = {t: (case.new[t] - case.old[t]).item() for t in TOKENS}
    values = {t: -case.a[t].item() * math.exp(logs[t]) + 0.5 * abs(logs[t]) * (t in held) for t in TOKENS}
    assert_trained(loss.per_token, values)
    assert set(loss.metrics["held_frac"].nonzero()[:, 0].tolist()) == set(held)


def test_fipo_weighs_a_token_by_the_discounted_shift_of_later_ones():
    """Without tokens beyond the dual clip, and without a sequence that has two of them."""
    case, values = make_case(scale=0.9), {}
    loss, _ = loss_of(case, "fipo:half_life=2,most=1.5,safety=1.3", **CLIP)
    for own in SEQUENCES:
        logs = {t: (case.new[t] - case.old[t]).item() for t in own}
        beyond = [t for t in own if case.a[t] < 0 and math.exp(logs[t]) > 2.0]
        for t in own:
            counted = [u for u in own if u >= t and math.exp(logs[u]) <= 2.0]
            factor = min(max(math.exp(sum(0.5 ** ((u - t) / 2.0) * logs[u] for u in counted)), 1.0), 1.5)
            if case.a[t] < 0 and math.exp(logs[t]) > 1.3:
                factor = 1.0
            values[t] = factor * naive_clip(case, t) if len(beyond) < 2 else 0.0
    assert_trained(loss.per_token, values)
    assert len({round(x, 3) for x in loss.metrics["future_factor"].tolist()}) > 3, "some factors are within the bounds"


def test_rlsd_weighs_a_token_by_the_evidence_of_its_teacher():
    case, values = make_case(scale=0.2), {}
    loss, _ = loss_of(case, "rlsd:share=0.5,bound=0.2", kl_coef=1.0, kl_estimator="none", **CLIP)
    for t in TOKENS:
        evidence = math.exp(math.copysign(1.0, case.a[t]) * (case.sampler[t] - case.old[t]).item())
        values[t] = (0.5 + 0.5 * min(max(evidence, 0.8), 1.2)) * naive_clip(case, t)
    assert_trained(loss.per_token, values)


def test_double_sided_importance_sampling_has_no_loss_outside_its_bounds():
    """Whatever the sign of A: a clip would keep half of these."""
    case, expected = make_case(), {}
    loss, gradient = loss_of(case, "dis", clip_low=0.3, clip_high=0.5)
    for t in TOKENS:
        ratio = math.exp(case.new[t] - case.old[t])
        expected[t] = -case.a[t].item() * ratio if 0.7 <= ratio <= 1.5 else 0.0
    assert_trained(loss.per_token, expected)
    assert_trained(gradient, expected)
    assert 0 < list(expected.values()).count(0.0) < len(TOKENS)
    assert {t for t in TOKENS if (loss.is_low | loss.is_high)[t]} == {t for t in TOKENS if expected[t] == 0.0}
