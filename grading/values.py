"""A mathematical answer, LaTeX or plain text, as a value: `parse_value(clean(text))`.

A value is read to its end, or is a text of its tokens. It is a tuple: its kind, and what follows that.
    number (fraction, unit)                    formula (LaTeX, unit)              words (tokens)
    list, set, union (values)                  choice (letter, value): (C) 12     either (values): 0,5
    named (name, value, LaTeX): x = 5          equation (LaTeX): 2x < y           chain (equal values): 2+3 = 5
    sequence (brackets, values, names): a point, an interval (0 < x, too), 12:30; without brackets 5 ft 11 in
Numbers are exact fractions; formulas are left to SymPy (`equality.py`).
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from functools import lru_cache

from grading.spelling import GREEK, MAX_FORMULA, UPRIGHT, rewritten, rules

Value = tuple

# Numbers and units ------------------------------------------------------------------------------------------------

DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
DIGITS = rules(
    r"""
    ^([+-]?)0,(\d+)$ ⟶ \g<1>0.\2
    \\frac\{\s*(-?DECIMAL)\s*\}\{\s*(DECIMAL)\s*\} ⟶ ␣\1/\2␣
    (?<=\d)\s*(?:\\times|\\cdot|x)\s*10\s*\^\s*\{([+-]?\d{1,3})\} ⟶ e\1
    (?<=\d)\s*\(?hundred\)? ⟶ e2
    (?<=\d)\s*\(?thousand\)? ⟶ e3
    (?<=\d)\s*\(?million\)? ⟶ e6
    (?<=\d)\s*\(?billion\)? ⟶ e9
    (?<=\d)\s*万 ⟶ e4
    (?<=\d)\s*亿 ⟶ e8
""".replace("DECIMAL", DECIMAL)
)
NUMBER = re.compile(  # 3/4 and 2 3/4; 0.1\overline{6} and 0.1(6); 2e5
    rf"\s*([+-]?)\s*(?:(\d+)\s+(?=\S*/))?(?!\d+[\\(])(-?{DECIMAL}(?:[eE][+-]?\d{{1,3}})?)"
    rf"(?:(?<=[.\d])(?:\\(?:overline|bar|dot)\{{|\()(\d+)[}})]|\s*/\s*(?=[\d.]*[1-9])({DECIMAL}))?\s*"
)
WORDS = {word: n for n, word in enumerate(re.findall(r"\w+", """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty"""))}  # fmt: skip


def number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction, mixed or repeating number, 3.5 million or 2x10^5; else None."""
    match = NUMBER.fullmatch(rewritten(text, DIGITS))
    if not match:
        return None
    sign, whole, top, repeated, bottom = match.groups("")
    value = Fraction(top) / Fraction(bottom or 1)
    if repeated:
        value += Fraction(int(repeated), 10 ** len(top.partition(".")[2]) * (10 ** len(repeated) - 1))
    if whole and not 0 <= value < 1:
        return None
    return (value + int(whole or 0)) * (-1 if sign == "-" else 1)


