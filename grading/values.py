"""A mathematical answer, LaTeX or plain text, as a value: `parse_value(clean(text))`.

A value is a tuple: its kind, and what follows that.
    number (fraction, unit)                    formula (text, unit)               words (text)
    list, set, union (values)                  choice (letter, value): (C) 12
    named (name, value, text): x = 5           equation (text): 2x < y            chain (equal values): 2+3 = 5
    sequence (brackets, values, names): a point, an interval (0 < x, too), 12:30, 3:4
Numbers are exact fractions; formulas are left to SymPy (`equality.py`).
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

Value = tuple
MAX_FORMULA = 1000  # characters; a longer formula is compared as text only
MAX_DEPTH = 20  # nested brackets; the LaTeX parser's time grows steeply with them

# The spelling -----------------------------------------------------------------------------------------------------

SYMBOLS = {
    "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "×": r"\times ",
    "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "−": "-", "–": "-", "—": "-", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "θ": r"\theta ", "√": r"\sqrt ", "€": r"\euro ", "£": r"\pounds ", "’": "'", "≈": r"\approx ",
    "≃": r"\approx ",
}  # fmt: skip
WORDS = {word: n for n, word in enumerate(re.findall(r"\w+", """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty"""))}  # fmt: skip
SPOKEN = {
    r"\mathbb{R}": r"all real(?: number)?s?|\(-\\infty ?, ?\+?\\infty ?\)", "does not exist": "dne",
    r"\emptyset": r"(?:there (?:is|are) )?no (?:real )?(?:solutions?|roots?)|(?:the )?empty set",
}  # fmt: skip
COMMANDS = {name: meaning for meaning, names in {
    r"\frac": "dfrac tfrac cfrac", r"\ne ": "neq", r"\le ": "leq leqslant", r"\ge ": "geq geqslant", "<": "lt",
    ">": "gt", r"\{": "lbrace", r"\}": "rbrace", r"\approx ": "simeq", r"\emptyset": "varnothing", ":": "colon",
    r"^\circ": "degree", " ": "displaystyle textstyle limits nolimits bf rm large Large",
}.items() for name in names.split()}  # fmt: skip

CURRENCIES = {r"\$": "dollar", r"\euro": "euro", r"\pounds": "sterling"}

# Pattern and replacement, in order; "x?" stands for: not followed by a letter.
REWRITES = [(re.compile(pattern.replace("x?", "(?![A-Za-z])")), replacement) for pattern, replacement in [
    (r"\\([A-Za-z]+)", lambda m: COMMANDS.get(m[1], m[0])),
    (r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\s*\\[!,])\s*(?=\d{3}(?!\d))", ","),  # 1\,000 and 1{,}000
    (r"(?<![\d.,])\d{1,3}(?:[ ~]\d{3})+(?![\d/]| ?\d)", lambda m: re.sub("[ ~]", "", m[0])),  # 1 000 000
    # Delimiters, sizes, spaces, fonts
    (r"\\(?:left|right|[bB]igg?[lr]?)x?\.?|\\!", ""),
    (r"(?<!\\)(?:\\[()\[\]](?!\d*pt)|\$)", " "),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad|\\(?:text)?color\s*\{\w+\}", " "),
    (r"\\(?:mathbf|mathit|boldsymbol|mathrm|vec)\s*\{\s*([a-zA-Z])\s*\}", r" \1 "),
    (r"^\\(?:boxed|fbox|boldsymbol)\s*\{(.*)\}$", r"\1"),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)|math(?:rm|bf|it|sf)|emph|mbox|operatorname)\s*\{", r"\\text{"),
    (r"\\text\s*\{\s*(\\\$|[+-]?\d[\d.,/]*)\s*\}|^\\text\s*\{\s*(\d[^{}]*)\}$", lambda m: f" {m[1] or m[2]} "),
    (r"\\text\s*\{\s*,?\s*(?:(or|或者?)|and|和),?\s*\}", lambda m: " or " if m[1] else " , "),
    # Synonyms
    (r"\\notx?\s*=|(?<![\d)])!=", r"\\ne "),
    (r"([<>])=", lambda m: r"\le " if m[1] == "<" else r"\ge "),
    (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
    (r"\\\{\s*\\\}", r"\\emptyset"),
    (r"\\(?:mathbb|Bbb)\s*\{?R\}?|\\Rx?", r"\\mathbb{R}"),
    (r"\^\s*\{?\s*((?:\\prime\s*)+)\}?", lambda m: "'" * m[1].count("p")),
    (r"^\\mathbb\{R\}\s*\\(?:setminus|backslash)\s*\\\{([^{},]*)\\\}$", r"x \\ne \1"),
    (r"\{([:,])\}", r"\1"),
    (r"^\s*(?:=|\\approxx?)", ""),
    # What LaTeX allows to be left out, and plain text for LaTeX
    (r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(\d)", lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3]}}}"),
    (r"\\sqrt\s+(\d+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"(?:\\sqrt|(?<![\\A-Za-z])sqrt)\s*(\[\d+\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
    (r"(?<![\\A-Za-z])(?:pi|(infinity))x?", lambda m: r"\infty " if m[1] else r"\pi "),
    (r"(?<![\d.}])(\d+)/(\d+)\s*(?=[A-Za-z])", r"\\frac{\1}{\2}"),  # 1/2x
    (r"\{?\s*(\w+)\s*\\choose\s*(\w+)\s*\}?|(?<![A-Za-z\\])C\(\s*(\d+)\s*,\s*(\d+)\s*\)",
     lambda m: rf"\binom{{{m[1] or m[3]}}}{{{m[2] or m[4]}}}"),
    (r"^(?i:so|thus|hence|therefore|then|it is|it's|that is)\b[,:]?\s+(?=\S)", ""),
    (r"^\s*([+-]?)\s*(\\\$|\\euro|\\pounds)\s*((?:(?!\\\$).)*\S)\s*$",
     lambda m: rf"{m[1]}{m[3]} \text{{{CURRENCIES[m[2]]}}}"),
    (r"\b([ap])\.\s?m\b\.?", r"\1m"),
    (r"^\s*\{([^{}]*)\}\s*$", r"\1"),
    (r"\s+", " "),
]]  # fmt: skip


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """The answer in one spelling: ASCII and LaTeX, no delimiters, no spacing commands, no full stop."""
    if len(text) > 4 * MAX_FORMULA:
        return text
    text = re.sub(r"[⁰¹²³⁴-⁹⁺⁻ⁿ]+", lambda m: f"^{{{unicodedata.normalize('NFKC', m[0]).replace('−', '-')}}}", text)
    text = re.sub(r"[₀-₉]+", lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = unicodedata.normalize("NFKC", "".join(SYMBOLS.get(character, character) for character in text))
    text = " ".join("".join(c for c in text if unicodedata.category(c) not in ("Cf", "Cc") or c.isspace()).split())
    text = text.strip("`*" if not text.endswith("^*") else "`").strip()
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(",;:" if text.rstrip().endswith("..") else ".,;:").strip()
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip().lower()
    meaning = next((meaning for meaning, phrase in SPOKEN.items() if re.fullmatch(phrase, words)), None)
    return meaning or str(WORDS.get(words, "")) or text


def fold(text: str) -> str:
    """The text with its words in lower case: Monday, EVEN. What may be a product of letters keeps its case: Rr, GMm."""
    word = r"(?<![^\W\d_])(?=[^\W\d_]*[aeiouyAEIOUY])(?:[A-Z]?[a-z]{2,}|[A-Z]{4,}|(?i:yes|no))(?![^\W\d_])"
    return re.sub(word, lambda match: match[0].lower(), text)


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
SCALED = re.compile(rf"(.+?)\s*(?:\\text\{{\s*)?({'|'.join(SCALES)})\s*\}}?")


def number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction, mixed or repeating number, 3.5 million or 2x10^5; else None."""
    text = LATEX_FRACTION.sub(r" \1/\2 ", text).strip()
    match = NUMBER.fullmatch(text)
    if not match:
        scaled = SCALED.fullmatch(text)
        inner = number(scaled[1]) if scaled else None
        return None if inner is None else inner * SCALES[scaled[2]]
    part = {name: (digits or "0").replace(",", "") for name, digits in match.groupdict().items()}
    result = Fraction(part["digits"]) * Fraction(10) ** int(part["power"]) + int(part["whole"])
    if match["bottom"]:
        top, bottom = Fraction(part["top"]), Fraction(part["bottom"])
        if bottom == 0 or (match["whole"] and not 0 <= top < bottom):
            return None
        result += top / bottom
    if match["repeated"]:
        unit = Fraction(1, 10 ** len(part["fixed"].partition(".")[2]))  # of the last digit that is not repeated
        result = Fraction(f"0{part['fixed']}0") + unit * int(part["repeated"]) / (10 ** len(part["repeated"]) - 1)
    return -result if match["sign"] == "-" else result


