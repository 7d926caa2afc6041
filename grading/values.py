"""A mathematical answer, LaTeX or plain text, as a value: `parse_value(clean(text))`.

A value is a tuple: its kind, and what follows that.
    number (fraction, unit)                    formula (text, unit)               words (text)
    list, set, union (values)                  choice (letter, value): (C) 12
    named (name, value, text): x = 5           equation (text): 2x < y            chain (equal values): 2+3 = 5
    sequence (brackets, values, names): a point, an interval (0 < x, too), 12:30; without brackets 5 ft 11 in
Numbers are exact fractions; formulas are left to SymPy (`equality.py`).
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from functools import lru_cache

from grading.spelling import FUNCTION, MAX_FORMULA, WORDS, clean, fold

Value = tuple
MAX_DEPTH = 20  # nested brackets; the LaTeX parser's time grows steeply with them

# Numbers and units ------------------------------------------------------------------------------------------------

DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
LATEX_FRACTION = re.compile(rf"\\frac\s*\{{\s*(-?(?:{DECIMAL}))\s*\}}\s*\{{\s*({DECIMAL})\s*\}}")
NUMBER = re.compile(  # 1,000.5 with or without a power of ten; 3/4 and 2 3/4; 0.1\overline{6}
    rf"(?P<sign>[+-]?)\s*(?:(?P<digits>{DECIMAL})"
    r"(?:\s*(?:(?:\\times|\\cdot|x)\s*10\s*\^\s*\{?|[eE])(?P<power>[+-]?\d{1,3})\}?)?"
    rf"|(?:(?P<whole>\d+)\s+)?(?P<top>-?(?:{DECIMAL}))\s*/\s*(?P<bottom>{DECIMAL})"
    r"|(?P<fixed>\d*\.\d*)\\(?:overline|bar|dot)\s*\{?(?P<repeated>\d+)\}?)"
)
SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
SCALED = re.compile(rf"(.+?)\s*(?:\\text\{{\s*|\()?({'|'.join(SCALES)})\s*[)}}]?")


def number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction, mixed or repeating number, 3.5 million or 2x10^5; else None."""
    text = LATEX_FRACTION.sub(r" \1/\2 ", text).strip()
    if scaled := SCALED.fullmatch(text):
        inner = number(scaled[1])
        return None if inner is None else inner * SCALES[scaled[2]]
    match = NUMBER.fullmatch(text)
    if not match:
        return None
    part = {name: digits.replace(",", "") for name, digits in match.groupdict("0").items()}
    result = Fraction(f"{part['digits']}e{part['power']}") + int(part["whole"])
    if match["bottom"]:
        top, bottom = Fraction(part["top"]), Fraction(part["bottom"])
        if bottom == 0 or (match["whole"] and not 0 <= top < bottom):
            return None
        result += top / bottom
    if match["repeated"]:
        unit = Fraction(1, 10 ** len(part["fixed"].partition(".")[2]))  # the last digit's that is not repeated
        result = Fraction(f"0{part['fixed']}0") + unit * int(part["repeated"]) / (10 ** len(part["repeated"]) - 1)
    return -result if match["sign"] == "-" else result


UNITS = {name: names.split()[0] for names in re.findall("[^,]+", """
    cm centimeter centimetre 厘米, mm millimeter millimetre 毫米, km kilometer kilometre 千米 公里, m meter metre 米,
    kg kilogram 千克 公斤, g gram 克, mg milligram 毫克, lb pound lbs, oz ounce, ft feet foot, yd yard, mi mile,
    in inche inch, s second sec 秒, min minute 分钟, h hour hr hrs 小时 时, L l liter litre 升,
    mL ml milliliter millilitre 毫升, $ dollar usd buck 美元, deg degree 度, % percent, u unit, mi/h mph, km/h kph kmph,
    rad radian, J joule, N newton, W watt, V volt, Hz hertz, Ω ohm, A ampere amp, K kelvin, T tesla, Pa pascal,
    degC celsius celsiu, degF fahrenheit, people person 人, child children, man men, woman women, mol mole, day 天 日,
    week 周, year 年, month, cent, euro, sterling, 元 yuan rmb, rupee inr, yen, 岁, 月, 个月, 分, 吨, 分米, 公顷
""") for name in names.split()}  # fmt: skip
SI = re.compile(r"[pnμmckMGT]?(?:[mgsAKNJWVCFTHL]|mol|Hz|Pa|Ω|eV|Wb|cal|bar)")  # a prefix and a symbol
PLURAL = re.compile(  # or 3个苹果
    r"\w\w+[^\Ws](?<!th)s|[个只本块支张辆名位条棵件次种组页台间根颗盒箱袋朵套双](?![半十百千万亿])[\u4e00-\u9fff]*"
)
# Words about the value, behind it or on the left of "=": 7 dozens, 7 tenths, 7 more, half of x = 7
NO_UNITS = {*SCALES, *WORDS, *re.findall(r"\w+", """
    about above additional almost always and approx approximately around as at base below billions but centuries
    couples decades does double dozens factorial false fewer gross guess half halves hundreds if inverse is
    least less log maybe millions minus mod more most nearly negative never no not ones or others over pairs
    percents plus quarters reciprocal root roughly scores sin square squared squares tens than thirds this
    thousands times to trap trillion triples twice twins unless versus vs was wrong wrongly yes""")}  # fmt: skip
