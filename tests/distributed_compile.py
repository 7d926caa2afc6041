"""On ranks: an update with --compile beside the same one in eager mode, on the real FSDP model."""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from batch import Rollout
from bench_common import Trainer, flags_of
from bench_update import count_compilations
from fsdp_utils import World
from helpers import build, flags, make_rollout, train_once, whole_update
from inputs.choices import algorithm_of
from update import add_logprobs
from vision_models import vision_data, vision_flags, vision_rollout

COMMON = {"dtype": "float32", "group_size": 2, "prompts_per_step": 4, "micro_batch_tokens": 40}
CASES = {  # ranks -> name -> flags
    2: {
        "all weights": {"kl_coef": 0.1, "num_iterations": 2},
        "recomputed, on the host": {"kl_coef": 0.1, "gradient_checkpointing": True, "offload": "all"},
        "prompts shared": {"share_prompts": True},
        "copies": {"shard_ranks": 1},
        "teacher": {"kl_coef": 0.5, "kl_over": "vocabulary", "communicate_once": True},
    },
    # By a backend that traces and differentiates as inductor does, and leaves the arithmetic to torch: the kernels of
    # these cases would be half a minute of the C++ compiler each. Those of the others are the same.
    1: {
        "LoRA, recomputed": {
            "lora_rank": 3, "kl_coef": 0.1, "gradient_checkpointing": True, "lora_targets": "v_proj",
        },
        "images": {"kl_coef": 0},
    },
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def train(args: Namespace, rollout: Rollout, world: World) -> tuple[dict[str, float], Tensors, Tensors]:
    """One update: its metrics and gradients, and the weights that plain gradient descent makes of them."""
    policy, reference, _ = build(args, replace(world, shard_ranks=args.shard_ranks))
    names = list(policy.state_dict())
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    optimizer, gradients = torch.optim.SGD(trained.values()), {}  # Adam makes a step of a gradient that is rounding
    optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: x.grad.full_tensor().clone() for name, x in trained.items()})
    )
    update = whole_update(rollout, args, policy, world)
    (update,) = add_logprobs([update], policy, reference, algorithm_of(args))
    metrics = train_once(policy, optimizer, update, args, world, rate=0.1)
    assert names == list(policy.state_dict()) and not any("_orig_mod" in name for name in names)
    return metrics, gradients, {name: full.clone() for name, full in policy.full_weights()}


def main(world: World, path: str, vision: str) -> dict[str, object]:
    """Case -> (graphs that were compiled, update in eager mode, compiled update); "counts": those of the benchmark."""
    torch._dynamo.config.disable = True  # as an engine on CPUs does
    found, backend = {}, {}
    # Rank 1 computes its half of the batch by a backend that traces and differentiates as inductor does, and leaves the
    # arithmetic to torch: the kernels would be the same ones again.
    if world.num_trainers == 1 or not world.is_main:
        backend = {"backend": "aot_eager"}
    if world.num_trainers > 1:
        with mock.patch.object(torch, "compile", partial(torch.compile, **backend)):
            trainer = Trainer(flags_of(path, "--dtype", "float32", "--compile"), world)
        lengths = np.random.default_rng(0).permutation(np.arange(2, 100, 5)).tolist()
        found["counts"] = count_compilations(trainer, 64, lengths)
    for name, changes in CASES[world.num_trainers].items():
        args, rollout = flags(model=path, **COMMON | changes), make_rollout(group_size=2)
        if name == "images":
            args = vision_flags(Path(vision), **changes)
            rollout = vision_rollout(vision_data(args))
        eager, before = train(args, rollout, world), counters["stats"]["unique_graphs"]
        args.compile = True
        with mock.patch.object(torch, "compile", partial(torch.compile, **backend)):
            compiled = train(args, rollout, world)
        found[name] = counters["stats"]["unique_graphs"] - before, eager, compiled
    return found
