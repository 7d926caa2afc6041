"""A mathematical answer, LaTeX or plain text, as a value: `read_value`.

A value is read to its last token, or is a text of its tokens. It is a tuple: its kind, and what follows that.
    number (fraction, unit)                    formula (LaTeX, unit)              words (tokens)
    list, set, union (values)                  choice (letter, value): (C) 12     either (values): 0,25
    named (name, value, LaTeX): x = 5          equation (LaTeX): 2x < y           chain (equal values): 2+3 = 5
    sequence (brackets, values, names): a point, an interval (0 < x, too), 12:30; without brackets 5 ft 11 in
Numbers are exact fractions; formulas are left to SymPy (`equality.py`).
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from functools import lru_cache

from grading.spelling import GREEK, MAX_FORMULA, UPRIGHT, Tokens, tokens

Value = tuple
MAX_DEPTH = 20  # nested brackets; the LaTeX parser's time grows steeply with them

# Numbers and units ------------------------------------------------------------------------------------------------

DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
LATEX_FRACTION = re.compile(rf"\\frac\{{\s*(-?(?:{DECIMAL}))\s*\}}\{{\s*({DECIMAL})\s*\}}")
NUMBER = re.compile(  # 1,000.5 with or without a power of ten; 3/4 and 2 3/4; 0.1\overline{6} and 0.1(6)
    rf"(?P<sign>[+-]?)\s*(?:(?P<digits>{DECIMAL})"
    r"(?:\s*(?:(?:\\times|\\cdot|x)\s*10\s*\^\s*\{|[eE])(?P<power>[+-]?\d{1,3})\}?)?"
    rf"|(?:(?P<whole>\d+)\s+)?(?P<top>-?(?:{DECIMAL}))\s*/\s*(?P<bottom>{DECIMAL})"
    r"|(?P<fixed>\d*\.\d*)(?:\\(?:overline|bar|dot)\{|\()(?P<repeated>\d+)[})]|(?P<comma>0,\d+))"
)
SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
SCALED = re.compile(rf"(.+?)\s*\(?({'|'.join(SCALES)})\)?")
WORDS = {word: n for n, word in enumerate(re.findall(r"\w+", """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty"""))}  # fmt: skip


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
    if match["comma"]:
        result = Fraction(match["comma"].replace(",", "."))
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
PREFIXES = {"nano": "n", "micro": "μ", "milli": "m", "centi": "c", "kilo": "k", "mega": "M", "giga": "G", "pico": "p"}
PREFIXED = re.compile(rf"({'|'.join(PREFIXES)})(meter|metre|gram|second|liter|litre|joule|newton|watt|volt|hertz|ohm"
                      r"|ampere|amp|kelvin|tesla|pascal|mole)")  # fmt: skip
SI = re.compile(r"[pnμmckMGT]?(?:[mgsAKNJWVCFTHL]|mol|Hz|Pa|Ω|eV|Wb|cal|bar)")  # a prefix and a symbol
PLURAL = re.compile(  # or 3个苹果
    r"\w\w+[^\Ws](?<!th)s|[个只本块支张辆名位条棵件次种组页台间根颗盒箱袋朵套双](?![半十百千万亿])[\u4e00-\u9fff]*"
)
# Words about the value, behind it or on the left of "=": 7 dozens, 7 tenths, 7 more, half of x = 7
NO_UNIT = re.compile(r"""(?ix)
    (?:\w*(?:illion|illiard|teen|fold|tuple)|\w+(?<=n|r|f|x|v|h)ty|dozen|hundred|thousand|lakh|lac|crore|gross|grosse
    |score|myriad|ream|googol|googolplex|one|two|three|four|five|six|sixe|seven|eight|nine|ten|eleven|twelve|half|halve
    |third|quarter|pair|couple|twin|trio|century|centurie|decade|nought|double|triple|quadruple|square|squared|cubed
    |root|power|time|log|sine|cosine|inverse|reciprocal|factorial|negative|percentage|radical|exponent|base|guess|guesse
    |wrong|other|opposite|approximation|estimate|error|minu|plu|unles|les|versu|alway|perhap|ye|thi|wa|ha|hi|i)s
    |\w*illion|about|above|additional|almost|and|approx|approximately|around|as|at|base|but|by|can|cannot|does|dozen
    |down|double|either|except|factorial|false|fewer|fold|gross|half|hundred|if|inverse|is|lakh|least|less|log|maybe|minus
    |mod|modulo|more|most|nearly|negative|neither|never|no|nor|not|or|over|plus|possibly|probably|quarter|reciprocal
    |remainder|root|roughly|score|sin|square|squared|than|this|thousand|times|to|trap|triple|true|twice|under|unless|up
    |versus|vs|was|wrong|wrongly|yes|crore|third""")
UNIT_START = re.compile(r"%|\\(?:degree|dollar|euro|sterling|rupee|yuan|Omega|mu|frac|mho)|\(|[A-Za-z\u4e00-\u9fff]+")


def unit(text: str, is_apart: bool, is_upright: bool) -> str | None:
    """One spelling per unit; None for what is no unit: "more" and "dozens" say something about the value.

    A unit is made of known names, abbreviations and plurals of any noun. `is_apart`: a letter is no factor ("5 m").
    """
    text = re.sub(r"\\frac\{([^{}]*)\}\{(.*)\}$", r"\1/\2", text.replace(r"\mu", "μ").replace(r"\Omega", "Ω"))
    text = re.sub(r"\\degree\s*(?=[CF]\b)", " deg", text.replace("%", " percent "))
    text = re.sub(r"\\cdot|[\\{}().]|^\W*in\s(?=\s*\w)", " ", re.sub(r"\^\{(-?\d)\}", r"^\1 ", text))
    text = re.sub(r"\b([kM])\s+Ω", r"\1Ω", text)
    text = re.sub(r"\bper\b|每", "/", re.sub(r"(?i)\bdeg(?:ree)?s?\s(?=\s*[cf]\w)", "", text))
    text = re.sub(r"\s+([A-Za-z]+)\s*\^-(\d)", r"/\1^\2", re.sub(r"μ\s+", "μ", text)).replace("^1", "")
    for words, power in ((r"square|sq|平方|squared", 2), (r"cubic|cu|立方|cubed", 3)):
        text = re.sub(rf"(?i)\b(?:{words})\s*([a-z]+|\w+)|\b([a-z]+)\s+(?:{words})\b", rf"\1\2^{power}", text)
    text = re.sub(r"(?i)\b(?:of(?:\s+[a-z]+)?|the|old|left)\b", " ", text)  # boxes of candy
    names: list[str] = []
    for word in re.findall(r"[A-Za-zμΩ\u4e00-\u9fff]+|\^\s*-?\d|/|\S", text):
        folded = word.lower() if len(word) > 2 else word
        may_be_factors = not is_upright and re.fullmatch("[MGT]?[A-Z]|.*[ACFHKT]|.", word)
        if NO_UNIT.fullmatch(word):
            return None
        prefixed = PREFIXED.match(folded)
        if word[0] in "^/" or ((is_apart or names) and SI.fullmatch(word) and not may_be_factors):
            name = word
        elif prefixed:
            name = PREFIXES[prefixed[1]] + UNITS[prefixed[2]]
        else:
            is_glued = len(word.encode()) == 1 and not (is_apart or names)
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

OPENING = {"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"}
CLOSING = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"}
COMMAS = {",", ";", "、", "and", "和", "与", "及"}
ORS = {"or", "或", "或者", r"\cup", r"\lor"}
RELATIONS = {"<", ">", r"\le", r"\ge", r"\ne"}
EQUALS = {"=", r"\in"}
# What SymPy has no value for is a text.
UNCOUNTED = {
    rf"\{name}"
    for name in ["equiv", "approx", "mod", "cdots", "mid", "parallel", "perp", "neg", "land", "lor", "wedge", "to", "rightarrow", "Rightarrow", "implies", "iff", "angle", "triangle", "cong", "sim", "sum_", "cap", "cup", "subset", "subseteq", "setminus", "aleph", "overrightarrow", "notin"]
}
UNCOUNTED |= {"?", "..", "!!", "!!!", r"\begin{cases}", r"\|", "'", "''"} - {"'", "''"}

INDEX = r"_\{(?:[\w,]+|\\(?:min|max|triangle)\s*[A-Z]*)\}"
LETTER = rf"(?:[A-Za-z]|\\(?i:{'|'.join(sorted({*GREEK.values(), 'varepsilon', 'vartheta', 'ell'} - {'pi'}))})(?![A-Za-z]))(?:{INDEX})?"
NAME = (  # x, x_1, f(x), f'(2), P(A), |v|, dy/dx, AB, \angle ABC, \Delta H, pH, Area, total cost; no expression
    rf"(?:{LETTER}(?:\^\{{-1\}}|'+)?\s?\((?![^()]*(?:\d[A-Za-z]|\bnot\b))[^()+*/^=-]*\)"
    rf"|P\([^()]*[=<>|][^()]*\)|{LETTER}|d\w/d\w|\\frac\{{d\w\}}\{{d\w\}}|pH|\\Delta\s*[A-Z]"
    r"|\|[A-Zuvw\s]+\||(?:m?\s*\\(?:angle|triangle)\s*)?[A-Z]{1,4}|(?:[A-Z][a-z]{2,}|[a-z]{3,})(?: [A-Za-z]{2,}){,2})"
)
NAMED = re.compile(rf"{NAME}(?:\s*:\s*{NAME})*")
CONSTANT = re.compile(  # a side without letters
    r"(?:[^A-Za-z\\]|\\(?:frac|sqrt|cdot|times|div|pi|binom|degree|sin|cos|tan|log|ln|pm)(?![A-Za-z])|cm|m|kg|g|s)+"
)
VARIABLE = re.compile(r"[A-Za-z](?:_\{\w\})?(?:\(\w\))?|\\(?!pi|infty)[a-z]+")
CHOICE = re.compile(
    r"(?!.$)(?i:option |choice |answer )?\s*(?:\(\s*([A-Ja-j])\s*\)|([A-J])(?![A-Za-z])|([a-j])(?=\)|$|[.:] ))([).:、]*)(.*)",
    re.DOTALL,
)
DENIALS = re.compile(  # behind a letter and its mark: an operator, another option, or a word that takes it back
    r"^[-+*/^_=(<>']|^\s*(?:[,/&]|(?i:or|and|but|或|和)\b)|(?<!\w)\([B-Jb-j]\)|[,;]\s*[b-j][:.)]|(?<![\w(])[b-j]\)"
    r"|(?<![\w.:])(?<!and )[B-J](?!\w|:[A-J]|\.[A-Z])(?! and [A-J]\b)|^ [A-Z]\. [A-Z]|\b(?i:not|maybe|perhaps|but) \(?A\b|^ A\. [A-Z]|\bA is\b|^\s*\(?A\W*$(?<!^ A)"
    r"|^\s*(?i:is|was|can|would)\b.*\b(?i:wrong|false|incorrect|excluded|not (?:correct|right|true|the))\b"
)
BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{(?:\s*)(\d+|two|three|four|five|six|seven|eight|nine)\s*\}")
DATED = re.compile(  # 40-45, 3-2, 2022-07-11, 09/06/2000, 10.0.0.1, C-A-B, (12)(34)
    r"\d+(?:\.\d+)?(?:\s*-\s*\d+(?:\.\d+)?)+|\d+(?:\s*/\s*\d+){2,}|\d+(?:\.\d+){2,}|0\d+/\d+|\d+/0\d+|[A-Z](?:-[A-Z]){2,}"
    r"|(?:\(\d+\)){2,}"
)
SUBSTANCE = re.compile(  # MgCl2, Al2(SO4)3, with capitals alone: EDF; GMm may be a product
    r"(?=.*[A-Za-z)]\d|[A-Z]+$|(?:[A-Z][a-z]?){3,}$)\d*(?:(?:[A-Z][a-z]?|\((?:[A-Z][a-z]?\d*)+\))\d*){2,}(?:\^\{?[\d+-]+\}?)?"
)
SHELLS = re.compile(
    r"sp\^\{\d\}(?:d\^?\{?\d?\}?)?|(?:\[[A-Z][a-z]\])?(?:[1-7][spdf](?:\^\{\d+\}|\d+)){2,}|\[[A-Z][a-z]\].*"
)
SPOKEN = {
    r"\mathbb{R}": r"all real(?: number)?s?|\(-\\infty ?, ?\+?\\infty ?\)", "dne": "does not exist",
    r"\emptyset": r"(?:there (?:is|are) )?no (?:real )?(?:solutions?|roots?)|(?:the )?empty set|\\\{ ?\\\}",
}  # fmt: skip
INTRODUCTIONS = {*["the", "final", "answer", "is", "so", "thus", "hence", "therefore", "then", "it", "that"], " ", ",", ":", "="}


def latex(found: Tokens) -> str:
    """LaTeX that prints the tokens, without spaces."""
    text, is_command = "", False
    has_items = not {r"\gcd", r"\lcm", "max", "min"}.isdisjoint(found)
    for token in found:
        if token[0].isdigit() and "," in token and not has_items:
            token = token.replace(",", "." if token[0] == "0" else "")
        if text[-1:].isalpha() and token[0].isalpha() and is_command:
            text += " "
        text += token.strip()
        is_command = token[0] == "\\" or (token.isspace() and is_command)
    return text


@lru_cache(maxsize=8192)
def read_value(text: str) -> Value:
    """The value of an answer."""
    found = _trimmed(tokens(text))
    start = next((i for i, token in enumerate(found) if token.lower() not in INTRODUCTIONS), 0)
    words = {token.lower() for token in found[:start]}
    is_introduced = words & {"so", "thus", "hence", "therefore", "then"} or words >= {"answer"} or "=" in words
    return _read(_trimmed(found[start:] if is_introduced or found[:1] == (r"\approx",) else found))


def _read(found: Tokens) -> Value:
    depths = [0, *itertools.accumulate((token in OPENING) - (token in CLOSING) for token in found)]
    plain = "".join(found)
    if len(plain) <= MAX_FORMULA and (choice := _choice(found)):
        return choice
    if (
        not found
        or len(plain) > MAX_FORMULA
        or found.count("|") > MAX_DEPTH
        or max(depths) > MAX_DEPTH
        or min(depths) < 0
        or depths[-1] > 0
    ):
        return text_of(found)
    words = plain.lower()
    meaning = next((meaning for meaning, phrase in SPOKEN.items() if re.fullmatch(phrase, words)), None)
    if meaning:
        return ("formula", meaning, "")
    if DATED.fullmatch(plain):
        return text_of(found)
    value = Fraction(WORDS[words]) if words in WORDS else None if "," in found else number(plain)
    if value is not None:
        decimal = ("number", value, "")
        is_list = re.fullmatch(r"-?0,\d", plain)
        return ("either", (decimal, ("list", _read_all(_split(_parted(found), COMMAS)[0])))) if is_list else decimal
    for read in (_family, _excluded, _listed, _related, _bracketed, _quantity):
        value = read(found)
        if value is not None:
            return value
    return ("formula", latex(found), "") if _is_formula(found) else text_of(found)


def _read_all(parts: list[Tokens]) -> tuple[Value, ...]:
    return tuple(map(_read, parts))


def _trimmed(found: Tokens) -> Tokens:
    """Without spaces and marks at its ends, and without braces around it."""
    start, end = 0, len(found)
    while start < end and (found[start].isspace() or found[start] == ","):
        start += 1
    while start < end and (found[end - 1].isspace() or found[end - 1] in ",;:。."):
        end -= 1
    return found[start:end]


def _split(found: Tokens, separators: set[str]) -> tuple[list[Tokens], list[str]]:
    """The parts of the tokens between separators outside all brackets, and the separators."""
    parts, signs, depth, start = [], [], 0, 0
    for i, token in enumerate(found):
        depth += (token in OPENING or token.startswith(r"\begin")) - (token in CLOSING or token.startswith(r"\end"))
        if depth == 0 and token in separators:
            parts.append(_trimmed(found[start:i]))
            signs.append(token)
            start = i + 1
    return [*parts, _trimmed(found[start:])], signs


def _parted(found: Tokens) -> Tokens:
    """In brackets each comma parts, unless ", " or ";" stands there too, or 000 would be an item."""
    is_spaced = ";" in found or any(pair == (",", " ") for pair in itertools.pairwise(found))
    if is_spaced or any(re.search(r",0\d", token) for token in found):
        return found
    return tuple(part for token in found for part in re.findall("[^,]+|,", token))


def _choice(found: Tokens) -> Value | None:
    """(C), option C, C. 12. Text behind a letter and its mark is the option's. Not "(a) 5, (b) 6"."""
    match = CHOICE.fullmatch("".join(found))
    if not match:
        return None
    letter, mark, rest = match[1] or match[2] or match[3], match[4] or match[1], match[5]
    if not rest.strip():
        return ("choice", letter.upper(), None)
    if not mark or DENIALS.search(rest):
        return None
    is_nested = CHOICE.fullmatch(rest.strip())
    return ("choice", letter.upper(), ("words", rest) if is_nested else read_value(rest))


