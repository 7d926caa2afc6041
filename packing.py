"""Packing: sequences of a rollout end to end in a micro-batch, and which rank trains which of them together.

The examples are of this rollout of [10, 11, 12] and [20, 21, 22], whose prompts are [10, 11] and [20]:

    >>> from dataclasses import replace
    >>> from batch import Completion, Row, rollout_of
    >>> rollout = rollout_of([Completion([12], [-0.5], [0]), Completion([21, 22], [-0.1, -0.7], [0, 0])])
    >>> rows = [Row([], "", {}, "", ids=np.array(prompt)) for prompt in ([10, 11], [20])]
    >>> rollout = replace(rollout, rows=rows, loss_weights_B=np.array([1.0, 1.0]))

With --share_prompts, completions of a prompt that are packed together share its positions: the first is packed whole,
the others from the prompt's last token on, which predicts a token of each. Dimensions: `batch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from batch import Batch, Rollout
from model.layout import Segment


def pack(rollout: Rollout, indices: list[int], group_size: int = 1) -> Batch:
    """The sequences `indices` of the rollout, end to end. The next-token shift and the loss mask are made only here.

    Those whose b // `group_size` is the same share their prompt. The mask goes by position, not by token: an
    end-of-sequence token is trained also where it is the padding token. Without sequences the batch is a single masked
    position: a rank with nothing left to train takes part in the collectives.

    >>> batch = pack(rollout, [0, 1])
    >>> batch.input_ids_N.tolist(), batch.labels_N.tolist()
    ([10, 11, 20, 21], [11, 12, 21, 22])
    >>> batch.loss_mask_N.int().tolist(), batch.position_ids_N.tolist(), batch.sequence_ids_N.tolist()
    ([0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1])

    Two completions of the prompt [10, 11] that share it:

    >>> pack(rollout.select([0, 0]), [0, 1], group_size=2).input_ids_N.tolist()
    [10, 11, 11]
    """
    if not indices:
        zero = torch.zeros(1)
        index = zero.long()
        return Batch(
            input_ids_N=index,
            position_ids_N=index,
            labels_N=index,
            loss_mask_N=zero.bool(),
            trained_K=index[:0],
            loss_weights_N=zero,
            sequence_ids_N=index,
            rollout_logprobs_N=zero,
            segments_S=(Segment(None, 0, 1),),
            lags_N=zero,
            kl_weights_N=zero,
        )
    segments = _segments(rollout, indices, group_size)
    tokens = {b: np.concatenate([rollout.rows[b].ids, rollout.completions[b]]) for b in indices}

    def mask(segment: Segment) -> np.ndarray:  # the one mask
        b, first = segment.index, rollout.first_position(segment.index)
        # What an environment said is read, but not trained.
        is_sampled = np.concatenate([np.zeros(first, dtype=bool), rollout.is_sampled[b]])
        return is_sampled & rollout.is_trained_B[b]

    def by_sequence(values_B: Sequence[float]) -> Tensor:
        return packed(segments, lambda segment: np.full(segment.stop, values_B[segment.index], dtype=np.float32))

    loss_mask_N, zeros = packed(segments, mask), [np.zeros(len(ids)) for ids in rollout.completions]
    return Batch(
        input_ids_N=packed(segments, lambda segment: tokens[segment.index][:-1]).long(),
        position_ids_N=packed(segments, lambda segment: np.arange(segment.stop)),
        labels_N=packed(segments, lambda segment: tokens[segment.index][1:]).long(),  # the one shift
        loss_mask_N=loss_mask_N,
        trained_K=loss_mask_N.nonzero()[:, 0],
        loss_weights_N=by_sequence(rollout.loss_weights_B),
        sequence_ids_N=torch.repeat_interleave(torch.tensor([segment.length for segment in segments])),
        rollout_logprobs_N=to_positions(rollout, segments, rollout.rollout_logprobs),
        segments_S=segments,
        lags_N=to_positions(rollout, segments, rollout.parts.get("lags", zeros)),
        kl_weights_N=by_sequence(rollout.parts.get("kl_weights", np.ones(len(rollout.rows)))),
    )


def _segments(rollout: Rollout, indices: list[int], group_size: int) -> tuple[Segment, ...]:
    """The first sequence of each prompt whole, the others without the positions that they share with it.

    >>> [(segment.start, segment.stop, segment.prefix) for segment in _segments(rollout.select([0, 0]), [0, 1], 2)]
    [(0, 2, None), (1, 2, 0)]
    """
    holders: dict[int, int] = {}  # b // group_size -> the segment that has the prompt
    segments = []
    for s, b in enumerate(indices):
        holder = holders.setdefault(b // group_size, s)
        shared = shared_positions(rollout, b) if holder < s else 0
        length = rollout.first_position(b) + len(rollout.completions[b])
        segments.append(Segment(b, shared, length, holder if shared else None))
    return tuple(segments)


def shared_positions(rollout: Rollout, b: int) -> int:
    """Positions that sequence b can share: the prompt without its last token; none if that is part of an image.

    >>> shared_positions(rollout, 0), shared_positions(rollout, 1)
    (1, 0)
    """
    images = rollout.rows[b].images  # whose tokens have to stay together
    return 0 if images is not None and images.is_image()[-1] else rollout.first_position(b)


def packed(segments: tuple[Segment, ...], sequence_values: Callable[[Segment], np.ndarray]) -> Tensor:
    """The values of the sequences at their positions, from `start` on, end to end."""
    return torch.from_numpy(np.concatenate([sequence_values(segment)[segment.start :] for segment in segments]))


def to_positions(rollout: Rollout, segments: tuple[Segment, ...], per_token: list[np.ndarray]) -> Tensor:
    """Shape N, float32: the values of the completion tokens, at their positions; zero at the others.

    >>> to_positions(rollout, pack(rollout, [0, 1]).segments_S, [np.array([0.5]), np.array([2.0, 3.0])]).tolist()
    [0.0, 0.5, 2.0, 3.0]
    """
    if segments[0].index is None:
        return torch.zeros(1)

    def padded(segment: Segment) -> np.ndarray:
        return np.pad(per_token[segment.index], (rollout.first_position(segment.index), 0))

    return packed(segments, padded).float()


def training_costs(lengths: np.ndarray, parity_length: float) -> np.ndarray:
    """The cost of each sequence, in matrix products of one token: attention adds length^2 / parity_length.

    >>> training_costs(np.array([100, 200]), parity_length=500.0).tolist()
    [120.0, 280.0]
    """
    return lengths * (1.0 + lengths / parity_length)


def cost_of(batch: Batch, parity_length: float) -> float:
    """The sum of the `training_costs` of its sequences; shared positions count once."""
    places = [(segment.start, segment.stop) for segment in batch.segments_S if segment.index is not None]
    starts, stops = training_costs(np.array(places).reshape(-1, 2), parity_length).T
    return float((stops - starts).sum())


def plan_micro_batches(
    lengths: np.ndarray,
    num_ranks: int,
    max_tokens: int,
    parity_length: float = math.inf,
    group_size: int = 1,
    shared: np.ndarray | None = None,
) -> list[list[list[int]]]:
    """The sequences that each rank trains together: plan[rank][micro] is a list of indices into `lengths`.

    No micro-batch holds more than `max_tokens` positions. Every rank gets the same number of micro-batches, about the
    fewest that the cap allows; some may be empty. Every rank computes the whole plan: nothing is communicated.

    `group_size` above 1: sequences of the same i // group_size that are together share their first `shared[i]`
    positions. Whole groups save most but are hard to balance and to fit under the cap, so halves, quarters, ... are
    tried too; the plan of the least cost wins, then of the fewest micro-batches.

    >>> plan_micro_batches(np.array([5, 4, 3, 3]), num_ranks=2, max_tokens=8)
    [[[0, 3]], [[1, 2]]]
    """
    assert len(lengths) > 0 and lengths.max() <= max_tokens, "the token cap is checked against the length limits"
    shared = np.zeros_like(lengths) if shared is None else shared
    costs, shared_costs = training_costs(lengths, parity_length), training_costs(shared, parity_length)
    groups = np.split(np.arange(len(lengths)), range(group_size, len(lengths), group_size))
    plans = []
    together = group_size
    while together:
        units = [unit for group in groups for unit in _units(group, lengths, shared, together, max_tokens)]
        sizes = np.array([_sum(unit, lengths, shared) for unit in units])
        unit_costs = np.array([_sum(unit, costs, shared_costs) for unit in units])
        cost, bins = _balance(sizes, unit_costs, num_ranks, max_tokens)
        micros = [np.concatenate([units[u] for u in members]).tolist() if members else [] for members in bins]
        plans.append((round(cost), len(bins), micros))
        together //= 2
    *_, micros = min(plans, key=lambda plan: plan[:2])
    return [micros[rank::num_ranks] for rank in range(num_ranks)]


def _sum(unit: np.ndarray, values: np.ndarray, shared: np.ndarray) -> float:
    """The sum of `values` over the unit's sequences, the shared part once."""
    return values[unit].sum() - (len(unit) - 1) * shared[unit[0]]


