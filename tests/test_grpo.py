"""The algorithm against scalar loops written from the papers' equations, and against published values.

The `naive_...` functions are those loops. Expected gradients are their central differences; a paper's stop-gradient
sg[...] is an argument of its own (`frozen`), which the differences leave alone.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import grpo
from algorithm import NAMES, algorithm_of, choose, parameters_of
from extras.losses.gspo import gspo_token_ratio, sequence_ratio
from extras.losses.reinforce_pp import whitened
from grpo import Groups, Loss, Tokens, masked_sum
from helpers.made_up import RAGGED as LENGTHS
from helpers.made_up import flags, make_rollout
from metrics import token_metrics
from packing import pack

Floats = list[float]
UNTRAINED = 4  # the sequence of which no token is trained
ADVANTAGES = ["grpo", "grpo_batch_std", "dr_grpo", "rloo", "maxrl"]
LOSSES = ["clip", "gspo", "gspo_token", "cispo", "sapo", "dppo", "dppo_kl", "reinforce"]
CORRECTIONS = ["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]
ESTIMATORS = [kind for kind in NAMES["--kl_estimator"] if kind != "none"]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]

each_seed = pytest.mark.parametrize("seed", range(4))


class Case(SimpleNamespace):
    """Random packed tokens of 8 ragged sequences, and the rewards of 4 groups of 5."""

    @property
    def packing(self) -> tuple[Tensor, Tensor]:
        return self.mask_N, self.sequence_ids_N

    def sequence(self, t: int) -> list[int]:
        """The trained tokens of the sequence of token t."""
        return (self.mask_N & (self.sequence_ids_N == self.sequence_ids_N[t])).nonzero()[:, 0].tolist()


def make_case(seed: int, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(seed)
    sequence_ids_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sum(LENGTHS), generator=generator, dtype=dtype)

    mask_N = torch.rand(sum(LENGTHS), generator=generator) < 0.7
    mask_N[torch.tensor(LENGTHS).cumsum(0) - 1] = True  # a token of each sequence, ...
    mask_N[sequence_ids_N == UNTRAINED] = False  # ... but for one
    old_logprobs_N = noise(0.5) - 3.0
    logprobs_N = (old_logprobs_N + noise(0.8)).clamp(max=-0.01)  # a third of ratios is in 0.7 to 1.4
    logprobs_N[0] = old_logprobs_N[0] = -5.0
    logprobs_N[0] += 3.2  # a ratio of 24: DPPO's weights are at most 20
    trained_lengths_B = torch.zeros(len(LENGTHS), dtype=torch.int64).index_add(0, sequence_ids_N, mask_N.long())
    return Case(
        logprobs_N=logprobs_N, old_logprobs_N=old_logprobs_N, ref_logprobs_N=old_logprobs_N + noise(0.8),
        rollout_logprobs_N=old_logprobs_N + noise(0.8), advantages_N=noise(1.0), mask_N=mask_N,
        sequence_ids_N=sequence_ids_N, lengths_B=trained_lengths_B,
        rewards_PG=torch.rand(4, 5, generator=generator, dtype=dtype),
    )  # fmt: skip


def assert_near(found: Tensor, expected: object, tolerance: float) -> None:
    """Error at most tolerance * (1 + |expected|), everywhere."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.detach().double(), expected, atol=tolerance, rtol=tolerance)


def central_differences(function: Callable[[list[float]], float], at: list[float], step: float = 1e-5) -> list[float]:
    """The gradient. Its error is about 1e-9 for functions of size 1: compared to 1e-7."""

    def moved(i: int, by: float) -> float:
        return function([value + by if j == i else value for j, value in enumerate(at)])

    return [(moved(i, step) - moved(i, -step)) / (2 * step) for i in range(len(at))]


# The choices of `grpo.py`, called by name, with the values that are among their parameters ----------------------------

TOKENS = "logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask", "sequence_ids"
VALUES = {
    "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 0.0, "tau_pos": 1.0, "tau_neg": 1.25, "constant": 12.0,
    "max_completion_tokens": 100,
}  # fmt: skip