UNIT_WORD = r"[A-Za-zμΩ\u4e00-\u9fff]+\.?(?:\s*\^\s*(?:\{-?\d\}|-?\d))?"
QUANTITY = re.compile(
    rf"(?!.*\\(?:sin|cos|tan|cot|sec|csc).*\\circ)(?P<value>.*(?:[\d}})]|\\pi|{'|'.join(SCALES)}))(?P<space>\s*)(?P<unit>\\?%|\^\\circ\s*"
    r"|(?:\\text\{[^{}]*\}(?:\s*\^\s*(?:\{-?\d\}|-?\d))?\s*(?:/|\\cdot)?\s*)+"
    rf"|\([^()]+\)|(?:(?<=\s)|(?<=[\d)}}])){UNIT_WORD}(?:(?:\s*/\s*|\s+){UNIT_WORD})*)", re.DOTALL,
)  # fmt: skip


def unit(text: str, is_apart: bool) -> str | None:
    """One spelling per unit; None for what is no unit: "more" and "dozens" say something about the value.

    A unit is made of known names, abbreviations and plurals of any noun. `is_apart`: a letter is no factor ("5 m").
    """
    is_marked = "\\text" in text
    is_apart |= is_marked
    text = re.sub(r"\\text|\\cdot|[{}().]|^\W*in\s(?=\s*\w)", " ", text)
    text = re.sub(r"\\?%", " percent ", text.replace("^\\circ", " deg "))
    text = re.sub(r"\bper\b|每", "/", re.sub(r"(?i)\bdeg(?:ree)?s?\s(?=\s*[cf]\w)", "", text))
    text = re.sub(r"\s+([A-Za-z]+)\s*\^\s*-(\d)", r"/\1^\2", text).replace("^1", "")
    text = re.sub(r"(?i)\b(?:square|sq)\s+([a-z]+)|平方(\w+)|([a-z]+)\s+squared\b", r"\1\2\3^2", text)
    text = re.sub(r"(?i)\b(?:cubic|cu)\s+([a-z]+)|立方(\w+)|([a-z]+)\s+cubed\b", r"\1\2\3^3", text)
    text = re.sub(r"(?i)\b(?:of(?:\s+[a-z]+)?|the|old|left)\b", " ", text)  # boxes of candy
    names: list[str] = []
    for word in re.findall(r"[A-Za-zμΩ\u4e00-\u9fff]+|\^\s*-?\d|/|\S", text):
        folded = word.lower() if len(word) > 2 else word
        may_be_factors = not is_marked and re.fullmatch("[MGT]?[A-Z]|.*[ACFHKT]|.", word)
        is_glued = len(word.encode()) == 1 and not (is_apart or names)
        if word.lower() in NO_UNITS:
            return None
        if word[0] in "^/" or ((is_apart or names) and SI.fullmatch(word) and not may_be_factors):
            name = word
        else:
            name = None if is_glued else UNITS.get(word) or UNITS.get(folded.removesuffix("s"))
        if name is None and PLURAL.fullmatch(folded):
            name = folded.removesuffix("s")
        is_adjective = not names and len(word) > 1 and re.search(r"s\b", text)  # blue marbles
        if name:
            names.append(name)
        elif not is_adjective or re.search("ths?$", word):
            return None
    return re.sub(" ([/^]) ?", r"\1", " ".join(names)) or None


