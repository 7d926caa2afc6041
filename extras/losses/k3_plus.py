"""k3 with the gradient of k2: --kl_estimator k3+"""

from torch import Tensor

from grpo import k2, k3


def k3_plus(x: Tensor, *, kl_clamp: float) -> Tensor:
    """The value of k3 with the gradient of k2, which is not clamped. verl has the same name for it."""
    value = k2(x)
    return value - value.detach() + k3(x, kl_clamp=kl_clamp).detach()
