"""Functions and classes in a file of the user's, and how a reward among them is called: by its parameters' names.

    score(completion, answer, columns, ...)                              one completion: ours
    f(completions, **columns)                                            all completions of a prompt: TRL's
    compute_score(data_source, solution_str, ground_truth, extra_info)   one completion: verl's
    compute_score(data_sources, solution_strs, ...)                      a group: verl's batch manager

All arguments are passed by name; those that a function does not name are left out. Completions and
prompts are texts.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import functools
import importlib.util
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from inspect import Parameter
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from grading import Case


@functools.cache
def load_module(file: Path) -> ModuleType:
    """The file as a module, one for all flags and files that name or import it. Raises what the file raises."""
    spec = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    if spec and spec.origin and Path(spec.origin).resolve() == file:
        return importlib.import_module(file.stem)
    spec = importlib.util.spec_from_file_location(f"own_{file.stem}", file)  # it may be called math.py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import would: dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def load_reference(reference: str) -> Callable:
    """The function or class of FILE.py:NAME. Raises ValueError if there is none, and what the file itself raises."""
    path, _, name = reference.rpartition(":")
    folder = str(Path(path).absolute().parent)
    FOLDERS.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)  # it can import its neighbours; at the end, because ours keep their names
    module = load_module(Path(path).resolve())
    check_neighbours(Path(path).absolute())
    function = getattr(module, name, None)
    if not callable(function):
        own = [value for value in vars(module).values() if inspect.isfunction(value) or inspect.isclass(value)]
        names = [value.__name__ for value in own if value.__module__ == module.__name__]
        public = ", ".join(name for name in names if not name.startswith("_"))
        raise ValueError(f"{path} has no function or class {name!r}; it has {public or 'none'}.")
    return function


FOLDERS = {str(Path(__file__).parent.parent)}  # where own files have been loaded from; and ours


def check_neighbours(path: Path) -> None:
    """Raises ValueError if what the file imports is not its neighbour, but a file of that name in another folder."""
    for neighbour in files_of(path)[1:]:
        name = neighbour.relative_to(path.parent).parts[0].removesuffix(".py")
        origin = Path(getattr(importlib.util.find_spec(name), "origin", None) or neighbour)
        if str(origin.parents[origin.name == "__init__.py"]) in FOLDERS - {str(path.parent)}:
            raise ValueError(f"{path} imports its neighbour {name}, but gets {origin}; give one of them another name")


def files_of(path: Path) -> list[Path]:
    """The file, and those in its folder that it imports, directly or not."""
    files = [path]
    for file in files:  # it grows
        nodes: list[ast.AST] = []
        with suppress(SyntaxError, ValueError):  # whoever imports it may do without it
            nodes += ast.walk(ast.parse(file.read_bytes()))
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module:  # what is taken out of it may be a module, too
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            for name in names:
                place = path.parent / name.replace(".", "/")
                for imported in (place.with_suffix(".py"), place / "__init__.py"):
                    if imported.is_file() and imported not in files:
                        files.append(imported)
    return files


def load_own(reference: str) -> tuple[Callable, str]:
    """The function or class of `file.py:name`, and this name, in a worker. Raises as `load_reference`."""
    path, _, name = reference.rpartition(":")
    # Its neighbours come after installed packages and before our own modules (one may be called
    # data.py).
    last = [str(Path(path).absolute().parent), str(Path(__file__).parent.parent)]
    sys.path[:] = [folder for folder in sys.path if folder not in last] + last
    return load_reference(reference), name


def _verl_key(case: Case) -> object:
    """In verl's data the key is `reward_model.ground_truth`, of any type."""
    nested = case.columns.get("reward_model")
    return nested.get("ground_truth", case.answer) if isinstance(nested, dict) else case.answer


Values = dict[str, Callable[[Case], object]]
# What a case may know beside text, answer and columns
EXTRAS = {"prompt": str, "num_tokens": int, "max_tokens": int, "is_truncated": bool}
OURS: Values = {name: attrgetter(name) for name in ("completion", "answer", "columns", "token_ids", *EXTRAS)}
GROUP: Values = {name: OURS[name] for name in ("columns", *EXTRAS) if name != "prompt"}
GROUP |= {"completions": OURS["completion"], "answers": OURS["answer"], "prompts": OURS["prompt"]}
GROUP |= {"completion_ids": OURS["token_ids"]}
VERL: Values = {
    "solution_str": attrgetter("completion"),
    "ground_truth": _verl_key,
    "data_source": lambda case: case.columns.get("data_source", ""),
    "extra_info": lambda case: case.columns.get("extra_info") or {},
}
FORMS: dict[str, tuple[Values, bool]] = {  # by the parameter that tells the form: its parameters, whether for a group
    "completion": (OURS, False),
    "completions": (GROUP, True),
    "solution_str": (VERL, False),
    "solution_strs": ({f"{name}s": value for name, value in VERL.items()}, True),
}


