"""Between rollout and loss: advantages, KL penalties, weights, which log-probs are computed."""

import copy
import itertools
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import grpo
import update
from algorithm import algorithm_of
from batch import Rollout, Update
from extras.losses.k3_plus import k3_plus
from extras.teacher.penalties import gather_penalties
from flags import Memory
from gate.own import guarded, handed_out, own_code
from grpo import Loss, Tokens
from helpers import made_up
from helpers.made_up import ALONE, RAGGED, flags, load_policy, make_grade, make_rollout, make_row
from helpers.runs import ROOT
from metrics import token_metrics
from packing import pack, to_positions
from policy import Policy
from runtime.rank import PLACE, OwnCodeError, RunError
from schedule import make_plan
from update import UpdateGuard, add_advantages, compute_advantages, pack_updates

PENALTIES = [np.array(p, dtype=np.float32) for p in ([0.1, 0.2], [0.3], [0.0, 0.1, 0.1], [0.2, 0.4])]


def graded(*rewards: float, lengths: tuple[int, ...] = (2, 1, 3, 2), group_size: int = 1) -> Rollout:
    grades = [make_grade(reward) for reward in rewards or (1, 0, 0, 1)]
    return replace(make_rollout(lengths, group_size=group_size), grades=grades, advantages=[])


def test_reinforce_plus_plus_standardises_over_all_trained_tokens():
    rollout, algorithm = graded(), algorithm_of(flags(advantage="reinforce++", group_size=2))
    left_out = replace(graded(1, 0, 100, 0), is_trained_B=np.array([True, True, False, True]))
    for each, penalties, returns in (
        (rollout, None, [[1, 1], [0], [0, 0, 0], [1, 1]]),
        (rollout, PENALTIES, [[1 - 0.3, 1 - 0.2], [0 - 0.3], [0 - 0.2, 0 - 0.2, 0 - 0.1], [1 - 0.6, 1 - 0.4]]),
        (left_out, None, [[1, 1], [0], [], [0, 0]]),
    ):
        found, values = compute_advantages(each, penalties, algorithm), sum(returns, [])
        expected = (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
        trained = [x for x, own in zip(found, returns, strict=True) if own]
        assert [len(x) for x in found] == [2, 1, 3, 2]
        assert np.concatenate(trained).tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert found[2].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("kind", "expected"), [
    # 2 trained tokens of one sequence in the first update; 3 and 2 of two sequences in the second
    ("token_mean", [1 / 2, 1 / 5, 1 / 5]),
    ("seq_mean_token_mean", [1 / 2, 1 / 6, 1 / 4]),
    ("seq_mean_token_sum_norm:constant=10", [1 / 10, 1 / 20, 1 / 20]),
    ("prompt_mean", [1 / 2, 1 / 5, 1 / 5]),
])  # fmt: skip
def test_every_update_has_the_weights_of_its_own_sequences(kind, expected):
    rollout = replace(graded(), is_trained_B=np.array([True, False, True, True]))
    args = flags(**TWO_UPDATES | {"group_size": 2}, micro_batch_tokens=100, loss_aggregation=kind)
    plan, policy = make_plan(args, num_rows=2), Namespace(parity_length=math.inf)
    updates = pack_updates(rollout, plan, algorithm_of(args), Memory.from_flags(args), policy, ALONE)
    assert [update[0].update_tokens for update in updates] == [2, 5]
    found = [{}, {}]  # of each update: sequence -> the weight of its tokens
    for weights_S, each in zip(found, updates, strict=True):
        (batch,) = each
        for x, weights in zip(batch.segments_S, batch.loss_weights_N.split(batch.lengths_S), strict=True):
            weights_S[x.index] = weights[0].item()
    assert [weights_S.keys() for weights_S in found] == [{0, 1}, {2, 3}]
    assert [found[0][0], found[1][2], found[1][3]] == pytest.approx(expected)