def tokens_of(*fields: Tensor | None) -> Tokens:
    return Tokens(**dict(zip(TOKENS, fields, strict=True)))


def call(flag: str, kind: str, argument: object, **values: float) -> object:
    function, values = choose(flag, kind), VALUES | values
    return function(argument, **{name: values[name] for name in parameters_of(function)})


def advantages(rewards_PG: Tensor, kind: str, ddof: int, eps: float) -> Tensor:
    """A group in each row, of completions of one token."""
    ones_B = torch.ones(rewards_PG.numel(), dtype=torch.int64)
    graded = Groups(rewards_PG=rewards_PG, returns_T=rewards_PG.flatten(), lengths_B=ones_B, mask_T=ones_B.bool())
    return call("--advantage", kind, graded, advantage_ddof=ddof, advantage_eps=eps)


def loss_of(case: Case, logprobs_N: Tensor, kind: str, **values: float) -> Loss:
    t = tokens_of(logprobs_N, case.old_logprobs_N, case.rollout_logprobs_N, case.advantages_N, *case.packing)
    return grpo.as_loss(call("--policy_loss", kind, t, **values), t)


def kl(x: Tensor, kind: str, clamp: float) -> Tensor:
    return call("--kl_estimator", kind, x, kl_clamp=clamp)


def correction(old: Tensor, rollout: Tensor, packing: tuple, kind: str, low: float, high: float) -> tuple:
    """(weights, which of them are truncated or 0)."""
    tokens = tokens_of(None, old, rollout, None, *packing)
    return call("--rollout_correction", kind, tokens, smallest=low, largest=high)


# The papers' equations, of a case, its log-probs, and the same where they are sg[...] ---------------------------------


def naive_std(values: list[float], ddof: int) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def naive_advantages(case: Case, _: Floats, __: Floats, kind: str, ddof: int, eps: float) -> list[Floats]:
    """GRPO: DeepSeekMath 4.1.2. Batch std: Lite PPO. Dr. GRPO: 3.2. RLOO: 2.3, the other k - 1. MaxRL: by the mean."""
    groups, result = case.rewards_PG.tolist(), []
    for group in groups:
        mean = sum(group) / len(group)
        others = [(sum(group) - reward) / (len(group) - 1) for reward in group]
        baselines = others if kind == "rloo" else [mean] * len(group)
        scales = {"grpo": naive_std(group, ddof) + eps, "grpo_batch_std": naive_std(sum(groups, []), ddof) + eps}
        scale = (scales | {"maxrl": mean}).get(kind, 1.0)
        result.append([(reward - baseline) / scale for reward, baseline in zip(group, baselines, strict=True)])
    return result


def naive_whitened(case: Case, *_: Floats, ddof: int, eps: float) -> Floats:
    """REINFORCE++, later eq. 5: (A - mean) / std over the batch, here over trained tokens, eps beside the std."""
    pairs = list(zip(case.advantages_N.tolist(), case.mask_N.tolist(), strict=True))
    chosen = [value for value, is_trained in pairs if is_trained]
    mean, std = math.fsum(chosen) / len(chosen), naive_std(chosen, ddof)
    return [(value - mean) / (std + eps) if is_trained else 0.0 for value, is_trained in pairs]


def naive_ratios(case: Case, logprobs: Floats, frozen: Floats, kind: str) -> Floats:
    """PPO section 3: pi(token) / pi_old(token). GSPO eq. 7: (pi(y) / pi_old(y))^(1 / |y|), the product over the trained
    tokens of a sequence. GSPO-token, eq. 14: sg[that] * pi(token) / sg[pi(token)].
    """
    read = frozen if kind == "gspo_token" else logprobs
    ratios, result = [math.exp(a) / math.exp(b) for a, b in zip(read, case.old_logprobs_N.tolist(), strict=True)], []
    for t, is_trained in enumerate(case.mask_N.tolist()):
        own, moved = case.sequence(t), math.exp(logprobs[t]) / math.exp(read[t])
        result.append(math.prod(ratios[u] for u in own) ** (1.0 / len(own)) * moved if is_trained else 1.0)
    return result if kind.startswith("gspo") else ratios


