"""The command line: flags in, help and mistakes out."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

from algorithm import NAMES, choices_in_words
from flags import GROUPS, Flag, default_dtype, most_lag
from runtime.progress import OFF
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
    args = parser_of(GROUPS, DESCRIPTION, USAGE).parse_args(argv)
    is_planned = args.dry_run or args.plan_gpus  # for GPUs
    args.dtype = args.dtype or default_dtype(bool(is_planned) or args.param_dtype == "bfloat16")
    if args.prompts_per_update is None:
        args.prompts_per_update = args.prompts_per_step
    if args.learning_rate is None:
        args.learning_rate = 1e-5 if args.lora_rank else 1e-6  # "LoRA Without Regret"
    if args.gpu_memory_utilization is None:
        args.gpu_memory_utilization = 0.9 if args.engine == "server" else 0.6
    if args.rollout_correction is None:
        default = "token_truncate" if most_lag(args) else "none"
        if args.replay:  # as in the run that has sampled
            from runtime.history import read_config

            default = read_config(Path(args.replay)).get("rollout_correction", "none")
        args.rollout_correction = default if args.old_logprobs == "trainer" else "none"
    if args.quiet:
        os.environ[OFF] = "1"
    if args.replay:  # the run's own command, with one flag more
        args.eval_every, args.eval_before_training, args.keep_best = 0, False, None
    args.eval_max_completion_tokens = args.eval_max_completion_tokens or [args.max_completion_tokens]
    return args


def parser_of(groups: dict[str, list[Flag]], description: str, usage: str | None = None) -> argparse.ArgumentParser:
    """The parser of a program with these flags. It ends the process with a sentence if they cannot be read."""
    print_any_text()
    parser = Parser(usage=usage, description=description, formatter_class=HelpFormatter, allow_abbrev=False)
    parser._negative_number_matcher = re.compile(r"-[\d.]+(e[-+]?\d+)?$|-inf$|-nan$", re.IGNORECASE)  # also -1e-5
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.type is bool:
                group.add_argument(flag.name, action="store_true", help=flag.help)
                continue
            nargs = None
            if flag.is_list:
                nargs = "*" if flag.default == [] else "+"
            group.add_argument(
                flag.name, type=flag.type, default=flag.default, choices=flag.choices, nargs=nargs,
                required=flag.is_required, help=flag.help,
            )  # fmt: skip
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
            page = Path(__file__).parent / "docs" / "from_other_libraries.md"
            rows = page.read_text("utf-8") if page.exists() else ""
            row = re.search(rf"(?m)^\|.*?`(--\w+).*[`.]{re.escape(name)}`", rows)
            near = difflib.get_close_matches(f"--{name}", self._option_string_actions, n=1)
            if row:
                message += f"; another library's name for {row[1]}: docs/from_other_libraries.md"
            elif near:
                message += f"; did you mean {near[0]}?"
        if not note_reason(message, "mistake") and os.environ.get("RANK", "0") == "0":
            print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


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