# Values -----------------------------------------------------------------------------------------------------------

DENIED = "|".join(sorted(NO_UNITS))
LETTER = (  # with its index; no function
    r"(?:[A-Za-z]|\\(?i:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|rho"
    r"|sigma|tau|upsilon|(?:var)?phi|chi|psi|omega|ell)(?![A-Za-z]))"
    rf"(?:_(?:\{{[\w,]+\}}|\w|\{{?\\(?:min|max|triangle|text\{{(?!(?:{DENIED})\b)\w+\}})\s*[A-Z]*\}}?))?"
)
NAME = (  # x, x_1, f(x), f'(2), P(A), |v|, dy/dx, AB, \angle ABC, Area, \text{total cost}; no expression
    rf"(?:{LETTER}(?:\^\{{-1\}}|'+)?\s?\((?![^()]*(?:\d[A-Za-z]|\bnot\b))[^()+*/^=-]*\)"
    rf"|P\([^()]*[=<>|][^()]*\)|{LETTER}|d\w/d\w|\\frac\{{d\w\}}\{{d\w\}}"
    r"|\|[A-Zuvw\s]+\||(?:m?\\(?:angle|triangle)\s*)?[A-Z]{1,4}"
    rf"|(?!(?:\\text\{{)?[^{{}}=]*\b(?i:{DENIED})\b)(?:\\text\{{\s*[A-Za-z]{{3,}}|[A-Z][a-z]{{2,}}|[a-z]{{4,}})"
    r"(?: [A-Za-z]{2,}){,2}\s*\}?)"
)
CONSTANT = re.compile(  # a side without letters
    r"(?:[^A-Za-z\\]|\\(?:frac|sqrt|cdot|times|div|pi|binom|circ|sin|cos|tan|log|ln|pm|\W|text\{[^{}]*\})(?![A-Za-z]))+"
)
NAMES = re.compile(r"\(\s*[A-Za-z](?:_\{?\d\}?)?(?:\s*,\s*[A-Za-z](?:_\{?\d\}?)?)+\s*\)")
NAMED = re.compile(rf"{NAME}(?:\s*:\s*{NAME})*")
BUILDER = re.compile(rf"\\\{{\s*{NAME}(?:\s*\\in\s*\\mathbb\{{R\}})?\s*(?:\\mid|:|\|)\s*(.+)\\\}}")
CHOICE = re.compile(r"(?!.$)(?:option |choice |answer )?\s*\(?\s*([A-J])(?![A-Z])\s*([).:、]*)(.*)", re.I | re.DOTALL)
DENIALS = re.compile(  # behind a letter and its mark: an operator; another option; a word that takes it back
    r"^[-+*/^_=(<>']|^\s*(?:[,/&]|(?i:or|and|but|或|和)\s|\(?[A-J][).]*$)|(?<!\w)\([A-Ja-j]\)|[,;]\s*[a-j][:.)]|(?<![\w(])[A-Ja-j]\)"
    r"|(?<![\w.(])[A-J](?:[.、](?=.*\w)|:(?![A-J]\b))|\b(?i:maybe|perhaps|not|but) \(?[A-J]\b|^ [A-Z]\. [A-Z]"
    r"|^\s*(?i:is|was|can|would)\b.*\b(?i:wrong|false|incorrect|excluded|not (?:correct|right|true|the))\b"
)
# A letter that is neither Latin nor Greek, or has an accent; \text that is no index
FOREIGN = re.compile(r"[^\W\d_\x00-\x7fͰ-Ͽ]|(?<!_)(?<!_\{)\\text")
BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?(?:\\text\{)?\s*(\d+|two|three|four|five|six|seven|eight|nine)\s*\}*")
VARIABLE = re.compile(r"[A-Za-z](?:_\w)?(?:\(\w\))?|\\(?!pi|infty)[a-z]+")
EXCLUDED = re.compile(  # x \ne 1, x \ne 2
    rf"({VARIABLE.pattern})\s*\\ne(?!\s*[xyz]$)((?:(?!(?!\1)[a-z]\s*\\ne|[<>=]|\\[lg]e(?![A-Za-z])).)+)"
)
# Separators of a text, see `_split`
RELATION = r"\\[lg]e(?![A-Za-z])|\\ne(?![A-Za-z])|(?<!\\)[<>]"
EQUALS = r"(?<![<>:\\])=|\\in(?![A-Za-z])"
COMMA = r"(?:、|(?<!\d),|,(?!\d{3}(?!\d))|;|,\s|(?<=[\s\d})])and(?=[\s(\\]))(?:\s*and(?=[\s(\\]))?"
OR = r"(?<=[\s\d})\]])or(?=[\s\\(\d-]|\w(?:\(\w\))?\s*=)|\\cup(?![A-Za-z])"
# What SymPy has no value for is compared as text.
UNCOUNTED = re.compile(
    r"\\(?:equiv|approx|[pb]?mod|[lc]?dots|mid|parallel|perp|neg|land|wedge|to|rightarrow|implies|iff|angle|triangle)(?![A-Za-z])"
    r"|!!|[fgh]\s*\^\s*\{?-1\}?\s*\(|\d [ap]m$|\.\.|\?|\\cases|\\circ\s*\d+\s*'"
)
OPENING, CLOSING = ("(", "[", "{", "\\{", "\\langle"), (")", "]", "}", "\\}", "\\rangle")
AMOUNTS = re.compile(r"(?:(?<=\})\s*|(?<=[A-Za-z])\s+)(?:and\s+)?(?=\d)")
COLUMN = re.compile(r"\\begin\{[pbB]matrix\}([^&]*)\\end\{[pbB]matrix\}")
BRACKET = r"\\[{}]|\\[lr]angle|\\.|[()\[\]{}]"  # or an escaped character, which is none


