"""Sampler and trainer cannot drift apart unnoticed: faults injected into a real engine, and the sums that find them."""

from contextlib import nullcontext
from types import SimpleNamespace as Some

import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nan, nn

from engine.drift import DriftGuard, add_sums, check_gap, differing, no_sums
from fsdp_utils import World, own_rows
from grpo import temperature_terms
from helpers.distributed import on_ranks
from helpers.made_up import ALONE, make_model, one_bit
from helpers.runs import PROGRAMS, run_ranks, training_flags
from metrics import temperature_of
from runtime.start import RunError
from schedule import UpdateStep

UNLIKE, BEFORE = "the engine's weights are not the policy's: ", "; nothing was sampled with them"
FAULTS = {  # fault -> what its sentence says
    "k and v swapped": f"{UNLIKE}layers.0.self_attn.k_proj.weight, layers.0.self_attn.v_proj.weight{BEFORE}",
    "layers swapped": f"{UNLIKE}layers.0.self_attn.q_proj.weight, layers.1.self_attn.q_proj.weight{BEFORE}",
    **dict.fromkeys(("scaled", "stale"), f"{UNLIKE}layers.1.self_attn.o_proj.weight{BEFORE}"),
    "one bit": f"{UNLIKE}layers.1.input_layernorm.weight{BEFORE}",
    "missing": f"{UNLIKE}layers.0.mlp.up_proj.weight{BEFORE}",
    "head not repacked": f"{UNLIKE}lm_head.weight{BEFORE}",
    "adapter not merged": f"and 10 more{BEFORE}",  # 14 layers
    **dict.fromkeys(("engine without a sync", "engine not synced"), f"more{BEFORE}"),
    "prefix cache kept": f"blocks of keys and values of old weights{BEFORE}",
    **dict.fromkeys(("wrong temperature", "kernel"), "not made: sampler and trainer give other log-probs to the same"),
}
# Figures of clean steps with about two hundred tokens of an uncertain policy: a temperature counts by what it explains.
CLEAN = [(0.0035, 1.053, 0.14), (0.0069, 0.939, 0.51), (0.0126, 1.088, 0.3)]


@pytest.mark.parametrize(("lora_rank", "tp_size"), [(0, 1), (4, 1), (0, 2)], ids=["all weights", "LoRA", "two ranks"])
def test_a_fault_is_named_within_a_step_and_clean_steps_pass(lora_rank, tp_size, policy, tmp_path):
    """A fault is found within a step and named, and clean steps raise no alarm."""
    if tp_size == 2:  # both ranks hold the same keys
        policy = make_model(tmp_path / "policy", num_attention_heads=4, num_key_value_heads=1, head_dim=32)
    found = on_ranks(tp_size, "engines:faults", policy, lora_rank, tp_size=tp_size)
    clean, gaps = found.pop("clean"), found.pop("gaps")
    assert len(clean) >= 12 and not any(clean)
    assert found.keys() == FAULTS.keys() - {"head not repacked" if lora_rank else "adapter not merged"}
    assert {fault: said for fault, said in found.items() if FAULTS[fault] not in (said or "")} == {}
    assert gaps.keys() == {"scaled", "stale"} and 0 < max(gaps.values()) < 0.05, "log-probs alone would not show these"


FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ROWS = {"q_proj": 32, "k_proj": 8, "v_proj": 8, "gate_proj": 24, "up_proj": 24}  # two heads of keys, for up to 4 ranks
LAYER = {f"{name}.weight": [rows, 16] for name, rows in ROWS.items()} | {f"{name}.bias": [ROWS[name]] for name in ROWS}
SHAPES = {f"layers.0.{name}": shape for name, shape in LAYER.items()} | {
    "layers.0.o_proj.weight": [16, 32], "layers.0.o_proj.bias": [16], "norm.weight": [16],
    "embed_tokens.weight": [70, 16], "lm_head.weight": [70, 16],
    "layers.0.experts.gate_up_proj": [3, 2 * 8, 16], "layers.0.experts.down_proj": [3, 16, 8],
}  # fmt: skip
GATES_UPS, DOWNS = (f"layers.0.experts.{name}_proj" for name in ("gate_up", "down"))
K, V, GATE, UP, OUT = (f"layers.0.{name}_proj.weight" for name in ("k", "v", "gate", "up", "o"))
CHANGES = {f"a bit of {name}": lambda named, name=name: {name: one_bit(named[name])} for name in SHAPES} | {
    "k and v swapped": lambda named: {K: named[V], V: named[K]},
    "gate and up swapped": lambda named: {GATE: named[UP], UP: named[GATE]},
    "columns moved": lambda named: {OUT: named[OUT].roll(1, 1)},
    "gates and ups of experts swapped": lambda named: {GATES_UPS: named[GATES_UPS].roll(8, 1)},
    "experts moved": lambda named: {DOWNS: named[DOWNS].roll(1, 0)},
    "columns of experts moved": lambda named: {DOWNS: named[DOWNS].roll(1, 2)},
    "rows moved": lambda named: {UP: named[UP].roll(1, 0)},
}


