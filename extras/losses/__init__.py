"""Losses, advantages and corrections beyond the common ones, one paper a file: `--policy_loss gmpo`, for example.

Each names its source. To write your own, copy one, and give `--policy_loss my_loss.py:f`, or name
it here.
"""

from collections.abc import Callable

from torch import Tensor

from extras.losses.a_star_po import a_star_po, optimal_advantage
from extras.losses.corrections import sequence_mask, sequence_truncate, token_mask, token_truncate
from extras.losses.cov import clip_cov, kl_cov
from extras.losses.dppo import dppo, dppo_kl
from extras.losses.fipo import fipo
from extras.losses.gdpo import gdpo
from extras.losses.gigpo import gigpo
from extras.losses.gmpo import gmpo
from extras.losses.gpg import gpg
from extras.losses.gspo_token import gspo_token
from extras.losses.high_entropy import high_entropy
from extras.losses.maxrl import maxrl
from extras.losses.mt_grpo import mt_grpo
from extras.losses.off_policy_mask import off_policy_mask
from extras.losses.opo import opo
from extras.losses.pass_at_k import pass_at_k
from extras.losses.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from extras.losses.rlsd import rlsd
from extras.losses.sapo import sapo
from extras.losses.vespo import vespo
from grpo import Correction, Loss

ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "maxrl": maxrl,
    "mt_grpo": mt_grpo,
    "reinforce++": reinforce_pp,
    "reinforce++_baseline": reinforce_pp_baseline,
    "gdpo": gdpo,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "gigpo": gigpo,
    "gpg": gpg,
    "a_star_po": optimal_advantage,
}
LOSSES: dict[str, Callable[..., Loss | Tensor]] = {
    "gspo_token": gspo_token,
    "sapo": sapo,
    "dppo": dppo,
    "dppo_kl": dppo_kl,
    "gmpo": gmpo,
    "vespo": vespo,
    "off_policy_mask": off_policy_mask,
    "high_entropy": high_entropy,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "fipo": fipo,
    "rlsd": rlsd,
    "a_star_po": a_star_po,
}
CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "token_truncate": token_truncate,
    "sequence_truncate": sequence_truncate,
    "token_mask": token_mask,
    "sequence_mask": sequence_mask,
}
