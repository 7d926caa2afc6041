r"""A mathematical answer, LaTeX or plain text, as tokens: `tokens`. What they say is read in `values.py`.

A token is a `\command`, a brace, a number (with its thousands: 1,000), a word, a mark, or one space. Fonts, sizes,
colours and all that prints nothing fall out here, with their braces; what means the same is one token. Braces are left
only as the argument of a command, of ^ or of _, where nothing can be without them: x^2 is x ^ { 2 }.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

MAX_FORMULA = 1000  # characters; what is longer is a text
UPRIGHT = "\u2009"  # the space before upright text: \text{ cm}
Tokens = tuple[str, ...]

GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi o pi rho varsigma sigma tau upsilon"
GREEK = dict(zip("αβγδεζηθικλμνξοπρςστυφχψω", [*GREEK.split(), *["varphi", "chi", "psi", "omega"]], strict=True))
SYMBOLS = str.maketrans({
    "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ",
    "≦": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≧": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/",
    "∕": "/", "−": "-", "–": "-", "—": "-", "⁻": "-", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "√": r"\sqrt ", "’": "'", "′": "'", "″": "''",
    "≈": r"\approx ", "≃": r"\approx ", "≡": r"\equiv ", "∖": r"\setminus ", "→": r"\to ", "ℵ": r"\aleph ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "∠": r"\angle ", "△": r"\triangle ", "Ω": r"\Omega ", "Ω": r"\Omega ",
    "Δ": r"\Delta ", "€": r"\euro ", "£": r"\sterling ", "₹": r"\rupee ", "¥": r"\yuan ", "￥": r"\yuan ",
} | {letter: rf"\{name} " for letter, name in GREEK.items()})  # fmt: skip
INVISIBLE = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")

# What a command does with the groups behind it: x leaves a group out, . keeps what is in it, t is upright text.
GROUPS = {rf"\{name}": roles for roles, names in {
    "x": "phantom hphantom vphantom hspace hspace* vspace vspace* label tag tag* cancel bcancel xcancel sout color kern",
    "x.": "textcolor colorbox raisebox scalebox href", "xx.": "fcolorbox", "xx": "rule",
    ".": "mathbf mathit mathtt mathnormal boldsymbol bm pmb underline boxed fbox smash mathop ensuremath",
    "t": "text textbf textit textrm textsf texttt textnormal textup textsc emph mathrm mathsf mbox hbox operatorname "
         "operatorname* ce rm",
}.items() for name in names.split()}  # fmt: skip
VECTORS = {r"\mathbf", r"\boldsymbol", r"\bm", r"\pmb"}  # fonts of letters whose product has an order
FUNCTIONS = "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc log ln exp gcd lcm"
SYNONYMS = {name: meaning for meaning, names in {
    r"\frac": r"\dfrac \tfrac \cfrac", r"\binom": r"\dbinom \tbinom", r"\ne": r"\neq != <> \not=", "<": r"\lt",
    r"\le": r"\leq \leqslant \leqq <=", r"\ge": r"\geq \geqslant \geqq >=", ">": r"\gt", r"\{": r"\lbrace",
    r"\}": r"\rbrace", "(": r"\lparen", ")": r"\rparen", "[": r"\lbrack", "]": r"\rbrack", ":": r"\colon",
    "|": r"\lvert \rvert \vert \mid", r"\|": r"\lVert \rVert \Vert", r"\approx": r"\simeq \thickapprox",
    r"\emptyset": r"\varnothing", r"\degree": r"\textdegree", r"\mathbb{R}": r"\R \reals", r"\sterling": r"\pounds",
    r"\dollar": r"\$ \textdollar", r"\setminus": r"\backslash \smallsetminus", "i": r"\imath", "j": r"\jmath",
    "'": r"\prime", r"\to": r"\rightarrow \longrightarrow", r"\infty": "infinity", r"\sqrt": "sqrt", r"\pi": "pi",
    r"\mod": r"mod \bmod \pmod \pod", "^": "**", r"\lg": "lg", r"\tan": r"tg \tg", r"\cot": r"ctg \ctg cotg \cotg",
    r"\arctan": r"arctg \arctg", r"\arccot": r"arcctg \arcctg", "*": r"\ast \*", r"\cdots": r"\dotsb \dots \ldots ...",
    "%": r"\%", "&": r"\&", "#": r"\#",
    " ": r"\, \; \: \! ~ \quad \qquad \enspace \enskip \thinspace \hfill \displaystyle \textstyle \scriptstyle \limits "
         r"\nolimits \bf \it \sf \tt \large \Large \huge \small \normalsize \nonumber \notag \strut \mathstrut \( \) \[ \]"
         r" \par \newline \hline $ $$ \relax",
}.items() for name in names.split()} | {name: rf"\{name}" for name in FUNCTIONS.split()} | {"\\": " ", "": " "}  # fmt: skip
ARGUMENTS = {"^": 1, "_": 1, r"\sqrt": 1, r"\frac": 2, r"\binom": 2, r"\vec": 1, r"\hat": 1, r"\overline": 1}
BARE = ["cdot", "times", "pm", "mp", "div", "in", "le", "ge", "ne", "to", "cup", "cap", "setminus", "infty", "degree", "circ", "dollar", "mod", "approx", "equiv", "choose"]
BARE = {rf"\{name}" for name in BARE}
BARE |= {rf"\{name}" for name in GREEK.values()}  # behind other commands braces stay
MATRIX = r"[pbBvV]?matrix|cases|array"  # other environments only set lines

TOKEN = re.compile(rf"""
    \\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?(?P<size>)
    |\\(?P<edge>begin|end)\s*\{{\s*(?:(?P<matrix>{MATRIX})|[A-Za-z]+)\*?\s*\}}(?:\s*\{{[lcr|\s]*\}})?
    |\\\\(?:\s*\[-?[\d.]+[a-z]+\])?(?P<line>) |\\(?:mathbb|Bbb)\s*\{{?\s*(?P<set>[A-Z])(?![A-Za-z])\s*\}}?
    |\\q?quad |\\not\s*= |\\[A-Za-z]+\*? |\\.
    |(?P<spaced>(?<![\d.,])\d{{1,3}}(?:(?:[\ ~]|\\[,!;:\ ]\s*|,\s*\\[!,]\s*)\d{{3}})+(?![\d/,]|\ ?\d)(?:\.\d+)?)
    |(?P<number>\d+(?:(?:,|\{{,\}})\d+)*(?:\.\d+)*|\.\d+) |(?P<rupee>(?<![A-Za-z])(?:Rs\.?|INR)\s*(?=\d))
    |(?P<half_day>(?<=[\d\s{{}}])(?:[apAP]\.\s?[mM]\b\.?|[AaPp]m\b|[AP]M\b))
    |(?P<word>[A-Za-z]+) |[①-⑳] |[^\W\d_A-Za-z①-⑳]+ |(?P<space>\s+)
    |(?<![\w)])!=|[<>]=|<>|\*\*|\.\.+|'+|!+|\$\$ |.
