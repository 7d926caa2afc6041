"""The files of losses/: each is short, and gives the values of its paper's formula, computed here in floats."""

from __future__ import annotations

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

FOLDER = ROOT / "extras" / "losses"
LENGTHS = [5, 3, 4, 2]  # tokens of sequences; the last token of the first is not trained
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 2.0}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[!_]*.py")), ids=lambda path: path.name)
def test_a_file_has_at_most_forty_lines(path):
    assert len(path.read_text().splitlines()) <= 40


class Case(SimpleNamespace):
    """Random tokens of four sequences: log-probs (new, old, sampler), entropies, `a`: the advantage of the sequence."""

    @property
    def trained(self) -> list[list[int]]:
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        return [[t for t in range(end - n, end) if t != 4] for end, n in zip(ends, LENGTHS, strict=True)]


def make_case(advantages: list[float] = (1.5, -0.5, 0.7, -2.0), scale: float = 0.5) -> Case:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(14, generator=generator, dtype=torch.float64) * 0.5 - 3.0
    new, sampler = (old + scale * torch.randn(14, generator=generator, dtype=torch.float64) for _ in range(2))
    entropies = torch.rand(14, generator=generator, dtype=torch.float64)
    a = torch.repeat_interleave(torch.tensor(advantages, dtype=torch.float64), torch.tensor(LENGTHS))
    return Case(old=old, new=new, sampler=sampler, entropies=entropies, a=a)


def loss_of(case: Case, given: str, own: dict[str, float] = {}, **changes: object) -> tuple[Loss, Tensor]:  # noqa: B006
    """(the loss, the gradient of the sum over trained tokens by log-prob), of FUNCTION.

    `own`: the function's parameters that are no flags.
    """
    function = algorithm_of(flags(policy_loss=given, **changes)).policy_loss
    logprobs, mask = case.new.clone().requires_grad_(), torch.arange(14) != 4
    ids = torch.repeat_interleave(torch.tensor(LENGTHS))
    t = Tokens(
        logprobs=logprobs, old_logprobs=case.old, rollout_logprobs=case.sampler, advantages=case.a, mask=mask,
        sequence_ids=ids, entropies=case.entropies, ref_logprobs=case.sampler,
    )  # fmt: skip
    loss = as_loss(function(t, **own), t)
    (gradient,) = torch.autograd.grad(torch.where(mask, loss.per_token, 0.0).sum(), logprobs)
    return loss, gradient


