"""Work on several ranks: `on_ranks`, and what works do with the real FSDP model. Each stands beside its test."""

from __future__ import annotations

import pkgutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fsdp_utils
from algorithm import algorithm_of
from batch import Rollout, Update
from command_line import parse_flags
from fsdp_utils import World, shard
from gate.checks import check_flags
from helpers.made_up import make_rollout, train_once, whole_update
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
    """On each rank."""
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
    """So many updates on one rollout."""
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
