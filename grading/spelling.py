"""A mathematical answer, LaTeX or plain text, in one spelling: `clean`. What it says is read in `values.py`."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

MAX_FORMULA = 1000  # characters; a longer formula is compared as text only

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
    eighteen nineteen twenty"""))}  # fmt: skip
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

INVISIBLE = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
BRACED = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"  # with up to two more pairs of braces in it
CURRENCY = "dollar|euro|sterling|rupee|yuan"
FUNCTION = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|gcd|lcm"


def _plain_scripts(match: re.Match) -> str:
    r"""\text{m s^{-1}} without braces inside."""
    inside = re.sub(r"([_^])\{([-+0-9A-Za-z]+)\}", r"\1\2", match[1])
    inside = re.sub(r"\\mu\s*", "μ", inside.replace(r"\Omega", "Ω"))
    return rf"\text{{{inside}}}"


# Pattern and replacement, in order; "x?" stands for: not followed by a letter.
REWRITES = [(re.compile(pattern.replace("x?", "(?![A-Za-z])")), replacement) for pattern, replacement in [
    (rf"\\(?:operatorname\*?|mathrm|text|rm)\s*\{{\s*({FUNCTION}|mod)\s*\}}", r"\\\1 "),
    (r"\\([A-Za-z]+)", lambda m: COMMANDS.get(m[1], m[0])),
    (r"(?:US\s*)?\\\$|US\s*\$|(?<!\$)\$(?=\d[^$]*$)", r"\\dollar "),
    (r"(?<![A-Za-z])(?:Rs\.?|INR)\s*(?=\d)", r"\\rupee "),
    (r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\s*\\[!,])\s*(?=\d{3}(?!\d))", ","),  # 1\,000 and 1{,}000
    (r"(?<![\d.,])\d{1,3}(?:[ ~]\d{3})+(?![\d/]| ?\d)", lambda m: re.sub("[ ~]", "", m[0])),  # 1 000 000
    # Delimiters, sizes, spaces, fonts
    (r"\\(?:tag|label)\*?\s*\{[^{}]*\}", ""),
    # Lines of an equation, a system as a list, the branches of a function
    (r"\\(?:begin|end)\{(?:aligned|align\*?|gathered|split|equation\*?)\}", " "),
    (r"(?:\\left\s*\\\{\s*)?\\begin\{(cases|array)\}(?:\{[lc]\})?([^&]*?)[\s,;.\\]*\\end\{\1\}(?:\s*\\right\.)?",
     r"\2"),
    (r"[\s,;.]*\\\\\s*(?=&?\s*=)(?!.*\\end\b)", " "),
    (r"(?:[\s,;.]*\\\\)+(?![A-Za-z]{2}|.*\\end\b)", ", "),
    (r"[\s,]*&[\s,]*(?:\\text\s*\{\s*(?:if|for|when)\s*\})?(?=.*\\end\{cases\})", "&"),
    (r"\\begin\{cases\}(.*)\\end\{cases\}", r"\\cases{\1}"),
    (r"&(?!.*\\end\b)", " "),
    (r"\\(?:left|right|[bB]igg?[lr]?)x?\.?|\\!", ""),
    (r"(?<!\\)(?:\\[()\[\]](?!\d*pt)|\$)", " "),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad|\\(?:text)?color\s*\{\w+\}", " "),
    (r"\\frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*(\^\s*\{?\d\}?)?\s*\}",
     r"\\text{\1/\2\3}"),
    (r"\\mux?\s*\\(?:text|mathrm)\s*\{\s*", r"\\text{μ"),
    (r"(\d)\s*(?:\\(?:text|mathrm)\s*\{\s*)?([kM]?)\}?\s*\\Omegax?\s*$", r"\1 \\text{\2Ω}"),
    (r"(?<=[\d/}])(\s*)\\mathrm\s*\{\s*([A-DF-Za-cf-hj-z])\s*\}", r"\1\\text{\2}"),  # a unit
    (r"(?<=\d)\\text\s*\{([KT])\}", r"\1"),  # 5K is 5,000, but 5 K is a unit
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
    (r"\\text\s*\{\s*(\\[a-z]+ ?|[+-]?\d[\d.,/]*)\s*\}|^\\text\s*\{\s*((?:\d|[A-J](?:,|\s(?:and|or)\b))[^{}]*)\}$",
     r" \1\2 "),
    (r"\\text\s*\{([^{}]*\w)\s+(and|or)\s*\}", r"\\text{\1} \2 "),
    (r"\\text\s*\{\s*,?\s*(?:or|或者?),?\s*\}|(?<=[\dA-Za-z})\]])\s*或者?\s*(?=[\dA-Za-z\\({-])", " or "),
    (r"\\text\s*\{\s*,?\s*(?:and|和),?\s*\}|(?<=[\dA-Za-z})\]①-⑳])\s*[和与]\s*(?=[\dA-Za-z\\({①-⑳-])", " , "),
    # Synonyms
    (r"\\notx?\s*=|(?<![\d)])!=", r"\\ne "),
    ("<=", r"\\le "),
    (">=", r"\\ge "),
    (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
    (r"\\\{\s*\\\}", r"\\emptyset"),
    (r"\^\s*\{?\s*((?:\\prime\s*)+)\}?", lambda m: "'" * m[1].count("p")),
    (r"^(?:\\mathbb\{R\}|R)\s*(?:\\setminus|\\backslash|-)\s*\\?\{([^{}]*?)\\?\}$", r"x \\ne \1"),
    (r"\{([:,])\}", r"\1"),
    (r"^\s*(?:=|\\approxx?)", ""),
    (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^"),
    # What LaTeX allows to be left out, and plain text for LaTeX
    (r"\\(frac|binom)\s*(?:\{([^{}]*)\}|(\\pi|\d|(?<=\s)\w))\s*(\w)", r"\\\1{\2\3}{\4}"),
    (r"\\log_\s*\{?\s*e\s*\}?(?![A-Za-z])", r"\\ln "),
    (r"^(-?\d*\.\d*)\((\d+)\)$", r"\1\\overline{\2}"),  # 0.(3)
    (r"(?:^|(?<=\\cup))\s*\]([^\[\]()]+[,;][^\[\]()]+)(?=[\[\]])", r"(\1"),  # ]0, 1[
    (r"([\[(][^\[\]()]+[,;][^\[\]()]+)\[(?!\w)", r"\1)"),
    (r"(?<![A-Za-z])\(?\s*\\?[pb]?modx?\s*\{?\s*(\w+)\s*\}?\s*\)?", r"\\pmod{\1}"),
    (r"(?<=[a-z)}\d|])\s*\+\s*(?:[Kc]|\\text\{\s*const(?:ant)?\.?\s*\})\s*$", "+C"),  # of an integral
    (r"\\sqrt\s*\[\s*(\d*[13579])\s*\]\s*\{\s*-\s*([\d.]+)\s*\}", r"(-\\sqrt[\1]{\2})"),
    (r"\\sqrt\s+(\d+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"(?:\\sqrt|(?<![\\A-Za-z])sqrt)\s*(\[\d+\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
    (r"(?<![\\A-Za-z])pix?", r"\\pi "),
    (r"(?<![\\A-Za-z])infinityx?", r"\\infty "),
    (r"(?<![\d.}])(\d+)/(\d+)\s*(?=[A-Za-z])", r"\\frac{\1}{\2}"),  # 1/2x
    (r"\{([^{}]*)\\choosex?([^{}]*)\}|(\w+)\s*\\choosex?\s*(\w+)", r"\\binom{\1\3}{\2\4}"),
    (r"(?<![A-Za-z\\])C(?:\(\s*(\d+)\s*,\s*(\d+)\s*\)|\s*_\s*\{?(\d\d+|[3-9]|n)\}?\s*\^\s*\{?(\d+|[kmr])\}?)",
     r"\\binom{\1\3}{\2\4}"),
    (r"^(?i:(?:the )?(?:final )?answer(?: is|:)|so|thus|hence|therefore|then|it is|it's|that is)\b[,:]?\s+(?=\S)", ""),
    (rf"(?:^|(?<=,)|(?<=\sand))\s*([+-]?)\s*\\({CURRENCY})x?\s*((?:(?!\\(?:{CURRENCY})|,\s|\sand\s).)*[^\s,])"
     r"(?=\s*$|,\s|\sand\s)", r" \1\3 \\text{\2}"),
    (r"(?<=[\d}])\s*(?:\\text\{\s*)?([apAP])\.?\s?[mM]\b\.?\s*\}?", lambda m: f" {m[1].lower()}m"),
    (r"^\s*\{([^{}]*)\}\s*$", r"\1"),
    (r"\s\(([^()]*(?:[<>]|\\(?:in|[lgn]e)x?)[^()]*)\)\s*$", r", \1"),  # y = 2x (x > 0)
    (r"^(.+?)[\s,;(]+(?:where\s|for\s)?\s*([a-z])\s*\\in\s*\\mathbb\{Z\}$",  # k\pi, k \in \mathbb{Z}
     lambda m: re.sub(rf"(?<![A-Za-z\\]){m[2]}(?![A-Za-z])", "n", m[1])),
    # |x| < 2 and |x| > 2; x > 0, x < 1
    (r"^\|([a-z])\|\s*(<|\\le)\s*([^,<>|]+)$", r"-(\3) \2 \1 \2 \3"),
    (r"^\|([a-z])\|\s*(>|\\ge)\s*([^,<>|]+)$", r"-(\3) \2 \1 or \1 \2 \3"),
    (r"(?:(?<=^)|(?<=,))\s*([a-z])\s*>\s*([^,<>]+?)\s*(?=,|$)", r"\2 < \1"),
    (r"(?:(?<=^)|(?<=,))\s*([a-z])\s*\\ge\s*([^,<>]+?)\s*(?=,|$)", r"\2 \\le \1"),
    (r"^([a-z])\s*((?:<|\\le)[^,<>]+),([^,<>]+(?:<|\\le))\s*\1$", r"\3 \1 \2"),
    (r"^([^,<>]+(?:<|\\le)\s*([a-z]))\s*,\s*\2\s*((?:<|\\le)[^,<>]+)$", r"\1 \3"),
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
    text = " ".join(INVISIBLE.sub("", text).split())
    text = re.sub(r"^[`*\s]+|(?<!\^)[`*\s]+$", "", text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?:[,;:。\s]|(?<!\.)\.)+$", "", text).strip()
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip().lower()
    for meaning, phrase in SPOKEN.items():
        if re.fullmatch(phrase, words):
            return meaning
    return str(WORDS.get(words, text))


def fold(text: str) -> str:
    """The text with its words in lower case: Monday, EVEN. What may be a product of letters keeps its case: Rr, GMm."""
    word = r"(?<![^\W\d_])(?=[^\W\d_]*[aeiouyAEIOUY])(?:[A-Z]?[a-z]{2,}|[A-Z]{4,}|(?i:yes|no))(?![^\W\d_])"
    return re.sub(word, lambda match: match[0].lower(), text)