def clip(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


def naive_losses(
    case: Case, logprobs: Floats, frozen: Floats, kind: str, clip_low: float = 0.2, clip_high: float = 0.3,
    dual_clip: float = 0.0, tau_pos: float = 1.0, tau_neg: float = 1.25,
) -> Floats:  # fmt: skip
    """Minus PPO eq. 7, min(r A, clip(r) A), with DAPO's two bounds; where A < 0 at least c A, dual-clip PPO eq. 5.

    Minus CISPO eq. 4, sg[clipped r] A log pi, with the clipped r of eq. 5. Minus SAPO eq. 5, f(r) A, with the gate f(r)
    = sigmoid(tau (r - 1)) 4 / tau. REINFORCE (Williams, 1992): -A log pi. DPPO: -M sg[min(r, 20)] A log pi, with M = 0
    where A moves pi on, away from pi_old, and the divergence (total variation or KL(old || new)) is above its bound.
    """
    ratios, frozen_ratios = naive_ratios(case, logprobs, frozen, kind), naive_ratios(case, frozen, frozen, "clip")
    losses = []
    for t, (ratio, advantage) in enumerate(zip(ratios, case.advantages_N.tolist(), strict=True)):
        if kind == "sapo":
            gate = tau_pos if advantage > 0 else tau_neg
            losses.append(-4.0 / gate / (1.0 + math.exp(-gate * (ratio - 1.0))) * advantage)
        elif kind.startswith("dppo"):
            p, old_p, is_up = math.exp(frozen[t]), math.exp(case.old_logprobs_N[t].item()), frozen_ratios[t] > 1.0
            binary_kl = old_p * math.log(old_p / p) + (1.0 - old_p) * math.log((1.0 - old_p) / (1.0 - p))
            divergence = abs(p - old_p) if kind == "dppo" else binary_kl
            is_masked = divergence > (clip_high if is_up else clip_low) and is_up == (advantage > 0)
            losses.append(0.0 if is_masked else -min(frozen_ratios[t], 20.0) * advantage * logprobs[t])
        elif kind == "cispo":
            losses.append(-clip(frozen_ratios[t], 1 - clip_low, 1 + clip_high) * advantage * logprobs[t])
        elif kind == "reinforce":
            losses.append(-advantage * logprobs[t])
        else:
            objective = min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)
            losses.append(-max(objective, dual_clip * advantage) if dual_clip and advantage < 0 else -objective)
    return losses


def naive_kl(case: Case, logprobs: Floats, frozen: Floats, kind: str, clamp: float) -> Floats:
    """Schulman (2020), r = pi_ref / pi: k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r; GRPO's eq. 4 is k3.

    k3+: k3, but the gradient is that of k2.
    """

    def k3(x: float) -> float:
        x = clip(x, -20.0, 20.0) if clamp else x
        value = (math.exp(x) - 1.0) - x
        return clip(value, -clamp, clamp) if clamp else value

    result = []
    for ref, new, sg in zip(case.ref_logprobs_N.tolist(), logprobs, frozen, strict=True):
        x, frozen_x = ref - new, ref - sg
        k3_plus = k3(frozen_x) + x**2 / 2.0 - frozen_x**2 / 2.0
        result.append({"k1": -x, "k2": x**2 / 2.0, "k3": k3(x), "k3+": k3_plus}[kind])
    return result


