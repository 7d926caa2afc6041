"""The algorithm against scalar loops written from the papers' equations, and against published values.

The `naive_...` functions are those loops: Python floats and `math`, one token at a time, no tensors. Expected gradients
are central differences of the same loops; a paper's stop-gradient sg[...] is an argument of its own (`frozen`), which
the differences leave alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import grpo
from batch import Batch
from flags import FLAGS
from grpo import (
    Graded,
    Loss,
    Tokens,
    as_loss,
    gspo_token_ratio,
    masked_sum,
    returns_to_go,
    sequence_ratio,
    sequence_sum,
    token_ratio,
    total_loss,
    whitened,
)
from helpers import flags
from inputs.choices import algorithm_of, parameters_of

LENGTHS = [12, 7, 3, 11, 5, 9, 2, 6]
UNTRAINED = 4  # the sequence of which no token is trained
ADVANTAGES = ["grpo", "grpo_batch_std", "dr_grpo", "rloo"]
LOSSES = ["clip", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "reinforce"]
RATIO_LOSSES = ["clip", "gspo", "gspo_token", "cispo", "sapo"]
CORRECTIONS = ["token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]

each_seed = pytest.mark.parametrize("seed", range(4))
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])


@dataclass(frozen=True)
class Case:
    """Random packed tokens of 8 ragged sequences, and the rewards of 4 groups of 5."""

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    ref_logprobs_N: Tensor
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    ratio_N: Tensor
    mask_N: Tensor
    sequence_ids_N: Tensor
    lengths_B: Tensor  # the trained tokens of each sequence
    rewards_PG: Tensor


def make_case(seed: int, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(seed)
    sequence_ids_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sum(LENGTHS), generator=generator, dtype=dtype)

    mask_N = torch.rand(sum(LENGTHS), generator=generator) < 0.7
    mask_N[torch.tensor(LENGTHS).cumsum(0) - 1] = True  # a token of each sequence, ...
    mask_N[sequence_ids_N == UNTRAINED] = False  # ... but for one
    old_logprobs_N = noise(0.5) - 3.0
    return Case(
        logprobs_N=old_logprobs_N + noise(0.8),  # a third of the ratios is within 0.7 and 1.4
        old_logprobs_N=old_logprobs_N,
        ref_logprobs_N=old_logprobs_N + noise(0.8),
        rollout_logprobs_N=old_logprobs_N + noise(0.8),
        advantages_N=noise(1.0),
        ratio_N=noise(0.8).exp(),
        mask_N=mask_N,
        sequence_ids_N=sequence_ids_N,
        lengths_B=torch.tensor([int(mask_N[sequence_ids_N == s].sum()) for s in range(len(LENGTHS))]),
        rewards_PG=torch.rand(4, 5, generator=generator, dtype=dtype),
    )


def assert_near(found: Tensor, expected: list, tolerance: float) -> None:
    """Error at most tolerance * (1 + |expected|), everywhere."""
    torch.testing.assert_close(
        found.detach().double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=tolerance
    )


def central_differences(function: Callable[[list[float]], float], at: list[float], step: float = 1e-5) -> list[float]:
    """The gradient of a function of floats. Its error is about 1e-9 for functions of size 1: compared to 1e-7."""

    def moved(i: int, by: float) -> float:
        return function([value + by if j == i else value for j, value in enumerate(at)])

    return [(moved(i, step) - moved(i, -step)) / (2 * step) for i in range(len(at))]


def clip(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


# The choices of `grpo.py`, called by name, with the values that are among their parameters ----------------------------


def default(name: str) -> object:
    return FLAGS[f"--{name}"].value


def call(choices: dict[str, Callable], kind: str, argument: object, **values: float) -> object:
    parameters = parameters_of(choices[kind])
    return choices[kind](argument, **{name: value for name, value in values.items() if name in parameters})


def group_advantages(
    rewards_PG: Tensor,
    kind: str = default("advantage"),
    ddof: int = default("advantage_ddof"),
    eps: float = default("advantage_eps"),
) -> Tensor:
    lengths_B = torch.ones(rewards_PG.numel(), dtype=torch.int64)
    graded = Graded(rewards_PG, rewards_PG.flatten(), lengths_B, lengths_B.bool())
    return call(grpo.ADVANTAGES, kind, graded, advantage_ddof=ddof, advantage_eps=eps)


def clipped_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = default("dual_clip")
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, is_low, is_high) of a ratio, of whatever it is the ratio."""
    loss, _, is_low, is_high = grpo.clipped(ratio, advantages, clip_low, clip_high, dual_clip)
    return loss, is_low, is_high


def loss_of_ratio(kind: str, logprobs: Tensor, ratio: Tensor, advantages: Tensor, **values: float) -> Loss:
    """The loss of log-probs that have this ratio to the old ones."""
    old_logprobs = (logprobs - ratio.log()).detach()
    return call(grpo.LOSSES, kind, Tokens(logprobs, old_logprobs, None, advantages, None, None), **values)


