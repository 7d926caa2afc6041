"""A single formula in SymPy: `read_formula` reads LaTeX, `same_formula` and `ratio_of` compare.

latex2sympy, the parser of math-verify, reads the text. A letter and its capital are two symbols. Numbers decide first:
60 digits at some point tell most formulas apart, in microseconds where `simplify` takes milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify import verify
from sympy import Add, Basic, Derivative, Expr, Float, I, Integral, Limit, Pow, Product, Sum, factorial, log, simplify

from grading.math_value import MAX_FORMULA

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off

UNFINISHED = (Sum, Product, Integral, Limit, Derivative)  # what would be worked out numerically, at length
# SymPy raises these for formulas that it cannot treat. A comparison that meets one decides nothing; the next one does.
UNSOLVED = (TypeError, ValueError, ArithmeticError, NotImplementedError, AttributeError, RecursionError)
MAX_DIGITS = 10_000  # of a number that SymPy may be asked to write out
MAX_EXPONENT = 200  # of a sum, which SymPy may be asked to expand
NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True)
CONVERSION = {"normalization_config": None, "conversion_config": ConversionConfig(lowercase_symbols=False)}
RADIANS = r"\cdot\frac{\pi}{180}"
STAND_INS = {  # letters that the parser takes for constants, d and ^T, by letters that nobody uses
    r"\gamma": r"\upsilon ", r"\Gamma": r"\Upsilon ", "I": r"\varsigma ", "E": r"\varpi ", "e_": r"\omicron _",
    "d": r"\vartheta ", "T": r"\varrho ",
}  # fmt: skip
UNREADABLE = re.compile(  # or skipped by the parser without a word, such as the index of 1_2
    r"binom\{?\d{6}|\\approx|\\f?box|\.\.|\d\s*\\text|(?:gcd|lcm)\W.*[a-z]"
    r"|(?<![\w^.{])\d[\d.]*\s*_|\)\s*_|(?:(?<![\w{])\d[\d.]*|\))\s*'|[^\0-\x7fͰ-Ͽ]"
)
DIFFERENTIAL = re.compile(r"\\int|\\frac\s*\{\s*d.{0,3}\}\s*\{\s*d|d\w?\s*/\s*d")
TOKEN = re.compile(
    r"\\Gamma\s*\(|\\(?:text|begin|end|mathbb|mathcal|mathrm)\s*\{[^{}]*\}|_\{[^{}]*\}|\\[A-Za-z]+|e_|[A-Za-z]"
)
MARKED = re.compile(  # x', x_1', x'_1, x^*
    r"([A-Za-z]|\\[a-z]+)\s*(?:_\{?(\w+)\}?)?\s*(?:('+)|\^\s*\{?\s*(\*|\\ast(?![a-z]))\s*\}?)\s*(?:_\{?(\w+)\}?)?"
)


@lru_cache(maxsize=8192)
def read_formula(text: str | Fraction) -> Basic | None:
    """The formula in SymPy, unevaluated; None if math-verify cannot read it or it is too large to be worked out."""
    if isinstance(text, Fraction):
        text = latex(text)
    if len(text) > MAX_FORMULA or UNREADABLE.search(text):
        return None
    text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", lambda m: f"({m[1]}{RADIANS})", text)
    text = re.sub(r"(?<![\d.,])(\d*\.\d+)(?![\d.])", lambda m: latex(Fraction(m[1])), text)
    text = MARKED.sub(lambda m: f"{m[1]}_{{{m[2] or m[5] or ''}{'p' * len(m[3] or '')}{'s' * bool(m[4])}}}", text)
    kept = {"d"} if DIFFERENTIAL.search(text) else {"T"} if "matrix" in text else {}
    text = TOKEN.sub(lambda m: m[0] if m[0] in kept else STAND_INS.get(m[0], m[0]), text)
    formula = None
    with contextlib.suppress(Exception):  # nothing narrower: for a syntax error the parser raises Exception itself
        formula = latex2sympy(normalize_latex(text, NORMALIZATION), is_real=True, **CONVERSION)
    if not isinstance(formula, Basic):
        return formula
    if not _is_small(formula) or formula.has(sympy.nan, sympy.zoo):
        return None
    if "\\sqrt[" in text:  # the real cube root of -8, where SymPy takes a complex one
        formula = formula.replace(
            lambda part: isinstance(part, Pow) and part.base.is_negative and part.exp.is_Rational and part.exp.q % 2,
            lambda power: (-1) ** power.exp.p * Pow(-power.base, power.exp),
        )
    return formula.xreplace({symbol: I for symbol in formula.free_symbols if symbol.name == "i"})


def latex(value: Fraction | str) -> str:
    if isinstance(value, str):
        return value
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)


def _is_small(formula: Basic) -> bool:
    """False if a power or factorial in it has more digits than anyone would write out: SymPy would try. And for 0^0."""
    if not isinstance(formula, Basic):
        return True
    if not all(_is_small(part) for part in formula.args):
        return False
    if isinstance(formula, factorial) and formula.args[0].is_number:
        return bool(abs(formula.args[0].evalf()) < MAX_DIGITS / 3)
    if not isinstance(formula, Pow) or not formula.exp.is_number:
        return True
    if formula.base.is_number:
        if formula.exp.is_infinite or (formula.base.is_zero and not formula.exp.is_positive):
            return False
        digits = abs(formula.exp.evalf() * log(abs(formula.base.evalf()))) / math.log(10)
        return formula.base.is_zero is True or bool(digits.evalf() < MAX_DIGITS)
    return not isinstance(formula.base, Add) or bool(abs(formula.exp.evalf()) <= MAX_EXPONENT)


def same_formula(key: str | Fraction, answer: str | Fraction) -> bool:
    gold, pred = read_formula(key), read_formula(answer)
    if gold is None or pred is None:
        return False
    values = _values([gold, pred], 0.0)
    agree = values and is_close(*values)
    if values and agree is not False and (difference := gold.doit() - pred.doit()).is_Rational:
        return difference == 0  # exact: 60 digits do not tell 2^1009 - 1 from 2^1009
    # 60 digits decide on numbers. Formulas that differ at one point need no `simplify`, which takes milliseconds.
    if values and (agree is False or (agree and not gold.free_symbols | pred.free_symbols)):
        return agree
    return verify(gold, pred, float_rounding=10, timeout_seconds=None)


def _values(formulas: list[Basic], shift: float) -> list[Expr] | None:
    """The formulas' values to 60 digits at some odd positive point; None where one has no finite value."""
    if any(not isinstance(formula, Expr) or formula.has(*UNFINISHED) for formula in formulas):
        return None
    symbols = sorted(set().union(*(formula.free_symbols for formula in formulas)), key=str)
    point = {symbol: Float(shift + 0.61803398874989 + i * 0.41421356237309, 60) for i, symbol in enumerate(symbols)}
    try:
        values = [formula.subs(point).evalf(60) for formula in formulas]
        parts = [part for value in values for part in value.as_real_imag()]
    except UNSOLVED:
        return None  # `verify` decides
    return values if all((part.is_Float or part.is_Rational) and part.is_finite for part in parts) else None


