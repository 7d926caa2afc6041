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

SYMBOLS = str.maketrans({
    "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "×": r"\times ",
    "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "−": "-", "–": "-", "—": "-", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "θ": r"\theta ", "√": r"\sqrt ", "€": r"\euro ", "£": r"\sterling ", "’": "'", "≈": r"\approx ",
    "≃": r"\approx ", "⁻": "-", "≡": r"\equiv ", "ℤ": r"\mathbb{Z}", "∖": r"\setminus ", 
    "₹": r"\rupee ", "¥": r"\yuan ", "￥": r"\yuan ",
})  # fmt: skip
WORDS = {word: n for n, word in enumerate(re.findall(r"\w+", """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty
    """))} | {"十" + digit: n for n, digit in enumerate("一二三四五六七八九", start=11)}  # fmt: skip
CHINESE_DIGITS = "零一二三四五六七八九十"
SPOKEN = {
    r"\mathbb{R}": r"all real(?: number)?s?|\(-\\infty ?, ?\+?\\infty ?\)", "does not exist": "dne",
    r"\emptyset": r"(?:there (?:is|are) )?no (?:real )?(?:solutions?|roots?)|(?:the )?empty set",
}  # fmt: skip
COMMANDS = {name: meaning for meaning, names in {
    r"\frac": "dfrac tfrac cfrac", r"\ne ": "neq", r"\le ": "leq leqslant", r"\ge ": "geq geqslant", "<": "lt",
    ">": "gt", r"\{": "lbrace", r"\}": "rbrace", r"\approx ": "simeq", r"\emptyset": "varnothing", ":": "colon",
    r"^\circ": "degree", r"\mathbb{R}": "R", r"\log_{10} ": "lg", r"\sterling ": "pounds",
    " ": "displaystyle textstyle limits nolimits bf rm large Large",
}.items() for name in names.split()}  # fmt: skip

BRACED = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"  # with up to two more pairs of braces in it
CURRENCY = "dollar|euro|sterling|rupee|yuan"
FUNCTION = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|gcd|lcm"


def _open_bracket(match: re.Match) -> str:
    """]0, 1[ as (0, 1), for any interval."""
    return ("(" if match[1] == "]" else "[") + match[2] + (")" if match[3] == "[" else "]")


def _unit_fraction(match: re.Match) -> str:
    r"""\frac{\text{km}}{\text{h}} as \text{km/h}."""
    below = re.sub(r"\\(?:text|mathrm)|[{}]", " ", match[2])
    return rf"\text{{{match[1]}/{below}}}"


def _plain_scripts(match: re.Match) -> str:
    r"""\text{m s^{-1}} without braces inside."""
    inside = re.sub(r"([_^])\{([-+0-9A-Za-z]+)\}", r"\1\2", match[1])
    inside = re.sub(r"\\mu\s*", "μ", inside.replace(r"\Omega", "Ω"))
    return rf"\text{{{inside}}}"


def _rows(match: re.Match) -> str:
    r"""A system as a list, an equation over several lines as one line; a function's branches with \cases."""
    rows = re.sub(r"[\s,;.]*(?:\\\\)?\s*$", "", match[2])
    if match[1] == "cases" and "&" in rows:
        rows = re.sub(r"[\s,]*&[\s,]*(?:\\text\s*\{\s*(?:if|for|when)\s*\})?", "&", rows)
        return rf"\cases{{{rows}}}"
    rows = re.sub(r"[\s,;.]*\\\\(?:\[[^]]*\])?\s*(?!&?\s*=|\s)", ", ", rows)
    return re.sub(r"\\\\|&", " ", rows)


def _integer_parameter(match: re.Match) -> str:
    r"""k\pi, k \in \mathbb{Z} as n\pi."""
    return re.sub(rf"(?<![A-Za-z\\]){match[2]}(?![A-Za-z])", "n", match[1])


