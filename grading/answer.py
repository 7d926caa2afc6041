"""Which part of a completion is its final answer: `read_answer`. The last mark counts, whatever stands around it."""

from __future__ import annotations

import re
from collections.abc import Iterator

BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{}$\\.,]+)")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character, which is none
STATED = re.compile(r"\banswer\b[*_]*\s*(?:\bis\b|:)[*_]*[ \t]*:?\s*", re.IGNORECASE)
SENTENCE_END = re.compile(
    r"(?<!\be\.g)(?<!\bi\.e)[.!?](?=[\s*\"')]|$)|[。\n]|[,;]?\s+(?:because|since)\s", re.IGNORECASE
)
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
MAX_STATED = 1000  # characters behind a mark without an end


def visible_text(completion: str) -> str | None:
    """What stands after the last `</think>`, if there is one; None if the completion ended while it was thinking."""
    if completion.rfind("<think>") > completion.rfind("</think>"):
        return None
    return completion.rpartition("</think>")[2]


def read_answer(completion: str, unmarked: str = "value") -> str | None:
    """The final answer, None if there is none.

    After the last `</think>` (a thought that is never closed has no answer), inside the last `<answer>...</answer>` if
    there is one, it is:
    1. the content of the last `\\boxed{}` or `\\fbox{}`;
    2. else what follows the last "####" on its line;
    3. else what follows the last "answer is" or "answer:", up to the end of the sentence, or to "because", "since";
    4. else the whole text, but only inside `<answer>`, or if it is nothing but a value: one line of at most two words.

    Nothing before the mark and nothing behind it changes it. A mark that is not closed holds nothing. `unmarked`: the
    rule 4 outside `<answer>` holds for a "value", for "all" texts, or for "none".
    """
    text = visible_text(completion)
    if text is None:
        return None
    _, tag, tagged = text.rpartition("<answer>")
    if tag:
        text, end, _ = tagged.partition("</answer>")
        if not end:
            return None
    answer = _marked(text)
    if answer is None:
        text = text.strip()
        is_value = "\n" not in text[:MAX_STATED] and len(text) <= MAX_STATED and len(WORD.findall(text)) <= 2
        answer = text if tag or unmarked == "all" or (unmarked == "value" and is_value) else ""
    return answer.strip() or None


def _marked(text: str) -> str | None:
    """What the last mark of the text holds, nothing if it is not closed; None without a mark."""
    boxes = list(boxes_of(text))
    if boxes:
        return boxes[-1]
    _, mark, behind = text.rpartition("####")
    if mark:
        return behind[:MAX_STATED].strip().partition("\n")[0]
    stated = list(STATED.finditer(text))
    if stated:
        behind = text[stated[-1].end() :][:MAX_STATED]
        ends = (each.start() for each in SENTENCE_END.finditer(behind))
        end = next((at for at in ends if not _is_open(behind[:at])), None)
        return behind[:end].strip(" *_")
    return None


def _is_open(text: str) -> bool:
    """Whether a formula is begun and not ended."""
    return text.count("$") % 2 == 1 or text.count("\\[") > text.count("\\]") or text.count("\\(") > text.count("\\)")


def boxes_of(text: str) -> Iterator[str]:
    """What every outermost \\boxed{...} and \\fbox{...} holds; `\\boxed 5` without braces holds the next word."""
    at = 0
    while match := BOX.search(text, at):
        at = match.end()
        if match[1] != "{":
            yield match[1]
            continue
        depth, start = 1, at
        for brace in BRACE.finditer(text, start):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                break
        at = brace.end() if depth == 0 else len(text)
        yield text[start : at - 1] if depth == 0 else ""
