"""The records that travel through a step, and the packing of ragged sequences into micro-batches.

One dimension key, used for every array and tensor of the project:

    P  prompts of a step                     N  packed tokens of a micro-batch
    G  completions per prompt (group_size)   S  sequences of a micro-batch
    B  sequences of a step, B = P * G        V  vocabulary, D  hidden size

A suffix names the dimensions: `rewards_B`, `logprobs_N`. Sequences are prompt-major: completion b answers prompt b // G.
A step samples one `Rollout`; `plan_micro_batches` decides which rank trains which sequences together; `pack` makes the `Batch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vision import PromptImages


@dataclass(frozen=True)
class Rollout:
    """B completions of one step, the same on every rank. Ragged fields are lists of B arrays."""

    prompts: list[np.ndarray]  # int32 token ids, the chat template applied; one array shared by the G completions of a prompt
    completions: list[np.ndarray]  # int32 token ids as sampled, the end-of-sequence token included where there is one
    rollout_logprobs: list[np.ndarray]  # float32, the engine's own log-probabilities of the completion tokens (at its temperature)
    texts: list[str]  # the completions as text, without special tokens
    is_truncated_B: np.ndarray  # bool: stopped by the length limit, not by the model
    images: list[PromptImages | None] | None = None  # of the prompts; None: no prompt has any
    rewards_B: np.ndarray | None = None  # float32
    is_right_B: np.ndarray | None = None  # bool: full marks from the first verifier of the reward
    is_trained_B: np.ndarray | None = None  # bool: false where a sequence is left out of the loss; None: all are trained
    loss_weights_B: np.ndarray | None = None  # float32: what each token of the sequence counts in the loss of its update
    advantages: list[np.ndarray] | None = None  # float32, one per completion token

    @property
    def completion_lengths_B(self) -> np.ndarray:
        return np.array([len(completion) for completion in self.completions])

    @property
    def trained_lengths_B(self) -> np.ndarray:
        """Completion tokens that the loss is averaged over: none of a sequence that is left out of it."""
        return self.completion_lengths_B if self.is_trained_B is None else self.completion_lengths_B * self.is_trained_B

    @property
    def sequence_lengths_B(self) -> np.ndarray:
        """Trained positions per sequence: prompt + completion - 1, because the last token predicts nothing."""
        return np.array([len(p) + len(c) - 1 for p, c in zip(self.prompts, self.completions, strict=True)])

    def take(self, indices_B: np.ndarray) -> Rollout:
        """The sequences of these indices, in this order, with all that is known of them."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return Rollout(
            **{name: value[indices_B] if isinstance(value, np.ndarray) else [value[b] for b in indices_B] for name, value in known.items()}
        )

    @staticmethod
    def concatenate(parts: list[Rollout]) -> Rollout:
        """One rollout of all the parts' sequences, in the order of the parts, with what is known of all of them."""
        columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
        known = {name: values for name, values in columns.items() if all(value is not None for value in values)}
        return Rollout(
            **{name: np.concatenate(values) if isinstance(values[0], np.ndarray) else sum(values, []) for name, values in known.items()}
        )


