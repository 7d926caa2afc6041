"""Flags: the frozen objects that functions take, and what a flag's value means."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class PromptFormat:  # how a row becomes a prompt
    prompt_column: str = "problem"
    answer_column: str = "answer"
    image_column: str | None = None
    prompt_format: str = "chat"
    system_prompt: str | None = None
    prompt_suffix: str = ""
    max_prompt_tokens: int = 1024
    max_pixels: int | None = None


def settings_of(kind: type[T], args: argparse.Namespace) -> T:
    """The object of this class whose fields are flags."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


def parse_source(source: str) -> tuple[str, str | None, int | None]:
    """(WHAT, SPLIT, ROWS) of WHAT[@SPLIT][#ROWS]. A path that exists is taken literally."""
    what, split, count = source, None, None
    if not Path(what).exists() and (match := re.fullmatch(r"(.+)#([1-9]\d*)", what)):
        what, count = match[1], int(match[2])
    if not Path(what).exists() and (match := re.fullmatch(r"(.+)@([^@/]+)", what)):
        what, split = match[1], match[2]
    return what, split, count