class Score(NamedTuple):
    """What a function of one's own returned for a completion."""

    reward: float
    parts: dict[str, float]  # sub-scores
    feedback: str = ""  # in words, for --hint_column @feedback


class WrongReturn(ValueError):
    """The function returned what is no reward."""


class OwnReward:
    """A function of the user's and how it is called."""

    def __init__(self, reference: str) -> None:
        """Loads `file.py:function`. Raises ValueError if it cannot be called, and what the file raises."""
        self.function, self.name = load_own(reference)
        signature = inspect.signature(self.function)
        parameters = signature.parameters
        form = next((FORMS[name] for name in FORMS if name in parameters), None)
        if form is None:
            raise ValueError(
                f"{self.name} cannot be called: it takes {signature}, but none of {', '.join(FORMS)}. "
                "A reward is score(completion, answer, columns), or has the parameters of TRL or verl; "
                "see docs/rewards.md."
            )
        self.values, self.takes_group = form
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        self.takes_all_columns = self.values in (OURS, GROUP) and Parameter.VAR_KEYWORD in kinds.values()
        named = [name for name in kinds if kinds[name] not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)]
        rest = OURS.keys() - {"token_ids"} if self.takes_all_columns and not self.takes_group else ()
        self.named = [name for name in self.values if name in (*named, *rest)]
        self.columns = [name for name in named if name not in self.values]
        self.required = [name for name in self.columns if parameters[name].default is Parameter.empty]
        if self.required and self.values is not GROUP:
            raise ValueError(f"{self.name} cannot be called: nothing is known of its parameter {self.required[0]!r}.")
        self.takes_token_ids = bool({"token_ids", "completion_ids"} & {*self.named})

    def check_row(self, case: Case) -> None:
        """Raises ValueError if it cannot be called for this row."""
        for name in self.required:
            if name not in case.columns:
                columns = ", ".join(case.columns) or "none"
                raise ValueError(f"{self.name} takes {name!r}, but the row's columns are {columns}")

    def __call__(self, cases: list[Case]) -> list[Score]:
        """The score of each completion. Raises what the function raises, WrongReturn for no rewards."""
        # What it changes in a row is for nobody else: another function, another completion of the
        # prompt.
        cases = [replace(case, columns=copy.deepcopy(case.columns)) for case in cases]
        arguments = {name: [self.values[name](case) for case in cases] for name in self.named}
        for name in cases[0].columns:
            if name in self.columns or (self.takes_all_columns and name not in (*self.values, "prompt", "completion")):
                arguments[name] = [case.columns.get(name) for case in cases]
        if not self.takes_group:
            arguments = {name: values[0] for name, values in arguments.items()}
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


def read_reward(result: object, name: str) -> Score:
    """The score that the function of this name returned for one completion. Raises WrongReturn.

    A sub-score that is no finite number, or whose name is no text, is left out.
    """
    parts: dict[str, float] = {}
    feedback = ""
    if isinstance(result, dict):
        key = "reward" if "reward" in result else "score"
        if key not in result:
            raise WrongReturn(f"{name} returned {result!r:.200}: a dict needs the key 'reward' or 'score'")
        for part, value in result.items():
            if part != key and isinstance(part, str) and math.isfinite(number := _number(value)):
                parts[str.__str__(part)] = number  # the mere text: the trainer cannot load a class of the user's
        if isinstance(said := result.get("feedback"), str):
            feedback = str.__str__(said)
        result = result[key]
    score = _number(result)
    if not math.isfinite(score):
        raise WrongReturn(f"{name} returned {result!r:.200}, not a finite number")
    return Score(score, parts, feedback)


def _number(value: object) -> float:
    """The value if it is a number, also a scalar of NumPy or torch; else nan."""
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


LOCK = threading.Lock()  # several threads may be the first that need the event loop


def awaited(result: object) -> object:
    """What an async function returns; of another one, what it returned."""
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
