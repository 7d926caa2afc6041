"""Mixtures of experts, asked for by the model: how evenly the routers spread the tokens. With --router_replay they take
the engine's routes again: a part of batches (`Routes`).

The experts themselves, and the routers, are transformers' code; what is here hooks into it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from batch import Batch, Rollout
from fsdp_utils import is_alone, sum_over_trainers
from packing import packed

Item = TypeVar("Item")


class ExpertLoads(nn.Module):
    """Counts the tokens of each expert in passes with gradients."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        mixtures = [place for place, layer in enumerate(layers) if hasattr(getattr(layer, "mlp", None), "experts")]
        routers = [layers[place].mlp.gate for place in mixtures]
        shape = len(routers), max(router.num_experts for router in routers)
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
        """The busiest expert's tokens since the last call, over its layer's mean. All ranks call.

        1: all experts have as many; experts / experts of a token: the same ones are always taken.
        """
        loads_LE = sum_over_trainers(self.counts_LE).double()
        self.counts_LE.zero_()
        return {"moe/load_max": (loads_LE.amax(dim=1) / loads_LE.mean(dim=1)).max().item()}


@dataclass(frozen=True)
class Routes:
    """The experts that the routers take for each position of a micro-batch: A of them in each of L layers."""

    routes_NLA: Tensor  # uint8 or uint16, as the engine has them
    is_for_reference = False  # which chooses by itself

    def to(self, device: torch.device) -> Routes:
        return Routes(self.routes_NLA.to(device, non_blocking=True))

    def inputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"routes_NLA": self.routes_NLA}


def bring_routes(rollout: Rollout, plans: list[list[list[list[int]]]]) -> Rollout:
    """The rollout with the routes of the sequences that this rank trains, from the ranks whose engines sampled them.

    `parts["routes"]`: uint8 or uint16 [positions, layers, experts of a token] of each sequence; None on the ranks that
    do not have them. Qwen3-30B-A3B has 384 bytes of them a token: a step of 1,024 sequences of 8k has 3.2 GB, too much
    for each rank. `plans`: for each update and rank, the indices of each micro-batch.
    """
    own, sent = rollout.parts["routes"], []
    for micros_of_updates in zip(*plans, strict=True):
        trained = [b for micros in micros_of_updates for micro in micros for b in micro]
        sent.append({b: own[b] for b in trained if own[b] is not None})
    routes: list[np.ndarray | None] = [None] * len(rollout.rows)
    for received in exchange_with_ranks(sent):
        for b, routes_of_sequence in received.items():
            routes[b] = routes_of_sequence
    return rollout.with_parts(routes=routes)


def add_routes(batch: Batch, rollout: Rollout) -> Batch:
    """The batch with the routes of its sequences; as it is without sequences."""
    if batch.segments_S[0].index is None:
        return batch
    routes_NLA = packed(batch.segments_S, lambda segment: rollout.parts["routes"][segment.index])
    return replace(batch, parts=(*batch.parts, Routes(routes_NLA)))


def hand_routes(place: int, layer: nn.Module, inputs: tuple[Tensor], options: dict[str, object]) -> None:
    """Gives the router of layer `place` its routes of this pass, which the model hands down.

    They are an argument of the layer, so a layer that is computed again in the backward pass has
    those of its own pass.
    """
    routes_NLA = options.get("routes_NLA")
    layer.mlp.gate.routes_NA = None if routes_NLA is None else routes_NLA[:, place]


def replay(router: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The router's output with these experts (R3, arXiv 2510.11370); None: it has chosen by itself.

    Experts are given. Their weights come from the router's own logits, so it still learns. It is the
    arithmetic of transformers' routers (softmax, top k): their own routes change no bit.
    """
    if router.routes_NA is None:
        return None
    logits_NE, *_ = output
    routes_NA = router.routes_NA.long()
    weights_NA = logits_NE.softmax(-1, dtype=torch.float32).gather(-1, routes_NA)
    if router.norm_topk_prob:
        weights_NA = weights_NA / weights_NA.sum(-1, keepdim=True)
    return logits_NE, weights_NA.to(logits_NE.dtype), routes_NA


def exchange_with_ranks(items: list[Item]) -> list[Item]:
    """Each rank's item for this one, in rank order. `items`: for each rank; picklable host data."""
    if is_alone():
        return items
    received: list[Item] = []
    for source in range(dist.get_world_size()):
        box = [None]
        dist.scatter_object_list(box, items if source == dist.get_rank() else None, src=source)
        received += box  # type: ignore[arg-type]
    return received
