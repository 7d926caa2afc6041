r"""A mathematical answer, LaTeX or plain text, as LaTeX in one spelling: `clean`. What it says is read in `values.py`.

Synonyms stand in one table. Groups in braces are reduced from the inside out: fonts, colours and what prints nothing
fall out with their braces. Braces are left only as the argument of a command, of ^ or of _, where nothing can be
without them: x^2 is x^{2}.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

MAX_FORMULA = 1000  # characters; what is longer is a text
MAX_DEPTH = 20  # nested brackets; the LaTeX parser's time grows steeply with them
UPRIGHT = "\u2009"  # the space before upright text: 5\text{ cm}
VECTOR = "\u20d7"  # stands behind a letter in bold: a product of vectors has an order
GREEK = re.findall(r"\w+", """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho
    varsigma sigma tau upsilon phi chi psi omega varepsilon vartheta varphi ell""")  # fmt: skip

# The one spelling, and what it stands for: commands, words and signs. ~ is a space.
NAMES = {synonym: meaning.replace("~", " ") for meaning, *synonyms in map(str.split, re.split(r"(?<!\\);|\n", r"""
    \frac \dfrac \tfrac \cfrac; \binom \dbinom \tbinom; \ne \neq ≠ <>; < \lt; > \gt; \le \leq \leqslant \leqq ≤ ⩽ ≦ <=
    \ge \geq \geqslant \geqq ≥ ⩾ ≧ >=; ( \lparen; ) \rparen; [ \lbrack; ] \rbrack; : \colon; \sterling \pounds £
    | \lvert \rvert \vert \mid; \approx \simeq \thickapprox ≈ ≃; \emptyset \varnothing ∅; \degree \textdegree
    - \minus − – — ⁻; \mathbb{R} \R \reals ℝ; \mathbb{Z} ℤ; \mathbb{N} ℕ; \mathbb{Q} ℚ; \mathbb{C} ℂ; % \%
    \setminus \backslash \smallsetminus ∖; i \imath; j \jmath; \to \rightarrow \longrightarrow →; ^\circ °; \cup ∪
    \cap ∩; \in ∈; \pm ±; \times ×; \cdot · ⋅; / ÷ ⁄ ∕; ' ’ ′ \prime; '' ″; \equiv ≡; \aleph ℵ; ( \langle ⟨; ) \rangle ⟩
    \angle ∠; \triangle △; \Omega Ω Ω; \Delta Δ; \euro €; \rupee ₹; \yuan ¥ ￥; ~1/2 ½; ~1/4 ¼; ~3/4 ¾; ~1/3 ⅓; ~2/3 ⅔
    \infty infinity ∞; \sqrt sqrt √; \pi pi π; \tan tg \tg tan; \cot ctg \ctg cotg cot; \arctan arctg \arctg arctan
    \arccot arcctg arccot; \cdots \dots \ldots \dotsb ...; \lg lg; \log log; \ln ln; \sin sin; \cos cos; \exp exp
    \arcsin arcsin; \arccos arccos; \sinh sinh; \cosh cosh; \tanh tanh; \csc csc; \gcd gcd; \lcm lcm
    \mod mod \bmod \pmod; ~ ~ $ \, \! \; \: \( \) \[ \] \quad \qquad \enspace \enskip \thinspace \hfill \displaystyle
    ~ \textstyle \scriptstyle \limits \nolimits \bf \it \rm \sf \tt \large \Large \huge \small \normalsize \nonumber
    ~ \notag \strut \mathstrut \par \newline \hline \relax \allowbreak \noindent \>
    \epsilon \varepsilon; \phi \varphi; \theta \vartheta
