"""What --critic sets. No torch: the gate reads it first."""

from __future__ import annotations

import math
from typing import NamedTuple

from algorithm import split


class Settings(NamedTuple):
    """The numbers after the model, as in `--critic policy:lam=0.95,passes=2`."""

    lam: float = 0.95  # lambda of the advantages; 1: return - value
    alpha: float = 0.0  # above 0: lambda is 1 - 1 / (alpha x tokens) of each completion (VAPO)
    critic_lam: float = 1.0  # lambda of the returns that it learns; 1: what was earned from there on
    rate: float | None = None  # peak learning rate, with the policy's schedule; None: the policy's
    clip: float = 0.2  # a value moves at most so far from that of the step's start; 0: no bound
    passes: int = 1  # updates of the critic for each of the policy
    warmup: int = 0  # steps in which the policy stands still
    whiten: int = 1  # 1: the advantages are whitened over the tokens of the step; 0: they are not


def settings_of(written: str) -> tuple[str, Settings]:
    """The model and the settings of --critic. Raises ValueError for an unknown one, or out of its range."""
    path, given = split(written)
    for name, value in given.items():
        most = 1 if name in ("lam", "critic_lam", "whiten") else math.inf
        is_number = isinstance(value, int if name in ("passes", "warmup", "whiten") else int | float)
        if name not in Settings._fields or not is_number or not (name == "passes") <= value <= most:
            raise ValueError(
                f"--critic {written}: {name}={value}; known are {', '.join(Settings._fields)}; lam, critic_lam and "
                "whiten go from 0 to 1, passes from 1, the others from 0; passes, warmup and whiten are whole numbers."
            )
    return path, Settings(**given)


def path_of(written: str, policy_path: str) -> str:
    """The folder or hub id of the critic's model."""
    path, _ = settings_of(written)
    return policy_path if path == "policy" else path