def test_an_advantage_knows_the_step_and_the_columns_of_the_rows():
    """Prompts count by a pass rate: that of the group, or that of a column, as the run goes on."""
    rows = [make_row([1], columns={"pass_rate": rate}) for rate in ("1", "1", "0.5", "0.5")]
    grades = [make_grade(r, is_correct=c) for r, c in ((1, 1), (0, 1), (0, 0), (1, 1))]
    rollout, file = replace(graded(), rows=rows, grades=grades), f"{ROOT}/docs/advantages/pass_rate.py"
    plain = 0.5 / (0.5**0.5 + 1e-6)
    hard = algorithm_of(flags(advantage=f"{file}:hard", group_size=2))
    found = [x[0] for x in compute_advantages(rollout, None, hard)]
    assert found == pytest.approx([0, 0, -plain, plain], abs=1e-6), "2 x (1 - 1) and 2 x (1 - 0.5)"
    easy_first = algorithm_of(flags(advantage=f"{file}:curriculum", group_size=2))
    for step, targets in ((1, 1.0), (2, 0.5), (3, 0.0)):
        weights = [math.exp(-(((rate - targets) / 0.3) ** 2)) for rate in (1, 1, 0.5, 0.5)]
        found = [x[0] for x in compute_advantages(rollout, None, easy_first, step, 3)]
        wanted = [w * sign * plain for w, sign in zip(weights, (1, -1, -1, 1), strict=True)]
        assert found == pytest.approx(wanted, abs=1e-6), step


def test_an_empty_completion_is_compared_like_all():
    """It has a reward, which counts in its group, and no token that could get an advantage."""
    rollout, algorithm = graded(1, 0, lengths=(2, 0)), algorithm_of(flags(group_size=2))
    first, second = compute_advantages(rollout, None, algorithm)
    assert first == pytest.approx([0.5**0.5] * 2, abs=1e-5) and len(second) == 0


@pytest.mark.parametrize(("advantage", "words"), [
    (lambda g: g.rewards_PG.where(g.rewards_PG > 0, torch.nan), r"not finite, the first at \[0, 1\]\."),
    (lambda g: g.rewards_PG.mean(), r"the shape \[\]; needed .*\[2, 2\] or \[8\]"),
    (lambda g: g.rewards_PG > 0, "returned torch.bool without a gradient; needed are floats"),
    (lambda g: (g.rewards_PG * 1.0).requires_grad_(), "torch.float32 with a gradient; needed are floats without one"),
    (lambda g: g.parts["typo"], "in step 1: KeyError: 'typo'; parts are none; columns are none"),
    (algorithm_of(flags(advantage="maxrl")).advantage, "--advantage maxrl: a reward is -1; it needs rewards"),
])  # fmt: skip
def test_a_wrong_advantage_ends_the_run_with_its_sentence(advantage, words):
    algorithm = guarded(replace(algorithm_of(flags(group_size=2)), advantage=advantage))
    with pytest.raises(OwnCodeError, match=words):
        compute_advantages(graded(1, 0, -1, 1), None, algorithm)


@pytest.mark.parametrize(("policy_loss", "words"), [
    (lambda t: t.logprob, "in step 2: AttributeError: 'Tokens' object has no attribute 'logprob'"),
    (lambda t: t.logprobs.sum(), r"per_token has the shape \[\]; .* shape \[\d+\]: one value a token, not their mean"),
    (lambda t: Loss(t.logprobs, ratio=t.logprobs.sum()), r"ratio has the shape \[\]; needed is a tensor of the shape"),
    (lambda t: Loss(t.logprobs, metrics={"x": t.advantages.mean()}), r"in step 2: ValueError: x has the shape \[\]"),
    (lambda t: t.ref_logprobs - t.logprobs, "'Tensor'; its input is grpo.Tokens, whose ref_logprobs are None with"),
    (lambda t: t.advantages, "a loss or KL has values without a gradient; compute them from the log-probs"),
])  # fmt: skip
def test_a_wrong_loss_ends_its_step_with_a_sentence(policy_loss, words, policy):
    with pytest.raises(OwnCodeError, match=f"the loss .* fails {words}" if words.startswith("in") else words):
        next(train_step(load_policy(policy), flags(**TWO_UPDATES), graded_rollout(), policy_loss=policy_loss))


