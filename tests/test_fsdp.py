"""On the real FSDP model: the update does not depend on how it is cut up. float32; tolerance 2e-6 on a gradient of norm about 1."""

import math
import os
import signal

import pytest
import torch

import grpo
from batch import pack
from distributed_gradient import off_policy_shift
from fsdp_utils import avoid_broken_amx
from helpers import make_rollout, torchrun
from policy import load_policy

TOLERANCE = {"atol": 2e-6, "rtol": 1e-4}


@pytest.fixture(scope="module")
def results(policy, tmp_path_factory):
    """World size -> {variant: (metrics, gradients)}."""
    folder = tmp_path_factory.mktemp("gradients")
    for num_ranks in (1, 2):
        torchrun(num_ranks, "tests/distributed_gradient.py", policy, folder / f"{num_ranks}.pt")
    return {num_ranks: torch.load(folder / f"{num_ranks}.pt") for num_ranks in (1, 2)}


def test_loss_and_gradient_are_those_of_the_plain_formula_on_one_process(results, policy):
    model = load_policy(str(policy), torch.float32)
    reference = load_policy(str(policy), torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    batch = pack(make_rollout(), list(range(8)))
    logprobs = model(batch, 1.0)[0]
    old = logprobs.detach() + off_policy_shift(batch)
    per_token = grpo.policy_loss(logprobs, old, batch.advantages_N, 0.2, 0.3)[0]
    per_token = per_token + 0.1 * grpo.kl_k3(logprobs, reference(batch, 1.0)[0].detach())
    loss = per_token[batch.loss_mask_N].mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    assert math.sqrt(sum(g.square().sum() for g in gradients)) > 0.05, "a gradient this small would hide a difference"
    for world_results in results.values():
        for metrics, found in (result for case, result in world_results.items() if case != "three sequences"):
            assert metrics["policy/loss"] == pytest.approx(loss.item(), abs=1e-6)
            for a, b in zip(found, gradients, strict=True):
                torch.testing.assert_close(a, b, **TOLERANCE)


def test_neither_cap_nor_order_nor_world_size_changes_any_metric(results):
    everything = [metrics for found in results.values() for case, (metrics, _) in found.items() if case != "three sequences"]
    assert len(everything) == 16
    for metrics in everything[1:]:
        assert metrics == pytest.approx(everything[0], abs=1e-5)
    assert everything[0]["policy/kl_ref"] > 1e-4
    assert everything[0]["policy/entropy"] > 0.5
    assert 0.2 < everything[0]["policy/clip_frac"] < 0.8, "clipping took part"


@pytest.mark.parametrize(("status", "is_avoided"), [(signal.SIGILL, True), (0, False)])
def test_amx_is_avoided_exactly_where_a_child_that_uses_it_dies(status, is_avoided, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "restored after the test")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(os, "fork", lambda: 12345)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (pid, int(status)))
    avoid_broken_amx()
    assert torch.cpu._is_amx_tile_supported() is not is_avoided
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == ("AVX512_CORE_BF16" if is_avoided else None)


def test_a_rank_with_nothing_left_to_train_changes_nothing(results):
    (alone, alone_gradients), (together, gradients) = results[1]["three sequences"], results[2]["three sequences"]
    assert together == pytest.approx(alone, abs=1e-5)
    for a, b in zip(gradients, alone_gradients, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
