"""Tables as plain text."""

from __future__ import annotations


def in_columns(rows: list[list[str]]) -> list[str]:
    """The rows as lines of text, their cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
