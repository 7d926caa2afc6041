"""Whether a mathematical answer equals the answer key, both as LaTeX or plain text (`answer.py` reads them).

There are three layers. Numbers are compared exactly, as fractions. Tuples, sets, lists, intervals and matrices are
compared element by element, with their brackets. What is left, a single formula, goes to math-verify, which parses
LaTeX into SymPy. The first two layers are there because math-verify alone accepts too much (a set for a tuple, 5 for
2x+3=5), and because it takes milliseconds where a comparison of fractions takes microseconds.

Nothing here has a time limit. `9^{9^9}` is refused by its size; a formula that SymPy cannot finish is ended with the
worker process that grades it (`pool.py`).
"""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Derivative, Expr, Float, I, Integral, Limit, Pow, Product, Sum, factorial, log, simplify

from grading.answer import read_answer
from grading.math_text import clean, plain_text
from grading.math_value import MAX_FORMULA, NAME, Value, parse_value

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off

UNFINISHED = (Sum, Product, Integral, Limit, Derivative)  # what would be worked out numerically, at length
MAX_DIGITS = 10_000  # of a number that SymPy may be asked to write out
MAX_WORDS = 12  # of an answer key: more are a sentence
MAX_EXPONENT = 200  # of a sum, which SymPy may be asked to expand
NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True)
CONFIG = [LatexExtractionConfig(normalization_config=NORMALIZATION)]


@lru_cache(maxsize=8192)
def equal(key: str, answer: str) -> bool:
    """True if the answer equals the key: values, brackets, order where there is one, and units matter, forms do not.

    An answer may leave out the key's unit or bring one where the key has none, but not another one. The key 50\\% is
    equalled by 50, 50\\% and 0.5. Decimals are exact: 0.333 is not 1/3. The key 3 is not equalled by "3 or 4".
    """
    if max(len(key), len(answer)) > 4 * MAX_FORMULA:
        return key.strip() == answer.strip()
    key, answer = clean(key), clean(answer)
    if not key or not answer:
        return False
    values = parse_value(key), parse_value(answer)
    if values[0][0] != "number" and re.sub(r"\s+", "", key) == re.sub(r"\s+", "", answer):
        return True
    if plain_text(key) == plain_text(answer) != "":
        return True
    return _same(*values)


def _same(key: Value, answer: Value) -> bool:
    if key == answer:
        return True
    kinds = key[0], answer[0]
    if {*kinds} <= {"named", "equation"}:
        if kinds == ("named", "named") and (
            key[1] == answer[1] or all(re.fullmatch(r"y|[a-z]\(\w\)", name) for name in (key[1], answer[1]))
        ):
            return _same(key[2], answer[2])  # f(x) = x^2 is y = x^2
        return _same_equation(key[-2:], answer[-2:])
    if "named" in kinds:
        return _same(key[2] if kinds[0] == "named" else key, answer[2] if kinds[1] == "named" else answer)
    key, answer = _as_intervals(key, kinds[1]), _as_intervals(answer, kinds[0])
    kinds = key[0], answer[0]
    if "words" in kinds and "formula" in kinds:
        return _letters(key[1]) == _letters(answer[1]) != ""
    if kinds == ("choice", "choice"):
        return key[1] == answer[1] and (key[2] is None or answer[2] is None or _same(key[2], answer[2]))
    if kinds[1] == "choice" and answer[2] is not None:  # key 12, answer "(C) 12"
        return _same(key, answer[2])
    if kinds == ("choice", "formula"):
        return _letters(answer[1]) == key[1].casefold()
    if kinds[1] == "list" and kinds[0] not in ("list", "set", "sequence"):
        return all(_same(key, item) for item in answer[1])
    if kinds == ("list", "list") and (_has_names(key[1]) != _has_names(answer[1])):
        return _same_ordered(key[1], answer[1])
    if {*kinds} <= {"list", "set"} or kinds == ("union", "union"):
        return _same_unordered(key[1], answer[1], is_set=kinds != ("list", "list"))
    if kinds == ("sequence", "sequence"):
        return key[1] == answer[1] and _same_ordered(key[2], answer[2])
    if kinds in (("sequence", "list"), ("list", "sequence")):
        (_, brackets, items), (_, others) = (key, answer) if kinds[0] == "sequence" else (answer, key)
        return brackets == "()" and _same_ordered(items, others)
    if kinds == ("matrix", "matrix"):
        return len(key[1]) == len(answer[1]) and all(map(_same_ordered, key[1], answer[1]))
    if "matrix" in kinds and "formula" in kinds:
        return _same_formula(*(value[2] if value[0] == "matrix" else value[1] for value in (key, answer)))
    if kinds == ("relation", "relation"):
        return _same_formula(_relation_text(key), _relation_text(answer))
    if kinds == ("based", "number"):
        return answer[2] == "" and str(answer[1]) == key[1]
    if {*kinds} <= {"number", "formula"} or kinds == ("colon", "colon"):
        return _same_quantity(key, answer)
    return False


