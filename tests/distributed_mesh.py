"""Run under torchrun with four ranks: FSDP on a mesh of 2 replicas x 2 shards (HSDP), as a parameter is filled, gathered and clipped.

torchrun --nproc_per_node 4 tests/distributed_mesh.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_utils import clip_grad_norm, close_world, fill_from_main, full_tensor, full_tensors, init_world


def main() -> None:
    world = init_world(tp_size=1, timeout_minutes=2)
    torch.manual_seed(0)
    wanted = [torch.randn(7, 3), torch.randn(7)]  # seven rows: the two shards have unequal parts
    linear = nn.Linear(3, 7)
    fully_shard(linear, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for parameter, whole in zip(linear.parameters(), wanted, strict=True):
        assert isinstance(parameter, DTensor) and parameter.placements == (Replicate(), Shard(0))
        fill_from_main(parameter, whole if world.is_main else None)
        assert full_tensor(parameter, torch.float32).equal(whole)
    found = full_tensors((parameter, torch.bfloat16) for parameter in linear.parameters())
    assert all(full.equal(whole.bfloat16()) for full, whole in zip(found, wanted, strict=True))

    inputs = torch.randn(world.num_trainers, 5, 3)
    plain = nn.Linear(3, 7)
    for parameter, whole in zip(plain.parameters(), wanted, strict=True):
        parameter.data.copy_(whole)
    plain(inputs).square().sum().backward()
    (linear(inputs[world.trainer_rank]).square().sum() * world.num_trainers).backward()  # FSDP averages over all four
    norm = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    torch.testing.assert_close(clip_grad_norm(linear, 0.5), norm)
    for parameter, other in zip(linear.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad * 0.5 / norm)
    close_world()


if __name__ == "__main__":
    main()
