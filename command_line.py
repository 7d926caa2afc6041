"""The command line: flags in, help and mistakes out."""

import argparse
import ast
import difflib
import json
import os
import re
import sys
import time
from itertools import chain
from typing import NoReturn

from algorithm import NAMES, OWN, ROOT, places_of
from flags import GROUPS, Flag, add_flags, with_defaults
from runtime.start import leave_the_others, note_reason, print_any_text

if sys.flags.optimize > 1:
    sys.exit("error: python -OO takes away the docstrings that transformers reads; leave -OO and PYTHONOPTIMIZE out.")

USAGE = "python scripts/launch.py --ranks RANKS train_grpo.py --model MODEL --train_data FILE --out_dir FOLDER [flags]"
DESCRIPTION = """Trains a language model with GRPO on verifiable rewards. One rank per GPU; on CPU, as many as you like.
One step = one rollout of P prompts x G completions; one update = one optimizer step. Starting the same command again
continues from the last checkpoint."""
FREE_TEXTS = ("system_prompt", "prompt_suffix", "stop_tokens")


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of training. Defaults that depend on other flags are filled in."""
    return with_defaults(parser_of(GROUPS, DESCRIPTION, USAGE).parse_args(argv))


def parser_of(groups: dict[str, list[Flag]], description: str, usage: str | None = None) -> argparse.ArgumentParser:
    """The parser of a program with these flags. It ends the process with a sentence if they cannot be read."""
    print_any_text()
    parser = Parser(usage=usage, description=description, formatter_class=HelpFormatter, allow_abbrev=False)
    add_flags(parser, groups)
    return parser


class Parser(argparse.ArgumentParser):
    def parse_args(self, *given: list[str] | None) -> argparse.Namespace:
        """The flags. A text that is empty, or with a ~ that the shell has left, ends the process."""
        args = super().parse_args(*given)
        for name, value in vars(args).items():
            for text in value if isinstance(value, list) else [value]:
                if name in FREE_TEXTS or not re.search(r"^\s*$|^~$|(^|,)~([a-z_][\w.-]*)?/", str(text)):
                    continue
                if "~" in text:
                    advice = "the shell leaves a ~ after = and in quotes as it is; write $HOME."
                else:
                    advice = "give a value; is a variable not set?"
                self.error(f"--{name} {text!r}: {advice}")
        return args

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit status 2 and one sentence, which names the flag that was perhaps meant."""
        unknown = re.match(r"unrecognized arguments: -*(?:[^\s=]*\.)?([^\s=]+)", message)
        if unknown:
            name = unknown[1].replace("-", "_")
            known = [option.removeprefix("--") for option in self._option_string_actions]
            near = difflib.get_close_matches(name, known, n=1)
            if ours := our_flag(name):
                message += f"; another library's name for {ours}: docs/from_other_libraries.md"
            elif near:
                message += f"; did you mean --{near[0]}?"
        if not note_reason(message, "mistake") and os.environ.get("RANK", "0") == "0":
            print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def our_flag(name: str) -> str | None:
    """The flag that another library calls so."""
    file = ROOT / "docs" / "from_other_libraries.json"  # the tables of the page; the first cell of a row is ours
    tables = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for ours, *theirs in chain.from_iterable(tables.values()):
        flag = re.search(r"--\w+", ours)
        if flag and re.search(rf"[`.]{re.escape(name)}`", " ".join(theirs)):
            return flag[0]
    return None


class HelpFormatter(argparse.HelpFormatter):
    """Wide lines, the type in the place of the value, the algorithm's choices from `grpo.py`, and the defaults."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.type.__name__ if action.type else "text"

    def _get_help_string(self, action: argparse.Action) -> str:
        text, name = action.help, action.option_strings[0]
        if name in NAMES:
            text = f"{text} {'; '.join(choices_in_words(name))}".replace("%", "%%")
        if action.default in (None, [], "") or action.nargs == 0:  # nothing to say, or a switch
            return text
        return f"{text} (default: %(default)s)"


def choices_in_words(flag: str) -> list[str]:
    """The names that the flag can have, in words: "reinforce = -A x logprob, without a ratio"."""
    words = []
    for name, place in places_of(flag).items():
        module, _, function = place.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
        (found,) = (node for node in tree.body if getattr(node, "name", "") == function)
        words.append(f"{name} = {first_sentence(ast.get_docstring(found))}")
    return words + ["or FILE.py:FUNCTION"] * (flag in OWN)


def first_sentence(docstring: str | None) -> str:
    return " ".join((docstring or "your own").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def exit_with_error(error: Exception) -> NoReturn:
    """Ends the process with the error's sentence, without a traceback: for mistakes of the user.

    All ranks find the same one, and scripts/launch.py says it. With torchrun the first rank does; another one that is
    still there after some seconds has an error of its own (a file that is missing on its node only).
    """
    if not note_reason(str(error), "mistake"):
        if os.environ.get("RANK", "0") != "0":
            time.sleep(10)
        print(f"error: {error}", file=sys.stderr)
    leave_the_others()
    sys.exit(1)
