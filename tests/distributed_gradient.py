"""On ranks: one update's loss and gradient on the real FSDP model, for several algorithms, caps and orders."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from batch import Batch, Rollout, Update
from fsdp_utils import World, shard
from helpers import RAGGED, make_rollout, train_once, whole_update
from inputs.choices import algorithm_of
from policies import load_policy
from policy import Policy
from ranks import parsed
from update import add_reference, logprobs_under

COMMON = "--max_grad_norm 1e9 --group_size 4"
ALGORITHMS = {  # name -> flags
    "clip": "--kl_coef 0.1 --clip_high 0.3",
    "gspo": "--policy_loss gspo --clip_low 0.02 --clip_high 0.02 --loss_aggregation seq_mean_token_mean "
    "--rollout_correction sequence_truncate --rollout_correction_max 1.5",
    "gspo_token": "--policy_loss gspo_token --clip_low 0.02 --clip_high 0.02 --dual_clip 1.05",
    "cispo": "--policy_loss cispo --clip_high 0.15 --loss_aggregation seq_mean_token_sum_norm --entropy_coef 0.5 "
    "--rollout_correction token_mask",
    "sapo": "--policy_loss sapo --loss_aggregation seq_mean_token_mean --kl_coef 0.1 --kl_estimator k3+",
    "reinforce": "--policy_loss reinforce --loss_aggregation seq_mean_token_mean",
    "distill": "--kl_coef 0.5 --kl_over vocabulary --kl_direction jsd --kl_beta 0.3 --entropy_coef 0.1",
}
CAPS = (16, 23, 40, 1000)
LEFT_OUT = [1, 4]  # sequences that "reinforce" leaves out of the loss


class Recorder(torch.optim.SGD):
    """Keeps the gradient of the step that it is asked to make, and makes none."""

    def step(self) -> None:
        self.gradients = [
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in self.param_groups[0]["params"]
        ]


def recorded(
    policy: Policy, update: Update, args: Namespace, world: World, **changes: object
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics, name -> gradient) of an update, which changes no weight."""
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    optimizer = Recorder(trained.values(), lr=0.0)
    metrics = train_once(policy, optimizer, update, args, world, **changes)
    return metrics, dict(zip(trained, optimizer.gradients, strict=True))


def rollout_of(algorithm: str, lengths: list[int] | None = None) -> Rollout:
    rollout = make_rollout(lengths or RAGGED, group_size=4)
    is_trained_B = np.isin(np.arange(len(rollout.texts)), LEFT_OUT, invert=True)
    return replace(rollout, is_trained_B=is_trained_B) if algorithm == "reinforce" else rollout


def off_policy(batch: Batch) -> Batch:
    """The batch whose old log-probs, and the sampler's, are not the policy's own, which it has as old ones.

    About half of the tokens are clipped; trainer / sampler is 0.45 or 1.42, so that corrections take part.
    """
    old_logprobs_N = batch.old_logprobs_N + torch.where(batch.labels_N % 2 == 0, -0.3, 0.1) * batch.advantages_N.sign()
    rollout_logprobs_N = old_logprobs_N + torch.where(batch.labels_N % 3 == 0, 0.8, -0.35)
    return replace(batch, old_logprobs_N=old_logprobs_N, rollout_logprobs_N=rollout_logprobs_N)


def reference_of(path: Path | str) -> Policy:
    """The policy with noise on its weights: otherwise the KL term has no gradient."""
    reference = load_policy(path).requires_grad_(False)
    torch.manual_seed(1)
    for parameter in reference.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)
    return reference


def main(world: World, path: str) -> dict[str, dict[str, tuple]]:
    """Algorithm -> case -> (metrics, gradients)."""
    policy, reference = load_policy(path), reference_of(path)
    for model in (policy, reference):
        shard(model, model.layers, world, torch.float32)
    results = {}
    for algorithm, flags in ALGORITHMS.items():
        shuffled = rollout_of(algorithm).select(np.array([7, 4, 6, 5, 2, 0, 3, 1]))
        cases = {}
        for cap in CAPS:
            cases[f"cap {cap}, in order"] = rollout_of(algorithm), f"{cap}"
            cases[f"cap {cap}, shuffled"] = shuffled, f"{cap}"
            cases[f"cap {cap}, prompts shared"] = rollout_of(algorithm), f"{cap} --share_prompts"
        # A micro-batch each: with two ranks the fourth one is empty.
        cases["three sequences"] = rollout_of(algorithm, [12, 11, 9]), "16 --group_size 2"
        results[algorithm] = {}
        for name, (rollout, cap) in cases.items():
            args = parsed(f"{COMMON} {flags} --micro_batch_tokens {cap}")
            update = whole_update(rollout, args, policy, world)
            update = logprobs_under(policy, "old_logprobs_N", update, algorithm_of(args))
            update = replace(update, batches=[off_policy(batch) for batch in update.batches])
            if args.kl_coef:
                update = add_reference(update, reference, algorithm_of(args))
            results[algorithm][name] = recorded(policy, update, args, world, is_first=False)
    return results