""", re.VERBOSE | re.DOTALL)  # fmt: skip


@lru_cache(maxsize=8192)
def tokens(text: str) -> Tokens:
    """The tokens of an answer."""
    if len(text) > 4 * MAX_FORMULA:
        return (text,)
    text = re.sub(r"([⁰¹²³⁴-⁹⁺⁻ⁿ]+)", r"^{\1}", text)
    text = re.sub(r"([₀-₉]+)", r"_{\1}", text)
    # Not of ①③, which is no 13
    text = re.sub(r"[^\u2460-\u24ff]+", lambda m: unicodedata.normalize("NFKC", m[0]), text.translate(SYMBOLS))
    text = re.sub(r"^[`*\s]+|(?<!\^)[`*\s]+$", "", INVISIBLE.sub("", text))
    is_price = re.fullmatch(r"[^$]*(?<!\\)\$\s*\d[^$]*", text)  # a lone dollar sign before a number
    reader = Reader()
    for match in TOKEN.finditer(text):
        reader.read(match, r"\dollar" if is_price and match[0] == "$" else match[0])
    return tuple(_opened(reader.found))


class Reader:
    """Puts the tokens of a text into `found`, one after the other."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.opened: list[tuple[str, int, int, str]] = []  # brackets: role, place, `wanted` and `roles` behind them
        self.matrices: list[int] = []  # where they begin
        self.roles = ""  # of the next groups, see `GROUPS`
        self.wanted, self.command = 0, ""  # arguments that this command still takes
        self.is_vector, self.vector_end = False, -1  # whether the font is bold; behind the last letter in bold

    def read(self, match: re.Match, token: str) -> None:
        """Takes in what matched; `token` is its text."""
        kind, token = match.lastgroup, SYNONYMS.get("".join(token.split()), token)
        last = next((each for each in reversed(self.found[-2:]) if not each.isspace()), "")
        behind = match.string[match.end() : match.end() + 2]
        if token == r"\sec" and match[0] == "sec" and last[-1:].isdigit():
            token = "sec"
        if kind == "edge" or (token == "&" and not self.matrices):
            token = " "
        if token == "{":
            self.open(last, is_glued=behind in ("K}", "T}") and last[-1:].isdigit())
        elif token == "}":
            self.close()
        elif token == " ":
            if not self.roles and (not self.wanted or last == r"\sqrt"):
                self.space()
        elif token in GROUPS:
            self.roles = "" if self.wanted and GROUPS[token] in (".", "t") else GROUPS[token]
            self.is_vector = token in VECTORS
        elif self.roles[:1] == "x":  # \phantom 1
            self.roles = ""
        elif kind == "matrix":
            self.matrix(match[0], match["matrix"])
        elif kind != "size":
            self.roles = ""
            self.add(kind, match[0] if kind in ("spaced", "number") else token, last, behind)

    def space(self, sign: str = " ") -> None:
        if self.found and self.found[-1] != "{":
            self.found[-1].isspace() or self.found.append(sign)
            self.found[-1] = sign

    def open(self, last: str, is_glued: bool) -> None:
        role, roles = self.roles[:1], self.roles[1:]
        if not role:
            role = "{" if self.wanted or (last[:1] == "\\" and last[1:].isalpha() and last not in BARE) else "."
        if role == "t" and not is_glued:  # 5\text{K} is 5,000, but 5 K is a unit
            self.space(UPRIGHT)
        self.opened.append((role, len(self.found), max(self.wanted - 1, 0), roles))
        self.wanted, self.roles = 0, ""
        if role == "{":
            self.found.append("{")

    def close(self) -> None:
        """Ends a group, and the round brackets that are left open in it."""
        while self.opened and self.opened[-1][0] in "(s[m":
            self.opened.pop()
        if not self.opened:
            return
        role, start, wanted, roles = self.opened.pop()
        if role == "x":
            del self.found[start:]
        elif role == "t":
            self.space()
        elif role in "{c":
            self.end_argument(start)
        if role == "." and self.is_vector and len(self.found) == start + 1:
            self.vector_end = len(self.found)
        self.wanted, self.roles = wanted, roles

    def end_argument(self, start: int) -> None:
        """Closes the brace that stands at `start`; what it makes with its command may be one token."""
        found = self.found
        if found[-1].isspace():
            found.pop()
        content, command = found[start + 1 :], found[start - 1] if start else ""
        found.append("}")
        if command in ("^", "_") and not content:
            del found[start - 1 :]
        elif command == "^" and content == [r"\circ"]:
            found[start - 1 :] = [r"\degree"]
        elif command == "^" and set("".join(content)) == {"'"}:
            found[start - 1 :] = ["".join(content)]
        elif command in (r"\vec", r"\hat") and len(content) == 1 and content[0].isalpha():
            found[start - 1 :] = content
            self.vector_end = len(found) if command == r"\vec" else -1

    def matrix(self, text: str, name: str) -> None:
        """Begins or ends a matrix. Lines without columns are a list: {cases} of a system."""
        found = self.found
        if text.startswith(r"\begin"):
            self.matrices.append(len(found))
            found.append(rf"\begin{{{name}}}")
        elif self.matrices:
            start = self.matrices.pop()
            if name in ("cases", "array") and "&" not in found[start:]:
                found[start:] = ["," if token == r"\\" else token for token in found[start + 1 :]]
                if found[start - 1 : start] == [r"\{"]:
                    del found[start - 1]
            else:
                name = "pmatrix" if name == "array" else name
                found[start:] = [rf"\begin{{{name}}}", *_rows(found[start + 1 :]), rf"\end{{{name}}}"]

    def add(self, kind: str | None, token: str, last: str, behind: str) -> None:
        found, top = self.found, self.opened[-1][0] if self.opened else ""
        if token == "(" or (token == "[" and last == r"\sqrt"):
            is_argument = token == "(" and self.wanted and self.command in ("^", "_", r"\sqrt")
            self.opened.append(("s" if is_argument else token, len(found), self.wanted, ""))
            found.append("{" if is_argument else token)
            self.wanted = 0
        elif (token == ")" and top in ("(", "s", "m")) or (token == "]" and top == "["):
            _, start, wanted, _ = self.opened.pop()
            self.wanted = max(wanted - 1, 0) if top == "s" else wanted
            if top == "s":
                self.end_argument(start)
            elif top != "m":
                found.append(token)
        elif self.wanted and (kind in ("number", "word") or token[0] == "\\" or token in "+-*'"):
            self.argument(kind, token, behind)
        elif kind == "number":
            found.extend(_number(token))
        elif kind == "spaced":
            found.append(re.sub(r"[^\d.]", "", token))
        elif kind == "set":
            found.append(rf"\mathbb{{{token.strip(' }')[-1]}}}")
        else:
            self.add_mark(kind, token, last, top)
        if found and found[-1] in ARGUMENTS:
            self.wanted, self.command = ARGUMENTS[found[-1]], found[-1]

    def argument(self, kind: str | None, token: str, behind: str) -> None:
        """An argument without braces: \\frac12, x^2, x^-1; of a word its first letter."""
        found = self.found
        if token in ARGUMENTS:
            found.append(token)
            return
        if found[-1] == "-" and found[-2] == "{":  # x^-1
            found.append(token)
            self.wanted -= 1
            self.end_argument(len(found) - 3)
            return
        is_split = kind == "word" or (
            kind == "number" and self.command in (r"\frac", r"\binom", r"\sqrt") and not found[-1].isspace()
        )
        pieces = [*token] if is_split else [token]
        while pieces and self.wanted:
            if found[-1].isspace():
                found.pop()
            found += ["{", pieces.pop(0)]
            if found[-1] == "-" and self.command == "^" and (behind[:1].isalnum() or behind[:1] == "\\"):
                return
            self.wanted -= 1
            self.end_argument(len(found) - 2)
        if pieces:
            found.append("".join(pieces))

    def add_mark(self, kind: str | None, token: str, last: str, top: str) -> None:
        found = self.found
        self.wanted = 0
        if token in ("^", "_", r"\degree") or (token == "=" and last == ","):  # 3 + 4 \\ = 7
            while found and (found[-1].isspace() or found[-1] == "," and token == "="):
                found.pop()
        if token == r"\mod" and last == "(" and "(" in (top, self.opened[-2:][0][0]):  # (mod 7)
            while found.pop() != "(":
                pass
            at = -1 if top == "(" else -2
            self.opened[at] = ("m", *self.opened[at][1:])
        elif token == r"\dollar" and last == "US":
            del found[-1 - (found[-1].isspace()) :]
        elif token == r"\times" and len(found) - ("".join(found[-1:]).isspace()) == self.vector_end:
            token = r"\wedge"
        if kind == "half_day":
            token = token[0].lower() + "m"
        elif kind == "rupee":
            token = r"\rupee"
        elif kind == "line":
            token = r"\\" if self.matrices else ","
        if token == r"\choose":
            self.choose()
        else:
            found.append(token)

    def choose(self) -> None:
        """{n \\choose k}, or of two single tokens."""
        found = self.found
        while "".join(found[-1:]).isspace():
            found.pop()
        role, start, *rest = self.opened[-1] if self.opened else ("", len(found) - 1)
        if role in ("{", "."):
            start += role == "{"
            self.opened[-1] = ("c", len(found) + 3, *rest)
            found[start:start] = [r"\binom", "{"]
            found += ["}", "{"]
        elif found:
            found[-1:] = [r"\binom", "{", found[-1], "}"]
            self.wanted, self.command = 1, r"\binom"


