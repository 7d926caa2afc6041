"""From flags to the `Algorithm`: which functions (of `grpo.py`, `losses/` or the user), with which parameters.

The parameters of a function after `*` are the flags that have an effect; what is no flag has a
default.
"""

from __future__ import annotations

import argparse
import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import grpo
from extras import losses
from extras.teacher.divergences import DIVERGENCES
from flags import FLAGS, AdamW, most_lag
from gate.checks import given, leave
from grading.user_code import load_reference
from grpo import AGGREGATIONS, KL, Algorithm, Graded, Loss, Tokens, check_returned

CHOICES: dict[str, dict[str, Callable]] = {
    "--advantage": grpo.ADVANTAGES | losses.ADVANTAGES,
    "--policy_loss": grpo.LOSSES | losses.LOSSES,
    "--loss_aggregation": AGGREGATIONS,
    "--kl_estimator": KL,
    "--kl_direction": DIVERGENCES,
    "--rollout_correction": grpo.CORRECTIONS | losses.CORRECTIONS,
}
OWN = ("--advantage", "--policy_loss", "--kl_estimator")  # may also name a function of the user's, FILE.py:FUNCTION
ALSO_DESCRIBED = (
    "--old_logprobs", "--kl_coef", "--kl_in", "--entropy_coef", "--dynamic_sampling", "--truncated",
    "--num_iterations", "--temperature", "--top_p", "--top_k",
)  # fmt: skip


