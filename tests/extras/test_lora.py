"""LoRA: what is trained, the reference, what engine and checkpoints get; on one and two ranks and in a whole run."""

import copy
import itertools
from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from algorithm import algorithm_of
from extras.models.lora import target_names
from fsdp_utils import World
from helpers.distributed import on_ranks, recorded, scored, sharded, weights_of
from helpers.made_up import flags, load_policy, make_rollout, policy_of, unpacked_logprobs, whole_update
from helpers.runs import NO_EVAL, metrics_of, torchrun, training_flags
from model.weights import model_of_shapes
from packing import pack
from policy import Policy
from update import logprobs_under

TOLERANCE = {"atol": 2e-6, "rtol": 1e-4}  # as in test_fsdp.py: fp32, a gradient of norm 2
TINY = Qwen2Config(vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2)
HALF_BF16 = 2**-8 * (1 + 1e-3)  # 8 significant bits are off by at most half a unit of the last; fp32 adds a little
LORA_RANK = 3  # two ranks share the rows of A unequally


def lora_flags(path: Path | str, **changes: object) -> Namespace:
    limits = {
        "max_grad_norm": 1e9, "max_prompt_tokens": 4, "max_completion_tokens": 12, "kl_coef": 0.1,
        "micro_batch_tokens": 1000, "group_size": 4, "model": path, "lora_rank": LORA_RANK, "lora_alpha": 6,
    }  # fmt: skip
    return flags(**(limits | changes))


@pytest.mark.parametrize(("targets", "words"), [
    ("lm_head", ["--lora_targets lm_head:", "down_proj, gate_proj, k_proj, o_proj"]),
    ("q_proj,v_proj", ["_targets q_proj,v_proj:", "some, with spaces between them"]),
    ("all-linear", ["--lora_targets all-linear:", "leave the flag out for all"]),
])  # fmt: skip
def test_targets_that_make_no_sense_are_refused_with_a_way_out(targets, words):
    with pytest.raises(ValueError) as error:
        target_names(model_of_shapes(TINY), [targets])
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("name", ["untied_policy", "untied_qwen3_policy"])
def test_the_lora_targets_are_all_linear_layers_or_those_named(name, request):
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(name))
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    own = [f"self_attn.{name}" for name in attention] + [f"mlp.{name}" for name in mlp]
    everything = [f"model.layers.{i}.{name}" for i in range(2) for name in own]
    assert target_names(model, None) == everything
    assert target_names(model, ["v_proj", "q_proj"]) == [x for x in everything if x.endswith(("q_proj", "v_proj"))]


def lora(world: World, path: str) -> dict[str, object]:
    """Gradients, log-probs and merged weights. Frozen weights are bf16, the adapter fp32."""

    def adapted(args: Namespace, dtype: torch.dtype) -> Policy:
        return sharded(policy_of(args, torch.bfloat16), world, dtype, stays_gathered=args.communicate_once)

    def gradient(policy: Policy, args: Namespace, index: int = 0) -> tuple[dict[str, float], dict[str, Tensor]]:
        """(metrics, gradients) of the update of this index, after a pass of the reference, as in a step."""
        before = divided(policy)
        update = scored(make_rollout(group_size=4), policy, policy, args, world)
        assert divided(policy) == before, "a pass without gradient leaves some gathered"
        found = recorded(policy, update, args, world, index=index)
        assert divided(policy) == before, "nothing stays gathered"
        return found

    def divided(policy: Policy) -> list[bool]:
        return [isinstance(parameter, DTensor) for parameter in policy.parameters()]

    def logprobs(model: Policy, args: Namespace) -> list[Tensor]:
        update = whole_update(make_rollout(), args, model, world)
        update = logprobs_under(model, "old_logprobs_N", update, algorithm_of(args))
        return [batch.old_logprobs_N for batch in update]

    found: dict[str, object] = {"gradients": [], "bf16": [], "reference": [], "with dropout": {}}
    cases = (16, {}), (40, {}), (16, {"communicate_once": True}), (40, {"share_prompts": True})
    for (cap, changes), checkpointing in itertools.product(cases, (None, True)):
        args = lora_flags(path, micro_batch_tokens=cap, gradient_checkpointing=checkpointing, **changes)
        policy = adapted(args, torch.float32)
        found["gradients"].append(gradient(policy, args))
    args = lora_flags(path)
    for is_policy_first in (True, False):
        policy = adapted(args, torch.bfloat16)
        if is_policy_first:
            logprobs(policy, args)
        found["bf16"].append(gradient(policy, args)[1])
    base = [x for name, x in policy.named_parameters() if ".lora_" not in name]
    assert all(isinstance(x, DTensor) == (world.num_trainers > 1) for x in base), "one rank's base is plain"
    with patch.object(fsdp, "fully_shard", lambda *args, ignored_params, **more: fully_shard(*args, **more)):
        policy = adapted(args, torch.bfloat16)
    assert all(divided(policy))
    found["bf16"].append(gradient(policy, args)[1])
    for dtype in (torch.float32, torch.bfloat16):
        policy, base = adapted(args, dtype), sharded(load_policy(path, torch.bfloat16), world, dtype)
        with policy.adapter_off():
            reference = logprobs(policy, args)
        found["reference"].append((reference, logprobs(base, args), logprobs(policy, args)))
    for name, checkpointing, index in (("plain", None, 2), ("checkpointed", True, 2), ("other update", None, 3)):
        args = lora_flags(path, lora_dropout=0.4, gradient_checkpointing=checkpointing)
        policy = adapted(args, torch.float32)
        before = logprobs(policy, args)
        found["with dropout"][name] = gradient(policy, args, index)
        found["with dropout"][f"{name}, again"] = gradient(policy, args, index)
        assert all(map(torch.equal, before, logprobs(policy, args))), "the dropout was still on in a later pass"

    policy = policy_of(lora_flags(path), torch.bfloat16)
    found["parameters"] = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    sharded(policy, world, torch.bfloat16)
    found["merged"] = weights_of(policy)
    for _ in range(10):
        found["merged after"] = weights_of(policy)
    found["parameters after"] = {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for name, x in policy.named_parameters()
    }
    return found


