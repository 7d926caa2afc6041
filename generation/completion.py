"""A completion while it grows. With servers and partial rollouts other weights may have made each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from batch import OnFinished, Rollout
from grading import Grade


@dataclass
class Completion:
    """So far: a list of each, one per token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # under the weights that made the token
    versions: list[int] = field(default_factory=list)  # the steps that those were trained
    finish_reason: str | None = None  # None: it goes on
    text: str = ""  # of a finished one
    is_sampled: list[bool] | None = None  # per token, false where an environment said it; None: all are
    grade: Grade | None = None  # that the environment has given

    def extend(self, token_ids: list[int], logprobs: list[float], version: int, reason: str | None = None) -> None:
        """By tokens that the weights of this version have made."""
        assert len(token_ids) == len(logprobs), "each token has its log-prob"
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.versions += [version] * len(token_ids)
        self.finish_reason = reason

    def tell(self, b: int, tokenizer: PreTrainedTokenizerBase, on_finished: OnFinished | None) -> None:
        """Reads the text of the finished completion; the grader hears of it as number b of its call."""
        self.text = tokenizer.decode(self.token_ids, skip_special_tokens=True)
        if on_finished is not None:
            on_finished(b, self.text, self.token_ids, self.finish_reason == "length", self.grade)


def rollout_of(completions: list[Completion]) -> Rollout:
    """Finished ones, without their rows, which every rank has."""
    has_turns = any(each.is_sampled is not None for each in completions)
    return Rollout(
        rows=[],
        completions=[np.array(each.token_ids, dtype=np.int32) for each in completions],
        rollout_logprobs=[np.array(each.logprobs, dtype=np.float32) for each in completions],
        texts=[each.text for each in completions],
        is_truncated_B=np.array([each.finish_reason == "length" for each in completions], dtype=bool),
        versions=[np.array(each.versions, dtype=np.int32) for each in completions],
        is_sampled=[np.array(each.is_sampled, dtype=bool) for each in completions] if has_turns else None,
    )
