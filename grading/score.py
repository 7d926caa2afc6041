"""From the text of `--reward` to the grade of a completion, in a worker process. Read `RewardWorker` first.

What the text may be: `docs/rewards.md`. How a function of one's own is called: `own.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from grading import Case, Grade, alternatives
from grading.verifiers import BUILT_IN, load_verifier, verifiers_of


def parse_reward(spec: str) -> dict[str, float]:
    """The weight of each verifier: a built-in one, "@column" or "file.py:function". "none": {}. Nothing is loaded.

    Raises ValueError or FileNotFoundError for a wrong text.
    """
    weights = {}
    for part in spec.split(",") if spec != "none" else ():
        match = re.fullmatch(rf"\s*(@\w[\w.]*|[^:,]+\.py:\w+|{'|'.join(BUILT_IN)})(?::([^:]+))?\s*", part)
        if match is None:
            raise ValueError(
                f"--reward {spec!r}: {part!r} is neither built in ({', '.join(BUILT_IN)}) "
                "nor @COLUMN nor my_reward.py:function; a weight may follow, as in math:0.5."
            )
        name, weight = match.groups("1")
        if ".py:" in name and not (file := Path(name.partition(":")[0])).is_file():
            raise FileNotFoundError(f"--reward {spec!r}: the file {str(file.absolute())!r} does not exist.")
        if name in weights:
            raise ValueError(f"--reward {spec!r} names {name} twice; give it once, with one weight.")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = 0.0
        if not 0.0 < abs(weights[name]) < math.inf:
            raise ValueError(
                f"--reward {spec!r}: the weight {weight!r} of {name} must be a finite number other than 0."
            )
    return weights


class RewardInputs(NamedTuple):
    """The inputs that a reward needs."""

    cases: bool  # completions one by one
    groups: bool  # all completions of a prompt together
    token_ids: bool


class RewardWorker:
    """Answers the requests that a worker gets:

    ("grade", case)      a grade: the sum of the verifiers that look at one completion
    ("compare", cases)   a grade for each completion of a group: the sum of the functions that look at all of them
    ("check", cases)     why the built-in verifiers cannot grade each case, or the user's be called; None: they can
    ("inputs", None)     what the reward has to be given

    Raises what a file of `spec` raises, and ValueError if it has no such function or math-verify is broken.
    """

    def __init__(self, spec: str, overlong_cache_tokens: int | None) -> None:
        self.weights = parse_reward(spec)
        self.overlong_cache_tokens = overlong_cache_tokens
        self.own = {}
        if ".py:" in spec:
            from grading.own import OwnReward

            self.own = {name: OwnReward(name) for name in self.weights if ".py:" in name}
        self.per_group = [name for name, reward in self.own.items() if reward.takes_group]
        self.per_completion = [name for name in self.weights if name not in self.per_group]
        # Loaded now, not by the first completion. A worker's first formula takes a second, and a broken
        # library is silent.
        for name in verifiers_of(self.weights):
            verifier = load_verifier(name)
            if name == "math":
                rewards = [verifier(Case(text, "x^2+2x+1")).reward for text in (r"\boxed{(x+1)^2}", r"\boxed{3x^2}")]
                if rewards != [1.0, 0.0]:
                    raise ValueError("math-verify or SymPy is broken; install the versions of the requirements file")

    def __call__(self, request: tuple[str, Case | list[Case] | None]) -> object:
        match request:
            case "grade", case:
                return self.grades(self.per_completion, [case])[0]
            case "compare", cases:
                return self.grades(self.per_group, cases)
            case "check", cases:
                return [self.problem(case) for case in cases]
        takes_ids = any(reward.takes_token_ids for reward in self.own.values())
        return RewardInputs(bool(self.per_completion), bool(self.per_group), takes_ids)

    def grades(self, names: list[str], cases: list[Case]) -> list[Grade]:
        """The sum over these verifiers, for each case."""
        columns = [self.weighted(name, cases) for name in names]
        return [add_up(grades, self.weights) for grades in zip(*columns, strict=True)]

    def weighted(self, name: str, cases: list[Case]) -> list[Grade]:
        """The grade by one verifier, times its weight, for each case."""
        grades = self.own[name](cases) if name in self.own else [self.built_in(name, case) for case in cases]
        weighted = []
        for grade in grades:
            parts = {name: grade.reward}
            for part, value in grade.parts.items():  # a function's sub-scores
                is_taken = len(self.own) > 1 or part in self.weights  # another verifier may have a part of this name
                parts[f"{name}/{part}" if is_taken else part] = value
            answer = grade.answer[:500] if grade.answer else None
            weighted.append(replace(grade, reward=self.weights[name] * grade.reward, parts=parts, answer=answer))
        return weighted

    def built_in(self, name: str, case: Case) -> Grade:
        """The grade by a built-in verifier, for @COLUMN of the one that the row names. The key that fits best counts.

        Raises ValueError if the column names none, or if none of the row's keys can be used.
        """
        verifier = str(case.columns.get(name[1:])) if name[0] == "@" else name
        if verifier.lower() not in BUILT_IN:
            raise ValueError(f"column {name[1:]!r} is {verifier!r}, which names no verifier ({', '.join(BUILT_IN)})")
        grades, problems = [], []
        for key in alternatives(case.answer):
            keyed = replace(case, answer=key, overlong_cache_tokens=self.overlong_cache_tokens)
            try:
                grades.append(load_verifier(verifier.lower())(keyed))
            except ValueError as error:
                problems.append(error)
        if not grades:
            raise problems[0]
        return max(grades, key=lambda grade: grade.reward)

    def problem(self, case: Case) -> str | None:
        """The reason why built-in verifiers cannot grade the case, or functions of the user's be called; or None."""
        try:
            for name in self.weights:
                if name in self.own:
                    self.own[name].check_row(case)
                else:
                    self.built_in(name, case)
        except ValueError as error:
            return str(error)
        return None


def add_up(grades: Sequence[Grade], names: Iterable[str]) -> Grade:
    """The sum of a completion's grades; `names` are the verifiers in the order of `--reward`."""
    for grade in grades:
        if grade.status != "ok":
            return grade
    parts = {name: value for grade in grades for name, value in grade.parts.items()}
    parts = {name: parts[name] for name in names if name in parts} | parts
    answer = next((grade.answer for grade in grades if grade.answer is not None), None)
    feedback = "\n".join(grade.feedback for grade in grades if grade.feedback)
    return Grade(sum(grade.reward for grade in grades), "ok", parts, answer, feedback)
