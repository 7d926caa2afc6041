"""The worker's side of a reward: from the text of `--reward` to the grade of a completion. Read `make_handler` first.

What the text may be, and what a function of one's own gets: `docs/rewards.md`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from grading.own import load_function
from grading.verifiers import BUILT_IN, Case, Verifier

EXTRAS = ("prompt", "num_tokens", "max_tokens", "is_truncated")  # what a function of one's own may ask for by name


@dataclass(frozen=True)
class Grade:
    """What a completion got. `reward` is the weighted sum of `parts`, and 0.0 unless the status is "ok"."""

    reward: float
    status: str  # "ok", "truncated", "timeout" or "error: ..."
    parts: dict[str, float] = field(default_factory=dict)  # verifier -> its score
    answer: str | None = None  # what the first verifier that reads one read as the final answer

    @property
    def score(self) -> float:
        """The score of the first verifier of the sum: it decides whether the completion is correct."""
        return next(iter(self.parts.values()), 0.0)

    @property
    def is_correct(self) -> bool:
        return self.score >= 1.0

    @property
    def is_failed(self) -> bool:
        """True if the completion could not be graded: its verifier ran out of time or raised."""
        return self.status not in ("ok", "truncated")


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


def needs_math(names: Iterable[str]) -> bool:
    return any(name == "math" or name[0] == "@" for name in names)


def make_handler(spec: str, overlong_cache_tokens: int | None) -> Callable[[tuple[str, Case]], Grade | str | None]:
    """What a worker makes of ("grade", case): a grade; of ("check", case): why the key cannot be used, or None.

    Raises what a file of `spec` raises, and ValueError if it has no such function or math-verify is broken.
    """
    weights = parse_reward(spec)
    own = {name: _own_verifier(name) for name in weights if ".py:" in name}
    if needs_math(weights):
        check_math()

    def verifier_of(name: str, case: Case) -> Verifier:
        if name[0] != "@":
            return own.get(name) or BUILT_IN[name]
        named = case.columns.get(name[1:])
        if str(named).lower() not in BUILT_IN:
            raise ValueError(f"column {name[1:]!r} is {named!r}, which names no verifier ({', '.join(BUILT_IN)})")
        return BUILT_IN[str(named).lower()]

    def handle(request: tuple[str, Case]) -> Grade | str | None:
        kind, case = request
        if kind == "check":
            return check(case)
        case = replace(case, overlong_cache_tokens=overlong_cache_tokens)
        parts, answer = {}, None
        for name in weights:
            parts[name], found = verifier_of(name, case).score(case)
            answer = found if answer is None else answer
        reward = sum(weight * parts[name] for name, weight in weights.items())
        return Grade(reward, "ok", parts, None if answer is None else answer[:500])

    def check(case: Case) -> str | None:
        try:
            verifiers = [verifier_of(name, case) for name in weights]
        except ValueError as error:
            return str(error)
        problems = (verifier.key_problem(case) for verifier in verifiers)
        return next((problem for problem in problems if problem), None)

    return handle


def _own_verifier(name: str) -> Verifier:
    """The function `file.py:function` as a verifier. Raises ValueError if it is missing, and what the file raises."""
    path, _, function_name = name.rpartition(":")
    function = load_function(path, function_name)
    extras = [key for key in EXTRAS if key in inspect.signature(function).parameters]

    def verify(case: Case) -> tuple[float, str | None]:
        value = function(case.completion, case.answer, case.columns, **{key: getattr(case, key) for key in extras})
        try:
            score = float(value) if not isinstance(value, str) else math.nan
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise ValueError(f"{function_name} returned {value!r}, not a finite number")
        return score, None

    return Verifier(verify)


# The self-test --------------------------------------------------------------------------------------------------------

SELF_TEST = [  # key, completion, whether it is correct: what a broken dependency would get wrong
    (r"\frac{1}{2}", r"\boxed{0.5}", True),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", True),  # SymPy's equality
    (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt{3}}}", True),  # SymPy's equality
    ("y=2x+1", r"\boxed{2x-y+1=0}", True),  # SymPy's solver
    (r"\{1,2\}", r"\boxed{\{2,1\}}", True),
    ("3x", r"\boxed{3x^2}", False),
    (r"[0,1)", r"\boxed{(0,1)}", False),
    (r"\frac{1}{3}", r"\boxed{0.33}", False),
    ("4", "<think>\\boxed{5}</think>The answer is <answer>4</answer>", True),
    ("4", r"\boxed{4} or \boxed{5}", False),
]


def check_math() -> None:
    """Grades the self-test with `math`. Raises ValueError if a verdict is wrong: math-verify or SymPy is broken."""
    for key, completion, is_correct in SELF_TEST:
        if (BUILT_IN["math"].score(Case(completion, key))[0] == 1.0) != is_correct:
            packages = ("math-verify", "latex2sympy2-extended", "sympy", "antlr4-python3-runtime")
            versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
            verdict = f"{completion!r} against the key {key!r} must be {'correct' if is_correct else 'incorrect'}"
            todo = f"Installed: {versions}; install the versions of the requirements file."
            raise ValueError(f"the math grader is broken: {verdict}. {todo}")
