"""The optimizer for bf16 parameters and for state on the host, against torch's AdamW in fp32."""

import copy

import pytest
import torch

from extras.models.adamw import ChunkedAdamW, join, round_stochastically, split
from flags import AdamW, Memory
from helpers.made_up import flags
from model import sizes
from model.optimizer import make_optimizer

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}


def gradients(count: int, size: int = 1000, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) * scale for _ in range(count)]


def train(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> torch.Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        parameter.grad = grad.to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


def chunked(start: torch.Tensor, is_state_on_host: bool = False, **changes: float) -> ChunkedAdamW:
    return ChunkedAdamW([torch.nn.Parameter(start.clone())], **SETTINGS | changes, is_state_on_host=is_state_on_host)


def test_bf16_parameter_and_remainder_make_the_fp32_number_and_rounding_is_unbiased():
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, 1.0, -1e-40, 1.00390625])])
    values = values[values.isfinite() & values.bfloat16().isfinite()]
    parameter, remainder = split(values)
    assert join(parameter, remainder).view(torch.int32).equal(values.view(torch.int32))
    assert ((parameter.double() - values).abs() == (values.bfloat16().double() - values).abs()).all()
    values = torch.full((100_000,), 1 + 1 / 512)  # a quarter of the way from 1 to the next bf16
    rounded = round_stochastically(values, torch.Generator().manual_seed(0))
    assert set(rounded.tolist()) == {1.0, 1 + 1 / 128}
    assert rounded.double().mean() == pytest.approx(1 + 1 / 512, abs=5e-5)
    exact = torch.randn(1000).bfloat16()
    assert round_stochastically(exact.float(), torch.Generator()).equal(exact)


def test_bf16_parameters_move_by_updates_of_a_millionth():
    start = (torch.rand(100, generator=torch.Generator().manual_seed(1)) / 2 + 1.5).bfloat16()  # steps of 1/128
    tiny = {"lr": 2e-6, "weight_decay": 0.0}  # a parameter moves by 1e-6 to 1.3e-6
    ones = [torch.ones(100)] * 4000  # each update is lr, all together are a little more than 1/128
    plain = torch.nn.Parameter(start.clone())
    assert train(torch.optim.AdamW([plain], **SETTINGS | tiny), ones).equal(start), "plain bf16 does not move at all"
    wanted = train(torch.optim.AdamW([torch.nn.Parameter(start.float())], **SETTINGS | tiny), ones)
    assert (start.float() - wanted).mean() == pytest.approx(0.008, rel=0.02)
    optimizer = chunked(start, **tiny)
    found = train(optimizer, ones)
    assert found.equal(start - 1 / 128), "one step of bf16 down"
    masters = join(found, next(iter(optimizer.state.values()))["remainder"])
    distance = (start.float() - masters) / (start.float() - wanted)
    assert distance.mean() == pytest.approx(1, abs=0.01)
    assert (distance - 1).abs().max() < 0.1  # the noise of bf16 moments in each single one


def test_the_second_moment_decays_as_in_fp32():
    grads = gradients(10) + gradients(1000, scale=1e-3)
    optimizers = [chunked(torch.ones(1000).to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for optimizer in optimizers:
        train(optimizer, grads)
    found, wanted = (next(iter(optimizer.state.values()))["exp_avg_sq"].float() for optimizer in optimizers)
    # Rounded to nearest it stays 3.6 times as large.
    assert found.mean().item() == pytest.approx(wanted.mean().item(), rel=0.02)
    assert (found / wanted - 1).square().mean().sqrt() < 0.1  # the noise of each single one


@pytest.mark.parametrize("is_state_on_host", [False, True])
def test_fp32_parameters_get_the_bits_of_torchs_adamw(is_state_on_host, monkeypatch):
    start = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    grads = gradients(20)
    wanted = train(torch.optim.AdamW([torch.nn.Parameter(start.clone())], **SETTINGS, fused=True), grads)
    assert train(chunked(start, is_state_on_host), grads).equal(wanted)
    monkeypatch.setattr(sizes, "OPTIMIZER_CHUNK", 256)
    assert train(chunked(start, is_state_on_host), grads).equal(wanted)
    assert not wanted.equal(start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_was_saved_and_loaded_goes_on_bit_for_bit(dtype):
    start, grads = torch.randn(1000).to(dtype), gradients(8)
    whole, first = chunked(start), chunked(start)
    wanted = train(whole, grads)
    second = chunked(train(first, grads[:4]))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert train(second, grads[4:]).equal(wanted)
    torch.testing.assert_close([*second.state.values()], [*whole.state.values()], atol=0, rtol=0)


def test_a_rank_with_an_empty_shard_updates_its_other_parameters():
    empty, other = torch.nn.Parameter(torch.empty(0, 3).bfloat16()), torch.nn.Parameter(torch.ones(4).bfloat16())
    empty.grad, other.grad = torch.empty_like(empty), torch.ones_like(other)
    ChunkedAdamW([empty, other], **SETTINGS | {"lr": 0.1}, is_state_on_host=False).step()
    assert (other < 1).all()


@pytest.mark.parametrize("changes", [{}, {"offload": "optimizer"}, {"param_dtype": "bfloat16"}])
def test_optimizer_state_made_before_the_first_step_trains_alike(changes):
    args = flags(learning_rate=SETTINGS["lr"], weight_decay=SETTINGS["weight_decay"], **changes)
    parameter = torch.nn.Parameter(torch.randn(1000).to(getattr(torch, args.param_dtype)))
    lazy = torch.nn.Parameter(parameter.detach().clone())
    optimizer = make_optimizer({"weight": parameter}, AdamW.from_flags(args), Memory.from_flags(args))
    tensors = dict(optimizer.state[parameter])
    assert all(tensor.eq(0).all() for tensor in tensors.values())
    train(optimizer, gradients(3))
    state = optimizer.state[parameter]
    assert state["step"] == 3 and all(tensors[name] is tensor for name, tensor in state.items())
    if args.param_dtype == "float32":
        assert train(torch.optim.AdamW([lazy], **SETTINGS, fused=True), gradients(3)).equal(parameter)