UNITS = {name: short for short, names in {  # every spelling of a unit
    "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre", "m": "meter metre",
    "kg": "kilogram", "g": "gram", "mg": "milligram", "lb": "pound lbs", "oz": "ounce", "ft": "feet foot", "yd": "yard",
    "mi": "mile", "in": "inche inch", "s": "second sec", "min": "minute", "h": "hour hr hrs", "l": "liter litre",
    "ml": "milliliter millilitre", "$": "dollar usd buck", "deg": "degree", "%": "percent", "u": "unit",
    "mi/h": "mph", "km/h": "kph kmph", "rad": "radian", "j": "joule", "n": "newton", "w": "watt", "v": "volt",
    "hz": "hertz", "people": "person", "child": "children", "man": "men", "woman": "women", "mol": "mole",
    **dict.fromkeys(re.findall(r"\w+", "day week month year cent am pm euro sterling 个 元 米 人 天 度 岁 小时"), ""),
}.items() for name in [short, *names.split()]}  # fmt: skip
# What says something about the value: 7 dozens, 7 tenths, 7 more
NO_UNITS = set(re.findall(r"\w+", """
    additional always as billions centuries couples decades does dozens fewer gross half halves hundreds is less
    millions minus more negative no not ones or others over pairs percents plus quarters scores squares tens thirds this
    thousands times triples twins unless versus vs was yes to and than but"""))  # fmt: skip