UNITS = {name: names.split()[0] for names in re.findall("[^,]+", """
    cm centimeter centimetre 厘米, mm millimeter millimetre 毫米, km kilometer kilometre 千米 公里, m meter metre 米,
    kg kilogram 千克 公斤, g gram 克, mg milligram 毫克, lb pound lbs, oz ounce, ft feet foot, yd yard, mi mile,
    in inche inch, s second sec 秒, min minute 分钟, h hour hr hrs 小时 时, L l liter litre 升,
    mL ml milliliter millilitre 毫升, $ dollar usd buck 美元, deg degree 度, % percent, u unit, mi/h mph, km/h kph kmph,
    rad radian, J joule, N newton, W watt, V volt, Hz hertz, Ω ohm, A ampere amp, K kelvin, T tesla, Pa pascal,
    degC celsius celsiu, degF fahrenheit, people person 人, child children, man men, woman women, mol mole, day 天 日,
    week 周, year 年, month, cent, euro, sterling, 元 yuan rmb, rupee inr, yen, 岁, 月, 个月, 分, 吨, 分米, 公顷
""") for name in names.split()}  # fmt: skip
UNITS |= {long + name: short + UNITS[name] for long, short in map(str.split, re.split(
    ",", "nano n,micro μ,milli m,centi c,kilo k,mega M,giga G,pico p")) for name in re.findall(
    r"\w+", "meter metre gram second liter litre joule newton watt volt hertz ohm ampere amp kelvin tesla pascal mole"
)}  # fmt: skip
SI = re.compile(r"[pnμmckMGT]?(?:[mgsAKNJWVCFTHL]|mol|Hz|Pa|Ω|eV|Wb|cal|bar)")  # a prefix and a symbol
FACTORS = re.compile("[MGT]?[A-Z]|.*[ACFHKT]|.")
PLURAL = re.compile(  # or 3个苹果
    r"\w\w+[^\Ws](?<!th)s|[个只本块支张辆名位条棵件次种组页台间根颗盒箱袋朵套双](?![半十百千万亿])[\u4e00-\u9fff]*"
)
# Words about the value, behind it or on the left of "=": 7 dozens, 7 tenths, 7 more, half of x = 7
NO_UNIT = r"""(?ix:
    (?:\w*(?:illion|illiard|teen|fold|tuple)|\w+(?<=n|r|f|x|v|h)ty|dozen|hundred|thousand|lakh|lac|crore|gross|grosse
    |score|myriad|ream|googol|googolplex|one|two|three|four|five|six|sixe|seven|eight|nine|ten|eleven|twelve|half|halve
    |third|quarter|pair|couple|twin|trio|century|centurie|decade|nought|double|triple|quadruple|square|squared|cubed
    |root|power|time|log|sine|cosine|inverse|reciprocal|factorial|negative|percentage|radical|exponent|base|guess|guesse
    |wrong|other|opposite|approximation|estimate|error|minu|plu|unles|les|versu|alway|perhap|ye|thi|wa|ha|hi|i)s
    |\w*illion|about|above|additional|almost|and|approx|approximately|around|as|at|base|but|by|can|cannot|does|dozen
    |down|double|either|except|factorial|false|fewer|fold|gross|half|hundred|if|inverse|is|lakh|least|less|log|maybe|minus
    |mod|modulo|more|most|nearly|negative|neither|never|no|nor|not|or|over|plus|possibly|probably|quarter|reciprocal
    |remainder|root|roughly|score|sin|square|squared|than|this|thousand|times|to|trap|triple|true|twice|under|unless|up
    |versus|vs|was|wrong|wrongly|yes|crore|third)"""
CURRENCY = r"\\(?:dollar|euro|sterling|rupee|yuan)"
UNIT_START = re.compile(  # behind a value; not behind an index
    rf"(?:(?<=[\d)])|(?<!_\{{.)(?<!_\{{..)(?<=\}})|(?<=\\pi)|(?<=hundred)|(?<=thousand)|(?<=illion)|(?<=[万亿]))(?P<space>\s*)"
    rf"(?=.{{1,80}}$)(?=%|\(|{CURRENCY}|\\(?:degree|Omega|mu|frac)(?![a-z])|[A-Za-zμ\u4e00-\u9fff])"
)


UNIT_SPELLINGS = rules(r"""
    \\frac\{([^{}]*)\}\{(.*)\}$ ⟶ \1/\2
    \\mu ⟶ μ
    \\Omega ⟶ Ω
    % ⟶ ␣percent␣
    \\degree\s*(?=[CF]\b) ⟶ ␣deg
    \^\{(-?\d)\} ⟶ ^\1␣
    \\cdot|[\\{}().]|^\W*in\s(?=\s*\w) ⟶ ␣
    \b([kM])\s+Ω ⟶ \1Ω
    (?i)\bdeg(?:ree)?s?\s(?=\s*[cf]\w) ⟶
    \bper\b|每 ⟶ /
    μ\s+ ⟶ μ
    \s+([A-Za-z]+)\s*\^-(\d) ⟶ /\1^\2
    \^1 ⟶
    (?i)\b(?:square|sq|平方|squared)\s*([a-z]+|\w+)|\b([a-z]+)\s+(?:square|sq|平方|squared)\b ⟶ \1\2^2
    (?i)\b(?:cubic|cu|立方|cubed)\s*([a-z]+|\w+)|\b([a-z]+)\s+(?:cubic|cu|立方|cubed)\b ⟶ \1\2^3
    # boxes of candy
    (?i)\b(?:of(?:\s+[a-z]+)?|the|old|left)\b ⟶ ␣
""")