@pytest.mark.parametrize(("kl_in", "estimator", "words"), [
    ("reward", lambda x: x.typo, "^--kl_estimator fails in step 2: AttributeError.*'typo'"),
    # One number, added to each token, would have another gradient.
    ("loss", torch.mean, r"a loss or KL has the shape \[\]; .* shape \[\d+\]: one value a token, not their mean"),
])  # fmt: skip
def test_a_wrong_kl_estimator_ends_its_step_with_a_sentence(kl_in, estimator, words, policy, monkeypatch):
    monkeypatch.setattr(PLACE, "step", 2)
    args = flags(kl_coef=0.5, kl_in=kl_in, **TWO_UPDATES)
    with pytest.raises(OwnCodeError, match=words):
        next(train_step(load_policy(policy), args, graded_rollout(), kl_estimator=estimator))


@pytest.mark.parametrize("change", [
    lambda x: x.detach().zero_(), torch.no_grad()(lambda x: x.zero_()), lambda x: x.data.fill_(1),
])  # fmt: skip
def test_a_loss_that_changes_its_input_changes_nothing_else(change, policy):
    """No batch, and no KL, entropy bonus or metric of the same pass: all is as with a loss that changes nothing."""

    def careful(t):
        return -t.advantages.clone() * t.logprobs.clone()  # what the backward pass needs stays as it is

    def careless(t):
        loss, tensors = careful(t), [x for x in vars(t).values() if isinstance(x, torch.Tensor)]
        assert len(tensors) == 8
        for x in tensors:
            change(x)
        return loss

    args = flags(**TWO_UPDATES, num_iterations=2, kl_coef=0.1, entropy_coef=0.01, learning_rate=1e-2)
    reference = load_policy(policy)
    found = [
        list(train_step(load_policy(policy), args, graded_rollout(), reference, policy_loss=each))
        for each in (careful, careless)
    ]
    for ((batch,), metrics), ((other,), others) in zip(*found, strict=True):
        assert metrics == others
        for name, values in vars(batch).items():
            if isinstance(values, torch.Tensor):
                assert torch.equal(values, getattr(other, name)), name
    assert metrics["policy/kl_ref"] != 0


def test_an_advantage_that_changes_its_input_changes_nothing_else():
    """Neither the rollout, nor the rows, which come again in another epoch; nor later, what it returned."""
    kept = torch.zeros(8)

    def careless(g):
        advantages = kept.copy_(torch.repeat_interleave(grpo.dr_grpo(g).flatten(), g.lengths_B))
        for x in (g.rewards_PG, g.returns_T, g.lengths_B, g.mask_T, g.is_correct_PG, g.is_truncated_PG):
            x.zero_()
        g.columns[0]["level"].append(g.columns[0].pop("answer"))
        return advantages

    rows = [make_row([1], columns={"answer": "7", "level": [1]}) for _ in range(4)]
    rollout = replace(graded(1, 0, 0, 1), rows=rows, is_truncated_B=np.array([True, False, True, False]))
    plain = algorithm_of(flags(group_size=2, advantage="dr_grpo"))
    found = compute_advantages(rollout, None, guarded(replace(plain, advantage=careless)))
    kept.zero_()
    assert [x.tolist() for x in found] == [x.tolist() for x in compute_advantages(rollout, None, plain)]
    assert rollout.is_truncated_B.tolist() == [True, False, True, False]
    assert all(row.columns == {"answer": "7", "level": [1]} for row in rows)


def test_functions_of_ours_change_nothing_and_get_no_copies():
    """A wrapper in a file of the user's that has the name of ours is the user's."""
    x = torch.ones(3)
    assert all(handed_out(x, function) is x for function in (grpo.k2, partial(grpo.k3, kl_clamp=0.0), k3_plus))
    assert all(handed_out(x, function) is not x for function in (lambda x: x, wraps(grpo.k2)(lambda x: x), torch.abs))


