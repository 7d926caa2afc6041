"""Whether a mathematical answer equals the answer key, both as LaTeX or plain text: `equal`.

Numbers are compared exactly, as fractions. Tuples, sets, lists and intervals are compared element
by element, with their brackets. What is left, a formula, an equation or a matrix, goes to SymPy by
way of math-verify. The first two are there because math-verify alone accepts too much (a set for a
tuple), and because it takes milliseconds.

Nothing here has a time limit: a formula that SymPy cannot finish ends with the worker (`pool.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify import verify
from mpmath.libmp import NoConvergence
from sympy import Basic, Derivative, Eq, Expr, Float, I, Integral, Limit, Pow, Product, Sum, Symbol, factorial, log
from sympy.core.function import AppliedUndef
from sympy.polys.polyerrors import BasePolynomialError

from grading.answer import read_answer
from grading.spelling import MAX_FORMULA, clean, rewritten, rules
from grading.values import DATED, MATRICES, Value, latex, parse_value, quantity, text_of

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off

MAX_WORDS = 12  # words of an answer key: more are a sentence
MAX_DIGITS = 10_000  # digits of a number that SymPy may be asked to write out
MAX_TERMS = 100  # of a sum or product that SymPy may be asked to work out
MAX_EXPONENT = 200  # the power of a sum, which SymPy may be asked to expand
# Quarters up to 25, one in each unit up to 2,100, 60 in a decade from 1e-8 to 1e12, with both signs
GRID = [k / 4 for k in range(101)] + [k + 0.6180339887 * k % 1 for k in range(2100)]
GRID += [10 ** (k / 60) for k in range(-480, 721)]
GRID += [-place for place in GRID]
# They change their form from place to place
BREAKING = (sympy.Abs, sympy.sign, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min, Pow)
# What would be worked out numerically, at length, and functions that nobody has defined.
UNFINISHED = (Sum, Product, Integral, Limit, Derivative, AppliedUndef)
# SymPy raises these (NotImplementedError, too) for formulas that it cannot treat: then the next comparison decides.
UNSOLVED = (TypeError, ValueError, ArithmeticError, NotImplementedError, RecursionError, NoConvergence)
NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True)
CONVERSION = ConversionConfig(lowercase_symbols=False)
# Letters that the parser takes for constants, d and ^T, by rare ones, which are indexed for that
STAND_INS = {letter: f"{other} " for letter, other in map(str.split, r"""
    \gamma \upsilon; I \varsigma; E \varpi; e_ \omicron_; d \vartheta; T \varrho; \upsilon u_{91}; \varsigma u_{92}
    \varpi u_{93}; \omicron u_{94}; \vartheta u_{95}; \varrho u_{96}
