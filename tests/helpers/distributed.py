"""Work on several ranks: `on_ranks`, and what works do with the real FSDP model. Each stands beside its test."""

from __future__ import annotations

import functools
import gc
import pkgutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

import fsdp_utils
from algorithm import algorithm_of
from batch import Rollout, Update
from command_line import parse_flags
from compare_weights import Comparison
from engine.options import ANY_TEXT, EngineDemand
from flags import EngineSettings
from fsdp_utils import World, shard
from gate.checks import check_flags
from helpers import made_up
from helpers.made_up import build, flags, make_rollout, train_once, whole_update
from helpers.runs import CALL, name_of, torchrun
from policy import Policy
from update import add_logprobs

Metrics = dict[str, float]
Tensors = dict[str, torch.Tensor]
Result = tuple[Metrics, Tensors]  # metrics and gradients of an update
Trained = tuple[Policy, Policy | None, torch.optim.Optimizer]  # as `build` returns it


def on_ranks(num_ranks: int, work: Callable, *arguments: object, tp_size: int = 1) -> object:
    """What the work returns on the first rank: a function of a test file, which takes the world and texts."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/found.pt"
        torchrun(num_ranks, CALL, name_of(run_work), name_of(work), tp_size, output, *arguments)
        return torch.load(output, weights_only=False)


def run_work(work: str, tp_size: str, output: str, *arguments: str) -> None:
    world = fsdp_utils.init_world(int(tp_size), timeout_minutes=10)
    found = pkgutil.resolve_name(work)(world, *arguments)
    if world.is_main:
        torch.save(found, output)
    fsdp_utils.close_world()


def parsed(words: str, num_trainers: int = 1) -> Namespace:
    """The program's flags of such a work, checked."""
    sizes = "--total_steps 1 --max_prompt_tokens 4 --max_completion_tokens 12 --micro_batch_tokens 40"
    args = parse_flags(f"--model m --train_data d --out_dir o {sizes} {words}".split())
    check_flags(args, num_trainers)
    return args


def sharded(policy: Policy, world: World, dtype: torch.dtype = torch.float32, **options: bool) -> Policy:
    """The policy itself; its arithmetic has this dtype."""
    shard(policy, policy.layers, world, dtype, **options)
    return policy


def weights_of(policy: Policy) -> Tensors:
    """As the engine gets them, on the host."""
    return {name: full.to("cpu", copy=True) for name, full in policy.full_weights()}


def kept_gradients(policy: Policy, optimizer: torch.optim.Optimizer) -> Tensors:
    """Whole gradients, by name: those of the last step that the optimizer has made."""
    gradients: Tensors = {}

    def keep(*_: object) -> None:
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()

    optimizer.register_step_pre_hook(keep)
    return gradients


def scored(rollout: Rollout, policy: Policy, reference: Policy | None, args: Namespace, world: World) -> Update:
    """The rollout as one update, after its passes for log-probs."""
    return add_logprobs([whole_update(rollout, args, policy, world)], policy, reference, algorithm_of(args))[0]


def recorded(policy: Policy, update: Update, args: Namespace, world: World, **changes: object) -> Result:
    """An update by plain gradient descent, at the rate 0 if nothing else is given."""
    optimizer = torch.optim.SGD(x for x in policy.parameters() if x.requires_grad)
    gradients = kept_gradients(policy, optimizer)
    return train_once(policy, optimizer, update, args, world, **changes), gradients


def train(trained: Trained, args: Namespace, world: World, count: int) -> list[Metrics]:
    policy, reference, optimizer = trained
    metrics = []
    for index in range(count):
        update = scored(make_rollout(), policy, reference, args, world)
        metrics.append(train_once(policy, optimizer, update, args, world, rate=1e-3, index=index))
    return metrics


def watched(name: str, note: Callable[..., None]) -> AbstractContextManager:
    """Notes each call of this collective, with its arguments; a mock would keep all buffers."""
    collective = getattr(dist, name)

    def call(*arguments: object, **options: object) -> object:
        note(*arguments)
        return collective(*arguments, **options)

    return patch.object(dist, name, call)


# vLLM's engine beside the trainer; it is imported on ranks alone ------------------------------------------------------

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