@dataclass(frozen=True)
class Batch:
    """One packed micro-batch: S sequences laid end to end in N positions. Position n predicts `labels_N[n]`."""

    input_ids_N: Tensor  # int64
    position_ids_N: Tensor  # int64, restart at 0 with each sequence; with images [3, N]: time, row, column
    labels_N: Tensor  # int64, the next token of the same sequence
    loss_mask_N: Tensor  # bool, true where the label is a completion token that is trained
    loss_weights_N: Tensor  # float32, what the position counts in the loss of the update
    sequence_ids_N: Tensor  # int64, 0 to S - 1
    rollout_logprobs_N: Tensor  # float32, the engine's; zero where the label is no completion token
    lengths_S: tuple[int, ...]  # positions per sequence; they add up to N
    indices_S: tuple[int, ...]  # which sequences of the rollout these are
    is_image_N: Tensor | None = None  # bool, true where an image's embedding takes the place of the token's; None: no images
    pixels: tuple[Tensor, ...] = ()  # of each image [patches, values], float32, on the host until a pass needs them
    grids: tuple[tuple[int, int, int], ...] = ()  # of each image: 1, height and width in patches
    advantages_N: Tensor | None = None  # float32, zero where the label is no completion token; None: not known yet
    old_logprobs_N: Tensor | None = None  # float32, under the weights that sampled; None: not needed
    ref_logprobs_N: Tensor | None = None  # float32, under the reference; None: no KL term

    def to(self, device: torch.device) -> Batch:
        """The batch on the device, but for pixel values: those of a whole step would be gigabytes."""
        moved = {name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def pack(rollout: Rollout, indices: list[int]) -> Batch:
    """The sequences `indices` of the rollout, end to end. The next-token shift and the loss mask are made here and nowhere else.

    The mask goes by position, not by token: an end-of-sequence token is trained also where it is the padding token.
    Without sequences: a single masked position, so that a rank with nothing left to train still takes part in the collectives.
    """
    assert rollout.loss_weights_B is not None, "what a token counts depends on the whole update: it is set before packing"
    if not indices:
        zero = torch.zeros(1)
        return Batch(zero.long(), zero.long(), zero.long(), zero.bool(), zero, zero.long(), zero, lengths_S=(1,), indices_S=())
    input_ids, positions, labels, masks, lengths = [], [], [], [], []
    for b in indices:
        prompt, completion = rollout.prompts[b], rollout.completions[b]
        tokens = np.concatenate([prompt, completion])
        length = len(tokens) - 1
        is_trained = rollout.is_trained_B is None or rollout.is_trained_B[b]
        input_ids.append(tokens[:-1])
        labels.append(tokens[1:])  # the one shift: position n predicts token n + 1
        masks.append((np.arange(length) >= len(prompt) - 1) & is_trained)  # the one mask
        positions.append(np.arange(length))
        lengths.append(length)
    batch = Batch(
        input_ids_N=torch.from_numpy(np.concatenate(input_ids)).long(),
        position_ids_N=torch.from_numpy(np.concatenate(positions)).long(),
        labels_N=torch.from_numpy(np.concatenate(labels)).long(),
        loss_mask_N=torch.from_numpy(np.concatenate(masks)),
        loss_weights_N=torch.from_numpy(np.repeat(rollout.loss_weights_B[indices], lengths)),
        sequence_ids_N=torch.from_numpy(np.repeat(np.arange(len(indices)), lengths)),
        rollout_logprobs_N=to_positions(rollout, indices, rollout.rollout_logprobs),
        lengths_S=tuple(lengths),
        indices_S=tuple(indices),
    )
    return _with_images(batch, [rollout.images[b] if rollout.images else None for b in indices])


def _with_images(batch: Batch, images: list[PromptImages | None]) -> Batch:
    """The batch with the images of its sequences, if there are any: pixel values, their places, and positions in three rows."""
    if not any(images):
        return batch
    positions, is_image = [], []
    for each, length in zip(images, batch.lengths_S, strict=True):
        positions.append(np.tile(np.arange(length), (3, 1)) if each is None else each.positions(length))
        flags = np.zeros(0, dtype=bool) if each is None else each.is_image()
        is_image.append(np.pad(flags, (0, length - len(flags))))
    return replace(
        batch,
        position_ids_N=torch.from_numpy(np.concatenate(positions, axis=1)).long(),
        is_image_N=torch.from_numpy(np.concatenate(is_image)),
        pixels=tuple(pixels for each in images if each for pixels in each.pixels()),
        grids=tuple(grid for each in images if each for grid in each.grids),
    )


def to_positions(rollout: Rollout, indices: list[int] | tuple[int, ...], per_token: list[np.ndarray]) -> Tensor:
    """Shape N, float32: what is known per completion token of the sequences `indices`, at their packed positions; zero at the others."""
    pieces = [np.zeros(1, dtype=np.float32)] if not indices else []
    for b in indices:
        pieces += [np.zeros(len(rollout.prompts[b]) - 1, dtype=np.float32), per_token[b]]
    return torch.from_numpy(np.concatenate(pieces)).float()


def from_positions(rollout: Rollout, batch: Batch, values_N: Tensor) -> dict[int, np.ndarray]:
    """The reverse: index of each sequence of the batch -> its values per completion token."""
    if not batch.indices_S:
        return {}
    pieces = zip(batch.indices_S, values_N.cpu().split(batch.lengths_S), strict=True)
    return {b: values[len(rollout.prompts[b]) - 1 :].numpy() for b, values in pieces}


def training_costs(lengths: np.ndarray, parity_length: float) -> np.ndarray:
    """What each sequence costs, in tokens' worth of matrix products: attention adds length^2 / `parity_length` (`Policy.parity_length`)."""
    return lengths * (1.0 + lengths / parity_length)


def plan_micro_batches(lengths: np.ndarray, num_ranks: int, max_tokens: int, parity_length: float = math.inf) -> list[list[list[int]]]:
    """Which rank trains which sequences together: plan[rank][micro] is a list of indices into `lengths`.

    No micro-batch holds more than `max_tokens` positions, ever. Every rank gets the same number of micro-batches, about the fewest that
    the cap allows (some may be empty), so the collectives of the ranks always match. The costliest sequence first, into the cheapest bin
    that has room: that balances the bins by cost; those of similar cost then meet in the same micro step, because ranks wait for each
    other there. The plan is a function of its arguments: every rank computes the whole of it, nothing is communicated.
    """
    lengths = np.asarray(lengths)
    assert len(lengths) > 0 and lengths.max() <= max_tokens, "the token cap is checked against the length limits at the start"
    costs = training_costs(lengths, parity_length)
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    num_bins = max(-(-int(lengths.sum()) // max_tokens), int((2 * lengths > max_tokens).sum()))  # of those no two fit together
    num_micros = -(-num_bins // num_ranks)
    while (bins := _fill_bins(lengths, costs, longest_first, num_micros * num_ranks, max_tokens)) is None:
        num_micros += max(1, num_micros // 50)  # ends: with a bin for each sequence they fit
    bin_costs = np.array([costs[members].sum() for members in bins])
    costliest_first = np.argsort(-bin_costs, kind="stable").tolist()
    return [[bins[b] for b in costliest_first[rank::num_ranks]] for rank in range(num_ranks)]


def _fill_bins(lengths: np.ndarray, costs: np.ndarray, order: list[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Each sequence, in this order, in the cheapest bin that has room for it; None if there is none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room, bin_costs = np.full(num_bins, max_tokens), np.zeros(num_bins)
    for index in order:
        cheapest = int(np.where(room >= lengths[index], bin_costs, np.inf).argmin())
        if room[cheapest] < lengths[index]:
            return None
        bins[cheapest].append(index)
        room[cheapest] -= lengths[index]
        bin_costs[cheapest] += costs[index]
    return bins
