"""A KL coefficient that holds the KL at a target, by the rule of Ziegler et al. (arXiv 1909.08593), section 2.2:

--kl_coef 0.1 --kl_estimator docs/hooks/adaptive_kl.py:scaled --after_step docs/hooks/adaptive_kl.py:adapt
"""

import math

from grpo import k3

TARGET, HORIZON = 0.1, 100  # nats a token; steps in which the coefficient may change by a factor of about e^0.2
scale = 1.0  # of --kl_coef; a run that continues has it again, because `adapt` then gets all lines of the log


def scaled(x, *, kl_clamp):
    """`k3` x the scale."""
    return scale * k3(x, kl_clamp=kl_clamp)


def adapt(step, metrics):
    global scale
    error = metrics["policy/kl_ref"] / TARGET - 1.0
    if math.isfinite(error):  # an update that was left out may have none
        scale *= 1.0 + min(max(error, -0.2), 0.2) / HORIZON
