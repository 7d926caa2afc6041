"""On the real FSDP model: how the update is cut up does not matter. fp32; tolerance 2e-6 on a gradient of norm 1."""

import math
from dataclasses import replace

import pytest
import torch

import grpo
from algorithm import algorithm_of
from batch import pack
from extras.teacher.vocabulary import run
from helpers.distributed import ALGORITHMS, COPIES, LEFT_OUT, args_of, off_policy, on_ranks, reference_of, rollout_of
from helpers.made_up import load_policy
from update import with_advantages

TOLERANCE = {"atol": 2e-6, "rtol": 1e-4}


@pytest.fixture(scope="module")
def results(policy):
    """World size -> {algorithm: {case: (metrics, gradients)}}."""
    return {num_ranks: on_ranks(num_ranks, "distributed:gradients", policy) for num_ranks in (1, 2)}


def whole_cases(results: dict, algorithm: str) -> list[tuple[dict, dict]]:
    cases = [item for found in results.values() for item in found[algorithm].items()]
    return [result for case, result in cases if case != "three sequences"]


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(gradient.float().square().sum() for gradient in gradients.values()))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_and_gradient_equal_one_process_with_one_batch(algorithm, results, policy):
    """The weights of the sequences are written out here; for the equations see test_grpo.py."""
    model, rollout = load_policy(policy), rollout_of("any")
    settings = algorithm_of(args_of(algorithm))
    batch = with_advantages(rollout, pack(rollout, list(range(8))))
    teacher = run(reference_of(policy), settings.kl_direction, 1.0, batch) if algorithm == "distill" else None
    scores = model(batch, 1.0, True, teacher)
    logprobs_N = scores.logprobs_N
    batch = off_policy(replace(batch, old_logprobs_N=logprobs_N.detach()))
    if teacher:
        batch = replace(batch, ref_logprobs_N=scores.distilled.ref_logprobs_N, distilled=scores.distilled)
    elif settings.kl_coef:
        batch = replace(batch, ref_logprobs_N=reference_of(policy)(batch, 1.0)[0])
    t = grpo.tokens_of(batch, logprobs_N, batch.old_logprobs_N, scores.entropies_N)
    losses = [values[4 - 1 :] for values in grpo.total_loss(batch, t, settings).per_token.split(batch.lengths_S)]
    losses = [losses[b] for b in range(8) if algorithm != "reinforce" or b not in LEFT_OUT]
    if algorithm in ("clip", "gspo_token", "distill"):
        loss = torch.cat(losses).mean()
    else:
        loss = sum(each.sum() / 12 if algorithm == "cispo" else each.mean() for each in losses) / len(losses)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert norm_of(gradients) > 0.05, "a gradient this small would hide a difference"
    for metrics, found in whole_cases(results, algorithm):
        assert metrics["policy/loss"] == pytest.approx(loss.item(), abs=1e-6)
        torch.testing.assert_close(found, gradients, **TOLERANCE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_neither_cap_nor_order_nor_world_size_changes_any_metric(algorithm, results):
    first, *others = everything = [dict(metrics) for metrics, _ in whole_cases(results, algorithm)]
    assert len(everything) == 10
    idle = [metrics.pop("perf/update_idle_frac") for metrics in everything]  # of the packing itself
    assert all(0 <= share < 0.5 for share in idle)
    assert all(metrics == pytest.approx(first, abs=1e-5) for metrics in others)
    assert first["policy/ratio_max"] > 1.01 and first["policy/ratio_min"] < 0.99
    assert 0 < first["policy/rollout_ess"] < 0.9
    assert algorithm != "distill" or (first["distill/kl"] > 1e-4 and 0.1 < first["distill/agreement"] < 1)
    if algorithm in ("sapo", "reinforce"):
        assert first["policy/clip_frac"] == 0
    else:
        assert 0.2 < first["policy/clip_frac"] < 0.8, "clipping took part"
        parts = first["policy/clip_frac_low"] + first["policy/clip_frac_high"]
        assert first["policy/clip_frac"] == pytest.approx(parts)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_with_nothing_left_to_train_changes_nothing(algorithm, results):
    (alone, alone_gradients), (together, gradients) = (results[n][algorithm]["three sequences"] for n in (1, 2))
    idle = [metrics.pop("perf/update_idle_frac") for metrics in (alone, together)]
    positions = 1 - (15 + 14 + 12) / (2 * (15 + 12))  # attention is little of the cost
    assert idle == pytest.approx([0, positions], abs=0.02)
    assert together == pytest.approx(alone, abs=1e-5)
    torch.testing.assert_close(gradients, alone_gradients, **TOLERANCE)


@pytest.fixture(scope="module")
def meshes(policy):
    return on_ranks(4, "distributed:copies", policy)


@pytest.mark.parametrize("case", COPIES)
def test_copies_of_the_policy_train_as_one(case, meshes):
    """Two replicas of two shards, and four replicas, against one dimension."""
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if "bfloat16" in case else TOLERANCE
    one, *tensors = meshes[case][None]
    assert all(metrics["optim/grad_norm"] > 0.1 for metrics in one), "clipping took part"
    assert norm_of(tensors[0]) == pytest.approx(0.05, rel=0.01)
    for shard_ranks in (2, 1):
        metrics, *found = meshes[case][shard_ranks]
        for a, b in zip(metrics, one, strict=True):
            assert a == pytest.approx(b, abs=tolerance["atol"], rel=tolerance["rtol"])
        torch.testing.assert_close(found, tensors, **tolerance)