@lru_cache(maxsize=8192)
def parse_value(text: str) -> Value:
    """The value of a cleaned answer."""
    depths = itertools.accumulate((c in "([{") - (c in ")]}") for c in text)
    if len(text) > MAX_FORMULA or max(depths, default=0) > MAX_DEPTH:
        return ("words", text)
    if DATED.fullmatch(text):
        return _text(text)
    if (value := number(text)) is not None:
        return ("number", value, "")
    for read in (_choice, _named, _collection, quantity):
        value = read(text)
        if value is not None:
            return value
    return ("formula", text, "") if _is_formula(text) else _text(text)


def _parse_all(texts: list[str]) -> tuple[Value, ...]:
    return tuple(map(parse_value, texts))


def _split(text: str, separator: str) -> list[str]:
    """The parts of the text between matches of `separator` outside all brackets; those of an interval may differ."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"(?P<cut>{separator})|{BRACKET}", text):
        if match["cut"] is None:
            depth += (match[0] in OPENING) - (match[0] in CLOSING)
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in [*parts, text[start:]]]


def _brackets(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) if one pair of brackets encloses the whole text."""
    match = re.fullmatch(r"(\\\{|\\langle|\(|\[)(.*)(\\\}|\\rangle|\)|\])", text, re.DOTALL)
    if not match:
        return None
    depths = itertools.accumulate((token in OPENING) - (token in CLOSING) for token in re.findall(BRACKET, match[2]))
    return match.groups() if min(depths, default=0) >= 0 else None


def _choice(text: str) -> Value | None:
    """(C), \\text{C}, option C, C. 12. Text behind a letter and its mark is the option's. Not "(a) 5, (b) 6"."""
    match = CHOICE.fullmatch(re.sub(r"^(?:\\text\s*\{\s*)+([^{}]*)\}", r"\1 ", text))
    if not match:
        return None
    letter, mark, rest = match.groups()
    if not rest.strip():
        return ("choice", letter.upper(), None)
    if not mark or DENIALS.search(re.sub(r"\([^()]{2,}\)", "()", rest)):
        return None
    return ("choice", letter.upper(), parse_value(clean(rest)))


