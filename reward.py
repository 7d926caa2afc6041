"""Text + answer -> number: the verifiers, their weighted sum, and a command that grades a file.

    --reward math                         one verifier
    --reward math:1.0,format:0.1          a weighted sum
    --reward @dataset                     the verifier that each row's column `dataset` names (gsm8k, MATH, ifeval, ...)
    --reward my_reward.py:score           a function of your own; a weight can follow here, too (my_reward.py:score:0.5)

Your own function gets the sampled text without special tokens, the row's answer, and the whole row:

    def score(completion, answer, columns):
        return float(answer in completion)

It may also ask by name for `prompt` (the text that was continued), `num_tokens`, `max_tokens` (of the completion) and `is_truncated`.

Verifiers run in worker processes (`workers.py`) while the engine still samples. A verifier that exceeds its time or memory, raises,
returns no finite number or ends its process costs one completion: its reward is 0.0 and its status says why.

    python reward.py --reward math --input completions.jsonl --output graded.jsonl

No torch here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from grading.pool import Outcome, Pool
from grading.verifiers import BUILT_IN, Case, Verifier, key_problem, soft_overlong


@dataclass(frozen=True)
class Grade:
    """`reward` is the weighted sum of `parts` (0.0 unless the status is "ok"); status: "ok", "truncated", "timeout", or "error: ..."."""

    reward: float
    status: str
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None  # what the verifier read as the final answer, if it reads one

    @property
    def score(self) -> float:
        """What the first verifier of the sum said: the one that the completion is right by."""
        return next(iter(self.parts.values()), 0.0)

    @property
    def is_correct(self) -> bool:
        return self.score >= 1.0

    @property
    def is_failed(self) -> bool:
        """True if it could not be graded: the verifier ran out of time or raised."""
        return self.status not in ("ok", "truncated")


# The weighted sum -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """One verifier of the sum. `name` is a built-in one, "length", "@column" or "file.py:function"."""

    name: str
    weight: float


def parse_reward(spec: str) -> list[Term]:
    """The terms of a `--reward` text. Raises ValueError or FileNotFoundError saying what is wrong; nothing is loaded."""
    terms = []
    for part in spec.split(","):
        match = re.fullmatch(r"\s*(@\w[\w.]*|[^:,]+\.py:\w+|\w+)(?::([^:]+))?\s*", part)
        if not match:
            raise ValueError(
                f"--reward {spec!r}: {part!r} is none of NAME, NAME:WEIGHT, @COLUMN, my_reward.py:function."
            )
        name = match[1]
        if not name.startswith("@") and ".py:" not in name and name not in {*BUILT_IN, "length"}:
            names = ", ".join([*BUILT_IN, "length"])
            raise ValueError(
                f"--reward {spec!r}: {name!r} is neither built in ({names}) nor @COLUMN nor of the form my_reward.py:function."
            )
        try:
            weight = float(match[2] or 1.0)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight) or weight == 0.0:
            raise ValueError(
                f"--reward {spec!r}: the weight {match[2]!r} of {name} must be a finite number other than 0."
            )
        if ".py:" in name and not Path(name.partition(":")[0]).is_file():
            raise FileNotFoundError(f"--reward {spec!r}: the file {name.partition(':')[0]!r} does not exist.")
        terms.append(Term(name, weight))
    names = [term.name for term in terms]
    if len(set(names)) < len(names):
        raise ValueError(f"--reward {spec!r} names a verifier twice; give each once, with one weight.")
    return terms


def _own_verifier(name: str) -> Verifier:
    """The function `file.py:function` as a verifier. Raises ValueError if the file does not define it, and whatever the file raises."""
    path, _, function_name = name.rpartition(":")
    module_spec = importlib.util.spec_from_file_location(
        f"own_reward_{Path(path).stem}", path
    )  # a file may be called math.py
    assert module_spec is not None and module_spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # as an import would: dataclasses and pickle look there
    sys.path.insert(0, str(Path(path).absolute().parent))  # so that it can import its neighbours
    module_spec.loader.exec_module(module)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise ValueError(
            f"--reward {name}: {path} has no function {function_name!r}; it has {', '.join(functions) or 'none'}."
        )
    extra = [
        key
        for key in ("prompt", "num_tokens", "max_tokens", "is_truncated")
        if key in inspect.signature(function).parameters
    ]

    def verify(case: Case) -> tuple[float, str | None]:
        value = function(case.completion, case.answer, case.columns, **{key: getattr(case, key) for key in extra})
        try:
            score = float(value) if not isinstance(value, str) else math.nan
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise ValueError(f"{function_name} returned {value!r}, not a finite number")
        return score, None

    return verify


def _column_verifier(name: str, columns: dict[str, object]) -> str:
    """The built-in verifier that the column of an "@column" term names. Raises ValueError if it names none."""
    named = columns.get(name[1:])
    verifier = str(named).lower()
    if verifier not in BUILT_IN:
        raise ValueError(f"column {name[1:]!r} is {named!r}, which names no verifier ({', '.join(BUILT_IN)})")
    return verifier


def make_handler(spec: str, overlong_cache_tokens: int | None) -> Callable[[tuple[str, Case]], object]:
    """What a worker does with ("grade", case): (reward, parts, answer); with ("check", case): why its key cannot be used, or None."""
    terms = parse_reward(spec)
    own = {term.name: _own_verifier(term.name) for term in terms if ".py:" in term.name}

    def verify_length(case: Case) -> tuple[float, str | None]:
        if case.num_tokens is None or case.max_tokens is None:
            raise ValueError("the reward `length` needs num_tokens and max_tokens")
        return soft_overlong(
            case.num_tokens, case.max_tokens, overlong_cache_tokens or max(case.max_tokens // 5, 1)
        ), None

    def verifier_of(term: Term, case: Case) -> Verifier:
        if term.name == "length":
            return verify_length
        return (
            own.get(term.name)
            or BUILT_IN[_column_verifier(term.name, case.columns) if term.name[0] == "@" else term.name]
        )

    def handle(request: tuple[str, Case]) -> object:
        kind, case = request
        if kind == "check":
            try:
                names = [
                    _column_verifier(term.name, case.columns) if term.name[0] == "@" else term.name for term in terms
                ]
            except ValueError as error:
                return str(error)
            return next((problem for name in names if (problem := key_problem(name, case.answer, case.columns))), None)
        parts, answer = {}, None
        for term in terms:
            parts[term.name], found = verifier_of(term, case)(case)
            answer = found if answer is None else answer
        return sum(term.weight * parts[term.name] for term in terms), parts, None if answer is None else answer[:500]

    return handle


# The grader -------------------------------------------------------------------------------------------------------------------------

TRUNCATED_CHOICES = ("score", "zero", "mask")
SELF_TEST = [  # key, completion, is it right: what a broken dependency would get wrong
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


class Grader:
    """Grades completions in worker processes: `submit` as they come, `collect` when all are there."""

    def __init__(
        self,
        spec: str,
        timeout: float = 5.0,
        memory_gib: float = 4.0,
        num_workers: int = 1,
        truncated: str = "score",
        overlong_cache_tokens: int | None = None,
    ) -> None:
        """Loads the verifiers of `spec` in the workers and, for `math`, grades the self-test.

        Raises ValueError if the reward cannot be loaded, RuntimeError if the self-test fails.
        """
        terms = parse_reward(spec)
        self.timeout = timeout
        self.truncated = truncated
        needs_math = any(term.name == "math" or term.name[0] == "@" for term in terms)
        try:
            prepare = "grading.math_equal:warm_up" if needs_math else ""
            self.pool = Pool(
                "reward:make_handler", (spec, overlong_cache_tokens), num_workers, timeout, memory_gib, prepare
            )
        except ValueError as error:
            raise ValueError(f"--reward {spec!r}: {error}") from None
        self.ungraded: dict[int, Grade] = {}
        if needs_math:
            self._test_itself(memory_gib)

    def _test_itself(self, memory_gib: float) -> None:
        pool = Pool("reward:make_handler", ("math", None), 1, 60.0, memory_gib)
        for i, (key, completion, _) in enumerate(SELF_TEST):
            pool.submit(i, ("grade", Case(completion, key)))
        outcomes = pool.collect()
        pool.close()
        for i, (key, completion, is_right) in enumerate(SELF_TEST):
            outcome = outcomes[i]
            if outcome.status != "ok" or (outcome.value[0] == 1.0) != is_right:
                packages = ("math-verify", "latex2sympy2-extended", "sympy", "antlr4-python3-runtime")
                versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
                raise RuntimeError(
                    f"the math grader is broken: {completion!r} against the key {key!r} must be {'right' if is_right else 'wrong'}, got "
                    f"{outcome.value!r} ({outcome.status}). Installed: {versions}; install the versions of the requirements file."
                )

    def submit(self, key: int, case: Case) -> None:
        """Hands a completion to the workers and returns at once; `key` names it in `collect`."""
        if case.is_truncated and self.truncated == "zero":
            self.ungraded[key] = Grade(0.0, "truncated")
        else:
            self.pool.submit(key, ("grade", case))

    def collect(self) -> dict[int, Grade]:
        """The grade of each completion submitted since the last call."""
        grades, self.ungraded = self.ungraded, {}
        return grades | {key: _grade_of(outcome) for key, outcome in self.pool.collect().items()}

    def grade(self, cases: list[Case]) -> list[Grade]:
        """The grades of the cases, in their order."""
        for i, case in enumerate(cases):
            self.submit(i, case)
        grades = self.collect()
        return [grades[i] for i in range(len(cases))]

    def check_keys(self, cases: list[Case]) -> dict[int, str]:
        """Index -> reason, of the cases (their completions do not matter) whose answer key the verifiers cannot use."""
        outcomes: dict[int, Outcome] = {}
        for _ in range(3):  # a time-out of a busy machine must not decide which rows are trained on
            for i, case in enumerate(cases):
                if i not in outcomes or outcomes[i].status != "ok":
                    self.pool.submit(i, ("check", case))
            outcomes |= self.pool.collect()
        reasons = {
            i: outcomes[i].value if outcomes[i].status == "ok" else outcomes[i].status for i in range(len(cases))
        }
        return {i: str(reason) for i, reason in reasons.items() if reason is not None}

    def close(self) -> None:
        self.pool.close()


def _grade_of(outcome: Outcome) -> Grade:
    if outcome.status != "ok":
        return Grade(0.0, outcome.status)
    reward, parts, answer = outcome.value
    return Grade(reward, "ok", parts, answer)


def grader_of(args: argparse.Namespace) -> Grader:
    """The grader that the flags describe. Without --reward_workers, the engines of a node share its cores."""
    engines_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // getattr(args, "tensor_parallel_size", 1)
    num_workers = args.reward_workers or max(1, len(os.sched_getaffinity(0)) // max(1, engines_of_node))
    return Grader(
        args.reward,
        args.reward_timeout,
        args.reward_memory_gib,
        num_workers,
        args.truncated,
        args.overlong_cache_tokens,
    )


def add_reward_flags(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """The flags of `Grader`; without a default, --reward is required."""
    add = parser.add_argument_group("reward").add_argument
    names = "math, gsm8k, ifeval, exact, format, think_format, length"
    sums = "a weighted sum (math:1.0,format:0.1); @COLUMN: the one that the row's column names; my_reward.py:function; see reward.py"
    add("--reward", default=default, required=default is None, help=f"{names}; {sums}")
    add(
        "--reward_timeout",
        type=float,
        default=5.0,
        help="seconds after which the grading of one completion is given up: reward 0",
    )
    add(
        "--reward_memory_gib",
        type=float,
        default=4.0,
        help="data that a grading process may hold before it is ended: reward 0",
    )
    add(
        "--reward_workers",
        type=int,
        default=0,
        help="grading processes per engine; 0: the cores of the node, divided by its engines",
    )
    add("--truncated", choices=TRUNCATED_CHOICES, default="score", help="completions cut at their token limit: graded like the others "
        "(score), reward 0 (zero), or graded but left out of the loss (mask)")  # fmt: skip
    add(
        "--overlong_cache_tokens",
        type=int,
        help="reward `length`: it falls from 0 to -1 over the last so many tokens; default: 1/5 of the limit",
    )


# The command ------------------------------------------------------------------------------------------------------------------------


def read_cases(path: str, max_tokens: int | None) -> tuple[list[dict[str, object]], list[Case]]:
    """The rows of a .jsonl file of completions and what there is to grade in them. Raises ValueError naming the line, FileNotFoundError."""
    rows, cases = [], []
    if not Path(path).is_file():
        raise FileNotFoundError(f"--input {path!r}: no such file.")
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON ({error}).") from None
        if not isinstance(row, dict) or not isinstance(row.get("completion"), str) or row.get("answer") is None:
            raise ValueError(f"{where}: needs an object with a text `completion` and an `answer`.")
        answer = row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"], ensure_ascii=False)
        options = {name: row[name] for name in ("prompt", "num_tokens", "is_truncated") if name in row}
        rows.append(row)
        cases.append(
            Case(row["completion"], answer, row, max_tokens=row.get("max_tokens", max_tokens), where=where, **options)
        )
    return rows, cases


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Grades a file of completions: adds `reward` and `reward_status` to each row, in order. Rows whose answer key cannot "
        "be used get the reward null. Fields: completion, answer; used where they are there: prompt, num_tokens, max_tokens, is_truncated.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--input", required=True, help="a .jsonl file, one JSON object per line")
    parser.add_argument(
        "--output", required=True, help="the graded rows; written when all are graded, replaced if it exists"
    )
    parser.add_argument(
        "--max_completion_tokens", type=int, help="the reward `length`: the limit, where rows have no max_tokens"
    )
    add_reward_flags(parser)
    args = parser.parse_args()
    try:
        if Path(args.output).exists() and Path(args.output).samefile(args.input):
            raise ValueError(f"--output {args.output!r} is the input; choose another file.")
        rows, cases = read_cases(args.input, args.max_completion_tokens)
        grader = grader_of(args)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    bad_keys = grader.check_keys(cases)
    for i, case in enumerate(cases):
        if i not in bad_keys:
            grader.submit(i, case)
    grades = grader.collect()
    grader.close()
    unfinished = Path(f"{args.output}.unfinished")
    with unfinished.open("w", encoding="utf-8") as out:
        for i, row in enumerate(rows):
            result = (None, f"bad key: {bad_keys[i]}") if i in bad_keys else (grades[i].reward, grades[i].status)
            out.write(json.dumps({**row, "reward": result[0], "reward_status": result[1]}) + "\n")
    unfinished.replace(args.output)
    good = [grade for grade in grades.values() if grade.status == "ok"]
    failed = [
        f"{case.where}: {grades[i].status}" for i, case in enumerate(cases) if i in grades and grades[i].status != "ok"
    ]
    print(f"{len(rows)} rows: {len(good)} graded, mean reward {sum(g.reward for g in good) / max(len(good), 1):.4f}; {len(failed)} failed, "
          f"{len(bad_keys)} with an answer key that cannot be used")  # fmt: skip
    for line in [*(f"{cases[i].where}: {reason}" for i, reason in bad_keys.items()), *failed][:20]:
        print(f"  {line}")


if __name__ == "__main__":
    main()
