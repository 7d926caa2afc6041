"""The records that travel through a step, and the packing of ragged sequences into micro-batches.

One dimension key, used for every array and tensor of the project:

    P  prompts of a step                     N  packed tokens of a micro-batch
    G  completions per prompt (group_size)   S  sequences of a micro-batch
    B  sequences of a step, B = P * G        K  trained tokens of a micro-batch
    V  vocabulary, D  hidden size

A suffix names the dimensions: `rewards_B`, `logprobs_N`. Completion b answers prompt b // G. A step
samples one `Rollout`; `plan_micro_batches` decides which rank trains which sequences together;
`pack` makes the `Batch`.

With --share_prompts, completions of a prompt that are packed together share its positions: the
first is packed whole, the others from the prompt's last token on: it predicts a token of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grading import Grade
from model.head import Distilled
from model.packed import Packing, Segment
from model.special_tokens import special_tokens

IMAGE = "<image>"  # in a prompt: the place of an image
Messages = list[dict[str, object]]
Metrics = dict[str, float]
# Takes b, text, sampled token ids, whether it is truncated, and an environment's grade, if any.
OnFinished = Callable[[int, str, Sequence[int], bool, Grade | None], None]
NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Row:
    """One problem with its prompt."""

    messages: Messages  # with system prompt and suffix; content: a text, or a list of image and text parts
    answer: str
    columns: dict[str, object]  # as read, without the images: for rewards that need more than the answer
    where: str  # its place in the source
    encoded_images: tuple[bytes, ...] = ()  # in the order of the image parts
    text: str = ""  # the rendered prompt, which the model continues
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)  # its tokens, image tokens repeated
    images: object | None = None  # `PromptImages` of extras/models/vision.py; None: none
    hinted_ids: np.ndarray = field(default_factory=lambda: NO_IDS)  # tokens of the prompt with its hint, if it has one

    @property
    def reference_ids(self) -> np.ndarray:
        """The tokens of the prompt as the reference reads it."""
        return self.hinted_ids if len(self.hinted_ids) else self.ids


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """B completions of one step, the same on every rank. Fields are lists or arrays of length B."""

    rows: list[Row]  # the problem that each completion answers: one object shared by the G completions of a prompt
    completions: list[np.ndarray]  # int32 token ids as sampled, the end-of-sequence token included where there is one
    rollout_logprobs: list[np.ndarray]  # float32, one per completion token, by the engine at its temperature
    texts: list[str]  # the completions as text, without what begins, ends and parts messages
    is_truncated_B: np.ndarray  # bool: stopped by the length limit, not by the model
    is_sampled: list[np.ndarray]  # bool, one per completion token; false where an environment said it
    is_trained_B: np.ndarray  # bool; false where the sequence is left out of the loss
    # Empty until they are known:
    grades: list[Grade] = field(default_factory=list)
    loss_weights_B: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float32: of each of its tokens
    advantages: list[np.ndarray] = field(default_factory=list)  # float32, one per completion token
    # By name, a value of each completion that only an optional part makes or reads:
    #   versions    int32, per completion token: steps that its sampler's weights were trained
    #   lags        int32, per completion token: steps between those weights and the ones that are trained
    #   routes      which experts took each position in the engine (extras/models/experts.py)
    #   is_hinted   whether the step has made a hint for it (extras/teacher/hints.py)
    #   kl_weights  the weight of its KL over its weight in the loss; without them it is 1
    parts: dict[str, list] = field(default_factory=dict)

    @property
    def rewards_B(self) -> np.ndarray:
        """float32."""
        return np.array([grade.reward for grade in self.grades], dtype=np.float32)

    @property
    def is_correct_B(self) -> np.ndarray:
        """bool: full marks from the first verifier of the reward."""
        return np.array([grade.is_correct for grade in self.grades], dtype=bool)

    @property
    def completion_lengths_B(self) -> np.ndarray:
        """Sampled tokens of each completion."""
        return np.array([is_sampled.sum() for is_sampled in self.is_sampled])

    @property
    def trained_lengths_B(self) -> np.ndarray:
        """Tokens of each completion; 0 where the sequence is left out of the loss."""
        return self.completion_lengths_B * self.is_trained_B

    @property
    def sequence_lengths_B(self) -> np.ndarray:
        """Trained positions per sequence: prompt + completion - 1, because the last token predicts nothing."""
        return np.array([self.first_position(b) + len(ids) for b, ids in enumerate(self.completions)])

    @property
    def has_replies(self) -> bool:
        """Whether an environment said something."""
        return not all(is_sampled.all() for is_sampled in self.is_sampled)

    @property
    def turns(self) -> list[np.ndarray]:
        """int64, per completion token: 0 in the first turn of the policy and in the reply to it, then 1, ..."""
        # A turn begins where the policy speaks again: where the flag rises from 0 to 1.
        begins = [np.diff(is_sampled.astype(np.int8), prepend=0) == 1 for is_sampled in self.is_sampled]
        return [np.cumsum(is_begin) - 1 for is_begin in begins]

    def hinted(self) -> Rollout | None:
        """The rollout as the reference reads it: the same completions to prompts with hints; None if there are none."""
        if not any(len(row.hinted_ids) for row in self.rows):
            return None
        return replace(self, rows=[replace(row, ids=row.reference_ids) for row in self.rows])

    def first_position(self, b: int) -> int:
        """The position that predicts the first token of completion b: the prompt's last token."""
        return len(self.rows[b].ids) - 1

    def with_parts(self, **values: list | None) -> Rollout:
        """The rollout with these values of optional parts; None: without them."""
        parts = self.parts | values
        return replace(self, parts={name: parts[name] for name in parts if parts[name] is not None})

    def select(self, indices_B: np.ndarray) -> Rollout:
        """The sequences of these indices, in this order."""

        def chosen(values: np.ndarray | list) -> np.ndarray | list:
            if isinstance(values, np.ndarray) and len(values):
                return values[indices_B]
            return [values[b] for b in indices_B] if len(values) else values

        fields = {name: chosen(values) for name, values in vars(self).items() if name != "parts"}
        return Rollout(**fields, parts={name: chosen(values) for name, values in self.parts.items()})

    @staticmethod
    def concatenate(rollouts: list[Rollout]) -> Rollout:
        """The sequences of all rollouts, in their order. All of them have the same parts."""

        def joined(pieces: list[np.ndarray | list]) -> np.ndarray | list:
            return np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else list(chain.from_iterable(pieces))

        first = rollouts[0]
        fields = {name: joined([getattr(each, name) for each in rollouts]) for name in vars(first) if name != "parts"}
        return Rollout(**fields, parts={name: joined([each.parts[name] for each in rollouts]) for name in first.parts})


