"""Sampler and trainer cannot drift apart unnoticed: faults injected into a real engine, and the sums that find them."""

import json

import numpy as np
import pytest
import torch

from forked import run_ranks
from fsdp_utils import own_rows
from grpo import temperature_terms
from guards.drift import Findings, Gap, add_sums, cause_of, differing, gap_in, is_mended, no_sums, temperature_of
from helpers import ROOT, make_model, torchrun, training_flags

TRANSFER = {  # fault -> what is named, without "layers."
    "k and v swapped": ["0.self_attn.k_proj", "0.self_attn.v_proj"],
    "layers swapped": ["0.self_attn.q_proj", "1.self_attn.q_proj"],
    "scaled": ["1.self_attn.o_proj"],
    "stale": ["1.self_attn.o_proj"],
}
OTHERS = {
    "prefix cache kept": "cache",
    "wrong temperature": "temperature",
    "kernel": "kernel",
    "engine not synced": "transfer",
}


@pytest.fixture(scope="module", params=["all weights", "LoRA", "all weights, one engine over two ranks"])
def found(request, tmp_path_factory):
    """What tests/drift_faults.py found."""
    is_tp = "two ranks" in request.param
    folder = tmp_path_factory.mktemp("drift")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}  # both ranks hold the same keys
    path = make_model(folder / "policy", **heads) if is_tp else request.getfixturevalue("policy")
    output = folder / "found.json"
    arguments = [path, 1 + is_tp, 4 if request.param == "LoRA" else 0, output]
    torchrun(1 + is_tp, "tests/drift_faults.py", *arguments, is_forked=not is_tp)
    return json.loads(output.read_text()) | {"has_lora": request.param == "LoRA"}


def test_clean_steps_raise_no_alarm(found):
    assert len(found["clean"]) >= 12
    assert not any(found["clean"])


@pytest.mark.parametrize("fault", TRANSFER)
def test_a_faulty_transfer_is_found_before_the_next_step_and_its_tensors_are_named(found, fault):
    assert found[fault]["cause"] == "transfer"
    assert found[fault]["differing"] == [f"layers.{name}.weight" for name in TRANSFER[fault]]
    assert not found[fault]["is_mended"], "each sync has the fault"


@pytest.mark.parametrize("fault", OTHERS)
def test_other_faults_are_found_and_called_by_their_names(found, fault):
    assert found[fault]["cause"] == OTHERS[fault]
    assert not found[fault]["is_mended"]


def test_log_probs_alone_would_not_show_a_stale_or_a_scaled_tensor(found):
    assert max(found[fault]["probe"]["mean"] for fault in ("stale", "scaled")) < 0.05, "the bound"


def test_an_engine_that_was_never_synced_and_a_tensor_lost_once_are_mended(found):
    for fault in ("engine without a sync", "missing once"):
        assert found[fault]["cause"] == "transfer" and found[fault]["is_mended"]
        assert found[fault]["differing_after"] == []
    assert len(found["engine without a sync"]["differing"]) > 20
    assert found["missing once"]["differing"] == ["layers.0.mlp.up_proj.weight"]


def test_a_head_that_is_not_packed_again_and_an_adapter_that_is_not_merged(found):
    if found["has_lora"]:  # which leaves the head as it was
        assert found["adapter not merged"]["cause"] == "adapter"
        assert len(found["adapter not merged"]["differing"]) == 14
    else:
        assert found["head not repacked"]["cause"] == "head"


# Pure functions -------------------------------------------------------------------------------------------------------


