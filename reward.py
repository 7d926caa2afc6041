"""Text + answer -> number. A reward is a function `score(completion, answer, columns) -> float`; this file holds the built-in ones.

    completion  the sampled text, without special tokens
    answer      the data row's answer column
    columns     the whole data row, for rewards that need more

`--reward exact` compares final answers. `--reward my_reward.py:score` takes the function of that name from your own file:

    def score(completion: str, answer: str, columns: dict) -> float:
        return float(answer in completion)

No torch here.
"""

from __future__ import annotations

import importlib.util
import math
import numbers
import re
from collections.abc import Callable
from pathlib import Path

RewardFunction = Callable[[str, str, dict[str, object]], float]


def read_final_answer(completion: str) -> str | None:
    """The final answer of a completion, None if there is none: what stands after the last `</think>`, if the completion has one;
    of that, the inside of the last `<answer>...</answer>`, else of the last `\\boxed{...}`, else all of it. Unclosed: no answer.
    """
    if "<think>" in completion and completion.rfind("</think>") < completion.rfind("<think>"):
        return None  # still thinking when it ended
    text = completion.rpartition("</think>")[2]
    if "<answer>" in text:
        inside = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
        return inside[-1].strip() if inside else None
    if "\\boxed{" in text:
        return _inside_braces(text[text.rindex("\\boxed{") + len("\\boxed{") :])
    return text.strip() or None


def _inside_braces(text: str) -> str | None:
    """The text up to the brace that closes an already opened one; None if it is never closed."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position].strip()
    return None


def exact(completion: str, answer: str, columns: dict[str, object]) -> float:
    """1.0 if the final answer equals the row's answer, character by character but for surrounding white space; else 0.0."""
    return float(read_final_answer(completion) == answer.strip())


BUILT_IN: dict[str, RewardFunction] = {"exact": exact}


def load_reward(spec: str) -> RewardFunction:
    """The reward that `--reward` names: a built-in one, or `file.py:function`. Raises ValueError or FileNotFoundError saying why not."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"--reward {spec!r} is neither built in ({', '.join(BUILT_IN)}) nor of the form my_reward.py:function.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"--reward {spec!r}: the file {path!r} does not exist.")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert module_spec is not None and module_spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"--reward {spec!r}: {path} has no function {name!r}; it has {', '.join(functions) or 'none'}.")
    return function


def grade(score: RewardFunction, completion: str, answer: str, columns: dict[str, object]) -> float:
    """The score as a finite float. Raises ValueError naming the row if the reward returned anything else."""
    value = score(completion, answer, columns)
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"the reward returned {value!r}, not a finite number, for completion {completion[:200]!r} of row {columns!r}.")
    return float(value)