def _named(text: str) -> Value | None:
    """x = 5, f(x) = x^2, x in (0, 1); equations and relations that are no such definitions; 2 + 3 = 5 is 5."""
    if excluded := EXCLUDED.fullmatch(text):  # the reals without 1 and 2: all that lies between
        points = parse_value(re.sub(rf"{excluded[1]}\s*\\ne", "", excluded[2]).strip())
        low, high = _parse_all([r"-\infty", r"\infty"])
        pairs = itertools.pairwise([low, *sorted(_flat((points,))), high])
        return ("union", tuple(("sequence", "()", pair, (excluded[1],)) for pair in pairs))
    if len(_split(text, f"{COMMA}|{OR}")) > 1:
        return None
    terms, sides = _split(text, RELATION), _split(text, EQUALS)
    if len(terms) > 1:
        signs = re.findall(RELATION, text)  # also those in brackets, which part no terms
        is_whole = len(sides) == 1 and all(terms) and len(signs) == len(terms) - 1
        return _relation(terms, signs) if is_whole else _text(text)
    match sides:
        case [point, values] if NAMES.fullmatch(point):  # (x, y) = (1, 2)
            names = re.findall(r"[A-Za-z]", point)
            return parse_value(values) if names == sorted(names) else _text(text)
        case [first, *rest] if rest and NAMED.fullmatch(first):
            return ("named", re.sub(r"\\text|[\s{}]", "", fold(first)), _chain(rest), f"{first} = {rest[-1]}")
        case [first, *_, last] if CONSTANT.fullmatch(first) and CONSTANT.fullmatch(last):
            return _chain(sides)  # 2 + 3 = 5
        case [_, _, _, *_]:
            return _text(text)  # 2x = 10 = 5
        case [_, _]:
            return ("equation", text)
    return None


def _chain(sides: list[str]) -> Value:
    """The last side, with the other sides without letters, which have to equal it."""
    *firsts, last = sides
    return ("chain", _parse_all([*filter(CONSTANT.fullmatch, firsts), last]))


def _relation(terms: list[str], signs: list[str]) -> Value:
    """0 < x <= a as the interval that it describes, with the name of its variable; another relation as it is."""
    if all(sign in (">", r"\ge") for sign in signs):  # everything the one way round
        terms, signs = terms[::-1], ["<" if sign == ">" else r"\le" for sign in signs[::-1]]
    match terms:
        case [name, bound] if VARIABLE.fullmatch(name) and bound not in ("x", "y", "z"):
            terms, signs = [r"-\infty", name, bound], ["<", *signs]
        case [bound, name] if VARIABLE.fullmatch(name):
            terms, signs = [bound, name, r"\infty"], [*signs, "<"]
    match terms:
        case [low, name, high] if VARIABLE.fullmatch(name) and {*signs} <= {"<", r"\le"}:
            brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
            return ("sequence", brackets, _parse_all([low, high]), (name,))
    text = "".join(itertools.chain(*zip(terms, [*signs, ""], strict=True)))
    return ("equation", text) if len(terms) == 2 else _text(text)


def _collection(text: str) -> Value | None:
    parts = _split(text, ";" if all(sign in text for sign in ",=;") else OR)  # x=1, y=2; x=2, y=1
    if len(parts) > 1:
        values = _parse_all(parts)
        # x < 1 or x > 2; A or B, which is no AB
        are_intervals = any(value[0] == "sequence" and len(value[3]) == 1 for value in values)
        is_union = are_intervals or "\\cup" in text or re.fullmatch("[A-J①-⑳]", parts[-1])
        return ("union", values) if is_union else ("list", _flat(values))
    parts = [*filter(None, _split(text, COMMA))]
    if len(parts) > 1:
        values = _flat(_parse_all(parts))
        if len({value[2] is None for value in values if value[0] == "choice"}) > 1:
            return _text(text)  # (a) (b) 9
        return _labelled(values) or ("list", values)
    if AMOUNTS.search(text) and (amounts := _labelled(_parse_all(AMOUNTS.split(text)))):
        return amounts
    if column := COLUMN.fullmatch(text):
        return ("sequence", "()", _parse_all(re.split(r"\s*\\\\\s*", column[1].strip())), ())
    if builder := BUILDER.fullmatch(text):
        return parse_value(builder[1].strip())
    inner = _brackets(text)
    if inner is None:
        if text.count("\\pm") != 1:
            return None
        return ("list", _parse_all([text.replace("\\pm", sign) for sign in "+-"]))
    opening, inside, closing = inner
    items = [*filter(None, _split(inside, COMMA))]
    if opening == "\\{":
        return ("set", _flat(_parse_all(items)))
    if opening in ("[", "\\langle") or len(items) > 1:
        brackets = "()" if opening == "\\langle" else opening + closing
        return ("sequence", brackets, _parse_all(items), ())
    return parse_value(inside.strip())


