"""The rewards of lasgroup/SDPO without rich feedback: --reward docs/rewards/sciknoweval.py:letter, or :tool_calls

`letter`: what follows the last <answer>, up to its end if it has one, is the key's letter. `tool_calls`: the names
after "Action:" are the key's, in any order, and the arguments after "Action Input:", taken together, are the key's.
Arguments are read up to the first closing brace, as in the source, so nested ones are never equal.
"""

import json
import re
from contextlib import suppress


def letter(completion, answer):
    said = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return float(said == answer)


def arguments(texts):
    together = {}
    for text in texts:
        with suppress(ValueError):
            together |= json.loads(text)
    return together


def tool_calls(completion, answer):
    key = json.loads(answer)
    names = re.findall(r"Action:\s*(\w+)", completion)
    given = re.findall(r"Action Input:\s*({.*?})", completion, re.DOTALL)
    has_names = sorted(names) == sorted(call["Action"] for call in key)
    return float(has_names and arguments(given) == arguments(call["Action_Input"] for call in key))