@pytest.fixture(scope="module")
def results(policy) -> dict[int, dict]:
    return {num_ranks: on_ranks(num_ranks, lora, policy) for num_ranks in (1, 2)}


def test_lora_loss_and_gradient_are_those_of_the_formula(results, policy):
    """On one and two ranks, with and without checkpointing; here without FSDP, packing or peft's forward pass."""
    args, rollout = lora_flags(policy), make_rollout(group_size=4)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).float()
    with torch.no_grad():
        ref = unpacked_logprobs(model, rollout, 1.0)
    named = policy_of(args, torch.bfloat16).model.named_parameters()
    adapter, merged = {name: x.detach().clone().requires_grad_() for name, x in named if ".lora_" in name}, {}
    for name, parameter in model.named_parameters():
        a, b = (adapter.get(name.replace("weight", f"lora_{part}.default.weight")) for part in "AB")
        merged[name] = parameter.detach() if a is None else parameter.detach() + 6 / LORA_RANK * (b @ a)
    logprobs = unpacked_logprobs(lambda tokens: torch.func.functional_call(model, merged, (tokens,)), rollout, 1.0)
    advantages = torch.cat([torch.from_numpy(piece) for piece in rollout.advantages])
    ratio, x = (logprobs - logprobs.detach()).exp(), ref - logprobs
    loss = (-advantages * ratio + 0.1 * (x.exp() - x - 1)).mean()
    loss.backward()
    gradients = {f"model.{name}": tensor.grad for name, tensor in adapter.items()}
    assert len(gradients) == 2 * 14
    assert min(x.abs().max() for x in gradients.values()) > 1e-3, "a smaller one would hide a difference"
    for found in results.values():
        assert len(found["gradients"]) == 8
        for metrics, ours in found["gradients"]:
            assert metrics["policy/loss"] == pytest.approx(loss.item(), abs=2e-6)
            assert metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0
            assert {gradient.dtype for gradient in ours.values()} == {torch.float32}
            torch.testing.assert_close(ours, gradients, **TOLERANCE)  # and names: only A and B are trained


def test_a_reference_pass_is_exactly_the_base_models_and_leaves_gradients_in_fp32(results):
    """FSDP2 decides in its first pass which parameters are trained, and in which dtype gradients are reduced.

    A plain base on one rank gives the gradients of a sharded one.
    """
    for first, second, all_sharded in (found["bf16"] for found in results.values()):
        assert {gradient.dtype for gradient in first.values()} == {torch.float32}
        torch.testing.assert_close(second, first, atol=0, rtol=0)  # also the dtype
        torch.testing.assert_close(all_sharded, first, atol=0, rtol=0)
    for found in results.values():
        for reference, base, adapted in found["reference"]:
            torch.testing.assert_close(reference, base, atol=0, rtol=0)
            assert not any(a.equal(b) for a, b in zip(reference, adapted, strict=True))