@dataclass
class Completion:
    """A completion while it grows. With servers and partial rollouts other weights may have made each of its tokens."""

    token_ids: list[int] = field(default_factory=list)  # the lists have a value per token
    logprobs: list[float] = field(default_factory=list)  # under the weights that made the token
    versions: list[int] = field(default_factory=list)  # the steps that those were trained
    finish_reason: str = ""  # "stop" or "length"; empty: it goes on
    text: str = ""  # empty until it is finished
    is_sampled: list[bool] = field(default_factory=list)  # false where an environment said it; empty: all are sampled
    grade: Grade | None = None  # None: the environment, if there is one, leaves it to the reward
    routes: np.ndarray | None = None  # of prompt and tokens but for the last one; None: not known

    def extend(self, token_ids: list[int], logprobs: list[float], version: int, reason: str = "") -> None:
        """Appends tokens sampled by the weights of this version."""
        assert len(token_ids) == len(logprobs), "each token has its log-prob"
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.versions += [version] * len(token_ids)
        self.finish_reason = reason

    def read(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text for rewards and readers. What ended it is left out, unless it closes a tag."""
        shown, hidden = special_tokens(tokenizer)
        ids = self.token_ids
        if self.finish_reason == "stop":
            tag = shown.get(ids[-1])
            if tag is not None and not tag.startswith("</"):
                ids = ids[:-1]
        return tokenizer.decode([i for i in ids if i not in hidden])

    def finish(self, b: int, tokenizer: PreTrainedTokenizerBase, on_finished: OnFinished | None) -> None:
        """Decodes the text, and reports the completion as number b of the call: the grader begins with it."""
        self.text = self.read(tokenizer)
        if on_finished is not None:
            on_finished(b, self.text, self.token_ids, self.finish_reason == "length", self.grade)


def rollout_of(completions: list[Completion]) -> Rollout:
    """Finished completions, without their rows, which every rank has."""
    is_sampled = [completion.is_sampled or [True] * len(completion.token_ids) for completion in completions]
    return Rollout(
        rows=[],
        completions=[np.array(completion.token_ids, dtype=np.int32) for completion in completions],
        rollout_logprobs=[np.array(completion.logprobs, dtype=np.float32) for completion in completions],
        texts=[completion.text for completion in completions],
        is_truncated_B=np.array([completion.finish_reason == "length" for completion in completions], dtype=bool),
        is_sampled=[np.array(flags, dtype=bool) for flags in is_sampled],
        is_trained_B=np.ones(len(completions), dtype=bool),
        parts={"versions": [np.array(completion.versions, dtype=np.int32) for completion in completions]},
    )


class Part(Protocol):
    """The data of a micro-batch that an optional part of the model reads, such as images."""

    is_for_reference: bool  # whether the reference reads it, too

    def to(self, device: torch.device) -> Part:
        """The part on the device."""

    def inputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | None]:
        """Arguments of the decoder that this part adds or replaces."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One packed micro-batch: S sequences laid end to end in N positions. Position n predicts `labels_N[n]`."""

    input_ids_N: Tensor  # int64
    position_ids_N: Tensor  # int64, place in the sequence; with images [3, N]: time, row, column
    labels_N: Tensor  # int64, the next token of the same sequence
    loss_mask_N: Tensor  # bool, true where the label is a sampled token that is trained
    trained_K: Tensor  # int64, the positions where the mask is true: to index by a mask, the host waits for the device
    loss_weights_N: Tensor  # float32, what the position counts in the loss of the update
    sequence_ids_N: Tensor  # int64, 0 to S - 1
    rollout_logprobs_N: Tensor  # float32, the engine's; zero where the label is no completion token
    segments_S: tuple[Segment, ...]  # their lengths add up to N
    lags_N: Tensor  # float32, from `Rollout.parts`; zero where none are known
    kl_weights_N: Tensor  # float32, from `Rollout.parts`; 1 without them
    parts: tuple[Part, ...] = ()  # of this model
    packing: Packing | None = None  # for its attention, on the device; None: each pass makes it
    advantages_N: Tensor | None = None  # float32, zero where the label is no completion token; None: not known yet
    old_logprobs_N: Tensor | None = None  # float32, of the weights that sampled; None: not needed
    ref_logprobs_N: Tensor | None = None  # float32, under the reference; None: no KL term
    update_tokens: int = 1  # trained tokens of its whole update, over all ranks, at least 1
    hinted: Batch | None = None  # the same sequences as the reference reads them; None: as they are here
    run_teacher: Callable[[Batch], object] | None = None  # runs the reference, for a KL over the vocabulary
    distilled: Distilled | None = None  # what that gave; None: it is not known yet

    def reference_batch(self) -> Batch:
        """The batch as the reference reads it: with hints, if there are any."""
        return self.hinted or replace(self, parts=tuple(part for part in self.parts if part.is_for_reference))

    @property
    def lengths_S(self) -> tuple[int, ...]:
        return tuple(segment.length for segment in self.segments_S)

    def cost(self, parity_length: float) -> float:
        """The sum of the `training_costs` of its sequences; shared positions count once."""
        places = [(segment.start, segment.stop) for segment in self.segments_S if segment.index is not None]
        starts, stops = training_costs(np.array(places).reshape(-1, 2), parity_length).T
        return float((stops - starts).sum())

    def to(self, device: torch.device) -> Batch:
        """The batch on the device, but for pixel values, which are gigabytes in a whole step."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved, parts=tuple(part.to(device) for part in self.parts))


Update = list[Batch]  # the input of one optimizer step: the micro-batches of this rank, as many on every rank


def pack(rollout: Rollout, indices: list[int], group_size: int = 1) -> Batch:
    """The sequences `indices` of the rollout, end to end. The next-token shift and the loss mask are made only here.

    Those whose b // `group_size` is the same share their prompt. The mask goes by position, not by token: an
    end-of-sequence token is trained also where it is the padding token. Without sequences the batch is a single masked
    position: a rank with nothing left to train takes part in the collectives.
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
    is_trained_B = rollout.trained_lengths_B > 0

    def mask(segment: Segment) -> np.ndarray:  # the one mask
        b, first = segment.index, rollout.first_position(segment.index)
        # What an environment said is read, but not trained.
        is_sampled = np.concatenate([np.zeros(first, dtype=bool), rollout.is_sampled[b]])
        return is_sampled & is_trained_B[b]

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
    """The first sequence of each prompt whole, the others without the positions that they share with it."""
    holders: dict[int, int] = {}  # b // group_size -> the segment that has the prompt
    segments = []
    for s, b in enumerate(indices):
        holder = holders.setdefault(b // group_size, s)
        shared = shared_positions(rollout, b) if holder < s else 0
        length = rollout.first_position(b) + len(rollout.completions[b])
        segments.append(Segment(b, shared, length, holder if shared else None))
    return tuple(segments)


def shared_positions(rollout: Rollout, b: int) -> int:
    """Positions that sequence b can share: the prompt without its last token; none if that is part of an image."""
    images = rollout.rows[b].images  # whose tokens have to stay together
    return 0 if images is not None and images.is_image()[-1] else rollout.first_position(b)


def packed(segments: tuple[Segment, ...], sequence_values: Callable[[Segment], np.ndarray]) -> Tensor:
    """The values of the sequences at their positions, from `start` on, end to end."""
    return torch.from_numpy(np.concatenate([sequence_values(segment)[segment.start :] for segment in segments]))


def to_positions(rollout: Rollout, segments: tuple[Segment, ...], per_token: list[np.ndarray]) -> Tensor:
    """Shape N, float32: the values of the completion tokens, at their positions; zero at the others."""
    if segments[0].index is None:
        return torch.zeros(1)

    def padded(segment: Segment) -> np.ndarray:
        return np.pad(per_token[segment.index], (rollout.first_position(segment.index), 0))

    return packed(segments, padded).float()


def training_costs(lengths: np.ndarray, parity_length: float) -> np.ndarray:
    """The cost of each sequence, in matrix products of one token: attention adds length^2 / parity_length."""
    return lengths * (1.0 + lengths / parity_length)


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
    """(the cost of the slowest ranks, the units of each micro-batch, of which `num_ranks` run at a time).

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
