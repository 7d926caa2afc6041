"""The start of a training run: it reads and checks the command line, or answers --dry_run.

Nothing heavy is imported here: a mistake is reported within a second, not after the imports of torch and vLLM.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from command_line import exit_with_error, parse_flags
from gate.checks import check_flags
from runtime.parts import part
from runtime.signals import listen
from runtime.start import join_launcher


def start() -> Namespace:
    """The flags of this rank. A mistake ends the process with one sentence."""
    join_launcher()  # a rank must not outlive it
    listen()  # from here on a signal is no crash
    try:
        args = parse_flags()
        if args.dry_run:
            sys.exit(part("plan.dry_run", "--dry_run").dry_run(args))
        check_flags(args)
        from gate.choices import check_choices

        check_choices(args)
    except (ValueError, OSError) as error:
        exit_with_error(error)
    return args
