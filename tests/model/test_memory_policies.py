"""The memory policies train the same policy. How one continues another: test_reshard.py."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from gate.checks import check_flags
from helpers.distributed import ONCE, SMALL, on_ranks
from helpers.made_up import flags


@pytest.fixture(scope="module")
def results(policy):
    return on_ranks(2, "distributed:memory_policies", policy)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_offloading_changes_no_bit(param_dtype, results):
    metrics, parameters, state, _ = results[f"--param_dtype {param_dtype} --offload none"]
    assert all(update["optim/grad_norm"] > 0.05 for update in metrics)
    for other in ("optimizer", "all --offload_reference"):
        other = f"--param_dtype {param_dtype} --offload {other}"
        assert results[other][0] == metrics, other
        torch.testing.assert_close(results[other][1:3], (parameters, state), atol=0, rtol=0)


def test_bf16_parameters_follow_the_fp32_ones_and_take_10_bytes(results, policy):
    (_, fp32, fp32_state, _), (_, bf16, bf16_state, _) = (
        results[f"--param_dtype {dtype} --offload none"] for dtype in ("float32", "bfloat16")
    )
    start = dict(AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).named_parameters())
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
    """Parameters are gathered, and gradients reduced, once an update."""
    metrics, parameters, _, (num_reductions, num_gathers) = results[SMALL]
    found, found_parameters, _, (reductions, gathers) = results[ONCE]
    assert reductions == 3 * 3, "three updates, two layers and the rest"
    assert num_reductions > reductions and num_reductions % reductions == 0, "otherwise once for each micro-batch"
    reference = 2 * num_reductions // 3 + 3  # its layers in each micro-batch, the rest once an update
    assert gathers - reference == 3 * 3 < num_gathers - reference
    for one, other in zip(found, metrics, strict=True):
        assert one == pytest.approx(other, abs=2e-4, rel=0.01)  # bf16 arithmetic, summed in another order
    for name, tensor in parameters.items():
        assert (found_parameters[name] - tensor).abs().mean() < 1e-4, "of three updates of 1e-3"
    on_host, on_host_parameters, *_ = results[f"{ONCE} --gradient_checkpointing --offload all"]
    assert on_host == found
    torch.testing.assert_close(on_host_parameters, found_parameters, atol=0, rtol=0)


@pytest.mark.parametrize(("changes", "words"), [
    ({"param_dtype": "bfloat16", "dtype": "float32"}, "with --dtype float32: the latter computes more finely"),
    ({"head_dtype": "bfloat16", "dtype": "float32"}, "--head_dtype bfloat16 with --dtype float32: the former"),
    ({"offload_reference": True, "kl_coef": 0}, "--offload_reference has no effect here, only with --kl_coef"),
])  # fmt: skip
def test_combinations_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        check_flags(flags(**changes), 1)
