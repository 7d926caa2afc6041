"""Tools (--tools): functions of the user's that the model calls, as an environment. docs/turns.md

The episode is over at the first turn without a call. A call that cannot be read, or whose function
raises, is answered with the error, as text: the model may try again. One that hangs, or ends its
process, ends the episode.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import partial

from grading.own import awaited
from grading.user_code import load_own

MAX_CALLS = 16  # calls of a turn that are run


class Toolbox:
    """The tools of one episode."""

    def __init__(self, functions: dict[str, Callable], read: Callable[[str], list], row: dict[str, object]) -> None:
        """`read`: the text of a turn -> its calls, [{"name": ..., "arguments": {...}}]."""
        self.functions, self.read = functions, read
        self.failures: list[str] = []  # of the functions, not of calls, in the last reply

    @staticmethod
    def load(tools: str) -> Callable[[dict[str, object]], Toolbox]:
        """`tools`: file.py:function,file.py:other. A function `read_calls` in the first file reads another format."""
        functions = {name: function for function, name in map(load_own, tools.split(","))}
        first = next(iter(functions.values()))
        return partial(Toolbox, functions, first.__globals__.get("read_calls", read_calls))

    def reply(self, completion: str) -> list[dict[str, str]] | None:
        """A message of the role `tool` for each call; None if there is none."""
        self.failures = []
        try:
            calls = self.read(completion)
        except Exception as error:  # noqa: BLE001  a model wrote the text
            return [{"role": "tool", "content": f"error: the call cannot be read: {error}"}]
        results = [self.result(call).encode(errors="replace").decode() for call in calls[:MAX_CALLS]]
        return [{"role": "tool", "content": result} for result in results] or None  # without half a surrogate

    def result(self, call: object) -> str:
        """The function's result, as text or JSON; or what is wrong with the call."""
        is_right = False  # the call: what fails then is the function
        try:
            name, arguments = call["name"], call.get("arguments", {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if name not in self.functions:
                return f"error: there is no tool {name!r}; there are {', '.join(self.functions)}"
            inspect.signature(self.functions[name]).bind(**arguments)
            is_right = True
            result = awaited(self.functions[name](**arguments))
            # Numbers and arrays of NumPy and torch are as their list; of what else JSON does not know, the text.
            default = lambda value: getattr(value, "tolist", value.__str__)()  # noqa: E731
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=default)
        except Exception as error:  # noqa: BLE001  the call's, or the user's function's
            said = f"{type(error).__name__}: {error}"
            if is_right:
                self.failures.append(f"{name} raised {said}")
            return f"error: {said}"


def read_calls(completion: str) -> list[dict[str, object]]:
    """The calls after the last thought, in the format of Hermes and Qwen. Raises ValueError for one that is no JSON.

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "3 * 4"}}
    </tool_call>
    """
    _, _, text = completion.rpartition("</think>")
    calls = re.findall(r"<tool_call>(.*?)(</tool_call>|$)", text, re.DOTALL)
    if any(not end for _, end in calls):
        raise ValueError("<tool_call> is not closed")
    return [json.loads(call) for call, _ in calls]
