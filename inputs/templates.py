"""Prompts that hold a chat template already: what the tokenizer's own one writes around a message is not to be written
around it once more.
"""

from __future__ import annotations

from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


def template_token_in(messages: list[dict[str, object]], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The first special token of the tokenizer's chat template that a message's text holds, if one does.

    The tokens of another model's template are ordinary text to this tokenizer, and are not found.
    """
    texts = [message["content"] for message in messages]
    return next((token for token in _written_tokens(tokenizer) for text in texts if token in text), None)


@lru_cache(maxsize=8)
def _written_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The special tokens that the chat template writes around a user's message; not ordinary ones such as `<think>`."""
    try:
        written = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError):  # it wants other messages than this one
        return ()
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(token for token in special if token in written)
