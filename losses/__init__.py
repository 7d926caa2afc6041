"""Losses, advantages and corrections beyond the common ones, one paper a file: `--policy_loss gmpo`, for example.

Each names its source. To write your own, copy one, and give `--policy_loss my_loss.py:f`, or name
it here.
"""

from collections.abc import Callable

from torch import Tensor

from grpo import Correction, Loss
from losses.a_star_po import a_star_po, optimal_advantage
from losses.corrections import sequence_mask, sequence_truncate, token_mask, token_truncate
from losses.cov import clip_cov, kl_cov
from losses.dppo import dppo, dppo_kl
from losses.fipo import fipo
from losses.gdpo import gdpo
from losses.gigpo import gigpo
from losses.gmpo import gmpo
from losses.gpg import gpg
from losses.gspo_token import gspo_token
from losses.high_entropy import high_entropy
from losses.maxrl import maxrl
from losses.mt_grpo import mt_grpo
from losses.off_policy_mask import off_policy_mask
from losses.opo import opo
from losses.pass_at_k import pass_at_k
from losses.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from losses.rlsd import rlsd
from losses.sapo import sapo
from losses.vespo import vespo

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