def cispo_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    loss = loss_of_ratio("cispo", logprobs, ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return loss.per_token, loss.is_low, loss.is_high


def sapo_loss(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    return loss_of_ratio("sapo", ratio.log(), ratio, advantages, sapo_tau_pos=tau_pos, sapo_tau_neg=tau_neg).per_token


def policy_gradient_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return loss_of_ratio("reinforce", logprobs, torch.ones_like(logprobs), advantages).per_token


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: str = default("kl_estimator"),
    clamp: float = default("kl_clamp"),
) -> Tensor:
    return call(grpo.KL, estimator, ref_logprobs - logprobs, kl_clamp=clamp)


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    kind: str,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    tokens = Tokens(None, old_logprobs, rollout_logprobs, None, mask, sequence_ids)
    return call(grpo.CORRECTIONS, kind, tokens, rollout_correction_min=low, rollout_correction_max=high)


def aggregation_weights(lengths_B: Tensor, kind: str, constant: float) -> Tensor:
    return call(grpo.AGGREGATIONS, kind, lengths_B, loss_constant_tokens=constant)


# Advantages -----------------------------------------------------------------------------------------------------------


def naive_std(values: list[float], ddof: int) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def naive_group_advantages(groups: list[list[float]], kind: str, ddof: int, eps: float) -> list[list[float]]:
    """GRPO: DeepSeekMath 4.1.2. Batch std: Lite PPO. Dr. GRPO: 3.2, no division. RLOO: 2.3, the other k - 1 rewards."""
    every_reward = [reward for group in groups for reward in group]
    result = []
    for group in groups:
        advantages = []
        for i, reward in enumerate(group):
            others = [other for j, other in enumerate(group) if j != i]
            baseline = sum(others) / len(others) if kind == "rloo" else sum(group) / len(group)
            scale = {"grpo": naive_std(group, ddof) + eps, "grpo_batch_std": naive_std(every_reward, ddof) + eps}.get(
                kind, 1.0
            )
            advantages.append((reward - baseline) / scale)
        result.append(advantages)
    return result


@each_seed
@each_dtype
@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize(("ddof", "eps"), [(1, 1e-6), (0, 1e-6), (1, 0.1), (0, 0.1)])
def test_advantages_equal_the_papers_equations(kind, ddof, eps, dtype, tolerance, seed):
    rewards_PG = make_case(seed, dtype).rewards_PG
    expected = naive_group_advantages(rewards_PG.tolist(), kind, ddof, eps)
    assert_near(group_advantages(rewards_PG, kind, ddof, eps), expected, tolerance)


@pytest.mark.parametrize(
    ("kind", "ddof", "expected"),
    [
        ("grpo", 1, [1.78885, -0.44721, -0.44721, -0.44721, -0.44721]),
        ("grpo", 0, [2.0, -0.5, -0.5, -0.5, -0.5]),
        ("grpo_batch_std", 1, [1.78885, -0.44721, -0.44721, -0.44721, -0.44721]),
        ("grpo_batch_std", 0, [2.0, -0.5, -0.5, -0.5, -0.5]),
        ("rloo", 1, [1.0, -0.25, -0.25, -0.25, -0.25]),
        ("dr_grpo", 1, [0.8, -0.2, -0.2, -0.2, -0.2]),
        ("none", 1, [1.0, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_one_right_answer_of_five_has_the_published_advantages(kind, ddof, expected):
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])
    assert_near(group_advantages(rewards_PG, kind, ddof, eps=1e-6), [expected], tolerance=1e-5)


def test_the_default_advantages_are_those_of_grpo_with_ddof_1_and_eps_1e_6():
    rewards_PG = torch.tensor([[0.0, 2e-6], [0.0, 2.0]], dtype=torch.float64)
    # std with ddof 1 is sqrt(2) times half the distance: 1e-6 / (1.41421e-6 + 1e-6) and 1 / (1.41421 + 1e-6)
    assert_near(group_advantages(rewards_PG), [[-0.414214, 0.414214], [-0.707106, 0.707106]], tolerance=1e-6)


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])  # 0.1 * 7 / 7 is not 0.1 in float32
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(kind, reward, ddof):
    assert group_advantages(torch.full((3, 7), reward), kind, ddof).eq(0).all()


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_group_of_equal_rewards_beside_a_group_with_signal_has_exactly_zero_advantage(kind):
    rewards_PG = torch.tensor([[0.1] * 7, [0.1] * 6 + [5.0]])
    advantages_PG = group_advantages(rewards_PG, kind)
    assert advantages_PG[0].eq(0).all()
    assert advantages_PG[1].ne(0).all()


def test_rewards_without_a_baseline_are_the_advantages():
    assert group_advantages(torch.tensor([[1.0, 1.0], [0.5, 3.0]]), "none").tolist() == [[1.0, 1.0], [0.5, 3.0]]


def test_the_batch_std_is_that_of_all_rewards_of_the_step():
    rewards_PG = torch.tensor(
        [[0.0, 2.0], [10.0, 12.0]]
    )  # all: mean 6, squares 36 + 16 + 16 + 36 = 104, ddof 0: std 5.09902
    assert_near(group_advantages(rewards_PG, "grpo_batch_std", ddof=0), [[-0.196116, 0.196116]] * 2, tolerance=1e-5)


def naive_returns_to_go(reward: float, penalties: list[float]) -> list[float]:
    """REINFORCE++ eq. 4: r(x, y) - beta * (sum of KL(i) from i = t to T)."""
    return [reward - math.fsum(penalties[t:]) for t in range(len(penalties))]


@each_seed
@each_dtype
def test_returns_to_go_equal_the_papers_equation(dtype, tolerance, seed):
    case = make_case(seed, dtype)
    expected = naive_returns_to_go(0.7, case.advantages_N.tolist())
    assert_near(returns_to_go(torch.tensor(0.7, dtype=torch.float64), case.advantages_N), expected, tolerance)


def test_a_return_to_go_pays_the_penalty_of_its_own_token_and_of_later_ones():
    assert_near(returns_to_go(torch.tensor(1.0), torch.tensor([0.1, 0.2, 0.4])), [0.3, 0.4, 0.6], tolerance=1e-6)


def naive_whitened(values: list[float], mask: list[bool], ddof: int, eps: float) -> list[float]:
    """REINFORCE++, later eq. 5: (A - mean) / std over the batch, here over trained tokens, eps beside the std."""
    chosen = [value for value, is_trained in zip(values, mask, strict=True) if is_trained]
    mean, std = math.fsum(chosen) / len(chosen), naive_std(chosen, ddof)
    return [(value - mean) / (std + eps) if is_trained else 0.0 for value, is_trained in zip(values, mask, strict=True)]


@each_seed
@each_dtype
@pytest.mark.parametrize(("ddof", "eps"), [(1, 1e-6), (0, 1e-6), (1, 0.1), (0, 0.1)])
def test_whitened_values_equal_the_papers_equation(ddof, eps, dtype, tolerance, seed):
    case = make_case(seed, dtype)
    expected = naive_whitened(case.advantages_N.tolist(), case.mask_N.tolist(), ddof, eps)
    assert_near(whitened(case.advantages_N, case.mask_N, ddof, eps), expected, tolerance)


@each_seed
def test_whitened_values_have_mean_0_and_std_1_over_the_mask(seed):
    case = make_case(seed)
    chosen = whitened(5.0 * case.advantages_N + 3.0, case.mask_N)[case.mask_N].tolist()
    assert sum(chosen) / len(chosen) == pytest.approx(0.0, abs=1e-9)
    assert naive_std(chosen, ddof=1) == pytest.approx(1.0, abs=1e-6)  # eps 1e-6 beside a std of 5


def test_whitening_divides_by_the_std_plus_eps_with_ddof_1_by_default():
    values = torch.tensor([0.0, 2e-6, 9.0], dtype=torch.float64)
    found = whitened(values, torch.tensor([True, True, False]))
    assert_near(found, [-0.414214, 0.414214, 0.0], tolerance=1e-6)  # 1e-6 / (1.41421e-6 + 1e-6)


def test_whitened_values_are_exactly_zero_outside_the_mask():
    case = make_case(0)
    found = whitened(case.advantages_N + 3.0, case.mask_N)
    assert found[~case.mask_N].eq(0).all()
    assert found[case.mask_N].ne(0).all()


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("num_values", [0, 1, 7])
def test_whitened_equal_values_are_exactly_zero(num_values, ddof):
    mask = torch.arange(9) < num_values
    assert whitened(torch.where(mask, 0.1, 5.0), mask, ddof).eq(0).all()


@pytest.mark.parametrize("outside", [1e6, -math.inf, math.nan])
def test_whitening_does_not_look_outside_the_mask(outside):
    values, mask = torch.tensor([1.0, 2.0, 3.0, outside]), torch.tensor([True, True, True, False])
    assert_near(whitened(values, mask), [-1.0, 0.0, 1.0, 0.0], tolerance=1e-5)


def test_whitening_keeps_its_digits_where_float32_sums_would_lose_them():
    values = 1000.0 + 0.01 * torch.randn(2000, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2000, dtype=torch.bool)
    assert_near(
        whitened(values, mask), naive_whitened(values.tolist(), mask.tolist(), ddof=1, eps=1e-6), tolerance=1e-5
    )


# Ratios ---------------------------------------------------------------------------------------------------------------


def naive_token_ratio(logprob: float, old_logprob: float) -> float:
    """PPO section 3: pi(token) / pi_old(token)."""
    return math.exp(logprob) / math.exp(old_logprob)


def naive_sequence_ratios(logprobs: list[float], old_logprobs: list[float], case: Case) -> list[float]:
    """GSPO eq. 7: (pi(y) / pi_old(y))^(1 / |y|), the likelihood of a sequence: the product over its trained tokens."""
    mask, sequence_ids = case.mask_N.tolist(), case.sequence_ids_N.tolist()
    result = []
    for t in range(len(mask)):
        likelihood_ratio, length = 1.0, 0
        for u in range(len(mask)):
            if mask[u] and sequence_ids[u] == sequence_ids[t]:
                likelihood_ratio *= naive_token_ratio(logprobs[u], old_logprobs[u])
                length += 1
        result.append(likelihood_ratio ** (1.0 / length) if mask[t] else 1.0)
    return result


def naive_gspo_token_ratios(
    logprobs: list[float], frozen: list[float], old_logprobs: list[float], case: Case
) -> list[float]:
    """GSPO eq. 14: sg[s_i] * pi(token) / sg[pi(token)]."""
    sequence_ratios, mask = naive_sequence_ratios(frozen, old_logprobs, case), case.mask_N.tolist()
    return [
        sequence_ratios[t] * naive_token_ratio(logprobs[t], frozen[t]) if mask[t] else 1.0 for t in range(len(mask))
    ]


@each_seed
@each_dtype
def test_token_ratios_equal_the_papers_equation(dtype, tolerance, seed):
    case = make_case(seed, dtype)
    expected = [
        naive_token_ratio(new, old)
        for new, old in zip(case.logprobs_N.tolist(), case.old_logprobs_N.tolist(), strict=True)
    ]
    assert_near(token_ratio(case.logprobs_N, case.old_logprobs_N), expected, tolerance)


@each_seed
@each_dtype
@pytest.mark.parametrize("function", [sequence_ratio, gspo_token_ratio])
def test_sequence_ratios_equal_the_papers_equation(function, dtype, tolerance, seed):
    case = make_case(seed, dtype)
    expected = naive_sequence_ratios(case.logprobs_N.tolist(), case.old_logprobs_N.tolist(), case)
    assert_near(function(case.logprobs_N, case.old_logprobs_N, case.mask_N, case.sequence_ids_N), expected, tolerance)


@each_seed
def test_the_gradient_of_the_token_ratio_is_that_of_the_papers_equation(seed):
    case = make_case(seed)
    old, scales = case.old_logprobs_N.tolist(), case.advantages_N.tolist()

    def total(logprobs: list[float]) -> float:
        return sum(scale * naive_token_ratio(new, o) for scale, new, o in zip(scales, logprobs, old, strict=True))

    logprobs_N = case.logprobs_N.clone().requires_grad_()
    (case.advantages_N * token_ratio(logprobs_N, case.old_logprobs_N)).sum().backward()
    assert_near(logprobs_N.grad, central_differences(total, case.logprobs_N.tolist()), tolerance=1e-7)


@each_seed
@pytest.mark.parametrize("function", [sequence_ratio, gspo_token_ratio])
def test_the_gradient_of_sequence_ratios_is_that_of_the_papers_equation(function, seed):
    case = make_case(seed)
    frozen, old, scales = case.logprobs_N.tolist(), case.old_logprobs_N.tolist(), case.advantages_N.tolist()

    def total(logprobs: list[float]) -> float:
        is_gspo = function is sequence_ratio
        ratios = (
            naive_sequence_ratios(logprobs, old, case)
            if is_gspo
            else naive_gspo_token_ratios(logprobs, frozen, old, case)
        )
        return sum(scale * ratio for scale, ratio in zip(scales, ratios, strict=True))

    logprobs_N = case.logprobs_N.clone().requires_grad_()
    (case.advantages_N * function(logprobs_N, case.old_logprobs_N, case.mask_N, case.sequence_ids_N)).sum().backward()
    assert_near(logprobs_N.grad, central_differences(total, frozen), tolerance=1e-7)


@each_seed
def test_a_sequence_sum_is_the_sum_over_the_tokens_of_the_same_sequence(seed):
    case = make_case(seed)
    values, ids = case.advantages_N.tolist(), case.sequence_ids_N.tolist()
    expected = [sum(value for value, other in zip(values, ids, strict=True) if other == own) for own in ids]
    assert_near(sequence_sum(case.advantages_N, case.sequence_ids_N), expected, tolerance=1e-10)


def test_a_sequence_sum_does_not_need_the_tokens_of_a_sequence_side_by_side():
    assert sequence_sum(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 0, 1, 0])).tolist() == [
        5.0,
        10.0,
        5.0,
        10.0,
    ]