def naive_clip(case: Case, t: int) -> float:
    """PPO's loss of a token, with DAPO's bounds and the dual clip."""
    ratio, a = math.exp(case.new[t] - case.old[t]), case.a[t].item()
    loss = max(-a * ratio, -a * min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"]))
    return min(loss, -a * CLIP["dual_clip"]) if a < 0 else loss


def assert_trained(found: Tensor, expected: dict[int, float]) -> None:
    """Equal at the trained tokens."""
    assert {t: found[t].item() for t in expected} == pytest.approx(expected, abs=1e-9, rel=1e-9)
    assert len(expected) == 13


def test_vespo_weighs_a_token_by_its_sequences_gamma_kernel():
    """VESPO weighs a token by a gamma kernel of its sequence's ratio."""
    case, expected = make_case(), {}
    loss, gradient = loss_of(case, "vespo")
    for own in case.trained:
        w = math.exp(sum((case.new[t] - case.old[t]).item() for t in own))
        k, decay = (2.0, 3.0) if case.a[own[0]] > 0 else (3.0, 2.0)
        expected |= {t: -case.a[t].item() * w**k * math.exp(decay * (1.0 - w)) for t in own}
    assert_trained(gradient, expected)
    assert_trained(loss.per_token, {t: slope * case.new[t].item() for t, slope in expected.items()})


def test_gmpo_is_the_geometric_mean_of_clipped_token_ratios():
    """GMPO is the geometric mean of token ratios, which are clipped before."""
    case, expected, slopes = make_case(), {}, {}
    loss, gradient = loss_of(case, "gmpo", clip_low=0.4, clip_high=0.4)
    for own in case.trained:
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
    """Off-policy sequences of negative advantage are left out and counted."""
    case = make_case(advantages=[1.0, -1.0, -1.0, -1.0])
    case.sampler = case.new + torch.repeat_interleave(torch.tensor([2.0, 0.4, 0.6, -2.0]), torch.tensor(LENGTHS))
    loss, _ = loss_of(case, "off_policy_mask", **CLIP)
    left_out = set(case.trained[2])  # the mean of log(sampler / new) is above 0.5 and A < 0
    assert_trained(loss.per_token, {t: 0.0 if t in left_out else naive_clip(case, t) for t in sum(case.trained, [])})
    assert set(loss.metrics["off_policy_frac"].nonzero()[:, 0].tolist()) == left_out


def test_the_80_20_rule_trains_the_tokens_of_highest_entropy():
    """The 80/20 rule trains the fifth of tokens that has the highest entropy."""
    case = make_case()
    case.entropies[4] = 9.0  # not trained: does not count
    loss, _ = loss_of(case, "high_entropy", **CLIP)
    tokens = sum(case.trained, [])
    chosen = sorted(tokens, key=lambda t: case.entropies[t])[-3:]  # 13 tokens: rank 0.8 x 12 = 9.6 and above
    assert_trained(loss.per_token, {t: naive_clip(case, t) if t in chosen else 0.0 for t in tokens})


def test_clip_cov_leaves_out_some_tokens_of_high_covariance():
    """Clip-Cov leaves out a share of the tokens whose covariance lies in the window."""
    case = make_case(scale=0.05)
    loss, _ = loss_of(case, "clip_cov", {"ratio": 0.16, "low": 0.1, "high": 1.0}, **CLIP)
    tokens = sum(case.trained, [])
    a, x = ([v[t].item() for t in tokens] for v in (case.a, case.new))
    covariances = [(i - fmean(a)) * (j - fmean(x)) for i, j in zip(a, x, strict=True)]
    window = {t for t, c in zip(tokens, covariances, strict=True) if 0.1 < c < 1.0}
    left_out = {t for t in tokens if loss.per_token[t] == 0}
    assert len(left_out) == 2 < len(window) and left_out < window, "0.16 x 13 tokens"
    assert_trained(loss.per_token, {t: 0.0 if t in left_out else naive_clip(case, t) for t in tokens})
    alone, _ = loss_of(case, "clip_cov", **CLIP)
    assert (alone.per_token[tokens] == 0).sum() == 0, "no covariance is above 1"
    least, _ = loss_of(case, "clip_cov", {"ratio": 0.01, "low": 0.1, "high": 1.0}, **CLIP)
    assert (least.per_token[tokens] == 0).sum() == 1, "0.13 tokens are one"


def test_clip_cov_draws_among_tokens_that_are_not_clipped():
    """Tokens that the clip has left without a gradient are no part of the share."""
    case, tight = make_case(scale=0.5), CLIP | {"clip_low": 0.01, "clip_high": 0.01}
    tokens = sum(case.trained, [])
    plain, _ = loss_of(case, "clip", **tight)
    is_clipped = plain.is_low | plain.is_high
    loss, _ = loss_of(case, "clip_cov", {"ratio": 1.0, "low": -100.0, "high": 100.0}, **tight)
    assert 0 < is_clipped[tokens].sum() < len(tokens)
    assert [loss.per_token[t].item() == 0 for t in tokens] == [not is_clipped[t].item() for t in tokens]


# Advantages -----------------------------------------------------------------------------------------------------------


def advantages(given: str, rewards: list[list[float]], **changes: object) -> list[list[float]]:
    """A case of groups of completions, with 1, 2, 3, ... tokens; `parts` among the changes are those of the reward."""
    parts = {name: torch.tensor(x, dtype=torch.float64) for name, x in changes.pop("parts", {}).items()}
    rewards_PG = torch.tensor(rewards, dtype=torch.float64)
    lengths_B = torch.arange(rewards_PG.numel()) + 1
    returns_T = torch.repeat_interleave(rewards_PG.flatten(), lengths_B)
    graded = Groups(
        rewards_PG=rewards_PG, returns_T=returns_T, lengths_B=lengths_B, mask_T=returns_T >= 0, parts=parts,
        is_correct_PG=rewards_PG == 1, is_truncated_PG=rewards_PG < 0,
    )  # fmt: skip
    function = algorithm_of(flags(advantage=given, group_size=rewards_PG.shape[1], **changes)).advantage
    return function(graded).tolist()


def assert_near(found: list[list[float]], expected: list[list[float]]) -> None:
    assert sum(found, []) == pytest.approx(sum(expected, []), abs=1e-6)


def test_gdpo_compares_each_part_of_the_reward_by_itself():
    """GDPO compares each part of the reward within its group by itself."""
    right, form = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]], [[10.0, 20.0, 10.0, 30.0], [0.0, 5.0, 5.0, 5.0]]
    sums = []
    for groups in zip(right, form, strict=True):
        scaled = [[(x - fmean(part)) / (stdev(part) + 1e-6) for x in part] for part in groups]
        sums += [sum(each) for each in zip(*scaled, strict=True)]
    expected = [(x - fmean(sums)) / (stdev(sums) + 1e-6) for x in sums]
    found = advantages("gdpo", right, parts={"math": right, "format": form})
    assert_near(found, [expected[:4], expected[4:]])