def naive_correction(case: Case, *_: Floats, kind: str, low: float, high: float) -> list[Floats]:
    """Yao et al. (2025): min(pi_old / pi_rollout, C). IcePop (Ring-1T): the ratio within [alpha, beta], else 0.

    Below the weights: whether a bound has changed each of them, 0 or 1. Every case has ratios beyond both bounds.
    """
    pairs = zip(case.old_logprobs_N.tolist(), case.rollout_logprobs_N.tolist(), strict=True)
    ratios, token_weights = [math.exp(a) / math.exp(b) for a, b in pairs], []
    for t, is_trained in enumerate(case.mask_N.tolist()):
        own = case.sequence(t) if kind.startswith("sequence") else [t] * is_trained
        token_weights.append(math.prod(ratios[u] for u in own))
    assert min(token_weights) < low and max(token_weights) > high
    if kind.endswith("mask"):
        weights = [ratio if low <= ratio <= high else 0.0 for ratio in token_weights]
    else:
        weights = [min(ratio, high) if kind.endswith("truncate") else ratio for ratio in token_weights]
    return [weights, [float(a != b) for a, b in zip(weights, token_weights, strict=True)]]


def naive_aggregate(case: Case, *_: Floats, kind: str, constant: float) -> float:
    """The loss of an update, the tokens' losses being the advantages. An untrained sequence is none.

    DAPO eq. 12: the sum over all tokens / their number. GRPO eq. 3: the mean over sequences of the mean over tokens.
    Dr. GRPO: the mean over sequences of the sum over tokens / a constant.
    """
    values, firsts = case.advantages_N.tolist(), [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]
    losses = [[values[t] for t in case.sequence(first)] for first in firsts if case.sequence(first)]
    if kind == "token_mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if kind == "seq_mean_token_mean":
        return sum(sum(sequence) / len(sequence) for sequence in losses) / len(losses)
    return sum(sum(sequence) / constant for sequence in losses) / len(losses)


# What is tested: (function of a case and its log-probs, its equation, its settings) -----------------------------------

STD = [{"ddof": ddof, "eps": eps} for eps in (1e-6, 0.1) for ddof in (1, 0)]
LOSS_SETTINGS = [
    *[{"kind": kind} for kind in LOSSES], {"kind": "clip", "dual_clip": 1.7},
    {"kind": "sapo", "tau_pos": 0.5, "tau_neg": 2.0},  # binary fractions: a tau is rounded to float32
    {"kind": "dppo", "clip_low": 0.01, "clip_high": 0.03}, {"kind": "dppo_kl", "clip_low": 0.002, "clip_high": 0.01},
]  # fmt: skip
KL_SETTINGS = [{"kind": kind, "clamp": clamp} for kind in ESTIMATORS for clamp in (0.0, 0.5, 10.0)]
DIFFERENTIABLE = [  # by the log-probs
    *[(lambda c, x, **values: loss_of(c, x, **values).per_token, naive_losses, each) for each in LOSS_SETTINGS],
    *[(lambda c, x, **values: kl(c.ref_logprobs_N - x, **values), naive_kl, each) for each in KL_SETTINGS],
]
EQUATIONS = [
    *DIFFERENTIABLE,
    *[
        (lambda c, _, **values: advantages(c.rewards_PG, **values), naive_advantages, {"kind": kind} | each)
        for kind in ADVANTAGES for each in STD
    ],
    *[(lambda c, _, **values: whitened(c.advantages_N, c.mask_N, **values), naive_whitened, each) for each in STD],
    *[
        (
            lambda c, _, **values: torch.stack(correction(c.old_logprobs_N, c.rollout_logprobs_N, c.packing, **values)),
            naive_correction, {"kind": kind, "low": 0.7, "high": 1.5},
        )
        for kind in CORRECTIONS
    ],
]  # fmt: skip


def name_of(part: object) -> str:
    return part.__name__ if callable(part) else str(part)


@each_seed
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize(("function", "equation", "settings"), EQUATIONS, ids=name_of)
def test_values_equal_the_papers_equations(function, equation, settings, dtype, tolerance, seed):
    case, logprobs = make_case(seed, dtype), make_case(seed, dtype).logprobs_N.tolist()
    found = function(case, case.logprobs_N, **settings)
    assert_near(found, equation(case, logprobs, logprobs, **settings), tolerance)
    assert found.dtype == dtype
    for name, value in vars(make_case(seed, dtype)).items():
        assert getattr(case, name).equal(value), f"{name} was changed"