def test_each_token_of_a_sequence_gets_the_gradient_of_all_its_sequence_sums():
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    (torch.tensor([10.0, 3.0, 5.0]) * sequence_sum(values, torch.tensor([0, 1, 0]))).sum().backward()
    assert values.grad.tolist() == [15.0, 3.0, 15.0]


def test_the_log_of_a_ratio_is_clamped_at_20():
    mask, sequence_ids = torch.tensor([True, True]), torch.tensor([0, 1])
    log_ratio, zeros = torch.tensor([30.0, -30.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for ratio in (
        token_ratio(log_ratio, zeros),
        sequence_ratio(log_ratio, zeros, mask, sequence_ids),
        gspo_token_ratio(log_ratio, zeros, mask, sequence_ids),
        rollout_weights(log_ratio, zeros, mask, sequence_ids, "none", 0.5, 5.0)[0],
    ):
        assert ratio.tolist() == pytest.approx(
            [485165195.409790, 2.061153622438558e-09], rel=1e-12
        )  # exp(20), exp(-20)


def test_the_log_of_a_sequence_ratio_is_clamped_after_the_mean_over_its_tokens():
    log_ratio, mask, sequence_ids = torch.tensor([30.0, -6.0]), torch.tensor([True, True]), torch.tensor([0, 0])
    assert_near(
        sequence_ratio(log_ratio, torch.zeros(2), mask, sequence_ids), [162754.79, 162754.79], tolerance=1e-5
    )  # exp(12)


@pytest.mark.parametrize("function", [sequence_ratio, gspo_token_ratio])
def test_the_sequence_ratio_is_the_geometric_mean_over_the_trained_tokens(function):
    ratio = torch.tensor([2.0, 100.0, 8.0, 5.0])
    mask, sequence_ids = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 1])
    assert_near(function(ratio.log(), torch.zeros(4), mask, sequence_ids), [4.0, 1.0, 4.0, 5.0], tolerance=1e-5)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (sequence_ratio, [2.0, 0.0, 2.0, 0.0]),  # 4 / 2 tokens, for each trained token of the sequence
        (gspo_token_ratio, [4.0, 0.0, 0.0, 0.0]),  # 4, for the token itself alone
    ],
)
def test_the_gradient_of_one_sequence_ratio_reaches_the_whole_sequence_but_for_gspo_token_the_token_alone(
    function, expected
):
    logprobs = torch.tensor([2.0, 100.0, 8.0, 5.0]).log().requires_grad_()
    mask, sequence_ids = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 1])
    function(logprobs, torch.zeros(4), mask, sequence_ids)[0].backward()
    assert_near(logprobs.grad, expected, tolerance=1e-5)


