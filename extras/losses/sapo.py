"""SAPO: a soft gate in place of a clip: --policy_loss sapo"""

import torch

from grpo import Loss, Tokens, token_ratio


def sapo(t: Tokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """-A x sigmoid(tau x (ratio - 1)) x 4 / tau: a soft gate, with tau_pos where A > 0 and tau_neg elsewhere.

    SAPO (arXiv 2511.20347), eq. 5, with tau 1.0 and 1.05. At ratio 1 the gradient is that of the plain ratio.
    """
    ratio = token_ratio(t.logprobs, t.old_logprobs)
    tau = torch.where(t.advantages > 0, tau_pos, tau_neg)
    return Loss(-t.advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, ratio)