@pytest.mark.parametrize("changes", [{}, {"share_prompts": True}, {"kl_coef": 0.1, "kl_over": "vocabulary"}])
def test_an_entropy_bonus_in_an_own_loss_has_the_gradient_of_the_flag(changes, policy):
    """Also where nothing else in the loss has one. To 1e-5 of it."""
    found = []
    for coefficient, own in ((0.3, lambda t: 0.0 * t.logprobs), (0.0, lambda t: -0.3 * t.entropies)):
        args = flags(entropy_coef=coefficient, learning_rate=0, **TWO_UPDATES | changes)
        found.append(
            [metrics for _, metrics in train_step(load_policy(policy), args, graded_rollout(), policy_loss=own)]
        )
    for flag, written in zip(*found, strict=True):
        assert written["policy/loss"] == pytest.approx(flag["policy/loss"], rel=1e-5)
        assert written["optim/grad_norm"] == pytest.approx(flag["optim/grad_norm"], rel=1e-5)
        assert flag["optim/grad_norm"] > 0.05


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError])
def test_an_own_error_that_speaks_of_memory_is_told_as_any_other(error):
    """What is no fault of the function is told by its type."""
    for words in ("CUDA out of memory", "the memory bank has no key 3"):
        with pytest.raises(OwnCodeError, match=f"--f fails in step 2: {error.__name__}: .*{words}"), own_code("--f", 2):
            raise error(words)
    for lack in (MemoryError, torch.OutOfMemoryError):
        with pytest.raises(lack, match="^all is taken$"), own_code("--f", 2):
            raise lack("all is taken")


@pytest.mark.parametrize(("chosen", "completions", "given"), [
    ([*range(8)] * 2, 8, "16 completions; the plan has 8, in 2 equal updates"),  # a replay buffer
    ([0, 1, 2, 3], 8, "4 completions; the plan has 8"),  # a filter
    ([0, 1, 2, 3], 4, "4 completions; the plan has 4, in 2 equal updates, each 4 in a row to one prompt. Add or"),
    ([0, 1, 2, 4, 5, 6, 7, 3], 8, "8 completions; the plan has 8"),  # as many, but of mixed groups
    ([0, 2, 4, 6], 4, "4 completions; the plan has 4"),
    ([], 0, "0 completions; the plan has 0"),
])  # fmt: skip
def test_a_rollout_that_is_not_as_the_plan_says_is_refused(chosen, completions, given):
    rollout, args, policy = graded_rollout(), flags(**TWO_UPDATES), Namespace(parity_length=math.inf)
    rows = [make_row([1, 2], where=f"line {b // 4}") for b in range(8)]
    rollout, memory = replace(rollout, rows=rows), Memory.from_flags(args)
    plan = replace(make_plan(args, num_rows=2), completions_per_step=completions)
    with pytest.raises(RunError, match=f"the rollout has {given}"):
        pack_updates(rollout.select(chosen), plan, algorithm_of(args), memory, policy, ALONE)
    more = rollout.select([4, 5, 6, 7, *range(8), 0, 1, 2, 3])
    updates = pack_updates(more, replace(plan, completions_per_step=16), algorithm_of(args), memory, policy, ALONE)
    assert [update[0].update_tokens for update in updates] == [sum(RAGGED)] * 2


