"""What a sleep of level 2 loses: tensors of the engine's model that are neither parameters nor buffers.

On CUDA all that is allocated while vLLM loads a model lies in the memory that this sleep drops. A sync brings the
parameters back and vLLM itself the buffers (`gpu_worker.Worker.sleep`); whatever else there is holds garbage then.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

from fsdp_utils import World

NOT_LOST = {
    "_parameters", "_buffers", "_modules",  # of every nn.Module
    "kv_cache",  # in memory of its own; after a sleep it is empty, and vLLM knows that
    "_rope_by_thw_cache",  # Qwen2.5-VL's tower fills it when it runs: not in the memory that a sleep drops
    "_k_scale_cpu", "_v_scale_cpu",  # read by ROCm's kernels alone
    "cpu_linear",  # the matrix in the order that the CPU's kernel wants; a GPU has none
}  # fmt: skip


def hidden_tensors(model: nn.Module) -> list[str]:
    """module.attribute of what holds a tensor that shares no memory with a parameter or a buffer of the model."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in NOT_LOST:
                hidden = [x for x in tensors(value, set()) if x.untyped_storage().data_ptr() not in known]
                found += [f"{path}.{name}"] * bool(hidden)
    return found


def tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in it: in containers, closures, partial functions and vLLM's own objects; not in other modules."""
    if id(value) in seen or isinstance(value, nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, functools.partial):
        yield from tensors([value.func, value.args, value.keywords], seen)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()), seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from tensors(each, seen)
    elif getattr(value, "__closure__", None):
        yield from tensors([cell.cell_contents for cell in value.__closure__], seen)
    elif hasattr(value, "__self__"):
        yield from tensors(value.__self__, seen)
    elif type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__"):
        yield from tensors(vars(value), seen)


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


def main(world: World, folder: str) -> dict[str, list[str]]:
    """The findings for this model."""
    from transformers import AutoTokenizer

    from flags import EngineSettings
    from rollout import Engine

    settings = EngineSettings(64, gpu_memory_utilization=0.3, enforce_eager=True)
    engine = Engine(folder, AutoTokenizer.from_pretrained(folder), world, settings)
    found = findings(engine)
    engine.close()
    return found
