"""Mixtures of experts: how evenly the routers spread the tokens. The experts themselves are transformers' code."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from fsdp_utils import sum_over_trainers


class ExpertLoads(nn.Module):
    """Counts the tokens of each expert in passes with gradients. Of a dense model there is nothing to count."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        routers = [layer.mlp.gate for layer in layers if hasattr(getattr(layer, "mlp", None), "experts")]
        shape = len(routers), max((router.num_experts for router in routers), default=0)
        counts_LE = torch.zeros(shape, dtype=torch.int64)  # L: layers with experts
        self.register_buffer("counts_LE", counts_LE, persistent=False)
        for i, router in enumerate(routers):
            router.register_forward_hook(partial(self._count, i))

    def _count(self, i: int, router: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        """Counts once more where a layer is computed again, which leaves the shares as they are."""
        *_, chosen = output  # [N, experts of a token]
        if torch.is_grad_enabled():
            self.counts_LE[i].index_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())

    def largest(self) -> dict[str, float]:
        """The tokens of the busiest expert since the last call, over the mean of its layer. All ranks call it.

        1: all experts have as many; experts / experts of a token: the router always takes the same ones.
        """
        if not len(self.counts_LE):
            return {}
        loads_LE = sum_over_trainers(self.counts_LE).double()
        self.counts_LE.zero_()
        return {"moe/load_max": (loads_LE.amax(dim=1) / loads_LE.mean(dim=1)).max().item()}