@each_seed
def test_gspo_token_has_the_gradient_of_gspo_where_the_advantage_is_constant_over_a_sequence_and_tokens_are_averaged(
    seed,
):
    case = make_case(seed)
    lengths_N = case.lengths_B.clamp(min=1)[case.sequence_ids_N]
    scales_N = case.advantages_N[case.sequence_ids_N] / lengths_N  # one advantage for each sequence
    gradients = []
    for function in (sequence_ratio, gspo_token_ratio):
        logprobs_N = case.logprobs_N.clone().requires_grad_()
        ratio_N = function(logprobs_N, case.old_logprobs_N, case.mask_N, case.sequence_ids_N)
        masked_sum(scales_N * ratio_N, case.mask_N).backward()
        gradients.append(logprobs_N.grad)
    assert_near(gradients[1], gradients[0].tolist(), tolerance=1e-12)
    assert gradients[0][case.mask_N].ne(0).all()


# Policy losses --------------------------------------------------------------------------------------------------------


def naive_clipped_loss(ratio: float, advantage: float, low: float, high: float, dual_clip: float = 0.0) -> float:
    """Minus PPO eq. 7, min(r A, clip(r) A), with DAPO's two bounds; where A < 0 at least c A, dual-clip PPO eq. 5."""
    objective = min(ratio * advantage, clip(ratio, 1.0 - low, 1.0 + high) * advantage)
    return -max(objective, dual_clip * advantage) if dual_clip and advantage < 0 else -objective


def naive_cispo_loss(logprob: float, frozen_ratio: float, advantage: float, low: float, high: float) -> float:
    """Minus CISPO eq. 4, sg[clipped r] A log pi, with the clipped r of eq. 5."""
    return -clip(frozen_ratio, 1.0 - low, 1.0 + high) * advantage * logprob


def naive_sapo_loss(ratio: float, advantage: float, tau_pos: float, tau_neg: float) -> float:
    """Minus SAPO eq. 5, f(r) A, with the gate f(r) = sigmoid(tau (r - 1)) 4 / tau."""
    tau = tau_pos if advantage > 0 else tau_neg
    return -4.0 / tau / (1.0 + math.exp(-tau * (ratio - 1.0))) * advantage


def naive_policy_losses(kind: str, logprobs: list[float], frozen: list[float], case: Case) -> list[float]:
    """Per token; REINFORCE (Williams, 1992): -A log pi."""
    old, advantages = case.old_logprobs_N.tolist(), case.advantages_N.tolist()
    ratios = [naive_token_ratio(new, o) for new, o in zip(logprobs, old, strict=True)]
    if kind == "gspo":
        ratios = naive_sequence_ratios(logprobs, old, case)
    if kind == "gspo_token":
        ratios = naive_gspo_token_ratios(logprobs, frozen, old, case)
    losses = []
    for t, (logprob, ratio, advantage) in enumerate(zip(logprobs, ratios, advantages, strict=True)):
        if kind == "sapo":
            losses.append(naive_sapo_loss(ratio, advantage, 1.0, 1.25))
        elif kind == "cispo":
            losses.append(naive_cispo_loss(logprob, naive_token_ratio(frozen[t], old[t]), advantage, 0.2, 0.3))
        elif kind == "reinforce":
            losses.append(-advantage * logprob)
        else:
            losses.append(naive_clipped_loss(ratio, advantage, 0.2, 0.3, 1.7 if kind == "dual_clip" else 0.0))
    return losses


