"""From flags to the `Algorithm`: which functions (of `grpo.py`, `extras/` or the user), with which parameters.

The parameters of a function after `*` are the flags that have an effect. What is no flag has a default, which the name
may change: `--policy_loss kl_cov:share=2e-4`. No torch before a function is asked for: `--help` reads the sources.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from flags import FLAGS, most_lag
from runtime.parts import check_part

if TYPE_CHECKING:
    from grpo import Algorithm

ROOT = Path(__file__).parent
NAMES: dict[str, dict[str, str]] = {  # flag -> name -> module:function
    "--advantage": {
        "grpo": "grpo:grpo",
        "grpo_batch_std": "grpo:grpo_batch_std",
        "dr_grpo": "grpo:dr_grpo",
        "rloo": "grpo:rloo",
        "none": "grpo:reward_itself",
        "zero": "grpo:zero",
    },
    "--policy_loss": {
        "clip": "grpo:clip",
        "reinforce": "grpo:reinforce",
    },
    "--loss_aggregation": {
        "token_mean": "grpo:token_mean",
        "seq_mean_token_mean": "grpo:seq_mean_token_mean",
        "seq_mean_token_sum_norm": "grpo:seq_mean_token_sum_norm",
        "prompt_mean": "grpo:prompt_mean",
    },
    "--kl_estimator": {
        "k1": "grpo:k1",
        "k2": "grpo:k2",
        "k3": "grpo:k3",
        "none": "grpo:no_kl",
    },
    "--kl_direction": {},
    "--rollout_correction": {"none": "grpo:no_correction"},
}
EXTRAS = {  # flag -> the room with more `NAMES` of this form
    "--advantage": "extras.losses",
    "--policy_loss": "extras.losses",
    "--kl_estimator": "extras.losses",
    "--kl_direction": "extras.teacher",
    "--rollout_correction": "extras.losses",
}
OWN = ("--advantage", "--policy_loss", "--kl_estimator")  # may also name a function of the user's, FILE.py:FUNCTION


def algorithm_of(args: argparse.Namespace) -> Algorithm:
    """Raises ValueError for a name that nobody knows, or a function that cannot be loaded."""
    from grpo import Algorithm

    bound, kl_clamp = functions_of(args), 0.0
    if args.kl_over == "sampled":
        kl_clamp = bound["--kl_estimator"].keywords.get("kl_clamp", 0.0)
    return Algorithm(
        **{name.removeprefix("--"): function for name, function in bound.items()},
        old_logprobs=args.old_logprobs,
        is_corrected=args.rollout_correction != "none",
        kl_coef=args.kl_coef,
        kl_in=args.kl_in,
        kl_over=args.kl_over,
        has_teacher=bool(args.reference or args.hint_column or args.kl_over == "vocabulary"),
        kl_clamp=kl_clamp,
        entropy_coef=args.entropy_coef,
        group_size=args.group_size,
        temperature=args.temperature,
        num_iterations=args.num_iterations,
        most_lag=most_lag(args),
    )


def functions_of(args: argparse.Namespace) -> dict[str, partial]:
    """Flag -> the function that it names, with its parameters."""
    return {name: bind(name, args) for name in NAMES if name != "--kl_direction" or args.kl_over == "vocabulary"}


@cache
def places_of(flag: str) -> dict[str, str]:
    """Name -> module:function, of all that this flag can mean without a file of the user's."""
    with suppress(KeyError, ModuleNotFoundError):  # extras/ may be deleted
        return NAMES[flag] | import_module(EXTRAS[flag]).NAMES[flag]
    return NAMES[flag]


def choose(flag: str, name: str) -> Callable:
    """The function of this name, or the user's own, FILE.py:FUNCTION. Raises ValueError if there is none."""
    places = places_of(flag)
    if name not in places and flag in EXTRAS and ".py:" not in name:
        check_part(f"{EXTRAS[flag]}.__init__", f"{flag} {name}")
    if name not in places and flag in OWN:
        return own_function(flag, name, places)
    if name not in places:
        raise ValueError(f"{flag} {name}: use {', '.join(places)}.")
    module, _, function = places[name].partition(":")
    return getattr(import_module(module), function)


def own_function(flag: str, reference: str, names: Iterable[str] = ()) -> Callable:
    """The user's function, FILE.py:FUNCTION. Raises ValueError if it cannot be loaded. `names`: what else is known."""
    if not reference.rpartition(":")[0].endswith(".py"):
        raise ValueError(f"{flag} {reference}: use {', '.join([*names, 'FILE.py:FUNCTION'])}.")
    from grading.user_code import load_reference

    try:
        return load_reference(reference)
    except ValueError as error:
        raise ValueError(f"{flag} {reference} cannot be loaded: {error}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
        raise ValueError(f"{flag} {reference} cannot be loaded: {type(error).__name__}: {error}") from None


def parameters_of(function: Callable) -> dict[str, object]:
    """The parameters after `*`, and their defaults: the flags that have an effect."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}


def bind(name: str, args: argparse.Namespace) -> partial:
    """The function that the flag names, with its parameters: those that are flags, and those that the name sets."""
    choice, given = split(FLAGS[name].of(args))
    function = choose(name, choice)
    known, values = parameters_of(function), {}
    for key, default in known.items():
        if f"--{key}" in FLAGS:
            values[key] = getattr(args, key)
        elif default is inspect.Parameter.empty and key not in given:
            raise ValueError(f"{name} {choice}: its parameter {key} is no flag; give it a default.")
    for key in given:
        if key in values or key not in known:
            free = ", ".join(key for key in known if key not in values) or "none"
            raise ValueError(f"{name} {choice}:{key}=...: what can be set here is {free}; flags are set as flags.")
    return partial(function, **values | given)


def split(written: str) -> tuple[str, dict[str, object]]:
    """The name and the parameters of `kl_cov:share=2e-4,penalty=1`. Raises ValueError for a value that is no number."""
    name, parameters = re.fullmatch(r"(.*?)((?::\w+=[^:]*)?)", written).groups()
    given = {}
    for each in filter(None, parameters.removeprefix(":").split(",")):
        key, _, value = each.partition("=")
        try:
            given[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(f"{written}: {value!r} is no number; needed is NAME:PARAMETER=NUMBER,...") from None
    return name, given
