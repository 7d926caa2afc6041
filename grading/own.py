"""A reward in a file of the user's, and how it is called: by its parameters' names.

    score(completion, answer, columns, ...)                              one completion: ours
    f(completions, **columns)                                            all completions of a prompt: TRL's
    compute_score(data_source, solution_str, ground_truth, extra_info)   one completion: verl's
    compute_score(data_sources, solution_strs, ...)                      a group: verl's batch manager

All arguments are passed by name, but only those that a function names. Completions and prompts are texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import Parameter

from grading import Case, Grade
from grading.pool import Failure, Pool
from grading.user_code import load_own

# What a case may know beside text, answer and columns
EXTRAS = {"prompt": str, "num_tokens": int, "max_tokens": int, "is_truncated": bool}
FORMS = ("completion", "completions", "solution_str", "solution_strs")  # the parameter that tells the form


def values_of(case: Case, form: str) -> dict[str, object]:
    """The values of a completion that a function of this form may name; of a group, lists."""
    if form.startswith("completion"):
        values = {name: getattr(case, name) for name in ("completion", "answer", "token_ids", "columns", *EXTRAS)}
        plurals = {"completion": "completions", "answer": "answers", "prompt": "prompts", "token_ids": "completion_ids"}
    else:
        nested = case.columns.get("reward_model")  # verl's data has its key here, of any type
        values = {
            "solution_str": case.completion,
            "ground_truth": nested.get("ground_truth", case.answer) if isinstance(nested, dict) else case.answer,
            "data_source": case.columns.get("data_source", ""),
            "extra_info": case.columns.get("extra_info") or {},
        }
        plurals = {name: f"{name}s" for name in values}
    if not form.endswith("s"):
        return values
    return {plurals.get(name, name): values[name] for name in values}


def lost_requests(
    outcomes: dict[int, object], cases: dict[int, Case], pool: Pool, collect: Callable[[str], dict[int, object]]
) -> set[int]:
    """The failed requests in which a function of the user's is to blame. `cases`: of completions; a group has no key.

    Where the built-in verifiers fail, too, when they are asked alone, these are: what they cannot read is wrong.
    """
    failed = {key for key, outcome in outcomes.items() if isinstance(outcome, Failure)}
    for key in failed & cases.keys():
        pool.submit(key, ("check", [cases[key]]))
    alone = collect("grade") if failed else {}
    return {key for key in failed if alone.get(key, [None]) == [None]}


class WrongReturn(ValueError):
    """The function returned what is no reward."""


class OwnReward:
    """A function of the user's and how it is called."""

    def __init__(self, reference: str) -> None:
        """Loads `file.py:function`. Raises ValueError if it cannot be called, and what the file raises."""
        self.function, self.name = load_own(reference)
        signature = inspect.signature(self.function)
        self.parameters = signature.parameters
        form = next((name for name in FORMS if name in self.parameters), None)
        if form is None:
            raise ValueError(
                f"{self.name} cannot be called: it takes {signature}, but none of {', '.join(FORMS)}. "
                "A reward is score(completion, answer, columns), or has the parameters of TRL or verl; "
                "see docs/rewards.md."
            )
        self.form = form
        self.takes_group = form.endswith("s")
        self.takes_rest = False
        self.required = []
        known = values_of(Case("", ""), form)
        for name, parameter in self.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                self.takes_rest = form.startswith("completion")
            elif parameter.kind is not Parameter.VAR_POSITIONAL and parameter.default is Parameter.empty:
                self.required += {name} - known.keys()
        if self.required and form != "completions":
            raise ValueError(f"{self.name} cannot be called: nothing is known of its parameter {self.required[0]!r}.")
        self.takes_token_ids = not {"token_ids", "completion_ids"}.isdisjoint(self.parameters)

    def check_row(self, case: Case) -> None:
        """Raises ValueError if it cannot be called for this row."""
        for name in self.required:
            if name not in case.columns:
                columns = ", ".join(case.columns) or "none"
                raise ValueError(f"{self.name} takes {name!r}, but the row's columns are {columns}")

    def __call__(self, cases: list[Case]) -> list[Grade]:
        """The grade of each completion; its parts are sub-scores. Raises what the function raises, or WrongReturn."""
        # What it changes in a row is for no other function, and for no other completion of the prompt.
        cases = [replace(case, columns=copy.deepcopy(case.columns)) for case in cases]
        given = [case.columns | values_of(case, self.form) for case in cases]
        arguments = {}
        for name, value in given[0].items():
            if name in self.parameters or (self.takes_rest and name not in ("token_ids", "completion_ids")):
                arguments[name] = [values.get(name) for values in given] if self.takes_group else value
        if isinstance(self.function, functools.partial):
            arguments |= self.function.keywords  # the user has bound them
        result = awaited(self.function(**arguments))
        if not self.takes_group:
            return [read_reward(result, self.name)]
        is_list = isinstance(result, Iterable) and not isinstance(result, (str, bytes, dict, set))
        results = list(result) if is_list else []
        if len(results) != len(cases):
            raise WrongReturn(
                f"{self.name} returned {result!r:.200} for {len(cases)} completions, not a list of that many"
            )
        return [read_reward(0.0 if value is None else value, self.name) for value in results]  # None in TRL: no score


def read_reward(result: object, name: str) -> Grade:
    """The grade that the function of this name returned for one completion. Raises WrongReturn.

    A sub-score that is no finite number, or whose name is no text, is left out.
    """
    said = result if isinstance(result, dict) else {"reward": result}
    key = "reward" if "reward" in said else "score"
    if key not in said:
        raise WrongReturn(f"{name} returned {result!r:.200}: a dict needs the key 'reward' or 'score'")
    # Mere texts: the trainer cannot load a class of the user's.
    numbers = {str.__str__(part): _number(said[part]) for part in said if isinstance(part, str)}
    score = numbers.pop(key)
    if score is None:
        raise WrongReturn(f"{name} returned {said[key]!r:.200}, not a finite number of 32 bits")
    parts = {part: number for part, number in numbers.items() if number is not None}
    feedback = said.get("feedback")
    return Grade(score, parts=parts, feedback=str.__str__(feedback) if isinstance(feedback, str) else "")


def _number(value: object) -> float | None:
    """The value if it is a finite number of 32 bits, also a scalar of NumPy or torch; else None."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if not isinstance(value, (str, bytes)) and abs(float(value)) <= 1e38:
            return float(value)
    return None


LOCK = threading.Lock()  # several threads may be the first that need the event loop


def awaited(result: object) -> object:
    """The result of a function, which is awaited if the function is async."""
    if not inspect.isawaitable(result):
        return result
    with LOCK:
        loop = event_loop()
    return asyncio.run_coroutine_threadsafe(result, loop).result()


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One for the process, in a thread of its own: a semaphore or a session of the user's belongs to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