def summary(function: Callable) -> str:
    """The first sentence of the docstring."""
    return " ".join((function.__doc__ or "your own").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def parameters_of(function: Callable) -> dict[str, object]:
    """The parameters after `*`, and their defaults: the flags that have an effect."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}


def algorithm_of(args: argparse.Namespace) -> Algorithm:
    """Raises ValueError for an unknown name, for a flag without effect, for a function that fails on a trial."""
    functions = {name: choose(name, FLAGS[name].of(args)) for name in CHOICES}
    check_effects(args, functions)
    bound = {name: bind(name, function, args) for name, function in functions.items()}
    metrics: tuple[str, ...] = ()
    columns: dict[str, object] = defaultdict(lambda: 0.5)  # of a row; those that are read on the trial
    for name in OWN:
        if functions[name].__module__ != "grpo":  # it may have metrics of its own
            metrics += try_out(name, args, bound[name], columns)
    check_optimizer(args)
    check_hook(args)
    kl_clamp = 0.0
    if args.kl_over == "sampled":
        kl_clamp = bound["--kl_estimator"].keywords.get("kl_clamp", 0.0)
    return Algorithm(
        **{name.removeprefix("--"): function for name, function in bound.items()},
        columns=tuple(columns),
        old_logprobs=args.old_logprobs,
        loss_metrics=metrics,
        is_corrected=args.rollout_correction != "none",
        kl_coef=args.kl_coef,
        kl_in=args.kl_in,
        kl_over=args.kl_over,
        has_teacher=bool(args.reference or args.hint_column or args.kl_over == "vocabulary"),
        kl_clamp=kl_clamp,
        entropy_coef=args.entropy_coef,
        group_size=args.group_size,
        temperature=args.temperature,
        cut=(args.top_k, args.top_p) if args.top_k or args.top_p < 1 else None,
        num_iterations=args.num_iterations,
        most_lag=most_lag(args),
        description=describe(args, bound),
    )


def choose(name: str, choice: str) -> Callable:
    """The function of this name, or the user's own, FILE.py:FUNCTION. Raises ValueError if it cannot be loaded."""
    if choice in CHOICES[name]:
        return CHOICES[name][choice]
    if name not in OWN:
        raise ValueError(f"{name} {choice}: use {', '.join(CHOICES[name])}.")
    return own_function(name, choice, f"{', '.join(CHOICES[name])} or ")


def own_function(name: str, choice: str, built_in: str = "") -> Callable:
    """The user's own function, FILE.py:FUNCTION. Raises ValueError if it cannot be loaded.

    `built_in`: the other values of the flag.
    """
    if not choice.rpartition(":")[0].endswith(".py"):
        raise ValueError(f"{name} {choice}: use {built_in}FILE.py:FUNCTION.")
    try:
        return load_reference(choice)
    except ValueError as error:
        raise ValueError(f"{name} {choice} cannot be loaded: {error}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
        raise ValueError(f"{name} {choice} cannot be loaded: {type(error).__name__}: {error}") from None


def check_effects(args: argparse.Namespace, functions: dict[str, Callable]) -> None:
    """Raises ValueError for a flag that was changed, but that none of the chosen functions has as a parameter."""
    used = {"group_size"}  # which says how many are compared, whether or not a function asks for it
    used |= {key for function in functions.values() for key in parameters_of(function)}
    for name in functions:
        users = defaultdict(list)  # parameter -> the choices that have it
        for choice, function in CHOICES[name].items():
            for key in parameters_of(function):
                users[key].append(choice)
        for key, choices in users.items():
            flag = FLAGS.get(f"--{key}")  # None: a parameter with a default of its own
            if flag and key not in used and flag.is_changed(args):
                raise ValueError(
                    f"{given(flag, args)} has no effect with {given(FLAGS[name], args)}, "
                    f"only with {name} {', '.join(choices)}: {leave(flag)}."
                )


def bind(name: str, function: Callable, args: argparse.Namespace) -> partial:
    """Binds those parameters after `*` that are flags. Raises ValueError for one that is neither flag nor default."""
    values = {}
    for key, default in parameters_of(function).items():
        if f"--{key}" in FLAGS:
            values[key] = getattr(args, key)
        elif default is inspect.Parameter.empty:
            raise ValueError(f"{given(FLAGS[name], args)}: its parameter {key} is no flag; give it a default.")
    if values.get("loss_constant_tokens", 0) is None:
        values["loss_constant_tokens"] = args.max_completion_tokens
    return partial(function, **values)


def describe(args: argparse.Namespace, bound: dict[str, partial]) -> str:
    """Says in one log line what the flags amount to: the functions in words, the rest as it was written."""
    unused = {"--kl_estimator", "--kl_direction"}
    if args.kl_coef:
        unused = {"--kl_direction" if args.kl_over == "sampled" else "--kl_estimator"}
    if args.rollout_correction == "none":
        unused.add("--rollout_correction")
    parts = []
    for name, function in bound.items():
        if name not in unused:
            values = "".join(f" --{key} {value}" for key, value in function.keywords.items())
            parts.append(f"{given(FLAGS[name], args)}{values}: {summary(function.func)}")
    parts.append(" ".join(given(FLAGS[name], args) for name in ALSO_DESCRIBED))
    return f"algorithm: {'; '.join(parts)}"


def try_out(name: str, args: argparse.Namespace, function: Callable, columns: dict[str, object]) -> tuple[str, ...]:
    """Calls the function once. Returns the names of its own metrics; raises ValueError if it fails."""
    written, shapes = given(FLAGS[name], args), [(7,)]
    needs_gradient = name == "--policy_loss" or (name == "--kl_estimator" and args.kl_in == "loss")
    random = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)) - 3.0
    if name == "--advantage":
        argument, shapes = made_up_grades(args, columns), [(2 * args.group_size,), (1, args.group_size)]
    elif name == "--policy_loss":
        argument = made_up_tokens(*random[:3], has_reference=args.kl_coef != 0)
    else:
        argument = random[3].requires_grad_()
    try:
        returned = function(argument)
    except Exception as error:  # noqa: BLE001  the user's code may raise anything
        raise ValueError(f"{written} fails on a trial with random values: {type(error).__name__}: {error}") from None
    values, metrics = returned, {}
    if isinstance(returned, Loss):
        values, metrics = returned.per_token, returned.metrics or {}
    check_returned(written, values, shapes)
    for metric, metric_values in metrics.items():
        check_returned(f"{written}, metric {metric}:", metric_values, shapes)
    if needs_gradient and not values.requires_grad:
        raise ValueError(f"{written} returned values without a gradient; compute them from the log-probs it is named.")
    return tuple(metrics)