def _labelled(values: tuple[Value, ...]) -> Value | None:
    """y=2, x=1 as (1, 2), in the order of its names; (a) 2, (b) 9; 5 ft 11 in. None if a label is missing or twice."""
    items: dict[str, Value | None] = {}
    for value in values:
        match value:
            case ("named", label, item, _) | ("choice", label, item):
                items[label] = item
            case ("number", _, label):
                items[label] = value
    if len(items) < len(values) or "" in items or None in items.values():
        return None
    if value[0] == "number":
        return ("sequence", "", values, ())
    names = tuple(sorted(items))
    return ("sequence", "()", tuple(items[name] for name in names), names)


def _flat(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """1, \\pm 2 -> 1, 2, -2."""
    return tuple(item for value in values for item in (value[1] if value[0] == "list" else (value,)))


SUBSTANCE = re.compile(  # MgCl2, Al2(SO4)3, with capitals alone: EDF; GMm may be a product
    r"(?=.*[A-Za-z)]\d|[A-Z]+$|(?:[A-Z][a-z]?){3,}$)\d*(?:(?:[A-Z][a-z]?|\((?:[A-Z][a-z]?\d*)+\))\d*){2,}(?:\^[\d+-]+)?"
)
DATED = re.compile(  # 40-45, 3-2, 2022-07-11, 09/06/2000, 10.0.0.1, C-A-B, (12)(34)
    r"\d+(?:\.\d+)?(?:\s*-\s*\d+(?:\.\d+)?)+|\d+(?:\s*[/.]\s*\d+){2,}|0\d+/\d+|\d+/0\d+|[A-Z](?:-[A-Z]){2,}|(?:\(\d+\)){2,}"
)


def _is_formula(text: str) -> bool:
    """False for substances and capitals alone, for letters before digits (9 R 4) and digits apart (2 4 1)."""
    if SUBSTANCE.fullmatch(re.sub(r"\\text|[\s_{}]", "", text)):
        return False
    signs = re.sub(rf"\\[A-Za-z]+|(?<![A-Za-z])(?:{FUNCTION}|max|min|mod)|_\s*(?:\{{[^{{}}]*\}}|\w)", r"\\", text)
    signs = re.sub(r"\^\s*(?:\{[^{}]*[^{}+-]\}|\w(?![+-]$))", "^", signs)
    return not re.search(r"[A-Za-z]\s*\d|[A-Za-z]{2}\s+(?!d)[A-Za-z]{2}|[\d)]\s+\d|\^(?:\{\d*[+-]\}|\d*[+-]$)", signs)


def _text(text: str) -> Value:
    """A text equals itself alone. Spaces do not count, but between digits; nor do fonts, and the case of words."""
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).strip()
    words = words.casefold() if FOREIGN.search(words) else fold(words)
    words = re.sub(r"^(?:an?|the) (?=\w{3})", "", words, flags=re.IGNORECASE)
    return ("words", re.sub(r"\\text|[{}_\"!]|[.,;](?!\d)|(?<=[a-z])-(?=[a-z])|(?<!\d)\s+|\s+(?!\d)", "", words))


WORDED = re.compile(  # yes, Monday, no solution; no product of letters (abc, GMm)
    r"(?i:yes|no)|(?=.*(?:[^\W\d_]{4}|[^\W\d_]{3}\W|\W[^\W\d_]{3}))"
    r"[^\W\d_][^\d_+*/^=<>\\(){}\[\]|]*"
)


def quantity(text: str, is_apart: bool = False) -> Value | None:
    """Based numbers, ratios and times, texts, and what has a unit. `is_apart`: also a unit of one letter (0.64N)."""
    if based := BASED.fullmatch(text):
        digits, base = based[1].lstrip("0").upper(), WORDS.get(based[2], based[2])
        return ("number", Fraction(digits), f"base {base}") if digits.isdigit() else ("words", f"{digits}{base}")
    if len(parts := _split(text, ":")) > 1:
        return ("sequence", ":", _parse_all(parts), ())
    if UNCOUNTED.search(text) or WORDED.fullmatch(text):
        return _text(text)
    if written := QUANTITY.fullmatch(text):
        match parse_value(written["value"].strip()):
            case ("number" | "formula" as kind, value, ""):
                is_spaced = kind == "number" and written["space"] != ""
                if name := unit(written["unit"], is_apart or is_spaced):
                    return (kind, value, name)
    return _text(text) if FOREIGN.search(text) else None
