"""The memory policies train the same policy. How one continues another: test_reshard.py."""

from pathlib import Path

import pytest
import torch

from batch import pack
from gate.checks import check_flags
from helpers.distributed import ONCE, SMALL, check_same_training, kept_masters, on_ranks
from helpers.made_up import RAGGED, flags, load_policy, make_rollout
from update import with_advantages


@pytest.fixture(scope="module")
def results(policy):
    return on_ranks(2, "distributed:memory_policies", policy)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_offloading_changes_no_bit(param_dtype, results):
    metrics, parameters, state, _, masters = results[f"--param_dtype {param_dtype} --offload none"]
    assert all(update["optim/grad_norm"] > 0.05 for update in metrics)
    for other in ("optimizer", "all --offload_reference"):
        other = f"--param_dtype {param_dtype} --offload {other}"
        assert results[other][0] == metrics, other
        torch.testing.assert_close(results[other][1:3], (parameters, state), atol=0, rtol=0)
        check_same_training(results[other][-1], masters)


def trained_alone(path: Path, fused: bool = True, fault: str = "") -> list[torch.Tensor]:
    """`kept_masters` of three steps without FSDP, by one of AdamW's kernels, with a fault."""
    policy = load_policy(path)
    first, *others = policy.parameters()
    rate = 0.8e-3 if fault == "one rate a fifth too low" else 1e-3
    groups = [{"params": others, "lr": 1e-3}, {"params": [first], "lr": rate}]
    optimizer = torch.optim.AdamW(groups, fused=fused, foreach=False)
    masters = kept_masters(optimizer)
    for _ in range(3):
        rollout = make_rollout(RAGGED * 2, group_size=2)
        batch = with_advantages(rollout, pack(rollout, [*range(len(rollout.rows))], 2))
        logprobs = policy(batch, 1.0)[0]
        (logprobs * batch.advantages_N)[batch.loss_mask_N].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fault == "no first moment":
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
    return masters


def test_other_kernels_train_the_same_and_faults_do_not(policy):
    """The comparison that the GPU's tests make, too."""
    wanted, other = trained_alone(policy), trained_alone(policy, fused=False)
    assert not other[3].equal(wanted[3])
    check_same_training(other, wanted)
    faults = {"no first moment": "of the change after three", "one rate a fifth too low": "last place after one step"}
    for fault, words in faults.items():
        with pytest.raises(AssertionError, match=words):
            check_same_training(trained_alone(policy, fault=fault), wanted)


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


def test_a_reference_that_is_not_there_cannot_be_offloaded():
    with pytest.raises(ValueError, match="--offload_reference has no effect here, only with --kl_coef"):
        check_flags(flags(offload_reference=True, kl_coef=0), 1)
