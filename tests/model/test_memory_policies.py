"""The memory policies train the same policy. How one continues another: test_reshard.py."""

from collections import Counter
from contextlib import ExitStack

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from extras.models.adamw import ChunkedAdamW, join
from fsdp_utils import World, local_shard
from helpers.distributed import on_ranks, parsed, train, watched, weights_of
from helpers.made_up import build, load_policy
from model.optimizer import parameters_of
from policy import Policy


def kept_masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The fp32 numbers that this rank trains, as one vector on the host: those of now, and those after each step."""
    masters: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        vectors = []
        for parameter in parameters_of(optimizer):
            local = local_shard(parameter.detach())
            if local.dtype == torch.bfloat16:
                local = join(local.cpu(), local_shard(optimizer.state[parameter]["remainder"]).cpu())
            vectors.append(local.flatten().to("cpu", copy=True))
        masters.append(torch.cat(vectors))

    keep()
    optimizer.register_step_post_hook(keep)
    return masters


def check_same_training(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Two kernels of AdamW gave these `kept_masters` of three steps, on the same gradients in the first.

    They differ in the last place. Key biases have gradients of rounding noise alone, which AdamW makes as large as
    others: from the second step on, single numbers of two right programs are steps apart. So the bounds are 8 units in
    the last place (of the larger of a number and its change) after one step, and 5 % of the whole change after three.
    """
    start, first, _, last = wanted
    assert found[0].equal(start)
    unit = torch.maximum(start.abs(), first.abs()).clamp(min=1e-12) * 2**-23
    units = ((found[1] - first).abs() / unit).max().item()
    assert units <= 8, f"{units:.0f} units in the last place after one step"
    share = ((found[3] - last).norm() / (last - start).norm()).item()
    assert share < 0.05, f"{share:.3f} of the change after three steps"


SMALL = "--micro_batch_tokens 20"  # several micro-batches an update
ONCE = f"{SMALL} --communicate_once"
OFFLOADS = "none", "optimizer", "all --offload_reference"
MEMORY_POLICIES = [f"--param_dtype {dtype} --offload {each}" for dtype in ("float32", "bfloat16") for each in OFFLOADS]
MEMORY_POLICIES += [SMALL, ONCE, f"{ONCE} --gradient_checkpointing --offload all"]


def is_on_host(policy: Policy) -> bool:
    """Whether FSDP keeps the shards in host RAM, by its own state: on a CPU they are there anyway."""
    if not isinstance(policy, FSDPModule):  # one rank alone keeps plain tensors
        return False
    groups = [group for unit in (policy, *policy.layers) for group in unit._get_fsdp_state()._fsdp_param_groups]
    (answer,) = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups}
    are_on_gpu = {local_shard(parameter).is_cuda for parameter in policy.parameters()}
    assert are_on_gpu == {torch.cuda.is_available() and not answer}
    return answer


def memory_policies(world: World, path: str) -> dict[str, tuple]:
    """Flags -> metrics, parameters, optimizer state, numbers of collectives, `kept_masters`."""
    return {words: under_policy(path, words, world) for words in MEMORY_POLICIES}


def under_policy(path: str, words: str, world: World) -> tuple:
    args = parsed(f"--model {path} --group_size 2 --kl_coef 0.1 {words}", world.num_trainers)
    policy, reference, optimizer = build(args, world)
    assert isinstance(optimizer, ChunkedAdamW) is (args.offload != "none" or args.param_dtype == "bfloat16")
    if isinstance(optimizer, ChunkedAdamW):
        assert optimizer.is_state_on_host is (args.offload == "optimizer")
    assert is_on_host(policy) is (args.offload == "all")
    assert is_on_host(reference) is args.offload_reference
    collectives = "reduce_scatter_single", "all_gather_single"  # what FSDP calls
    calls, masters = Counter(), kept_masters(optimizer)
    with ExitStack() as watches:
        for name in collectives:
            watches.enter_context(watched(name, lambda *_, name=name: calls.update([name])))
        metrics = train((policy, reference, optimizer), args, world, 3)
    states = enumerate(optimizer.state.values())
    state = {f"{index} {name}": local_shard(tensor) for index, state in states for name, tensor in state.items()}
    if torch.cuda.is_available():
        big = [tensor for tensor in state.values() if tensor.dim()]
        assert {tensor.is_cuda for tensor in big} == {args.offload == "none"}
        assert args.offload != "optimizer" or all(tensor.is_pinned() for tensor in big)
    policy.dtype, state = torch.float32, {name: tensor.cpu() for name, tensor in state.items()}
    return metrics, weights_of(policy), state, [calls[name] for name in collectives], masters


@pytest.fixture(scope="module")
def results(policy):
    return on_ranks(2, memory_policies, policy)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_offloading_changes_no_bit(param_dtype, results):
    metrics, parameters, state, _, masters = results[f"--param_dtype {param_dtype} --offload none"]
    assert all(update["optim/grad_norm"] > 0.05 for update in metrics)
    for other in ("optimizer", "all --offload_reference"):
        other = f"--param_dtype {param_dtype} --offload {other}"
        assert results[other][0] == metrics, other
        torch.testing.assert_close(results[other][1:3], (parameters, state), atol=0, rtol=0)
        check_same_training(results[other][-1], masters)


def test_bf16_parameters_follow_the_fp32_ones_and_take_10_bytes(results, policy):
    kept = [results[f"--param_dtype {dtype} --offload none"][1:3] for dtype in ("float32", "bfloat16")]
    (fp32, fp32_state), (bf16, bf16_state) = kept
    start = dict(load_policy(policy).model.named_parameters())
    moved = torch.cat([(fp32[name] - start[name]).flatten() for name in start])
    apart = torch.cat([(bf16[name] - fp32[name]).flatten() for name in start])
    assert moved.abs().mean() > 0.001, "three updates of 1e-3"
    # Weights of 0.12 are rounded to 2.5e-4 on average, twice (at the start, and as they are read); the rest is the
    # noise of other gradients.
    assert apart.abs().mean() < 0.25 * moved.abs().mean()
    count = sum(tensor.numel() for name, tensor in bf16_state.items() if name.endswith("exp_avg"))
    bytes_of_state = [sum(tensor.nbytes for tensor in state.values()) / count for state in (fp32_state, bf16_state)]
    # With a parameter and its gradient, of 4 or 2 bytes: 16 and 10.
    assert bytes_of_state == pytest.approx([8, 6], abs=0.01)


def test_sharded_communication_happens_once_an_update(results):
    metrics, parameters, _, (num_reductions, num_gathers), _ = results[SMALL]
    found, found_parameters, _, (reductions, gathers), _ = results[ONCE]
    assert reductions == 3 * 3, "three updates, two layers and the rest"
    assert num_reductions > reductions and num_reductions % reductions == 0, "otherwise in each micro-batch"
    reference = 2 * num_reductions // 3 + 3  # layers in each micro-batch, the rest once an update
    assert gathers - reference == 3 * 3 < num_gathers - reference
    for one, other in zip(found, metrics, strict=True):
        assert one == pytest.approx(other, abs=2e-4, rel=0.01)  # bf16, in another order
    for name, tensor in parameters.items():
        assert (found_parameters[name] - tensor).abs().mean() < 1e-4, "of three updates of 1e-3"
    on_host, on_host_parameters, *_ = results[f"{ONCE} --gradient_checkpointing --offload all"]
    assert on_host == found
    torch.testing.assert_close(on_host_parameters, found_parameters, atol=0, rtol=0)