@each_seed
@pytest.mark.parametrize(("function", "equation", "settings"), DIFFERENTIABLE, ids=name_of)
def test_gradients_are_those_of_the_papers_equations(function, equation, settings, seed):
    case = make_case(seed)
    frozen, scale_N = case.logprobs_N.tolist(), torch.linspace(0.5, 1.5, sum(LENGTHS), dtype=torch.float64)

    def total(logprobs: Floats) -> float:
        values = torch.tensor(equation(case, logprobs, frozen, **settings), dtype=torch.float64)
        return (scale_N * values).sum().item()

    logprobs_N = case.logprobs_N.clone().requires_grad_()
    (scale_N * function(case, logprobs_N, **settings)).sum().backward()
    assert_near(logprobs_N.grad, central_differences(total, frozen), tolerance=1e-7)


@each_seed
@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("constant", [12.0, 4.0])
def test_weighted_token_losses_add_up_to_the_papers_aggregation(constant, kind, seed):
    case = make_case(seed)
    weights_B = call("--loss_aggregation", kind, case.lengths_B, constant=constant)
    total = masked_sum(weights_B[case.sequence_ids_N] * case.advantages_N, case.mask_N)
    assert weights_B.dtype == torch.float32
    of_nothing_B = call("--loss_aggregation", kind, torch.zeros(3).long())  # no token is trained
    assert of_nothing_B.shape == (3,) and of_nothing_B.isfinite().all()
    assert total.item() == pytest.approx(naive_aggregate(case, kind=kind, constant=constant), abs=1e-6)


# Values worked by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])  # 0.1 * 7 / 7 is not 0.1 in float32
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(kind, reward):
    for ddof, eps in product((0, 1), (1e-6, 0.0)):
        assert advantages(torch.full((3, 7), reward), kind, ddof, eps).eq(0).all()
        first, second = advantages(torch.tensor([[reward] * 7, [reward] * 6 + [5.0]]), kind, ddof, eps)
        assert first.eq(0).all() and second.ne(0).all() and second.isfinite().all()


@pytest.mark.parametrize("outside", [5.0, 1e6, -math.inf, math.nan])
def test_whitening_does_not_look_outside_the_mask(outside):
    found = whitened(torch.tensor([1.0, 2.0, 3.0, outside]), torch.arange(4) < 3, 1, 1e-6)
    assert_near(found, [-1.0, 0.0, 1.0, 0.0], tolerance=1e-5)
    assert found[3].item() == 0.0
    for num_values, ddof in product((0, 1, 7), (0, 1)):
        mask = torch.arange(9) < num_values
        assert whitened(torch.where(mask, 0.1, outside), mask, ddof, 1e-6).eq(0).all()


def test_whitening_keeps_digits_that_float32_sums_would_lose():
    values = 1000.0 + 0.01 * torch.randn(2000, generator=torch.Generator().manual_seed(0))
    mean, std = math.fsum(values.tolist()) / 2000, naive_std(values.tolist(), ddof=1)
    found = whitened(values, torch.ones(2000, dtype=torch.bool), 1, 1e-6)
    assert_near(found, [(value - mean) / (std + 1e-6) for value in values.tolist()], tolerance=1e-5)