def unit(text: str, is_apart: bool, is_upright: bool) -> str | None:
    """One spelling per unit; None for what is no unit: "more" and "dozens" say something about the value.

    A unit is made of known names, abbreviations and plurals of any noun. `is_apart`: a letter is no factor ("5 m").
    """
    text = rewritten(text, UNIT_SPELLINGS)
    names: list[str] = []
    for word in re.findall(r"[A-Za-zμΩ\u4e00-\u9fff]+|\^\s*-?\d|/|\S", text):
        stem = (word.lower() if len(word) > 2 else word).removesuffix("s")
        is_clear = is_apart or names or len(word.encode()) > 1
        is_symbol = (is_apart or names) and SI.fullmatch(word) and (is_upright or not FACTORS.fullmatch(word))
        name = word if is_symbol or word[0] in "^/" else is_clear and (UNITS.get(word) or UNITS.get(stem))
        name = name or (stem if PLURAL.fullmatch(word.lower()) else "")
        is_adjective = not names and len(word) > 1 and re.search(r"s\b", text) and not word.endswith(("th", "ths"))
        if re.fullmatch(NO_UNIT, word) or not (name or is_adjective):  # blue marbles
            return None
        names += [name] * bool(name)
    return re.sub(" ([/^]) ?", r"\1", " ".join(names)) or None


# Values -----------------------------------------------------------------------------------------------------------