def _letters(text: str) -> str:
    return re.sub(r"\\text|[\s(){}]", "", text).casefold()


def _same_ordered(keys: tuple[Value, ...], answers: tuple[Value, ...]) -> bool:
    return len(keys) == len(answers) and all(map(_same, keys, answers))


def _has_names(values: tuple[Value, ...]) -> bool:
    """True for x=1, y=2; false for 1, 2 and for x=1, x=2."""
    return len({value[1] for value in values if value[0] == "named"}) == len(values)


def _same_unordered(keys: tuple[Value, ...], answers: tuple[Value, ...], is_set: bool) -> bool:
    """Each key has an answer of its own; in sets repetitions do not count. The first fit will do: it is transitive."""
    left = list(answers)
    for i, key in enumerate(keys):
        if is_set and any(_same(earlier, key) for earlier in keys[:i]):
            continue
        fits = [j for j, answer in enumerate(left) if _same(key, answer)]
        if not fits:
            return False
        drop = set(fits) if is_set else {fits[0]}
        left = [answer for j, answer in enumerate(left) if j not in drop]
    return not left


def _as_intervals(value: Value, other: str) -> Value:
    """A relation such as 0 < x <= 1 as the interval or union that it describes, where it is compared with one."""
    if other not in ("sequence", "union", "formula"):
        return value
    without = re.fullmatch(r"\\mathbb\{R\}\s*\\setminus\s*(\\\{.*\\\})", value[1]) if value[0] == "formula" else None
    if without and other != "formula":
        value = ("relation", ("x", without[1][2:-2]), ("\\ne",))
    if value[0] == "union":
        return ("union", tuple(_as_intervals(part, "sequence") for part in value[1]))
    if value[0] != "relation":
        return value
    terms, signs = value[1:]
    infinite = ("-\\infty", "\\infty")
    if len(terms) == 2 and signs[0] == "\\ne" and re.fullmatch(NAME, terms[0]):
        point = parse_value(terms[1])
        low, high = (parse_value(end) for end in infinite)
        return ("union", (("sequence", "()", (low, point)), ("sequence", "()", (point, high))))
    if len(terms) == 2 and re.fullmatch(NAME, terms[0]):
        terms, signs = (infinite[0], *terms), ("<", *signs)
    elif len(terms) == 2 and re.fullmatch(NAME, terms[1]):
        terms, signs = (*terms, infinite[1]), (*signs, "<")
    if len(terms) != 3 or not re.fullmatch(NAME, terms[1]) or not {*signs} <= {"<", "\\le"}:
        return value
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return ("sequence", brackets, (parse_value(terms[0]), parse_value(terms[2])))


def _relation_text(value: Value) -> str:
    terms, signs = value[1:]
    return " ".join(part for pair in zip(terms, (*signs, ""), strict=True) for part in pair)


def _same_quantity(key: Value, answer: Value) -> bool:
    key_unit, answer_unit = key[2], answer[2]
    if "%" in (key_unit, answer_unit) and key[0] == answer[0] == "number":
        key_value, answer_value = key[1], answer[1]
        if key_unit and answer_unit:
            return key_unit == answer_unit and key_value == answer_value
        if key_unit:
            return answer_value in (key_value, key_value / 100)
        return answer_value / 100 == key_value or (key_value == answer_value and key_value.denominator == 1)
    if key_unit and answer_unit and key_unit != answer_unit:
        return False
    if key[0] == answer[0] and key[0] != "formula":
        return key[1] == answer[1]
    return _same_formula(key[1], answer[1])


# Formulas -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8192)
def _formula(text: str | Fraction) -> Basic | None:
    """The formula in SymPy, unevaluated; None if math-verify cannot read it or it is too large to be worked out."""
    if isinstance(text, Fraction):
        text = _latex(text)
    if len(text) > MAX_FORMULA or re.search(r"binom\{?\d{6}|['’]|\\approx|\\f?box|\.\.|\d\s*\\text", text):
        return None
    text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = re.sub(r"(?<![\d.,])(\d*\.\d+)(?![\d.])", lambda m: _latex(Fraction(m[1])), text)
    text = re.sub(r"\\gamma(?![A-Za-z])", r"\\upsilon ", text)  # a name that the parser does not take for a function
    parsed = parse(f"${text}$", CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    if not parsed or not _is_small(parsed[0]):
        return None
    formula = parsed[0]
    if not isinstance(formula, Basic):
        return formula
    return formula.xreplace({symbol: I for symbol in formula.free_symbols if symbol.name == "i"})


def _latex(value: Fraction) -> str:
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)


