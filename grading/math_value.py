"""A mathematical answer as a value: a tree of numbers, collections, relations and formulas. Read `parse_value` first.

The leaves are exact fractions, or formulas, which SymPy compares (`math_equal.py`).
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

from grading.math_text import CURRENCY, NUMBER_WORDS, QUANTITY, clean, fold, number, unit

MAX_FORMULA = 1000  # characters; a longer formula is compared as text only
REALS = ("formula", r"\mathbb{R}", "")
MAX_DEPTH = 20  # nested brackets; the LaTeX parser's time grows steeply with them

# (kind, ...). Every kind with what follows it:
#   number (fraction, unit)      formula (text, unit)          words (text)
#   colon (values, half of the day, could be a time): 12:30, 3:4
#   choice (letter, value)       based (digits, base)          named (name, value, left side, right side): x = 5
#   list, set, union (values)    sequence (brackets, values)   matrix (rows of values, text)
#   minus (value, value): a set without another                relation (terms, signs)      equation (left, right)
#   family (value, value with the letter w, domain): 2k\pi, k in Z
#   chain (values said to be equal, approximations): 2+3 = 5, 1/3 = 0.333 roughly
Value = tuple

DENIED = (  # in a text on the left side: what is on the right is not the answer
    r"half|double|twice|triple|squared?|cubed?|root|inverse|reciprocal|opposite|negative|minus|wrong\w*|not?|never"
    r"|false|incorrect\w*|err\w+|previous|old|attempt|reject\w*|discard\w*|exclud\w*|mistake\w*|bound|guess|estimate"
    r"|approx\w*|least|most|more|less|other|if|trap|trial|tempting|naive|log|invalid|fake|intermediate|rough\w*"
)
GREEK = (
    r"\\(?:alpha|beta|gamma|[dD]elta|zeta|eta|iota|kappa|[lL]ambda|mu|nu|xi|[sS]igma|tau|upsilon|chi|psi"
    r"|[oO]mega|ell|(?:var)?(?:epsilon|theta|rho|phi))(?![A-Za-z])"
)
INDEX = rf"\{{[\w,]+\}}|\d+|[A-Za-z]|\{{?\\(?:min|max|triangle\s*[A-Z]+|text\{{(?!(?i:{DENIED})\b)\w+\}})\s*\}}?"
LETTER = rf"(?:[A-Za-z]|{GREEK})(?:_(?:{INDEX}))?"
NAME = (  # x, x_1, f(x), f^{-1}(x), f'(2), P(A), |v|, dy/dx, AB, [ABC], \angle ABC, Area, \text{total cost}
    rf"(?:(?:\\(?:max|min)\s*)?"
    rf"(?:{LETTER}(?:\^\{{-1\}}|'+)?\s?\((?![^()]*(?:\d[A-Za-z]|\bnot\b))[^()+*/^=-]*\)|{LETTER}'*)"
    rf"|{LETTER}\^\{{?\*\}}?|\\(?:hat|bar|overline|overrightarrow)\s*\{{[A-Za-z]+\}}"
    rf"|\\(?:sin|cos|tan)\s*\(?(?:[A-Z]|(?:\\angle\s*)?[A-Z]+|{GREEK})\)?|P\((?=[^()]*(?:[=<>|]|\\[lgc]))[^()]*\)"
    r"|d\w/d\w|\\frac\{d\w\}\{d\w\}"
    r"|\|\s*(?:\\text\{\w+\}|[A-Zuvw]|\\[a-z]+|\s)+\|(?!\|)|[A-Z]\^(?:T|\{(?:-1|T)\})(?=\s*=\s*\\begin)"
    r"|\[[A-Z]{2,4}\]|m?\\angle\s*[A-Z]{1,4}|(?:\\overline\s*\{?)?[A-Z]{2,4}\}?"
    rf"|(?:\\text\{{)?\s*(?![^{{}}=]*\b(?i:{DENIED})\b)[A-Za-z]{{3,}}(?: [A-Za-z]{{2,}})*\s*"
    r"(?:\}\s*(?:\\(?:triangle|angle)\s*)?[A-Z]*)?"
    rf"|P\s*\(\\text\{{(?![^{{}}]*\b(?i:{DENIED})\b)[^{{}}]*\}}\))"
)
VARIABLE = rf"{LETTER}'*(?:\(\w\))?"
LEFT = rf"(?:{NAME}(?:\s*[:/]\s*{NAME})*|\\frac\{{{NAME}\}}\{{{NAME}\}})"  # or a ratio of names
CONSTANT = re.compile(  # a side without letters
    r"(?:[^A-Za-z\\]|\\(?:frac|sqrt|cdot|times|div|pi|binom|circ|sin|cos|tan|log|ln|pm|\W|text\{[^{}]*\})(?![A-Za-z]))+"
)
NAMES = re.compile(r"\(\s*(?:[A-Za-z]|\\[a-z]+)(?:_\{?\d\}?)?(?:\s*[,;]\s*(?:[A-Za-z]|\\[a-z]+)(?:_\{?\d\}?)?)+\s*\)")
NAMED = re.compile(rf"({LEFT})\s*(?:=|:=|\\in(?![A-Za-z]))\s*(.+)", re.DOTALL)
BUILDER = re.compile(rf"\s*{NAME}(?:\s*\\in\s*\\mathbb\{{R\}})?\s*(?:\\mid|:|\|)\s*(.+)")
DOMAIN = re.compile(  # behind a formula: k \in Z, (n \in N^*), (x > 0)
    rf"(.+?)(?:[\s,;]*\(|[\s,;]+(?:\\text\{{\s*(?:where|for|with)\s*\}})?)\s*({LETTER})\s*"
    r"((?:\\in\s*(?:\\mathbb)?\s*\{?[NZR]|\\ne|\\[lg]e|[<>])[^(]*?)\)?"
)
SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
RELATION = re.compile(r"\\[lg]e(?![A-Za-z])|\\ne(?![A-Za-z])|(?<!\\)[<>]")
EQUALS = re.compile(r"(?<![<>:\\])=")
APPROX = re.compile(r"\\approx(?![A-Za-z])")
CHOICE = re.compile(
    r"(?:\\text\{\s*)?(?:(?:option|choice|answer)\s+)?(\(?)\s*(?:\\text\{\s*)?(\(?)"
    r"\s*([A-Ja-j])\s*(\)?)\s*\}?\s*(\)?)\s*"
    r"(?:([.:)])?\s*(.*))?",
    re.IGNORECASE,
)
BASED = re.compile(r"\(?(?:\\text\s*\{)?([0-9A-Fa-f]+)\}?\)?\s*_\s*\{?\s*(?:\\text\s*\{)?(\d+|[a-z]+)\s*\}*")
LABEL = re.compile(r"(?:^|[,;\s(])\(?(?:[A-Ja-j]|i{1,3}|iv|v)[.):]")
CLOCK = re.compile(r"(?:\\text\{)?\s*(\d+(?:\s*:\s*\d+)+)\s*(?:\\text\{)?\s*([ap]\.?\s?m\.?)?\s*\}*", re.IGNORECASE)
COMMA = re.compile(r"(?<!\d),|,(?!\d{3}(?!\d))|;|,\s|(?<=[\s\d})])and(?=[\s(\\])")
OR = re.compile(r"(?<=[\s\d})\]])or(?=[\s\\(\d-]|\w(?:\(\w\))?\s*=)")
SEMICOLON, COLON = re.compile(";"), re.compile(":")
UNCOUNTED = re.compile(
    r"\\(?:equiv|[pb]?mod|dots|mid|parallel|perp|neg|land|partial|aleph|to|implies|iff)(?![A-Za-z])|\.\.|[a-z]\s*\\circ"
)
CUP, SETMINUS = re.compile(r"\\cup(?![A-Za-z])"), re.compile(r"\\setminus(?![A-Za-z])")
MATRIX = re.compile(r"\\begin\{([bpBv]?matrix|array)\}(?:\{[^{}]*\})?((?:(?!\\begin).)*)\\end\{\1\}", re.DOTALL)
OPENING, CLOSING = ("(", "[", "{", "\\{", "\\langle"), (")", "]", "}", "\\}", "\\rangle")
BRACKET = r"\\[{}]|\\[lr]angle|\\.|[()\[\]{}]"  # or an escaped character, which is none


@lru_cache(maxsize=8192)
def parse_value(text: str) -> Value:
    """The value of a cleaned answer."""
    value = number(text)
    if value is not None:
        return ("number", value, "")
    if len(text) > MAX_FORMULA or max(_depths(text)) > MAX_DEPTH:
        return ("words", text)
    for read in (_choice, _family, _named, _collection, _quantity):
        found = read(text)
        if found is not None:
            return found
    return ("formula", text, "")


def _depths(text: str) -> list[int]:
    """How many brackets are open behind each character."""
    return list(itertools.accumulate(((c in "([{") - (c in ")]}") for c in text), initial=0))


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts of the text between matches of `separator` outside all brackets; those of an interval may differ."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"(?P<cut>{separator.pattern})|{BRACKET}", text):
        if match["cut"] is not None:
            if depth == 0:
                parts.append(text[start : match.start()])
                start = match.end()
        else:
            depth += (match[0] in OPENING) - (match[0] in CLOSING)
    return [part.strip() for part in [*parts, text[start:]]]


def _brackets(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) if one pair of brackets encloses the whole text. ]0,1] is (0,1]."""
    french = re.fullmatch(r"([\]\[(])([^()\[\]]*,[^()\[\]]*)([\]\[)])", text)
    if french and (french[1] == "]" or french[3] == "["):
        return french[1].replace("]", "("), french[2], french[3].replace("[", ")")
    match = re.fullmatch(r"(\\\{|\\langle|\(|\[)(.*)(\\\}|\\rangle|\)|\])", text, re.DOTALL)
    steps = ((token in OPENING) - (token in CLOSING) for token in re.findall(BRACKET, match[2] if match else ""))
    depths = list(itertools.accumulate(steps, initial=0))
    return match.groups() if match and min(depths) == depths[-1] == 0 else None


