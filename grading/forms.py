"""A reward function in a file of the user's: the names of its parameters say what it takes and how it is called.

    score(completion, answer, columns)                                   one completion
    score(completions, answers, columns)                                 all completions of a prompt: each a list
    reward(completions, <columns of the data>, **kwargs)                 the same, as TRL calls it
    compute_score(data_source, solution_str, ground_truth, extra_info)   one completion, as verl calls it
    compute_score(data_sources, solution_strs, ground_truths, extra_infos)   a group, as verl's batch manager does

All arguments are passed by name; those that a function does not ask for are left out. `async def` is awaited.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import linecache
import math
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from decimal import Decimal
from inspect import Parameter, Signature
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from grading.own import load_function
from grading.verifiers import Case

Value = Callable[[Case], object]


def _key_of_verl(case: Case) -> object:
    """In verl's data the key is `reward_model.ground_truth`, of any type."""
    nested = case.columns.get("reward_model")
    return nested.get("ground_truth", case.answer) if isinstance(nested, dict) else case.answer


EXTRAS = ("prompt", "num_tokens", "max_tokens", "is_truncated")  # what a case may know beside text, answer and columns
OURS: dict[str, Value] = {name: attrgetter(name) for name in ("completion", "answer", "columns", *EXTRAS)}
VERL: dict[str, Value] = {
    "solution_str": attrgetter("completion"),
    "ground_truth": _key_of_verl,
    "data_source": lambda case: case.columns.get("data_source", ""),
    "extra_info": lambda case: case.columns.get("extra_info") or {},
}
GROUP: dict[str, Value] = {
    "completions": attrgetter("completion"),
    "answers": attrgetter("answer"),
    "prompts": lambda case: case.columns.get("prompt", case.prompt),  # as in the data, where TRL takes it from
    "completion_ids": attrgetter("token_ids"),
    "completions_ids": attrgetter("token_ids"),  # so it is in TRL's documentation
    **{name: attrgetter(name) for name in ("columns", *EXTRAS[1:])},
}


class Form(NamedTuple):
    values: dict[str, Value]  # of all parameters that a function of this form may have
    takes_group: bool = False
    is_verl: bool = False  # some of verl's functions return a tuple that begins with the score


FORMS: dict[str, Form] = {  # by the parameter that tells the form
    "completion": Form(OURS),
    **dict.fromkeys(("completions", "completion_ids", "completions_ids"), Form(GROUP, takes_group=True)),
    "solution_str": Form(VERL, is_verl=True),
    "solution_strs": Form({f"{name}s": value for name, value in VERL.items()}, takes_group=True, is_verl=True),
    "model_output": Form(VERL | {"model_output": VERL["solution_str"]}, is_verl=True),  # verl's own functions have
    "predict_str": Form(VERL | {"predict_str": VERL["solution_str"]}, is_verl=True),  # these, too
}
LOGS = ("log_extra", "log_metric")  # functions that TRL passes; what they are given becomes sub-scores
NO_COLUMNS = {*GROUP, *LOGS, "prompt", "completion"}  # not passed as columns by a function's **kwargs, as in TRL
OF_TRAINER = ("trainer_state", "environments")  # what TRL passes and a grading process does not have
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
GIVES = r"(?:@.*\n)*(?:async def |def |class )?(\w*)"  # the name that a statement of a file gives
STARTING = threading.Lock()  # of the event loop