def _number(token: str) -> list[str]:
    """1,000 and 0,25 as they are; of another number with commas the parts. 1{,}000 is 1000, and 3{,}14 is 3.14."""
    digits = token.replace("{,}", ",")
    is_large = re.fullmatch(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", digits)
    if "{" in token:
        return [digits.replace(",", "" if is_large else ".")]
    if (
        "," not in token
        or re.fullmatch(r"0,\d+", token)
        or (is_large and not re.fullmatch(r"\d{3}(?:,\d{3}){3,}", token))
    ):
        return [token]
    return re.findall(r"[^,]+|,", token)


def _rows(found: list[str]) -> list[str]:
    """The rows of a matrix without spaces, and without commas and "if" around their columns."""
    found = [token for token in found if not token.isspace() and token not in ("if", "for", "when")]
    ends = (*found[1:], r"\\")
    return [token for token, behind in zip(found, ends, strict=True) if token not in ",." or behind not in ("&", r"\\")]


def _opened(found: list[str]) -> list[str]:
    """]0, 1[ as (0, 1)."""
    places = [i for i, token in enumerate(found) if not token.isspace()]
    edges = [False, *(found[i] == r"\cup" for i in places), False]
    for at, i in enumerate(places):
        if found[i] == "]" and (at == 0 or edges[at]):
            found[i] = "("
        elif found[i] == "[" and (at == len(places) - 1 or edges[at + 2]):
            found[i] = ")"
    return found