def _choice(text: str) -> Value | None:
    """(C), \\text{C}, option C, C. 12. Not "(a) 5, (b) 6", which are two answers."""
    match = CHOICE.fullmatch(text)
    if not match:
        return None
    before, rest = text[: match.start(3)], (match[7] or "").strip()
    if rest.count("}") > rest.count("{"):
        rest = rest.removesuffix("}")
    starts = before.lower().startswith(("option", "choice"))
    is_marked = starts or "(" in before or "text" in before or match[4] or match[6]
    if not is_marked:
        return None
    denies = r"^[,/]|\b(?:or|and|is|was|are|not|isn|would|can|but|maybe|wrong|false)\b"
    if rest and (
        re.search(denies, rest, re.IGNORECASE) or LABEL.search(rest) or not (match[6] or match[4] or match[5])
    ):
        return None
    return ("choice", match[3].upper(), parse_value(clean(rest)) if rest else None)


def _family(text: str) -> Value | None:
    """A formula and what is said of one of its letters: 2n, n in Z; not x > 3, x in Z, which is a smaller set."""
    match = DOMAIN.fullmatch(text)
    if not match or match[2] not in SYMBOL.findall(match[1]) or _depths(match[1])[-1]:
        return None
    domain = re.sub(r"\\in[NZ][_^](?:\*|\+|\\ast|>0)|\\ge1", "N+", re.sub(r"\\mathbb|[\s{}]", "", match[3]))
    if RELATION.search(match[1]) and domain != r"\inR":
        return None
    renamed = SYMBOL.sub(lambda m: "w" if m[0] == match[2] else m[0], match[1])
    return ("family", parse_value(match[1]), parse_value(renamed), domain)