def test_the_default_choices_are_grpos_with_the_papers_numbers():
    default, sapo = (algorithm_of(flags(policy_loss=kind)) for kind in (None, "sapo"))
    chosen = default.advantage, default.policy_loss, default.kl_estimator, sapo.policy_loss
    assert [(each.func.__name__, parameters_of(each.func) | each.keywords) for each in chosen] == [
        ("grpo", {"advantage_ddof": 1, "advantage_eps": 1e-6}),
        ("clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}),
        ("k3", {"kl_clamp": 10.0}),
        ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ]


def test_the_log_of_a_ratio_is_clamped_at_20():
    """That of a sequence after the mean over its tokens."""
    packing = torch.tensor([True, True]), torch.tensor([0, 1])
    log_ratio, zeros = torch.tensor([30.0, -30.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for ratio in (
        grpo.token_ratio(log_ratio, zeros), sequence_ratio(log_ratio, zeros, *packing),
        gspo_token_ratio(log_ratio, zeros, *packing), correction(log_ratio, zeros, packing, "none", 0.5, 5.0)[0],
    ):  # fmt: skip
        expected = [485165195.409790, 2.061153622438558e-09]  # exp(20), exp(-20)
        assert ratio.tolist() == pytest.approx(expected, rel=1e-12)
    whole = sequence_ratio(torch.tensor([30.0, -6.0]), torch.zeros(2), packing[0], torch.tensor([0, 0]))
    assert_near(whole, [162754.79, 162754.79], tolerance=1e-5)  # exp(12)


@pytest.mark.parametrize("poison", [0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("function", [sequence_ratio, gspo_token_ratio])
def test_a_sequence_ratio_has_no_gradient_at_masked_positions(function, is_old, poison):
    """There it is 1; elsewhere the geometric mean over the trained tokens of the sequence."""
    logprobs, old_logprobs = torch.tensor([2.0, 7.0, 8.0, 5.0]).log(), torch.zeros(4)
    (old_logprobs if is_old else logprobs)[1] = poison
    logprobs.requires_grad_()
    mask, sequence_ids = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 1])
    ratio = function(logprobs, old_logprobs, mask, sequence_ids)
    ratio.sum().backward()
    assert_near(ratio, [4.0, 1.0, 4.0, 5.0], tolerance=1e-5)
    assert_near(logprobs.grad, [4.0, 0.0, 4.0, 5.0], tolerance=1e-5)
    assert ratio[1].item() == 1.0 and logprobs.grad[1].item() == 0.0


@each_seed
@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_the_ratio_is_exactly_1(kind, seed):
    single, case = make_case(seed, torch.float32), make_case(seed)
    assert loss_of(single, single.old_logprobs_N, kind).ratio.eq(1).all()
    case.advantages_N = case.advantages_N[case.sequence_ids_N]  # one for each sequence
    logprobs_N = case.old_logprobs_N.clone().requires_grad_()
    masked_sum(loss_of(case, logprobs_N, kind).per_token, case.mask_N).backward()
    assert_near(logprobs_N.grad, torch.where(case.mask_N, -case.advantages_N, 0.0), tolerance=1e-10)


@each_seed
@pytest.mark.parametrize("dual_clip", [0.0, 1.7])
def test_clipped_tokens_have_no_gradient(dual_clip, seed):
    """Of CISPO the marked tokens are those whose weight is clipped."""
    case = make_case(seed)
    for kind, low, high in (("clip", 0.2, 0.3), ("dppo", 0.01, 0.03), ("dppo_kl", 0.002, 0.01)):
        logprobs_N, bounds = case.logprobs_N.clone().requires_grad_(), {"clip_low": low, "clip_high": high}
        loss_N, ratio_N, is_low_N, is_high_N, _ = loss_of(case, logprobs_N, kind, dual_clip=dual_clip, **bounds)
        loss_N.sum().backward()
        has_no_gradient_N = logprobs_N.grad == 0
        assert (is_low_N | is_high_N).equal(has_no_gradient_N)
        assert is_low_N.equal(has_no_gradient_N & (ratio_N < 1))
        assert is_high_N.equal(has_no_gradient_N & (ratio_N > 1))
        assert is_low_N.any() and is_high_N.any() and not has_no_gradient_N.all()
    cispo = loss_of(case, case.logprobs_N, "cispo")
    assert cispo.is_low.equal(ratio_N < 0.8) and cispo.is_high.equal(ratio_N > 1.3)


def test_a_ratio_at_a_bound_or_a_zero_advantage_is_not_clipped():
    ratio = torch.tensor([0.75, 1.25, 2.0, 0.1, 1.0, 10.0], requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, -1.0, 0.0, 0.0, 0.0])
    loss, _, is_low, is_high, _ = grpo.clipped(ratio, advantages, 0.25, 0.25, 2.0)
    loss.sum().backward()
    assert not (is_low | is_high).any()
    assert ratio.grad.tolist() == (-advantages).tolist()
    assert loss[3:].eq(0).all()


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_kl_estimates_are_finite_far_from_the_reference(kind):
    x = torch.tensor([25.0, -25.0, -13.0], dtype=torch.float64)
    if kind.startswith("k3"):  # the clamp is on x at 20, and on the value
        expected = [485165174.40979, 19.0, 12.00000226]  # exp(20) - 20 - 1, exp(-20) + 20 - 1
        assert kl(x, kind, 1e12).tolist() == pytest.approx(expected, rel=1e-8)
        assert_near(kl(x, kind, 10.0), [10.0, 10.0, 10.0], tolerance=1e-12)
    x = torch.tensor([200.0, -200.0, 1e4, -1e4], requires_grad=True)
    kl(x, kind, 10.0).sum().backward()
    assert kl(x, kind, 10.0).isfinite().all() and x.grad.isfinite().all()
    if kind in ("k2", "k3+"):
        assert x.grad.equal(x.detach()), "the gradient of k2, which no clamp cuts"


def test_prompts_count_the_same_whatever_their_lengths():
    """One of three prompts is left out; a token of the others counts 1 / 2 / tokens of its prompt."""
    weights_B = grpo.prompt_mean(torch.tensor([3, 1, 0, 0, 0, 5]), group_size=2)
    assert_near(weights_B[[0, 1, 4, 5]], [1 / 8, 1 / 8, 1 / 10, 1 / 10], tolerance=1e-7)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_has_no_gradient_and_reads_trained_tokens_alone(kind):
    old, packing = torch.zeros(5, requires_grad=True), (torch.ones(5).bool(), torch.tensor([0, 0, 1, 2, 3]))
    weights, is_outside = correction(old, torch.zeros(5), packing, kind, 1.0, 1.0)
    assert weights.tolist() == [1.0] * 5 and not is_outside.any() and not weights.requires_grad
    mask = torch.tensor([True, False, True])
    for poison in (3.0, math.inf, math.nan):
        old = torch.tensor([1.5, poison, 1.0]).log()
        weights, _ = correction(old, torch.zeros(3), (mask, torch.tensor([0, 0, 1])), kind, 0.5, 2.0)
        assert_near(weights[mask], [1.5, 1.0], tolerance=1e-6)
        assert weights.isfinite().all()


@pytest.mark.parametrize("poison", [0.0, math.inf, -math.inf, math.nan])
def test_a_masked_sum_has_no_gradient_at_masked_positions(poison):
    values, mask = torch.tensor([1.0, poison, 2.0], requires_grad=True), torch.tensor([True, False, True])
    total = masked_sum(values, mask)
    total.backward()
    assert total.item() == 3.0
    assert values.grad.tolist() == [1.0, 0.0, 1.0]
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    masked_sum(values * torch.tensor([1.0, poison, 1.0]), mask).backward()  # poisoned on its way
    assert values.grad[[0, 2]].tolist() == [1.0, 1.0]


def test_kls_are_measured_without_the_clamp_of_the_loss():
    """A clamp would cut rare tokens with a large k3; the tokens that it cuts are counted."""
    old, new, sampler = torch.tensor([-1.0, -2.0]), torch.tensor([-41.0, -1.0]), torch.tensor([-2.0, -32.0])
    batch, ones = pack(make_rollout([2], prompt_length=1), [0]), torch.ones(2)
    batch = replace(batch, advantages_N=ones, rollout_logprobs_N=sampler, ref_logprobs_N=old)
    algorithm = algorithm_of(flags(kl_coef=0.1))
    t = grpo.tokens_of(batch, new, old, ones)
    means = token_metrics(batch, t, grpo.total_loss(batch, t, algorithm), algorithm)
    found = {name: values.float().mean().item() for name, values in means.items()}
    assert found["policy/kl_clamp_frac"] == 0.5
    assert found["policy/approx_kl"] == pytest.approx((40.0 - 1.0) / 2)
    assert found["policy/rollout_kl"] == pytest.approx((-1.0 - 30.0) / 2)
    assert found["policy/kl_ref"] == pytest.approx((-40.0 + 1.0) / 2)