INDEX = r"_\{(?:[\w,/\s]+|\\(?:min|max|triangle)\s*[A-Z]*)\}"
LETTER = rf"(?:[A-Za-z]|\\(?i:{'|'.join(GREEK)})(?![A-Za-z]))(?:{INDEX}|\^\{{\*\}}|\s*\\degree\s*)*"
NAME = (  # x, x_{1}, f(x), f'(2), P(A), |v|, dy/dx, AB, \angle ABC, \Delta H, pH, Area, total cost; no expression
    rf"(?:{LETTER}(?:\^\{{-1\}}|'+)?\s?\((?![^()]*(?:\d[A-Za-z]|\bnot\b))[^()+*/^=-]*\)"
    rf"|P\([^()]*[=<>|][^()]*\)|{LETTER}|d\w/d\w|\\frac\{{d\w\}}\{{d\w\}}|p\s?(?:O?H|K[aw]?(?:{INDEX})?)"
    rf"|\\Delta(?:{INDEX})?\s*{LETTER}|\[\s*[A-Z][^\[\]]*\]"
    r"|\|[A-Zuvw\s]+\||(?:m?\s*\\(?:angle|triangle)\s*)?[A-Z]{1,4}|(?:[A-Z][a-z]{2,}|[a-z]{3,})(?:\s[A-Za-z]{2,}){,2})"
)
NAMED = re.compile(rf"(?![^(]*(?<![A-Za-z]){NO_UNIT}(?![A-Za-z])){NAME}(?:\s*:\s*{NAME})*")
CONSTANT = re.compile(  # a side without letters
    r"(?:[^A-Za-z\\]|\\(?:frac|sqrt|cdot|times|div|pi|binom|degree|sin|cos|tan|log|ln|pm)(?![A-Za-z])|\b(?:cm|m|kg|g|s)\b)+"
)
VARIABLES = re.compile("[A-Za-z]")
NAMES = re.compile(r"\(\s*[A-Za-z](?:_\{\d\})?(?:\s*,\s*[A-Za-z](?:_\{\d\})?)+\s*\)")
VARIABLE = r"(?:[A-Za-z](?:_\{\w\})?(?:\(\w\))?|\\(?!pi|infty)[a-z]+)"
CHOICE = re.compile(
    r"(?!.$)(?i:option |choice |answer |选)?\s*(?:\(\s*(?=[A-Ja-j]\s*\))|(?=[A-J](?![A-Za-z])|[a-j](?:\)|$|[.:] )))"
    r"([A-Ja-j])((?:\s*\))?[).:、]*)(.*)",
    re.DOTALL,
)
DENIALS = re.compile(  # behind a letter and its mark: an operator, another option, or a word that takes it back
    r"^[-+*/^_=(<>']|^\s*(?:[,/&]|(?i:or|and|but|或|和)\b)|(?<!\w)\([B-Jb-j]\)|[,;]\s*[b-j][:.)]|(?<![\w(])[b-j]\)"
    r"|(?<![\w.:])(?<!and )[B-J](?!\w|:[A-J]|\.[A-Z])(?! and [A-J]\b)|^ [A-Z]\. [A-Z]"
    r"|\b(?i:not|maybe|perhaps|but) \(?A\b|\bA is\b|^\s*\(?A\W*$(?<!^ A)"
    r"|^\s*(?i:is|was|can|would)\b.*\b(?i:wrong|false|incorrect|excluded|not (?:correct|right|true|the))\b"
)
BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{\s*(\d+|two|three|four|five|six|seven|eight|nine)\s*\}")
EXCLUDED = re.compile(r"(?:\\mathbb\{R\}|R(?=[^{]*\\\{))\s*(?:\\setminus|-)\s*(?:\\?\{)?([^{}]*?)(?:\\?\})?")
# Separators of a text, see `_split`
RELATION = r"\\[lgn]e(?![A-Za-z])|(?<!\\)[<>]"
EQUALS = r"(?<![<>:\\])=|\\in(?![A-Za-z])"
COMMA = r"[、,;]|(?<![A-Za-z])and(?![A-Za-z])|[和与及](?![\u4e00-\u9fff])(?<![\u4e00-\u9fff].)"
OR = r"(?<![A-Za-z])or(?![A-Za-z])|或者?|\\(?:cup|lor)(?![A-Za-z])"
# What SymPy has no value for is a text, and so are shells (1s^2 2s^1), substances and times
UNCOUNTED = re.compile(
    r"\\(?:equiv|approx|mod|cdots|parallel|perp|neg|land|wedge|to|[rR]ightarrow|implies|iff|angle|triangle|cong|sim|cap|cup"
    r"|subset|subseteq|setminus|aleph|overrightarrow|notin|mathbb)(?![A-Za-z])|!!|[fgh]\^\{-1\}\s?\(|\d\s?[ap]m$|\.\.|\?"
    r"|\\cases|\\\||\\degree\s*\d+\s*'|^[\^_]|\^\{\d*[+-]\}|[^\0-\x7f\u2009]|(?<!_\{)\u2009[A-Za-z]{2}"
)
BRACKETS = re.compile(  # with nothing in brackets between; those of an interval may differ
    r"(?:\\[\[{]|[(\[{]|\\l(?:angle|floor|ceil)(?![a-z]))[^()\[\]{}]*?(?:[)\]}]|\\r(?:angle|floor|ceil)(?![a-z]))"
)
AMOUNTS = re.compile(r"(?<=[A-Za-z])\s+(?=\d)|[\s,;]+(?=\([b-hB-H]\))|(?<=\))(?=\([B-H]\))")
# 20 open brackets, with which the LaTeX parser's time grows steeply
NESTED = re.compile(r"(?:[(\[{](?:[^()\[\]{}]|[(\[{][^()\[\]{}]*[)\]}])*){20}|(?:\|[^|]*){20}")
BEGINNINGS = rules(r"""
    (?i)^(?:the )?(?:final )?answer\s*(?:is|:|=(?!.*=))[,:\s]*(?=\S) ⟶
    \+\s*const(?:ant)?$ ⟶ +C
    # A point with its letter; P(5, 2) and C(5, 2) are numbers
    ^[ABD-OQ-Z]\s*(?=\([^()A-Za-z]+,[^()A-Za-z]+\)$) ⟶
    (?i)^(?:so|thus|hence|therefore|then|it is|it's|that is)\b[,:\s]*(?=\S) ⟶
    ^(?:=|\\approxx?)|[,;:。\s]+$|(?<!\.)\.$ ⟶
    (?i)^(?:all real(?: number)?s?|\(-\\infty ?, ?\+?\\infty ?\))$ ⟶ \\mathbb{R}
    (?i)^(?:(?:there (?:is|are) )?no (?:real )?(?:solutions?|roots?)|(?:the )?empty set|\\\{ ?\\\})$ ⟶ \\emptyset
    ^(?:dne|DNE)$ ⟶ does not exist
""")