# Pattern and replacement, in order; "x?" stands for: not followed by a letter.
REWRITES = [(re.compile(pattern.replace("x?", "(?![A-Za-z])")), replacement) for pattern, replacement in [
    (rf"\\(?:operatorname\*?|mathrm|text|rm)\s*\{{\s*({FUNCTION}|mod)\s*\}}", r"\\\1 "),
    (r"\\([A-Za-z]+)", lambda m: COMMANDS.get(m[1], m[0])),
    (r"(?:US\s*)?\\\$|US\s*\$", r"\\dollar "),
    (r"(?<![A-Za-z])(?:Rs\.?|INR)\s*(?=\d)", r"\\rupee "),
    (r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\s*\\[!,])\s*(?=\d{3}(?!\d))", ","),  # 1\,000 and 1{,}000
    (r"(?<![\d.,])\d{1,3}(?:[ ~]\d{3})+(?![\d/]| ?\d)", lambda m: re.sub("[ ~]", "", m[0])),  # 1 000 000
    # Delimiters, sizes, spaces, fonts
    (r"\\(?:tag|label)\*?\s*\{[^{}]*\}", ""),
    (r"(?:\\left\s*\\\{\s*)?\\begin\{(cases|aligned|align\*?|gathered|split|equation\*?|array(?=\}\{[lc]\}))\}"
     r"(?:\{[lc]\})?(.*?)\\end\{\1\}(?:\s*\\right\.)?", _rows),
    (r"(?:[\s,;.]*\\\\)+(?![A-Za-z]{2}|.*\\end\b)", ", "),
    (r"\\(?:left|right|[bB]igg?[lr]?)x?\.?|\\!", ""),
    (r"(?<!\\)(?:\\[()\[\]](?!\d*pt)|\$)", " "),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad|\\(?:text)?color\s*\{\w+\}", " "),
    (r"\\frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}\s*"
     r"\{((?:\s*\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?)+)\s*\}", _unit_fraction),
    (r"\\mux?\s*\\(?:text|mathrm)\s*\{\s*", r"\\text{μ"),
    (r"(\d)\s*(?:\\(?:text|mathrm)\s*\{\s*)?([kM]?)\}?\s*\\Omegax?\s*$", r"\1 \\text{\2Ω}"),
    (r"(?<=[\d/}])(\s*)\\mathrm\s*\{\s*([A-DF-Za-cf-hj-z])\s*\}", r"\1\\text{\2}"),  # a unit
    (r"(\\(?:mathbf|boldsymbol|vec)\s*\{?\s*[A-Za-z]\s*\}?\s*)\\timesx?", r"\1\\wedge "),  # a product of vectors
    (rf"\\(?:mathbf|mathit|boldsymbol|bm|pmb|underline)\s*{BRACED}|\\(?:mathrm|vec)\s*\{{\s*([a-zA-Z])\s*\}}",
     r" \1\2 "),
    (r"^\s*\\(?:boxed|fbox|underline)\s*\{(.*)\}\s*$", r"\1"),
    (r"\\(?:hat|vec)\s*\{?\s*\\?([ijk])(?:math)?\s*\}?(?![A-Za-z])", r" \1 "),
    (r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}"),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)|math(?:rm|sf)|emph|mbox|operatorname|ce)\s*\{", r"\\text{"),
    (rf"\\text\s*{BRACED}", _plain_scripts),
    (r"\\text\{\s*(?i:(?:the )?(?:final )?answer(?: is|:))\s*([^{}]*)\}", r" \1 "),
    (r"\^\s*\{?\\circx?\s*\}?\s*(?:\\text\{\s*)?([CF])(?![A-Za-z])\s*\}?", r"\\text{ deg\1}"),
    (r"\\text\s*\{\s*(\\[a-z]+ ?|[+-]?\d[\d.,/]*)\s*\}|^\\text\s*\{\s*((?:\d|[A-J](?:,|\s(?:and|or)\b))[^{}]*)\}$", r" \1\2 "),
    (r"\\text\s*\{([^{}]*\S)\s+(and|or)\s*\}", r"\\text{\1} \2 "),
    (r"\\text\s*\{\s*,?\s*(?:or|或者?),?\s*\}|(?<=[\dA-Za-z})\]])\s*或者?\s*(?=[\dA-Za-z\\({-])", " or "),
    (r"\\text\s*\{\s*,?\s*(?:and|和),?\s*\}|(?<=[\dA-Za-z})\]①-⑳])\s*[和与]\s*(?=[\dA-Za-z\\({①-⑳-])", " , "),
    # Synonyms
    (r"\\notx?\s*=|(?<![\d)])!=", r"\\ne "),
    ("<=", r"\\le "),
    (">=", r"\\ge "),
    (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
    (r"\\\{\s*\\\}", r"\\emptyset"),
    (r"\^\s*\{?\s*((?:\\prime\s*)+)\}?", lambda m: "'" * m[1].count("p")),
    (r"^\\mathbb\{R\}\s*(?:\\setminus|\\backslash|-)\s*\\?\{([^{},]*?)\\?\}$", r"x \\ne \1"),
    (r"\{([:,])\}", r"\1"),
    (r"^\s*(?:=|\\approxx?)", ""),
    (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^"),
    # What LaTeX allows to be left out, and plain text for LaTeX
    (r"\\(frac|binom)\s*(?:\{([^{}]*)\}|(\\pi|\d|(?<=\s)\w))\s*(\w)", r"\\\1{\2\3}{\4}"),
    (r"\\log_\s*\{?\s*e\s*\}?(?![A-Za-z])", r"\\ln "),
    (r"^(-?\d*\.\d*)\((\d+)\)$", r"\1\\overline{\2}"),  # 0.(3)
    (r"(?:(?<=\\cup)|(?<=\\cap)|(?<![\w)}\]]))\s*([\[\]])([^\[\]()]+?[,;][^\[\]()]+?)([\[\]])(?!\w)", _open_bracket),
    (r"(?<![A-Za-z])\(?\s*\\?[pb]?modx?\s*\{?\s*(\w+)\s*\}?\s*\)?", r"\\pmod{\1}"),
    (r"^([二三四五六七八九十])分之([一二三四五六七八九])$",
     lambda m: rf"\frac{{{CHINESE_DIGITS.index(m[2])}}}{{{CHINESE_DIGITS.index(m[1])}}}"),
    (r"(?<=[a-z)}\d|])\s*\+\s*(?:[Kc]|\\text\{\s*const(?:ant)?\.?\s*\})\s*$", "+C"),  # of an integral
    (r"\\sqrt\s+(\d+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"(?:\\sqrt|(?<![\\A-Za-z])sqrt)\s*(\[\d+\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
    (r"(?<![\\A-Za-z])pix?", r"\\pi "),
    (r"(?<![\\A-Za-z])infinityx?", r"\\infty "),
    (r"(?<![\d.}])(\d+)/(\d+)\s*(?=[A-Za-z])", r"\\frac{\1}{\2}"),  # 1/2x
    (r"\{([^{}]*)\\choosex?([^{}]*)\}|(\w+)\s*\\choosex?\s*(\w+)", r"\\binom{\1\3}{\2\4}"),
    (r"(?<![A-Za-z\\])C(?:\(\s*(\d+)\s*,\s*(\d+)\s*\)|\s*_\s*\{?(\d\d+|[3-9]|n)\}?\s*\^\s*\{?(\d+|[kmr])\}?)",
     r"\\binom{\1\3}{\2\4}"),
    (r"^(?i:(?:the )?(?:final )?answer(?: is|:)|so|thus|hence|therefore|then|it is|it's|that is)\b[,:]?\s+(?=\S)", ""),
    (rf"^\s*([+-]?)\s*\\({CURRENCY})x?\s*((?:(?!\\(?:{CURRENCY})).)*\S)\s*$", r"\1\3 \\text{\2}"),
    (r"\b([ap])\.\s?m\b\.?", r"\1m"),
    (r"^\s*\{([^{}]*)\}\s*$", r"\1"),
    (r"\s\(([^()]*(?:[<>]|\\(?:in|[lgn]e)x?)[^()]*)\)\s*$", r", \1"),  # y = 2x (x > 0)
    (r"^(.+?)[\s,;(]+(?:where\s|for\s)?\s*([a-z])\s*\\in\s*\\mathbb\{Z\}$", _integer_parameter),
    (r"^\(?[aA]\).*[^(\w]\(?[bB]\).*$", lambda m: re.sub(r"[\s,;]+(?=\(?[b-hB-H]\)\s)", ", ", m[0])),
]]  # fmt: skip


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """The answer in one spelling: ASCII and LaTeX, no delimiters, no spacing commands, no full stop."""
    if len(text) > 4 * MAX_FORMULA:
        return text
    text = re.sub(r"([⁰¹²³⁴-⁹⁺⁻ⁿ]+)", r"^{\1}", text)
    text = re.sub(r"([₀-₉]+)", r"_{\1}", text)
    # Not of ①③, which is no 13.
    text = re.sub(r"[^\u2460-\u24ff]+", lambda m: unicodedata.normalize("NFKC", m[0]), text.translate(SYMBOLS))
    visible = (c for c in text if c.isspace() or unicodedata.category(c) not in ("Cf", "Cc"))
    text = " ".join("".join(visible).split())
    text = text.strip("`*" if not text.endswith("^*") else "`").strip()
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(",;:" if text.rstrip().endswith("..") else ".,;:。").strip()
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip().lower()
    for meaning, phrase in SPOKEN.items():
        if re.fullmatch(phrase, words):
            return meaning
    return str(WORDS.get(words, text))


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
SCALED = re.compile(rf"(.+?)\s*(?:\\text\{{\s*|\()?({'|'.join(SCALES)})\s*[)}}]?")


def number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction, mixed or repeating number, 3.5 million or 2x10^5; else None."""
    text = LATEX_FRACTION.sub(r" \1/\2 ", text).strip()
    match = NUMBER.fullmatch(text)
    if not match:
        scaled = SCALED.fullmatch(text)
        inner = number(scaled[1]) if scaled else None
        return None if inner is None else inner * SCALES[scaled[2]]
    part = {name: digits.replace(",", "") for name, digits in match.groupdict("0").items()}
    result = Fraction(part["digits"]) * Fraction(10) ** int(part["power"]) + int(part["whole"])
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
    rad radian, J joule, N newton, W watt, V volt, Hz hertz, Ω ohm, A ampere amp, K kelvin, Pa pascal, degC celsius,
    degF fahrenheit, people person 人, child children, man men, woman women, mol mole, day 天 日, week 周, year 年,
    month, cent, am AM, pm PM, euro, sterling, 元 yuan rmb, rupee inr, yen, 岁, 月, 个月, 分, 吨, 分米, 公顷
""") for name in names.split()}  # fmt: skip
SI = re.compile(r"[pnμmckMGT]?(?:[mgsAKNJWVCFTHL]|mol|Hz|Pa|Ω|eV|Wb|cal|bar)")  # a prefix and a symbol
COUNTED = r"[个只本块支张辆名位条棵件次种组页台间根颗盒箱袋朵套双](?![半十百千万亿])[\u4e00-\u9fff]*"  # 3个苹果
# What says something about the value, behind it or on the left of "=": 7 dozens, 7 tenths, 7 more,
# half of x = 7
NO_UNITS = {*SCALES, *WORDS, *re.findall(r"\w+", """
    about above additional almost always and approx approximately around as at base below billions but centuries
    couples decades does double dozens factorial false fewer gross guess half halves hundreds if inverse is
    least less log maybe millions minus mod more most nearly negative never no not ones or others over pairs
    percents plus quarters reciprocal root roughly scores sin square squared squares tens than thirds this
    thousands times to trap trillion triples twice twins unless versus vs was wrong wrongly yes""")}  # fmt: skip
UNIT_WORD = r"[A-Za-zμΩ\u4e00-\u9fff]+\.?(?:\s*\^\s*(?:\{-?\d\}|-?\d))?"
QUANTITY = re.compile(
    rf"(?P<value>.*(?:[\d}})]|\\pi|{'|'.join(SCALES)}))\s*(?P<unit>\\?%|\^\\circ\s*"
    r"|(?:\\text\{[^{}]*\}(?:\s*\^\s*(?:\{-?\d\}|-?\d))?\s*(?:/|\\cdot)?\s*)+"
    rf"|\([^()]+\)|(?:(?<=\s)|(?<=[\d)}}])){UNIT_WORD}(?:(?:\s*/\s*|\s+){UNIT_WORD})*)", re.DOTALL,
)  # fmt: skip


def unit(text: str, is_apart: bool) -> str | None:
    """One spelling per unit; None for what is no unit: "more" and "dozens" say something about the value.

    A unit is made of known names, abbreviations and plurals of any noun. `is_apart`: a letter is no factor ("5 m").
    """
    is_marked = "\\text" in text
    text = re.sub(r"\\text|\\cdot|[{}().]|^\W*in\s(?=\s*\w)", " ", text)
    text = re.sub(r"\\?%", " percent ", text.replace("^\\circ", " deg "))
    text = re.sub(r"\bper\b|每", "/", re.sub(r"(?i)\bdeg(?:ree)?s?\s(?=\s*[cf]\w)", "", text))
    text = re.sub("平方", " square ", re.sub("立方", " cubic ", text))
    text = re.sub(r"\bsquared\b", "^2", re.sub(r"\bcubed\b", "^3", text))
    if not re.fullmatch(r"(?:[\s/]|\^\s*-?\d|[A-Za-zμΩ\u4e00-\u9fff])*", text):
        return None
    powers: dict[str, int] = {}
    sign, power, name = 1, 1, ""
    for word in re.findall(r"[A-Za-zμΩ]+|[\u4e00-\u9fff]+|-?\d|/", text):
        if word == "/":
            sign = -1
        elif word[-1].isdigit() and name:
            powers[name] = powers.get(name, 1) * int(word)
        elif word.lower() in ("square", "sq", "cubic", "cu"):
            power = 3 if word.lower().startswith("cu") else 2
        elif word.lower() not in ("of", "the", "old", "left"):
            found = _unit_name(word, is_apart or bool(powers), is_marked)
            is_adjective = not powers and len(word) > 1 and re.search(r"s\b", text)  # blue marbles
            if word in ("K", "T") and not powers:
                return None  # 5K is 5,000
            if word.lower() in NO_UNITS or (found is None and (not is_adjective or re.search("ths?$", word))):
                return None
            if found:
                name = found
                powers[name] = powers.get(name, 0) + sign * power
                power = 1
    return "·".join(f"{name}{power if power != 1 else ''}" for name, power in sorted(powers.items())) or None


def _unit_name(word: str, is_apart: bool, is_marked: bool) -> str | None:
    """The name of a unit, None for a word that is none."""
    folded = word.lower() if len(word) > 2 else word
    if len(word.encode()) == 1 and not is_apart:
        return None
    name = UNITS.get(word) or UNITS.get(folded) or UNITS.get(folded.removesuffix("s"))
    if name is None and SI.fullmatch(word) and (is_marked or (len(word) > 1 and word[-1] not in "AKCFTH")):
        name = word
    if name is None and re.fullmatch(rf"\w\w+[^\Ws]s|{COUNTED}", folded) and not folded.endswith("ths"):
        name = folded.removesuffix("s")
    return name


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
NAMED = re.compile(rf"({NAME}(?:\s*:\s*{NAME})*)\s*(?:=|\\in(?![A-Za-z]))\s*(.+)", re.DOTALL)
BUILDER = re.compile(rf"\s*{NAME}(?:\s*\\in\s*\\mathbb\{{R\}})?\s*(?:\\mid|:|\|)\s*(.+)")
CHOICE = re.compile(r"(?:option |choice |answer )?\s*\(?\s*([A-J])(?![A-Z])\s*([).:、]*)(.*)", re.I | re.DOTALL)
DENIALS = re.compile(  # behind a letter and its mark: an operator; another option; a word that takes it back
    r"^[-+*/^_=(<>']|^\s*(?:[,/&]|(?i:or|and|but|或|和)\s|\(?[A-J][).]*$)|(?<!\w)\([A-Ja-j]\)|(?<![\w(])[A-Ja-j]\)"
    r"|(?<![\w.(])[A-J](?:[.、](?=.*\w)|:(?![A-J]\b))|\b(?i:maybe|perhaps|not|but) \(?[A-J]\b|^ [A-Z]\. [A-Z]"
    r"|^\s*(?i:is|was|can|would)\b.*\b(?i:wrong|false|incorrect|excluded|not (?:correct|right|true|the))\b"
)
FOREIGN = re.compile(r"[^\W\d_\x00-\x7fͰ-Ͽ]")  # a letter that is neither Latin nor Greek, or has an accent
BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?(?:\\text\{)?\s*(\d+|two|three|four|five|six|seven|eight|nine)\s*\}*")
VARIABLE = re.compile(r"[A-Za-z](?:_\w)?(?:\(\w\))?|\\(?!pi|infty)[a-z]+")
# What parts a text, see `_split`
RELATION = r"\\[lg]e(?![A-Za-z])|\\ne(?![A-Za-z])|(?<!\\)[<>]"
EQUALS = r"(?<![<>:\\])="
COMMA = r"、|(?<!\d),|,(?!\d{3}(?!\d))|;|,\s|(?<=[\s\d})])and(?=[\s(\\])"
OR = r"(?<=[\s\d})\]])or(?=[\s\\(\d-]|\w(?:\(\w\))?\s*=)|\\cup(?![A-Za-z])"
# What SymPy has no value for is compared as text.
UNCOUNTED = re.compile(
    r"\\(?:equiv|approx|[pb]?mod|[lc]?dots|mid|parallel|perp|neg|land|wedge|to|rightarrow|implies|iff|cases|angle|triangle)(?![A-Za-z])|\.\.|\?"
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
    depth = 0
    for token in re.findall(BRACKET, match[2]):
        depth += (token in OPENING) - (token in CLOSING)
        if depth < 0:
            return None
    return match.groups() if depth == 0 else None


def _choice(text: str) -> Value | None:
    """(C), \\text{C}, option C, C. 12. Text behind a letter and its mark is the option's. Not "(a) 5, (b) 6"."""
    match = CHOICE.fullmatch(re.sub(r"^(?:\\text\s*\{\s*)+([^{}]*)\}", r"\1 ", text))
    if not match or re.fullmatch("[A-Za-z]", text):
        return None
    letter, mark, rest = match[1].upper(), match[2], match[3].strip()
    if rest and (not mark or DENIALS.search(re.sub(r"\([^()]{2,}\)", "()", match[3]))):
        return None
    return ("choice", letter, parse_value(clean(rest)) if rest else None)


def _named(text: str) -> Value | None:
    """x = 5, f(x) = x^2, x in (0, 1); equations and relations that are no such definitions; 2 + 3 = 5 is 5."""
    if len(_split(text, f"{COMMA}|{OR}")) > 1:
        return None
    terms, sides = _split(text, RELATION), _split(text, EQUALS)
    if len(terms) > 1:
        signs = re.findall(RELATION, text)  # also those in brackets, which part no terms
        is_whole = len(sides) == 1 and all(terms) and len(signs) == len(terms) - 1
        return _relation(terms, signs) if is_whole else _text(text)
    named = NAMED.fullmatch("=".join(sides))
    match sides:
        case [point, values] if NAMES.fullmatch(point):  # (x, y) = (1, 2)
            names, value = re.findall(r"[A-Za-z]", point), parse_value(values)
            return value if names == sorted(names) or value[0] != "sequence" else _text(text)
        case [first, *rest] if named and (rest or "\\in" in text):
            rest = rest or [named[2].strip()]
            return ("named", re.sub(r"\\text|[\s{}]", "", fold(named[1])), _chain(rest), f"{first} = {rest[-1]}")
        case [first, *_, last] if CONSTANT.fullmatch(first) and CONSTANT.fullmatch(last):
            return _chain(sides)  # 2 + 3 = 5
        case [_, _, _, *_]:
            return _text(text)  # 2x = 10 = 5
        case [left, right] if left and right:
            return ("equation", text)
    return None


def _chain(sides: list[str]) -> Value:
    """The last side, with the other sides without letters, which have to equal it."""
    *firsts, last = sides
    sides = [*filter(CONSTANT.fullmatch, firsts), last]
    values = _parse_all(sides)
    return ("chain", values) if len(values) > 1 else values[0]


def _relation(terms: list[str], signs: list[str]) -> Value:
    """0 < x <= a as the interval that it describes, with the name of its variable; another relation as it is."""
    if all(sign in (">", r"\ge") for sign in signs):  # everything the one way round
        terms, signs = terms[::-1], ["<" if sign == ">" else r"\le" for sign in signs[::-1]]
    if len(terms) == 2 and r"\ne" not in signs:
        for (size, bound), is_above in ((terms, False), (terms[::-1], True)):
            inner = re.fullmatch(r"\|([^|]+)\|", size)
            if inner and VARIABLE.fullmatch(inner[1]):
                low, name = f"-({bound})", inner[1]
                if not is_above:
                    return _relation([low, name, bound], signs * 2)
                return ("union", (_relation([name, low], signs), _relation([bound, name], signs)))
    match terms:
        case [name, bound] if VARIABLE.fullmatch(name) and bound not in ("x", "y", "z"):
            if signs == [r"\ne"]:  # x \ne 2 is (-\infty, 2) \cup (2, \infty)
                return ("union", (_relation([name, bound], ["<"]), _relation([bound, name], ["<"])))
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
    if len(parts) > 1 and all(parts):
        values = _parse_all(parts)
        if all(re.fullmatch("[A-J①-⑳]", part) for part in parts):
            return ("union", values)  # A or B, which is no AB
        are_intervals = any(value[0] == "sequence" and len(value[3]) == 1 for value in values)  # x < 1 or x > 2
        return ("union", values) if "\\cup" in text or are_intervals else ("list", _flat(values))
    parts = [re.sub(r"^and\s", "", part).strip() for part in _split(text, COMMA) if part and part != "and"]
    if len(parts) > 1:
        values = _flat(_parse_all(parts))
        if all(value[0] == "choice" for value in values):  # (a) 2, (b) 9
            return ("sequence", "", tuple(sorted(values, key=lambda value: value[1])), ())
        return _point(values) or _between(values) or ("list", values)
    amounts = _parse_all(AMOUNTS.split(text)) if AMOUNTS.search(text) else ()
    if amounts and all(value[0] == "number" and value[2] for value in amounts):  # 5 ft 11 in
        return ("sequence", "", amounts, ())
    if column := COLUMN.fullmatch(text):
        return ("sequence", "()", _parse_all(re.split(r"\s*\\\\\s*", column[1].strip())), ())
    inner = _brackets(text)
    if inner is None:
        if text.count("\\pm") != 1:
            return None
        return ("list", _parse_all([text.replace("\\pm", sign) for sign in "+-"]))
    opening, inside, closing = inner
    builder = BUILDER.fullmatch(inside)
    if builder and opening == "\\{":
        return parse_value(builder[1].strip())
    items = [item for item in _split(inside, COMMA) if item]
    if opening == "\\{":
        return ("set", _flat(_parse_all(items)))
    if opening in ("[", "\\langle") or len(items) > 1:
        brackets = "()" if opening == "\\langle" else opening + closing
        return ("sequence", brackets, _parse_all(items), ())
    return parse_value(inside.strip()) if inside.strip() else None


def _point(values: tuple[Value, ...]) -> Value | None:
    """y=2, x=1 as (1, 2), in the order of its names; None for 1, 2 and for x=1, x=2."""
    items = {value[1]: value[2] for value in values if value[0] == "named"}
    if len(items) < len(values):
        return None
    names = tuple(sorted(items))
    return ("sequence", "()", tuple(items[name] for name in names), names)


def _between(values: tuple[Value, ...]) -> Value | None:
    """0 < x, x < 1 as the interval between them."""
    if len(values) != 2 or any(value[0] != "sequence" or not value[3] for value in values):
        return None
    first, second = values if values[0][2][1][1] == r"\infty" else values[::-1]
    (low, no_high), (no_low, high) = first[2], second[2]
    is_bounded = no_high[1] == r"\infty" and no_low[1] == r"-\infty" and low[0] == high[0] == "number"
    if first[3] == second[3] and is_bounded and low[1] < high[1]:
        return ("sequence", first[1][0] + second[1][1], (low, high), first[3])
    return None


def _flat(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """1, \\pm 2 -> 1, 2, -2."""
    return tuple(item for value in values for item in (value[1] if value[0] == "list" else (value,)))


SUBSTANCE = re.compile(  # MgCl2, Al2(SO4)3, with capitals alone: EDF; GMm may be a product
    r"(?=.*[A-Za-z)]\d|[A-Z]+$)\d*(?:(?:[A-Z][a-z]?|\((?:[A-Z][a-z]?\d*)+\))\d*){2,}(?:\^[\d+-]+)?"
)
DATED = re.compile(  # 40-45, 3-2, 2022-07-11, 09/06/2000
    r"\d+(?:\.\d+)?(?:\s*-\s*\d+(?:\.\d+)?)+|\d+(?:\s*/\s*\d+){2,}|0\d+/\d+|\d+/0\d+"
)


def _is_formula(text: str) -> bool:
    """False for substances and capitals alone, for letters before digits (9 R 4) and digits apart (2 4 1)."""
    if SUBSTANCE.fullmatch(re.sub(r"\\text|[\s_{}]", "", text)):
        return False
    signs = re.sub(rf"\\[A-Za-z]+|(?<![A-Za-z])(?:{FUNCTION}|max|min|mod)", r"\\", text)
    signs = re.sub(r"_\s*(?:\{[^{}]*\}|\w)", "", signs)
    signs = re.sub(r"\^\s*(?:\{[^{}]*[^{}+-]\}|\w(?![+-]$))", "^", signs)
    return not re.search(r"[A-Za-z]\s*\d|[\d)]\s+\d|\^(?:\{\d*[+-]\}|\d*[+-]$)", signs)


def _text(text: str) -> Value:
    """A text equals itself alone. Spaces do not count, but between digits; nor do fonts, and the case of words."""
    text = re.sub(r"\\text|[{}_]", "", fold(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)))
    return ("words", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))


def _is_text(words: str, is_marked: bool) -> bool:
    """True for yes, Monday, no solution; false for what may be a product of letters (abc, GMm), unless it is marked."""
    if words.casefold() in ("yes", "no"):
        return True
    is_product = re.fullmatch(r"[A-Za-z]{3}", words) or (words.isalpha() and re.search(r"[A-Z]", fold(words)))
    may_be_text = is_marked or FOREIGN.search(words) or (re.search(r"[^\W\d_]{3,}", words) and not is_product)
    return bool(may_be_text and re.fullmatch(r"[^\W\d_][^\d_+*/^=<>\\(){}\[\]|]*", words))


def quantity(text: str, is_apart: bool = False) -> Value | None:
    """Based numbers, times and ratios, words, money, and what has a unit. `is_apart`: also of one letter (0.64N)."""
    if based := BASED.fullmatch(text):
        digits, base = based[1].lstrip("0").upper(), f"base {WORDS.get(based[2], based[2])}"
        return ("number", Fraction(digits), base) if digits.isdigit() else ("words", f"{digits}{base[5:]}")
    parts = _split(text, ":")
    if len(parts) > 1 and all(parts):
        values = _parse_all(parts)
        if all(value[0] in ("number", "formula") for value in values):
            return ("sequence", ":", values, ())
    if UNCOUNTED.search(text):
        return _text(text)
    words = " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).split())
    if _is_text(words, is_marked="\\text" in text):
        folded = words.casefold() if FOREIGN.search(words) else fold(words)
        plain = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in folded)
        return ("words", re.sub(r"^(?:an?|the) (?=\w{3})|\s", "", plain.strip(), flags=re.IGNORECASE))
    written = QUANTITY.fullmatch(text)
    number_text, unit_text = written.group("value", "unit") if written else ("", "")
    if written and not ("circ" in unit_text and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", number_text)):
        match parse_value(number_text.strip()):
            case ("number" | "formula" as kind, value, ""):
                is_spaced = kind == "number" and text[written.start("unit") - 1].isspace()
                noun = unit_text.strip("()")
                name = unit(noun, is_apart or is_spaced or "\\text" in noun)
                is_noun = _is_text(noun, is_marked=False) and NO_UNITS.isdisjoint(noun.lower().split())
                if name is None and unit_text[0] == "(" and kind == "number" and is_noun:
                    name = fold(noun)  # 14 (pieces of candy)
                if name is not None:
                    return (kind, value, name)
    says_more = FOREIGN.search(text) or "\\text" in unit_text  # about the value
    return _text(text) if says_more else None
