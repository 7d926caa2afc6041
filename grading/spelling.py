r"""A mathematical answer, LaTeX or plain text, as LaTeX in one spelling: `clean`. What it says is read in `values.py`.

Groups in braces are reduced from the inside out: fonts, colours and what prints nothing fall out with their braces.
Braces are left only as the argument of a command, of ^ or of _, where nothing can be without them: x^2 is x^{2}.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

MAX_FORMULA = 1000  # characters; what is longer is a text
MAX_DEPTH = 20  # nested brackets; the LaTeX parser's time grows steeply with them
UPRIGHT = "\u2009"  # the space before upright text: 5\text{ cm}

GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho varsigma sigma tau upsilon"
)
GREEK = [*GREEK.split(), *["phi", "chi", "psi", "omega", "varepsilon", "vartheta", "varphi", "ell"]]
SYMBOLS = str.maketrans({symbol: f"{meaning} " for meaning, *symbols in map(str.split, r"""
    \le ≤⩽≦; \ge ≥⩾≧; \ne ≠; \infty ∞; ^\circ °; \cup ∪; \cap ∩; \in ∈; \pm ±; \times ×; \cdot ·⋅; / ÷⁄∕; - −–—⁻
    \emptyset ∅; \mathbb{R} ℝ; \mathbb{Z} ℤ; \mathbb{N} ℕ; \mathbb{Q} ℚ; \mathbb{C} ℂ; \sqrt √; ' ’′; '' ″; \approx ≈≃
    \equiv ≡; \setminus ∖; \to →; \aleph ℵ; \langle ⟨; \rangle ⟩; \angle ∠; \triangle △; \Omega ΩΩ; \Delta Δ; \euro €
    \sterling £; \rupee ₹; \yuan ¥￥; \pi π; ~1/2 ½; ~1/4 ¼; ~3/4 ¾; ~1/3 ⅓; ~2/3 ⅔
""".replace(";", "\n").strip().split("\n")) for symbol in symbols[0]}
    | {letter: rf"\{name} " for letter, name in zip("αβγδεζηθικλμνξορςστυφχψω", GREEK, strict=False)})  # fmt: skip
INVISIBLE = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")

# What becomes of a group behind a command: it falls out, its braces fall out, it is upright text
GROUPS = {rf"\{name}": role for role, names in {
    "": "phantom hphantom vphantom hspace hspace* vspace vspace* label tag tag* cancel bcancel xcancel sout color kern",
    r"\phantom": "rule",
    "{}": "mathbf mathit mathtt mathnormal boldsymbol bm pmb underline boxed fbox smash mathop ensuremath",
    UPRIGHT: "text textbf textit textrm textsf texttt textnormal textup textsc emph mathrm mathsf mbox hbox "
             "operatorname operatorname* ce",
}.items() for name in names.split()}  # fmt: skip
GROUP = re.compile(r"(?:(\\[A-Za-z]+\*?|[\^_])\s*|((?<=[}»\]])))?\{([^{}]*)\}")
VECTORS = {rf"\{name}" for name in ["vec", "mathbf", "boldsymbol", "bm"]}
VECTOR = "\u20d7"  # stands behind a letter in bold: a product of vectors has an order
NAMES = {name: meaning for meaning, *names in map(str.split, r"""
    \frac \dfrac \tfrac \cfrac; \binom \dbinom \tbinom; \ne \neq; < \lt; > \gt; \le \leq \leqslant \leqq; ⟅ \lbrace
    \ge \geq \geqslant \geqq; ⟆ \rbrace; ( \lparen; ) \rparen; [ \lbrack; ] \rbrack; : \colon; \sterling \pounds
    | \lvert \rvert \vert \mid; \approx \simeq \thickapprox; \emptyset \varnothing; \degree \textdegree; - \minus
    \mathbb{R} \R \reals; \setminus \backslash \smallsetminus; i \imath; j \jmath; \to \rightarrow \longrightarrow
    \infty infinity; \sqrt sqrt; \pi pi; \tan tg \tg tan; \cot ctg \ctg cotg cot; \arctan arctg \arctg arctan
    \arccot arcctg arccot; \cdots \dots \ldots \dotsb; \lg lg; \log log; \ln ln; \sin sin; \cos cos; \exp exp
    \arcsin arcsin; \arccos arccos; \sinh sinh; \cosh cosh; \tanh tanh; \csc csc; \gcd gcd; \lcm lcm
    \mod mod \bmod \pmod
    ~ \quad \qquad \enspace \enskip \thinspace \hfill \displaystyle \textstyle \scriptstyle \limits \nolimits \bf \it
    ~ \rm \sf \tt \large \Large \huge \small \normalsize \nonumber \notag \strut \mathstrut \par \newline \hline \relax