def is_close(first: Expr, second: Expr) -> bool | None:
    """Whether two values agree, relative to their size; None if both are so small that they may be noise of a zero."""
    size = max(abs(first).evalf(), abs(second).evalf())
    if size == 0:
        return True
    if size < 1e-40:
        return None
    return bool(abs((first - second) / size).evalf() < 1e-40)


def ratio_of(key: tuple[str, str], answer: tuple[str, str], is_equation: bool = False) -> Expr | None:
    """The number other than 0 by which the difference of the key's sides is a multiple of the answer's, if there is."""
    sides = [read_formula(side) for side in (*key, *answer)]
    if not all(isinstance(side, Expr) for side in sides):
        return None
    differences = [sides[0] - sides[1], sides[2] - sides[3]]
    if is_equation and all(len(difference.free_symbols) > 1 for difference in differences):  # PV/T = nR is PV = nRT
        differences = [sympy.fraction(sympy.together(difference))[0] for difference in differences]
    at_one_point, at_another = _values(differences, 0.0), _values(differences, 0.3)
    if at_one_point and at_another:
        (a, b), (c, d) = at_one_point, at_another
        if is_close(a * d, c * b) is False:
            return None
    ratio = simplify(differences[0] / differences[1])
    return ratio if ratio.is_number and ratio.is_finite and ratio.is_nonzero else None
