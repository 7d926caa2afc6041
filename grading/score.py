"""From the text of `--reward` to the grade of a completion, in a worker process. Read `Handler` first.

What the text may be: `docs/rewards.md`. How a function of one's own is called: `own.py`.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from grading import Case, Grade, alternatives
from grading.own import OwnReward
from grading.verifiers import BUILT_IN, Verifier


def parse_reward(spec: str) -> dict[str, float]:
    """The weight of each verifier: a built-in one, "@column" or "file.py:function". Nothing is loaded.

    Raises ValueError or FileNotFoundError for a wrong text.
    """
    weights: dict[str, float] = {}
    for part in spec.split(","):
        match = re.fullmatch(r"\s*(@\w[\w.]*|[^:,]+\.py:\w+|\w+)(?::([^:]+))?\s*", part)
        if not match:
            forms = "NAME, NAME:WEIGHT, @COLUMN, my_reward.py:function"
            raise ValueError(f"--reward {spec!r}: {part!r} is none of {forms}.")
        name = match[1]
        if name[0] != "@" and ".py:" not in name and name not in BUILT_IN:
            forms = f"neither built in ({', '.join(BUILT_IN)}) nor @COLUMN nor of the form my_reward.py:function"
            raise ValueError(f"--reward {spec!r}: {name!r} is {forms}.")
        try:
            weight = float(match[2] or 1.0)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight) or weight == 0.0:
            rule = "must be a finite number other than 0"
            raise ValueError(f"--reward {spec!r}: the weight {match[2]!r} of {name} {rule}.")
        if ".py:" in name and not Path(name.partition(":")[0]).is_file():
            raise FileNotFoundError(f"--reward {spec!r}: the file {name.partition(':')[0]!r} does not exist.")
        weights[name] = weight
    if len(weights) < len(spec.split(",")):
        raise ValueError(f"--reward {spec!r} names a verifier twice; give each once, with one weight.")
    return weights


class Needs(NamedTuple):
    """What a reward has to be given."""

    cases: bool  # completions one by one
    groups: bool  # all completions of a prompt together
    token_ids: bool


class Handler:
    """Answers the requests that a worker gets:

    ("grade", case)      a grade: the sum of the verifiers that look at one completion
    ("compare", cases)   a grade for each completion of a group: the sum of the functions that look at all of them
    ("check", case)      why the row cannot be used, or None; the completion does not matter
    ("needs", None)      what the reward has to be given

    Raises what a file of `spec` raises, and ValueError if it has no such function or math-verify is broken.
    """

    def __init__(self, spec: str, overlong_cache_tokens: int | None) -> None:
        self.weights = parse_reward(spec)
        self.overlong_cache_tokens = overlong_cache_tokens
        self.own = {name: OwnReward(name) for name in self.weights if ".py:" in name}
        self.per_group = [name for name, reward in self.own.items() if reward.takes_group]
        self.per_completion = [name for name in self.weights if name not in self.per_group]
        if any(name == "math" or name[0] == "@" for name in self.weights):
            check_math()

    def __call__(self, request: tuple[str, Case | list[Case] | None]) -> object:
        kind, given = request
        if kind == "grade":
            return self.grades(self.per_completion, [given])[0]
        if kind == "compare":
            return self.grades(self.per_group, given)
        if kind == "check":
            return next((problem for name in self.weights if (problem := self.problem(name, given))), None)
        takes_ids = any(reward.takes_token_ids for reward in self.own.values())
        return Needs(bool(self.per_completion), bool(self.per_group), takes_ids)

    def grades(self, names: list[str], cases: list[Case]) -> list[Grade]:
        """Of each case, the sum over these verifiers."""
        cases = [replace(case, overlong_cache_tokens=self.overlong_cache_tokens) for case in cases]
        of_names = [self.grades_of(name, cases) for name in names]
        return [add_up(grades, self.weights) for grades in zip(*of_names, strict=True)]

    def grades_of(self, name: str, cases: list[Case]) -> list[Grade]:
        """Of each case, what one verifier gives, times its weight."""
        weight, grades = self.weights[name], []
        if name in self.own:
            several = len(self.own) > 1  # then two may have a sub-score of the same name
            for score, parts in self.own[name](cases):
                parts = {f"{name}/{part}" if several or part in self.weights else part: parts[part] for part in parts}
                grades.append(Grade(weight * score, "ok", {name: score} | parts))
        for case in cases if name not in self.own else ():
            verifier = self.built_in(name, case)
            verdicts = (verifier.score(replace(case, answer=key)) for key in alternatives(case.answer))
            score, answer = max(verdicts, key=lambda verdict: verdict[0])  # the key that fits best
            grades.append(Grade(weight * score, "ok", {name: score}, None if answer is None else answer[:500]))
        return grades

    def problem(self, name: str, case: Case) -> str | None:
        """Why the verifier cannot use the row: of several keys, one that it can use will do."""
        if name in self.own:
            return self.own[name].key_problem(case)
        try:
            verifier = self.built_in(name, case)
        except ValueError as error:
            return str(error)
        problems = [verifier.key_problem(replace(case, answer=key)) for key in alternatives(case.answer)]
        return problems[0] if all(problems) else None

    def built_in(self, name: str, case: Case) -> Verifier:
        """The built-in verifier: the one that the row's column names, for @COLUMN. Raises ValueError without one."""
        named = str(case.columns.get(name[1:])) if name[0] == "@" else name
        if named.lower() not in BUILT_IN:
            raise ValueError(f"column {name[1:]!r} is {named!r}, which names no verifier ({', '.join(BUILT_IN)})")
        return BUILT_IN[named.lower()]


def add_up(grades: Sequence[Grade], names: Iterable[str]) -> Grade:
    """The sum of a completion's grades; `names` are the verifiers in the order of `--reward`."""
    if len(grades) == 1:
        return grades[0]
    if failed := next((grade for grade in grades if grade.status != "ok"), None):
        return failed
    parts = {name: value for grade in grades for name, value in grade.parts.items()}
    parts = {name: parts[name] for name in names if name in parts} | parts
    answers = [grade.answer for grade in grades if grade.answer is not None]
    return Grade(sum(grade.reward for grade in grades), "ok", parts, answers[0] if answers else None)


SELF_TEST = [  # key, completion, whether it is correct: what a broken dependency would get wrong
    ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
    (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt{3}}}", True),
    ("y=2x+1", r"\boxed{2x-y+1=0}", True),
    ("3x", r"\boxed{3x^2}", False),
    (r"\frac{1}{3}", r"\boxed{0.33}", False),
]


def check_math() -> None:
    """Grades the self-test with `math`. Raises ValueError if a verdict is wrong: math-verify or SymPy is broken."""
    for key, completion, is_correct in SELF_TEST:
        if (BUILT_IN["math"].score(Case(completion, key))[0] == 1.0) != is_correct:
            names = ("math-verify", "latex2sympy2-extended", "sympy", "antlr4-python3-runtime")
            versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
            verdict = f"{completion!r} against the key {key!r} must be {'correct' if is_correct else 'incorrect'}"
            todo = f"Installed: {versions}; install the versions of the requirements file."
            raise ValueError(f"the math grader is broken: {verdict}. {todo}")
