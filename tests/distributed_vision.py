"""On ranks: images on the real FSDP model and the real engine."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from batch import Rollout, Update
from checkpoint import export, files_of, gather_weights
from distributed_gradient import recorded
from engine.options import Demand
from flags import EngineSettings, Sampling
from fsdp_utils import World, gather_from_ranks, shard
from hidden_tensors import findings
from inputs.choices import algorithm_of
from policies import policy_of
from policy import Policy
from update import add_logprobs, with_advantages
from vision_models import pack_with_images, vision_data, vision_flags, vision_rollout

WITH_IMAGES, WITHOUT = [[0], [2, 4]], [[1], [3]]  # micro-batches of two ranks: the second has no image at all


def gradient(policy: Policy, args: Namespace, world: World, micros: list[list[int]]) -> tuple[dict, dict]:
    """(metrics, name -> gradient) of an update on these micro-batches, after a pass of the reference."""
    rollout = vision_rollout(vision_data(args))
    update = Update(
        [with_advantages(rollout, pack_with_images(rollout, indices)) for indices in micros], 29, len(rollout.rows)
    )
    (update,) = add_logprobs([update], policy, policy, algorithm_of(args))
    return recorded(policy, update, args, world)


def gaps(policy: Policy, rollout: Rollout) -> list[float]:
    """The largest difference of token probabilities of each completion, sampler against trainer."""
    found = []
    for b in range(len(rollout.texts)):
        batch = pack_with_images(rollout, [b])
        with torch.no_grad():
            gap_N = (policy(batch, 0.7)[0].exp() - batch.rollout_logprobs_N.exp()).abs()
        found.append(gap_N[batch.loss_mask_N].max().item())
    return found


def main(world: World, path: str, exported: str) -> dict[str, object]:
    """Also exports the policy with LoRA."""
    from rollout import Engine  # here, not above: the tests use the functions of this file without vLLM

    found: dict[str, object] = {"gradients": {}}
    for name, changes in (("all weights", {}), ("LoRA", {"lora_rank": 4, "gradient_checkpointing": True})):
        args = vision_flags(path, **changes)
        policy = policy_of(args)
        shard(policy, policy.layers, world, torch.float32)
        found["gradients"][name] = gradient(policy, args, world, WITHOUT if world.trainer_rank else WITH_IMAGES)

    data = vision_data(args)
    vision = data.rows[0].images.vision
    settings = EngineSettings(48, dtype="float32", gpu_memory_utilization=0.3, enforce_eager=True)
    engine = Engine(path, vision.processor.tokenizer, world, settings, Demand(images=3, vision=vision))
    engine.sync(policy.full_weights())
    order = [0, 2, 4, 1, 3]  # the second engine's share is two texts
    rows = [data.rows[i] for i in order]
    rollout = engine.sample(rows, Sampling(2, 0.7, 8), (1, 1))
    rollout = replace(rollout, loss_weights_B=np.zeros(10, dtype=np.float32))
    found["gaps"] = gaps(policy, rollout)
    three = rows[1].images
    # Of the same size: only pixels differ.
    swapped = replace(rows[1], images=replace(three, encoded=(three.encoded[0], three.encoded[2], three.encoded[1])))
    swapped_rows = [swapped if row is rows[1] else row for row in rollout.rows]
    found["gaps, images swapped"] = gaps(policy, replace(rollout, rows=swapped_rows))
    found["prompts"] = [row.ids for row in rollout.rows]
    found["on all ranks the same"] = len(set(map(tuple, gather_from_ranks(rollout.texts)))) == 1
    weights = gather_weights(policy, world)
    if world.is_main:
        export(policy, weights, files_of([vision.processor]), Path(exported))
    found["merged"] = {name: tensor.clone() for name, tensor in policy.full_weights()}
    found |= findings(engine)
    engine.close()
    return found
