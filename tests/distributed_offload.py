"""On ranks: three updates under every memory policy, from the program's own flags."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_utils import World, local_shard
from helpers import build, make_rollout, train_once, whole_update
from inputs.choices import algorithm_of
from model.optimizer import ChunkedAdamW
from policy import Policy
from ranks import parsed
from update import add_logprobs

POLICIES = [
    f"--param_dtype {dtype} --offload {offload}{reference}"
    for dtype in ("float32", "bfloat16")
    for offload, reference in (("none", ""), ("optimizer", ""), ("all", " --offload_reference"))
]
SMALL = "--micro_batch_tokens 20"  # several micro-batches an update
ONCE = f"{SMALL} --communicate_once"
POLICIES += [SMALL, ONCE, f"{ONCE} --gradient_checkpointing --offload all"]


def is_on_host(policy: Policy) -> bool:
    """Whether FSDP keeps the shards in host RAM, by FSDP's own state: on a CPU run they are there anyway."""
    groups = [group for unit in (policy, *policy.layers) for group in unit._get_fsdp_state()._fsdp_param_groups]
    (answer,) = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups}
    are_on_gpu = {parameter.to_local().is_cuda for parameter in policy.parameters()}
    assert are_on_gpu == {torch.cuda.is_available() and not answer}
    return answer


Tensors = dict[str, torch.Tensor]


def train(path: str, flags: str, world: World) -> tuple[list[dict[str, float]], Tensors, Tensors, list[int]]:
    args = parsed(f"--model {path} --group_size 2 --kl_coef 0.1 {flags}", world.num_trainers)
    policy, reference, optimizer = build(args, world)
    assert isinstance(optimizer, ChunkedAdamW) is (args.offload != "none" or args.param_dtype == "bfloat16")
    if isinstance(optimizer, ChunkedAdamW):
        assert optimizer.is_state_on_host is (args.offload == "optimizer")
    assert is_on_host(policy) is (args.offload == "all")
    assert is_on_host(reference) is args.offload_reference
    rollout = make_rollout()
    metrics, num_before = [], [collective.call_count for collective in COLLECTIVES]
    for _ in range(3):
        updates = [whole_update(rollout, args, policy, world)]
        (update,) = add_logprobs(updates, policy, reference, algorithm_of(args))
        metrics.append(train_once(policy, optimizer, update, args, world, rate=1e-3))
    num_calls = [collective.call_count - before for collective, before in zip(COLLECTIVES, num_before, strict=True)]
    states = enumerate(optimizer.state.values())
    state = {f"{index} {name}": local_shard(tensor) for index, state in states for name, tensor in state.items()}
    if torch.cuda.is_available():
        big = [tensor for tensor in state.values() if tensor.dim()]
        assert {tensor.is_cuda for tensor in big} == {args.offload == "none"}
        assert args.offload != "optimizer" or all(tensor.is_pinned() for tensor in big)
    policy.dtype = torch.float32
    parameters = {name: full.cpu() for name, full in policy.full_weights()}
    return metrics, parameters, {name: tensor.cpu() for name, tensor in state.items()}, num_calls


class Counted:
    """Does what the collective does, and counts; a mock would keep all buffers."""

    def __init__(self, collective: Callable) -> None:
        self.collective, self.call_count = collective, 0

    def __call__(self, *arguments: object, **options: object) -> object:
        self.call_count += 1
        return self.collective(*arguments, **options)


COLLECTIVES = Counted(dist.reduce_scatter_single), Counted(dist.all_gather_single)
dist.reduce_scatter_single, dist.all_gather_single = COLLECTIVES  # what FSDP calls


def main(world: World, path: str) -> dict[str, tuple]:
    """Flags -> (metrics of the updates, parameters, optimizer state, numbers of reduce-scatters and all-gathers)."""
    return {flags: train(path, flags, world) for flags in POLICIES}
