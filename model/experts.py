"""Mixtures of experts: how evenly the routers spread the tokens. The experts themselves are transformers' code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp_utils import sum_over_trainers


def watch_routers(layers: list[nn.Module]) -> list[nn.Module]:
    """The routers of these layers; none in a dense model. From now on `load` [experts] counts the tokens of each."""
    blocks = [getattr(layer, "mlp", None) for layer in layers]
    routers = [block.gate for block in blocks if hasattr(block, "experts")]
    for router in routers:
        router.register_buffer("load", torch.zeros(router.num_experts, dtype=torch.int64), persistent=False)
        router.register_forward_hook(count_tokens)
    return routers


def count_tokens(router: nn.Module, _: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
    """Counts the chosen experts in a pass with gradients, and in its recomputation, which is the same for all."""
    *_, chosen = output  # [N, experts of a token]
    if torch.is_grad_enabled():
        router.load.index_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())


def largest_load(routers: list[nn.Module]) -> dict[str, float]:
    """The tokens of the busiest expert of a layer since the last call, over the mean of its layer; {} without routers.

    1: all experts have as many; experts / experts of a token: the router always takes the same ones.
    """
    if not routers:
        return {}
    loads_LE = sum_over_trainers(torch.stack([router.load for router in routers])).double()
    for router in routers:
        router.load.zero_()
    return {"moe/load_max": (loads_LE.amax(dim=1) / loads_LE.mean(dim=1)).max().item()}