# A side of a relation, which has no other one and no comma outside parentheses
SIDE = rf"((?:(?!{COMMA}|{OR}|{RELATION}|{EQUALS}|\\[{{}}])(?:[^()]|\((?:[^()]|\([^()]*\))*\)))+?)"
RELATIONS = rules(
    r"""
    # A column is a point; \{y | y > 2\} is x > 2
    \\\\\s*(?=[^&]*\\end\{[pbB]matrix\}$) ⟶ ,␣
    ^\\begin\{[pbB]matrix\}([^&]*)\\end\{[pbB]matrix\}$ ⟶ (\1)
    ^\\\{\s*([a-z])(?:\s*\\in\s*\\mathbb\{R\})?\s*[:|]\s*(.+)\\\}$ ⟶ \2 ∋\1
    (?<![A-Za-z\\])([a-z])(?![A-Za-z])(?=.*∋\1$) ⟶ x
    ^\\\{\s*NAME\s*[:|]\s*(.+)\\\}$|\s*∋.$ ⟶ \1
    # y = 2x (x > 0); k\pi, k \in \mathbb{Z}
    \s\(([^()]*(?:[<>]|\\(?:in|[lgn]e)x?)[^()]*)\)$ ⟶ ,␣\1
    (?<![A-Za-z\\])([a-z])(?![A-Za-z])(?=.*[\s,;(]\1\s*\\in\s*\\mathbb\{Z\}$) ⟶ n
    [\s,;(]+(?:where\s|for\s)?\s*[a-z]\s*\\in\s*\\mathbb\{Z\}$ ⟶
    \s*(?<![A-Za-z])andx?\s*(?=[^<>]*(?:[<>]|\\[lg]ex?)) ⟶ ,␣
    # |x| < 2 and |x| > 2
    ^\|([a-z])\|\s*(<|\\lex?)\s*([^,<>|]+)$ ⟶ -(\3)\2 \1\2 \3
    ^\|([a-z])\|\s*(>|\\gex?)\s*([^,<>|]+)$ ⟶ -(\3)\2 \1 or \1\2 \3
    # x > 0, x < 1
    (?:^|(?<=,))\s*([a-z])\s*>\s*([^,<>]+?)\s*(?=,|$) ⟶ \2<\1
    (?:^|(?<=,))\s*([a-z])\s*\\gex?\s*([^,<>]+?)\s*(?=,|$) ⟶ \2\\le \1
    ^([a-z])\s*((?:<|\\lex?)[^,<>]+),([^,<>]+(?:<|\\le))\s*\1$ ⟶ \3 \1\2
    ^([^,<>]+(?:<|\\le)\s*([a-z]))\s*,\s*\2\s*((?:<|\\lex?)[^,<>]+)$ ⟶ \1\3
    # In the order low, name, high
    ^SIDE(>|\\gex?)SIDE(>|\\gex?)SIDE$ ⟶ \5\4«\3\2«\1
    ^SIDE(>|\\gex?)SIDE$ ⟶ \3\2«\1
    >« ⟶ <
    \\ge\s*« ⟶ \\le␣
    # x \ne 1, x \ne 2
    ^\s*([a-z])\s*\\nex?SIDE(?:,|andx?)\s*\1\s*\\nex?SIDE$ ⟶ \\mathbb{R}\\setminus\\{\2, \3\\}
    ^\s*(?:VARIABLE)\s*\\nex?(?!\s*[xyz]\s*$)((?:(?![<>=]|\\[lgn]ex?).)+)$ ⟶ \\mathbb{R}\\setminus\\{\1\\}
    ^\s*(VARIABLE)\s*(<|\\lex?)(?!\s*[xyz]\s*$)SIDE$ ⟶ -\\infty<\1\2\3
    ^SIDE(<|\\lex?)\s*(VARIABLE)\s*$ ⟶ \1\2 \3<\\infty
    ^((?:(?!\\pm|COMMA|OR|\\\{).)*)\\pm((?:(?!\\pm|COMMA|OR).)*)$ ⟶ \1+\2 or \1-\2
""".replace("SIDE", SIDE)
    .replace("COMMA", COMMA)
    .replace("OR", OR)
    .replace("VARIABLE", VARIABLE)
    .replace("NAME", NAME)
)
INTERVAL = re.compile(rf"{SIDE}(<|\\le(?![A-Za-z]))\s*({VARIABLE})\s*(<|\\le(?![A-Za-z])){SIDE}")


