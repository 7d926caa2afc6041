"""Writes the tables of docs/from_other_libraries.md, which docs/from_other_libraries.json holds: one for each section.

The command line reads the same file, to answer another library's name for a flag with ours.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "from_other_libraries.md"


def with_tables(page: str, tables: dict[str, list[list[str]]]) -> str:
    """The page, in which the first table of each of these sections has these rows."""
    for title, (head, *rows) in tables.items():
        lines = [f"| {' | '.join(row)} |" for row in [head, *rows]]
        lines.insert(1, "|---" * len(head) + "|")
        table = re.compile(rf"(^## {re.escape(title)}\n.*?)^(?:\|[^\n]*\n)+", re.MULTILINE | re.DOTALL)
        page, _ = table.subn(lambda found, lines=lines: found[1] + "\n".join(lines) + "\n", page)
    return page


if __name__ == "__main__":
    tables = json.loads(PAGE.with_suffix(".json").read_text("utf-8"))
    PAGE.write_text(with_tables(PAGE.read_text("utf-8"), tables), encoding="utf-8")