class OwnReward:
    """A function of the user's and how it is called."""

    def __init__(self, reference: str) -> None:
        """Loads `file.py:function`. Raises ValueError if it cannot be called, and what the file raises."""
        path, _, self.name = reference.rpartition(":")
        # Its neighbours come after installed packages (a file may be called math_verify.py) and before our own modules
        # (it may have a neighbour called data.py). Not so in the trainer, which still imports our modules.
        last = dict.fromkeys((str(Path(path).absolute().parent), str(Path(__file__).parent.parent)))
        sys.path[:] = [*(each for each in sys.path if each not in last), *last]
        self.function = load_function(path, self.name)
        signature = self._signature()
        names = [name for name, each in signature.parameters.items() if each.kind in BY_NAME]
        form = next((form for key, form in FORMS.items() if key in names), None)
        if form is None:
            raise self._refused(f"it takes {signature}, but by name none of {', '.join(FORMS)}")
        self.form, is_of_trl = form, form.values is GROUP
        known = [*form.values, *(LOGS if is_of_trl else ())]
        others = [name for name in names if name not in known]
        self.required = [name for name in others if signature.parameters[name].default is Parameter.empty]
        if unknown := [name for name in self.required if not is_of_trl or name in OF_TRAINER]:
            raise self._refused(f"nothing is known of its parameter {unknown[0]!r}")
        code = _code_behind(path, self.name, _run_by(self.function))
        has_rest = any(each.kind is Parameter.VAR_KEYWORD for each in signature.parameters.values())
        names += [each for each in known if has_rest and (not each.endswith("_ids") or f"'{each}'" in code)]
        self.values = {name: value for name, value in form.values.items() if name in names}
        self.columns = others if is_of_trl else []  # parameters that are columns of the data
        self.takes_all_columns = is_of_trl and has_rest
        self.logs = [name for name in LOGS if name in known and name in names]
        annotation = str(getattr(signature.parameters.get("completions"), "annotation", "")).lower()
        told = re.search(r"\b(dict|str)\b", annotation) or re.search(r"'(content)'(?!:| in | not in )", code)
        self.takes_messages = is_of_trl and told is not None and told[1] != "str"
        self.takes_token_ids = any(name.endswith("_ids") for name in self.values)

    def _signature(self) -> Signature:
        """Raises ValueError if the function cannot be called by names, or nobody can read how."""
        if inspect.isclass(self.function):
            raise self._refused("it is a class; name an object of it")
        if hasattr(self.function, "registry") and hasattr(self.function, "dispatch"):
            raise self._refused("it is made by singledispatch, which takes nothing by name")
        if inspect.isgeneratorfunction(run_by := _run_by(self.function)) or inspect.isasyncgenfunction(run_by):
            raise self._refused("it is a generator; it must return what it yields")
        return inspect.signature(self.function)

    def _refused(self, what: str) -> ValueError:
        forms = "score(completion, answer, columns), or verl's or TRL's parameters, each by its name"
        return ValueError(f"{self.name} cannot be called: {what}. A reward is {forms}; see docs/rewards.md.")

    def key_problem(self, case: Case) -> str | None:
        """Why it cannot be called for this row, or None."""
        missing = [name for name in self.required if name not in case.columns]
        found = ", ".join(case.columns) or "none"
        return f"{self.name} takes {missing[0]!r}, but the row's columns are {found}" if missing else None

    def __call__(self, cases: list[Case]) -> list[tuple[float, dict[str, float]]]:
        """Reward and sub-scores of each completion. Raises what the function raises, ValueError for other results."""
        logged: list[dict[object, object]] = [{} for _ in cases]
        arguments = self._arguments(cases) | {name: functools.partial(_log, logged) for name in self.logs}
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        result = self.function(**{name: value for name, value in arguments.items() if name not in bound})
        if inspect.iscoroutine(result):
            with STARTING:
                loop = _event_loop()
            result = asyncio.run_coroutine_threadsafe(_outcome(result), loop).result()
        results = self._listed(result, len(cases)) if self.form.takes_group else [result]
        return [self._read(each, extra) for each, extra in zip(results, logged, strict=True)]

    def _arguments(self, cases: list[Case]) -> dict[str, object]:
        lists = {name: [value(case) for case in cases] for name, value in self.values.items()}
        for name, role in {"prompts": "user", "completions": "assistant"}.items() if self.takes_messages else ():
            if name in lists:  # prompts may be messages in the data
                lists[name] = [x if isinstance(x, list) else [{"role": role, "content": x}] for x in lists[name]]
        for name in cases[0].columns:
            if name in self.columns or (self.takes_all_columns and name not in NO_COLUMNS):
                lists[name] = [case.columns.get(name) for case in cases]
        return lists if self.form.takes_group else {name: values[0] for name, values in lists.items()}

    def _listed(self, result: object, count: int) -> list[object]:
        is_list = isinstance(result, Iterable) and not isinstance(result, (str, bytes, dict, set))
        results = list(result) if is_list else []
        if len(results) != count:
            rule = f"{count} completions; it must return a list with one for each, not {result!r:.200}"
            raise ValueError(f"{self.name} returned {len(results)} rewards for {rule}")
        return results

    def _read(self, result: object, logged: dict[object, object]) -> tuple[float, dict[str, float]]:
        """Of one completion. A sub-score that is no finite number, or whose name is no text, is left out."""
        parts = dict(logged)
        if isinstance(result, dict):
            key = next((key for key in ("reward", "score") if key in result), None)
            if key is None:
                raise ValueError(f"{self.name} returned {result!r:.200}: a dict needs the key 'reward'")
            parts |= {name: value for name, value in result.items() if name != key}
            result = result[key]
        if isinstance(result, tuple) and result and self.form.is_verl:
            result = result[0]
        if result is None and self.form.takes_group:
            result = 0.0  # TRL: it does not apply to this completion
        score = _number(result)
        if not math.isfinite(score):
            raise ValueError(f"{self.name} returned {result!r:.200}, not a finite number")
        names = {name: str.encode(name, errors="backslashreplace").decode() for name in parts if isinstance(name, str)}
        numbers = {plain: _number(parts[name]) for name, plain in names.items()}
        return score, {name: number for name, number in numbers.items() if math.isfinite(number)}


def _number(value: object) -> float:
    """The value if it is a real number, also a scalar of NumPy or torch; else nan."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value) if isinstance(value, (Real, Decimal)) else math.nan
    except (ValueError, OverflowError, RuntimeError):  # an array; too large; a tensor of several
        return math.nan


def _log(logged: list[dict[object, object]], name: str, values: object) -> None:
    """TRL's log_extra(name, one value for each completion) and log_metric(name, value)."""
    is_of_each = isinstance(values, (list, tuple)) and len(values) == len(logged)
    for i, parts in enumerate(logged):
        parts[name] = values[i] if is_of_each else values


async def _outcome(result: Coroutine) -> object:
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:  # would end the loop
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for the process, in a thread of its own: a semaphore or a session of the user's belongs to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _run_by(function: Callable) -> Callable:
    """The function or method behind a functools.partial, or behind an object that can be called."""
    function = function.func if isinstance(function, functools.partial) else function
    return function if inspect.isroutine(function) else function.__call__


def _code_behind(path: str, name: str, run_by: Callable) -> str:
    """The code that gives the name in the file, or runs, and all that it names in its file.

    Of what it imports, functions that take completions count as well.
    """
    named = [run_by.__globals__.get(each) for each in run_by.__code__.co_names]
    runs = [run_by, *(x for x in named if inspect.isfunction(x) and "completions" in x.__code__.co_varnames)]
    code = ""
    for file, first in [(path, name), *((x.__code__.co_filename, x.__qualname__.partition(".")[0]) for x in runs)]:
        left, names = {ast.unparse(node) for node in ast.parse("".join(linecache.updatecache(file))).body}, {first}
        while found := {each for each in left if re.match(GIVES, each)[1] in names}:
            left -= found
            code += "\n".join(found) + "\n"
            names = set(re.findall(r"\w+", code))
    return code