UNIT_WORD = r"[A-Za-z\u4e00-\u9fff]+\.?(?:\s*\^\s*\{?-?\d\}?)?"
QUANTITY = re.compile(
    rf"(?P<value>.*(?:[\d}})]|\\pi|{'|'.join(SCALES)}))\s*(?P<unit>\\?%|\^\\circ\s*"
    r"|(?:\\text\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?\s*(?:/|\\cdot)?\s*)+"
    rf"|(?:(?<=\s)|(?<=[\d)}}])){UNIT_WORD}(?:(?:\s*/\s*|\s+){UNIT_WORD})*)", re.DOTALL,
)  # fmt: skip


def unit(text: str, is_apart: bool) -> str | None:
    """One spelling per unit; None for what is no unit: "more" and "dozens" say something about the value.

    A unit is made of known names, abbreviations and plurals of any noun. `is_apart`: a letter is no factor ("5 m").
    """
    if re.search(r"(?<![A-Za-z])[A-Z][A-Za-z]?(?![A-Za-z.])", text) and not re.search("[JNWV]|Hz|PM|AM", text):
        return None  # 5 M is no length, 5 Mg is not 5 mg
    text = re.sub(r"\\text\s*\{\s*\(?(?:in (?=\w))?([^{}()]*)\)?\s*\}", r" \1 ", text.lower())
    text = re.sub(r"\\?%", " percent ", text.replace("^\\circ", " deg ")).replace("\\cdot", " ").replace(".", "")
    if not re.fullmatch(r"[\sa-z\u4e00-\u9fff/^{}\d]*", text) or re.search(r"(?<!\^)(?<!\^\{)\d", text):
        return None
    power = "^2" if re.search(r"\bsq", text) else "^3" if re.search(r"\bcu", text) else ""
    text = re.sub(r"\b(?:(per)|square|squared|sq|cubic|cubed|cu|of|the)\b", lambda m: "/" if m[1] else " ", text)
    names = []
    for word in re.findall(r"[a-z\u4e00-\u9fff]+|\^\{?\d|/", text):
        name = UNITS.get(word, UNITS.get(word.removesuffix("s")))
        if word in NO_UNITS or word in SCALES or word in WORDS or (name is None and re.search(r"ths?$", word)):
            return None
        if word[0] in "^/":
            names.append(word.replace("{", ""))
        elif name is not None and (is_apart or len(word.encode()) > 1):
            names += ["·"] * bool(names and names[-1].isalpha()) + [name]
        elif len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
            names.append(word.removesuffix("s"))
        elif names or not re.search(r"s\b", text):  # an adjective may stand before a plural: blue marbles
            return None
    return "".join(names) + power if names else None