def engine_part(named: dict[str, Tensor], rank: int, size: int) -> Some:
    """What a rank of an engine holds, as vLLM divides, fuses and pads it."""

    def own_part(name: str) -> Tensor:
        count = max(len(whole := named[f"layers.0.{name}"]) // size, 4)  # rows; a head, at least
        return whole.split(count)[rank // (count * size // len(whole))]

    modules = {"norm": nn.ParameterDict({"weight": named["norm.weight"]})}
    for fused, names in FUSED.items():
        parts = {kind: [own_part(f"{name}.{kind}") for name in names] for kind in ("weight", "bias")}
        modules[f"layers.0.{fused}"] = module = nn.ParameterDict({kind: torch.cat(parts[kind]) for kind in parts})
        module.output_partition_sizes = [len(part) for part in parts["bias"]]
    for name in ("embed_tokens", "lm_head"):
        padded = nn.functional.pad(named[f"{name}.weight"], (0, 0, 0, 128 - 70), value=7.0)
        modules[name] = nn.ParameterDict({"weight": padded.chunk(size)[rank]})
    halves = [half.chunk(size, dim=1)[rank] for half in named[GATES_UPS].chunk(2, dim=1)]
    experts = {"w13_weight": torch.cat(halves, dim=1), "w2_weight": named[DOWNS].chunk(size, dim=2)[rank]}
    modules["layers.0.experts.routed_experts"] = nn.ParameterDict(experts)
    out = {"weight": named[OUT].chunk(size, dim=1)[rank], "bias": named["layers.0.o_proj.bias"]}
    modules["layers.0.o_proj"] = nn.ParameterDict(out)
    return Some(packed_modules_mapping=FUSED, named_modules=modules.items)


def different(named: dict[str, Tensor], engine: dict[str, Tensor], size: int) -> set[str]:
    """The tensors in which an engine of these, over so many ranks, is not the policy."""
    policy = Some(dtype=named[K].dtype, describe_weights=lambda: {"names": SHAPES, "shapes": SHAPES.values()})
    policy.own_rows = lambda: ((name, False, own_rows(tensor, 5)) for name, tensor in named.items())
    own, held = {name: no_sums(ALONE.device) for name in SHAPES}, []
    for rank in range(size):
        part = engine_part(engine, rank, size)
        world = World(rank, size, size, ALONE.device)
        guard = DriftGuard(policy, world, nullcontext, lambda ask, own=part: [ask(own)])
        held.append(guard.sums_of_engine(part))
    assert guard.names == sorted(SHAPES) and not guard.not_compared
    guard.add_sums_of_policy(own)
    return {name for name in SHAPES if not torch.equal(own[name], sum(each[name] for each in held))}


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (4, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_found_however_an_engine_divides_tensors(size, dtype, change):
    """Every change of a tensor is found, however an engine divides the tensor."""
    generator = torch.Generator().manual_seed(0)
    named = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    changed = CHANGES[change](named)
    assert different(named, named, size) == set() and different(named, named | changed, size) == changed.keys()


@pytest.mark.parametrize("shape", [(64, 64), (500, 1000)])
def test_roundings_of_a_merge_pass_and_a_small_step_does_not(shape):
    """Roundings of a merged tensor count as no difference, and a small optimizer step counts as one."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator).bfloat16()

    def is_different(other: Tensor, merged_size: int) -> bool:  # in one of two engines
        sums = no_sums(whole.device, 3, 1)
        for own, tensor in zip(sums[:, 0], (whole, whole, other), strict=True):
            add_sums(own, tensor)
        return differing(sums[0], sums[1:], torch.tensor([merged_size])).item()

    for share, is_step in [(2**-16, False), (1e-2, True)] * 3:
        steps = (torch.rand(shape, generator=generator) < share) * torch.randn(shape, generator=generator).sign()
        moved = (whole.view(torch.int16) + steps.to(torch.int16)).view(torch.bfloat16)
        assert is_different(moved, whole.numel()) == is_step
    (one := whole.clone())[3, 5] *= 1.01
    assert is_different(one, 0) and not is_different(one, whole.numel()) and not is_different(whole, 0)


def test_the_temperature_is_read_from_log_probs():
    torch.manual_seed(0)
    logits = torch.randn(4000, 32) * 2
    trainer, sampler = (torch.distributions.Categorical(logits=each) for each in (logits, logits / 0.9))
    tokens = sampler.sample()
    terms = temperature_terms(trainer.log_prob(tokens), sampler.log_prob(tokens), trainer.entropy())
    ratio, explained = temperature_of(*(term.mean().item() for term in terms))
    assert abs(ratio - 0.9) < 0.015 and explained > 0.9


@pytest.mark.parametrize("gap", [*CLEAN, (0.02, 0.93, 0.8), (0.06, 1.0, 0.0), (nan, 1.0, 0.0), (0.01, nan, nan)])
def test_no_update_is_made_if_log_probs_are_beyond_the_bound(gap):
    """An update is not made if the gap of its log-probs is beyond --max_rollout_gap."""
    names = ("gap_mean", "temperature", "temperature_r2")
    metrics = {f"policy/rollout_{name}": x for name, x in zip(names, gap, strict=True)} | {"policy/loss": 1.0}
    free, bounded = (UpdateStep(0, 1e-3, True, 1.0, 1, 3, 2, max_rollout_gap=bound) for bound in (0.0, 0.05))
    with nullcontext() if gap in CLEAN else pytest.raises(RunError, match="step 3, update 2 .*rollout_gap 0.05"):
        check_gap(metrics, bounded)
    check_gap(metrics, free)
    check_gap(metrics | {"policy/loss": nan}, bounded)  # then the log-probs say nothing of the sampler


def test_a_sampler_at_another_temperature_ends_the_run(policy, tmp_path):
    """A run whose sampler has another temperature ends before it learns from the samples. Through the program
    itself: the sentence is the last thing said, and its file has the tokens of the step.
    """
    done = run_ranks(2, PROGRAMS, ["cooler", *training_flags(policy, tmp_path / "run")])
    file = tmp_path / "run" / "rollouts" / "step_1.parquet"
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0 and "error: step 1, update 1 is not made" in said and "Traceback" not in done.stderr
    assert "--max_rollout_gap 0.05" in said and f"{file} holds the step's tokens, with both log-probs" in said
    columns = [pyarrow.parquet.read_table(file)[name] for name in ("token_ids", "rollout_logprobs", "old_logprobs")]
    tokens, sampler, trainer = (column.combine_chunks().flatten().to_numpy() for column in columns)
    assert len(columns[0]) == 32 and len(tokens) == len(sampler) and abs(sampler - trainer).mean() > 0.02
    assert not list((tmp_path / "run").glob("step_*")), "no checkpoint"