""".strip())) for synonym in synonyms}  # fmt: skip
NAMES |= {letter: rf"\{name}" for letter, name in zip("αβγδεζηθικλμνξορςστυφχψω", GREEK, strict=False)}
NAMES["\\ "] = " "
TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|(?<![A-Za-z])[A-Za-z]+|<[=>]|>=|\.\.\.|[~$]|[^\0-\x7f]")

# What becomes of a group behind a command: it falls out, its braces fall out, it is upright text
GROUPS = {rf"\{name}": role for role, names in {
    "": "phantom hphantom vphantom hspace hspace* vspace vspace* label tag tag* cancel bcancel xcancel sout color",
    "{}": "bold mathbf mathit mathtt mathnormal boldsymbol bm pmb underline boxed fbox smash mathop ensuremath",
    UPRIGHT: "text textbf textit textrm textsf texttt textnormal textup textsc emph mathrm mathsf mbox hbox "
             "operatorname operatorname* ce",
}.items() for name in names.split()}  # fmt: skip
# In brackets each comma parts, unless ", " or ";" stands there too, or 000 would be an item; 108,135,180,117 is a list
GROUPED = re.compile(
    r"[(\[⟅](?![^()\[\]⟅⟆]*(?:,\s|;|,0\d))[^()\[\]⟅⟆]*[)\]⟆]"
    r"|(?<![\d.,])(?!\d{3}(?:,\d{3}){3})[1-9]\d{0,2}(?P<groups>(?:,\d{3})+)(?!\d|,\d)"
)
GROUP = re.compile(r"(?:(\\(?!(?:cdot|times|div|pm|mp)\b)[A-Za-z]+\*?|[\^_])\s*|((?<=[}»\]])))?\{([^{}]*)\}")


def rules(table: str) -> list[tuple[re.Pattern, str]]:
    """The rules of a table: a pattern, an arrow, what takes its place. "x?" means that no letter follows, ␣ a space."""
    lines = [line.partition("⟶") for line in table.replace("x?", "(?![A-Za-z])").splitlines()]
    return [(re.compile(old.strip(" ")), new.strip(" ").replace("␣", " ")) for old, arrow, new in lines if arrow]


def rewritten(text: str, table: list[tuple[re.Pattern, str]]) -> str:
    for pattern, new in table:
        text = pattern.sub(new, text)
    return text


BRACED = r"""
    \\sqrt(\[\d+\])? (\d+) ⟶ \\sqrt\1{\2}
    \\(sqrt|[dtc]?frac|[dt]?binom|mathbb|hat|vec)(?![\s{\[]*\{)\s*(\[\d+\])?\s*([A-Z0-9]|\\[a-z]+x?|[a-z]) ⟶ \\\1\2{\3}
"""
# What LaTeX and plain text allow in several spellings, before braces fall out
MARKS = rules(r"""
    ([⁰¹²³⁴-⁹⁺⁻ⁿ]+) ⟶ ^{\1}
    ([₀-₉]+) ⟶ _{\1}
    [\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff] ⟶
    \s+ ⟶ ␣
    \\\\ ⟶ ⏎
    \\(?:\{|lbrace) ⟶ ⟅
    \\(?:\}|rbrace) ⟶ ⟆
    \\\$|(?<!\$)\$(?=\s*\d[^$]*$) ⟶ \\dollar␣
    \\begin\{comment\}.*?\\end\{comment\}|\\(?:m?kern|[hm]skip)\s*-?[\d.]+\s*[a-z]{2} ⟶
    (\\(?:text|f|page)?color(?:box)?|\\bbox)\s*\[[^\[\]]*\] ⟶ \1
    \\(?:textcolor|f?colorbox(?:\s*\{[^{}]*\}(?=\s*\{[^{}]*\}\s*\{))?|raisebox|scalebox)\s*\{[^{}]*\}|\\bbox ⟶
    \\rule\s*(?:\[[^\[\]]*\])?\s*\{[^{}]*\} ⟶ \\phantom
    # 1\,000 and 1{,}000; 5\text{K} is 5,000, 5 K a temperature
    (?<=\d)(?:\\[,!;: ]|~|\{,\}|,\s*\\[!,])\s*(?=\d{3}(?!\d)) ⟶
    \{,\} ⟶ .
    \\q?quad ⟶ ␣
    (?<=\d)\\text\{([KT])\} ⟶ \1
    \\(?:begin|end)\{(?!(?:[pbBvV]?matrix|cases|array)\})[^{}]*\} ⟶ ␣
    \\(?:vec|mathbf|boldsymbol|bm)\s*\{([A-Za-z])\} ⟶ ␣\1VECTOR
    \{([^{}]*)\\choose([^{}]*)\} ⟶ \\binom{\1}{\2}
    \\mathrm\s*\{([ei])\} ⟶ ␣\1
    (\d[spdf]\^)(\d)(?=\d[spdf]) ⟶ \1{\2}
    ([\^_])\s*([-+]?\d+(?:\.\d+)?|\\(?:math|text|bm)[a-z]*\s*\{[^{}]*\}) ⟶ \1{\2}
""".replace("VECTOR", VECTOR) + BRACED)  # fmt: skip
# And behind it
IDIOMS = rules(r"""
    [ ]+ ⟶ ␣
    « ⟶ {
    » ⟶ }
    \\(?:left|right|middle|[bB]igg?[lrm]?)x?\s*\.? ⟶
    # Lines of an equation, a system as a list, the branches of a function
    (?<![\s,;.])[\s,;.]*⏎(?:\[-?[\d.]+[a-z]+\])? ⟶ ⏎
    ⏎\s*(?=&?\s*=) ⟶
    (?:⟅\s*)?\\begin\{(cases|array)\}(?:\{[^{}]*\})?([^&]*?)\\end\{\1\} ⟶ \2
    \\begin\{cases\} ⟶ \\cases{
    \\end\{cases\} ⟶ }
    (?<!\s)\s*(?:,\s*)?&\s*(?:(?:if|for|when)x?\s*)? ⟶ &
    # Arguments without braces
""" + BRACED + rf"""
    \s+(?=[\^_]) ⟶
    (\\(?:frac|binom)\{{(?:[^{{}}]|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})*\}})\s*([A-Za-z0-9]|\\[a-z]+x?) ⟶ \1{{\2}}
    \\sqrt\s*(\[\d+\])?\s*\(((?:[^()]|\([^()]*\))*)\) ⟶ \\sqrt\1{{\2}}
    ([\^_])\s*\(([^()]*)\) ⟶ \1{{\2}}
    \s*([\^_])\s*([-+]?\d+(?:\.\d+)?|[A-Za-z*+-]|\\(?!frac|sqrt)[a-z]+x?) ⟶ \1{{\2}}
    \s*\^\{{\s*\\circ\s*\}} ⟶ \\degree␣
    \^\{{\s*('+)\s*\}} ⟶ \1
    \\(?:vec|hat(?=\{{[ijk]))\{{([A-Za-z]){VECTOR}?\}} ⟶ \1
    \\hat\{{([A-Za-z]){VECTOR}?\}} ⟶ \1_{{h}}
    (?<![\w\s\\])sec(?=[\s(^]) ⟶ \\sec␣
    # 1 000 000; a.m.
    (?<![\d.,])(\d{{1,3}}) (?=\d{{3}}(?: \d{{3}})*(?![\d/,]| ?\d)) ⟶ \1
    (?<=[\d\s}}])[aA](?:\.\s?)?[mM]\b\.? ⟶ am
    (?<=[\d\s}}])[pP](?:\.\s?)?[mM]\b\.? ⟶ pm
    # Signs
    (?:US\s*)?\\dollar|USD\s*(?=\d) ⟶ \\dollar␣
    (?<![A-Za-z])(?:Rs\.?|INR)\s*(?=\d) ⟶ \\rupee␣
    \\notx?\s*=|(?<![\w)])!= ⟶ \\ne␣
    (?<=[\w)}}])\s*\*\*\s* ⟶ ^
    \\mod\s*\{{([^{{}}]*)\}} ⟶ \\mod \1
    \(\s*\\mod\s*([^()]*)\) ⟶ \\mod \1
    \\in\s*([ZRNQ])x? ⟶ \\in \\mathbb{{\1}}
    {VECTOR}\s*\\times ⟶ \\wedge␣
    {VECTOR} ⟶
    # ]0, 1[
    (?:^|(?<=\\cup))\s*\] ⟶ (
    \[\s*(?=\\cup|$) ⟶ )
    (?<!\s)\s*{UPRIGHT}\s* ⟶ {UPRIGHT}
""")  # fmt: skip


def _reduced(match: re.Match) -> str:
    """A group without groups in it, and its command; the braces of an argument are « and »."""
    command, inside = match[1] or "", match[3].strip()
    role = GROUPS.get(command, "«" if command or match[2] is not None else "{}")
    if role == UPRIGHT:
        return f"{UPRIGHT}{match[3]} "
    if role == "«":
        return f"{command}«{inside}»"
    return (f" {inside}" if command and inside[:1].isalpha() else inside) if role == "{}" else role


@lru_cache(maxsize=8192)
def clean(text: str) -> str:
    """The answer in one spelling."""
    if len(text) > 4 * MAX_FORMULA:
        return text
    text = rewritten(text, MARKS)
    text = TOKEN.sub(lambda m: NAMES[m[0]] + " " * (m[0][0] != "\\") if m[0] in NAMES else m[0], text)
    # Not of ①③, which is no 13
    text = re.sub(r"[^\u2460-\u24ff]+", lambda m: unicodedata.normalize("NFKC", m[0]), text)
    for _ in range(MAX_DEPTH):
        text, num_groups = GROUP.subn(_reduced, text)
        if not num_groups:
            break
    text = GROUPED.sub(lambda m: m[0].replace(",", "") if m["groups"] else m[0], rewritten(text, IDIOMS))
    if not re.search(r"\\(?:begin|cases)", text):
        text = text.replace("⏎", ", ").replace("&", " ")
    return text.replace("⏎", r"\\").replace("⟅", r"\{").replace("⟆", r"\}").strip(" ")