""".strip().replace(";", "\n").split("\n"))}  # fmt: skip
UNREADABLE = re.compile(  # or skipped by the parser without a word, such as the index of 1_2
    r"(?<![\w^.{])\d[\d.]*_|\d_\{s\}|\)_|[\d)]'|_\{[^{}]*\{|[^\0-\x7f]"
    # Its time, or SymPy's, grows steeply with these
    r"|binom\{\d{6}|(?:gcd|lcm)\W.*[a-z^]|\\(?:lnot|over)(?![a-z])|\*\*|\^(?:\w|\{[^{}]*\})\^"
    r"|(?:\\begin\{array.*){2}|(?:\\(?:sum|prod|int)(?![a-z]).*){4}"
)
REPAIRS = rules(r"""
    # What the parser does not know
    (\d+(?:\.\d+)?)\\degree ? ⟶ (\1\\cdot\\frac{\\pi}{180})
    \\log_\{e\} ⟶ \\ln␣
    \\lgx? ? ⟶ \\log_{10}␣
    \\sqrt\[(\d*[13579])\]\{-([\d.]+)\} ⟶ (-\\sqrt[\1]{\2})
    (?<![\d.}])(\d+)/(\d+)(?=[A-Za-z]) ⟶ \\frac{\1}{\2}
    (?<![A-Za-z\\])C(?:\((\d+),(\d+)\)|_\{(\d\d+|[3-9]|n)\}\^\{(\d+|[kmr])\}) ⟶ \\binom{\1\3}{\2\4}
    # It adds 2 and 4 in 2(4)
    (?<=[\d)])(?<!_\d)\s*(?=\(\s*-?\d) ⟶ \\cdot␣
    (?<=[\w})])\|\|(?=[\w({\\]) ⟶ |\\cdot|
    \\(min|max)\\\{([^{}]*)\\\} ⟶ \\\1(\2)
    ([A-Za-z])'{3} ⟶ \1_{ppp}
    ([A-Za-z])'' ⟶ \1_{pp}
    ([A-Za-z])' ⟶ \1_{p}
    \^\s*\{?\s*(?:\*|\\ast)\s*\}? ⟶ _{s}
""")
DIFFERENTIAL = re.compile(r"\\int|\\frac\s*\{\s*d.{0,3}\}\s*\{\s*d|d\w?\s*/\s*d")
TOKEN = re.compile(r"\\(?:text|begin|end|mathbb|mathcal|mathrm)\s*\{[^{}]*\}|_\{[^{}]*\}|\\[A-Za-z]+|e_|[A-Za-z]")


@lru_cache(maxsize=8192)
def equal(key: str, answer: str) -> bool:
    """True if the answer equals the key: values, brackets, order where there is one, and units matter, forms do not.

    An answer may leave out the key's unit or bring one where the key has none, but not another one. The key 50\\% is
    equalled by 50, 50\\% and 0.5. Decimals are exact: 0.333 is not 1/3. The key 3 is not equalled by "3 or 4".
    """
    if key.strip() == answer.strip():
        return key.strip() != ""
    if (value := parse_value(clean(key))) != ("words", "") and _same(value, parse_value(clean(answer))):
        return True
    texts = [latex(clean(text)) for text in (key, answer)]
    return "matrix}" in "".join(texts) and same_formula(*texts)


def _same(key: Value, answer: Value) -> bool:
    if key == answer:
        return True
    match key, answer:
        case ("chain", (*_, result)), _:
            return _same(result, answer)
        case _, ("chain", (*sides, result)):  # false for 2 + 3 = 6
            return _same(key, result) and all(_same(result, side) for side in sides)
        case ("named", name, value, _), ("named", name_2, value_2, _) if (
            name == name_2 or ("y" in (name, name_2) and "(x)" in name + name_2)  # a curve is y or f(x)
        ):
            return _same(value, value_2)
        case ("named" | "equation", *_, text), ("named" | "equation", *_, text_2):
            return same_formula(text, text_2)
        case ("named", _, value, _), _:
            return _same(value, answer)
        case _, ("named", _, value, _):
            return _same(key, value)
        case (("either", values), other) | (other, ("either", values)):
            return any(_same(value, other) for value in values)
        case (("words", text), ("formula", formula, _)) | (("formula", formula, _), ("words", text)):
            is_product = r"\cdot" in formula and re.fullmatch("[A-Z]{2}", text) and not MATRICES & {*text}  # V = IR
            return text_of(formula) == ("words", text) or (is_product and same_formula(text, formula))
        case ("number", value, _), ("words", text) if DATED.fullmatch(text):  # 10 - 3 is 7, but 4-1 no 5-2
            return same_formula(value, text)
        case (("words", text), ("list", items)) | (("list", items), ("words", text)):
            letters = [str(item[1]).casefold() for item in items]  # A, C, D is ACD
            return letters == [*text.casefold()]
        case (("choice", *_), _) | (_, ("choice", *_)):
            return _same_choice(key, answer)
        case ("number" | "formula", *_), ("number" | "formula", *_):
            return _same_quantity(key, answer)
        case ("list", items), ("list", items_2) if _is_order(items):
            return _same_ordered(items, items_2)
        case (("list" | "set", items), ("list" | "set", items_2)) | (("union", items), ("union", items_2)):
            return _same_unordered(items, items_2)
        case ("sequence", brackets, items, names), ("sequence", brackets_2, items_2, names_2):
            are_named_alike = not names or not names_2 or names == names_2
            return brackets == brackets_2 and are_named_alike and _same_ordered(items, items_2)
        case (("sequence", _, values, names), ("list", parts)) | (("list", parts), ("sequence", _, values, names)) if (
            len(names) > 1 and {name[:-2] for name in names} == {part[1] for part in parts if part[0] == "named"}
        ):  # x_1 = 2, x_2 = -3 is x = 2, x = -3
            return _same_unordered(values, tuple(part[2] for part in parts))
        case (("sequence", "()", point, names), ("list", parts)) | (
            ("list", parts),
            ("sequence", "()", point, names),
        ):
            is_point = len(names) != 1 and all(part[0] != "named" for part in parts)  # x < 1 has one name
            return is_point and _same_ordered(point, parts)
    return False


def _is_order(items: tuple[Value, ...]) -> bool:
    """Whether a key's list is an order: x, y, x; yes, no; C, A, B."""
    texts = [str(item[1]) for item in items]
    is_shuffled = texts != sorted(texts) and re.fullmatch("[A-Z]+", "".join(texts))
    has_verdicts = not {"yes", "no", "true", "false"}.isdisjoint(texts)
    return items[0][0] != "number" and (len({*items}) < len(items) or has_verdicts or bool(is_shuffled))


def _same_choice(key: Value, answer: Value) -> bool:
    """True if letters agree, or the values beside them: the key (C) 12 is met by C and by 12, the key 12 by (C) 12."""
    match key, answer:
        case ("choice", letter, value), ("choice", letter_2, value_2):
            return letter == letter_2 and (None in (value, value_2) or _same(value, value_2))
        case ("choice", letter, value), (kind, text, *_):
            key = value
        case (kind, text, *_), ("choice", letter, value):
            answer = value
    return (kind == "formula" and text.upper() == letter) or _same(key, answer)


def _same_ordered(keys: tuple[Value, ...], answers: tuple[Value, ...]) -> bool:
    return len(keys) == len(answers) and all(map(_same, keys, answers))


def _same_unordered(keys: tuple[Value, ...], answers: tuple[Value, ...]) -> bool:
    """Whether each key has an answer of its own. The first that fits will do: what equals it equals the others, too."""
    left = list(answers)
    for key in keys:
        fit = next((answer for answer in left if _same(key, answer)), None)
        if fit is None:
            return False
        left.remove(fit)
    return not left


def _same_quantity(key: Value, answer: Value) -> bool:
    # What is glued to a number is a unit where the other side has one: 0.64N.
    if key[2]:
        answer = quantity(str(answer[1]), is_apart=True) or answer
    if answer[2]:
        key = quantity(str(key[1]), is_apart=True) or key
    match key, answer:
        case ("number", percent, "%"), ("number", value, ""):
            return value in (percent, percent / 100)
        case ("number", _, ""), ("number", _, unit) if unit.startswith("base"):  # 12_3 is no 12
            return False
        case ("number", value, ""), ("number", percent, "%"):
            return percent / 100 == value
        case (_, _, unit), (_, _, unit_2) if unit and unit_2 and unit != unit_2:
            return False
        case ("number", value, _), ("number", value_2, _):
            return value == value_2
    return any(same_formula(key[1], renamed) for renamed in _renamed(str(key[1]), str(answer[1])))


# A key with the constants of an integral or a general solution: x^2 + C, C_1e^x + C_2; no a + b + c
FAMILY = re.compile(
    r"(?=.*[+ex])(?=.*(?:[CK]|c_))(?:(?<![^-+])[CKc](?:(?=e|$)|_\{\d\}(?=[ex]|\\(?:cos|sin)|$))|[^A-Z\\]|\\[A-Za-z]++)++"
    r"|(?:[^A-Za-z\\]|\\[a-z]++ ?|[xtu])+\+c"
)
FRONT = re.compile(r"^([A-Zck](?:_\{\d\})?)([-+].*)$")  # C + x^2
LETTERS = re.compile(r"\\[A-Za-z]+|([A-W](?:_\{\d\})?|[ck]_\{\d\}|(?<=\+)[ck]$)")


def _renamed(key: str, answer: str) -> Iterator[str]:
    """The answer, and the same with the key's letters for constants, in any order."""
    yield answer
    key, answer = (FRONT.sub(r"\2+\1", text).removeprefix("+") for text in (key, answer))
    constants, letters = ([*dict.fromkeys(filter(None, LETTERS.findall(x)))] for x in (key, answer))
    if not FAMILY.fullmatch(key) or len(constants) != len(letters):
        return
    for names in itertools.islice(itertools.permutations(constants), 6):
        new = dict(zip(letters, names, strict=True))
        renamed = LETTERS.sub(lambda match, new=new: new.get(match[1], match[0]), answer)
        left_letters = re.findall(r"\\[A-Za-z]+|[A-Za-z]", renamed)  # of sin kx + k
        if {*letters}.difference(constants).isdisjoint(left_letters):
            yield renamed


# A single formula in SymPy --------------------------------------------------------------------------------------------


@lru_cache(maxsize=8192)
def read_formula(text: str | Fraction) -> Basic | None:
    """The formula in SymPy, unevaluated; None if math-verify cannot read it or it is too large to be worked out."""
    text = rewritten(str(text)[: MAX_FORMULA + 1], REPAIRS)
    if len(text) > MAX_FORMULA or UNREADABLE.search(text):
        return None
    text = re.sub(r"(?<![\d.,])(\d*\.\d+)(?![\d.])", lambda m: f"{{{Fraction(m[1])}}}", text)
    kept = "d" if DIFFERENTIAL.search(text) else "T" if "matrix" in text else ""
    text = TOKEN.sub(lambda m: m[0] if m[0] == kept else STAND_INS.get(m[0], m[0]), text)
    formula = None
    with contextlib.suppress(Exception):  # nothing narrower: for a syntax error the parser raises Exception itself
        latex = normalize_latex(text, NORMALIZATION)
        formula = latex2sympy(latex, is_real=True, normalization_config=None, conversion_config=CONVERSION)
    if not isinstance(formula, Basic):
        return formula
    if not _is_small(formula) or formula.has(sympy.nan, sympy.zoo):
        return None
    letters = {symbol: I for symbol in formula.free_symbols if symbol.name == "i"}
    for slope in formula.atoms(Derivative):  # dy/dx is no 0, but a letter of its own
        if slope.expr.free_symbols.isdisjoint(slope.variables):
            letters[slope] = Symbol(str(slope), real=True)
    return formula.xreplace(letters)


def _is_small(formula: Basic) -> bool:
    """False if a power or factorial in it has more digits than anyone would write out: SymPy would try. And for 0^0."""
    for part in sympy.postorder_traversal(formula):
        digits = 3 * part.args[0] if isinstance(part, factorial) else sympy.S.Zero
        if isinstance(part, Pow | sympy.exp):  # a sum would be expanded
            base, exponent = part.as_base_exp()
            digits = exponent * (log(abs(base), 10) if base.is_number else base.is_Add * MAX_DIGITS / MAX_EXPONENT)
        if isinstance(part, Sum | Product):
            digits = sum(last - first for _, first, last in part.limits) * MAX_DIGITS / MAX_TERMS
        if digits.is_number and not (digits.is_finite and abs(digits.evalf()) <= MAX_DIGITS):
            return False
    return True


def same_formula(key: str | Fraction, answer: str | Fraction) -> bool:
    """Whether both agree where both are real, to 60 digits; what has no value, such as a matrix, SymPy compares."""
    gold, pred = read_formula(key), read_formula(answer)
    if gold is None or pred is None:
        return False
    symbols = sorted(gold.free_symbols | pred.free_symbols, key=str)
    are_equations = isinstance(gold, Eq) and isinstance(pred, Eq)
    if are_equations:
        try:
            gold, pred = (sympy.fraction(sympy.together(side.lhs - side.rhs))[0] for side in (gold, pred))
        except UNSOLVED:  # a letter that is a matrix
            return False
    are_rational = all(isinstance(side, Expr) and side.is_rational_function() for side in (gold, pred))
    points = _points(symbols)[: 2 if are_rational else None]
    if are_equations:  # they agree if one is a multiple of the other
        gold /= pred
        pred = next((value for point in points if (value := _value(gold, point))), sympy.nan)
    num_same = 0
    for point in itertools.chain(points, _doubtful_points(gold, pred, points)):
        first, second = _value(gold, point), _value(pred, point)
        if first is None or second is None:
            continue
        size = max(abs(first), abs(second))
        if abs(first - second) > 1e-40 * size > 1e-80:  # a smaller one may be the noise of a zero
            return False
        if not num_same and (difference := gold.doit() - pred.doit()).is_Rational:
            return difference == 0  # exact: 60 digits do not tell 2^1009 - 1 from 2^1009
        num_same += bool(size > 1e-40)
    if num_same > min(len(symbols), 1):
        return True
    return verify(gold, pred, float_rounding=10, timeout_seconds=None)


def _points(symbols: list[Symbol]) -> list[dict[Symbol, Float]]:
    """Odd points near and far, of all signs of three symbols, in all orders: sqrt((x - 50)^2) is 50 - x up to 50."""
    points = []
    for k in range(24 if symbols else 1):
        point = {}
        for i, symbol in enumerate(symbols):
            share = 0.61803398874989 * (k + 1) * (i + 1) % 1
            point[symbol] = Float(f"{share * (1, 40, 2000)[k % 3]}", 60) * (-1) ** (k % 8 >> i & 1)
        points.append(point)
    return points


def _doubtful_points(gold: Basic, pred: Basic, points: list[dict[Symbol, Float]]) -> Iterator[dict[Symbol, Float]]:
    """Points along each symbol where both differ in floats, if they change their form: 0.99 < sin x is narrow."""
    sides = gold, pred
    if not all(isinstance(side, Expr) and not side.has(*UNFINISHED) for side in sides):
        return
    breaking = [part for side in sides for part in side.atoms(*BREAKING) if not part.args[-1].is_Integer][:12]
    starts = points[: min(len(points[0]), 2)]  # the other symbols'; for one symbol one will do
    for start, symbol in itertools.product(starts if breaking else [], [*points[0]][:4]):
        rest = {other: value for other, value in start.items() if other != symbol}
        first, second = (sympy.lambdify(symbol, x.subs(rest), "math", dummify=True) for x in sides)
        found = []
        for place in GRID + _breaks(breaking, rest, symbol):
            with contextlib.suppress(NameError, *UNSOLVED):  # not real there, or unknown to floats
                value = first(place)
                if abs(value - second(place)) > 1e-9 * abs(value):
                    found.append({**start, symbol: Float(repr(place), 60)})
        yield from found[:: len(found) // 20 + 1]


def _breaks(breaking: list[Expr], rest: dict[Symbol, Float], symbol: Symbol) -> list[float]:
    """At and beside the real roots of what stands in bars, roots and floors, and between maxima."""
    places = []
    for part in breaking:
        for step in (-1, 0, 1, 2, *part.args[1:]):  # the first four for floors, the others for maxima
            with contextlib.suppress(BasePolynomialError, *UNSOLVED):  # |sin x| has no polynomial
                polynomial = sympy.Poly((part.args[0] - step).subs(rest), symbol)
                roots = polynomial.nroots(15) if 0 < polynomial.degree() <= 8 else []
                for root in [float(root) for root in roots if root.is_real]:
                    places += [root, root - 1e-3, root + 1e-3, 0.999 * root, 1.001 * root]
    return places


def _value(formula: Basic, point: dict[Symbol, Float]) -> Expr | None:
    """Its value to 60 digits at this point; None if it has none that is finite, or a root or logarithm is not real."""
    if not isinstance(formula, Expr) or formula.has(*UNFINISHED):
        return None
    try:
        for part in formula.atoms(Pow, log, sympy.asin, sympy.acos):
            is_whole_power = part.is_Pow and part.exp.is_Integer
            is_limited = part.args[0].free_symbols and not is_whole_power
            if is_limited and part.subs(point).is_real is False and not formula.has(I):
                return None
        value = formula.subs(point).evalf(60)
        parts = value.as_real_imag()
    except UNSOLVED:
        return None  # `verify` decides
    return value if all((part.is_Float or part.is_Rational) and part.is_finite for part in parts) else None


# Answer keys ----------------------------------------------------------------------------------------------------------


SENTENCE = re.compile(  # There are 15 ways. The value of $x$ is $5$.
    r"[A-Z](?:[^$\d]|\$[^$\d]+\$)*\s(?:is|are|has|have|equals|gets?|obtain)\s+"
    r"(?P<value>(?:\$[^$]+\$|[^\s$]*\d[^\s$]*)(?:\s[a-z]+){0,3})\s*\.?"
)


def key_content(key: str) -> str:
    """The answer in an answer key: in its last box or <answer>, or at the end of a sentence; else all of it."""
    if re.search(r"\\(?:boxed|fbox)\b|<answer>", key):
        return read_answer(key) or ""
    sentence = SENTENCE.fullmatch(key.strip())
    return sentence["value"] if sentence else key


def check_key(key: str) -> None:
    """Raises ValueError, in a few words, if nothing could be graded against this key."""
    text = clean(key_content(key))
    for is_met, problem in (
        (len(text) > MAX_FORMULA, f"no \\boxed answer in a key of {len(key)} characters"),
        (len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)) > MAX_WORDS, "a sentence, not an answer"),
        (not re.search(r"\w", text), "no answer in the key"),
        (text.count("{") != text.count("}"), "math-verify cannot read"),
    ):
        if is_met:
            raise ValueError(f"{problem}: {key[:80]!r}")


def canonical(answer: str) -> str:
    """One text for answers that are the same at sight (1/2, 0.5, \\frac12), for counting votes."""
    text = clean(answer)
    value = parse_value(text)
    return str(value[1]) if value[0] == "number" else re.sub(r"\s+", "", text)