# Values -----------------------------------------------------------------------------------------------------------

LETTER = (  # with its index; no function
    r"(?:[A-Za-z]|\\(?!frac|pi|infty|sqrt|text|in|exp|log|ln|sin|cos|tan|sec|csc|cot)[a-z]{2,8}(?![A-Za-z]))"
    r"(?:_(?:\{[\w,]+\}|\w|\{?\\(?:min|max|text\{\w+\})\s*\}?))?"
)
DENIED = (
    r"half|double|twice|not?|never|wrong\w*|false|trap|guess|least|most|more|less|if|approx\w*|square|root|log|inverse"
)
NAME = (  # x, x_1, f(x), f'(2), P(A), |v|, dy/dx, AB, \angle ABC, Area, \text{total cost}
    rf"(?:{LETTER}(?:\^\{{-1\}}|'+)?\s?\((?![^()]*(?:\d[A-Za-z]|\bnot\b))[^()+*/^=-]*\)"
    rf"|P\([^()]*[=<>|][^()]*\)|{LETTER}'*|d\w/d\w|\\frac\{{d\w\}}\{{d\w\}}"
    r"|\|\s*(?:[A-Zuvw]|\\[a-z]+|\s)+\||(?:m?\\(?:angle|triangle)\s*)?[A-Z]{1,4}"
    rf"|(?:\\text\{{)?\s*(?![^{{}}=]*\b(?i:{DENIED})\b)[A-Za-z]{{3,}}(?: [A-Za-z]{{2,}})*\s*\}}?)"
)
CONSTANT = re.compile(  # a side without letters
    r"(?:[^A-Za-z\\]|\\(?:frac|sqrt|cdot|times|div|pi|binom|circ|sin|cos|tan|log|ln|pm|\W|text\{[^{}]*\})(?![A-Za-z]))+"
)
NAMES = re.compile(r"\(\s*[A-Za-z](?:_\{?\d\}?)?(?:\s*,\s*[A-Za-z](?:_\{?\d\}?)?)+\s*\)")
NAMED = re.compile(
    rf"({NAME}(?:\s*[:/]\s*{NAME})*|\\frac\{{{NAME}\}}\{{{NAME}\}})\s*(?:=|:=|\\in(?![A-Za-z]))\s*(.+)", re.DOTALL
)
BUILDER = re.compile(rf"\s*{NAME}(?:\s*\\in\s*\\mathbb\{{R\}})?\s*(?:\\mid|:|\|)\s*(.+)")
RELATION = re.compile(r"\\[lg]e(?![A-Za-z])|\\ne(?![A-Za-z])|(?<!\\)[<>]")
EQUALS = re.compile(r"(?<![<>:\\])=")
CHOICE = re.compile(r"((?:option |choice |answer )?\s*\(?)\s*([A-J])(?![A-Z])\s*([).:]*)\s*(.*)", re.I | re.DOTALL)
DENIALS = re.compile(r"^[,/]|\b(?:or|and|is|was|are|not|would|can|but|maybe|wrong|false)\b|\(?[A-J][.):]", re.I)
BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?(?:\\text\{)?\s*(\d+|two|three|four|five|six|seven|eight|nine)\s*\}*")
COMMA = re.compile(r"(?<!\d),|,(?!\d{3}(?!\d))|;|,\s|(?<=[\s\d})])and(?=[\s(\\])")
VARIABLE = re.compile(r"[A-Za-z](?:_\w)?(?:\(\w\))?|\\(?!pi|infty)[a-z]+")
OR = re.compile(r"(?<=[\s\d})\]])or(?=[\s\\(\d-]|\w(?:\(\w\))?\s*=)|\\cup(?![A-Za-z])")
COLON, SEMICOLON = re.compile(":"), re.compile(";")
# What SymPy has no value for is compared as text.
UNCOUNTED = re.compile(
    r"\\(?:equiv|approx|[pb]?mod|[lc]?dots|mid|parallel|perp|neg|land|to|rightarrow|implies|iff)(?![A-Za-z])|\.\.|\?"
)
OPENING, CLOSING = ("(", "[", "{", "\\{", "\\langle"), (")", "]", "}", "\\}", "\\rangle")
BRACKET = r"\\[{}]|\\[lr]angle|\\.|[()\[\]{}]"  # or an escaped character, which is none