def _family(found: Tokens) -> Value | None:
    """y = 2x (x > 0) as y = 2x, x > 0; k\\pi, k in Z as n\\pi."""
    if found[-1:] == (")",) and " " in found:
        start = max((i for i, token in enumerate(found) if token == "("), default=0)
        inside = found[start + 1 : -1]
        if found[start - 1].isspace() and start and not {*inside}.isdisjoint(RELATIONS | {r"\in"}):
            return _read((*_trimmed(found[:start]), ",", *inside))
    parts, signs = _split(found, COMMAS)
    if len(parts) > 1:
        *rest, name = [token for token in parts[-1] if token not in (" ", UPRIGHT, "where", "for")][:1] or [""]
        if parts[-1][-2:] in ((r"\in", r"\mathbb{Z}"), (" ", r"\mathbb{Z}")) and name.isalpha() and len(name) == 1:
            known = found[: -len(parts[-1])]
            return _read(_trimmed(tuple(token.replace(name, "n") if len(token) < 3 else token for token in known)))
    return None


def _excluded(found: Tokens) -> Value | None:
    """The reals without 1 and 2, x \\ne 1, x \\ne 2: all that lies between."""
    parts, _ = _split(found, COMMAS)
    sides, signs = _split(parts[0], {r"\ne"})
    if len(sides) == 2 and VARIABLE.fullmatch("".join(sides[0])):
        name = "".join(sides[0])
        points = [_split(part, {r"\ne"})[0] for part in parts]
        if any(len(each) > 1 and each[0] != sides[0] for each in points):
            return None
        points = [each[-1] for each in points]
    elif match := re.match(r"\\mathbb\{R\}(?:\\setminus|-)(?:\\\{)?|R(?:\\setminus|-)\\\{", latex(found)):
        start = next(i + 1 for i in range(len(found)) if len(latex(found[: i + 1])) == match.end())
        inside = tuple(token for token in found[start:] if token != r"\}")
        name, points = "x", _split(_parted(inside), COMMAS)[0]
    else:
        return None
    values = _read_all(points)
    if not all(value[0] in ("number", "formula", "list") for value in values) or "".join(points[-1]) in ("x", "y", "z"):
        return None
    bounds = [("formula", r"-\infty", ""), *sorted(_flat(values)), ("formula", r"\infty", "")]
    return ("union", tuple(("sequence", "()", pair, (name,)) for pair in itertools.pairwise(bounds)))


