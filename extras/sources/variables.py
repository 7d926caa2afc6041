"""--template_args NAME=VALUE: variables of the chat template. `data.template_variables` asks for it."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false", "none": "null"}  # YAML's and Python's -> JSON's
SET_HERE = ("messages", "tools", "add_generation_prompt", "tokenize", "strftime_now")


def template_value(text: str) -> object:
    """The boolean, null or number that the text spells in Python, JSON or YAML; else the text."""
    with suppress(ValueError):
        value = json.loads(WORDS.get(text.lower(), text.lower()))
        if isinstance(value, int | float | None):
            return value
    return text


def read(template_args: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Name -> value, of NAME=VALUE each. Raises ValueError for what the template ignores."""
    template, variables = str(tokenizer.chat_template), {}
    for given in template_args:
        name, equals, text = given.partition("=")
        if not equals or name in SET_HERE or not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(
                f"--template_args {given}: give NAME=VALUE, "
                "with a variable that the chat template of --model has and that is not set here."
            )
        variables[name] = template_value(text)
        if text in ("0", "1") and re.search(rf"\b{name} is (not )?(false|true)", template):
            raise ValueError(f"--template_args {given}: the template asks for true or false, which no number is.")
    return variables
