"""On the real FSDP model: how the update is cut up does not matter. fp32; tolerance 2e-6 on a gradient of norm 1."""

import math
from argparse import Namespace
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import fsdp_utils
import grpo
from algorithm import algorithm_of
from batch import Batch, Rollout
from extras.teacher.vocabulary import run
from fsdp_utils import World, full_tensors, local_shard, shard
from helpers.distributed import Result, kept_gradients, on_ranks, parsed, recorded, sharded, train, weights_of
from helpers.made_up import RAGGED, build, load_policy, make_rollout, whole_update
from packing import pack
from policy import Policy
from update import add_reference, logprobs_under, with_advantages

TOLERANCE = {"atol": 2e-6, "rtol": 1e-4}
ALGORITHMS = {  # name -> flags
    "clip": "--kl_coef 0.1 --clip_high 0.3",
    "gspo": "--policy_loss gspo --clip_low 0.02 --clip_high 0.02 --loss_aggregation seq_mean_token_mean "
    "--rollout_correction sequence_truncate:largest=1.5",
    "gspo_token": "--policy_loss gspo_token --clip_low 0.02 --clip_high 0.02 --dual_clip 1.05",
    "cispo": "--policy_loss cispo --clip_high 0.15 --loss_aggregation seq_mean_token_sum_norm --entropy_coef 0.5 "
    "--rollout_correction token_mask",
    "sapo": "--policy_loss sapo --loss_aggregation seq_mean_token_mean --kl_coef 0.1 --kl_estimator k3+",
    "reinforce": "--policy_loss reinforce --loss_aggregation seq_mean_token_mean",
    "distill": "--kl_coef 0.5 --kl_over vocabulary --kl_direction jsd:beta=0.3 --entropy_coef 0.1",
}
LEFT_OUT = [1, 4]  # sequences that "reinforce" leaves out of the loss


def args_of(algorithm: str, more: str = "") -> Namespace:
    return parsed(f"--max_grad_norm 1e9 --group_size 4 {ALGORITHMS[algorithm]} {more}")


def rollout_of(algorithm: str, lengths: list[int] | None = None) -> Rollout:
    rollout = make_rollout(lengths or RAGGED, group_size=4)
    is_trained_B = np.isin(np.arange(len(rollout.texts)), LEFT_OUT, invert=True)
    return replace(rollout, is_trained_B=is_trained_B) if algorithm == "reinforce" else rollout


def off_policy(batch: Batch) -> Batch:
    """The batch with other old log-probs, which clip half of the tokens; trainer / sampler is 0.45 or 1.42."""
    old_logprobs_N = batch.old_logprobs_N + torch.where(batch.labels_N % 2 == 0, -0.3, 0.1) * batch.advantages_N.sign()
    rollout_logprobs_N = old_logprobs_N + torch.where(batch.labels_N % 3 == 0, 0.8, -0.35)
    return replace(batch, old_logprobs_N=old_logprobs_N, rollout_logprobs_N=rollout_logprobs_N)


def reference_of(path: Path | str) -> Policy:
    """The policy with noise on its weights: otherwise the KL term has no gradient."""
    reference = load_policy(path).requires_grad_(False)
    torch.manual_seed(1)
    for parameter in reference.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)
    return reference


def gradients(world: World, path: str) -> dict[str, dict[str, Result]]:
    """Algorithm -> case -> result."""
    policy, reference = (sharded(model, world) for model in (load_policy(path), reference_of(path)))
    results = {}
    for algorithm in ALGORITHMS:
        rollout = rollout_of(algorithm)
        # A micro-batch has a sequence, one or two, all.
        cases = {f"cap {cap}": (rollout, f"{cap}") for cap in (16, 23, 1000)}
        cases["shuffled"] = rollout.select(np.array([7, 4, 6, 5, 2, 0, 3, 1])), "23"
        cases["prompts shared"] = rollout, "1000 --share_prompts"
        # A micro-batch each: with two ranks the fourth one is empty.
        cases["three sequences"] = rollout_of(algorithm, [12, 11, 9]), "16 --group_size 2"
        results[algorithm] = {}
        for name, (rollout, cap) in cases.items():
            args = args_of(algorithm, f"--micro_batch_tokens {cap}")
            update = whole_update(rollout, args, policy, world)
            update = logprobs_under(policy, "old_logprobs_N", update, algorithm_of(args))
            update = [off_policy(batch) for batch in update]
            if args.kl_coef:
                update = add_reference(update, reference, algorithm_of(args))
            results[algorithm][name] = recorded(policy, update, args, world, is_first=False)
    return results


@pytest.fixture(scope="module")
def results(policy):
    """World size -> {algorithm: {case: (metrics, gradients)}}."""
    return {num_ranks: on_ranks(num_ranks, gradients, policy) for num_ranks in (1, 2)}


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
    scores = model(batch, 1.0, teacher)
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


COPIES = (  # flags
    "--dtype float32 --kl_coef 0.1 --micro_batch_tokens 20 --communicate_once",
    "--param_dtype bfloat16 --offload optimizer",
    "--dtype float32 --kl_coef 0.1 --lora_rank 3 --offload all",
)


def copies(whole: World, path: str) -> dict[str, dict[int | None, tuple]]:
    """Flags -> --shard_ranks -> metrics of two updates, gradients of the last one, and weights."""
    results = {case: {} for case in COPIES}
    for shard_ranks in (None, 2, 1):
        world = replace(whole, shard_ranks=shard_ranks)
        check_unequal_parts(world)
        for group in world.mesh.get_all_groups():
            assert group._get_backend(world.device).options._timeout == timedelta(minutes=10), "that of the run"
        shape = (4,) if shard_ranks is None else (4 // shard_ranks, shard_ranks)
        placements = (Shard(0),) if shard_ranks is None else (Replicate(), Shard(0))
        for case in COPIES:
            args = parsed(f"--model {path} --prompts_per_step 4 --group_size 2 --max_grad_norm 0.05 {case}", 4)
            policy, reference, optimizer = build(args, world)
            for parameter in policy.parameters():
                assert parameter.device_mesh.shape == shape and parameter.placements == placements
                assert len(local_shard(parameter)) <= -(-len(parameter) // shape[-1])
            last = kept_gradients(policy, optimizer)
            metrics = train((policy, reference, optimizer), args, world, 2)
            results[case][shard_ranks] = metrics, last, weights_of(policy)
    return results


def check_unequal_parts(world: World) -> None:
    torch.manual_seed(0)
    wanted, linear = [torch.randn(7, 3), torch.randn(7)], torch.nn.Linear(3, 7)
    shard(linear, [], world, torch.float32)
    for parameter, values in zip(linear.parameters(), wanted, strict=True):
        fsdp_utils.fill_from_main(parameter, values if world.is_main else None)
    for dtype in (torch.float32, torch.bfloat16):
        found = full_tensors((parameter, dtype) for parameter in linear.parameters())
        assert all(full.equal(values.to(dtype)) for full, values in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def meshes(policy):
    return on_ranks(4, copies, policy)


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
