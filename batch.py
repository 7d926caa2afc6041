"""The records that travel through a step, and the dimension key.

A completion passes eleven records, in this order:

    Row          its problem and prompt                           here; `data.py` reads them
    Completion   while it grows                                   here; `rollout.py`
    Case, Grade  what a verifier gets, and what it gives          grading/; `reward.py`
    Rollout      all B of a step                                  here; `rollout.py`
    Segment      its place in a micro-batch                       model/layout.py; `packing.py`
    Batch        its micro-batch; an `Update` is a list of them   here; `packing.py`
    TokenScores  its log-probs under the policy                   model/head.py; `policy.py`
    Groups       beside the others of its prompt: advantages      grpo.py; `update.py`
    Tokens, Loss what the loss reads, and what it gives           grpo.py; `update.py`

One dimension key for all arrays and tensors; a file that needs another letter says so at its top:

    P  prompts of a step                     N  packed tokens of a micro-batch
    G  completions per prompt (group_size)   S  sequences of a micro-batch
    B  sequences of a step, B = P * G        K  trained tokens of a micro-batch
    V  vocabulary, D  hidden size

A suffix names the dimensions: `rewards_B`, `logprobs_N`. Completion b answers prompt b // G.
"""

from __future__ import annotations

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
from model.layout import Layout, Segment
from model.special_tokens import special_tokens

IMAGE = "<image>"  # in a prompt: the place of an image
Messages = list[dict[str, object]]
Metrics = dict[str, float]
# Takes b, text, sampled token ids, whether it is truncated, and an environment's grade, if any.
OnFinished = Callable[[int, str, Sequence[int], bool, Grade | None], None]
NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Row:
    """One problem with its prompt.

    >>> Row([{"role": "user", "content": "1+2"}], "3", {}, "sums.jsonl, line 1", ids=np.array([10, 11])).reference_ids
    array([10, 11])
    """

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
    """B completions of one step, the same on every rank. Fields are lists or arrays of length B.

    >>> rollout = rollout_of([Completion([12], [-0.5], [0]), Completion([21, 22], [-0.1, -0.7], [0, 0], "length")])
    >>> rollout.completion_lengths_B, rollout.is_truncated_B
    (array([1, 2]), array([False,  True]))
    >>> rollout.select([1, 1]).completions
    [array([21, 22], dtype=int32), array([21, 22], dtype=int32)]
    """

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
    def is_compared_B(self) -> np.ndarray:
        """bool: false where a function of the user's could not grade it: it is left out, also of all comparisons."""
        return np.array([grade.is_compared for grade in self.grades], dtype=bool)

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
        """Positions of each sequence: prompt + completion - 1, because the last token predicts nothing."""
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

    def graded(self, grades: list[Grade]) -> Rollout:
        """The rollout with its grades. What could not be graded is not trained."""
        return replace(self, grades=grades, is_trained_B=self.is_trained_B & [grade.is_compared for grade in grades])

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
            if not len(values):
                return values
            return values[indices_B] if isinstance(values, np.ndarray) else [values[b] for b in indices_B]

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
    """A completion while it grows. With servers and partial rollouts other weights may have made each of its tokens.

    >>> completion = Completion([21], [-0.1], [3])
    >>> completion.extend([22], [-0.7], version=4, reason="stop")
    >>> completion.token_ids, completion.versions
    ([21, 22], [3, 4])
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # under the weights that made the token
    versions: list[int] = field(default_factory=list)  # the steps that those were trained; empty: not known
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
        if self.finish_reason == "stop" and not shown.get(ids[-1], "</").startswith("</"):
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
    """One packed micro-batch: S sequences laid end to end in N positions. Position n predicts `labels_N[n]`.

    Of the sequences [10, 11, 12] and [20, 21, 22], of which 12, 21 and 22 are completions, `packing.pack` makes:

        input_ids_N   10  11  20  21        loss_mask_N    0   1   1   1
        labels_N      11  12  21  22        position_ids_N 0   1   0   1
    """

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
    layout: Layout | None = None  # for its attention, on the device; None: each pass makes it
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

    def to(self, device: torch.device) -> Batch:
        """The batch on the device, but for pixel values, which are gigabytes in a whole step."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved, parts=tuple(part.to(device) for part in self.parts))


Update = list[Batch]  # the input of one optimizer step: the micro-batches of this rank, as many on every rank
