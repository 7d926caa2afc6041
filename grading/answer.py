"""Which part of a completion is its final answer: `read_answer` (mathematics) and `read_final_answer` (plain text)."""

from __future__ import annotations

import itertools
import re

Span = tuple[int, int, str | None]  # start, end, inside (None: never closed)

MAX_UNMARKED = 5000  # characters at the end of a text in which an answer without tag or box is looked for

STATEMENT = re.compile(
    r"(?:\banswers?\b(?: to [^.:\n]{1,60}?)? ?"
    r"(?:(?:is|are|equals?|would be|should be|must be)\b ?:?|[:=：])|答案 ?[是为為]? ?[:：]?|####)\s?",
    re.IGNORECASE,
)
HEDGE = re.compile(r"\b(?:or|maybe|perhaps|possibly|alternatively|might|could)\b", re.IGNORECASE)
CORRECTION = re.compile(
    r"\b(?:wait|actually|no|not|correct\w*|instead|rather|sorry|mistake|wrong|so|then|thus|hence|therefore)\b", re.I
)
HEDGE_AFTER = re.compile(
    r"\W*(?:but\s+)?(?:or|maybe|perhaps|possibly|alternatively|(?:it\s+)?(?:might|"
    r"could)(?:\s+also)?\s+be(?=\s*[\d$\\-]))\b\W*"
    r"(?:maybe|even|also|it|is|be|could|equivalently|\s)*",
    re.IGNORECASE,
)
JOINT = re.compile(  # what stands between two answers that belong together
    r"(?:[\s$,;:&.]|\\[,;:! ()\[\]]|\\q?quad|\\text\s*\{\s*(?:and|or)?\s*\}|\\l(?:or|and)|\\vee|\\wedge"
    r"|[A-Za-z](?:_\{?\d\}?)?\s*="
    r"|\b(?:and|or|as well as|also|both|is (?:one|a) \w+|is another(?: \w+)?"
    r"|the other(?: \w+)? is|another is|option \w+|case \w+|part \w+)\b"
    r"|\n\s*(?:[-*•]|\d+[.)]|\([a-z]\)))*",
    re.IGNORECASE,
)
REFUSED = re.compile(  # right before an answer: it is none
    r"(?:\b(?:not|never|cannot|except|exclud\w*|reject\w*|discard\w*|exceed\w*"
    r"|(?:greater|less|more|fewer|larger|smaller|other) than|rather than|instead of|at least|at most)|n['’]t)"
    r"[^\w.!?\n]*(?:(?:think|believe|be|is|equals?|to|that|the|final|correct|answer|value)[^\w.!?\n]*)*"
    r"(?:[A-Za-z]\s*=)?[^\w.!?\n]*$",
    re.IGNORECASE,
)
PART_BEFORE = re.compile(  # right before or after an answer: it is a part of a larger formula
    r"(?:[=(${\d})]\s*-|[\w})]\s*\+|[\d})]\s*/|\^"
    r"|\\(?:ne|neq|not ?=|[lg]eq?|times|cdot|sqrt(?:\[[^\]]*\])?\s*\{|log|ln|sin|cos|tan|pi)|[≠≤≥]"
    r"|(?:^|[\s$(])[\w\\]+\s*[<>]|\\frac\s*(?:\{[^{}]*\})?\s*\{)\s*$|\d\Z|(?:^|\s)[-−]\Z"
)
PART_AFTER = re.compile(
    r"\s*(?:\^(?!\s*\{?\s*\\circ)|/|[+-]\s*[\d\\]|\\(?:cdot|times|sqrt|pi|ln|log|frac)(?![a-z])|!(?=\s*(?:\$|"
    r"\\\)|\\\])))|\d|[.,]\d|_[\d{]"
    r"|[A-Za-z](?![A-Za-z])|\s*(?:\\text\s*\{\s*)?(?:hundred|thousand|million|billion)\b"
)


def visible_text(completion: str) -> str | None:
    """What stands after the last `</think>`, if there is one; None if the completion ended while it was thinking."""
    if completion.rfind("<think>") > completion.rfind("</think>"):
        return None
    return completion.rpartition("</think>")[2]


def read_final_answer(completion: str) -> str | None:
    """The final answer as plain text, None if there is none.

    It is the inside of the last `<answer>...</answer>` of the visible text; without one, the inside of the last
    `\\boxed{...}`; else all of the visible text. A tag or box that is opened last and never closed holds no answer.
    """
    text = visible_text(completion)
    if text is None:
        return None
    spans = _answer_tags(text) or _boxes(text) or [(0, len(text), text)]
    inside = spans[-1][2]
    return inside.strip() or None if inside is not None else None


def read_answer(completion: str) -> str | None:
    """The final answer of a mathematical completion, None if there is none; several answers are joined by commas.

    What stands after the last `</think>` is read. If it has an `<answer>...</answer>`, only the inside of the last one.
    Of that, the answer is, in this order: the last `\\boxed{...}` or `\\fbox{...}`; what follows the last "answer is",
    "Answer:" or "####"; the text itself if it is no prose; of its last sentence the last formula in dollar signs, what
    follows the last "=", or the last number. What has no tag or box is looked for in the last MAX_UNMARKED characters.

    There is no answer if a tag or box is opened last and never closed, if it is refused ("not \\boxed{7}"), or if it is
    a part of a larger formula ("-\\boxed{7}").

    "\\boxed{3} and \\boxed{4}" names two, and so does "\\boxed{3}, or maybe 4": neither equals the key 3.
    """
    text = visible_text(completion)
    tags = _answer_tags(text) if text is not None else []
    if tags:
        text = _last_of(text, tags, may_be_part=False)
    if text is None:
        return None
    boxes = _boxes(text)
    answer = _last_of(text, boxes) if boxes else _read_unmarked(text)
    if answer is not None and boxes and STATEMENT.search(answer):  # \boxed{\text{The answer is } 5}
        answer = _read_unmarked(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer))
    return answer.strip() or None if answer is not None else None


