"""On ranks: one engine after the other, of tiny models of many families, each with its trainer."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from vllm.model_executor.models import registry

from batch import Rollout, pack
from checkpoint import export, files_of, gather_weights
from engine.drift import DriftGuard
from engine.options import Demand
from flags import EngineSettings, Sampling
from fsdp_utils import World
from helpers import build, flags, make_row, train_once, whole_update
from hidden_tensors import hidden_tensors
from policy import Policy
from rollout import Engine
from warm_start import build_tokenizer

PROMPTS, SAMPLING = (3, 45, 9, 20), Sampling(4, 0.7, 12)  # tokens of each; the temperature would show


def make_model(folder: Path, model_type: str, **changes: object) -> None:
    """A random model with the CPU job's tokenizer. `changes` of its config; None takes a size away."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    sizes = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "initializer_range": 0.1, "bos_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | changes  # fmt: skip
    config = AutoConfig.for_model(model_type, **{name: x for name, x in sizes.items() if x is not None})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms begin at 0 or 1, biases at 0: a wrong one would not show
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def logprobs_of(policy: Policy, rollout: Rollout) -> torch.Tensor:
    """The trainer's, of the sampled tokens, sequence after sequence."""
    rollout = replace(rollout, loss_weights_B=np.zeros(len(rollout.texts), dtype=np.float32))
    batch = pack(rollout, list(range(len(rollout.texts))))
    with torch.no_grad():
        return policy(batch, SAMPLING.temperature)[0][batch.loss_mask_N]


def gap(policy: Policy, rollout: Rollout) -> float:
    """The largest difference of the log-probs of a sampled token, trainer against sampler."""
    return (
        (logprobs_of(policy, rollout) - torch.from_numpy(np.concatenate(rollout.rollout_logprobs))).abs().max().item()
    )


class Trial:
    """A step of GRPO by hand on the model in the folder, and one of its adapter."""

    def __init__(self, world: World, folder: Path) -> None:
        sizes = {"group_size": 4, "prompts_per_step": 4, "prompts_per_update": 4, "dtype": "float32"}
        self.args, self.world, self.folder = flags(model=folder, learning_rate=1e-2, **sizes), world, folder
        self.policy, _, self.optimizer = build(self.args, world)
        self.args_of_lora = Namespace(**vars(self.args) | {"lora_rank": 3})
        self.adapted, _, self.optimizer_of_lora = build(self.args_of_lora, world)

    def run(self) -> dict[str, object]:
        """A rollout, the trainer's log-probs of it before and after an update, and the gaps to the engine's."""
        policy, tokenizer = self.policy, AutoTokenizer.from_pretrained(self.folder)
        settings = EngineSettings(64, "float32", "float32", gpu_memory_utilization=0.3, enforce_eager=True)
        make_guard = partial(DriftGuard, policy, self.world, nullcontext)
        engine = Engine(str(self.folder), tokenizer, self.world, settings, Demand(16), make_guard=make_guard)
        (hidden,) = engine.llm.apply_model(hidden_tensors)
        engine.sync(policy.full_weights())
        rng = np.random.default_rng(0)
        rows = [make_row(rng.integers(0, 64, length)) for length in PROMPTS]
        rollout = engine.sample(rows, SAMPLING, (1, 1))
        found = {"rollout": replace(rollout, texts=[]), "logprobs": logprobs_of(policy, rollout)}
        found |= {"gap": gap(policy, rollout), "hidden": hidden, "not compared": engine.guard.not_compared}
        advantages = [np.full(len(c), (-1) ** b, dtype=np.float32) for b, c in enumerate(rollout.completions)]
        rollout = replace(rollout, advantages=advantages, loss_weights_B=np.full(16, 1e-2, dtype=np.float32))
        update = whole_update(rollout, self.args, policy, self.world)
        train_once(policy, self.optimizer, update, self.args, self.world, rate=1e-2)
        found |= {"gap of a stale engine": gap(policy, rollout), "logprobs after": logprobs_of(policy, rollout)}
        engine.sync(policy.full_weights())
        found["gap after"] = gap(policy, engine.sample(rows, SAMPLING, (1, 2)))
        args, adapted = self.args_of_lora, self.adapted
        update = whole_update(rollout, args, adapted, self.world)
        train_once(adapted, self.optimizer_of_lora, update, args, self.world, rate=1e-2)
        found["logprobs with LoRA"] = logprobs_of(adapted, rollout)
        for trained, name in ((policy, "exported"), (adapted, "with LoRA exported")):
            exported = self.folder.with_name(f"{self.folder.name} {name}")
            export(trained, gather_weights(trained, self.world), files_of([tokenizer]), exported)
        return found


def main(world: World, folder: str, *names: str) -> dict[str, dict[str, object]]:
    """Name of a model in the folder -> what was found. Trainers come before engines, as in a run."""
    registry._run_in_subprocess = lambda function: function()  # it looks at a class of models, for 6 s the first time
    trials = {name: Trial(world, Path(folder) / name) for name in names}
    return {name: trial.run() for name, trial in trials.items()}