def test_the_whole_penalty_is_taken_off_before_the_baseline():
    """Rewards 1, 0 and 0, 1; penalties of 0.3, 0.3 and 0.2, 0.6; completions of 2, 1, 3 and 2 tokens."""
    rollout, order = graded(), [1, 0, 2, 3]
    batch = pack(rollout, order)
    kl_N = to_positions(rollout, batch.segments_S, [penalty / 0.5 for penalty in PENALTIES])
    batch = replace(batch, old_logprobs_N=kl_N - 3, ref_logprobs_N=torch.full_like(kl_N, -3.0))
    # r - mean of group: 0.5, -0.5, -0.3, 0.3, and without the penalty 0.5, -0.5, -0.5, 0.5. Over 8
    # tokens mean 0.025 and std sqrt(1.195 / 7) = 0.413176; without it 0 and sqrt(2 / 7) = 0.534522.
    with_penalty = [1.149629] * 2 + [-1.270643] + [-0.786589] * 3 + [0.665575] * 2
    without = [0.935414] * 2 + [-0.935414] * 4 + [0.935414] * 2
    for kl_in, expected in (("reward", with_penalty), ("loss", without)):
        args = flags(advantage="reinforce++_baseline", group_size=2, kl_coef=0.5, kl_estimator="k1", kl_in=kl_in)
        algorithm, packed = algorithm_of(args), [[replace(batch, update_tokens=8)]]
        found, (placed,) = add_advantages(rollout, packed, algorithm)
        assert np.concatenate(found.advantages).tolist() == pytest.approx(expected, abs=1e-5)
        assert algorithm.has_penalties == (kl_in == "reward")
        assert placed[0].update_tokens == 8 and batch.advantages_N is None
        wanted_N = np.concatenate([np.pad(found.advantages[b], (3, 0)) for b in order])  # prompts of four tokens
        assert placed[0].advantages_N.tolist() == wanted_N.tolist()
        for penalties, wanted in zip(gather_penalties(rollout, packed, algorithm), PENALTIES, strict=True):
            assert penalties.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)


def test_the_rollout_correction_weighs_the_policy_loss_alone():
    """A = 1 and -2, ratio 1, trainer / sampler 1.5 and 8 (at most 2), KL 0.2, -0.4, entropy 2 and 1."""
    old_N = torch.tensor([-1.0, -2.0])
    logprobs_N, entropies_N = old_N.clone().requires_grad_(), torch.tensor([2.0, 1.0], requires_grad=True)
    batch = replace(
        pack(make_rollout([2], prompt_length=1), [0]),
        advantages_N=torch.tensor([1.0, -2.0]),
        rollout_logprobs_N=old_N - torch.tensor([1.5, 8.0]).log(),
        ref_logprobs_N=old_N - torch.tensor([0.2, -0.4]),
    )
    terms = {"kl_coef": 0.5, "kl_estimator": "k1", "entropy_coef": 0.25}
    for correction, expected, slopes in (  # by log-prob: -A x ratio x weight, and minus the slope of KL k1 = -x
        ("none", [-1 + 0.5 * 0.2 - 0.25 * 2, 2 - 0.5 * 0.4 - 0.25 * 1], [-1 + 0.5, 2 + 0.5]),
        ("token_truncate", [-1 * 1.5 + 0.5 * 0.2 - 0.25 * 2, 2 * 2 - 0.5 * 0.4 - 0.25 * 1], [-1.5 + 0.5, 4 + 0.5]),
    ):
        algorithm = algorithm_of(flags(rollout_correction=correction, **terms))
        t = grpo.tokens_of(batch, logprobs_N, old_N, entropies_N)
        loss = grpo.total_loss(batch, t, algorithm)
        assert loss.per_token.tolist() == pytest.approx(expected, abs=1e-6)
        kl_N = token_metrics(batch, t, loss, algorithm)["policy/kl_ref"]
        assert kl_N.tolist() == pytest.approx([0.2, -0.4], abs=1e-6)
        found = torch.autograd.grad(loss.per_token.sum(), (logprobs_N, entropies_N))
        assert found[0].tolist() == pytest.approx(slopes, abs=1e-6) and found[1].tolist() == [-0.25, -0.25]