def policy_losses(
    kind: str, logprobs_N: Tensor, case: Case, advantages_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(losses, ratios) of the loss of this name."""
    advantages_N = case.advantages_N if advantages_N is None else advantages_N
    ids_N = case.sequence_ids_N
    t = Tokens(logprobs_N, case.old_logprobs_N, case.rollout_logprobs_N, advantages_N, case.mask_N, ids_N)
    values = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.7 if kind == "dual_clip" else 0.0}
    values |= {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.25}  # binary fractions: a tau is rounded to float32
    loss = as_loss(call(grpo.LOSSES, "clip" if kind == "dual_clip" else kind, t, **values), t)
    return loss.per_token, loss.ratio


@each_seed
@each_dtype
@pytest.mark.parametrize("kind", LOSSES)
def test_policy_losses_equal_the_papers_equations(kind, dtype, tolerance, seed):
    case = make_case(seed, dtype)
    expected = naive_policy_losses(kind, case.logprobs_N.tolist(), case.logprobs_N.tolist(), case)
    assert_near(policy_losses(kind, case.logprobs_N, case)[0], expected, tolerance)


@each_seed
@pytest.mark.parametrize("kind", LOSSES)
def test_the_gradients_of_policy_losses_are_those_of_the_papers_equations(kind, seed):
    case = make_case(seed)
    frozen, mask = case.logprobs_N.tolist(), case.mask_N.tolist()
    scale_N = torch.linspace(0.5, 1.5, len(mask), dtype=torch.float64)  # the aggregation's weights, all different
    scales = scale_N.tolist()

    def total(logprobs: list[float]) -> float:
        losses = naive_policy_losses(kind, logprobs, frozen, case)
        return sum(scale * loss for scale, loss, is_trained in zip(scales, losses, mask, strict=True) if is_trained)

    logprobs_N = case.logprobs_N.clone().requires_grad_()
    masked_sum(scale_N * policy_losses(kind, logprobs_N, case)[0], case.mask_N).backward()
    assert_near(logprobs_N.grad, central_differences(total, frozen), tolerance=1e-7)


@each_seed
@pytest.mark.parametrize("kind", LOSSES)
def test_tokens_that_are_not_trained_get_exactly_no_gradient_from_a_policy_loss(kind, seed):
    case = make_case(seed)
    logprobs_N = case.logprobs_N.clone().requires_grad_()
    masked_sum(policy_losses(kind, logprobs_N, case)[0], case.mask_N).backward()
    assert logprobs_N.grad[~case.mask_N].eq(0).all()
    assert logprobs_N.grad[case.mask_N].ne(0).any()


@each_seed
@pytest.mark.parametrize("kind", RATIO_LOSSES)
def test_on_policy_the_ratio_is_exactly_1(kind, seed):
    case = make_case(seed, torch.float32)
    assert policy_losses(kind, case.old_logprobs_N, case)[1].eq(1).all()


@each_seed
@pytest.mark.parametrize("kind", [*RATIO_LOSSES, "reinforce"])
def test_on_policy_every_loss_has_the_gradient_minus_advantage_times_weight(kind, seed):
    case = make_case(seed)
    advantages_N = case.advantages_N[case.sequence_ids_N]  # one for each sequence
    weights_N = aggregation_weights(case.lengths_B, "seq_mean_token_mean", 1.0)[case.sequence_ids_N]
    logprobs_N = case.old_logprobs_N.clone().requires_grad_()
    masked_sum(weights_N * policy_losses(kind, logprobs_N, case, advantages_N)[0], case.mask_N).backward()
    expected = [
        -a * w if m else 0.0
        for a, w, m in zip(advantages_N.tolist(), weights_N.tolist(), case.mask_N.tolist(), strict=True)
    ]
    assert_near(logprobs_N.grad, expected, tolerance=1e-10)


def test_the_ratio_is_clipped_on_the_side_that_would_reward_going_further():
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0, 1.1], requires_grad=True)
    loss, is_low, is_high = clipped_loss(
        ratio, torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 2.0]), clip_low=0.2, clip_high=0.3
    )
    loss.sum().backward()
    assert_near(loss, [-1.3, -0.5, 1.5, 0.8, -1.0, -2.2], tolerance=1e-6)
    assert_near(ratio.grad, [0.0, -1.0, 1.0, 0.0, -1.0, -2.0], tolerance=1e-6)
    assert is_low.tolist() == [False, False, False, True, False, False]
    assert is_high.tolist() == [True, False, False, False, False, False]


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_whose_ratio_is_large():
    ratio = torch.tensor([10.0, 2.9, 10.0, 0.5], requires_grad=True)
    loss, is_low, is_high = clipped_loss(
        ratio, torch.tensor([-1.0, -1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.3, dual_clip=3.0
    )
    loss.sum().backward()
    assert_near(loss, [3.0, 2.9, -1.3, 0.8], tolerance=1e-6)
    assert_near(ratio.grad, [0.0, 1.0, 0.0, 0.0], tolerance=1e-6)
    assert is_low.tolist() == [False, False, False, True]
    assert is_high.tolist() == [True, False, True, False]


def test_without_a_dual_clip_the_loss_of_a_bad_token_is_not_bounded():
    loss, _, is_high = clipped_loss(torch.tensor([10.0]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.3)
    assert loss.tolist() == [10.0]
    assert is_high.tolist() == [False]


@each_seed
@pytest.mark.parametrize("dual_clip", [0.0, 1.7])
def test_the_tokens_marked_as_clipped_are_those_without_gradient(dual_clip, seed):
    case = make_case(seed)
    ratio_N = case.ratio_N.clone().requires_grad_()
    loss_N, is_low_N, is_high_N = clipped_loss(ratio_N, case.advantages_N, 0.2, 0.3, dual_clip)
    loss_N.sum().backward()
    has_no_gradient_N = ratio_N.grad == 0
    assert (is_low_N | is_high_N).equal(has_no_gradient_N)
    assert is_low_N.equal(has_no_gradient_N & (ratio_N < 1))
    assert is_high_N.equal(has_no_gradient_N & (ratio_N > 1))
    assert is_low_N.any() and is_high_N.any() and not has_no_gradient_N.all()


def test_a_ratio_at_a_bound_of_the_clip_is_not_clipped():
    ratio = torch.tensor([0.75, 1.25, 2.0], requires_grad=True)
    loss, is_low, is_high = clipped_loss(
        ratio, torch.tensor([-1.0, 1.0, -1.0]), clip_low=0.25, clip_high=0.25, dual_clip=2.0
    )
    loss.sum().backward()
    assert not (is_low | is_high).any()
    assert ratio.grad.tolist() == [1.0, -1.0, 1.0]


def test_an_advantage_of_0_has_no_loss_and_is_not_marked_as_clipped():
    loss, is_low, is_high = clipped_loss(
        torch.tensor([0.1, 1.0, 10.0]), torch.zeros(3), clip_low=0.2, clip_high=0.3, dual_clip=3.0
    )
    assert loss.eq(0).all()
    assert not (is_low | is_high).any()


def test_cispo_weighs_the_gradient_of_each_token_with_its_clipped_ratio():
    logprobs = torch.tensor([0.1, 1.0, 10.0] * 2).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, -2.0])
    ratio = token_ratio(logprobs, torch.zeros(6))
    loss, is_low, is_high = cispo_loss(logprobs, ratio, advantages, clip_low=0.2, clip_high=0.3)
    loss.sum().backward()
    assert_near(logprobs.grad, [-0.8, -1.0, -1.3, 1.6, 2.0, 2.6], tolerance=1e-6)
    assert is_low.tolist() == [True, False, False] * 2
    assert is_high.tolist() == [False, False, True] * 2


def test_cispo_with_clip_low_1_has_no_lower_bound():
    logprobs = torch.tensor([0.001]).log().requires_grad_()
    loss, is_low, _ = cispo_loss(
        logprobs, token_ratio(logprobs, torch.zeros(1)), torch.tensor([1.0]), clip_low=1.0, clip_high=0.3
    )
    loss.sum().backward()
    assert_near(logprobs.grad, [-0.001], tolerance=1e-8)
    assert is_low.tolist() == [False]


@each_seed
def test_cispo_leaves_no_token_without_gradient_where_ppo_does(seed):
    case = make_case(seed)
    gradients = {}
    for kind in ("clip", "cispo"):
        logprobs_N = case.logprobs_N.clone().requires_grad_()
        policy_losses(kind, logprobs_N, case)[0].sum().backward()
        gradients[kind] = logprobs_N.grad
    assert gradients["cispo"].ne(0).all()
    assert gradients["clip"].eq(0).any()


@each_seed
@pytest.mark.parametrize("tau", [(1.0, 1.05), (0.5, 2.0)])
def test_the_soft_gate_equals_the_papers_equation(tau, seed):
    case = make_case(seed, torch.float32)
    expected = [
        naive_sapo_loss(r, a, *tau) for r, a in zip(case.ratio_N.tolist(), case.advantages_N.tolist(), strict=True)
    ]
    assert_near(sapo_loss(case.ratio_N, case.advantages_N, *tau), expected, tolerance=1e-5)


def test_the_soft_gate_at_ratio_1_has_the_plain_gradient_and_the_value_2_over_tau():
    ratio = torch.ones(3, requires_grad=True)
    loss = sapo_loss(ratio, torch.tensor([3.0, -3.0, 0.0]), tau_pos=1.0, tau_neg=2.0)
    loss.sum().backward()
    assert_near(loss, [-6.0, 3.0, 0.0], tolerance=1e-6)  # -A * 2 / tau
    assert_near(ratio.grad, [-3.0, 3.0, 0.0], tolerance=1e-6)


def test_the_soft_gate_fades_with_the_tau_of_the_sign_of_the_advantage():
    ratio = torch.tensor([2.0, 2.0], requires_grad=True)
    sapo_loss(ratio, torch.tensor([1.0, -1.0]), tau_pos=1.0, tau_neg=2.0).sum().backward()
    # 4 * sigmoid(tau) * (1 - sigmoid(tau)): 4 * 0.7310586 * 0.2689414 and 4 * 0.8807971 * 0.1192029
    assert_near(ratio.grad, [-0.7864477, 0.4199743], tolerance=1e-6)


# KL -------------------------------------------------------------------------------------------------------------------


def naive_kl(logprob: float, ref_logprob: float, estimator: str, clamp: float) -> float:
    """Schulman (2020), r = pi_ref / pi: k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r; GRPO's eq. 4 is k3."""
    log_ratio = ref_logprob - logprob
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2.0
    if clamp:
        log_ratio = clip(log_ratio, -20.0, 20.0)
    k3 = (math.exp(log_ratio) - 1.0) - log_ratio
    return clip(k3, -clamp, clamp) if clamp else k3


@each_seed
@each_dtype
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
@pytest.mark.parametrize("clamp", [0.0, 0.5, 10.0])
def test_kl_estimates_equal_their_definitions(estimator, clamp, dtype, tolerance, seed):
    case = make_case(seed, dtype)
    pairs = zip(case.logprobs_N.tolist(), case.ref_logprobs_N.tolist(), strict=True)
    expected = [naive_kl(logprob, ref_logprob, estimator.rstrip("+"), clamp) for logprob, ref_logprob in pairs]
    assert_near(kl_estimate(case.logprobs_N, case.ref_logprobs_N, estimator, clamp), expected, tolerance)


@each_seed
@pytest.mark.parametrize(("estimator", "differentiated"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3+", "k2")])
@pytest.mark.parametrize("clamp", [0.0, 0.5, 10.0])
def test_kl_gradients_are_those_of_their_definitions(estimator, differentiated, clamp, seed):
    case = make_case(seed)
    ref_logprobs, scales = case.ref_logprobs_N.tolist(), case.advantages_N.tolist()

    def total(logprobs: list[float]) -> float:
        return sum(
            s * naive_kl(a, b, differentiated, clamp) for s, a, b in zip(scales, logprobs, ref_logprobs, strict=True)
        )

    logprobs_N = case.logprobs_N.clone().requires_grad_()
    (case.advantages_N * kl_estimate(logprobs_N, case.ref_logprobs_N, estimator, clamp)).sum().backward()
    assert_near(logprobs_N.grad, central_differences(total, case.logprobs_N.tolist()), tolerance=1e-7)


@pytest.mark.parametrize(
    ("estimator", "clamp", "expected"),
    [
        ("k1", 10.0, [-1.0, 1.0, -0.5, -3.0, 0.0]),
        ("k2", 10.0, [0.5, 0.5, 0.125, 4.5, 0.0]),
        ("k3", 10.0, [0.71828, 0.36788, 0.14872, 10.0, 0.0]),
        ("k3", 0.0, [0.71828, 0.36788, 0.14872, 16.08554, 0.0]),
        ("k3+", 10.0, [0.71828, 0.36788, 0.14872, 10.0, 0.0]),
        ("k3+", 0.0, [0.71828, 0.36788, 0.14872, 16.08554, 0.0]),
    ],
)
def test_kl_estimates_have_the_published_values(estimator, clamp, expected):
    x = torch.tensor([1.0, -1.0, 0.5, 3.0, 0.0])  # ref_logprob - logprob
    assert_near(kl_estimate(-x, torch.zeros(5), estimator, clamp), expected, tolerance=1e-5)


def test_the_default_kl_estimate_is_k3_clamped_at_10():
    assert_near(kl_estimate(torch.tensor([-1.0, -3.0]), torch.zeros(2)), [0.71828, 10.0], tolerance=1e-5)


def test_the_gradient_of_k3_is_1_minus_exp_x_and_none_where_its_value_is_clamped():
    logprobs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-2.0, -1.5, -1.0]), "k3").sum().backward()
    assert_near(logprobs.grad, [1 - math.exp(-1), 1 - math.exp(0.5), 0.0], tolerance=1e-6)