@lru_cache(maxsize=8192)
def parse_value(text: str) -> Value:
    """The value of a cleaned answer."""
    if len(text) > MAX_FORMULA or NESTED.search(text):
        return text_of(text)
    is_word = re.fullmatch(rf"{UPRIGHT}[A-Za-z]{{2,}}\s*", text)
    text = rewritten(text.strip(), BEGINNINGS).strip(" ,")
    if DATED.fullmatch(text):
        return text_of(text)
    if (value := number(str(WORDS.get(text.lower(), text)))) is not None:
        decimal = ("number", value, "")
        return ("either", (decimal, ("list", _parse_all(text.split(","))))) if re.fullmatch(r"0,\d", text) else decimal
    if choice := _choice(text):
        return choice
    text = rewritten(text, RELATIONS)
    for read in (_named, _collection, quantity):
        value = read(text)
        if value is not None:
            return value
    return ("formula", latex(text), "") if _is_formula(text) and not is_word else text_of(text)


def latex(text: str) -> str:
    """The text without spaces, but where a letter follows a command."""
    return re.sub(r"(?<![A-Za-z])\s|\s(?![A-Za-z])", "", text)


def _parse_all(texts: list[str]) -> tuple[Value, ...]:
    return tuple(map(parse_value, texts))


def _masked(text: str) -> str:
    """The text with a sign in the place of each character that is in brackets, or one."""
    num_masked = 1
    while num_masked:
        text, num_masked = BRACKETS.subn(lambda match: "¤" * len(match[0]), text)
    return text


def _split(text: str, separator: str) -> list[str]:
    """The parts of the text between matches of `separator` outside all brackets."""
    cuts = [match.span() for match in re.finditer(separator, _masked(text))]
    return [text[end:start].strip() for (_, end), (start, _) in itertools.pairwise([(0, 0), *cuts, (len(text), 0)])]


def _items(text: str) -> list[str]:
    return [*filter(None, _split(text, COMMA))]


def _choice(text: str) -> Value | None:
    """(C), option C, C. 12. Text behind a letter and its mark is the option's. Not "(a) 5, (b) 6"."""
    match = CHOICE.fullmatch(text)
    if not match:
        return None
    letter, mark, rest = match[1].upper(), match[2], match[3]
    if not rest.strip():
        return ("choice", letter, None)
    if not mark or DENIALS.search(rest):
        return None
    return ("choice", letter, text_of(rest) if CHOICE.fullmatch(rest.strip()) else parse_value(rest))


def _named(text: str) -> Value | None:
    """x = 5, f(x) = x^2, x in (0, 1); equations and relations that are no such definitions; 2 + 3 = 5 is 5."""
    if excluded := EXCLUDED.fullmatch(text):  # the reals without 1 and 2: all that lies between
        low, high = _parse_all([r"-\infty", r"\infty"])
        pairs = itertools.pairwise([low, *sorted(_flat(_parse_all(_items(excluded[1])))), high])
        return ("union", tuple(("sequence", "()", pair, ()) for pair in pairs))
    if bounds := INTERVAL.fullmatch(text):  # 0 < x \le a
        low, left, name, right, high = bounds.groups()
        interval = ("sequence", "(["[left != "<"] + ")]"[right != "<"], _parse_all([low, high]), (name,))
        return ("named", name, interval, latex(text).removeprefix("-\\infty<").removesuffix("<\\infty"))
    if len(_split(text, f"{COMMA}|{OR}")) > 1:
        return None
    sides, parts = _split(text, EQUALS), _split(text, f"{EQUALS}|{RELATION}")
    if len(parts) == 1:
        return None
    if all(parts) and len(parts) == len(sides):
        match sides:
            case [point, values] if NAMES.fullmatch(point) and (names := VARIABLES.findall(point)) == sorted(names):
                return parse_value(values)  # (x, y) = (1, 2)
            case [first, *rest] if NAMED.fullmatch(first):
                return ("named", re.sub(r"[\s{}]", "", fold(first)), _chain(rest), f"{latex(first)}={latex(rest[-1])}")
            case [first, *_, last] if CONSTANT.fullmatch(first) and CONSTANT.fullmatch(last):
                return _chain(sides)  # 2 + 3 = 5
    is_equation = len(parts) == 2 and all(parts) and _is_formula(text)
    return ("equation", latex(text)) if is_equation else text_of(text)  # 2x = 10 = 5