def _named(text: str) -> Value | None:
    """x = 5, f(x) = x^2, x in (0, 1); equations and relations that are no such definitions; 2 + 3 = 5 is 5."""
    if len(_split(text, COMMA)) > 1 or len(_split(text, OR)) > 1:
        return None
    terms = _split(text, RELATION)
    if len(terms) > 1:
        return _relation(text, terms)
    exact, *approximations = _split(text, APPROX)
    sides = _split(exact, EQUALS)
    if len(sides) == 1 and approximations and re.fullmatch(LEFT, exact):  # x \approx 11
        sides.append(approximations.pop(0))
    if len(sides) == 2 and number(sides[0]) is not None and re.fullmatch(NAME, sides[1]):
        sides = sides[::-1]
    names = NAMES.fullmatch(sides[0])
    if names and len(sides) == 2:  # (x, y) = (1, 2): one by one, in the order of the names
        values, keys = parse_value(sides[1]), re.findall(r"\\?[A-Za-z]+", sides[0])
        if values[0] == "sequence" and len(values[2]) == len(keys):
            order = sorted(range(len(keys)), key=lambda i: keys[i].lstrip("\\"))
            return ("sequence", "()", tuple(values[2][i] for i in order))
    if len(sides) > 2 and all(re.fullmatch(LETTER, side) for side in sides[:-1]):  # x = y = 2
        return parse_value(", ".join(f"{side} = {sides[-1]}" for side in sides[:-1]))
    named = NAMED.fullmatch("=".join(sides))
    if named and (len(sides) > 1 or "\\in" in text):
        rest = sides[1:] or [named[2].strip()]
        name = re.sub(r"\\text|[\s{}]|_\{1,2\}", "", fold(named[1]))
        return ("named", name, _chain(rest, approximations), sides[0], rest[-1])
    if (len(sides) > 1 or approximations) and CONSTANT.fullmatch(sides[0]) and CONSTANT.fullmatch(sides[-1]):
        return _chain(sides, approximations)  # 2 + 3 = 5
    if len(sides) == 1 and approximations:
        return _chain(sides, approximations)
    if len(sides) > 2:
        return ("words", text)  # 2x = 10 = 5
    return ("equation", sides[0], sides[-1]) if len(sides) == 2 and all(sides) else None