def _is_small(formula: Basic) -> bool:
    """False if a power or factorial in it has more digits than anyone would write out: SymPy would try."""
    if not isinstance(formula, Basic):
        return True
    if not all(_is_small(part) for part in formula.args):
        return False
    if isinstance(formula, factorial) and formula.args[0].is_number:
        return bool(abs(formula.args[0].evalf()) < MAX_DIGITS / 3)
    if not isinstance(formula, Pow) or not formula.exp.is_number:
        return True
    if formula.base.is_number:
        digits = abs(formula.exp.evalf() * log(abs(formula.base.evalf()))) / math.log(10)
        return formula.base.is_zero is True or bool(digits.evalf() < MAX_DIGITS)
    return not isinstance(formula.base, Add) or bool(abs(formula.exp.evalf()) <= MAX_EXPONENT)


def _same_formula(key: str | Fraction, answer: str | Fraction) -> bool:
    letters = [set(re.findall(r"\\[A-Za-z]+|[A-Za-z]", str(text))) - {"e", "E"} for text in (key, answer)]
    if letters[0] != letters[1] and {c.lower() for c in letters[0]} == {c.lower() for c in letters[1]}:
        return False  # math-verify does not tell R from r
    gold, pred = _formula(key), _formula(answer)
    if gold is None or pred is None:
        return False
    values = _values([gold, pred], 0.0)
    is_close = values and _is_close(*values)
    if values and is_close is not False and (difference := gold.doit() - pred.doit()).is_Rational:
        return difference == 0  # exact: 60 digits do not tell 2^1009 - 1 from 2^1009
    # 60 digits decide on numbers. Formulas that differ at one point need no `simplify`, which takes milliseconds.
    if values and (is_close is False or (is_close and not gold.free_symbols | pred.free_symbols)):
        return is_close
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
    except (TypeError, ValueError, ArithmeticError, NotImplementedError, AttributeError, RecursionError):
        return None  # `verify` decides
    return values if all((part.is_Float or part.is_Rational) and part.is_finite for part in parts) else None


def _is_close(first: Expr, second: Expr) -> bool | None:
    """Whether two values agree, relative to their size; None if both are so small that they may be noise of a zero."""
    size = max(abs(first).evalf(), abs(second).evalf())
    if size == 0:
        return True
    if size < 1e-40:
        return None
    return bool(abs((first - second) / size).evalf() < 1e-40)


def _same_equation(key: tuple[str, str], answer: tuple[str, str]) -> bool:
    """True if one equation is the other times a constant."""
    sides = [_formula(side) for side in (*key, *answer)]
    if not all(isinstance(side, Expr) for side in sides):
        return False
    at_one_point, at_another = _values(sides, 0.0), _values(sides, 0.3)
    if at_one_point and at_another:
        (a, b, c, d), (e, f, g, h) = at_one_point, at_another
        if _is_close((a - b) * (g - h), (e - f) * (c - d)) is False:
            return False
    ratio = simplify((sides[0] - sides[1]) / (sides[2] - sides[3]))
    return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)


# Answer keys ----------------------------------------------------------------------------------------------------------


def key_text(key: str) -> str:
    """The answer in an answer key: the inside of its last box or <answer>, if it has one, else all of it."""
    return (read_answer(key) or "") if re.search(r"\\(?:boxed|fbox)\b|<answer>", key) else key


def key_problem(key: str) -> str | None:
    """Why nothing could be graded against this key, in a few words; None if it can be."""
    text = clean(key_text(key))
    if not text:
        return f"no answer in the key {key[:80]!r}"
    if len(text) > MAX_FORMULA:
        return f"no \\boxed answer in a key of {len(key)} characters ({key[:60]!r}...)"
    if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", text))) > MAX_WORDS:
        return f"a sentence, not an answer: {key[:80]!r}"
    if not re.search(r"\w", re.sub(r"\\(?:text|[^A-Za-z])", "", text)):
        return f"no answer in the key {key[:80]!r}"
    unread = next((leaf for leaf in _formulas(parse_value(text)) if _formula(leaf) is None), None)
    return None if unread is None else f"math-verify cannot read {unread[:80]!r}"


def _formulas(value: Value) -> list[str]:
    """The formulas at the leaves of a value, those that only SymPy can compare."""
    if value[0] == "formula":
        return [value[1]]
    if value[0] == "equation":
        return list(value[1:])
    if value[0] == "named":
        return _formulas(value[2])
    parts = {"list": 1, "set": 1, "union": 1, "sequence": 2, "matrix": 1}.get(value[0])
    items = value[parts] if parts else ()
    if value[0] == "matrix":
        items = tuple(cell for row in items for cell in row)
    return [leaf for item in items for leaf in _formulas(item)]


def canonical(answer: str) -> str:
    """One text for answers that are the same at sight (1/2, 0.5, \\frac12), for counting votes."""
    if len(answer) > 4 * MAX_FORMULA:
        return answer[:MAX_FORMULA]
    text = clean(answer)
    value = parse_value(text)
    return str(value[1]) if value[0] == "number" else re.sub(r"\s+", "", text)
