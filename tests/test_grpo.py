"""The algorithm's tensor functions against values worked out by hand."""

import math

import torch

from grpo import group_advantages, kl_k3, masked_sum, policy_loss


def test_advantages_are_standardised_with_ddof_1_and_eps_1e_6():
    rewards_PG = torch.tensor([[1.0, 0, 0, 0, 0], [0, 2.0, 2, 0, 1]])
    mean, std = 0.2, math.sqrt((0.8**2 + 4 * 0.2**2) / 4)
    expected = [0.8 / (std + 1e-6)] + [-mean / (std + 1e-6)] * 4
    advantages = group_advantages(rewards_PG)
    torch.testing.assert_close(advantages[0], torch.tensor(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(advantages[0], torch.tensor([1.78885, -0.44721, -0.44721, -0.44721, -0.44721]), atol=1e-4, rtol=0)
    torch.testing.assert_close(advantages[1], torch.tensor([-1.0, 1, 1, -1, 0]), atol=1e-5, rtol=0)


def test_a_group_of_equal_rewards_has_exactly_zero_advantage():
    rewards_PG = torch.full((3, 7), 0.1)  # 0.1 * 7 / 7 is not 0.1 in float32
    assert group_advantages(rewards_PG).eq(0).all()


def test_k3_is_clamped_and_matches_published_values():
    x = torch.tensor([1.0, -1.0, 0.5, 3.0, 0.0])
    torch.testing.assert_close(kl_k3(-x, torch.zeros(5)), torch.tensor([0.71828, 0.36788, 0.14872, 10.0, 0.0]), atol=1e-5, rtol=0)
    assert torch.isfinite(kl_k3(torch.tensor([-200.0, 200.0]), torch.zeros(2))).all()


def test_the_kl_term_has_the_gradient_one_minus_exp_ref_minus_logprob():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    kl_k3(logprobs, torch.tensor([-2.0, -1.5])).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([1 - math.exp(-1), 1 - math.exp(0.5)]), atol=1e-6, rtol=0)


def test_the_ratio_is_clipped_on_the_side_that_would_reward_going_further():
    old = torch.zeros(6)
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0, 1.1])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 2.0])
    logprobs = ratio.log().requires_grad_()
    loss, found_ratio, is_clipped = policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(loss, torch.tensor([-1.3, -0.5, 1.5, 0.8, -1.0, -2.2]), atol=1e-6, rtol=0)
    torch.testing.assert_close(found_ratio, ratio, atol=1e-6, rtol=0)
    assert is_clipped.tolist() == [True, False, False, True, False, False]
    loss.sum().backward()
    assert logprobs.grad[is_clipped].eq(0).all()
    torch.testing.assert_close(logprobs.grad[~is_clipped], (-advantages * ratio)[~is_clipped], atol=1e-6, rtol=0)


def test_masked_positions_have_exactly_zero_gradient_also_beside_inf_and_nan():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    poisoned = values * torch.tensor([1.0, math.inf, math.nan])
    total = masked_sum(poisoned, torch.tensor([True, False, False]))
    total.backward()
    assert total.item() == 1.0
    assert values.grad[0].item() == 1.0
    clean = torch.tensor([1.0, 2.0], requires_grad=True)
    masked_sum(clean, torch.tensor([True, False])).backward()
    assert clean.grad.tolist() == [1.0, 0.0]


def test_arguments_are_left_as_they_were():
    logprobs, old, advantages = torch.randn(5), torch.randn(5), torch.randn(5)
    copies = [x.clone() for x in (logprobs, old, advantages)]
    policy_loss(logprobs, old, advantages, 0.2, 0.2)
    kl_k3(logprobs, old)
    group_advantages(advantages[None])
    masked_sum(logprobs, logprobs > 0)
    for before, after in zip(copies, (logprobs, old, advantages), strict=True):
        assert before.equal(after)
