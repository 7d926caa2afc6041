"""Whether a mathematical answer equals the answer key, both as LaTeX or plain text (`answer.py` reads them).

There are three layers. Numbers are compared exactly, as fractions. Tuples, sets, lists, intervals and matrices are
compared element by element, with their brackets; relations and sets of real numbers as intervals. What is left, a
single formula, goes to SymPy (`math_formula.py`). The first two layers are there because math-verify alone accepts too
much (a set for a tuple, 5 for 2x+3=5), and because it takes milliseconds where a comparison of fractions takes
microseconds.

Nothing here has a time limit. `9^{9^9}` is refused by its size; a formula that SymPy cannot finish is ended with the
worker process that grades it (`pool.py`).
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from functools import lru_cache

import sympy
from sympy import Expr

from grading.answer import read_answer
from grading.math_formula import RADIANS, UNSOLVED, is_close, latex, ratio_of, read_formula, same_formula
from grading.math_text import clean, fold, in_base, plain_text
from grading.math_value import MAX_FORMULA, SYMBOL, VARIABLE, Value, by_name, has_names, parse_value

MAX_WORDS = 12  # of an answer key: more are a sentence
RELATIONS = {"<": sympy.Lt, r"\le": sympy.Le, r"\ne": sympy.Ne, ">": sympy.Gt, r"\ge": sympy.Ge}


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
    if re.fullmatch("[A-J]", key) and answer.upper() == key:
        return True  # a choice
    values = parse_value(key), parse_value(answer)
    if values[0][0] != "number" and re.sub(r"\s+", "", key) == re.sub(r"\s+", "", answer):
        return True
    if plain_text(key) == plain_text(answer) != "":
        return True
    return _same(*values)


def _same(key: Value, answer: Value) -> bool:
    if key == answer:
        return True
    if key[0] == "chain":
        return _same(key[1][-1], answer)
    if answer[0] == "chain":
        return _is_true(answer) and any(_same(key, value) for value in (answer[1][-1], *answer[2]))
    kinds = key[0], answer[0]
    if kinds == ("family", "family"):
        return key[3] == answer[3] and (_same(key[1], answer[1]) or _same(key[2], answer[2]))
    if "family" in kinds:  # what only one of both says of its letters does not count
        return _same(*(value[1] if value[0] == "family" else value for value in (key, answer)))
    if {*kinds} <= {"named", "equation"}:
        if kinds == ("named", "named") and (value := _renamed(key, answer)) is not None:
            return _same(key[2], value)
        return ratio_of(key[-2:], answer[-2:], is_equation=True) is not None
    if kinds[1] == "equation":  # 3! = 6 says 6, but x^2 = 6 does not
        sides = [read_formula(side) for side in answer[1:]]
        if re.fullmatch(r"\s*[a-dm-s](?:\s*\+\s*[a-dm-s])+\s*", answer[1]):  # m+n = 7 is what was asked for
            return _same(key, parse_value(answer[2]))
        is_sum = all(isinstance(side, Expr) and not side.free_symbols for side in sides)
        return is_sum and same_formula(*answer[1:]) and _same(key, parse_value(answer[2]))
    if "named" in kinds:
        return _same(key[2] if kinds[0] == "named" else key, answer[2] if kinds[1] == "named" else answer)
    if "words" in kinds and "formula" in kinds:
        return _letters(key[1]) == _letters(answer[1]) != ""
    if "choice" in kinds:
        return _same_choice(key, answer)
    if "minus" not in kinds and ({*kinds} & {"list", "set"} or kinds == ("sequence", "sequence")):
        return _same_collection(key, answer)
    if "formula" in kinds and {*kinds} & {"matrix", "sequence"}:
        return _same_vector(*sorted((key, answer), key=lambda value: value[0] == "formula"))
    if kinds == ("matrix", "matrix"):
        return len(key[1]) == len(answer[1]) and all(map(_same_ordered, key[1], answer[1]))
    if kinds == ("relation", "relation"):
        return _same_relation(key, answer)
    if {*kinds} & {"relation", "union", "minus"}:
        return _same_set(_as_interval(key), _as_interval(answer))
    if kinds == ("based", "number"):
        return answer[2] == "" and str(answer[1]) == key[1]
    if {*kinds} <= {"number", "formula"}:
        return _same_quantity(key, answer)
    return "colon" in kinds and (_same_ratio(key, answer) if kinds[0] == "colon" else _same_ratio(answer, key))


def _same_vector(vector: Value, formula: Value) -> bool:
    """(1, 2) is i + 2j; a matrix may be a number times another one."""
    if "matrix" in vector[0] + formula[1]:
        return isinstance(vector[-1], str) and same_formula(vector[-1], formula[1])
    if vector[1] != "()" or any(cell[0] not in ("number", "formula") for cell in vector[2]):
        return False
    terms = [rf"({latex(cell[1])}) {axis}" for cell, axis in zip(vector[2], "ijk", strict=False)]
    return len(terms) == len(vector[2]) and same_formula("+".join(terms), formula[1])


def _same_choice(key: Value, answer: Value) -> bool:
    """True if letters agree, or the values beside them: the key (C) 12 is met by C and by 12, the key 12 by (C) 12."""
    if key[0] == answer[0]:
        return key[1] == answer[1] and (key[2] is None or answer[2] is None or _same(key[2], answer[2]))
    letter, other = (key, answer) if key[0] == "choice" else (answer, key)
    if other[0] == "formula" and _letters(other[1]).upper() == letter[1]:
        return True
    if letter[2] is None:
        return False
    return _same(key[2], answer) if letter is key else _same(key, answer[2])


def _same_collection(key: Value, answer: Value) -> bool:
    kinds = key[0], answer[0]
    if kinds[1] == "list" and kinds[0] not in ("list", "set", "sequence"):
        return all(_same(key, item) for item in answer[1])
    if kinds == ("list", "list") and (has_names(key[1]) != has_names(answer[1])):
        named = has_names(key[1])
        if all(re.fullmatch(r"x_\d", item[1]) for item in (key if named else answer)[1]):  # roots, in any order
            values = [[item[2] if item[0] == "named" else item for item in value[1]] for value in (key, answer)]
            return _same_unordered(*values, is_set=False)
        return _same_ordered(by_name(key), by_name(answer)) or (named and _same_ordered(key[1], answer[1]))
    if {*kinds} <= {"list", "set"}:
        return _same_unordered(key[1], answer[1], is_set=kinds != ("list", "list"))
    if kinds == ("sequence", "sequence"):
        return key[1] == answer[1] and _same_ordered(key[2], answer[2])
    if kinds in (("sequence", "list"), ("list", "sequence")):
        (_, brackets, items, *_), named = (key, answer) if kinds[0] == "sequence" else (answer, key)
        is_point = has_names(named[1]) or all(item[0] != "named" for item in named[1])  # not x = 2 or x = 3
        return brackets == "()" and is_point and _same_ordered(items, by_name(named))
    for one, other in ((key, answer), (answer, key)):
        if one[0] == "set" and len(one[1]) == 1 and one[1][0][1] != r"\emptyset":  # {(2, 3)} is (2, 3)
            return _same(one[1][0], other)
    return False


def _is_true(chain: Value) -> bool:
    """False for 2 + 3 = 6, and for 1/3 = 0.35 roughly: the digits shown must be the value's."""
    *others, value = chain[1]
    exact = read_formula(value[1]) if value[0] in ("number", "formula") else None
    for rough in (item[1] / (100 if item[2] == "%" != value[2] else 1) for item in chain[2] if item[0] == "number"):
        last_digit = next(Fraction(1, 10**n) for n in range(40) if rough * 10**n % 1 == 0 or n == 39)
        is_number = isinstance(exact, Expr) and not exact.free_symbols
        excess = (exact.evalf(60) - rough) * (-1 if rough < 0 else 1) if is_number else 0
        if not -last_digit / 2 <= excess < last_digit:  # rounded or cut off
            return False
    return all(_same(value, other) for other in others)


