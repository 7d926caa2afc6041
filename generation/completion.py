"""A completion while it grows. With servers and partial rollouts other weights may have made each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from batch import OnFinished, Rollout
from data import TAG, template_tokens
from grading import Grade


@lru_cache(maxsize=8)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[int, str], set[int]]:
    """(those that texts show, such as tags; those that they do not: begin, end, padding, what is around messages)."""
    named = {getattr(tokenizer, name) for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    shown = {i: token for i, token in special.items() if token not in {*named, *template_tokens(tokenizer)}}
    return shown, special.keys() - shown.keys()


def describe_tags(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line for the log, if there are special tokens that a reward may look for."""
    shown = special_tokens(tokenizer)[0].values()
    tags = [token for token in shown if TAG.search(token) or token.startswith("</")]
    return [f"special tokens that the reward sees: {', '.join(tags)}"] if tags else []


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

    def read(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text for rewards and readers. What ended it is left out, unless it closes a tag."""
        shown, hidden = special_tokens(tokenizer)
        is_ended = self.finish_reason == "stop" and not shown.get(self.token_ids[-1], "</").startswith("</")
        return tokenizer.decode([i for i in self.token_ids[: -1 if is_ended else None] if i not in hidden])

    def tell(self, b: int, tokenizer: PreTrainedTokenizerBase, on_finished: OnFinished | None) -> None:
        """Reads the text of the finished completion; the grader hears of it as number b of its call."""
        self.text = self.read(tokenizer)
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
