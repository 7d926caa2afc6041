"""On the real FSDP model: how the update is cut up does not matter. fp32; tolerance 2e-6 on a gradient of norm 1."""

import math

import pytest
import torch
from torch import Tensor

from batch import pack
from distributed_gradient import ALGORITHMS, LEFT_OUT, off_policy_shift, reference_of, rollout_of, sampler_shift
from distributed_mesh import CASES
from helpers import torchrun
from policy import load_policy
from update import with_advantages

TOLERANCE = {"atol": 2e-6, "rtol": 1e-4}


@pytest.fixture(scope="module")
def results(policy, tmp_path_factory):
    """World size -> {algorithm: {case: (metrics, gradients)}}."""
    folder = tmp_path_factory.mktemp("gradients")
    for num_ranks in (1, 2):
        torchrun(num_ranks, "tests/distributed_gradient.py", policy, folder / f"{num_ranks}.pt")
    return {num_ranks: torch.load(folder / f"{num_ranks}.pt") for num_ranks in (1, 2)}


def plain_loss(
    algorithm: str, logprobs: Tensor, old: Tensor, sampled: Tensor, ref: Tensor, entropies: Tensor, advantage: float
) -> Tensor:
    """The losses of one sequence's tokens, each formula written out once more, for the flags of `ALGORITHMS`."""
    ratio, whole = (logprobs - old).exp(), (logprobs - old).mean().exp()
    if algorithm == "clip":
        x = ref - logprobs
        return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3)) + 0.1 * (x.exp() - x - 1)
    if algorithm == "gspo":
        weight = (old - sampled).sum().exp().clamp(max=1.5)
        return (torch.maximum(-advantage * whole, -advantage * whole.clamp(0.98, 1.02)) * weight).expand(len(ratio))
    if algorithm == "gspo_token":
        token = whole.detach() * (logprobs - logprobs.detach()).exp()
        loss = torch.maximum(-advantage * token, -advantage * token.clamp(0.98, 1.02))
        return torch.minimum(loss, torch.tensor(-advantage * 1.05)) if advantage < 0 else loss
    if algorithm == "cispo":
        weight = (old - sampled).exp()
        weight = torch.where((weight >= 0.5) & (weight <= 2.0), weight, 0.0)
        return -ratio.detach().clamp(0.8, 1.15) * advantage * logprobs * weight - 0.5 * entropies
    if algorithm == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        k2 = (logprobs - ref).square() / 2  # its gradient is that of k3+
        k3 = (ref - logprobs).exp() - (ref - logprobs) - 1
        return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp()) + 0.1 * (k3.detach() + k2 - k2.detach())
    assert algorithm == "reinforce"
    return -advantage * logprobs


def aggregated(algorithm: str, losses: list[Tensor]) -> Tensor:
    if algorithm in ("clip", "gspo_token"):
        return torch.cat(losses).mean()
    if algorithm == "cispo":
        return sum(loss.sum() / 12 for loss in losses) / len(losses)
    return sum(loss.mean() for loss in losses) / len(losses)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_and_gradient_are_those_of_the_plain_formula_on_one_process(algorithm, results, policy):
    model, rollout = load_policy(str(policy), torch.float32), rollout_of("any")
    batch = with_advantages(rollout, pack(rollout, list(range(8))))
    logprobs, entropies = model(batch, 1.0, True)
    old, ref = logprobs.detach() + off_policy_shift(batch), reference_of(str(policy))(batch, 1.0)[0].detach()
    everything = (logprobs, old, old + sampler_shift(batch), ref, entropies)
    pieces = [[x[4 - 1 :] for x in values.split(batch.lengths_S)] for values in everything]
    trained = [b for b in range(8) if algorithm != "reinforce" or b not in LEFT_OUT]
    losses = [plain_loss(algorithm, *(piece[b] for piece in pieces), float(rollout.advantages[b][0])) for b in trained]
    loss = aggregated(algorithm, losses)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    assert math.sqrt(sum(g.square().sum() for g in gradients)) > 0.05, "a gradient this small would hide a difference"
    for world_results in results.values():
        for metrics, found in (
            result for case, result in world_results[algorithm].items() if case != "three sequences"
        ):
            assert metrics["policy/loss"] == pytest.approx(loss.item(), abs=1e-6)
            for a, b in zip(found, gradients, strict=True):
                torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_neither_cap_nor_order_nor_world_size_changes_any_metric(algorithm, results):
    everything = [
        metrics
        for found in results.values()
        for case, (metrics, _) in found[algorithm].items()
        if case != "three sequences"
    ]
    assert len(everything) == 24
    assert all(0 <= metrics.pop("perf/update_idle_frac") < 0.5 for metrics in everything), (
        "the one that tells of the packing itself"
    )
    for metrics in everything[1:]:
        assert metrics == pytest.approx(everything[0], abs=1e-5)
    first = everything[0]
    assert first["policy/entropy"] > 0.5
    assert first["policy/ratio_max"] > 1.01 and first["policy/ratio_min"] < 0.99
    assert abs(first["policy/approx_kl"]) > 0.001  # of tokens that no policy sampled: it may be negative
    assert 0 < first["policy/rollout_ess"] < 0.9
    assert ("policy/kl_ref" in first) == (algorithm in ("clip", "sapo"))
    assert ("policy/rollout_clip_frac" in first) == (algorithm in ("gspo", "cispo"))
    if algorithm in ("sapo", "reinforce"):
        assert first["policy/clip_frac"] == 0
    else:
        assert 0.2 < first["policy/clip_frac"] < 0.8, "clipping took part"
        assert first["policy/clip_frac"] == pytest.approx(
            first["policy/clip_frac_low"] + first["policy/clip_frac_high"]
        )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_with_nothing_left_to_train_changes_nothing(algorithm, results):
    (alone, alone_gradients), (together, gradients) = (results[n][algorithm]["three sequences"] for n in (1, 2))
    idle = [metrics.pop("perf/update_idle_frac") for metrics in (alone, together)]
    assert idle == pytest.approx([0, 1 - (15 + 14 + 12) / (2 * (15 + 12))], abs=0.02), (
        "positions: attention is little of the cost"
    )
    assert together == pytest.approx(alone, abs=1e-5)
    for a, b in zip(gradients, alone_gradients, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.fixture(scope="module")
def meshes(policy, tmp_path_factory):
    """Flags -> {--shard_ranks: (metrics, gradients, weights)} of the same updates on four ranks."""
    folder = tmp_path_factory.mktemp("meshes")
    torchrun(4, "tests/distributed_mesh.py", policy, folder)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("case", CASES)
def test_copies_of_the_policy_train_as_one_and_any_mesh_continues_a_checkpoint(case, meshes):
    """Two replicas of two shards, and four replicas, against one dimension; the checkpoints are compared there."""
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if "bfloat16" in case else {"atol": 2e-6, "rtol": 1e-4}
    one, gradients, weights = meshes[case][None]
    assert all(metrics["optim/grad_norm"] > 0.1 for metrics in one), "far above --max_grad_norm: clipping took part"
    for shard_ranks in (2, 1):
        metrics, found_gradients, found_weights = meshes[case][shard_ranks]
        for a, b in zip(metrics, one, strict=True):
            assert a == pytest.approx(b, abs=tolerance["atol"], rel=tolerance["rtol"])
        assert math.sqrt(sum(x.float().square().sum() for x in gradients.values())) == pytest.approx(0.05, rel=0.01)
        for name, expected in gradients.items():
            torch.testing.assert_close(found_gradients[name], expected, **tolerance)
        for name, expected in weights.items():
            torch.testing.assert_close(found_weights[name], expected, **tolerance)