def _renamed(key: Value, answer: Value) -> Value | None:
    """The answer's right side in the key's variable: that of f(t) = t^2 or y = x^2 where the key is f(x) = x^2."""
    if key[1] == answer[1]:
        return answer[2]
    names = [re.fullmatch(r"([A-Za-z][(_])([A-Za-z])\)?", name) for name in (key[1], answer[1])]
    if all(names) and names[0][1] == names[1][1]:
        new, old = names[0][2], names[1][2]
        letters = SYMBOL.findall(answer[4])
        if new not in letters and (old in letters or {old, new} <= set("kmnstuvwxyz")):  # f(1) and f(a) are values
            return parse_value(SYMBOL.sub(lambda m: new if m[0] == old else m[0], answer[4]))
    is_curve = "y" in (key[1], answer[1]) and re.search(r"[A-Za-z]\([a-z]\)", key[1] + answer[1])
    return answer[2] if is_curve else None


def _letters(text: str) -> str:
    return re.sub(r"\\text|[\s(){}]", "", fold(text))


def _same_ordered(keys: tuple[Value, ...], answers: tuple[Value, ...]) -> bool:
    return len(keys) == len(answers) and all(map(_same, keys, answers))


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


def _same_ratio(key: Value, answer: Value) -> bool:
    """3:4 is 6:8 and 3/4, but the time 3:40 is not 6:80."""
    if answer[0] != "colon":
        return not key[2] and len(key[1]) == 2 and _same(_quotient(*key[1]), answer)
    if key[2] and answer[2] and key[2] != answer[2]:
        return False
    if _same_ordered(key[1], answer[1]):
        return True
    if key[2] or answer[2] or (key[3] and answer[3]) or len(key[1]) != len(answer[1]):
        return False
    ratios = [[_quotient(value, values[0]) for value in values[1:]] for values in (key[1], answer[1])]
    return all(map(_same, *ratios))


