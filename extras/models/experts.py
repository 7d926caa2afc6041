"""Mixtures of experts: how evenly the routers spread the tokens, and routes that they take again
(--router_replay).

The experts themselves, and the routers, are transformers' code; what is here hooks into it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from fsdp_utils import sum_over_trainers


class ExpertLoads(nn.Module):
    """Counts the tokens of each expert in passes with gradients. Of a dense model there is nothing to count."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        mixtures = [place for place, layer in enumerate(layers) if hasattr(getattr(layer, "mlp", None), "experts")]
        routers = [layers[place].mlp.gate for place in mixtures]
        shape = len(routers), max((router.num_experts for router in routers), default=0)
        counts_LE = torch.zeros(shape, dtype=torch.int64)  # L: layers with experts
        self.register_buffer("counts_LE", counts_LE, persistent=False)
        for i, (place, router) in enumerate(zip(mixtures, routers, strict=True)):
            layers[place].register_forward_pre_hook(partial(hand_routes, place), with_kwargs=True)
            router.register_forward_hook(replay)  # before the count, which is of the experts that compute
            router.register_forward_hook(partial(self._count, i))

    def _count(self, i: int, router: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        """Counts once more where a layer is computed again, which leaves the shares as they are."""
        *_, chosen = output  # [N, experts of a token]
        if torch.is_grad_enabled():
            self.counts_LE[i].index_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())

    def largest(self) -> dict[str, float]:
        """The tokens of the busiest expert since the last call, over the mean of its layer. All
        ranks call it.

        1: all experts have as many; experts / experts of a token: the router always takes the same
        ones.
        """
        if not len(self.counts_LE):
            return {}
        loads_LE = sum_over_trainers(self.counts_LE).double()
        self.counts_LE.zero_()
        return {"moe/load_max": (loads_LE.amax(dim=1) / loads_LE.mean(dim=1)).max().item()}


def hand_routes(place: int, layer: nn.Module, inputs: tuple[Tensor], options: dict[str, object]) -> None:
    """Gives the router of layer `place` its routes of this pass: `Batch.routes_NLA`, which the
    model hands down.

    They are an argument of the layer, so a layer that is computed again in the backward pass has
    those of its own pass.
    """
    routes_NLA = options.get("routes_NLA")
    layer.mlp.gate.routes_NA = None if routes_NLA is None else routes_NLA[:, place]


def replay(router: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """What the router returns when it takes these experts (R3, arXiv 2510.11370); None: it has
    chosen by itself.

    The experts are given, their weights are not: those are of the router's own logits, so it still
    learns. It is the arithmetic of transformers' routers, which choose by softmax and top k: their
    own routes change no bit.
    """
    if router.routes_NA is None:
        return None
    logits_NE, *_ = output
    routes_NA = router.routes_NA.long()
    weights_NA = logits_NE.softmax(-1, dtype=torch.float32).gather(-1, routes_NA)
    if router.norm_topk_prob:
        weights_NA = weights_NA / weights_NA.sum(-1, keepdim=True)
    return logits_NE, weights_NA.to(logits_NE.dtype), routes_NA
