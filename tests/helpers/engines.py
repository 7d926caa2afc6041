"""On ranks: vLLM's real engine beside the trainer. Tests import this file, and vLLM is imported on ranks alone."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import BuiltinMethodType, CellType, FunctionType, MethodType

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from batch import Rollout
from compare_weights import Comparison
from engine.options import ANY_TEXT, EngineDemand
from flags import EngineSettings
from fsdp_utils import World
from helpers import made_up
from helpers.made_up import build, flags, train_once, whole_update
from policy import Policy

GAP, TEMPERATURE = "policy/rollout_gap_mean", 0.7  # not 1, so that a temperature that only one side applies would show


def start_engine(path: Path | str, world: World, demand: EngineDemand = ANY_TEXT, **changes: object) -> object:
    from rollout import Engine

    settings = {"max_model_len": 64, "gpu_memory_utilization": 0.3, "enforce_eager": True} | changes
    return Engine(str(path), AutoTokenizer.from_pretrained(path), world, EngineSettings(**settings), demand)


def trainer_logprobs(policy: Policy, rollout: Rollout) -> Tensor:
    """The trainer's log-probs of the sampled tokens, sequence after sequence."""
    rollout = replace(rollout, loss_weights_B=np.zeros(len(rollout.texts), dtype=np.float32))
    batch = made_up.pack_with_images(rollout, list(range(len(rollout.texts))))
    with torch.no_grad():
        scores = policy(batch.to(next(policy.parameters()).device), TEMPERATURE)
    return scores.logprobs_N.cpu()[batch.loss_mask_N]


def sampler_logprobs(rollout: Rollout) -> Tensor:
    return torch.from_numpy(np.concatenate(rollout.rollout_logprobs))


def gaps(policy: Policy, rollout: Rollout) -> Tensor:
    """Absolute differences of token probabilities, sampler against trainer."""
    return (trainer_logprobs(policy, rollout).exp() - sampler_logprobs(rollout).exp()).abs()


class Trial:
    """Steps of GRPO by hand on the model in a folder: `begin`, then sample, train, sync."""

    def __init__(self, world: World, path: str | Path, **changes: object) -> None:
        self.world, self.path = world, path
        self.args = flags(model=path, group_size=4, head_dtype="float32", **changes)
        self.policy, _, self.optimizer = build(self.args, world)

    def begin(self, **options: object) -> None:
        dtypes = {"dtype": self.args.dtype, "head_dtype": self.args.head_dtype}
        self.engine = start_engine(self.path, self.world, **dtypes, **options)
        self.comparison = Comparison(self.policy, self.world, self.engine.llm.apply_model)

    def train(self, rollout: Rollout, **step: object) -> dict[str, float]:
        """The metrics of an update by which every second completion becomes less likely."""
        advantages = [np.full(len(c), (-1) ** b, dtype=np.float32) for b, c in enumerate(rollout.completions)]
        weights = np.full(len(advantages), 1e-2, dtype=np.float32)
        rollout = replace(rollout, advantages=advantages, loss_weights_B=weights)
        update = whole_update(rollout, self.args, self.policy, self.world)
        return train_once(self.policy, self.optimizer, update, self.args, self.world, **step)


# What a sleep of level 2 loses: tensors of the engine's model that are neither parameters nor buffers. On CUDA all that
# is allocated while vLLM loads a model lies in the memory that this sleep drops. A sync brings the parameters back and
# vLLM itself the buffers (`gpu_worker.Worker.sleep`); whatever else there is holds garbage then. ----------------------

NOT_LOST = {
    "_parameters", "_buffers", "_modules",  # every nn.Module has them
    "kv_cache",  # in memory of its own; after a sleep it is empty, and vLLM knows that
    "_rope_by_thw_cache",  # Qwen2.5-VL's tower fills it when it runs: not in the memory that a sleep drops
    "_k_scale_cpu", "_v_scale_cpu",  # read by ROCm's kernels alone
    "_cpu_unpacked_conv_weight",  # read by speculative decoding alone; CPUs with bf16 of their own have it
    "cpu_linear",  # the matrix in the order that the CPU's kernel wants; a GPU has none
}  # fmt: skip
HOLDERS = dict, list, tuple, set, frozenset, functools.partial, CellType, MethodType, BuiltinMethodType


def hidden_tensors(model: nn.Module) -> list[str]:
    """module.attribute of what holds a tensor whose memory is no parameter's and no buffer's."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    found = []
    for path, module in model.named_modules():
        for name in vars(module).keys() - NOT_LOST:
            storages = {x.untyped_storage().data_ptr() for x in tensors(vars(module)[name], set())}
            found += [f"{path}.{name}"] * bool(storages - known)
    return found


def tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in it: in containers, closures, partial functions and vLLM's own objects; not in other modules."""
    if id(value) in seen or isinstance(value, nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    holder = value.__closure__ if isinstance(value, FunctionType) else value  # not the globals of a function
    if isinstance(holder, HOLDERS) or type(value).__module__.startswith("vllm."):
        for each in gc.get_referents(holder):
            yield from tensors(each, seen)


def plant(model: nn.Module) -> None:
    """Hides a tensor where the scan has to find it."""
    first = next(module for module in model.modules() if not list(module.children()))
    first.planted = [functools.partial(torch.add, torch.ones(3))]


def findings(engine: object) -> dict[str, list[str]]:
    """The hidden tensors of the engine's model, as it is and after `plant`."""
    (hidden,) = engine.llm.apply_model(hidden_tensors)
    engine.llm.apply_model(plant)
    (with_planted,) = engine.llm.apply_model(hidden_tensors)
    return {"hidden": hidden, "planted": [name for name in with_planted if name not in hidden]}
