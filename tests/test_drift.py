"""Sampler and trainer cannot drift apart unnoticed: faults injected into a real engine, and the sums that find them."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nn

from flags import UpdateStep
from forked import run_ranks
from fsdp_utils import World, own_rows
from grpo import temperature_terms
from guards.drift import INTEGERS, DriftError, DriftGuard, add_sums, check_gap, differing, no_sums, temperature_of
from helpers import ALONE, ROOT, make_model, torchrun, training_flags

NOT_ALIKE, BEFORE = "the engine's weights are not the policy's: ", "; nothing was sampled with them"
BEYOND = "update 1 is not made: sampler and trainer give other log-probs to the same tokens"
FAULTS = {  # fault -> what its sentence says
    "k and v swapped": f"{NOT_ALIKE}layers.0.self_attn.k_proj.weight, layers.0.self_attn.v_proj.weight{BEFORE}",
    "layers swapped": f"{NOT_ALIKE}layers.0.self_attn.q_proj.weight, layers.1.self_attn.q_proj.weight{BEFORE}",
    "scaled": f"{NOT_ALIKE}layers.1.self_attn.o_proj.weight{BEFORE}",
    "stale": f"{NOT_ALIKE}layers.1.self_attn.o_proj.weight{BEFORE}",
    "one bit": f"{NOT_ALIKE}layers.1.input_layernorm.weight{BEFORE}",
    "missing": f"{NOT_ALIKE}layers.0.mlp.up_proj.weight{BEFORE}",
    "engine without a sync": f"more{BEFORE}",
    "engine not synced": f"more{BEFORE}",
    "prefix cache kept": f"blocks of keys and values of old weights{BEFORE}",
    "wrong temperature": BEYOND,
    "kernel": BEYOND,
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
    return json.loads(output.read_text())


def test_clean_steps_raise_no_alarm(found):
    assert len(found["clean"]) >= 12
    assert not any(found["clean"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_within_a_step_and_the_tensors_are_named(found, fault):
    assert FAULTS[fault] in found[fault]


def test_a_head_that_is_not_packed_again_and_an_adapter_that_is_not_merged_are_found(found):
    if "adapter not merged" in found:  # in 14 layers
        assert NOT_ALIKE in found["adapter not merged"] and f"and 10 more{BEFORE}" in found["adapter not merged"]
    else:
        assert f"{NOT_ALIKE}lm_head.weight{BEFORE}" in found["head not repacked"]


def test_log_probs_alone_would_not_show_a_stale_or_a_scaled_tensor(found):
    assert 0 < max(found["gaps"].values()) < 0.05, "the bound"


# An engine's parts, without vLLM --------------------------------------------------------------------------------------

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ROWS = {"q_proj": 32, "k_proj": 8, "v_proj": 8, "gate_proj": 24, "up_proj": 24}  # two heads of keys, for up to 4 ranks
LAYER = {f"{name}.weight": [rows, 16] for name, rows in ROWS.items()} | {f"{name}.bias": [ROWS[name]] for name in ROWS}
SHAPES = {f"layers.0.{name}": shape for name, shape in LAYER.items()} | {
    "layers.0.o_proj.weight": [16, 32], "layers.0.o_proj.bias": [16], "norm.weight": [16],
    "embed_tokens.weight": [70, 16], "lm_head.weight": [70, 16],
}  # fmt: skip


def engine_part(named: dict[str, Tensor], rank: int, size: int) -> nn.Module:
    """What a rank of an engine holds, as vLLM divides, fuses and pads it."""

    def own_rows_of(tensor: Tensor) -> Tensor:
        count = max(len(tensor) // size, 4)  # a head, at least
        return tensor.split(count)[rank // (count * size // len(tensor))]

    def fused(names: list[str]) -> nn.Module:
        parts = {kind: [own_rows_of(named[f"layers.0.{name}.{kind}"]) for name in names] for kind in ("weight", "bias")}
        module = nn.ParameterDict({kind: torch.cat(tensors) for kind, tensors in parts.items()})
        module.output_partition_sizes = [len(tensor) for tensor in parts["bias"]]
        return module

    def padded(name: str) -> nn.Module:
        return nn.ParameterDict(
            {"weight": nn.functional.pad(named[name], (0, 0, 0, 128 - 70), value=7.0).chunk(size)[rank]}
        )

    out = {"weight": named["layers.0.o_proj.weight"].chunk(size, dim=1)[rank], "bias": named["layers.0.o_proj.bias"]}
    first = nn.ModuleDict({name: fused(parts) for name, parts in FUSED.items()} | {"o_proj": nn.ParameterDict(out)})
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([first]), "norm": nn.ParameterDict({"weight": named["norm.weight"]})}
    )
    model.update({name: padded(f"{name}.weight") for name in ("embed_tokens", "lm_head")})
    model.packed_modules_mapping = FUSED
    return model


def found_in(named: dict[str, Tensor], models: list[nn.Module]) -> list[str]:
    """The tensors in which an engine of these parts is not the policy."""
    policy, weights = SimpleNamespace(dtype=named["norm.weight"].dtype), {"names": SHAPES, "shapes": SHAPES.values()}
    policy.describe_weights = lambda: weights
    policy.own_rows = lambda: ((name, False, own_rows(tensor, 5)) for name, tensor in named.items())
    own, held = {name: no_sums(ALONE.device) for name in SHAPES}, []
    for rank, model in enumerate(models):
        world = World(rank, len(models), len(models), ALONE.device)
        guard = DriftGuard(lambda ask, model=model: [ask(model)], policy, world, nullcontext)
        held.append(guard.sums_of_engine(model))
    assert guard.names == sorted(SHAPES) and not guard.not_compared
    guard.add_sums_of_policy(own)
    return [name for name in SHAPES if not torch.equal(own[name], sum(each[name] for each in held))]


def one_bit(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(INTEGERS[tensor.itemsize]).flatten()[-1] ^= 1
    return changed


K, V, GATE, UP, OUT = (f"layers.0.{name}_proj.weight" for name in ("k", "v", "gate", "up", "o"))
CHANGES = {f"a bit of {name}": lambda named, name=name: {name: one_bit(named[name])} for name in SHAPES} | {
    "k and v swapped": lambda named: {K: named[V], V: named[K]},
    "gate and up swapped": lambda named: {GATE: named[UP], UP: named[GATE]},
    "columns moved": lambda named: {OUT: named[OUT].roll(1, 1)},
    "rows moved": lambda named: {UP: named[UP].roll(1, 0)},
    "scaled": lambda named: {OUT: named[OUT] * 1.01},
    "sign": lambda named: {K: -named[K]},
}


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (4, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_tensor_is_found_however_an_engine_divides_it(size, dtype, change):
    generator = torch.Generator().manual_seed(0)
    named = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    changed = CHANGES[change](named)
    for engine, expected in ((named, set()), (named | changed, changed.keys())):
        assert set(found_in(named, [engine_part(engine, rank, size) for rank in range(size)])) == set(expected)


# Pure functions -------------------------------------------------------------------------------------------------------


def weighted_sums(rows: Tensor) -> Tensor:
    sums = no_sums(rows.device)
    add_sums(sums, rows)
    return sums


@pytest.mark.parametrize("shape", [(64, 64), (500, 1000)])
def test_roundings_of_a_merged_tensor_are_no_difference_and_a_small_step_is_one(shape):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator).bfloat16()

    def moved(share: float) -> Tensor:
        signs = 1 - 2 * torch.randint(2, shape, generator=generator)
        steps = (torch.rand(shape, generator=generator) < share) * signs
        return (whole.view(torch.int16) + steps.to(torch.int16)).view(torch.bfloat16)

    def is_different(other: Tensor, size: int) -> bool:
        own, sums = weighted_sums(whole)[None], weighted_sums(other)[None, None]
        return differing(own, sums, torch.tensor([size])).item()

    for _ in range(5):
        assert not is_different(moved(2**-16), whole.numel())
        assert is_different(moved(1e-2), whole.numel())
    assert not is_different(whole, 0)
    one = whole.clone()
    one[3, 5] *= 1.01
    assert is_different(one, 0) and not is_different(one, whole.numel())


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


# Of clean steps with about two hundred tokens of an uncertain policy: a temperature counts by what it explains.
CLEAN_GAPS = [(0.0035, 1.053, 0.14), (0.0069, 0.939, 0.51), (0.0126, 1.088, 0.3)]
NAN = float("nan")


@pytest.mark.parametrize("gap", [*CLEAN_GAPS, (0.02, 0.93, 0.8), (0.06, 1.0, 0.0), (NAN, 1.0, 0.0), (0.01, NAN, NAN)])
def test_an_update_is_not_made_if_its_log_probs_are_beyond_the_bound(gap):
    names = ("policy/rollout_gap_mean", "policy/rollout_temperature", "policy/rollout_temperature_r2")
    metrics, step = dict(zip(names, gap, strict=True)) | {"policy/loss": 1.0}, UpdateStep(0, 1e-3, True, 1.0, 1, 3, 2)
    bounded, error = step._replace(max_rollout_gap=0.05), "step 3, update 2 .*--max_rollout_gap 0.05"
    with nullcontext() if gap in CLEAN_GAPS else pytest.raises(DriftError, match=error):
        check_gap(metrics, bounded)
    check_gap(metrics, step)  # there is no bound
    check_gap(metrics | {"policy/loss": NAN}, bounded)  # then the log-probs say nothing of the sampler


def test_a_run_whose_sampler_has_another_temperature_ends_before_it_learns_from_it(policy, tmp_path):
    """Through the program itself: the sentence is the last thing said, and its file has the tokens of the step."""
    done = run_ranks(2, str(ROOT / "tests/drift_run.py"), training_flags(policy, tmp_path / "run"), timeout=120)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    file = tmp_path / "run" / "rollouts" / "step_1.parquet"
    said = done.stderr.strip().splitlines()[-1]
    assert "error: step 1, update 1 is not made" in said and "--max_rollout_gap 0.05" in said
    assert f"{file} holds the step's tokens, with both log-probs" in said
    columns = [pyarrow.parquet.read_table(file)[name] for name in ("token_ids", "rollout_logprobs", "old_logprobs")]
    tokens, sampler, trainer = (np.concatenate(column.to_pylist()) for column in columns)
    assert len(columns[0]) == 32 and len(tokens) == len(sampler) == len(trainer)
    assert np.abs(sampler - trainer).mean() > 0.02
    assert not list((tmp_path / "run").glob("step_*")), "no checkpoint"