def test_the_gradient_of_k3_plus_is_minus_x_also_where_its_value_is_clamped():
    logprobs = torch.tensor([-1.0, -2.0, -4.0, -31.0], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-2.0, -1.5, -1.0, -1.0]), "k3+").sum().backward()
    assert_near(logprobs.grad, [1.0, -0.5, -3.0, -30.0], tolerance=1e-6)


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_the_clamp_of_k3_is_on_x_at_20_and_on_the_value(estimator):
    x = torch.tensor([25.0, -25.0, -13.0], dtype=torch.float64)
    found = kl_estimate(-x, torch.zeros(3, dtype=torch.float64), estimator, clamp=1e12)
    assert found.tolist() == pytest.approx(
        [485165174.40979, 19.0, 12.00000226], rel=1e-8
    )  # exp(20) - 20 - 1, exp(-20) + 20 - 1
    assert_near(
        kl_estimate(-x, torch.zeros(3, dtype=torch.float64), estimator, clamp=10.0), [10.0, 10.0, 10.0], tolerance=1e-12
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_far_from_the_reference_a_clamped_kl_estimate_and_its_gradient_are_finite(estimator):
    logprobs = torch.tensor([-200.0, 200.0, -1e4, 1e4], requires_grad=True)
    found = kl_estimate(logprobs, torch.zeros(4), estimator)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(logprobs.grad).all()


def exact_distributions(seed: int) -> tuple[Tensor, list[float], list[float]]:
    """Logits of a policy over 5 outcomes, its probabilities, and those of a reference."""
    generator = torch.Generator().manual_seed(seed)
    logits_V = torch.randn(5, generator=generator, dtype=torch.float64)
    reference_V = torch.randn(5, generator=generator, dtype=torch.float64)
    return logits_V.requires_grad_(), logits_V.detach().softmax(0).tolist(), reference_V.softmax(0).tolist()


@each_seed
@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+"])
def test_k1_and_k3_equal_the_kl_divergence_in_expectation_over_the_policy(estimator, seed):
    logits_V, policy, reference = exact_distributions(seed)
    estimate_V = kl_estimate(
        logits_V.log_softmax(0), torch.tensor(reference, dtype=torch.float64).log(), estimator, clamp=0.0
    )
    divergence = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    assert sum(p * k for p, k in zip(policy, estimate_V.tolist(), strict=True)) == pytest.approx(divergence, abs=1e-12)


@each_seed
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_the_expected_gradient_is_zero_for_k1_the_reverse_divergences_for_k3_and_the_divergences_for_k2_and_k3_plus(
    estimator, seed
):
    logits_V, policy, reference = exact_distributions(seed)
    estimate_V = kl_estimate(
        logits_V.log_softmax(0), torch.tensor(reference, dtype=torch.float64).log(), estimator, clamp=0.0
    )
    (
        torch.tensor(policy, dtype=torch.float64) * estimate_V
    ).sum().backward()  # the sampling itself is not differentiated
    divergence = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    gradient_of_kl = [
        p * (math.log(p / q) - divergence) for p, q in zip(policy, reference, strict=True)
    ]  # KL(policy || reference)
    gradient_of_reverse_kl = [p - q for p, q in zip(policy, reference, strict=True)]  # KL(reference || policy)
    expected = {"k1": [0.0] * 5, "k2": gradient_of_kl, "k3": gradient_of_reverse_kl, "k3+": gradient_of_kl}[estimator]
    assert_near(logits_V.grad, expected, tolerance=1e-12)


# Sampler-trainer mismatch ---------------------------------------------------------------------------------------------


def naive_rollout_weights(case: Case, kind: str, low: float, high: float) -> tuple[list[float], list[bool]]:
    """Yao et al. (2025): min(pi_old / pi_rollout, C). IcePop (Ring-1T): the ratio within [alpha, beta], else 0."""
    mask, sequence_ids = case.mask_N.tolist(), case.sequence_ids_N.tolist()
    ratios = [
        naive_token_ratio(a, b)
        for a, b in zip(case.old_logprobs_N.tolist(), case.rollout_logprobs_N.tolist(), strict=True)
    ]
    weights, is_outside = [], []
    for t, ratio in enumerate(ratios):
        if kind.startswith("sequence"):
            ratio = math.prod(ratios[u] for u in range(len(ratios)) if mask[u] and sequence_ids[u] == sequence_ids[t])
        if kind.endswith("truncate"):
            weights.append(min(ratio, high))
            is_outside.append(ratio > high)
        elif kind.endswith("mask"):
            weights.append(ratio if low <= ratio <= high else 0.0)
            is_outside.append(not low <= ratio <= high)
        else:
            weights.append(ratio)
            is_outside.append(False)
    return weights, is_outside


@each_seed
@each_dtype
@pytest.mark.parametrize("kind", ["none", *CORRECTIONS])
def test_rollout_weights_equal_the_papers_equations(kind, dtype, tolerance, seed):
    case = make_case(seed, dtype)
    weights_N, is_outside_N = rollout_weights(
        case.old_logprobs_N, case.rollout_logprobs_N, case.mask_N, case.sequence_ids_N, kind, low=0.6, high=1.8
    )
    expected, expected_outside = naive_rollout_weights(case, kind, low=0.6, high=1.8)
    trained = case.mask_N.nonzero()[:, 0].tolist()
    assert_near(weights_N[trained], [expected[t] for t in trained], tolerance)
    assert is_outside_N[trained].tolist() == [expected_outside[t] for t in trained]


@pytest.mark.parametrize(
    ("kind", "weights", "is_outside"),
    [
        ("none", [4.0, 0.25, 3.0, 0.1, 1.5], [False, False, False, False, False]),
        ("token_truncate", [2.0, 0.25, 2.0, 0.1, 1.5], [True, False, True, False, False]),
        ("sequence_truncate", [1.0, 1.0, 2.0, 0.1, 1.5], [False, False, True, False, False]),
        ("token_mask", [0.0, 0.0, 0.0, 0.0, 1.5], [True, True, True, True, False]),
        ("sequence_mask", [1.0, 1.0, 0.0, 0.0, 1.5], [False, False, True, True, False]),
    ],
)
def test_the_weight_of_a_token_is_its_ratio_or_the_product_over_its_sequence_within_bounds(kind, weights, is_outside):
    ratio, sequence_ids = torch.tensor([4.0, 0.25, 3.0, 0.1, 1.5]), torch.tensor([0, 0, 1, 2, 3])
    found, found_outside = rollout_weights(
        ratio.log(), torch.zeros(5), torch.ones(5).bool(), sequence_ids, kind, low=0.5, high=2.0
    )
    assert_near(found, weights, tolerance=1e-5)
    assert found_outside.tolist() == is_outside


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_weight_at_both_bounds_is_inside_them(kind):
    mask = torch.tensor([True, True])
    weights, is_outside = rollout_weights(
        torch.zeros(2), torch.zeros(2), mask, torch.tensor([0, 1]), kind, low=1.0, high=1.0
    )
    assert weights.tolist() == [1.0, 1.0]
    assert is_outside.tolist() == [False, False]


@pytest.mark.parametrize("kind", ["none", *CORRECTIONS])
@pytest.mark.parametrize("poison", [3.0, math.inf, math.nan])
def test_a_token_that_is_not_trained_does_not_change_the_weights_of_its_sequence(kind, poison):
    old_logprobs, mask = torch.tensor([1.5, poison, 1.0]).log(), torch.tensor([True, False, True])
    weights, _ = rollout_weights(old_logprobs, torch.zeros(3), mask, torch.tensor([0, 0, 1]), kind, low=0.5, high=2.0)
    assert_near(weights[mask], [1.5, 1.0], tolerance=1e-6)
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("kind", ["none", *CORRECTIONS])
def test_rollout_weights_have_no_gradient(kind):
    old_logprobs, mask = torch.tensor([0.1, -0.1], requires_grad=True), torch.tensor([True, True])
    weights, _ = rollout_weights(old_logprobs, torch.zeros(2), mask, torch.tensor([0, 0]), kind, low=0.5, high=2.0)
    assert not weights.requires_grad


# Aggregation ----------------------------------------------------------------------------------------------------------


def naive_aggregate(losses: list[list[float]], kind: str, constant: float) -> float:
    """The loss of an update from the losses of the trained tokens of each sequence.

    DAPO eq. 12: the sum over all tokens / their number. GRPO eq. 3: the mean over sequences of the mean over tokens.
    Dr. GRPO: the mean over sequences of the sum over tokens / a constant. A sequence without tokens is none.
    """
    losses = [sequence for sequence in losses if sequence]
    if kind == "token_mean":
        return sum(sum(sequence) for sequence in losses) / sum(len(sequence) for sequence in losses)
    if kind == "seq_mean_token_mean":
        return sum(sum(sequence) / len(sequence) for sequence in losses) / len(losses)
    return sum(sum(sequence) / constant for sequence in losses) / len(losses)


@each_seed
@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_the_weighted_sum_of_token_losses_equals_the_papers_aggregation(kind, seed):
    case = make_case(seed)
    losses, ids, mask = case.advantages_N.tolist(), case.sequence_ids_N.tolist(), case.mask_N.tolist()
    ragged = [
        [loss for loss, s, is_trained in zip(losses, ids, mask, strict=True) if is_trained and s == own]
        for own in range(len(LENGTHS))
    ]
    weights_B = aggregation_weights(case.lengths_B, kind, constant=12.0)
    total = masked_sum(weights_B[case.sequence_ids_N] * case.advantages_N, case.mask_N)
    assert total.item() == pytest.approx(
        naive_aggregate(ragged, kind, constant=12.0), abs=1e-6
    )  # the weights are float32


@pytest.mark.parametrize(
    ("kind", "of_three", "of_one"),
    [("token_mean", 1 / 4, 1 / 4), ("seq_mean_token_mean", 1 / 6, 1 / 2), ("seq_mean_token_sum_norm", 1 / 20, 1 / 20)],
)
def test_a_left_out_completion_does_not_count_as_a_sequence(kind, of_three, of_one):
    weights_B = aggregation_weights(torch.tensor([3, 0, 1]), kind, constant=10.0)
    assert weights_B.shape == (3,)
    assert_near(weights_B[[0, 2]], [of_three, of_one], tolerance=1e-7)


@each_seed
@pytest.mark.parametrize("kind", ["token_mean", "seq_mean_token_mean"])
def test_the_weights_of_a_mean_sum_to_1_over_all_tokens(kind, seed):
    lengths_B = make_case(seed).lengths_B
    assert (lengths_B * aggregation_weights(lengths_B, kind, constant=12.0)).sum().item() == pytest.approx(
        1.0, abs=1e-6
    )


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_an_update_without_trained_tokens_has_finite_weights(kind):
    assert torch.isfinite(aggregation_weights(torch.tensor([0, 0, 0]), kind, constant=12.0)).all()


def test_only_the_norm_by_a_constant_depends_on_the_constant():
    lengths_B = torch.tensor([3, 1])
    ratio = [
        (aggregation_weights(lengths_B, kind, 8.0) / aggregation_weights(lengths_B, kind, 4.0)).tolist()
        for kind in AGGREGATIONS
    ]
    assert ratio == [[1.0, 1.0], [1.0, 1.0], [0.5, 0.5]]


@each_seed
def test_a_masked_sum_is_the_sum_over_the_trained_tokens(seed):
    case = make_case(seed)
    expected = math.fsum(
        value for value, is_trained in zip(case.advantages_N.tolist(), case.mask_N.tolist(), strict=True) if is_trained
    )
    assert masked_sum(case.advantages_N, case.mask_N).item() == pytest.approx(expected, abs=1e-12)


# Masked positions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [0.0, math.inf, -math.inf, math.nan])
def test_a_masked_sum_has_exactly_no_gradient_at_masked_positions(poison):
    values = torch.tensor([1.0, poison, 2.0], requires_grad=True)
    total = masked_sum(values, torch.tensor([True, False, True]))
    total.backward()
    assert total.item() == 3.0
    assert values.grad.tolist() == [1.0, 0.0, 1.0]


def test_a_masked_sum_over_values_poisoned_by_inf_and_nan_keeps_the_other_gradients():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    total = masked_sum(values * torch.tensor([1.0, math.inf, math.nan]), torch.tensor([True, False, False]))
    total.backward()
    assert total.item() == 1.0
    assert values.grad[0].item() == 1.0


@pytest.mark.parametrize("poison", [0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("function", [sequence_ratio, gspo_token_ratio])
def test_a_sequence_ratio_is_1_and_has_exactly_no_gradient_at_masked_positions(function, is_old, poison):
    logprobs, old_logprobs = torch.tensor([4.0, 7.0, 1.0, 2.0]).log(), torch.zeros(4)
    (old_logprobs if is_old else logprobs)[1] = poison
    logprobs.requires_grad_()
    mask, sequence_ids = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 1])
    ratio = function(logprobs, old_logprobs, mask, sequence_ids)
    ratio.sum().backward()
    assert_near(ratio, [2.0, 1.0, 2.0, 2.0], tolerance=1e-5)
    assert_near(logprobs.grad, [2.0, 0.0, 2.0, 2.0], tolerance=1e-5)
    assert ratio[1].item() == 1.0
    assert logprobs.grad[1].item() == 0.0


# All functions --------------------------------------------------------------------------------------------------------

RATIO_TENSORS = ["logprobs_N", "old_logprobs_N", "mask_N", "sequence_ids_N"]
CORRECTION_TENSORS = ["old_logprobs_N", "rollout_logprobs_N", "mask_N", "sequence_ids_N"]
CALLS = [
    *[(group_advantages, ["rewards_PG"], [kind]) for kind in ["none", *ADVANTAGES]],
    (returns_to_go, ["reward", "advantages_N"], []),
    (whitened, ["advantages_N", "mask_N"], []),
    (token_ratio, ["logprobs_N", "old_logprobs_N"], []),
    (sequence_ratio, RATIO_TENSORS, []),
    (gspo_token_ratio, RATIO_TENSORS, []),
    (sequence_sum, ["advantages_N", "sequence_ids_N"], []),
    (clipped_loss, ["ratio_N", "advantages_N"], [0.2, 0.3, 1.7]),
    (cispo_loss, ["logprobs_N", "ratio_N", "advantages_N"], [0.2, 0.3]),
    (sapo_loss, ["ratio_N", "advantages_N"], [1.0, 1.05]),
    (policy_gradient_loss, ["logprobs_N", "advantages_N"], []),
    *[(kl_estimate, ["logprobs_N", "ref_logprobs_N"], [kind, 0.5]) for kind in ["k1", "k2", "k3", "k3+"]],
    *[(rollout_weights, CORRECTION_TENSORS, [kind, 0.6, 1.8]) for kind in ["none", *CORRECTIONS]],
    *[(aggregation_weights, ["lengths_B"], [kind, 12.0]) for kind in AGGREGATIONS],
    (masked_sum, ["advantages_N", "mask_N"], []),
]


@pytest.mark.parametrize(("function", "names", "settings"), CALLS)
def test_arguments_are_left_as_they_were(function, names, settings):
    tensors = {**vars(make_case(0, torch.float32)), "reward": torch.tensor(0.7)}
    arguments = [tensors[name] for name in names]
    copies = [argument.clone() for argument in arguments]
    function(*arguments, *settings)
    for before, after in zip(copies, arguments, strict=True):
        assert before.equal(after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("function", "names", "settings"), [call for call in CALLS if call[0] is not aggregation_weights]
)
def test_results_have_the_dtype_of_the_arguments(function, names, settings, dtype):
    tensors = {**vars(make_case(0, dtype)), "reward": torch.tensor(0.7, dtype=dtype)}
    result = function(*[tensors[name] for name in names], *settings)
    assert (result[0] if isinstance(result, tuple) else result).dtype == dtype


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_aggregation_weights_are_float32(kind):
    assert aggregation_weights(torch.tensor([3, 0, 1]), kind, constant=12.0).dtype == torch.float32


# What is measured -----------------------------------------------------------------------------------------------------


def test_without_eps_a_group_of_equal_rewards_still_has_exactly_no_advantage():
    rewards_PG = torch.tensor([[0.1] * 4, [0.0, 0.0, 1.0, 1.0]])
    for kind in ("grpo", "grpo_batch_std"):
        advantages_PG = group_advantages(rewards_PG, kind, eps=0.0)
        assert advantages_PG[0].tolist() == [0.0] * 4
        assert advantages_PG[1].isfinite().all() and advantages_PG[1].ne(0).all()
    assert group_advantages(torch.full((2, 3), 0.1), "grpo_batch_std", eps=0.0).eq(0).all()


def measured(logprobs_N: Tensor, old_logprobs_N: Tensor, **others: Tensor) -> dict[str, float]:
    """The means that `total_loss` gives to the metrics, of one sequence, with a clamped k3 in the loss."""
    n = len(logprobs_N)
    known = {"rollout_logprobs_N": old_logprobs_N, "ref_logprobs_N": old_logprobs_N} | others
    index, ones = torch.zeros(n, dtype=torch.int64), torch.ones(n)
    known |= {"trained_K": torch.arange(n), "segments_S": (), "advantages_N": ones}
    batch = Batch(index, index, index, ones.bool(), loss_weights_N=ones / n, sequence_ids_N=index, **known)
    algorithm = algorithm_of(flags(kl_coef=0.1))
    _, means, _ = total_loss(batch, logprobs_N, old_logprobs_N, ones, algorithm)
    return {name: values.float().mean().item() for name, values in means.items()}


def test_the_measured_kl_is_that_of_the_whole_distributions_where_the_clamped_k3_of_the_loss_loses_most():
    """Where the policy avoids a token that the reference likes, its rare draws have a k3 of 194, clamped to 10.

    100,000 draws; k1 within 5 % of the exact divergence, the clamped k3 below half of it.
    """
    policy, reference = torch.full((200,), 0.999 / 199), torch.full((200,), 0.8 / 199)
    policy[7], reference[7] = 0.001, 0.2
    exact = (policy * (policy / reference).log()).sum().item()
    drawn = torch.multinomial(policy, 100_000, replacement=True, generator=torch.Generator().manual_seed(0))
    logprobs, ref_logprobs = policy.log()[drawn], reference.log()[drawn]
    found = measured(logprobs, logprobs, ref_logprobs_N=ref_logprobs)
    assert found["policy/kl_ref"] == pytest.approx(exact, rel=0.05)
    assert kl_estimate(logprobs, ref_logprobs, "k3", 10.0).mean().item() < 0.5 * exact
    assert found["policy/kl_clamp_frac"] == pytest.approx(0.001, rel=0.3)


def test_the_kl_to_the_sampling_policy_and_to_the_sampler_are_measured_without_a_clamp():
    old, new, sampler = torch.tensor([-1.0, -2.0]), torch.tensor([-41.0, -1.0]), torch.tensor([-2.0, -32.0])
    found = measured(new, old, rollout_logprobs_N=sampler)
    assert found["policy/approx_kl"] == pytest.approx((40.0 - 1.0) / 2)
    assert found["policy/rollout_kl"] == pytest.approx((-1.0 - 30.0) / 2)
    assert found["policy/kl_ref"] == pytest.approx((-40.0 + 1.0) / 2)