@lru_cache(maxsize=8192)
def parse_value(text: str) -> Value:
    """The value of a cleaned answer."""
    depths = itertools.accumulate((c in "([{") - (c in ")]}") for c in text)
    if len(text) > MAX_FORMULA or max(depths, default=0) > MAX_DEPTH:
        return ("words", text)
    if (value := number(text)) is not None:
        return ("number", value, "")
    for read in (_choice, _named, _collection, _quantity):
        found = read(text)
        if found is not None:
            return found
    return ("formula", text, "")


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts of the text between matches of `separator` outside all brackets; those of an interval may differ."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"(?P<cut>{separator.pattern})|{BRACKET}", text):
        if match["cut"] is None:
            depth += (match[0] in OPENING) - (match[0] in CLOSING)
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in [*parts, text[start:]]]


def _brackets(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) if one pair of brackets encloses the whole text."""
    match = re.fullmatch(r"(\\\{|\\langle|\(|\[)(.*)(\\\}|\\rangle|\)|\])", text, re.DOTALL)
    steps = ((token in OPENING) - (token in CLOSING) for token in re.findall(BRACKET, match[2] if match else ""))
    depths = list(itertools.accumulate(steps, initial=0))
    return match.groups() if match and min(depths) == depths[-1] == 0 else None


def _choice(text: str) -> Value | None:
    """(C), \\text{C}, option C, C. 12. Not "(a) 5, (b) 6", which are two answers."""
    match = CHOICE.fullmatch(re.sub(r"^(?:\\text\s*\{\s*)+([^{}]*)\}", r"\1", text))
    is_text = text.startswith("\\text")
    if not match or not (match[1] or match[3] or is_text) or DENIALS.search(match[4]):
        return None
    if match[4] and not (match[3] or is_text):
        return None
    return ("choice", match[2].upper(), parse_value(clean(match[4])) if match[4] else None)


def _named(text: str) -> Value | None:
    """x = 5, f(x) = x^2, x in (0, 1); equations and relations that are no such definitions; 2 + 3 = 5 is 5."""
    if len(_split(text, COMMA)) > 1 or len(_split(text, OR)) > 1:
        return None
    terms, sides = _split(text, RELATION), _split(text, EQUALS)
    if len(terms) > 1:
        signs = RELATION.findall(text)  # also those in brackets, which part no terms
        is_whole = len(sides) == 1 and all(terms) and len(signs) == len(terms) - 1
        return _relation(terms, signs) if is_whole else ("words", text)
    if NAMES.fullmatch(sides[0]) and len(sides) == 2:  # (x, y) = (1, 2)
        values = parse_value(sides[1])
        names = re.findall(r"[A-Za-z]", sides[0])
        return values if names == sorted(names) or values[0] != "sequence" else ("words", text)
    named = NAMED.fullmatch("=".join(sides))
    if named and (len(sides) > 1 or "\\in" in text):
        rest = sides[1:] or [named[2].strip()]
        return ("named", re.sub(r"\\text|[\s{}]", "", fold(named[1])), _chain(rest), f"{sides[0]} = {rest[-1]}")
    if len(sides) > 1 and CONSTANT.fullmatch(sides[0]) and CONSTANT.fullmatch(sides[-1]):
        return _chain(sides)  # 2 + 3 = 5
    if len(sides) > 2:
        return ("words", text)  # 2x = 10 = 5
    return ("equation", text) if len(sides) == 2 and all(sides) else None


def _chain(sides: list[str]) -> Value:
    """The last side, with the other sides without letters, which have to equal it."""
    values = [parse_value(side) for side in sides[:-1] if CONSTANT.fullmatch(side)] + [parse_value(sides[-1])]
    return ("chain", tuple(values)) if len(values) > 1 else values[0]


def _relation(terms: list[str], signs: list[str]) -> Value:
    """0 < x <= a as the interval that it describes, with the name of its variable; another relation as it is."""
    if all(sign in (">", r"\ge") for sign in signs):  # everything the one way round
        terms, signs = terms[::-1], ["<" if sign == ">" else r"\le" for sign in signs[::-1]]
    if len(terms) == 2 and VARIABLE.fullmatch(terms[0]) and terms[1] not in ("x", "y", "z"):
        if signs == [r"\ne"]:  # x \ne 2 is (-\infty, 2) \cup (2, \infty)
            return ("union", (_relation(terms, ["<"]), _relation(terms[::-1], ["<"])))
        terms, signs = [r"-\infty", *terms], ["<", *signs]
    elif len(terms) == 2 and VARIABLE.fullmatch(terms[1]):
        terms, signs = [*terms, r"\infty"], [*signs, "<"]
    if len(terms) == 3 and VARIABLE.fullmatch(terms[1]) and {*signs} <= {"<", r"\le"}:
        brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
        return ("sequence", brackets, (parse_value(terms[0]), parse_value(terms[2])), (terms[1],))
    text = "".join(part for pair in zip(terms, [*signs, ""], strict=True) for part in pair)
    return ("equation", text) if len(terms) == 2 else ("words", text)


def _collection(text: str) -> Value | None:
    parts = _split(text, SEMICOLON if all(sign in text for sign in ",=;") else OR)  # x=1, y=2; x=2, y=1
    if len(parts) > 1 and all(parts):
        values = tuple(parse_value(part) for part in parts)
        are_intervals = any(value[0] == "sequence" and len(value[3]) == 1 for value in values)  # x < 1 or x > 2
        return ("union", values) if "\\cup" in text or are_intervals else ("list", _flat(values))
    parts = [re.sub(r"^and\s", "", part).strip() for part in _split(text, COMMA) if part and part != "and"]
    if len(parts) > 1:
        values = _flat(tuple(parse_value(part) for part in parts))
        return _point(values) or ("list", values)
    inner = _brackets(text)
    if "matrix" in text:
        return None
    if inner is None:
        is_double = text.count("\\pm") == 1
        return ("list", tuple(parse_value(text.replace("\\pm", sign)) for sign in "+-")) if is_double else None
    opening, inside, closing = inner
    builder = BUILDER.fullmatch(inside)
    if builder and opening == "\\{":
        return parse_value(builder[1].strip())
    items = [item for item in _split(inside, COMMA) if item]
    if opening in ("\\{", "[", "\\langle") or len(items) > 1:
        values = tuple(parse_value(item) for item in items)
        brackets = "()" if opening == "\\langle" else opening + closing
        return ("set", _flat(values)) if opening == "\\{" else ("sequence", brackets, values, ())
    return parse_value(inside.strip()) if inside.strip() else None


def _point(values: tuple[Value, ...]) -> Value | None:
    """y=2, x=1 as (1, 2), in the order of its names; None for 1, 2 and for x=1, x=2."""
    names = sorted(value[1] for value in values if value[0] == "named")
    if len(set(names)) < len(values):
        return None
    return ("sequence", "()", tuple(value[2] for value in sorted(values, key=lambda value: value[1])), tuple(names))


def _flat(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """1, \\pm 2 -> 1, 2, -2."""
    return tuple(item for value in values for item in (value[1] if value[0] == "list" else (value,)))


def _is_text(words: str, is_marked: bool) -> bool:
    """True for yes, Monday, no solution; false for what may be a product of letters (abc, GMm), unless it is marked."""
    if words.casefold() in ("yes", "no"):
        return True
    is_product = re.fullmatch(r"[A-Za-z]{3}", words) or (words.isalpha() and re.search(r"[A-Z]", fold(words)))
    may_be_text = is_marked or (re.search(r"[^\W\d_]{3,}", words) and not is_product)
    return bool(may_be_text and re.fullmatch(r"[^\W\d_][^\d_+*/^=<>\\(){}\[\]|]*", words))


def _quantity(text: str) -> Value | None:
    """Based numbers, times and ratios, words, money, and what has a unit."""
    if based := BASED.fullmatch(text):
        return ("words", f"{based[1].lstrip('0').upper()}_{WORDS.get(based[2], based[2])}")
    if len(parts := _split(text, COLON)) > 1 and all(parts):
        values = tuple(parse_value(part) for part in parts)
        if all(value[0] in ("number", "formula") for value in values):
            return ("sequence", ":", values, ())
    if UNCOUNTED.search(text):
        return ("words", re.sub(r"\s", "", text))
    words = " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).split())
    if _is_text(words, is_marked="\\text" in text):
        plain = " ".join(re.sub(r"[^\w ]", " ", fold(words)).split())
        return ("words", re.sub(r"^(?:an?|the) (?=\w{3})", "", plain, flags=re.IGNORECASE))
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