def _quotient(top: Value, bottom: Value) -> Value:
    return parse_value(rf"\frac{{{latex(top[1])}}}{{{latex(bottom[1])}}}")


def _same_quantity(key: Value, answer: Value) -> bool:
    key_unit, answer_unit = key[2], answer[2]
    if "%" in (key_unit, answer_unit) and key[0] == answer[0] == "number":
        key_value, answer_value = key[1], answer[1]
        if key_unit and answer_unit:
            return key_unit == answer_unit and key_value == answer_value
        if key_unit:
            return answer_value in (key_value, key_value / 100)
        return answer_value / 100 == key_value or (
            key_value == answer_value not in (1, -1) and key_value.denominator == 1
        )
    units = {key_unit, answer_unit}
    if answer_unit == "k" != key_unit:
        return False  # kelvin, or thousand
    is_in_radians = units == {"deg", "rad"} or re.search(r"\\(?:pi|arc)", latex(key[1]) + latex(answer[1]))
    if "deg" in units and is_in_radians:
        return same_formula(*(latex(value[1]) + RADIANS * (value[2] == "deg") for value in (key, answer)))
    scale = Fraction(1)
    if key_unit and answer_unit and key_unit != answer_unit:
        (key_scale, key_base), (answer_scale, answer_base) = in_base(key_unit), in_base(answer_unit)
        if key_base == answer_base:
            scale = answer_scale / key_scale
        elif "u" not in units or re.search(r"[/^]", key_unit + answer_unit):
            return False
    if key[0] == answer[0] == "number":
        return key[1] == answer[1] * scale
    return same_formula(key[1], answer[1] if scale == 1 else rf"{latex(scale)}\cdot({latex(answer[1])})")


# Relations and sets of real numbers -----------------------------------------------------------------------------------


def _same_relation(key: Value, answer: Value) -> bool:
    """True for 2x > 6 and x > 3, whose differences are multiples, and for |x| < 3 and -3 < x < 3: the same x."""
    if key[2] == answer[2]:
        pairs = [itertools.pairwise(relation[1]) for relation in (key, answer)]
        ratios = list(map(ratio_of, *pairs))
        if all(ratio is not None and (ratio > 0 or sign == r"\ne") for ratio, sign in zip(ratios, key[2], strict=True)):
            return True
    terms = [[read_formula(term) for term in relation[1]] for relation in (key, answer)]
    unknowns = [set().union(*(term.free_symbols for term in side if isinstance(term, Expr))) for side in terms]
    return unknowns[0] == unknowns[1] and _same_set(key, answer)


def _as_interval(value: Value) -> Value:
    """A relation such as 0 < x <= a as the interval that it describes, a union by its parts."""
    if value[0] == "union":
        return ("union", tuple(_as_interval(part) for part in value[1]))
    if value[0] != "relation":
        return value
    terms, signs = value[1:]
    if len(terms) == 2 and re.fullmatch(VARIABLE, terms[0]) and terms[1] not in ("x", "y", "z"):
        terms, signs = ("-\\infty", *terms), ("<", *signs)
    elif len(terms) == 2 and re.fullmatch(VARIABLE, terms[1]):
        terms, signs = (*terms, "\\infty"), (*signs, "<")
    if len(terms) != 3 or not re.fullmatch(VARIABLE, terms[1]) or not {*signs} <= {"<", "\\le"}:
        return value
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return ("sequence", brackets, (parse_value(terms[0]), parse_value(terms[2])))