def _chain(sides: list[str], approximations: list[str]) -> Value:
    """The last side, with the other sides without letters, which have to equal it."""
    values = [parse_value(side) for side in sides[:-1] if CONSTANT.fullmatch(side)] + [parse_value(sides[-1])]
    if len(values) == 1 and not approximations:
        return values[0]
    return ("chain", tuple(values), tuple(parse_value(text) for text in approximations))


def _relation(text: str, terms: list[str]) -> Value | None:
    signs = RELATION.findall(text)
    if len(_split(text, EQUALS)) > 1 or len(signs) != len(terms) - 1:
        return None
    if terms[0] == "":  # "> 3"
        terms = ["x", *terms[1:]]
    if all(sign in (">", r"\ge") for sign in signs):  # everything the one way round
        terms, signs = terms[::-1], ["<" if sign == ">" else r"\le" for sign in signs[::-1]]
    if signs == [r"\ne"] and (points := parse_value(terms[1]))[0] == "list":  # x \ne \pm 1
        return ("minus", (REALS, ("set", points[1])))
    return ("relation", tuple(terms), tuple(signs)) if all(terms) else None


def _collection(text: str) -> Value | None:
    parts = _split(text, OR)
    if len(parts) == 1:
        parts = _split(text, SEMICOLON if "," in text and "=" in text else CUP)  # x=1, y=2; x=2, y=1
    if len(parts) > 1 and all(parts):
        values = tuple(_as_point(parse_value(part)) for part in parts)
        if any(value[0] == "choice" or re.fullmatch("[A-J]", part) for value, part in zip(values, parts, strict=True)):
            return ("words", text)  # "A or B" chooses neither
        if has_names(values):
            return ("words", text)  # x = 1 or y = 2
        is_union = "\\cup" in text or any(value[0] == "relation" for value in values)
        return ("union" if is_union else "list", _flat(values))
    parts = [re.sub(r"^and\s", "", part).strip() for part in _split(text, COMMA) if part and part != "and"]
    if len(parts) > 1:
        values = tuple(parse_value(part) for part in parts)
        return _between(values) or ("list", _flat(values))
    parts = _split(text, SETMINUS)
    if len(parts) == 2:
        return ("minus", tuple(parse_value(part) for part in parts))
    inner = _brackets(text)
    matrix = MATRIX.fullmatch(inner[1].strip() if inner and inner[0] in ("(", "[") else text)
    if matrix and matrix[1] != "vmatrix":
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr", matrix[2]) if row.strip()]
        cells = tuple(tuple(parse_value(clean(cell)) for cell in row.split("&")) for row in rows)
        is_column = all(len(row) == 1 for row in cells)
        return ("sequence", "()", tuple(row[0] for row in cells), text) if is_column else ("matrix", cells, text)
    if inner is None:
        if text.count("\\pm") == 1:
            plus = re.sub(r"(^|[=({,])\s*\+", r"\1", text.replace("\\pm", "+"))
            return ("list", (parse_value(plus.strip()), parse_value(text.replace("\\pm", "-"))))
        return None
    opening, inside, closing = inner
    builder = BUILDER.fullmatch(inside)
    if builder and opening == "\\{":
        return parse_value(builder[1].strip())
    separator = re.compile("[,;](?!\\d{3}(?!\\d))|[,;]\\s" if opening == "(" else "[,;]")
    items = [item for item in _split(inside, separator) if item]
    if opening in ("\\{", "[", "\\langle") or len(items) > 1:
        values = tuple(parse_value(item) for item in items)
        brackets = "()" if opening == "\\langle" else opening + closing
        return ("set", _flat(values)) if opening == "\\{" else ("sequence", brackets, values)
    return parse_value(inside.strip()) if inside.strip() else None


def has_names(values: tuple[Value, ...]) -> bool:
    """True for x=1, y=2; false for 1, 2 and for x=1, x=2."""
    return len({value[1] for value in values if value[0] == "named"}) == len(values)


def by_name(value: Value) -> tuple[Value, ...]:
    """The elements of a list: y=2, x=3 as x=3, y=2."""
    return tuple(sorted(value[1], key=lambda item: item[1])) if has_names(value[1]) else value[1]