def _chain(sides: list[str]) -> Value:
    """The last side, with the other sides without letters, which have to equal it."""
    *firsts, last = sides
    return ("chain", _parse_all([*filter(CONSTANT.fullmatch, firsts), last]))


def _collection(text: str) -> Value | None:
    parts = _split(text, ";" if all(sign in text for sign in ",=;") else OR)  # x=1, y=2; x=2, y=1
    if len(parts) > 1 and all(parts):
        values = _parse_all(parts)
        # x < 1 or x > 2; A or B, which is no AB
        is_union = re.search(rf"\\cup|{RELATION}", text) or re.fullmatch("[A-J①-⑳]", parts[-1])
        return ("union", values) if is_union else ("list", _flat(values))
    parts, amounts = _items(text), AMOUNTS.split(text)
    if len(parts) > 1 or (len(amounts) > 1 and all(amounts)):
        values = _flat(_parse_all(parts if len(parts) > 1 else amounts))
        if labelled := _labelled(values):
            return labelled
        if len(parts) > 1 or {value[::2] for value in values} == {("choice", None)}:
            return ("list", values)
    match = re.fullmatch(r"(\\\{|[(\[{])(.*)(\\\}|(?<!\\)[)\]}])", text, re.DOTALL)
    if match is None or re.search(r"[()\[\]{}]", _masked(match[2])):
        return None
    opening, inside, closing = match.groups()
    items = _items(inside)
    if opening == "\\{":
        return ("set", _flat(_parse_all(items)))
    if len(items) > 1 or opening == "[":
        return ("sequence", opening + closing, _parse_all(items), ())
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
    names = tuple(sorted(items))
    return ("sequence", "()" * (value[0] != "number"), tuple(items[name] for name in names), names)


