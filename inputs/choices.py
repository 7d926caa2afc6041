"""From flags to the `Algorithm`: which functions of `grpo.py`, or of a file of the user's, with which parameters.

The parameters of a function after `*` are the flags that have an effect; what is no flag has a default.
"""

from __future__ import annotations

import argparse
import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch

import grpo
from flags import FLAGS, most_lag
from grading.own import load_function
from grpo import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL, LOSSES, Algorithm, Graded, Loss, Tokens, check_returned
from inputs.checks import given, leave

CHOICES: dict[str, dict[str, Callable]] = {
    "--advantage": ADVANTAGES,
    "--policy_loss": LOSSES,
    "--loss_aggregation": AGGREGATIONS,
    "--kl_estimator": KL,
    "--kl_direction": grpo.DIVERGENCES,
    "--rollout_correction": CORRECTIONS,
}
OWN = ("--advantage", "--policy_loss", "--kl_estimator")  # may also name a function of the user's, FILE.py:FUNCTION


def summary(function: Callable) -> str:
    """The first sentence of the docstring."""
    return " ".join((function.__doc__ or "your own").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def parameters_of(function: Callable) -> dict[str, object]:
    """The parameters after `*`, and their defaults: the flags that have an effect."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind == each.KEYWORD_ONLY}


def algorithm_of(args: argparse.Namespace) -> Algorithm:
    """Raises ValueError for an unknown name, for a flag without effect, for a function that fails on a trial."""
    functions = {name: choose(name, FLAGS[name].of(args)) for name in CHOICES}
    check_effects(args, functions)
    bound = {name: bind(name, function, args) for name, function in functions.items()}
    metrics: tuple[str, ...] = ()
    for name in OWN:
        if functions[name] not in CHOICES[name].values():
            needs_gradient = name == "--policy_loss" or (name == "--kl_estimator" and args.kl_in == "loss")
            metrics += try_out(name, args, bound[name], needs_gradient)
    return Algorithm(
        **{name.removeprefix("--"): function for name, function in bound.items()},
        old_logprobs=args.old_logprobs,
        loss_metrics=metrics,
        is_corrected=args.rollout_correction != "none",
        kl_coef=args.kl_coef,
        kl_in=args.kl_in,
        kl_over=args.kl_over,
        has_teacher=bool(args.reference or args.hint_column or args.kl_over == "vocabulary"),
        kl_clamp=bound["--kl_estimator"].keywords.get("kl_clamp", 0.0) if args.kl_over == "sampled" else 0.0,
        entropy_coef=args.entropy_coef,
        group_size=args.group_size,
        temperature=args.temperature,
        num_iterations=args.num_iterations,
        most_lag=most_lag(args),
        description=describe(args, bound),
    )


def choose(name: str, choice: str) -> Callable:
    """The function of this name, or the user's own, FILE.py:FUNCTION. Raises ValueError if it cannot be loaded."""
    if choice in CHOICES[name]:
        return CHOICES[name][choice]
    path, _, function_name = choice.rpartition(":")
    if name in OWN and path.endswith(".py"):
        try:
            return load_function(path, function_name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{name} {choice} cannot be loaded: {reason}") from None
    raise ValueError(f"{name} {choice}: use {', '.join(CHOICES[name])}{' or FILE.py:FUNCTION' * (name in OWN)}.")


def check_effects(args: argparse.Namespace, functions: dict[str, Callable]) -> None:
    """Raises ValueError for a flag that was changed, but that none of the chosen functions has as a parameter."""
    used = {key for function in functions.values() for key in parameters_of(function)}
    for name in functions:
        others = {choice: parameters_of(function) for choice, function in CHOICES[name].items()}
        for key in {key: None for parameters in others.values() for key in parameters if key not in used}:
            each = FLAGS.get(f"--{key}")  # None: a parameter with a default of its own
            if each and each.of(args) != each.value:
                wrong = f"{given(each, args)} has no effect with {given(FLAGS[name], args)}"
                needed = ", ".join(choice for choice, parameters in others.items() if key in parameters)
                raise ValueError(f"{wrong}, only with {name} {needed}: {leave(each)}.")


def bind(name: str, function: Callable, args: argparse.Namespace) -> partial:
    """The function with those of its parameters after `*` that are flags. ValueError for others without a default."""
    values = {key: getattr(args, key) for key in parameters_of(function) if f"--{key}" in FLAGS}
    for key, default in parameters_of(function).items():
        if key not in values and default is inspect.Parameter.empty:
            raise ValueError(f"{given(FLAGS[name], args)}: its parameter {key} is no flag; give it a default.")
    if values.get("loss_constant_tokens", 0) is None:
        values["loss_constant_tokens"] = args.max_completion_tokens
    return partial(function, **values)


def describe(args: argparse.Namespace, bound: dict[str, partial]) -> str:
    """What the flags amount to, for the first lines of the log: the functions in words, the rest as it was written."""
    parts, is_sampled = [], args.kl_over == "sampled"
    unused = {"--kl_estimator": not args.kl_coef or not is_sampled, "--kl_direction": not args.kl_coef or is_sampled}
    unused["--rollout_correction"] = args.rollout_correction == "none"
    for name, function in bound.items():
        if not unused.get(name):
            values = [f"--{key} {value}" for key, value in function.keywords.items()]
            parts.append(f"{' '.join([given(FLAGS[name], args), *values])}: {summary(function.func)}")
    others = ["old_logprobs", "kl_coef", "kl_in", "entropy_coef", "dynamic_sampling", "truncated", "num_iterations"]
    written = " ".join(given(FLAGS[f"--{name}"], args) for name in [*others, "temperature"])
    return "algorithm: " + "; ".join([*parts, written])


def try_out(flag: str, args: argparse.Namespace, function: Callable, needs_gradient: bool) -> tuple[str, ...]:
    """The names of its own metrics, found on a trial. Raises ValueError if the trial fails."""
    named, size = given(FLAGS[flag], args), args.group_size
    logprobs, old_logprobs, rollout_logprobs, x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)) - 3.0
    logprobs.requires_grad_()
    x.requires_grad_()
    sequence_ids = torch.repeat_interleave(torch.tensor([4, 3]))
    is_trained = torch.arange(7) > 0  # not all are: a function must not drop what the mask leaves out
    tokens = Tokens(
        logprobs, old_logprobs, rollout_logprobs, sequence_ids - 0.5, is_trained, sequence_ids,
        entropies=rollout_logprobs.exp(), ref_logprobs=old_logprobs if args.kl_coef else None,
    )  # fmt: skip
    rewards_PG, lengths_B = torch.arange(size)[None] % 2.0, torch.full((size,), 2)
    returns_T, mask_T = torch.repeat_interleave(rewards_PG[0], lengths_B), torch.ones(2 * size).bool()
    parts = {}
    if flag == "--advantage":
        from grading.score import parse_reward  # takes seconds

        parts = dict.fromkeys(parse_reward(args.reward), rewards_PG)
        if ".py:" in args.reward or args.environment:  # with sub-scores, whose names are not known yet
            parts = defaultdict(lambda: rewards_PG, parts)
    graded = Graded(rewards_PG, returns_T, lengths_B, mask_T, parts, rewards_PG > 0, rewards_PG > 0)
    try:
        found = function({"--advantage": graded, "--policy_loss": tokens, "--kl_estimator": x}[flag])
    except Exception as error:  # noqa: BLE001  the user's code may raise anything
        raise ValueError(f"{named} fails on a trial with random values: {type(error).__name__}: {error}") from None
    values, metrics = (found.per_token, found.metrics) if isinstance(found, Loss) else (found, None)
    check_returned(named, values, [(2 * size,), (1, size)] if flag == "--advantage" else [(7,)])
    for name, metric in (metrics or {}).items():
        check_returned(f"{named}, metric {name}:", metric, [(7,)])
    if needs_gradient and not values.requires_grad:
        raise ValueError(f"{named} returned values without a gradient; compute them from the log-probs it is named.")
    return tuple(metrics or ())
