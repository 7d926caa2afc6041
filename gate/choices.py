"""Refuses flags that the chosen functions of the algorithm do not read, and functions of the user that do not load."""

import argparse
from collections import defaultdict

from algorithm import NAMES, bind, choose, own_function, parameters_of, places_of
from flags import FLAGS


def check_choices(args: argparse.Namespace) -> None:
    """Raises ValueError for a flag that was changed, but that none of the chosen functions has as a parameter; and for
    a function of the user's that cannot be loaded or called.
    """
    used = {"group_size", "max_completion_tokens"}  # which have an effect whether or not a function asks for them
    flags = [name for name in NAMES if places_of(name)]
    for name in flags:
        used |= parameters_of(bind(name, args)).keys()
    for name in flags:
        users = defaultdict(list)  # parameter -> the choices that have it
        for choice in places_of(name):
            for key in parameters_of(choose(name, choice)):
                users[key].append(choice)
        for key, choices in users.items():
            flag = FLAGS.get(f"--{key}")  # None: a parameter with a default of its own
            if flag and key not in used and flag.is_changed(args):
                raise ValueError(
                    f"{flag.written(args)} has no effect with {FLAGS[name].written(args)}, "
                    f"only with {name} {', '.join(choices)}: leave it out."
                )
    if args.advantage.startswith("pass_at_k"):
        k = parameters_of(bind("--advantage", args))["k"]
        if args.group_size <= k:  # there is one subset at most
            raise ValueError(
                f"--group_size {args.group_size} has nothing to compare with for --advantage {args.advantage}; "
                f"use {k + 1} or more."
            )
    if args.optimizer != "adamw":
        own_function("--optimizer", args.optimizer, ["adamw"])
    if args.after_step:
        own_function("--after_step", args.after_step)
