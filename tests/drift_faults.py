"""Run under torchrun: faults between sampler and trainer, injected one after the other into a real engine. Writes as
JSON what was found of each, in the step in which it was injected, and of the clean steps in between.

torchrun --nproc_per_node 2 tests/drift_faults.py POLICY_FOLDER TP_SIZE LORA_RANK OUTPUT_FILE
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from torch import Tensor, nn
from transformers import AutoTokenizer

import rollout as rollout_module
from data import PromptData
from flags import DriftBounds, EngineSettings, PromptFormat, Sampling
from fsdp_utils import close_world, gather_from_ranks, init_world
from helpers import build, flags, train_once, whole_update
from model import lora as adapters
from rollout import Engine
from rollout_checks import DriftGuard

RATE = 1e-5  # a step at it changes no log-prob that one would see
UP, K, V, Q, Q_OF_NEXT, OUT = (f"model.layers.{place}.weight" for place in (
    "0.mlp.up_proj", "0.self_attn.k_proj", "0.self_attn.v_proj", "0.self_attn.q_proj", "1.self_attn.q_proj",
    "1.self_attn.o_proj",
))  # fmt: skip


class Trial:
    """A run of steps by hand: sample, update, sync."""

    def __init__(self, path: str, tp_size: int, lora_rank: int) -> None:
        self.world = init_world(tp_size, timeout_minutes=2)
        self.args = flags(
            model=path,
            lora_rank=lora_rank,
            group_size=4,
            prompts_per_step=8,
            prompts_per_update=8,
            learning_rate=RATE,
            head_dtype="float32",
        )
        self.policy, _, self.optimizer = build(self.args, self.world)
        folder = tempfile.mkdtemp()
        self.said: list[str] = []
        self.run = SimpleNamespace(
            world=self.world, step=0, updates=[], out_dir=Path(gather_from_ranks(folder)[0]), say=self.said.append,
            phase=lambda name: nullcontext(),
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(path)
        settings = EngineSettings(64, "bfloat16", "float32", gpu_memory_utilization=0.3, enforce_eager=True)
        self.engine = Engine(path, tokenizer, self.world, settings)
        bounds = DriftBounds(on_rollout_gap="go_on")
        self.engine.guard = DriftGuard(self.engine, self.policy, self.run, bounds)
        rows = PromptData.load(f"{path}/train.jsonl", PromptFormat(max_prompt_tokens=8), tokenizer, seed=0).rows
        self.rows = [replace(row, ids=np.resize(row.ids, 45)) for row in rows[:8]]  # longer than a block of the cache
        self.sampling = Sampling(4, 1.0, 12)
        self.gap = 0.0

    def step(self) -> dict | None:
        """What was found in it; None: nothing was said."""
        self.run.step += 1
        self.run.updates = []
        rollout = self.engine.sample(self.rows, self.sampling, (1, self.run.step))
        self.engine.sleep()
        rng = np.random.default_rng(self.run.step)
        advantages = [np.full(len(c), rng.normal(), dtype=np.float32) for c in rollout.completions]
        rollout = replace(rollout, advantages=advantages, loss_weights_B=np.full(32, 1e-2, dtype=np.float32))
        update = whole_update(rollout, self.args, self.policy, self.world)
        self.run.updates = [train_once(self.policy, self.optimizer, update, self.args, self.world, rate=RATE)]
        self.gap = self.run.updates[0]["policy/rollout_gap_mean"]
        self.engine.sync(self.policy.full_weights())
        file = self.run.out_dir / f"drift_step_{self.run.step}" / "findings.json"
        gather_from_ranks(None)  # the main process has written it
        return json.loads(file.read_text()) if file.exists() else None

    @contextmanager
    def stream(self, change: Callable[[dict[str, Tensor]], None]) -> Iterator[None]:
        """What the syncs send is changed."""
        full_weights = self.policy.full_weights

        def changed() -> Iterator[tuple[str, Tensor]]:
            named = dict(full_weights())
            change(named)
            yield from named.items()

        with patch.object(self.policy, "full_weights", changed):
            yield

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.policy.full_weights()}


def swap(named: dict[str, Tensor], one: str, other: str) -> None:
    named[one], named[other] = named[other], named[one]


def break_norms(model: nn.Module) -> None:
    """The engine computes another function with the same weights."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 3.0 if module.variance_epsilon < 1 else 1e-6


@contextmanager
def another_kernel(trial: Trial) -> Iterator[None]:
    trial.engine.llm.apply_model(break_norms)
    yield
    trial.engine.llm.apply_model(break_norms)


def faults_of_weights(trial: Trial) -> dict[str, Callable]:
    old = trial.weights()
    return {
        "k and v swapped": lambda: trial.stream(lambda named: swap(named, K, V)),
        "layers swapped": lambda: trial.stream(lambda named: swap(named, Q, Q_OF_NEXT)),
        "scaled": lambda: trial.stream(lambda named: named.update({OUT: named[OUT] * 1.01})),
        "stale": lambda: trial.stream(lambda named: named.update({OUT: old[OUT]})),
    }


def main(path: str, tp_size: str, lora_rank: str, output: str) -> None:
    trial = Trial(path, int(tp_size), int(lora_rank))
    engine, found = trial.engine, {}
    found["engine without a sync"] = trial.step()
    found["clean"] = [trial.step() for _ in range(3)]

    def inject(name: str, fault: Callable, num_steps: int = 2) -> None:
        """In the sync of a step, or in its sampling; it must be found before the next one is trained."""
        with fault():
            steps = [trial.step() for _ in range(num_steps)]
        found[name] = next((each for each in steps if each), None)
        if found[name] is not None:
            found[name]["gap_of_step"] = trial.gap
        engine.llm.reset_prefix_cache()
        engine.sync(trial.policy.full_weights())
        found["clean"].append(trial.step())

    for name, fault in faults_of_weights(trial).items():
        inject(name, fault)
    if trial.policy.has_adapter:
        unmerged = lambda layer, weight, dtype: weight.to(dtype)  # noqa: E731
        inject("adapter not merged", lambda: patch.object(adapters, "merged", unmerged))
    inject("engine not synced", lambda: patch.object(Engine, "sync", lambda engine, weights: list(weights)))
    # Once: vLLM fills its place with whatever the memory held, and what is sampled then leaves nan in the cache.
    with trial.stream(lambda named: named.pop(UP)):
        engine.sync(trial.policy.full_weights())
    found["missing once"] = trial.step()
    inject("head not repacked", lambda: patch.object(rollout_module, "_repack_head", lambda model: None))
    inject("prefix cache kept", lambda: patch.object(engine.llm, "reset_prefix_cache", lambda: True))
    cooler = replace(trial.sampling, temperature=0.9)
    inject("wrong temperature", lambda: patch.object(trial, "sampling", cooler), 1)
    inject("kernel", lambda: another_kernel(trial), 1)
    if trial.world.is_main:
        Path(output).write_text(json.dumps(found | {"said": trial.said}))
    engine.close()
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
