"""What --critic sets. No torch: the gate reads it first."""

from __future__ import annotations

from typing import NamedTuple

from algorithm import split


class Settings(NamedTuple):
    """The numbers after the model, as in `--critic policy:lam=0.95,passes=2`."""

    lam: float = 0.95  # lambda of the advantages; 1: return - value
    alpha: float = 0.0  # above 0: lambda is 1 - 1 / (alpha x trained tokens) of each completion (VAPO)
    critic_lam: float = 1.0  # lambda of the returns that the critic learns; 1: what was earned from there on
    rate: float | None = None  # peak learning rate, with the policy's schedule; None: the policy's
    clip: float = 0.2  # a value moves at most so far from that of the step's start; 0: no bound
    passes: int = 1  # updates of the critic for each of the policy
    warmup: int = 0  # steps in which the policy stands still
    whiten: int = 1  # 1: the advantages are whitened over the tokens of the step; 0: they are not


RANGES = {"lam": (0, 1), "critic_lam": (0, 1), "passes": (1, 1000), "whiten": (0, 1)}  # the others: from 0 on


def settings_of(written: str) -> tuple[str, Settings]:
    """The model and the settings of --critic. Raises ValueError for one that is not known, or out of its range."""
    path, given = split(written)
    for name, value in given.items():
        if name not in Settings._fields:
            raise ValueError(f"--critic {written}: {name} is not known; use {', '.join(Settings._fields)}.")
        low, high = RANGES.get(name, (0, 1e9))
        is_whole = name not in ("passes", "warmup", "whiten") or isinstance(value, int)
        if not (isinstance(value, int | float) and is_whole and low <= value <= high):
            kind = "a number" if is_whole else "a whole number"
            raise ValueError(f"--critic {written}: {name} {value!r} must be {kind} from {low} to {high:g}.")
    return path, Settings(**given)