def _answer_tags(text: str) -> list[Span]:
    spans: list[Span] = []
    for tag, following in itertools.pairwise([*re.finditer(r"</?answer>", text), None]):
        if tag[0] == "<answer>":
            is_closed = following is not None and following[0] == "</answer>"
            inside = text[tag.end() : following.start()] if is_closed else None
            spans.append((tag.start(), following.end() if is_closed else tag.end(), inside))
    return spans


def _boxes(text: str) -> list[Span]:
    """Every outermost \\boxed{...} and \\fbox{...}; `\\boxed 5` without braces holds the next word."""
    spans: list[Span] = []
    for match in re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s{}$\\.,]+)", text):
        if spans and match.start() < spans[-1][1]:
            continue  # inside the one before
        if match[1] != "{":
            spans.append((match.start(), match.end(), match[1]))
            continue
        end = closing_brace(text, match.end())
        spans.append(
            (match.start(), len(text) if end is None else end + 1, None if end is None else text[match.end() : end])
        )
    return spans


def closing_brace(text: str, start: int) -> int | None:
    """The position of the brace that closes the one opened before `start`; escaped braces do not count."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def _last_of(text: str, spans: list[Span], may_be_part: bool = True) -> str | None:
    """The inside of the last span; those joined to it ("and", ",") and alternatives beside it follow after commas."""
    start, end, inside = spans[-1]
    if inside is None:
        return None
    before = text[max(0, start - 80) : start]
    is_part = may_be_part and (PART_BEFORE.search(before) or PART_AFTER.match(text[end : end + 20]))
    if REFUSED.search(before) or is_part:
        return None  # "not \\boxed{7}", "n > \\boxed{7}", "-\\boxed{7}": it is not the answer, or not all of it
    answers = [inside]
    for earlier in reversed(spans[:-1]):
        between = text[earlier[1] : start]
        is_alternative = len(between) < 80 and HEDGE.search(between) and not CORRECTION.search(between)
        if earlier[2] is None or not (is_alternative or JOINT.fullmatch(between, 0, 200)):
            break
        answers.insert(0, earlier[2])
        start = earlier[0]
    after = re.split(r"[.\n](?:\s|$)", text[end : end + 120], maxsplit=1)[0]
    hedge = HEDGE_AFTER.match(after)
    if hedge and re.search(r"\d", after):
        answers.append(_read_unmarked(after[hedge.end() :]) or "")
    return ", ".join(dict.fromkeys(answer.strip() for answer in answers))


def _read_unmarked(text: str) -> str | None:
    """The answer of a text without tag and box."""
    text = re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text[-MAX_UNMARKED:]))
    text = re.sub(r"^```.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*(.+?)\*\*|__(.+?)__", lambda m: m[1] or m[2], text)
    text = re.sub(r"(?:\$\$|\\\[)(.*?)(?:\$\$|\\\])", lambda m: f"${' '.join(m[1].split())}$ ", text, flags=re.DOTALL)
    for statement in reversed(list(STATEMENT.finditer(text))):
        stated = _first_sentence(text[statement.end() :])
        if stated:
            if REFUSED.search(text[max(0, statement.start() - 40) : statement.end()]) or re.match(r"not\b", stated):
                return None
            stated = re.split(r"\s(?:because|since|as|which|where|when|for|so|by|I hope)\b|—", stated, maxsplit=1)[0]
            return re.sub(r"(?<!\{)[,;]?\s+or(?:\s+maybe|\s+perhaps|\s+possibly|\s+else)?\s+", ", ", stated)
    if not _is_prose(text):
        return text
    sentences = [part for part in re.split(r"(?<=[.!?。])\s+|\n", text) if part.strip()]
    sentence = sentences[-1] if sentences else ""
    formulas = [(m.start(), m.end(), m[1] or m[2]) for m in re.finditer(r"(?<!\\)\$([^$]+)\$|\\\((.+?)\\\)", sentence)]
    if formulas:
        return _last_of(sentence, formulas)
    relation = re.search(r"[\w\\]+\s*(?:[<>]=?|[≤≥≠]|!=).*$", sentence)
    if relation:
        return relation[0]
    if "=" in sentence:
        return re.split(r"[,;]?\s+[A-Za-z]{2,}", sentence.rpartition("=")[2].strip(), maxsplit=1)[0]
    numbers = [
        (m.start(), m.end(), m[0])
        for m in re.finditer(r"(?<![\w.])[-−]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?(?!\w)", sentence)
    ]
    return _last_of(sentence, numbers) if numbers else None


def _first_sentence(text: str) -> str:
    return re.split(r"[.。](?=\s|$)|\n", text.strip(), maxsplit=1)[0].strip()


def _is_prose(text: str) -> bool:
    """True if the text has several lines, Chinese, or several words beside formulas: it is no bare answer."""
    bare = re.sub(r"\$[^$]*\$|\\\(.*?\\\)|\\text\s*\{[^}]*\}|\\[A-Za-z]+", " ", text)
    text = text.strip()
    return "\n" in text or bool(re.search(r"[\u4e00-\u9fff]", bare)) or len(re.findall(r"[A-Za-z]{2,}", bare)) > 2
