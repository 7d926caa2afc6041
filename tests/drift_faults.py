"""On ranks: faults between sampler and trainer, injected one after the other into a real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
from torch import Tensor, nn
from transformers import AutoTokenizer

import rollout as rollout_module
from data import PromptData
from engine.drift import DriftGuard
from flags import EngineSettings, PromptFormat, Sampling
from fsdp_utils import World
from helpers import build, flags, one_bit, train_once, whole_update
from model import lora as adapters
from rollout import Engine
from runtime.start import RunError

GAP, RATE = "policy/rollout_gap_mean", 1e-5  # a step at it changes no log-prob that one would see
UP, K, V, Q, NEXT_Q, OUT, NORM = (f"model.layers.{place}.weight" for place in (
    "0.mlp.up_proj", "0.self_attn.k_proj", "0.self_attn.v_proj", "0.self_attn.q_proj", "1.self_attn.q_proj",
    "1.self_attn.o_proj", "1.input_layernorm",
))  # fmt: skip


class Trial:
    """A run of steps by hand: sample, update, sync."""

    def __init__(self, world: World, path: str, lora_rank: int) -> None:
        self.world, self.number, self.gap = world, 0, 0.0
        sizes = {"group_size": 4, "prompts_per_step": 8, "prompts_per_update": 8, "dtype": "bfloat16"}
        self.args = flags(model=path, lora_rank=lora_rank, learning_rate=RATE, head_dtype="float32", **sizes)
        self.policy, _, self.optimizer = build(self.args, self.world)
        tokenizer = AutoTokenizer.from_pretrained(path)
        settings = EngineSettings(64, "bfloat16", "float32", gpu_memory_utilization=0.3, enforce_eager=True)
        make_guard = partial(DriftGuard, self.policy, self.world, nullcontext)
        self.engine = Engine(path, tokenizer, self.world, settings, make_guard=make_guard)
        rows = PromptData.load(f"{path}/train.jsonl", PromptFormat(max_prompt_tokens=8), tokenizer, seed=0).rows
        self.rows = [replace(row, ids=np.resize(row.ids, 45)) for row in rows[:8]]  # longer than a block of the cache
        self.sampling = Sampling(4, 1.0, 12)

    def step(self, bound: float = 0.05) -> str | None:
        """What would have ended the run in it."""
        self.number += 1
        self.optimizer.zero_grad()  # an update that was not made has left its gradient
        try:
            rollout = self.engine.sample(self.rows, self.sampling, (1, self.number))
            self.engine.sleep()
            advantages = [np.full(len(c), (-1) ** b, dtype=np.float32) for b, c in enumerate(rollout.completions)]
            rollout = replace(rollout, advantages=advantages, loss_weights_B=np.full(32, 1e-2, dtype=np.float32))
            update = whole_update(rollout, self.args, self.policy, self.world)
            step = {"rate": RATE, "max_rollout_gap": bound}
            self.gap = train_once(self.policy, self.optimizer, update, self.args, self.world, **step)[GAP]
        except RunError as error:
            return str(error)
        self.engine.sync(self.policy.full_weights())
        return None

    def stream(self, change: Callable[[dict[str, Tensor]], object]) -> AbstractContextManager:
        """What the syncs send is changed."""
        full_weights = self.policy.full_weights

        def changed() -> Iterator[tuple[str, Tensor]]:
            named = dict(full_weights())
            change(named)
            return iter(named.items())

        return patch.object(self.policy, "full_weights", changed)


def another_kernel(trial: Trial) -> AbstractContextManager:
    """The engine computes another function with the same weights."""
    changes = ExitStack()

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                changes.enter_context(patch.object(module, "variance_epsilon", 3.0))

    trial.engine.llm.apply_model(change)
    return changes


def faults_of(trial: Trial) -> dict[str, Callable[[], AbstractContextManager]]:
    """By name: while it is open, syncs or calls have the fault."""
    engine, old = trial.engine, {name: tensor.clone() for name, tensor in trial.policy.full_weights()}
    unmerged = lambda layer, weight, dtype: weight.to(dtype)  # noqa: E731
    of_lora = {"adapter not merged": lambda: patch.object(adapters, "merged", unmerged)}  # which leaves the head
    of_head = {"head not repacked": lambda: patch.object(rollout_module, "_repack_head", lambda model: None)}
    return {
        "k and v swapped": lambda: trial.stream(lambda named: named.update({K: named[V], V: named[K]})),
        "layers swapped": lambda: trial.stream(lambda named: named.update({Q: named[NEXT_Q], NEXT_Q: named[Q]})),
        "scaled": lambda: trial.stream(lambda named: named.update({OUT: named[OUT] * 1.01})),
        "stale": lambda: trial.stream(lambda named: named.update({OUT: old[OUT]})),
        "one bit": lambda: trial.stream(lambda named: named.update({NORM: one_bit(named[NORM])})),
        "missing": lambda: trial.stream(lambda named: named.pop(UP)),
        "engine not synced": lambda: patch.object(Engine, "sync", lambda engine, weights: list(weights)),
        "prefix cache kept": lambda: patch.object(engine.llm, "reset_prefix_cache", lambda: True),
        "wrong temperature": lambda: patch.object(trial, "sampling", replace(trial.sampling, temperature=0.9)),
        "kernel": lambda: another_kernel(trial),
    } | (of_lora if trial.policy.has_adapter else of_head)


def main(world: World, path: str, lora_rank: str) -> dict[str, object]:
    """The sentence that would have ended the run, of each fault and of the clean steps in between (None: none)."""
    trial = Trial(world, path, int(lora_rank))
    engine = trial.engine
    found: dict[str, object] = {"engine without a sync": trial.step(), "gaps": {}}
    engine.sync(trial.policy.full_weights())
    clean = [trial.step() for _ in range(3)]
    for name, fault in faults_of(trial).items():
        with fault():  # in the sync of the first step, or in its sampling: it must be found before the next is trained
            found[name] = trial.step() or trial.step()
            if name in ("scaled", "stale"):
                with patch.object(engine, "guard", None):
                    trial.step(bound=0.0)
                found["gaps"][name] = trial.gap
        engine.llm.reset_prefix_cache()
        engine.sync(trial.policy.full_weights())
        clean.append(trial.step())
    engine.close()
    return found | {"clean": clean}