def check_optimizer(args: argparse.Namespace) -> None:
    """Raises ValueError for an --optimizer of the user's that does not train, or that could not be sharded or resumed.

    Its trial, with a matrix and a bias, or with an adapter: a step at the rate 0, which torch makes before it loads a
    state, and another.
    """
    if args.optimizer == "adamw":
        return
    make, written = own_function("--optimizer", args.optimizer, "adamw or "), given(FLAGS["--optimizer"], args)
    shapes = {"layers.0.weight": (4, 6), "layers.0.bias": (4,)}
    if args.lora_rank:
        shapes = {"layers.0.lora_A.weight": (4, 6), "layers.0.lora_B.weight": (6, 4)}
    named = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    try:
        optimizer = make(named, AdamW.from_flags(args))
        moved = [moved_by(optimizer, named, rate) for rate in (0.0, 0.01)]
        kept = [(weight, *each) for weight, state in optimizer.state.items() for each in state.items()]
    except Exception as error:  # noqa: BLE001  the user's code may raise anything
        raise ValueError(f"{written} fails on a trial: {type(error).__name__}: {error}") from None
    if moved != [[], [*named]] or not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{written} made a {type(optimizer).__name__}, which moves {moved[0]} at the rate 0 and {moved[1]} at "
            f"0.01; needed is a torch optimizer that takes its rate from group['lr'], and moves [] and {[*named]}."
        )
    for weight, name, value in kept:
        if isinstance(value, Tensor) and value.ndim and value.shape != weight.shape:
            raise ValueError(
                f"{written} keeps {name} of the shape {[*value.shape]} for a parameter of {[*weight.shape]}; "
                "needed are numbers, or tensors of the parameter's shape, which are sharded as it is."
            )


def moved_by(optimizer: torch.optim.Optimizer, named: dict[str, torch.nn.Parameter], rate: float) -> list[str]:
    """The names of the parameters that a step at this rate changes."""
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, float(rate > 0))
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return [name for name in named if not before[name].equal(named[name])]


def check_hook(args: argparse.Namespace) -> None:
    """Raises ValueError for an --after_step that cannot be called. It is not tried: a call may change what it keeps."""
    if args.after_step:
        hook = own_function("--after_step", args.after_step)
        try:
            inspect.signature(hook).bind(1, {})
        except TypeError as error:
            raise ValueError(f"--after_step {args.after_step} is called as f(step, metrics), but {error}.") from None


def made_up_tokens(logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, has_reference: bool) -> Tokens:
    """Two sequences of 4 and 3 tokens. The first is not trained: a loss must not drop what the mask leaves out."""
    sequence_ids = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    return Tokens(
        logprobs=logprobs.requires_grad_(), old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs,
        advantages=sequence_ids - 0.5, mask=torch.arange(7) > 0, sequence_ids=sequence_ids,
        entropies=rollout_logprobs.exp(), ref_logprobs=old_logprobs if has_reference else None,
    )  # fmt: skip


def made_up_grades(args: argparse.Namespace, columns: dict[str, object]) -> Graded:
    """One group, whose completions have two tokens each and the rewards 0, 1, 0, 1, ..."""
    from grading.score import parse_reward  # takes seconds

    rewards_PG = torch.arange(args.group_size)[None] % 2.0
    parts = dict.fromkeys(parse_reward(args.reward), rewards_PG)
    if ".py:" in args.reward or args.environment:  # with sub-scores, whose names are not known yet
        parts = defaultdict(lambda: rewards_PG, parts)
    mask_T = torch.ones(2 * args.group_size, dtype=torch.bool)
    turn_fields = {}
    if args.environment or args.tools:
        turn_fields = {"turns_T": 0 * mask_T.long(), "states_B": [[b""]] * args.group_size}
    if args.environment:
        turn_fields["turn_rewards_PGK"] = rewards_PG[..., None]
    return Graded(
        rewards_PG=rewards_PG, returns_T=rewards_PG[0].repeat_interleave(2), mask_T=mask_T,
        lengths_B=torch.full((args.group_size,), 2), parts=parts, columns=[columns],
        is_correct_PG=rewards_PG > 0, is_truncated_PG=rewards_PG > 0, **turn_fields,
    )  # fmt: skip