def _units(
    group: np.ndarray, lengths: np.ndarray, shared: np.ndarray, together: int, max_tokens: int
) -> list[np.ndarray]:
    """The group, halved until no part exceeds `together` sequences or `max_tokens` positions."""
    if len(group) <= together and _sum(group, lengths, shared) <= max_tokens:
        return [group]
    return [unit for half in np.array_split(group, 2) for unit in _units(half, lengths, shared, together, max_tokens)]


def _balance(sizes: np.ndarray, costs: np.ndarray, num_ranks: int, max_tokens: int) -> tuple[float, list[list[int]]]:
    """(the costs of the slowest ranks, added up; the units of each micro-batch, of which `num_ranks` run at a time).

    The largest unit comes first, into the cheapest bin that has room. Bins of similar cost then meet in the same micro
    step, where ranks wait for each other.
    """
    largest_first = np.argsort(-sizes, kind="stable").tolist()
    num_large = int((2 * sizes > max_tokens).sum())  # no two of them fit together
    num_micros = -(-max(-(-int(sizes.sum()) // max_tokens), num_large) // num_ranks)
    while (bins := _fill_bins(sizes, costs, largest_first, num_micros * num_ranks, max_tokens)) is None:
        num_micros += max(1, num_micros // 50)  # ends: with a bin for each unit they fit
    bin_costs = np.array([costs[members].sum() for members in bins])
    costliest_first = np.argsort(-bin_costs, kind="stable")
    return bin_costs[costliest_first[::num_ranks]].sum(), [bins[b] for b in costliest_first]


def _fill_bins(
    sizes: np.ndarray, costs: np.ndarray, order: list[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Each unit, in this order, in the cheapest bin that has room for it; None if there is none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room, bin_costs = np.full(num_bins, max_tokens), np.zeros(num_bins)
    for index in order:
        cheapest = int(np.where(room >= sizes[index], bin_costs, np.inf).argmin())
        if room[cheapest] < sizes[index]:
            return None
        bins[cheapest].append(index)
        room[cheapest] -= sizes[index]
        bin_costs[cheapest] += costs[index]
    return bins
