"""Where the tags and the boxes of a text are: `answer_tags` and `boxes_of`."""

from __future__ import annotations

import itertools
import re

Span = tuple[int, int, str | None]  # start, end, inside (None: never closed)


def answer_tags(text: str) -> list[Span]:
    spans: list[Span] = []
    for tag, following in itertools.pairwise([*re.finditer(r"</?answer>", text), None]):
        if tag[0] == "<answer>":
            is_closed = following is not None and following[0] == "</answer>"
            inside = text[tag.end() : following.start()] if is_closed else None
            spans.append((tag.start(), following.end() if is_closed else tag.end(), inside))
    return spans


def boxes_of(text: str) -> list[Span]:
    """Every outermost \\boxed{...} and \\fbox{...}; `\\boxed 5` without braces holds the next word."""
    spans: list[Span] = []
    for match in re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s{}$\\.,]+)", text):
        if spans and match.start() < spans[-1][1]:
            continue  # inside the one before
        if match[1] != "{":
            spans.append((match.start(), match.end(), match[1]))
            continue
        end = closing_brace(text, match.end())
        inside = None if end is None else text[match.end() : end]
        spans.append((match.start(), len(text) if end is None else end + 1, inside))
    return spans


def closing_brace(text: str, start: int) -> int | None:
    """The position of the brace that closes the one opened before `start`; escaped braces do not count."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None
