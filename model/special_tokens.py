"""Special tokens: those around messages, and those that are text to a reward, such as tags."""

from __future__ import annotations

import re
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

TAG = re.compile(r"think|thought|reason|answer|tool|call|python", re.IGNORECASE)  # in the name of a token that is one


@lru_cache(maxsize=8)
def template_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The special tokens that the chat template writes around messages.

    A text that holds one already has a template. Tokens of another model's template are ordinary
    text, and so are tokens like `<think>`.
    """
    messages = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    try:
        written = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, ValueError, ArithmeticError):  # it wants other messages; or is none
        return ()
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(token for token in special if token in written and not TAG.search(token))


@lru_cache(maxsize=8)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[int, str], set[int]]:
    """(id -> token that texts show, such as a tag; ids that they do not: begin, end, padding, around messages)."""
    named = {getattr(tokenizer, name) for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    shown = {i: token for i, token in special.items() if token not in {*named, *template_tokens(tokenizer)}}
    return shown, special.keys() - shown.keys()