def weighted_sums(rows: torch.Tensor, *first: int) -> torch.Tensor:
    sums = no_sums(rows.device)
    add_sums(sums, rows, *first)
    return sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_parts_add_up_and_any_change_shows(dtype):
    whole = torch.randn(37, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = weighted_sums(whole)
    parts = weighted_sums(whole[:10]) + weighted_sums(whole[10:, :8], 10) + weighted_sums(whole[10:, 8:], 10, 8)
    assert torch.equal(sums, parts)
    flat = whole.flatten()
    changed = {
        "last bit of a number": (flat.view(torch.int16 if dtype == torch.bfloat16 else torch.int32) ^ 1).view(dtype),
        "sign": torch.cat([-flat[:1], flat[1:]]),
        "rows": whole.roll(1, 0).flatten(),
        "columns": whole.roll(1, 1).flatten(),
        "scaled": flat * 1.01,
    }
    for name, other in changed.items():
        assert not torch.equal(sums, weighted_sums(other.view(37, 24))), name


@pytest.mark.parametrize("shape", [(64, 64), (500, 1000)])
def test_roundings_of_a_merged_tensor_are_no_difference_and_a_small_step_is_one(shape):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator).bfloat16()

    def moved(share: float) -> torch.Tensor:
        steps = (torch.rand(shape, generator=generator) < share) * (
            1 - 2 * torch.randint(2, shape, generator=generator)
        )
        return (whole.view(torch.int16) + steps.to(torch.int16)).view(torch.bfloat16)

    def is_different(other: torch.Tensor, size: int) -> bool:
        own, sums = weighted_sums(whole)[None], weighted_sums(other)[None, None]
        return differing(own, sums, torch.tensor([size])).item()

    for _ in range(5):
        assert not is_different(moved(2**-16), whole.numel())
        assert is_different(moved(1e-2), whole.numel())
    assert not is_different(whole, 0)
    one = whole.clone()
    one[3, 5] *= 1.01
    assert is_different(one, 0) and not is_different(one, whole.numel())


def test_a_tensor_that_is_not_sharded_belongs_to_its_only_rank():
    weight = torch.arange(10.0).view(5, 2)
    pieces = list(own_rows(torch.nn.Parameter(weight), at_most=2))
    assert [first for _, first in pieces] == [0, 2, 4]
    assert torch.equal(torch.cat([rows for rows, _ in pieces]), weight)


def test_the_temperature_is_read_from_log_probs():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 32, generator=generator) * 2
    tokens = torch.multinomial((logits / 0.9).softmax(-1), 1, generator=generator)
    by_trainer, by_sampler = logits.log_softmax(-1), (logits / 0.9).log_softmax(-1)
    entropies = -(by_trainer.exp() * by_trainer).sum(-1)
    terms = temperature_terms(by_trainer.gather(1, tokens)[:, 0], by_sampler.gather(1, tokens)[:, 0], entropies)
    ratio, explained = temperature_of(*(term.mean().item() for term in terms))
    assert abs(ratio - 0.9) < 0.015
    assert explained > 0.9


def test_what_is_not_a_number_is_beyond_a_bound_unless_the_loss_is_not():
    nan = float("nan")
    metrics = {"policy/rollout_gap_mean": nan, "policy/rollout_temperature": 1.0, "policy/rollout_temperature_r2": 0.0}
    assert gap_in(metrics | {"policy/loss": 1.0}).is_beyond(0.05)
    assert not gap_in(metrics | {"policy/loss": nan}).is_beyond(0.05)
    assert not Gap(1.0).is_beyond(0.0), "0: no bound"


def test_a_temperature_counts_by_the_share_of_the_difference_that_it_explains():
    """The first three are of clean steps with about two hundred tokens of an uncertain policy."""
    for gap in (Gap(0.0035, 1.053, 0.14), Gap(0.0069, 0.939, 0.51), Gap(0.0126, 1.088, 0.3)):
        assert not gap.is_beyond(0.05)
    assert Gap(0.02, 0.93, 0.8).is_beyond(0.05) and Gap(0.06, 1.0, 0.0).is_beyond(0.05)
    assert Gap(0.01, float("nan"), float("nan")).is_beyond(0.05)


def test_a_gap_that_a_new_sync_removes_is_of_what_the_engine_kept():
    found = Findings([], False, 0, Gap(0.2), [], 0, Gap(0.001))
    assert cause_of(found, 0.05) == "cache"
    assert is_mended(found, 0.05)


def test_a_run_whose_sampler_has_another_temperature_stops_before_it_learns_from_it(policy, tmp_path):
    """Through the program itself: the update is left out, the sentence is the last thing said, evidence is kept."""
    done = run_ranks(1, str(ROOT / "tests/drift_run.py"), training_flags(policy, tmp_path / "run"), timeout=120)
    assert done.returncode != 0
    said = done.stderr.strip().splitlines()[-1]
    assert "step 1: sampler and trainer have drifted apart (temperature)" in said
    assert "--on_rollout_gap go_on" in said
    evidence = np.load(tmp_path / "run" / "drift_step_1" / "tokens.npz")
    assert len(evidence["step_completions"]) == evidence["step_completion_lengths"].sum()
    assert np.abs(evidence["step_engine_logprobs"] - evidence["step_policy_logprobs"]).mean() > 0.02
    assert not list((tmp_path / "run").glob("step_*")), "no checkpoint"
