"""Confidence intervals of few numbers."""

from __future__ import annotations

import math

import numpy as np

CONFIDENCE = 0.95


def t_quantile(confidence: float, freedom: float) -> float:
    """The t that Student's |T| stays below with this probability; degrees of freedom: 1 or more, also fractions.

    With T = sqrt(freedom) tan(angle), the density of the angle is proportional to cos(angle)^(freedom-1).
    """
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(np.interp(confidence * mass[-1], mass, angles))


def margin_of_mean(values: list[float]) -> float:
    """Half of Student's interval of the mean (1908); nan for fewer than two values."""
    if len(values) < 2:
        return math.nan
    return t_quantile(CONFIDENCE, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def margin_of_difference(a: list[float], b: list[float]) -> float:
    """Half of Welch's interval (1947) of mean(b) - mean(a): the variances may differ.

    One value on one side: the variance of the other side is taken for both, s sqrt(1 + 1/n). One on each: nan.
    """
    if min(len(a), len(b)) < 2:
        several = max(a, b, key=len)
        return margin_of_mean(several) * math.sqrt(len(several) + 1)
    variances = [float(np.var(side, ddof=1)) / len(side) for side in (a, b)]  # of the means
    if not any(variances):
        return 0.0
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / (len(a) - 1) + variances[1] ** 2 / (len(b) - 1))
    return t_quantile(CONFIDENCE, freedom) * math.sqrt(sum(variances))