def test_sampler_log_probs_as_old_ones_need_no_pass(policy):
    """The ratio is to them; the gap to the engine is still measured with the trainer's."""
    rollout, model = graded_rollout(), load_policy(policy)
    args = flags(old_logprobs="rollout", policy_loss="dppo", advantage="dr_grpo", learning_rate=0, **TWO_UPDATES)
    for each, metrics in train_step(model, args, rollout):
        (batch,) = each
        chosen = batch.loss_mask_N
        assert batch.old_logprobs_N is batch.rollout_logprobs_N
        own_N, sampler_N = model(batch, 1.0)[0][chosen].detach(), batch.rollout_logprobs_N[chosen]
        ratio_N = (own_N - sampler_N).exp()
        assert metrics["policy/ratio_max"] == pytest.approx(ratio_N.max().item(), rel=1e-5)
        assert metrics["policy/approx_kl"] == pytest.approx((sampler_N - own_N).mean().item(), rel=1e-4)
        gap = (own_N.exp() - sampler_N.exp()).abs()
        assert metrics["policy/rollout_gap_mean"] == pytest.approx(gap.mean().item(), rel=1e-4)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, 1), ({"kl_coef": 0.1}, 3), ({"kl_coef": 0.1, "kl_over": "vocabulary"}, 1),
    ({"kl_coef": 0.1, "kl_in": "reward"}, 4), ({"kl_coef": 0.1, "num_iterations": 2}, 4),
    ({"old_logprobs": "rollout"}, 0),
])  # fmt: skip
def test_only_needed_passes_are_made_before_two_updates(changes, expected, policy, monkeypatch):
    """For old and reference log-probs of each; what an update computes itself needs none."""
    counted = mock.Mock(side_effect=update.logprobs_under)
    monkeypatch.setattr(update, "logprobs_under", counted)
    list(train_step(load_policy(policy), flags(learning_rate=0, **TWO_UPDATES, **changes), graded_rollout()))
    assert counted.call_count == expected


def test_a_later_update_has_no_bound_on_an_unknown_gap():
    for whose, expected in (("trainer", [0.05, 0.05]), ("rollout", [0.05, 0.0])):
        plan = make_plan(flags(old_logprobs=whose, max_rollout_gap=0.05, **TWO_UPDATES), num_rows=2)
        assert [plan.update(1, i).max_rollout_gap for i in range(2)] == expected
    for changes in ({"old_logprobs": "rollout", "lora_rank": 8, "lora_dropout": 0.1}, {"partial_rollouts": True}):
        plan = make_plan(flags(max_rollout_gap=0.05, **changes), num_rows=32)
        assert plan.update(1, 0).max_rollout_gap == 0, "dropout moves it, too, and so do older tokens"


def loss_with(t: Tokens, **metrics: torch.Tensor) -> Loss:
    return Loss(-t.advantages * t.logprobs, metrics=metrics)


def test_user_functions_see_entropies_and_parts_of_the_reward(policy):
    own = {
        "policy_loss": lambda t: loss_with(t, twice=2 * t.entropies, is_up=t.logprobs > t.ref_logprobs),
        "advantage": lambda g: g.parts["short"] + g.is_correct_PG - 0.5 * g.is_truncated_PG,
    }
    parts = [{"math": b % 2} | ({"short": b / 8} if b else {}) for b in range(8)]
    grades = [make_grade(b, is_correct=b % 2 > 0, **parts[b]) for b in range(8)]
    rollout = replace(graded_rollout(), grades=grades, is_truncated_B=np.arange(8) > 5)
    model = load_policy(policy)
    for each, metrics in train_step(model, flags(kl_coef=0.1, learning_rate=0, **TWO_UPDATES), rollout, **own):
        (batch,) = each
        chosen, entropies_N = batch.loss_mask_N, model(batch, 1.0)[1]
        assert metrics["loss/twice"] == pytest.approx(2 * metrics["policy/entropy"], rel=1e-5)
        assert metrics["loss/twice"] == pytest.approx(2 * entropies_N[chosen].mean().item(), rel=1e-5)
        assert metrics["loss/is_up"] == 0
        for x, advantages_N in zip(batch.segments_S, batch.advantages_N.split(batch.lengths_S), strict=True):
            expected = x.index / 8 + x.index % 2 - 0.5 * (x.index > 5)
            assert advantages_N[-1].item() == pytest.approx(expected)