def _as_point(value: Value) -> Value:
    """x=1, y=2 as (1, 2), in the order of the names."""
    is_point = value[0] == "list" and has_names(value[1])
    return ("sequence", "()", tuple(item[2] for item in by_name(value))) if is_point else value


def _flat(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """1, \\pm 2 -> 1, 2, -2."""
    flat: tuple[Value, ...] = ()
    for value in values:
        if value[0] == "named" and value[2][0] == "list":  # x = \pm 2
            flat += tuple(("named", value[1], item, *value[3:]) for item in value[2][1])
        else:
            flat += value[1] if value[0] == "list" else (value,)
    return flat


def _between(values: tuple[Value, ...]) -> Value | None:
    """x > -5 and x <= 2 as -5 < x <= 2; x > 0 and x \\ne 1, and also x \\ne 1, 2, as a set without points."""
    if values[0][0] != "relation":
        return None
    kept = [value for value in values if value[0] == "relation" and value[2] != (r"\ne",)]
    left_out = [value for value in values if value not in kept]
    unknowns = {value[1][0] for value in left_out if value[0] == "relation"}
    if left_out and left_out[0][0] == "relation" and all(unknowns <= {*value[1]} for value in [*kept, left_out[0]]):
        points = tuple(parse_value(value[1][1]) if value[0] == "relation" else value for value in left_out)
        return ("minus", ((_between(tuple(kept)) or kept[0]) if kept else REALS, ("set", points)))
    if len(kept) != 2 or left_out or any(len(value[1]) != 2 for value in values):
        return None
    for (_, low, low_signs), (_, high, high_signs) in (values, values[::-1]):
        if low[1] == high[0] and re.fullmatch(NAME, low[1]):
            return ("relation", (*low, high[1]), (*low_signs, *high_signs))
    return None


def _is_text(words: str, is_marked: bool) -> bool:
    """True for yes, Monday, no solution; false for what may be a product of letters (abc, GMm), unless it is marked."""
    if words.casefold() in ("yes", "no"):
        return True
    is_product = re.fullmatch(r"[A-Za-z]{3}", words) or (words.isalpha() and re.search(r"[A-Z]", fold(words)))
    may_be_text = is_marked or (re.search(r"[^\W\d_]{3,}", words) and not is_product)
    return bool(may_be_text and re.fullmatch(r"[^\W\d_][^\d_+*/^=<>\\(){}\[\]|]*", words))


def _quantity(text: str) -> Value | None:
    """Based numbers, times and ratios, words, money, and what has a unit."""
    based = BASED.fullmatch(text)
    if based and (based[2].isdigit() or based[2] in NUMBER_WORDS):
        return ("based", based[1].lstrip("0").upper(), NUMBER_WORDS.get(based[2], based[2]))
    clock, parts = CLOCK.fullmatch(text), _split(text, COLON)
    if clock:
        parts = clock[1].split(":")
    if clock or (len(parts) > 1 and all(parts) and "\\text" not in text):
        half = re.sub(r"[^apm]", "", (clock[2] or "").lower()) if clock else ""
        values = tuple(parse_value(part.strip()) for part in parts)
        if all(value[0] in ("number", "formula") for value in values):
            return ("colon", values, half, re.match(r"\D*(?:[01]?\d|2[0-4])\s*:\s*[0-5]\d(?!\d)", text) is not None)
    if UNCOUNTED.search(text):
        return ("words", re.sub(r"\s", "", text))  # what SymPy has no value for is compared as text
    words = " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).split())
    if _is_text(words, is_marked="\\text" in text):
        plain = " ".join(re.sub(r"[^\w ]", " ", fold(words)).split())
        return ("words", re.sub(r"^(?:an?|the) (?=\w{3})", "", plain, flags=re.IGNORECASE))
    currency = CURRENCY.fullmatch(text)
    if currency:
        inner = parse_value(currency[1] + currency[3])
        if inner[0] in ("number", "formula") and inner[2] == "":
            return (*inner[:2], {"\\$": "$", "USD": "$", "\\euro": "eur"}.get(currency[2], currency[2]))
    quantity = QUANTITY.fullmatch(text)
    if quantity and not ("circ" in quantity["unit"] and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", quantity["value"])):
        inner = parse_value(quantity["value"].strip())
        is_apart = inner[0] == "number" and text[quantity.start("unit") - 1].isspace()
        name = unit(quantity["unit"], is_apart or "\\text" in quantity["unit"])
        if name is not None and inner[0] in ("number", "formula") and inner[2] == "":
            return (*inner[:2], name)
        if name is None and "\\text" in quantity["unit"]:
            return ("words", fold(words))  # it says something about the value that is no unit
    return None