def _same_set(key: Value, answer: Value) -> bool:
    if key[0] == answer[0] == "sequence":
        return _same(key, answer)
    if key[0] == answer[0] == "union" and _same_unordered(key[1], answer[1], is_set=True):
        return True
    spans = _real_spans(key), _real_spans(answer)
    return None not in spans and len(spans[0]) == len(spans[1]) and all(map(_same_span, *spans))


def _same_span(first: tuple, second: tuple) -> bool:
    ends = zip(first[:2], second[:2], strict=True)
    return first[2:] == second[2:] and all(a == b or (a.is_finite and b.is_finite and is_close(a, b)) for a, b in ends)


def _real_spans(value: Value) -> list[tuple] | None:
    """(start, end, left open, right open) of each interval in a set of real numbers; None for any other set."""
    try:
        found, spans = _real_set(value), []
        for part in found.args if isinstance(found, sympy.Union) else (found,):
            if isinstance(part, sympy.FiniteSet):
                spans += [(point.evalf(60), point.evalf(60), False, False) for point in part.args]
            else:
                spans.append((part.start.evalf(60), part.end.evalf(60), part.left_open, part.right_open))
        return sorted(spans, key=lambda span: float(span[0]))
    except UNSOLVED:
        return None


def _real_set(value: Value) -> sympy.Set | None:
    """The set of real numbers that an interval, a union, a difference or a relation with one unknown describes."""
    if value[0] == "relation":
        terms = [read_formula(term) for term in value[1]]
        signs = [RELATIONS[sign] for sign in value[2]]
        return sympy.And(*(sign(a, b) for sign, a, b in zip(signs, terms, terms[1:], strict=False))).as_set()
    if value[0] == "sequence" and len(value[2]) == 2:
        low, high = (read_formula(end[1]).doit() for end in value[2])
        return sympy.Interval(low, high, value[1][0] == "(", value[1][1] == ")")
    if value[0] == "union":
        return sympy.Union(*map(_real_set, value[1]))
    if value[0] == "minus":
        return sympy.Complement(*map(_real_set, value[1]))
    if value[0] == "set":
        return sympy.FiniteSet(*(read_formula(item[1]).doit() for item in value[1]))
    return sympy.S.Reals if value[:2] == ("formula", r"\mathbb{R}") else None


# Answer keys ----------------------------------------------------------------------------------------------------------


def key_text(key: str) -> str:
    """The answer in an answer key: the inside of its last box or <answer>, if it has one, else all of it."""
    return (read_answer(key) or "") if re.search(r"\\(?:boxed|fbox)\b|<answer>", key) else key


def key_problem(key: str) -> str | None:
    """Why nothing could be graded against this key, in a few words; None if it can be."""
    text = clean(key_text(key))
    if len(text) > MAX_FORMULA:
        return f"no \\boxed answer in a key of {len(key)} characters ({key[:60]!r}...)"
    if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", text))) > MAX_WORDS:
        return f"a sentence, not an answer: {key[:80]!r}"
    if not re.search(r"\w", re.sub(r"\\(?:text|[^A-Za-z])", "", text)):
        return f"no answer in the key {key[:80]!r}"
    unread = next((leaf for leaf in _formulas(parse_value(text)) if read_formula(leaf) is None), None)
    return None if unread is None else f"math-verify cannot read {unread[:80]!r}"


def _formulas(value: Value) -> list[str]:
    """The formulas at the leaves of a value, those that only SymPy can compare."""
    if value[0] == "formula":
        return [value[1]]
    if value[0] == "equation":
        return list(value[1:])
    if value[0] in ("named", "family"):
        return _formulas(value[2])
    parts = {"sequence": 2, "list": 1, "set": 1, "union": 1, "minus": 1, "chain": 1}.get(value[0])
    items = itertools.chain(*value[1]) if value[0] == "matrix" else value[parts] if parts else ()
    return [leaf for item in items for leaf in _formulas(item)]


def canonical(answer: str) -> str:
    """One text for answers that are the same at sight (1/2, 0.5, \\frac12), for counting votes."""
    if len(answer) > 4 * MAX_FORMULA:
        return answer[:MAX_FORMULA]
    text = clean(answer)
    value = parse_value(text)
    return str(value[1]) if value[0] == "number" else re.sub(r"\s+", "", text)