def _listed(found: Tokens) -> Value | None:
    """What commas, "and", "or" part."""
    plain = "".join(found)
    separators = {";"} if all(sign in found for sign in ",=;") else ORS  # x=1, y=2; x=2, y=1
    parts, signs = _split(found, separators)
    if len(parts) > 1 and all(parts):
        values = _read_all(parts)
        # x < 1 or x > 2; A or B, which is no AB
        are_intervals = any(value[0] == "sequence" and len(value[3]) == 1 for value in values)
        is_union = are_intervals or r"\cup" in signs or re.fullmatch("[A-J①-⑳]", "".join(parts[-1]))
        return ("union", values) if is_union else ("list", _flat(values))
    parts = [part for part in _split(found, COMMAS)[0] if part]
    if len(parts) > 1:
        values = _flat(_read_all(parts))
        if len({value[2] is None for value in values if value[0] == "choice"}) > 1:
            return text_of(found)  # (a) (b) 9
        return _labelled(values) or _between(values) or ("list", values)
    depths = itertools.accumulate((token in OPENING) - (token in CLOSING) for token in found)
    labels, amounts = [], []  # (a) 2 (b) 9; 5 ft 11 in
    for i, (token, depth) in enumerate(zip(found, depths, strict=True)):
        if re.fullmatch(r"\([a-h]\)", "".join(found[i : i + 3]), re.IGNORECASE):
            labels.append(i)
        elif depth == 0 and i and token[0].isdigit() and found[i - 1].isspace() and found[i - 2].isalpha():
            amounts.append(i)
    for cuts in (labels, amounts):
        pairs = [*itertools.pairwise([0, *[i for i in cuts if i], len(found)])]
        if len(pairs) > 1 and all(pairs):
            values = _read_all([_trimmed(found[a:b]) for a, b in pairs])
            if all(value[0] == "choice" and value[2] is None for value in values):
                return ("list", values)  # (B)(D)
            if labelled := _labelled(values):
                return labelled
    return None


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


