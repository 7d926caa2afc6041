"""Whether a mathematical answer equals the answer key, both as LaTeX or plain text: `equal`.

Numbers are compared exactly, as fractions. Tuples, sets, lists and intervals are compared element by element, with
their brackets. What is left, a formula, an equation or a matrix, goes to SymPy by way of math-verify. The first two are
there because math-verify alone accepts too much (a set for a tuple), and because it takes milliseconds.

Nothing here has a time limit: a formula that SymPy cannot finish is ended with the worker process (`pool.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify import verify
from sympy import Basic, Derivative, Eq, Expr, Float, I, Integral, Limit, Pow, Product, Sum, Symbol, factorial, log
from sympy.core.function import AppliedUndef

from grading.answer import read_answer
from grading.values import MAX_FORMULA, Value, clean, fold, parse_value, quantity

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off

MAX_WORDS = 12  # of an answer key: more are a sentence
MAX_DIGITS = 10_000  # of a number that SymPy may be asked to write out
MAX_EXPONENT = 200  # of a sum, which SymPy may be asked to expand
# What would be worked out numerically, at length, and functions that nobody has defined.
UNFINISHED = (Sum, Product, Integral, Limit, Derivative, AppliedUndef)
# SymPy raises these for formulas that it cannot treat. A comparison that meets one decides nothing; the next one does.
UNSOLVED = (TypeError, ValueError, ArithmeticError, NotImplementedError, RecursionError)
NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True)
CONVERSION = {"normalization_config": None, "conversion_config": ConversionConfig(lowercase_symbols=False)}
RADIANS = r"\cdot\frac{\pi}{180}"
STAND_INS = {  # letters that the parser takes for constants, d and ^T, by letters that nobody uses
    r"\gamma": r"\upsilon ", "I": r"\varsigma ", "E": r"\varpi ", "e_": r"\omicron _", "d": r"\vartheta ",
    "T": r"\varrho ",
}  # fmt: skip
UNREADABLE = re.compile(  # or skipped by the parser without a word, such as the index of 1_2
    r"binom\{?\d{6}|\\approx|\\f?box|\.\.|\d\s*\\text|(?:gcd|lcm)\W.*[a-z]"
    r"|(?<![\w^.{])\d[\d.]*\s*_|\)\s*_|[\d)]'|[^\0-\x7fͰ-Ͽ]"
)
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
    key, answer = clean(key), clean(answer)
    values = parse_value(key), parse_value(answer)
    if "matrix}" in key + answer and "formula" in (values[0][0], values[1][0]):
        return same_formula(key, answer)
    return _same(*values)


def _same(key: Value, answer: Value) -> bool:
    kinds = key[0], answer[0]
    if key == answer:
        return True
    if kinds[0] == "chain":
        return _same(key[1][-1], answer)
    if kinds[1] == "chain":  # false for 2 + 3 = 6
        *others, value = answer[1]
        return _same(key, value) and all(_same(value, other) for other in others)
    if {*kinds} <= {"named", "equation"}:
        is_curve = kinds == ("named", "named") and "y" in (key[1], answer[1]) and "(x)" in key[1] + answer[1]
        if kinds == ("named", "named") and (key[1] == answer[1] or is_curve):
            return _same(key[2], answer[2])
        return same_formula(key[-1], answer[-1])
    if "named" in kinds:
        return _same(key[2] if kinds[0] == "named" else key, answer[2] if kinds[1] == "named" else answer)
    if "words" in kinds and "formula" in kinds:
        return _letters(key[1]) == _letters(answer[1]) != ""
    if "choice" in kinds:
        return _same_choice(key, answer)
    if {*kinds} <= {"number", "formula"}:
        return _same_quantity(key, answer)
    return _same_collection(key, answer)


def _same_choice(key: Value, answer: Value) -> bool:
    """True if letters agree, or the values beside them: the key (C) 12 is met by C and by 12, the key 12 by (C) 12."""
    letters = [_letters(value[1]).upper() if value[0] == "formula" else value[1] for value in (key, answer)]
    values = [value[2] if value[0] == "choice" else value for value in (key, answer)]
    if letters[0] == letters[1]:
        return "formula" in (key[0], answer[0]) or None in values or _same(*values)
    are_options = all(re.fullmatch("[A-J]", str(letter)) for letter in letters)  # A. B is not B
    return key[0] != answer[0] and not are_options and None not in values and _same(*values)


def _same_collection(key: Value, answer: Value) -> bool:
    kinds = key[0], answer[0]
    if {*kinds} <= {"list", "set"} or kinds == ("union", "union"):
        return _same_unordered(key[1], answer[1])
    if kinds == ("sequence", "sequence"):
        is_other = key[1] != answer[1] or (key[3] and answer[3] and key[3] != answer[3])
        return not is_other and _same_ordered(key[2], answer[2])
    if {*kinds} == {"sequence", "list"}:
        one, other = (key, answer) if kinds[0] == "sequence" else (answer, key)
        is_point = one[1] == "()" and len(one[3]) != 1 and all(item[0] != "named" for item in other[1])
        return is_point and _same_ordered(one[2], other[1])
    return False


def _letters(text: str) -> str:
    return re.sub(r"\\text|[\s(){}]", "", fold(text))


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
    if bool(key[2]) != bool(answer[2]):  # what is glued to a number is a unit where the other side has one: 0.64N
        key, answer = (each if each[2] else quantity(str(each[1]), is_apart=True) or each for each in (key, answer))
    key_unit, answer_unit = key[2], answer[2]
    if {key_unit, answer_unit} == {"%", ""} and key[0] == answer[0] == "number":
        return answer[1] in (key[1], key[1] / 100) if key_unit else answer[1] / 100 == key[1]
    if key_unit and answer_unit and key_unit != answer_unit:
        return False
    return key[1] == answer[1] if key[0] == answer[0] == "number" else same_formula(key[1], answer[1])


# A single formula in SymPy --------------------------------------------------------------------------------------------


@lru_cache(maxsize=8192)
def read_formula(text: str | Fraction) -> Basic | None:
    """The formula in SymPy, unevaluated; None if math-verify cannot read it or it is too large to be worked out."""
    text = str(text)
    if len(text) > MAX_FORMULA or UNREADABLE.search(text):
        return None
    text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", lambda m: f"({m[1]}{RADIANS})", text)
    text = re.sub(r"(?<![\d.,])(\d*\.\d+)(?![\d.])", lambda m: f"{{{Fraction(m[1])}}}", text)
    text = re.sub(r"([A-Za-z])('+)", lambda m: f"{m[1]}_{{{'p' * len(m[2])}}}", text)
    text = re.sub(r"\^\s*\{?\s*(?:\*|\\ast)\s*\}?", "_{s}", text)  # x^*
    kept = {"d"} if DIFFERENTIAL.search(text) else {"T"} if "matrix" in text else {}
    text = TOKEN.sub(lambda m: m[0] if m[0] in kept else STAND_INS.get(m[0], m[0]), text)
    formula = None
    with contextlib.suppress(Exception):  # nothing narrower: for a syntax error the parser raises Exception itself
        formula = latex2sympy(normalize_latex(text, NORMALIZATION), is_real=True, **CONVERSION)
    if not isinstance(formula, Basic):
        return formula
    if not _is_small(formula) or formula.has(sympy.nan, sympy.zoo):
        return None
    letters = {symbol: I for symbol in formula.free_symbols if symbol.name == "i"}
    for each in formula.atoms(Derivative):  # dy/dx is no 0, but a letter of its own
        if each.expr.free_symbols.isdisjoint(each.variables):
            letters[each] = Symbol(str(each), real=True)
    return formula.xreplace(letters)


def _is_small(formula: Basic) -> bool:
    """False if a power or factorial in it has more digits than anyone would write out: SymPy would try. And for 0^0."""
    for part in sympy.postorder_traversal(formula):
        digits = 3 * part.args[0] if isinstance(part, factorial) else sympy.S.Zero
        if isinstance(part, Pow):  # a sum would be expanded
            base = part.base
            digits = part.exp * (log(abs(base), 10) if base.is_number else base.is_Add * MAX_DIGITS / MAX_EXPONENT)
        if digits.is_number and not (digits.is_finite and abs(digits.evalf()) <= MAX_DIGITS):
            return False
    return True


def same_formula(key: str | Fraction, answer: str | Fraction) -> bool:
    """Whether both agree where both are real, to 60 digits; what has no value, such as a matrix, SymPy compares."""
    gold, pred = read_formula(key), read_formula(answer)
    if gold is None or pred is None:
        return False
    symbols, is_equation = sorted(gold.free_symbols | pred.free_symbols, key=str), isinstance(gold, Eq)
    if is_equation and isinstance(pred, Eq):
        gold, pred = (sympy.fraction(sympy.together(each.lhs - each.rhs))[0] for each in (gold, pred))
    are_rational = all(isinstance(each, Expr) and each.is_rational_function() for each in (gold, pred))
    points = _points(symbols)[: 2 if are_rational else None]
    if is_equation and isinstance(gold, Expr):  # they agree if one is a multiple of the other
        first, *others = [ratio for point in points if (ratio := _value(gold / pred, point)) is not None] or [0]
        return bool(others and first != 0 and all(abs(ratio - first) < 1e-40 * abs(first) for ratio in others))
    num_same = 0
    for point in points:
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
    """Odd points near and far, of all signs: sqrt((x - 50)^2) is 50 - x up to 50."""
    sizes = [Float(f"{0.61803398874989 + i * 0.41421356237309}", 60) for i in range(len(symbols))]
    sides = itertools.product((1, -1), (1, -1)[: len(symbols)], (1, 30, 400, 2000)) if symbols else [(1, 1, 1)]
    return [{each: (sizes[i] * c + i) * a * b**i for i, each in enumerate(symbols)} for a, b, c in sides]


def _value(formula: Basic, point: dict[Symbol, Float]) -> Expr | None:
    """Its value to 60 digits at this point; None if it has none that is finite, or a root or logarithm is not real."""
    if not isinstance(formula, Expr) or formula.has(*UNFINISHED):
        return None
    try:
        parts = [part for part in formula.atoms(Pow, log, sympy.asin, sympy.acos) if part.args[0].free_symbols]
        limits = [part for part in parts if not (part.is_Pow and part.exp.is_Integer)]
        if any(part.subs(point).is_real is False for part in limits) and not formula.has(I):
            return None
        value = formula.subs(point).evalf(60)
        parts = value.as_real_imag()
    except UNSOLVED:
        return None  # `verify` decides
    return value if all((part.is_Float or part.is_Rational) and part.is_finite for part in parts) else None


# Answer keys ----------------------------------------------------------------------------------------------------------


def key_content(key: str) -> str:
    """The answer in an answer key: the inside of its last box or <answer>, if it has one, else all of it."""
    return (read_answer(key) or "") if re.search(r"\\(?:boxed|fbox)\b|<answer>", key) else key


def check_key(key: str) -> None:
    """Raises ValueError, in a few words, if nothing could be graded against this key."""
    text = clean(key_content(key))
    if len(text) > MAX_FORMULA:
        raise ValueError(f"no \\boxed answer in a key of {len(key)} characters ({key[:60]!r}...)")
    if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", text))) > MAX_WORDS:
        raise ValueError(f"a sentence, not an answer: {key[:80]!r}")
    if not re.search(r"\w", re.sub(r"\\(?:text|[^A-Za-z])", "", text)):
        raise ValueError(f"no answer in the key {key[:80]!r}")
    _check_formulas(parse_value(text))


def _check_formulas(value: Value) -> None:
    """Raises ValueError for a formula or an equation that SymPy cannot read; a choice is met by its letter."""
    if value[:1] in (("formula",), ("equation",)) and read_formula(value[1]) is None:
        raise ValueError(f"math-verify cannot read {value[1][:80]!r}")
    for part in value if value[:1] != ("choice",) else ():
        if isinstance(part, tuple):
            _check_formulas(part)


def canonical(answer: str) -> str:
    """One text for answers that are the same at sight (1/2, 0.5, \\frac12), for counting votes."""
    value = parse_value(text := clean(answer))
    return str(value[1]) if value[0] == "number" else re.sub(r"\s+", "", text)
