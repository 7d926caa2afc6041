"""Guards around the functions of the algorithm, perhaps the user's: what they return, and where they fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from grpo import Algorithm, Groups, Loss, Tokens, as_loss
from runtime.rank import PLACE, OwnCodeError

ROOT = Path(__file__).parent.parent
Input = TypeVar("Input", Groups, Tokens, Tensor)


def guarded(algorithm: Algorithm) -> Algorithm:
    """The algorithm, whose functions raise OwnCodeError where they fail, or return what cannot be trained on.

    Those of the user get copies: what they change in place, then or later, changes nothing else.
    """

    def advantage(g: Groups) -> Tensor:
        names = f"parts are {', '.join(g.parts) or 'none'}; columns are {', '.join(g.columns[0]) or 'none'}"
        with own_code("--advantage", g.step, names):
            values = algorithm.advantage(handed_out(g, algorithm.advantage))
            if g.rewards_PG.shape[1] == 1 < algorithm.group_size and isinstance(values, Tensor):
                values = values.nan_to_num(0.0, 0.0, 0.0)  # one that is left of a group has no std
            check_returned(values, [tuple(g.rewards_PG.shape), tuple(g.returns_T.shape)])
        return values.clone()  # the function may keep it, too

    def policy_loss(t: Tokens) -> Loss:
        with own_code("the loss (--policy_loss, --kl_estimator)", t.step):
            loss = as_loss(algorithm.policy_loss(handed_out(t, algorithm.policy_loss)), t)
            for what, values in (loss._asdict() | loss.metrics).items():
                if what != "metrics":
                    check_shape(what, values, [t.mask.shape])
            check_gradient(loss.per_token, t.logprobs)
        return loss

    def kl_estimator(x: Tensor) -> Tensor:
        with own_code("--kl_estimator", PLACE.step, "its input is a tensor"):
            values = algorithm.kl_estimator(handed_out(x, algorithm.kl_estimator))
            check_gradient(values, x)
        return values

    return replace(algorithm, advantage=advantage, policy_loss=policy_loss, kl_estimator=kl_estimator)


def handed_out(value: Input, function: Callable) -> Input:
    """A copy of the value, of all that is in it; the value itself for functions of ours, which change nothing."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    file = Path(code.co_filename) if code else ROOT
    if file == ROOT / "grpo.py" or ROOT / "extras" in file.parents:
        return value
    if isinstance(value, Tensor):
        return value.clone()
    fields = vars(value).items()  # a gradient goes through a clone, but not through a deep copy
    return replace(value, **{name: x.clone() if isinstance(x, Tensor) else copy.deepcopy(x) for name, x in fields})


@contextmanager
def own_code(
    flag: str, step: int, names: str = "its input is grpo.Tokens, whose ref_logprobs are None without --kl_coef"
) -> Iterator[None]:
    """Names the flag if the block, perhaps the user's code, fails; `names`: what it could use."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):  # no fault of the function
        raise
    except Exception as error:  # noqa: BLE001  the user's code may raise anything
        words = f"{type(error).__name__}: {error}" + f"; {names}" * (not isinstance(error, ValueError))
        raise OwnCodeError(f"{flag} fails in step {step}: {words}") from error


def check_returned(values: object, shapes: list[tuple[int, ...]]) -> None:
    """Raises ValueError unless it is a tensor of one of these shapes, of numbers that are all finite."""
    check_shape("it", values, shapes)
    if not values.is_floating_point() or values.requires_grad:
        raise ValueError(
            f"it returned {values.dtype} with{'' if values.requires_grad else 'out'} a gradient; "
            "needed are floats without one."
        )
    if wrong := (~values.isfinite()).nonzero().tolist():
        raise ValueError(f"it returned values that are not finite, the first at {wrong[0]}.")


def check_shape(what: str, values: object, shapes: list[tuple[int, ...]]) -> None:
    """Raises ValueError unless it is a tensor of one of these shapes."""
    if not isinstance(values, Tensor) or tuple(values.shape) not in shapes:
        got = f"the shape {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        needed = " or ".join(str(list(shape)) for shape in shapes)
        if len(shapes) == 1:  # of a loss, a KL, or a metric of theirs
            needed += ": one value a token, not their mean"
        raise ValueError(f"{what} has {got}; needed is a tensor of the shape {needed}.")


def check_gradient(values: Tensor, logprobs: Tensor) -> None:
    """Raises ValueError for a loss that is not per token, or that would train nothing."""
    check_shape("a loss or KL", values, [logprobs.shape])
    if logprobs.requires_grad and not values.requires_grad:
        raise ValueError("a loss or KL has values without a gradient; compute them from the log-probs.")