def _between(values: tuple[Value, ...]) -> Value | None:
    """0 < x and x <= 1 as 0 < x <= 1."""
    match values:
        case [("sequence", bounds, (low, high), (name,)), ("sequence", bounds_2, (low_2, high_2), (name_2,))]:
            if name == name_2 and "infty" in str(low) + str(low_2) and "infty" in str(high) + str(high_2):
                if "infty" in str(low):
                    low, bounds, high_2, bounds_2 = low_2, bounds_2, high, bounds
                if "infty" not in str(low) + str(high_2):
                    return ("sequence", bounds[0] + bounds_2[1], (low, high_2), (name,))
    return None


def _flat(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """1, \\pm 2 -> 1, 2, -2."""
    return tuple(item for value in values for item in (value[1] if value[0] == "list" else (value,)))


def _related(found: Tokens) -> Value | None:
    """x = 5, f(x) = x^2, x in (0, 1); equations and relations that are no such definitions; 2 + 3 = 5 is 5."""
    terms, signs = _split(found, RELATIONS)
    sides, equals = _split(found, EQUALS)
    if len(terms) > 1:
        is_whole = len(sides) == 1 and all(terms) and RELATIONS.isdisjoint(token for term in terms for token in term)
        return _relation(terms, signs) if is_whole else text_of(found)
    if len(sides) < 2 or not all(sides):
        return text_of(found) if len(sides) > 1 and any(sides) and not sides[-1] else None
    plain = ["".join(side) for side in sides]
    first, last = plain[0], plain[-1]
    if len(sides) == 2 and re.fullmatch(
        r"\([A-Za-z](?:_\{\d\})?(?:,\s*[A-Za-z](?:_\{\d\})?)+\)", first
    ):  # (x, y) = (1, 2)
        names = re.findall("[A-Za-z]", first)
        return _read(sides[-1]) if names == sorted(names) else text_of(found)
    is_name = NAMED.fullmatch(first) and not any(map(NO_UNIT.fullmatch, re.findall("[A-Za-z]{2,}", first)))
    if is_name:
        name = re.sub(r"[\s{}]", "", fold(first))
        return ("named", name, _chain(sides[1:], plain[1:]), f"{latex(sides[0])} = {latex(sides[-1])}")
    if CONSTANT.fullmatch(first) and CONSTANT.fullmatch(last):
        return _chain(sides, plain)  # 2 + 3 = 5
    return ("equation", latex(found)) if len(sides) == 2 and _is_formula(found) else text_of(found)


def _chain(sides: list[Tokens], plain: list[str]) -> Value:
    """The last side, with the other sides without letters, which have to equal it."""
    firsts = [side for side, text in zip(sides[:-1], plain, strict=False) if CONSTANT.fullmatch(text)]
    return ("chain", _read_all([*firsts, sides[-1]]))


def _relation(terms: list[Tokens], signs: list[str]) -> Value:
    """0 < x <= a as the interval that it describes, with the name of its variable; another relation as it is."""
    if all(sign in (">", r"\ge") for sign in signs):  # everything the one way round
        terms, signs = terms[::-1], ["<" if sign == ">" else r"\le" for sign in signs[::-1]]
    is_name = [bool(VARIABLE.fullmatch("".join(term))) for term in terms]
    low, high = ("-", r"\infty"), (r"\infty",)
    match terms, is_name:
        case [("|", *name, "|"), bound], _ if VARIABLE.fullmatch("".join(name)):  # |x| < 2
            terms, signs, is_name = [("-", "(", *bound, ")"), tuple(name), bound], [signs[0], *signs], [False, True]
        case [bound, ("|", *name, "|")], _ if VARIABLE.fullmatch("".join(name)) and signs[0] in ("<", r"\le"):
            below = _relation([tuple(name), ("-", "(", *bound, ")")], signs)
            return ("union", (below, _relation([bound, tuple(name)], signs)))
        case [name, bound], [True, _] if "".join(bound) not in ("x", "y", "z"):
            terms, signs, is_name = [low, name, bound], ["<", *signs], [False, True]
        case [bound, name], [_, True]:
            terms, signs, is_name = [bound, name, high], [*signs, "<"], [False, True]
    if len(terms) == 3 and is_name[1] and {*signs} <= {"<", r"\le"}:
        brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
        return ("sequence", brackets, _read_all([terms[0], terms[2]]), ("".join(terms[1]),))
    whole = tuple(itertools.chain(*itertools.zip_longest(terms, [(sign,) for sign in signs], fillvalue=())))
    found = tuple(itertools.chain.from_iterable(whole))
    return ("equation", latex(found)) if len(terms) == 2 and _is_formula(found) else text_of(found)


def _bracketed(found: Tokens) -> Value | None:
    """Points, intervals, sets, columns; a value in brackets; what \\pm makes two of."""
    opening, closing = (found[0], found[-1]) if len(found) > 1 else ("", "")
    inside = found[1:-1]
    if closing == "[" and opening in ("[", "]") or opening == "]" and closing in "[]":  # ]0, 1[
        opening, closing = opening.replace("]", "("), closing.replace("[", ")")
    depths = itertools.accumulate((token in OPENING) - (token in CLOSING) for token in inside)
    if opening in OPENING and closing in CLOSING and min(depths, default=0) >= 0:
        if opening == r"\{" and (builder := _builder(inside)):
            return builder
        items = [item for item in _split(_parted(inside), COMMAS - {"and"})[0] if item]
        if opening == r"\{" and closing == r"\}":
            return ("set", _flat(_read_all(items)))
        if inside[:1] and inside[0].startswith(r"\begin") and inside[-1].startswith(r"\end"):
            return _read(inside)
        if len(items) > 1 or opening in ("[", r"\langle"):
            brackets = "()" if opening == r"\langle" else opening + closing
            return ("sequence", brackets, _read_all(items), ())
        return _read(_trimmed(inside)) if opening in "({" else None
    if (
        opening.startswith(r"\begin")
        and closing.startswith(r"\end")
        and opening[6:8] in ("{p", "{b", "{B")
        and not {"&", opening} & {*inside}
    ):
        return ("sequence", "()", _read_all(_split(inside, {r"\\"})[0]), ())
    if found.count(r"\pm") == 1:
        return ("list", _read_all([tuple(token.replace(r"\pm", sign) for token in found) for sign in "+-"]))
    return None


def _builder(inside: Tokens) -> Value | None:
    """{x | 0 < x < 1} as 0 < x < 1."""
    head, bars = _split(inside, {"|", ":"})
    if not bars:
        return None
    name = re.sub(r"\\in(?:\\mathbb\{R\}|R)$", "", "".join(head[0]).replace(" ", ""))
    rest = inside[len(head[0]) :]
    rest = rest[next(i for i, token in enumerate(rest) if token in "|:") + 1 :]
    return _read(_trimmed(rest)) if NAMED.fullmatch(name) else None


def _quantity(found: Tokens, is_apart: bool = False) -> Value | None:
    """Based numbers, ratios and times, and what has a unit. `is_apart`: also a unit of one letter (0.64N)."""
    plain = "".join(found)
    if based := BASED.fullmatch(plain):
        digits, base = based[1].lstrip("0").upper(), WORDS.get(based[2], based[2])
        return ("number", Fraction(digits), f"base {base}") if digits.isdigit() else ("words", f"{digits} {base}")
    parts, _ = _split(found, {":"})
    if len(parts) > 1:
        return ("sequence", ":", _read_all(parts), ()) if all(parts) else None
    if found[0] in "^_":
        return None
    if found[0] in CURRENCIES or found[1:2] and found[0] in "+-" and found[1] in CURRENCIES:
        at = found[0] in ("+", "-")
        found = (*found[:at], *found[at + 1 :], " ", found[at])
    if {"am", "pm"} & {*found} or (r"\degree" in found and TRIGONOMETRIC & {*found}):
        return None
    depth, commands, command = 0, [], ""  # what stands before the open brackets, and before the last that was closed
    for i, token in enumerate(found):
        depth += (token in OPENING) - (token in CLOSING)
        if token in OPENING:
            commands.append(found[i - 1])
        elif token in CLOSING:
            command = commands.pop()
        if not i or depth != (token == "(") or not UNIT_START.match(token):
            continue
        before = found[i - 1 - found[i - 1].isspace()]
        if before[-1:].isdigit() or before in (")", r"\pi", *SCALES) or (before == "}" and command != "_"):
            name = unit("".join(found[i:]), is_apart or found[i - 1].isspace(), is_apart or UPRIGHT in found[i - 1 :])
            if name:
                match _read(_trimmed(found[:i])):
                    case ("number" | "formula" as kind, value, ""):
                        return (kind, value, name)
    return None


MATRICES = {*"ABCDEOPQSUXY"}  # capitals that are matrices, sets and points more often than numbers
TRIGONOMETRIC = {rf"\{name}" for name in ["sin", "cos", "tan", "cot", "sec", "csc"]}
CURRENCIES = {r"\dollar", r"\euro", r"\sterling", r"\rupee", r"\yuan"}


def apart(value: Value) -> Value:
    """The formula 0.64N with the unit N."""
    return (value[0] == "formula" and _quantity(tokens(value[1]), is_apart=True)) or value


def is_word(token: str) -> bool:
    """Whether letters are no product: \"dog\", \"total\"; not \"abc\", \"xyz\"."""
    return token in ("no", "No") or bool(re.fullmatch(r"(?i:(?=[a-z]{3}).+[aeiou].*)|[A-Za-z]*([a-z])\1[a-z]*", token))


def _is_formula(found: Tokens) -> bool:
    """False for words, substances, capitals alone, letters before digits (9 R 4) and digits apart (2 4 1)."""
    plain = "".join(found)
    bare = re.sub(r"[\s_{}]", "", plain)
    if (
        not UNCOUNTED.isdisjoint(found)
        or SUBSTANCE.fullmatch(bare)
        or SHELLS.fullmatch("".join(plain.split()))
        or {"am", "pm"} & {*found}
        or re.search(r"[fgh]\^\{-1\}\s?\(", plain)
    ):
        return False
    letters = [token for token in found if token.isalpha()]
    if len(found) == len(letters) and (len(plain.strip()) > 3 or is_word(plain)):
        return False
    depth, previous = 0, ""
    for i, token in enumerate(found):
        if token.isspace():
            continue
        if not token.isascii() or token.startswith(r"\mathbb"):
            return False
        if token.isalpha() and len(token) > 3 and is_word(token) and token not in ("max", "min", "const", "constant"):
            return False
        is_index = previous == "{" and found[i - 2] == "_"
        if (
            token[0].isdigit()
            and (previous.isalpha() or previous[:1].isdigit() or previous in (")", "'"))
            and not is_index
        ):
            return False
        if token.isalpha() and previous.isalpha() and len(token) > 1 and len(previous) > 1 and token[0] != "d":
            return False
        previous = token
    product = re.sub(r"\^\{[^{}]*\}|[\s\d'()]", "", plain)
    pairs = {first + second for first, second in itertools.pairwise(product) if first != second}
    has_order = any(pair[::-1] in pairs for pair in pairs if pair.isupper() and pair.isalpha())
    are_known = re.search(r"\^\{\d", plain) and not MATRICES & {*product}  # I^2R
    if has_order or (re.fullmatch("[A-Z]+", product) and pairs and not are_known):  # P^{-1}AP, AB - BA
        return False
    return found[0] not in "^_" and not re.search(r"\^\{\d*[+-]\}", plain)


def fold(text: str) -> str:
    """The text with its words in lower case: Monday, EVEN. What may be a product of letters keeps its case: Rr, GMm."""
    word = r"(?<![^\W\d_])(?=[^\W\d_]*[aeiouyAEIOUY])(?:[A-Z]?[a-z]{2,}|[A-Z]{4,}|(?i:yes|no))(?![^\W\d_])"
    return re.sub(word, lambda match: match[0].lower(), text)


def text_of(found: Tokens) -> Value:
    """A text of tokens: it equals itself alone. Fonts, spaces, the case of words and full stops do not count."""
    found = tuple(token for token in found if not token.isspace())
    if SHELLS.fullmatch("".join(found)):
        found = tuple(token for token in found if token not in "^{}")  # 1s2 2s1 is 1s^2 2s^1
    words: list[str] = []
    for i, token in enumerate(found):
        if token.isalpha():
            words += re.findall("[A-Z]?[a-z]+|.", fold(token) if token.isascii() else token.casefold())
        elif token.startswith(r"\mathbb"):
            words.append(token[-2])
        elif token not in '.,;"' or found[i + 1 : i + 2] and found[i + 1][0].isdigit():
            words.append(token)
    if words[:1] in (["a"], ["an"], ["the"], ["The"], ["A"], ["An"]) and len("".join(words[1:2])) > 2:
        del words[0]
    text = re.sub(r"(\^ \{[^{}]*\}) (_ \{[^{}]*\})", r"\2 \1", " ".join(words))
    return ("words", re.sub(r"(?<=[A-Za-z)]) _ \{ (\w+) \}", r" \1", text))
