"""Verifiers of the form of a completion, whatever its answer: tags and length."""

from __future__ import annotations

import re

from grading import Case, Grade
from grading.answer import opens_thought


def verify_format(case: Case) -> Grade:
    """1.0 if the completion is `<think>...</think><answer>...</answer>` and nothing else, each tag once; else 0.0.

    Neither may be blank. A prompt that ends with `<think>` (as QwQ's chat template does) has opened the first tag: then
    the completion must not open it again.
    """
    return Grade(float(_has_form(case, "<answer>(.*)</answer>", "think|answer")))


def verify_think_format(case: Case) -> Grade:
    """1.0 if the completion is `<think>...</think>` and then some text, each tag once; else 0.0. Else as `format`."""
    return Grade(float(_has_form(case, "(.*)", "think")))


def _has_form(case: Case, ending: str, tags: str) -> bool:
    """Whether the completion is a thought and this ending, neither blank and without any other of these tags."""
    opened = "<think>" if opens_thought(case.prompt) else ""
    thought, _, rest = (opened + case.completion.strip()).partition("</think>")
    match = re.fullmatch(ending, rest.strip(), re.DOTALL)
    if not match or not thought.startswith("<think>"):
        return False
    for part in (thought.removeprefix("<think>"), match[1]):
        is_blank = not any(c.isprintable() and not c.isspace() for c in part)
        if is_blank or re.search(rf"</?(?:{tags})>", part):
            return False
    return True


def verify_length(case: Case) -> Grade:
    """DAPO's soft overlong punishment (eq. 13): 0 up to max - cache tokens, then linearly down to -1 at max."""
    if case.num_tokens is None or case.max_tokens is None:
        raise ValueError("the reward `length` needs num_tokens and max_tokens")
    cache_tokens = case.overlong_cache_tokens or max(case.max_tokens // 5, 1)
    return Grade(min(0.0, max(-1.0, (case.max_tokens - cache_tokens - case.num_tokens) / cache_tokens)))