def _flat(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """1, \\pm 2 -> 1, 2, -2."""
    return tuple(item for value in values for item in (value[1] if value[0] == "list" else (value,)))


SHELLS = re.compile(r"sp\^\d(?:d\^?\d?)?|(?:\[[A-Z][a-z]\])?(?:[1-7][spdf](?:\^\d+|\d+)){2,}|\[[A-Z][a-z]\].*")
SUBSTANCE = re.compile(  # MgCl2, Al2(SO4)3, with capitals alone: EDF; GMm may be a product
    r"(?=.*[A-Za-z)]\d|[A-Z]+$|(?:[A-Z][a-z]?){3,}$)\d*(?:(?:[A-Z][a-z]?|\((?:[A-Z][a-z]?\d*)+\))\d*){2,}(?:\^[\d+-]+)?|"
    + SHELLS.pattern
)
DATED = re.compile(  # 40-45, 3-2, 2022-07-11, 09/06/2000, 10.0.0.1, C-A-B, (12)(34)
    r"\d+(?:\.\d+)?(?:\s*-\s*\d+(?:\.\d+)?)+|\d+(?:\s*/\s*\d+){2,}|\d+(?:\.\d+){2,}|0\d+/\d+|\d+/0\d+|[A-Z](?:-[A-Z]){2,}"
    r"|(?:\(\d+\)){2,}"
)
MATRICES = {*"ABCDEHOPQSTUXY"}  # rather matrices, sets, points and sides of a coin than numbers
WORD = r"(?<![\\A-Za-z])(?!(?:max|min|const|constant)\b)"
# Alone or with at least four letters they are no product: dog, total; but abc, xyz, GMm
WORDED = re.compile(
    rf"(?:no|No|(?=.*(?:[A-Za-z]{{4}}|[A-Za-z]{{3}}\s|\s[A-Za-z]{{3}}))[A-Za-z\s]+|(?i:[a-z]+[aeiou][a-z]*(?<=...))|[A-Za-z]*([a-z])\1[a-z]*)|.*{WORD}(?i:(?=[a-z]{{4}})[a-z]+[aeiou]).*"
)


def _is_formula(text: str) -> bool:
    """False for words, substances, capitals alone, letters before digits (9 R 4) and digits apart (2 4 1)."""
    bare = re.sub(r"[\s_{}]", "", text)
    is_whole = text.count("{") == text.count("}")
    if not is_whole or UNCOUNTED.search(text) or SUBSTANCE.fullmatch(bare) or WORDED.fullmatch(text.strip()):
        return False
    letters = re.sub(r"\\(?:times|cdot)(?![a-z])", "*", re.sub(r"\^\{[^{}]*\}|[\s\d'()]", "", text))
    are_known = "^{" in text and not MATRICES & {*letters}  # I^2R
    if (
        (re.fullmatch("[A-Z]{2,}", letters) and len({*letters}) > 1 and not are_known)
        or (re.search(r"([A-Z])\*?(?!\1)[A-Z]", letters) and {*letters} <= {*MATRICES, *"I*+-="})  # AB + C
        or ("^{T}" in text and re.search(r"(?<![\\A-Za-z])[A-Za-z]\\?[A-Za-z]", letters))
        or ("^{-1}" in text and re.search(r"([A-Z]).*\1", letters))  # P^{-1}AP
    ):
        return False
    signs = re.sub(r"\\[A-Za-z]+|(?<![A-Za-z])(?:max|min)|_\{[^{}]*\}", r"\\", text)
    return not re.search(r"[A-Za-z]\s*\d|[A-Za-z]{2}\s+(?!d)[A-Za-z]{2}|[\d)]\s+\d", signs)


def fold(text: str) -> str:
    """The text with its words in lower case: Monday, EVEN. What may be a product of letters keeps its case: Rr, GMm."""
    word = r"(?<![^\W\d_])(?=[^\W\d_]*[aeiouyAEIOUY])(?:[A-Z]?[a-z]{2,}|[A-Z]{4,}|(?i:yes|no))(?![^\W\d_])"
    return re.sub(word, lambda match: match[0].lower(), text)


ELECTRONS = rules(r"""
    # 1s2 2s1 is 1s^2 2s^1
    \^\{(\d+)\} ⟶ \1␣
    (?<=[spdf])(\d{1,2}?)(?=[1-7][spdf]) ⟶ \1␣
""")
TEXTS = rules(r"""
    (?i)^(?:an?|the) (?=\w{3}) ⟶
    (?<=[A-Za-z)])_\{([\w\s]+)\} ⟶ ␣\1␣
    \\mathbb\{(\w)\} ⟶ \1
    (\^\{[^{}]*\})(_\{[^{}]*\}) ⟶ \2\1
""")


def text_of(text: str) -> Value:
    """A text of tokens: it equals itself alone. Fonts, spaces, the case of words and full stops do not count."""
    text = text.replace(UPRIGHT, " ")
    if re.fullmatch(r"[A-Z]+(?:\s*\+\s*[A-Z]+)+", text):
        text = "+".join(sorted(re.findall("[A-Z]+", text)))  # AB + CD is CD + AB, but no BA + CD
    if SHELLS.fullmatch(re.sub(r"[\s_{}]", "", text)):
        text = rewritten(text, ELECTRONS)
    text = rewritten(fold(text), TEXTS)
    text = text if text.isascii() else text.casefold()
    found = re.findall(
        r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)*|[A-Z]?[a-z]+|[A-Z①-⑳]|[^\W\d_A-Za-z①-⑳]+|!+|'+|[^\s.,;\"]|[.,](?=\d)", text
    )
    return ("words", re.sub(r"(?<!\d) | (?!\d)", "", " ".join(found)))


def quantity(text: str, is_apart: bool = False) -> Value | None:
    """Based numbers, ratios and times, and what has a unit. `is_apart`: also a unit of one letter (0.64N)."""
    if based := BASED.fullmatch(text.replace(UPRIGHT, "")):
        digits, base = based[1].lstrip("0").upper(), WORDS.get(based[2], based[2])
        return ("number", Fraction(digits), f"base {base}") if digits.isdigit() else ("words", f"{digits} {base}")
    if len(parts := _split(text, ":")) > 1:
        return ("sequence", ":", _parse_all(parts), ()) if all(parts) else None
    text = re.sub(rf"^([+-]?)\s*({CURRENCY})\s*(.+)$", rf"\1\3{UPRIGHT}\2", text)
    if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc).*\\degree|\d\s?[ap]m$|^[\^_]", text):
        for start in UNIT_START.finditer(text):
            name = unit(
                text[start.end("space") :],
                is_apart or start["space"] != "",
                is_apart or UPRIGHT in text[start.start() :],
            )
            if name:
                match parse_value(text[: start.start()].strip()):
                    case ("number" | "formula" as kind, value, ""):
                        return (kind, value, name)
    return None