""".replace(";", "\n").strip().split("\n")) for name in names}  # fmt: skip


def _reduced(match: re.Match) -> str:
    """A group without groups in it, and its command; the braces of an argument are « and »."""
    command, inside = match[1] or "", match[3].strip()
    role = GROUPS.get(command, "«" if command or match[2] is not None else "{}")
    if r"\choose" in inside:
        top, _, bottom = inside.partition(r"\choose")
        return rf"{command}\binom«{top.strip()}»«{bottom.strip()}»"
    if command in (r"\begin", r"\end") and not re.fullmatch("[pbBvV]?matrix|cases|array", inside):
        return " "
    if command in VECTORS and len(inside) == 1 and inside.isalpha():
        return f" {inside}{VECTOR}"
    if role == UPRIGHT:
        return f"{UPRIGHT}{match[3]} "
    if role == "«":
        return f"{command}«{inside}»"
    return (f" {inside}" if command and inside[:1].isalpha() else inside) if role == "{}" else role


BRACED = [  # arguments without braces
    (r"\\sqrt(\[\d+\])? (\d+)", r"\\sqrt\1{\2}"),
    (
        r"\\(sqrt|[dtc]?frac|[dt]?binom|mathbb|hat|vec)(?![\s{\[]*\{)\s*(\[\d+\])?\s*([A-Z0-9]|\\[a-z]+x?|[a-z])",
        r"\\\1\2{\3}",
    ),
]
# Pattern and replacement: what LaTeX and plain text allow in several spellings. "x?" stands for: no letter follows.
IDIOMS = [
    (r"\\q?quad", " "),
    (r"\\([A-Za-z]+)\*?|(?<![A-Za-z\\])[A-Za-z]+(?![A-Za-z])",
     lambda m: NAMES.get(m[0], m[0]) + " " * (m[0][0] != "\\" and m[0] in NAMES)),
    (r"\\q?quad|\\[,!;: ]|~|(?<!\\)\\[()\[\]]|\$", " "),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)x?\s*\.?", ""),
    # Lines of an equation, a system as a list, the branches of a function
    (r"(?<![\s,;.])[\s,;.]*⏎(?:\[-?[\d.]+[a-z]+\])?", "⏎"), (r"⏎\s*(?=&?\s*=)", ""),
    (r"(?:⟅\s*)?\\begin\{(cases|array)\}(?:\{[^{}]*\})?([^&]*?)\\end\{\1\}", r"\2"),
    (r"\\(begin|end)\{array\}(?:\{[^{}]*\})?", r"\\\1{pmatrix}"),
    (r"\\begin\{cases\}", r"\\cases{"), (r"\\end\{cases\}", "}"),
    (r"(?<!\s)\s*(?:,\s*)?&\s*(?:(?:if|for|when)x?\s*)?", "&"),
    # Arguments without braces
    *BRACED, (r"\s+(?=[\^_])", ""),
    (r"(\\(?:frac|binom)\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})\s*([A-Za-z0-9]|\\[a-z]+x?)", r"\1{\2}"),
    (r"\\sqrt\s*(\[\d+\])?\s*\(((?:[^()]|\([^()]*\))*)\)", r"\\sqrt\1{\2}"),
    (r"(\d[spdf]\^)(\d)(?=\d[spdf])", r"\1{\2}"),  # 1s^22s^2
    (r"([\^_])\s*\(([^()]*)\)", r"\1{\2}"),
    (r"\s*([\^_])\s*([-+]?\d+(?:\.\d+)?|[A-Za-z*+-]|\\(?!frac|sqrt)[a-z]+x?)", r"\1{\2}"),
    (r"\s*\^\{\s*\\circ\s*\}", r"\\degree "), (r"\^\{((?:\s*\\prime)+)\}", lambda m: "'" * m[1].count("p")),
    (rf"\\(?:hat|vec)\{{([A-Za-z]){VECTOR}?\}}", r"\1"),
    (r"\\%", "%"), (r"(?<![\w\s\\])sec(?=[\s(^])", r"\\sec "),
    # Numbers
    (r"(?<![\d.,])\d{1,3}(?:[ ]\d{3})+(?![\d/,]| ?\d)", lambda m: m[0].replace(" ", "")),  # 1 000 000
    (r"(?<![\d,])\d{3}(?:,\d{3}){3,}(?![\d,])", lambda m: m[0].replace(",", ", ")),  # 108,135,180,117 is a list
    (r"(?<=[\d\s}])([apAP])\.\s?[mM]\b\.?|(?<=[\d\s}])([aApP])[mM]\b", lambda m: f"{m[1] or m[2]}m".lower()),
    # Signs
    (r"(?:US\s*)?\\dollar", r"\\dollar"), (r"(?<![A-Za-z])(?:Rs\.?|INR)\s*(?=\d)", r"\\rupee "),
    (r"\\notx?\s*=|(?<![\w)])!=|<>", r"\\ne "), ("<=", r"\\le "), (">=", r"\\ge "), (r"(?<=[\w)}])\s*\*\*\s*", "^"),
    (r"\\mod\s*\{([^{}]*)\}", r"\\mod \1"),
    (r"\(\s*\\mod\s*([^()]*)\)", r"\\mod \1"), (rf"{VECTOR}\s*\\times", r"\\wedge "), (VECTOR, ""),
    (r"(?<!\w)(\w+)\s*\\choose\s*(\w+)", r"\\binom{\1}{\2}"), (r"\^\{\}|_\{\}", ""), (r"\.\.\.", r"\\cdots "),
    (r"(?:^|(?<=\\cup))\s*\]", "("), (r"\[\s*(?=\\cup|$)", ")"),  # ]0, 1[
    (rf"(\\[A-Za-z]+)[ ]+(?![A-Za-z({UPRIGHT}])", r"\1"), (rf"(?<!\s)\s*{UPRIGHT}\s*", UPRIGHT),
    (r" {2,}", " "), (r"(?<=\{) | (?=\})", ""),
]  # fmt: skip


def _replaced(text: str, rules: list) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern.replace("x?", "(?![A-Za-z])"), replacement, text)
    return text


@lru_cache(maxsize=8192)
def clean(text: str) -> str:
    """The answer in one spelling."""
    if len(text) > 4 * MAX_FORMULA:
        return text
    text = re.sub(r"([⁰¹²³⁴-⁹⁺⁻ⁿ]+)", r"^{\1}", text)
    text = re.sub(r"([₀-₉]+)", r"_{\1}", text)
    # Not of ①③, which is no 13
    text = re.sub(r"[^\u2460-\u24ff]+", lambda m: unicodedata.normalize("NFKC", m[0]), text.translate(SYMBOLS))
    text = " ".join(INVISIBLE.sub("", text).split())
    text = re.sub(r"^[`*\s]+|(?<!\^)[`*\s]+$", "", text).replace("\\\\", "⏎").replace(r"\{", "⟅").replace(r"\}", "⟆")
    text = re.sub(r"\\\$|(?<!\$)\$(?=\s*\d[^$]*$)", r"\\dollar ", text)
    text = re.sub(r"\\(?:textcolor|f?colorbox(?:\s*\{[^{}]*\}(?=\s*\{[^{}]*\}\s*\{))?|raisebox)\s*\{[^{}]*\}", "", text)
    text = re.sub(r"(?<=\d)(?:\\[,!;: ]|~|\{,\}|,\s*\\[!,])\s*(?=\d{3}(?!\d))", "", text)  # 1\,000 and 1{,}000
    text = re.sub(r"(?<=\d)\\text\{([KT])\}", r"\1", text.replace("{,}", "."))  # 5\text{K} is 5,000, 5 K a temperature
    text = _replaced(text, BRACED)
    for _ in range(MAX_DEPTH):
        text, num_groups = GROUP.subn(_reduced, text)
        if not num_groups:
            break
    text = text.replace("«", "{").replace("»", "}")
    text = _replaced(text, IDIOMS)
    if not re.search(r"\\(?:begin|cases)", text):
        text = text.replace("⏎", ", ").replace("&", " ")
    return text.replace("⏎", r"\\").replace("⟅", r"\{").replace("⟆", r"\}").strip()