def test_metrics_that_a_loss_returns_only_sometimes_are_told(policy):
    """On another rank they would be added to other ones, or waited for."""
    names, args = itertools.cycle("ab"), flags(micro_batch_tokens=16, **TWO_UPDATES)
    own = {"policy_loss": lambda t: loss_with(t, **{next(names): t.mask})}
    with pytest.raises(RunError, match="--policy_loss returns the metrics a, b only sometimes; return all each time"):
        next(train_step(load_policy(policy), args, graded_rollout(), **own))


def train_step(
    policy: Policy, args: Namespace, rollout: Rollout, reference: Policy | None = None, **own: Callable
) -> Iterator[tuple[Update, dict[str, float]]]:
    """Each update of the second step and its metrics. Without a reference it is the policy itself.

    `own`: functions in place of those that the flags name.
    """
    plan, memory = make_plan(args, num_rows=args.prompts_per_step), Memory.from_flags(args)
    algorithm = guarded(replace(algorithm_of(args), **own))
    updates = pack_updates(rollout, plan, algorithm, memory, policy, ALONE)
    updates = update.add_logprobs(updates, policy, (reference or policy) if args.kl_coef else None, algorithm)
    rollout, updates = add_advantages(rollout, updates, algorithm, 2, args.total_steps)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for i, each in enumerate(updates * plan.num_iterations):
        step = plan.update(2, i)
        yield each, update.update_policy(policy, optimizer, each, algorithm, step, memory, UpdateGuard(ALONE))


def test_groups_without_signal_do_not_move_the_policy(policy):
    model, rollout = load_policy(policy), graded(*[0.1] * 8, lengths=RAGGED, group_size=4)
    before = copy.deepcopy(model.state_dict())
    for _, metrics in train_step(model, flags(learning_rate=1e-2, **TWO_UPDATES), rollout):
        assert metrics["policy/loss"] == metrics["optim/grad_norm"] == metrics["optim/skipped_updates"] == 0
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)


def test_the_logged_learning_rate_is_the_one_that_is_used(policy):
    """One AdamW step moves a parameter by about the rate. The optimizer is made with 1e-3."""
    before = load_policy(policy).state_dict()
    for rate, least, most in ((0.0, 0.0, 0.0), (1e-2, 0.005, 0.02)):
        model, args = load_policy(policy), flags(learning_rate=rate, **TWO_UPDATES | {"prompts_per_update": 2})
        ((_, metrics),) = train_step(model, args, graded_rollout())
        assert metrics["optim/lr"] == rate
        assert metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0
        moved = max((model.state_dict()[name] - before[name]).abs().max().item() for name in before)
        assert least <= moved <= most


TWO_UPDATES = {"prompts_per_step": 2, "prompts_per_update": 1, "group_size": 4}


def graded_rollout() -> Rollout:
    """Two prompts of four completions each, of which every second one is correct."""
    return graded(*[0, 1] * 4, lengths=RAGGED, group_size=4)


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2}, {"kl_in": "reward"}])
def test_each_pass_of_the_trainer_is_at_the_samplers_temperature(changes, policy):
    """The update's, that of old log-probs, that of the reference. The rate is 0: no weight changes."""
    plain, rollout = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32), graded_rollout()
    with torch.no_grad():
        sampled, untempered = (made_up.unpacked_logprobs(plain, rollout, temperature) for temperature in (0.7, 1.0))
    assert (sampled.exp() - untempered.exp()).abs().max() > 0.05, "another temperature would go unnoticed"
    pieces = sampled.split(rollout.completion_lengths_B.tolist())
    rollout = replace(rollout, rollout_logprobs=[piece.numpy() for piece in pieces])
    args = flags(temperature=0.7, kl_coef=0.1, learning_rate=0, **TWO_UPDATES, **changes)
    found = [metrics for _, metrics in train_step(load_policy(policy), args, rollout)]
    assert len(found) == 2 * args.num_iterations
    for metrics in found:
        assert metrics["policy/rollout_gap_max"] < 1e-5
        assert metrics["policy/kl_ref"] == pytest.approx(0, abs=1e-6)
        assert [metrics["policy/ratio_max"], metrics["policy/ratio_min"]] == pytest.approx([1, 1], abs=1e-5)