def test_dropout_is_a_function_of_seed_and_update_and_the_ratio_is_to_the_policy_without_it(results):
    """It is drawn again where a layer is recomputed."""
    for cases in (found["with dropout"] for found in results.values()):
        (metrics, plain), (_, other) = cases["plain"], cases["other update"]
        for name in ("plain, again", "checkpointed", "checkpointed, again"):
            assert cases[name][0] == metrics
            torch.testing.assert_close(cases[name][1], plain, atol=0, rtol=0)
        assert any(not gradient.equal(other[key]) for key, gradient in plain.items())
        for name in ("plain", "checkpointed", "other update"):
            assert cases[name][0]["policy/ratio_max"] > 1.01 and cases[name][0]["policy/ratio_min"] < 0.99


def test_each_rank_draws_masks_of_its_own(policy):
    model = policy_of(lora_flags(policy, lora_dropout=0.5), torch.bfloat16)
    batch, found = pack(make_rollout(), [0]), []
    for rank in (0, 0, 1):
        with torch.no_grad(), model.dropout_on((1, 2), World(rank, 2, 1, torch.device("cpu"))):
            found.append(model(batch, 1.0)[0])
    assert found[0].equal(found[1]) and not found[0].equal(found[2])


def test_the_engine_gets_the_merged_sum_which_ten_syncs_do_not_change(results, policy):
    """Under the names of the base model, rounded once. A sync to the bit: tests/engine/test_sync.py."""
    for found in results.values():
        for what in ("parameters", "merged"):
            torch.testing.assert_close(found[f"{what} after"], found[what], atol=0, rtol=0)
    torch.testing.assert_close(results[1]["merged"], results[2]["merged"], atol=0, rtol=0)
    weights, merged = results[2]["parameters"], results[2]["merged"]
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16)
    assert list(merged) == [name for name, _ in base.named_parameters()]
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    num_adapted = 0
    for name, tensor in merged.items():
        part = f"model.{name.removesuffix('weight')}lora_{{}}.default.weight"
        a, b = (weights.get(part.format(x)) for x in "AB")
        exact = base.get_parameter(name).double() + (0 if a is None else 6 / LORA_RANK * (b.double() @ a.double()))
        assert ((tensor.double() - exact).abs() <= HALF_BF16 * exact.abs() + 1e-7).all(), name
        assert tensor.equal(base.get_parameter(name)) is (a is None), name
        num_adapted += a is not None
    assert num_adapted == 14


def test_a_merge_in_fp32_leaves_the_weights_as_they_were(policy):
    """Where nothing has to be gathered or cast, what is sent could be the parameter's own memory."""
    model = policy_of(lora_flags(policy))
    before = copy.deepcopy(model.state_dict())
    first, second = ([tensor.clone() for _, tensor in model.full_weights()] for _ in range(2))
    torch.testing.assert_close((second, model.state_dict()), (first, before), atol=0, rtol=0)


def test_a_lora_run_starts_at_the_reference_and_leaves_it(policy, reward, tmp_path):
    """Four steps of one update each on two ranks. Checkpoints with LoRA: test_reshard.py."""
    changes = {"lora_rank": LORA_RANK, "lora_dropout": 0.05, "prompts_per_update": 8, "dtype": "bfloat16"} | NO_EVAL
    done = torchrun(2, "train_grpo.py", *training_flags(policy, tmp_path, reward=reward, **changes))
    assert "trainable: 7,680 of 118,976 parameters: LoRA (rank 3, alpha 32, dropout" in done.stdout
    metrics = metrics_of(tmp_path)
    assert list(metrics) == [1, 2, 3, 4]
    for step, line in metrics.items():
        assert 0 < line["policy/rollout_gap_mean"] < 0.005 and line["optim/grad_norm"] > 0.01
        assert step == 1 or abs(line["policy/kl_ref"]) > 1e-4  # an estimate, which may be negative
    assert metrics[1]["policy/kl_ref"] == pytest.approx(0, abs=1e-6)
    assert metrics[1]["policy/ratio_max"] == 1.0, "dropout in front of a B that is zero changes nothing"
    assert metrics[2]["policy/ratio_max"] > 1.001 and metrics[2]["policy/ratio_min"] < 0.999
