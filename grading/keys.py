"""Answer keys that are lists: `key_text` writes one as text, `alternatives` reads it."""

from __future__ import annotations

import ast
import json
import re


def key_text(value: object, several: str = "any") -> str:
    """The answer of a row as text: numbers and objects as JSON.

    A list of texts and numbers, or a text that spells one (`["7"]`, as OlympiadBench and Skywork have), is the answer
    in it. Of several, `several` says what a completion must give: "any" of them (they stay a JSON list, which
    `alternatives` reads) or "all" (they are joined by commas). Raises ValueError for a list without an answer.
    """
    answers = _listed(value)
    if answers is None:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    answers = list(dict.fromkeys(answer for answer in answers if answer.strip()))
    if not answers:
        raise ValueError("a list without an answer")
    if len(answers) == 1:
        return answers[0]
    return json.dumps(answers, ensure_ascii=False) if several == "any" else ", ".join(answers)


def alternatives(text: str) -> list[str]:
    """The answers of which any one will do: several for a JSON list of texts, else the text itself."""
    return _listed(text) or [text]


def _listed(value: object) -> list[str] | None:
    """The texts and numbers of a list, or of a text that spells a list of texts; None for everything else."""
    if isinstance(value, str):
        if not re.match(r"\s*\[\s*[\"']", value):
            return None
        value = _read(value)
    if not isinstance(value, list) or not value:
        return [] if value == [] else None
    if any(isinstance(each, bool) or not isinstance(each, (str, int, float)) for each in value):
        return None
    return [each if isinstance(each, str) else str(each) for each in value]


def _read(text: str) -> object:
    """What the text spells in JSON or Python, else None. LaTeX whose backslashes are not escaped is read as meant."""
    for read in (json.loads, ast.literal_eval):
        for spelled in (text, text.replace("\\", "\\\\")):
            try:
                value = read(spelled)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if not re.search(r"[\x00-\x1f]", "".join(map(str, value))):
                return value
    return None