def test_a_second_pass_takes_its_ratio_to_the_first_log_probs(policy):
    model, rollout = load_policy(policy), graded_rollout()
    args = flags(num_iterations=2, learning_rate=1e-2, clip_low=0.01, clip_high=0.01, **TWO_UPDATES)
    start = copy.deepcopy(model).requires_grad_(False)
    before = copy.deepcopy(start)
    for i, (each, metrics) in enumerate(train_step(model, args, rollout)):
        (batch,) = each
        old_N, now_N = (weights(batch, 1.0)[0][batch.loss_mask_N] for weights in (start, before))
        assert batch.old_logprobs_N[batch.loss_mask_N].equal(old_N)
        smallest, largest = (now_N - old_N).exp().aminmax()
        found = metrics["policy/ratio_min"], metrics["policy/ratio_max"]
        assert found == pytest.approx((smallest.item(), largest.item()), rel=1e-5)
        assert (found == (1, 1)) == (i == 0)
        assert (found[1] > 1.05 and metrics["policy/clip_frac"] > 0.05) == (i > 0)
        before.load_state_dict(model.state_dict())


@pytest.mark.parametrize("changes", [
    {"gradient_checkpointing": True, "rollout_correction": "sequence_truncate"},
    {"share_prompts": True, "entropy_coef": 0.01, "policy_loss": "gspo"},
    {"lora_rank": 4, "lora_dropout": 0.5, "share_prompts": True, "policy_loss": "dppo_kl"},
])  # fmt: skip
def test_the_passes_never_wait_for_the_device(changes, policy):
    args = flags(model=policy, group_size=4, micro_batch_tokens=40, kl_coef=0.1, **changes)
    assert made_up.run_passes(made_up.policy_of(args), args, make_rollout(group_size=4)) > 1


def test_the_documented_step_by_hand_is_what_is_computed():
    """docs/algorithm.md: two prompts of two completions, their advantages, mask, weights and loss."""
    page = (ROOT / "docs" / "algorithm.md").read_text().partition("## One step by hand")[2].partition("\n## ")[0]
    table = re.findall(r"^\| b = \d \| ([\d ]+) \| ([\d ]+) \| (\d) \| (\S+) \| (\d) \|$", page, re.M)
    prompts, completions = ([np.array(row[i].split(), dtype=np.int32) for row in table] for i in (0, 1))
    rollout = graded(*(float(row[2]) for row in table), lengths=[len(ids) for ids in completions])
    rollout = replace(rollout, rows=[make_row(ids) for ids in prompts], completions=completions)
    algorithm = algorithm_of(flags(group_size=2))
    advantages = compute_advantages(rollout, None, algorithm)
    assert [values[0] for values in advantages] == pytest.approx([float(row[3]) for row in table], abs=5e-5)
    assert rollout.trained_lengths_B.tolist() == [int(row[4]) for row in table]
    weights_B = algorithm.loss_aggregation(torch.from_numpy(rollout.trained_lengths_B))
    assert weights_B.tolist() == [0.125] * 4
    batch = pack(replace(rollout, loss_weights_B=weights_B.numpy(), advantages=advantages), [0, 1])
    inputs, labels, mask = (
        re.search(rf"^  {name} +([\d.x| ]+)$", page, re.M)[1].replace("|", "").split()
        for name in ("inputs", "labels", "mask")
    )
    assert [batch.input_ids_N.tolist(), batch.labels_N.tolist()] == [list(map(int, inputs)), list(map(int, labels))]
    assert batch.loss_mask_N.tolist() == [mark == "x" for mark in mask]
    loss = -sum((weights_B[b] * advantages[b].sum()).item() for b in range(4))
    assert f"= {loss:.4f}." in page