def test_pass_at_k_is_the_mean_advantage_over_subsets():
    """The pass@k advantage of a completion is the mean over the subsets that contain it."""
    rewards, expected = [[1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 6, [1.0] * 6, [1.0] + [0.0] * 5], []
    for group in rewards:
        values = {subset: max(group[i] for i in subset) for subset in combinations(range(6), 4)}
        mean, std = fmean(values.values()), pstdev(values.values())
        means = [fmean(value for subset, value in values.items() if i in subset) for i in range(6)]
        expected.append([(value - mean) / std if std else 0.0 for value in means])
    assert_near(advantages("pass_at_k", rewards), expected)


def test_opo_takes_off_the_mean_that_is_weighted_by_length():
    rewards = [[1.0, 0.0, 0.5], [0.0, 0.0, 3.0]]
    means = [(1 * 1.0 + 2 * 0.0 + 3 * 0.5) / 6, (6 * 3.0) / 15]
    assert_near(advantages("opo", rewards), [[r - m for r in row] for row, m in zip(rewards, means, strict=True)])


# Advantages of turns, columns and steps ---------------------------------------------------------------------------


def test_gigpo_compares_turns_that_began_in_the_same_state():
    """GiGPO: the episode's advantage, and that of each turn among turns of its group in the same state. Two groups of
    two episodes; the first has rewards 1 and 0 at its ends and meets the state "x" three times.
    """
    states = [[b"", b"x", b"x"], [b"", b"x"], [b""], [b"", b"x"]]
    rewards, lengths = [[1.0, 0.0], [2.0, 2.0]], torch.tensor([3, 2, 1, 2])
    turns_T = torch.cat([torch.arange(n) for n in lengths])
    graded = Groups(
        rewards_PG=torch.tensor(rewards), returns_T=torch.zeros(8), lengths_B=lengths, mask_T=turns_T >= 0,
        turns_T=turns_T, states_B=states,
    )  # fmt: skip
    given = flags(advantage="gigpo", group_size=2, tools=f"{ROOT}/docs/environments/calculator.py:calculator")
    returns = [[0.95**2, 0.95, 1.0], [0.0, 0.0], [2.0], [0.95 * 2.0, 2.0]]

    def standardised(value: float, values: list[float]) -> float:
        return (value - fmean(values)) / (stdev(values) + 1e-6)

    first, same = [0.95**2, 0.0], [0.95, 1.0, 0.0]  # turns before which nothing was said; those in the state "x"
    expected = [
        standardised(1.0, rewards[0]) + standardised(returns[0][0], first),
        *(standardised(1.0, rewards[0]) + standardised(x, same) for x in returns[0][1:]),
        standardised(0.0, rewards[0]) + standardised(0.0, first),
        standardised(0.0, rewards[0]) + standardised(0.0, same),
        standardised(2.0, [2.0, 1.9]), standardised(1.9, [2.0, 1.9]), 0.0,
    ]  # fmt: skip
    found = algorithm_of(given).advantage(graded)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_gigpo_takes_an_episode_without_replies_as_one_turn():
    """Also where no episode of the step has a reply: each is its first turn alone, and compared twice."""
    given = flags(advantage="gigpo", group_size=2, tools=f"{ROOT}/docs/environments/calculator.py:calculator")
    grades = [Grade(reward, "ok", {"tools": reward}) for reward in (1.0, 0.0)]
    rollout = replace(make_rollout([2, 3], group_size=2), grades=grades)
    first, second = compute_advantages(rollout, None, algorithm_of(given))
    assert first == pytest.approx([2 * 0.5**0.5] * 2, abs=1e-5)
    assert second == pytest.approx([-2 * 0.5**0.5] * 3, abs=1e-5)


def test_gpg_scales_the_gradient_up_for_groups_without_one():
    found = advantages("gpg", [[1.0, 0.0], [1.0, 1.0], [0.0, 2.0], [0.0, 0.0]])
    assert_near(found, [[1.0, -1.0], [0.0, 0.0], [-2.0, 2.0], [0.0, 0.0]])
    assert_near(advantages("gpg", [[1.0, 1.0]]), [[0.0, 0.0]])


def test_a_star_po_takes_off_a_value_from_rewards_of_the_start():
    """beta log(mean of exp(r / beta)) of the completions of the starting policy, which are in a column."""
    columns = [{"start_rewards": [1.0, 0.0, 0.0, 1.0]}, {"start_rewards": 0.25}]
    graded = Groups(
        rewards_PG=torch.tensor([[1.0, 0.0], [0.0, 1.0]]), returns_T=torch.zeros(4), lengths_B=torch.ones(4).long(),
        mask_T=torch.ones(4).bool(), columns=columns,
    )  # fmt: skip
    algorithm = algorithm_of(flags(advantage="a_star_po", group_size=2))
    value = 0.5 * math.log((2 * math.exp(2.0) + 2) / 4)
    assert_near(algorithm.advantage(graded).tolist(), [[1 - value, -value], [-0.25, 0.75]])


def test_a_star_po_is_a_regression_of_the_log_ratio_to_the_reference():
    case, expected, slopes = make_case(), {}, {}
    loss, gradient = loss_of(case, "a_star_po", {"beta_2": 0.1}, kl_coef=1.0, kl_estimator="none")
    for own in case.trained:
        error = 0.1 * sum((case.new[t] - case.sampler[t]).item() for t in own) - case.a[own[0]].item()
        expected |= dict.fromkeys(own, error**2)
        slopes |= dict.fromkeys(own, 2 * error * 0.1 * len(own))  # each token's loss depends on all of them
    assert_trained(loss.per_token, expected)
    assert_trained(gradient, slopes)


def test_kl_cov_holds_the_tokens_of_largest_covariance():
    case = make_case()
    loss, _ = loss_of(case, "kl_cov", {"share": 0.25, "penalty": 0.5})
    tokens = sum(case.trained, [])
    a, x = ([v[t].item() for t in tokens] for v in (case.a, case.new))
    covariances = {t: (i - fmean(a)) * (j - fmean(x)) for t, i, j in zip(tokens, a, x, strict=True)}
    held = sorted(tokens, key=covariances.get)[-3:]  # a quarter of 13
    logs = {t: (case.new[t] - case.old[t]).item() for t in tokens}
    values = {t: -case.a[t].item() * math.exp(logs[t]) + 0.5 * abs(logs[t]) * (t in held) for t in tokens}
    assert_trained(loss.per_token, values)
    assert set(loss.metrics["held_frac"].nonzero()[:, 0].tolist()) == set(held)


def test_fipo_weighs_a_token_by_the_discounted_shift_of_later_ones():
    """Without tokens beyond the dual clip, and without a sequence that has two of them."""
    case, values = make_case(scale=0.9), {}
    own_values = {"half_life": 2.0, "most": 1.5, "safety": 1.3}
    loss, _ = loss_of(case, "fipo", own_values, **CLIP | {"dual_clip": 2.0})
    for own in case.trained:
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
    loss, _ = loss_of(case, "rlsd", {"share": 0.5, "bound": 0.2}, kl_coef=1.0, kl_estimator="none", **CLIP)
    for t in sum(case.trained, []):
        evidence = math.exp(math.copysign(1.0, case.a[t]) * (case.sampler[t] - case.old[t]).item())
        values[t] = (0.5 + 0.5 * min(max(evidence, 0.8), 1.2)) * naive_clip(case, t)
    assert_trained(loss.per_token, values)
