"""The spelling of mathematical answers: `clean` makes it one; `number` and `unit` read what is no formula."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

from grading.spans import closing_brace

SYMBOLS = {
    "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
    "×": r"\times ", "·": r"\cdot ", "÷": "/", "−": "-", "–": "-", "—": "-", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "θ": r"\theta ", "，": ",", "。": ".", "⋅": r"\cdot ", "√": r"\sqrt", "∛": r"\sqrt[3]", "€": r"\euro ",
    "⁄": "/", "£": r"\pounds ", "¥": r"\yen ", "¢": r"\text{ cents}", "≡": r"\equiv ", "∶": ":", "✓": "", "■": "",
    **dict.fromkeys("≈≃≅≒≐∼", r"\approx "),
}  # fmt: skip
NUMBER_WORDS = dict(re.findall(r"(\S+):(\S+)", """
    zero:0 one:1 two:2 three:3 four:4 five:5 six:6 seven:7 eight:8 nine:9 ten:10 eleven:11 twelve:12 thirteen:13
    fourteen:14 fifteen:15 sixteen:16 seventeen:17 eighteen:18 nineteen:19 twenty:20 thirty:30 forty:40 fifty:50
    sixty:60 seventy:70 eighty:80 ninety:90"""))  # fmt: skip
PARTS = {word: int(size) for word, size in re.findall(r"(\w+):(\d+)", (
    "half:2 third:3 quarter:4 fourth:4 fifth:5 sixth:6 seventh:7 eighth:8 ninth:9 tenth:10 twelfth:12 hundredth:100"
))}  # fmt: skip
SPOKEN = {
    r"\mathbb{R}": r"all real(?: number)?s?|\(-\\infty ?, ?\+?\\infty ?\)", "does not exist": "dne", "1/2": "half",
    r"\emptyset": r"(?:there (?:is|are) )?no (?:real )?(?:solutions?|roots?)|(?:the )?empty set",
}  # fmt: skip
FUNCTION = r"((?:arc|a)?(?:sin|cos|tan)|(?:sin|cos|tan)h|sec|csc|cot|log|ln|exp)"

# Pattern and replacement, in order; "x?" stands for: not followed by a letter.
REWRITES = [(re.compile(pattern.replace("x?", "(?![A-Za-z])")), replacement) for pattern, replacement in [
    # Thousands: 1\,000 and 1{,}000
    (r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\s*\\[!,])\s*(?=\d{3}(?!\d))", ","),
    # Delimiters, sizes, spaces, colours
    (r"\\(?:left|right|[bB]igg?[lr]?)x?\.?|\\!", ""),
    (r"\\text\s*\{\s*\\\$\s*\}", r"\\$"),
    (r"(?<!\\)(?:\\[()\[\]](?!\d*pt)|\$)", " "),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad|\\(?:display|text)stylex?|\\(?:no)?limitsx?", " "),
    (r"\\(?:tiny|small|normalsize|(?i:large|huge)|checkmark|(?:black)?square|qed)x?|\\(?:text)?color\s*\{\w+\}", " "),
    # Fonts
    (r"\\(?:hat|vec)\s*\{\s*(?:\\mathbf\s*\{)?\\?([ijk])(?:math)?\}?\s*\}", r" \1 "),
    (r"\\(?:mathbf|mathit|boldsymbol|mathrm|vec)\s*\{\s*([a-zA-Z])\s*\}", r" \1 "),
    (r"\\(?:boldsymbol|underline|bf)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\(?:bf|rm|it|sf|bfseries)x?|^\\(?:math|text)(?:bf|rm|it)(?=\s*\d)", " "),
    (r"\\text\s*\{\s*([.,])\s*\}", r"\1"),
    (r"^\\(?:boxed|fbox)\s*\{(.*)\}$", r"\1"),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)|math(?:rm|bf|it|sf)|emph|mbox|operatorname)\s*\{", r"\\text{"),
    (r"\\text\s*\{\s*([+-]?\d[\d.,/]*)\s*\}|^\\text\s*\{\s*(\d[^{}:]*)\}$", lambda m: f" {m[1] or m[2]} "),
    (r"\\text\s*\{\s*(dozen|hundred|thousand|[a-z]+illion) (?=\w)", r" \1 \\text{"),
    (r"\\text\s*\{\s*(?:,?\s*(?=\w+\s+also))?(and|or)(?:\s+also)?\s*\}", r" \1 "),
    (r"\\text\s*\{\s*,?\s*(and|or|或者?|和),?\s*\}", r" , "),
    (r"^\\text\s*\{([^{}\\]*,[^{}\\]*)\}$", r"\1"),
    # Synonyms
    (r"\\[dtc]fracx?", r"\\frac"),
    (r"\\var(epsilon|phi|theta|rho|sigma)x?", r"\\\1"),
    (r"^(?:\\text\s*\{\s*)?[Aa]ll real(?: number)?s? (?:except|but)(?: for)?\s*\}?\s*(?:[a-z]\s*=\s*)?(.+?)\}?$",
     r"\\mathbb{R}\\setminus \\{\1\\}"),
    (r"\\([lr])bracex?", lambda m: r"\{" if m[1] == "l" else r"\}"),
    (r"\\notx?\s*=|(?<![\d)])!=|\\neqx?", r"\\ne "),
    (r"\\leq?(?:slant)?x?|<=", r"\\le "),
    (r"\\geq?(?:slant)?x?|>=", r"\\ge "),
    (r"\\([lg])tx?", lambda m: "<" if m[1] == "l" else ">"),
    (r"\\l(?:or)x?|\\veex?", " or "),
    (r"\\(?:simeq|cong|doteq|fallingdotseq|thickapprox|sim)x?", r"\\approx "),
    (r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)", ":"),
    (r"^<([^<>]*,[^<>]*)>$", r"\\langle \1\\rangle "),
    (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\\degreex?|\^\s*\\degree", r"^\\circ"),
    (r"\\varnothing|\\\{\s*\\\}", r"\\emptyset"),
    (r"\\(?:ldots|cdots|dots|dotsc)x?", r"\\dots "),
    (r"\\(?:mathbb|Bbb)\s*\{?R\}?|\\Rx?|\\realsx?", r"\\mathbb{R}"),
    (r"\\setminusx?|\\backslashx?|(?<=\\mathbb\{R\})\s*[-/](?=\s*\\\{)", r"\\setminus "),
    (r"\^\s*\{?\s*((?:\\prime\s*)+)\}?|[’′]", lambda m: "'" * (m[1] or "p").count("p")),
    (r"\(\s*\\text\{\s*mod\s*\}\s*(\w+)\s*\)|\\pmod\s*(\w)", lambda m: rf"\pmod{{{m[1] or m[2]}}}"),
    (r"^\s*(?:[a-z]\s*\\equiv\s*)?(-?\d{1,9})\s*\\pmod\{([1-9]\d{,9})\}\s*$",
     lambda m: rf"{int(m[1]) % int(m[2])}\pmod{{{m[2]}}}"),
    (r"\{([:,])\}|\\colonx?", lambda m: m[1] or ":"),
    (r"^\s*(?:=|\\approxx?)", ""),
    # What LaTeX allows to be left out, and plain text for LaTeX
    (r"\\frac\s*(\d)(?=\s*[\d{])", r"\\frac{\1}"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"\\text\{(?:[^{}]|\^\{-?\d\})*\}", lambda m: re.sub(r"\^\{(-?\d)\}", r"^\1", m[0])),
    (r"\\frac\{\s*(\\text\{[^{}]*)\}\s*\}\{\s*\\text\{([^{}]*)\}\s*(\^\{?\d\}?)?\s*\}", r"\1/\2\3}"),
    (r"\\sqrt\s*(\[\d+\])?\s*(\d)", r"\\sqrt\1{\2}"),
    (r"(?:\\sqrt|(?<![\\A-Za-z])[sS]qrt)(\[\d+\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
    (r"(?:\\text\s*\{\s*abs\s*\}|(?<![\\A-Za-z])abs)\s*\(([^()]*)\)", r"|\1|"),
    (r"(?<![\\A-Za-z])pix?", r"\\pi "),
    (rf"(?:\\text\s*\{{\s*{FUNCTION}\s*\}}|(?<![\\A-Za-z]){FUNCTION}x?)(?=\s*[(\\|\d^_{{]|\s*[A-Za-z]x?)",
     lambda m: rf"\{re.sub('^a(?=[^r])', 'arc', m[1] or m[2])} "),
    (r"(?<![\\A-Za-z])sqrt\s*(\d+)", r"\\sqrt{\1}"),
    (r"(?<![\d.}])(\d+)/(\d+)\s*(?=[A-Za-z\\](?!times|cdot|text|circ|le|ge|cup|pm|in))", r"\\frac{\1}{\2}"),
    (r"\\infinity|(?<![\\A-Za-z])infinityx?", r"\\infty "),
    (r"\*\*", "^"),
    # Binomials
    (r"\{?\s*(\w+)\s*\\choose\s*(\w+)\s*\}?|(?<![A-Za-z\\])C\(\s*(\d+)\s*,\s*(\d+)\s*\)|"
     r"(?:\{\})?[_^]\{?(\d+)\}?\s*C_\{?(\d+)\}?",
     lambda m: rf"\binom{{{m[1] or m[3] or m[5]}}}{{{m[2] or m[4] or m[6]}}}"),
    (r"(?:\\begin\{(?!array|matrix)|\\\{\s*\\begin\{)(cases|aligned|gathered|array|matrix)\}(?:\{[lcr]+\})?"
     r"((?:[^&]|&\s*=)*?)\\end\{\1\}",
     lambda m: re.sub(r"[,;]?\s*\\\\\s*(?=.)", ", ", m[2].replace("&", ""))),
    (r"\\begin\{array\}\s*\{\s*[lcr]\s*\}((?:[^&\\=]+=(?:(?!\\\\|\\end)[^&=])+(?:\\\\)?)+)\\end\{array\}",
     lambda m: re.sub(r"[,;]?\s*\\\\\s*(?=.)", ", ", m[1])),  # an equation on each line
    (r"(\\(?:sin|cos|tan|cot|sec|csc|ln|log)) *([A-Za-z]|\\[a-z]+) *(?=\\(?:cdot|times)(?![a-z]))", r"\1(\2)"),
    (r"(?<![A-Za-z])([fgh])\^\{-1\}\(", r"\1_{inverse}("),  # not 1/f
    (r"\(\s*(\\text\{)([^{}]*)\}\s*\)$", r"\1(\2)}"),
    (r"(=[^=,;]*[\d})])\s*(?:\\\\\s*|\s)(?=[A-Za-z](?:_\{?\w+\}?)?\s*=)", r"\1, "),
    # Remarks: an approximation becomes one, to be checked; the others change nothing
    (r"(?<=[\w)}])[\s,;]*(?:\\text\s*\{\s*)?\(?\s*(?:\\text\s*\{\s*)?(?:\(\s*\}?)?(?:or |which is )?"
     r"(?:approximately|approx\.?|about|roughly|\\approx)\s*\}?\s*"
     r"(-?\\?\$?[\d.,]*\d(?:\s*\\?%|\s*(?:\\text\s*\{\s*)?[a-z]+)?)\s*(?:\\text\s*\{\s*)?[)}]*$", r" \\approx \1"),
    (r"(?<=[\d)}])\s*=\s*(-?\d*\.\d+)\s*(?:\.\.\.|\\dots\s*)$", r" \\approx \1"),
    (r"(?<=\d)\s*\(((?:in )?[A-Za-z]{2,}(?: [a-z]+)?)\)$", r" \\text{(\1)}"),
    (r"(?<=[\w)}])[\s,]*(?:\\text\s*\{\s*)?\(?(?:in total|in all|altogether|exactly|as required)\)?\s*\}?$", ""),
    (r"^\\text\s*\{\s*(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)?:?\s*\}\s*:?(?!\s*=)", ""),
    (r"^\(\s*([a-z])\s*,\s*([a-z])\s*\)\s*\\in\s*(?=\\\{)", lambda m: "" if m[1] < m[2] else m[0]),
    (r"^([a-z])\s*\\in\s*\\mathbb\{R\}\s*(?:,|and)\s*(?=\1\s*(?:\\[nlg]e|[<>]))", ""),
    (r"(?<=\d)\s*\^?\s*\{?\s*(?:\\text\s*\{\s*)?(?:st|nd|rd|th)\s*\}*$", ""),
    (r"[,;]?\s*(?:\\text\s*\{\s*)?\(\s*(?:\\text\s*\{\s*)?(?:reject|discard|exclud|since|because)[^()]*\)\}?$", ""),
    (r"[,;]?\s*(?:\\text\s*\{\s*)?(?:for (?:all|any|every)\b|\\forall)"
     r"(?!.*(?:\\mathbb\{[^R]|[<>]|\\[lgn]e|integer|positive|negative|natural|rational|odd|even|prime)).*$", ""),
    (r"^(?i:so|thus|hence|therefore|then|it is|it's|that is)\b[,:]?\s+(?=\S)", ""),
    (r"\s+", " "),
]]  # fmt: skip


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """The answer in one spelling: ASCII and LaTeX, no delimiters, no spacing commands, no full stop."""
    text = re.sub(r"√\s*(\d+(?:\.\d+)?|[A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"[⁰¹²³⁴-⁹⁺⁻ⁿ]+", lambda m: f"^{{{unicodedata.normalize('NFKC', m[0]).replace('−', '-')}}}", text)
    text = re.sub(r"[₀-₉]+", lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = "".join(SYMBOLS.get(character, character) for character in text)
    text = re.sub(r"[⅐-⅞]", lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("⁄", "/"), text)
    text = unicodedata.normalize("NFKC", text)
    text = " ".join("".join(c for c in text if unicodedata.category(c) not in ("Cf", "Cc") or c.isspace()).split())
    text = text.strip("`*" if not text.endswith("^*") else "`").strip()
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(",;:" if text.rstrip().endswith("..") else ".,;:").strip()
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()
    spoken = re.sub(r"^(?:negative|minus)\s+", "-", words.lower())
    meaning = next((meaning for meaning, phrase in SPOKEN.items() if re.fullmatch(phrase, spoken)), None)
    spoken = meaning or spoken_number(spoken) or spoken
    if spoken == words.lower() and re.fullmatch(r"[a-z][a-z\s-]*", spoken):  # seven apples
        count, _, noun = spoken.rpartition(" ")
        spoken = rf"{digits} \text{{{noun}}}" if (digits := spoken_number(count)) else spoken
    return spoken if spoken != words.lower() else text


def fold(text: str) -> str:
    """The text with its words in lower case: Monday, EVEN. What may be a product of letters keeps its case: Rr, GMm."""
    word = r"(?<![^\W\d_])(?=[^\W\d_]*[aeiouyAEIOUY])(?:[A-Z]?[a-z]{2,}|[A-Z]{4,}|(?i:yes|no))(?![^\W\d_])"
    return re.sub(word, lambda match: match[0].lower(), text)


def plain_text(text: str) -> str:
    """The letters and digits of a text answer, without `\\text`, braces, spaces and case; "" for what is a formula."""
    bare = re.sub(r"\\text\s*|[{}\s]", "", fold(text))
    return "" if re.search(r"[\\^_+*/=<>|]", bare) or not re.search(r"[A-Za-z]{3,}", bare) else bare


def spoken_number(text: str) -> str | None:
    """The number that English words in lower case spell, in digits: twenty-one, two hundred and five, two thirds."""
    if text.startswith("-"):
        return "-" + inner if (inner := spoken_number(text[1:])) else None
    if text.endswith(" and a half") and (whole := spoken_number(text.removesuffix(" and a half"))):
        return f"{whole} 1/2"
    text = re.sub(r"^an? (?=dozen|hundred|thousand|[mb]illion)", "one ", text.strip())
    words = [word for word in re.split(r"[\s-]+", text) if word != "and"]
    part = PARTS.get(words[-1].removesuffix("s"), 2 if words[-1] == "halves" else None) if len(words) > 1 else None
    if part:
        top = "1" if words[:-1] == ["a"] else spoken_number(" ".join(words[:-1]))
        is_plural = words[-1].endswith("s")
        return f"{top}/{part}" if top and top.isdigit() and is_plural == (top != "1") else None
    total, group, last_scale = 0, 0, 10**15
    for word in words:
        value, scale = int(NUMBER_WORDS.get(word, -1)), SCALES.get(word, 0)
        if value >= 0 and (group % 100 == 0 or (group % 100 >= 20 and group % 10 == 0 and 0 < value < 10)):
            group += value
        elif word in ("dozen", "hundred") and 0 < group < 10:
            group *= scale
        elif group and 1000 <= scale < last_scale:
            total, group, last_scale = total + group * scale, 0, scale
        else:
            return None
    return str(total + group) if words else None


# Numbers --------------------------------------------------------------------------------------------------------------

DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
FRACTION = re.compile(
    rf"([+-]?)\s*(?:({DECIMAL})\s*/\s*({DECIMAL})|\\frac\{{\s*([+-]?)({DECIMAL})\s*\}}\{{\s*({DECIMAL})\s*\}})"
)
MIXED = re.compile(r"([+-]?)\s*(\d+)\s*(?:\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}|(?<=\s)(\d+)\s*/\s*(\d+))")
PLAIN = re.compile(
    rf"([+-]?)\s*({DECIMAL})(?:\s*(?:\\times|\\cdot|x)\s*10\s*\^\s*\{{?([+-]?\d{{1,3}})\}}?|[eE]([+-]?\d{{1,3}}))?"
)
REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
ENDLESS = re.compile(r"([+-]?)(\d*)\.(\d*?)(?:(\d)\4\4+|(\d\d+)\5+)\s*(?:\.\.+|\\dots\s*)")  # 0.1666...
POWER_OF_TEN = re.compile(r"([+-]?)10\s*\^\s*\{?([+-]?\d{1,3})\}?")
SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALED = re.compile(rf"(.+?)\s*(?:\\text\{{\s*)?({'|'.join(SCALES)})\s*\}}?")


def number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction, mixed or repeating number, 3.5 million or 2x10^5; else None."""
    text = text.strip()
    if len(text) > 200:
        return None
    if re.fullmatch(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        text = text.replace(" ", "")

    def value(digits: str) -> Fraction:
        return Fraction(digits.replace(",", "") or "0")

    if match := PLAIN.fullmatch(text):
        sign, digits, power, exponent = match.groups()
        result = value(digits) * Fraction(10) ** int(power or exponent or 0)
    elif match := FRACTION.fullmatch(text):
        sign, top, bottom, inner_sign, latex_top, latex_bottom = match.groups()
        if value(bottom or latex_bottom) == 0:
            return None
        result = value(top or latex_top) / value(bottom or latex_bottom) * (-1 if inner_sign == "-" else 1)
    elif match := MIXED.fullmatch(text):
        sign, whole, latex_top, latex_bottom, top, bottom = match.groups()
        top, bottom = int(latex_top or top), int(latex_bottom or bottom)
        if top >= bottom:
            return None
        result = int(whole) + Fraction(top, bottom)
    elif match := REPEATING.fullmatch(text) or ENDLESS.fullmatch(text):
        sign, whole, fixed, *repeats = match.groups()
        repeated = next(filter(None, repeats))
        result = Fraction(
            int(whole + fixed + repeated) - int((whole + fixed) or 0), 10 ** len(fixed) * (10 ** len(repeated) - 1)
        )
    elif match := POWER_OF_TEN.fullmatch(text):
        sign, result = match[1], Fraction(10) ** int(match[2])
    elif (match := SCALED.fullmatch(text)) and (inner := number(match[1])) is not None:
        return inner * SCALES[match[2]]
    else:
        return None
    return -result if sign == "-" else result


# Units ----------------------------------------------------------------------------------------------------------------

UNIT_NAMES = dict(re.findall(r"(\w+):(\S+)", """
    centimeter:cm centimetre:cm millimeter:mm millimetre:mm kilometer:km kilometre:km meter:m metre:m kilogram:kg gram:g
    milligram:mg pound:lb lbs:lb ounce:oz feet:ft foot:ft yard:yd mile:mi inche:in inch:in second:s sec:s minute:min
    hour:h hr:h hrs:h liter:l litre:l milliliter:ml millilitre:ml dollar:$ usd:$ buck:$ degree:deg percent:% unit:u
    mph:mi/h kph:km/h kmph:km/h day:day radian:rad rad:rad joule:j newton:n watt:w volt:v hertz:hz celsius:c
    fahrenheit:f kelvin:k person:people children:child men:man women:woman mice:mouse am:am pm:pm mol:mol mole:mol
    pascal:pa gallon:gal quart:qt pint:pt cup:cup way:way euro:eur"""))  # fmt: skip
IN_BASE = {  # how many of the second unit are one of the first
    "min": (60, "s"), "h": (3600, "s"), "day": (86400, "s"), "week": (604800, "s"), "mm": (Fraction(1, 1000), "m"),
    "cm": (Fraction(1, 100), "m"), "km": (1000, "m"), "ft": (12, "in"), "yd": (36, "in"), "mi": (63360, "in"),
    "mg": (Fraction(1, 1000), "g"), "kg": (1000, "g"), "lb": (16, "oz"), "ml": (Fraction(1, 1000), "l"),
    "cent": (Fraction(1, 100), "$"), "year": (12, "month"), "nm": (Fraction(1, 10**9), "m"), "kj": (1000, "j"),
}  # fmt: skip
LETTERS = {"m", "g", "s", "h", "l"}  # after a space; in \text any of J N W V K A, too
KNOWN = set(re.findall(r"\w+", """
    cm mm km kg mg lb oz ft yd mi in min ml hz pa kj kw mw nm deg cent day week month year people child acre way digit
    个 元 米 人 天 秒 度 岁 克 只 本 张 支 件 次 种 块 条 厘米 千米 毫米 公里 小时 分钟 千克 公斤 平方米 平方厘米
"""))  # fmt: skip
SMALL_WORDS = {"square", "squared", "sq", "cubic", "cubed", "cu", "of", "per", "the", "in"}
# Plural or not, what says something about the value: 7 dozens, 7 tenths, 7 more
NO_UNITS = set(re.findall(r"\w+", """
    additional always as billions centuries couples crores cubes decades does dozens fewer fortnights gross guess half
    halves hundreds is lakhs less millions minus more negative no not ones or others over pairs percents plus quadruples
    quarter quarters quartets quintuples reams scores squares tens thirds this thousands ths times trillions trios
    triples triplets twins unless versus vs was yes"""))  # fmt: skip
WORD = r"[A-Za-z\u4e00-\u9fff]+\.?(?:\s*\^\s*\{?-?\d\}?)?"
QUANTITY = re.compile(
    rf"(?P<value>.*(?:[\d}})]|\\pi|{'|'.join(SCALES)}))\s*(?P<unit>\\?%|\^\\circ\s*(?:\\text\{{\s*[CF]\s*\}}|[CF])?"
    r"|(?:\\text\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?\s*(?:/|\\cdot)?\s*)+"
    rf"|(?:(?<=\s)|(?<=[\d)}}])){WORD}(?:(?:\s*(?:/|\\cdot)\s*|\s+){WORD})*)",
    re.DOTALL,
)
CURRENCY = re.compile(r"([+-]?)\s*(\\\$|\\euro|\\pounds|\\yen|USD)\s*(.+)")


def unit(text: str, may_be_letter: bool) -> str | None:
    """One spelling per unit, "" for "units"; None for what is no unit: "more" and "dozens" say something of the value.

    A unit is made of known names, abbreviations and plurals of any noun. `may_be_letter`: a single letter is a unit
    ("5 m") and no factor.
    """
    letters = LETTERS | set("jnwvka") if "\\text" in text else LETTERS
    if re.search(r"(?<![A-Za-z])[A-Z](?![A-Za-z.])", text) and "\\text" not in text:
        return "k" if text.strip() == "K" else None  # 5 M is no length
    if re.search(r"(?<![A-Za-z])[GHMS](?![A-Za-z.])", text):
        return None
    if may_be_letter:
        text = re.sub(r"(?<![A-Za-z])M([gmsWJNVAB]|Hz|Pa)(?![A-Za-z])", r"mega\1", text)  # not milli
        text = re.sub(r"(?<![A-Za-z])Nm(?![A-Za-z])", "N m", text)  # not nanometres
    text = re.sub(r"\\text\s*\{\s*[(\[]?(?:in (?=\w))?([^{}()\[\]]*)[)\]]?\s*\}", r" \1 ", text)
    text = re.sub(r"\b(\w+)\s*\^\s*\{?-(\d)\}?", r"/\1^\2", text).replace("^1", "").replace("\\cdot", " ")
    text = re.sub(r"\\?%", " percent ", re.sub(r"\bordered (?=\w+s\b)", "ordered", text)).lower()
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text.replace("^\\circ", " degrees ")).replace(".", " ")
    if not re.fullmatch(r"[\sa-z\u4e00-\u9fff/^{}\d]*", text) or re.search(r"(?<!\^)(?<!\^\{)\d", text):
        return None
    power = next((p for word, p in (("sq", "^2"), ("cub", "^3")) if re.search(rf"\b{word}", text)), "")
    names = []
    for word in re.findall(r"[a-z\u4e00-\u9fff]+|\^\{?\d|/", text):
        name = UNIT_NAMES.get(word, UNIT_NAMES.get(word.removesuffix("s")))
        if word in NO_UNITS or word in SCALES or word in NUMBER_WORDS or (name is None and re.search(r"ths?$", word)):
            return None
        if word in SMALL_WORDS and word != "in":
            names += ["/"] if word == "per" else []
        elif word[0] in "^/":
            names.append(word.replace("{", ""))
        elif name is not None or (may_be_letter and word in letters) or word in KNOWN or word[:4] == "mega":
            names += ["·"] * bool(names and names[-1].isalpha()) + [word if name is None else name]
        elif len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
            names.append(word.removesuffix("s"))
        elif names or not re.search(r"s\b", text):  # an adjective may stand before a plural: blue marbles, left socks
            return None
    return "".join(names) + power if names else None


def in_base(name: str) -> tuple[Fraction, str]:
    """How many of the base unit one of a unit is, and that unit: km/h is 5/18 m/s, cents are hundredths of $."""
    factor, base = Fraction(1), ""
    for sign, word, power in re.findall(r"(/?)([^\W\d_]+|\$)(?:\^(\d))?", name):
        size, unit_name = IN_BASE.get(word, (1, word))
        factor *= Fraction(size) ** (int(power or 1) * (-1 if sign else 1))
        base += sign + unit_name + (f"^{power}" if power else "")
    return factor, base
