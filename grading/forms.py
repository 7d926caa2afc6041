"""A reward function in a file of the user's: the names of its parameters say what it takes and how it is called.

    score(completion, answer, columns)                                   one completion
    score(completions, answers, columns)                                 all completions of a prompt: each a list
    reward(completions, <columns of the data>, **kwargs)                 the same, as TRL calls it
    compute_score(data_source, solution_str, ground_truth, extra_info)   one completion, as verl calls it
    compute_score(data_sources, solution_strs, ground_truths, extra_infos)   a group, as verl's batch manager does

All arguments are passed by name; those that a function does not ask for are left out. `async def` is awaited.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType

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
    "extra_info": lambda case: dict(case.columns.get("extra_info") or {}),
}
GROUP: dict[str, Value] = {
    "completions": attrgetter("completion"),
    "answers": attrgetter("answer"),
    "prompts": lambda case: case.columns.get("prompt", case.prompt),  # as in the data, where TRL takes it from
    "completion_ids": attrgetter("token_ids"),
    "completions_ids": attrgetter("token_ids"),  # so it is in TRL's documentation
    **{name: attrgetter(name) for name in ("columns", *EXTRAS[1:])},
}
# The parameter that tells the form, the values of all its parameters, and whether it takes a group.
FORMS: dict[str, tuple[dict[str, Value], bool]] = {
    "completion": (OURS, False),
    "completions": (GROUP, True),
    "completion_ids": (GROUP, True),
    "completions_ids": (GROUP, True),
    "solution_str": (VERL, False),
    "solution_strs": ({f"{name}s": value for name, value in VERL.items()}, True),
    "model_output": (VERL | {"model_output": VERL["solution_str"]}, False),  # verl's own functions have these, too
    "predict_str": (VERL | {"predict_str": VERL["solution_str"]}, False),
}
LOGS = ("log_extra", "log_metric")  # functions that TRL passes; what they are given becomes sub-scores
OF_TRAINER = ("trainer_state", "environments")  # what TRL passes and a grading process does not have


@dataclass(frozen=True)
class OwnReward:
    """A function of the user's and how it is called."""

    name: str
    function: Callable
    values: dict[str, Value]  # of the parameters that it takes
    columns: tuple[str, ...]  # parameters that are columns of the data
    takes_group: bool
    takes_all_columns: bool
    takes_messages: bool  # TRL's conversations: a completion is [{"role": "assistant", "content": text}]
    takes_logs: tuple[str, ...]

    @property
    def takes_token_ids(self) -> bool:
        return any(name.endswith("_ids") for name in self.values)

    def key_problem(self, case: Case) -> str | None:
        """Why it cannot be called for this row, or None."""
        missing = [name for name in self.columns if name not in case.columns]
        if not missing:
            return None
        return f"{self.name} takes {missing[0]!r}, but the row's columns are {', '.join(case.columns) or 'none'}"

    def __call__(self, cases: list[Case]) -> list[tuple[float, dict[str, float]]]:
        """Reward and sub-scores of each completion. Raises what the function raises, ValueError for other results."""
        logged: list[dict[str, object]] = [{} for _ in cases]
        arguments = {name: [value(case) for case in cases] for name, value in self.values.items()}
        if self.takes_messages:
            texts = arguments["completions"]
            arguments["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
        columns = [name for name in cases[0].columns if name not in GROUP and name != "prompt"]
        for name in columns if self.takes_all_columns else self.columns:
            arguments[name] = [case.columns.get(name) for case in cases]
        if not self.takes_group:
            arguments = {name: values[0] for name, values in arguments.items()}
        result = self.function(**arguments, **{name: _log_into(logged) for name in self.takes_logs})
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
        results = list(result) if self.takes_group else [result]
        if len(results) != len(cases):
            raise ValueError(f"{self.name} returned {len(results)} rewards for {len(cases)} completions")
        return [self._read(each, extra) for each, extra in zip(results, logged, strict=True)]

    def _read(self, result: object, logged: dict[str, object]) -> tuple[float, dict[str, float]]:
        parts = dict(logged)
        if isinstance(result, dict):
            key = next((key for key in ("reward", "score") if key in result), None)
            if key is None:
                raise ValueError(f"{self.name} returned {result!r:.200}: a dict needs the key 'reward'")
            parts |= {str(name): value for name, value in result.items() if name != key}
            result = result[key]
        if isinstance(result, tuple) and result and self.values.keys() & VERL.keys():
            result = result[0]  # some of verl's return more than the score
        if result is None and self.takes_group:
            result = 0.0  # TRL: it does not apply to this completion
        score = _number(result)
        numbers = {name: _number(value) for name, value in parts.items() if not isinstance(value, (str, type(None)))}
        wrong = {name: parts[name] for name, value in numbers.items() if not math.isfinite(value)}
        if not math.isfinite(score) or wrong:
            wrong = ", ".join(f"{value!r:.200} as {name!r}" for name, value in wrong.items()) or f"{result!r:.200}"
            raise ValueError(f"{self.name} returned {wrong}, not a finite number")
        return score, numbers


def _number(value: object) -> float:
    try:
        return float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        return math.nan


def _log_into(logged: list[dict[str, object]]) -> Callable[[str, object], None]:
    """TRL's log_extra(name, one value for each completion) and log_metric(name, value)."""

    def log(name: str, values: object) -> None:
        of_each = values if isinstance(values, list) else [values] * len(logged)
        for parts, value in zip(logged, of_each, strict=True):
            parts[name] = value

    return log


def own_reward(reference: str) -> OwnReward:
    """The function `file.py:function`. Raises ValueError if it cannot be called, and what the file raises."""
    path, _, name = reference.rpartition(":")
    function = load_function(path, name)
    kinds = inspect.Parameter
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    required = [each.name for each in parameters if each.default is kinds.empty]
    has_rest = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
    tells = next((each for each in FORMS if each in names), None)
    if inspect.isclass(function):
        raise _wrong_form(name, "it is a class; name an object of it")
    if tells is None or any(each.kind is kinds.POSITIONAL_ONLY for each in parameters):
        raise _wrong_form(name, f"it takes ({', '.join(map(str, parameters))})")
    values, takes_group = FORMS[tells]
    logs = tuple(each for each in LOGS if values is GROUP and (each in names or has_rest))
    others = [each for each in names if each not in values and each not in logs and each in required]
    for each in others:
        if values is not GROUP or each in OF_TRAINER:
            raise _wrong_form(name, f"nothing is known of its parameter {each!r}")
    strings = _strings(function, set())
    taken = {each for each in values if each in names or (has_rest and (not each.endswith("_ids") or each in strings))}
    return OwnReward(
        name=name,
        function=function,
        values={each: value for each, value in values.items() if each in taken},
        columns=tuple(others),
        takes_group=takes_group,
        takes_all_columns=values is GROUP and has_rest,
        takes_messages="completions" in taken and values is GROUP and "content" in strings,
        takes_logs=logs,
    )


def _wrong_form(name: str, what: str) -> ValueError:
    forms = "score(completion, answer, columns), or verl's or TRL's parameters"
    return ValueError(f"{name} cannot be called: {what}. A reward is {forms}, each by its name; see docs/rewards.md.")


def _strings(function: object, seen: set[CodeType]) -> set[str]:
    """The texts in a function's code, in that of functions inside it, and of those of its module that it names."""
    function = inspect.unwrap(getattr(function, "func", function))  # of functools.partial
    function = function if inspect.isfunction(function) else type(function).__call__
    codes, texts = [getattr(function, "__code__", None)], set()
    while codes:
        code = codes.pop()
        if not isinstance(code, CodeType) or code in seen:
            continue
        seen.add(code)
        codes.extend(code.co_consts)
        texts |= {each for each in code.co_consts if isinstance(each, str)}
        named = (function.__globals__.get(name) for name in code.co_names)
        texts = texts.union(*(_strings(each, seen) for each in named if inspect.isfunction(each)))
    return texts
