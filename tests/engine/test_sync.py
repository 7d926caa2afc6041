"""A sync brings every weight to the engine, however that divides them: found bit by bit, with faults injected into a
real engine, and in tensors made up as vLLM lays them out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compare_weights import DIFFERENT, EQUAL, as_matrix, is_different, parts_of_layer, states_of
from extras.models.lora import Adapter
from flags import Sampling
from fsdp_utils import World
from helpers.distributed import GAP, Trial, on_ranks
from helpers.made_up import load, make_model, one_bit
from runtime.rank import RunError

LAYER_0, LAYER_1 = "layers.0.self_attn", "layers.1.self_attn"
RATE = 1e-5  # a step at it changes no log-prob that one would see
UP_0, K_0, V_0, Q_0, Q_1, OUT_1, NORM_1 = (f"model.layers.{place}.weight" for place in (
    "0.mlp.up_proj", "0.self_attn.k_proj", "0.self_attn.v_proj", "0.self_attn.q_proj", "1.self_attn.q_proj",
    "1.self_attn.o_proj", "1.input_layernorm",
))  # fmt: skip


class FaultTrial(Trial):
    def __init__(self, world: World, path: str, lora_rank: int) -> None:
        sizes = {"prompts_per_step": 8, "prompts_per_update": 8, "dtype": "bfloat16"}
        super().__init__(world, path, lora_rank=lora_rank, learning_rate=RATE, **sizes)
        self.begin()
        self.number, self.sampling = 0, Sampling(4, 1.0, 12)
        rows = load(f"{path}/train.jsonl", self.engine.tokenizer, max_prompt_tokens=8).rows
        self.rows = [replace(row, ids=np.resize(row.ids, 45)) for row in rows[:8]]  # longer than a cache block

    def step(self, bound: float = 0.05) -> float:
        """The gap of a step, whose update is not made if it is beyond the bound; then a sync."""
        self.number += 1
        self.optimizer.zero_grad()  # an update that was not made has left its gradient
        rollout = self.engine.sample(self.rows, self.sampling, (1, self.number))
        self.engine.sleep()
        gap = self.train(rollout, rate=RATE, max_rollout_gap=bound)[GAP]
        self.engine.sync(self.policy.full_weights())
        return gap

    def stream(self, change: Callable[[dict[str, Tensor]], object]) -> AbstractContextManager:
        """What the syncs send is changed."""
        full_weights = self.policy.full_weights

        def changed() -> Iterator[tuple[str, Tensor]]:
            named = dict(full_weights())
            change(named)
            return iter(named.items())

        return patch.object(self.policy, "full_weights", changed)


@contextmanager
def another_kernel(trial: FaultTrial) -> Iterator[None]:
    """The engine computes another function with the same weights."""
    (modules,) = trial.engine.llm.apply_model(lambda model: [*model.modules()])
    norms = [module for module in modules if hasattr(module, "variance_epsilon")]
    with ExitStack() as changes:
        for norm in norms:
            changes.enter_context(patch.object(norm, "variance_epsilon", 3.0))
        yield


def faults_of(trial: FaultTrial) -> dict[str, Callable[[], AbstractContextManager]]:
    """By name: while it is open, syncs have the fault."""
    old = {name: tensor.clone() for name, tensor in trial.policy.full_weights()}
    unmerged = lambda adapter, layer, weight, dtype: weight.to(dtype)  # noqa: E731
    lora_fault = {"adapter not merged": lambda: patch.object(Adapter, "merged", unmerged)}  # which leaves the head
    head_fault = {"head not repacked": lambda: patch("rollout.repack", lambda model: None)}
    return {
        "k and v swapped": lambda: trial.stream(lambda named: named.update({K_0: named[V_0], V_0: named[K_0]})),
        "layers swapped": lambda: trial.stream(lambda named: named.update({Q_0: named[Q_1], Q_1: named[Q_0]})),
        "scaled": lambda: trial.stream(lambda named: named.update({OUT_1: named[OUT_1] * 1.01})),
        "stale": lambda: trial.stream(lambda named: named.update({OUT_1: old[OUT_1]})),
        "one bit": lambda: trial.stream(lambda named: named.update({NORM_1: one_bit(named[NORM_1])})),
        "missing": lambda: trial.stream(lambda named: named.pop(UP_0)),
        "engine not synced": lambda: patch("rollout.Engine.sync", lambda engine, weights: list(weights)),
    } | (lora_fault if trial.policy.adapter else head_fault)


def syncs(world: World, path: str, lora_rank: str) -> tuple[dict[str, list[str]], dict[str, float]]:
    """By name of a fault, the tensors that its sync has not brought; of two, the gap of a step."""
    trial = FaultTrial(world, path, int(lora_rank))
    engine, different = trial.engine, trial.comparison.different_tensors
    cache = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    found, gaps = {"engine without a sync": different()}, {}
    engine.sync(trial.policy.full_weights())
    for name, fault in faults_of(trial).items():
        assert not different()
        with fault():
            trial.step()
            found[name] = different()
            if name in ("scaled", "stale"):
                gaps[name] = trial.step(bound=0.0)
        engine.sync(trial.policy.full_weights())
        engine.prepare((1,))
        assert not len(cache.cached_block_hash_to_block), "keys of old weights would be found"
    assert not different()
    colder = patch.object(trial, "sampling", replace(trial.sampling, temperature=0.9))
    for what_is_no_weight in (colder, another_kernel(trial)):
        with what_is_no_weight, pytest.raises(RunError, match="not made: sampler and trainer give"):
            trial.step()
    engine.close()
    return found, gaps


FAULTS = {  # fault -> the tensors that are not the policy's; a number: how many, at least
    "k and v swapped": [f"{LAYER_0}.k_proj.weight", f"{LAYER_0}.v_proj.weight"],
    "layers swapped": [f"{LAYER_0}.q_proj.weight", f"{LAYER_1}.q_proj.weight"],
    **dict.fromkeys(("scaled", "stale"), [f"{LAYER_1}.o_proj.weight"]),
    "one bit": ["layers.1.input_layernorm.weight"],
    "missing": ["layers.0.mlp.up_proj.weight"],
    "head not repacked": ["lm_head.weight"],
    "adapter not merged": 14,  # the layers that it is on
    **dict.fromkeys(("engine without a sync", "engine not synced"), 14),
}


@pytest.mark.parametrize(("lora_rank", "tp_size"), [(0, 1), (4, 1), (0, 2)], ids=["all weights", "LoRA", "two ranks"])
def test_a_sync_brings_every_weight_and_a_fault_in_it_is_found(lora_rank, tp_size, policy, tmp_path):
    """To the bit, and with its name. What is no weight, another temperature or kernel, shows in the log-probs."""
    if tp_size == 2:  # both ranks hold the same keys
        policy = make_model(tmp_path / "policy", num_attention_heads=4, num_key_value_heads=1, head_dim=32)
    found, gaps = on_ranks(tp_size, syncs, policy, lora_rank, tp_size=tp_size)
    assert found.keys() == FAULTS.keys() - {"head not repacked" if lora_rank else "adapter not merged"}
    for fault, names in found.items():
        wanted = FAULTS[fault]
        assert len(names) >= wanted if isinstance(wanted, int) else names == wanted, fault
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


def engine_part(named: dict[str, Tensor], rank: int, size: int) -> dict[str, nn.ParameterDict]:
    """The layers that a rank of an engine holds, as vLLM divides, fuses and pads them."""

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
    return modules


def different(named: dict[str, Tensor], engine: dict[str, Tensor], size: int) -> set[str]:
    """The tensors in which an engine of these, over so many ranks, is not the policy."""
    parts = defaultdict(list)
    for rank in range(size):
        for name, module in engine_part(engine, rank, size).items():
            for part in parts_of_layer(name, module, FUSED, SHAPES, rank, size):
                parts[part.name].append(part)
    assert parts.keys() == SHAPES.keys()
    states = {name: states_of(as_matrix(whole), parts[name]) for name, whole in named.items()}
    return {name for name, each in states.items() if is_different(each, is_merged=False)}


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (4, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_found_however_an_engine_divides_tensors(size, dtype, change):
    generator = torch.Generator().manual_seed(0)
    named = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    changed = CHANGES[change](named)
    assert different(named, named, size) == set() and different(named, named | changed, size) == changed.keys()


def test_roundings_of_a_merge_pass_and_a_small_step_or_a_part_that_is_not_there_does_not():
    states = torch.full((500, 1000), EQUAL, dtype=torch.uint8)
    for num_different, is_step in ((4, False), (40, False), (5000, True)):
        states.view(-1)[:num_different] = DIFFERENT
        assert is_different(states, is_merged=True) == is_step and is_different(states, is_merged=False)
    whole = torch.ones(4, 3)
    assert is_different(states_of(whole, []), is_merged=True), "nothing of it is in the engine"
