"""The algorithm as tensor arithmetic: advantages, policy losses, KL, the correction of the sampler's mismatch, aggregation.

Pure functions: tensors in, tensors out; no model, device, rank or flag object in sight. Each is the equation that its docstring
names, with every silent choice said aloud (ddof, epsilon, clamps); the flags of the same names are in `algorithm.py`, the call of
each in `update.py`. How the choices compare with TRL's and verl's is a table in the README.

"Per token" means shape N: the packed tokens of a micro-batch. `mask` is true at completion tokens that are trained, `sequence_ids`
numbers the sequence that a token belongs to. Ratios, weights and clipped shares are per token, too. Dimensions: `batch.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = (
    20.0  # exp(20) = 5e8: beyond it a ratio is only a way to overflow (EasyR1 and verl clamp token ratios alike)
)


# Advantages ----------------------------------------------------------------------------------------------------------------------


def group_advantages(rewards_PG: Tensor, kind: str = "grpo", ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Advantages of whole completions, shape PG. A group of equal rewards gets exactly 0, not rounding noise divided by eps.

    - grpo: (r - group mean) / (group std + eps). DeepSeekMath (arXiv 2402.03300), section 4.1.2; the paper names no ddof and no eps.
    - grpo_batch_std: the same over the std of all rewards of the step. Lite PPO (arXiv 2508.08221); TRL `scale_rewards="batch"`.
    - dr_grpo: r - group mean. Dr. GRPO (arXiv 2503.20783), section 3.2.
    - rloo: r - mean of the group's other rewards. RLOO (arXiv 2402.14740), section 2.3.
    - none: r.
    """
    if kind == "none":
        return rewards_PG
    has_signal_P1 = rewards_PG.amax(dim=1, keepdim=True) > rewards_PG.amin(dim=1, keepdim=True)
    centred_PG = torch.where(has_signal_P1, rewards_PG - rewards_PG.mean(dim=1, keepdim=True), 0.0)
    if kind == "grpo":
        return centred_PG / (rewards_PG.std(dim=1, correction=ddof, keepdim=True) + eps)
    if kind == "grpo_batch_std":
        return centred_PG / (rewards_PG.std(correction=ddof) + eps)
    if kind == "rloo":
        group_size = rewards_PG.shape[1]
        return centred_PG * group_size / (group_size - 1)
    assert kind == "dr_grpo", f"unknown advantage {kind!r}"
    return centred_PG


def returns_to_go(reward: Tensor, penalties: Tensor) -> Tensor:
    """What a completion still earns from each of its tokens on: its reward minus the penalties of this token and the later ones.

    `reward` is a scalar, paid at the last token; `penalties` are per token of one completion: coefficient x KL. No discount.
    REINFORCE++ (arXiv 2501.03262; eq. 4 of its later versions).
    """
    return reward - penalties.flip(0).cumsum(0).flip(0)


def whitened(values: Tensor, mask: Tensor, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """(value - mean) / (std + eps), mean and std over the positions where the mask is true; 0 elsewhere, and everywhere if all are equal.

    The normalisation of REINFORCE++ (arXiv 2501.03262; eq. 5 of its later versions, eq. 7 with the group baseline) over all tokens of a
    step, as verl, so that a longer completion weighs more.
    """
    chosen = values[mask].double()  # a step has millions of tokens: float32 sums would lose digits
    if len(chosen) == 0 or chosen.max() == chosen.min():
        return torch.zeros_like(values)
    result = (values.double() - chosen.mean()) / (chosen.std(correction=ddof) + eps)
    return torch.where(mask, result, 0.0).to(values.dtype)


# Ratios --------------------------------------------------------------------------------------------------------------------------


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old of each token, the log of it clamped to +-20. `old_logprobs` must not require grad."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """(pi(y) / pi_old(y))^(1 / |y|) of the sequence of each token, the geometric mean of its token ratios; 1 where masked.

    GSPO (arXiv 2507.18071), eq. 7. The log of it is clamped to +-20 (verl: only above, at 10). The gradient flows to every token of
    the sequence.
    """
    log_ratio = sequence_sum(torch.where(mask, logprobs - old_logprobs, 0.0), sequence_ids)
    lengths = sequence_sum(mask.to(logprobs.dtype), sequence_ids).clamp(min=1.0)
    return torch.where(mask, log_ratio / lengths, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def gspo_token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """The value of `sequence_ratio` with the gradient of each token's own log-probability alone: GSPO-token (arXiv 2507.18071), eq. 14."""
    value = sequence_ratio(logprobs.detach(), old_logprobs, mask, sequence_ids)
    return value * torch.where(mask, logprobs - logprobs.detach(), 0.0).exp()


def sequence_sum(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """At each token, the sum of the values over its whole sequence."""
    return torch.zeros_like(values).index_add(0, sequence_ids, values)[sequence_ids]


# Policy losses, per token --------------------------------------------------------------------------------------------------------


def clipped_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, is_low, is_high): the larger of -A * ratio and -A * ratio clipped to [1 - clip_low, 1 + clip_high].

    PPO (arXiv 1707.06347), eq. 7; clip_high above clip_low is DAPO's clip-higher (arXiv 2503.14476, section 3.1). `dual_clip` c > 1:
    where A < 0, at most -A * c (arXiv 1912.09729, eq. 5); 0: not used.
    is_low and is_high mark the tokens that have no gradient because their ratio is too small (A < 0) or too large (A > 0, or beyond c).
    """
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    is_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    is_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    if dual_clip:
        is_beyond = (ratio > dual_clip) & (advantages < 0)
        loss, is_high = torch.where(is_beyond, -advantages * dual_clip, loss), is_high | is_beyond
    return loss, is_low, is_high


def cispo_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, is_low, is_high): -A * logprob, weighted with the detached ratio clipped to [1 - clip_low, 1 + clip_high].

    CISPO, MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5: no token loses its gradient, is_low and is_high mark those whose weight is
    clipped. The paper sets no lower bound (clip_low 1) and tunes only clip_high; TRL's `epsilon_high` is our 1 + clip_high.
    """
    is_low, is_high = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    return -ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * logprobs, is_low, is_high


def sapo_loss(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """-A * sigmoid(tau * (ratio - 1)) * 4 / tau, with tau_pos where A > 0 and tau_neg elsewhere: a soft gate, nothing is clipped.

    SAPO (arXiv 2511.20347), eq. 5. At ratio 1 the gradient is that of the plain ratio; the paper's tau are 1.0 and 1.05.
    """
    tau = torch.where(advantages > 0, advantages.new_tensor(tau_pos), tau_neg)  # in the precision of the advantages
    return -advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau


def policy_gradient_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A * logprob: REINFORCE (Williams, 1992). Without a ratio: later updates of a step are off-policy and not corrected."""
    return -advantages * logprobs


# KL ------------------------------------------------------------------------------------------------------------------------------


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3", clamp: float = 10.0) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy sampled, with x = ref_logprob - logprob.

    - k1: -x. k2: x^2 / 2. k3: exp(x) - x - 1, never negative. Schulman, "Approximating KL Divergence" (2020).
    - k3+: the value of k3, the gradient of k2. As a loss on on-policy tokens k1 has a gradient of mean zero and k3 (not clamped) that of
      the reverse divergence KL(reference || policy); k2's is the gradient of KL(policy || reference). verl has the same name for it.
    `clamp` c > 0, for k3 and k3+: x is clamped to +-20 and the value of k3 to +-c, as EasyR1 and verl do (`low_var_kl`, c = 10); a
    clamped k3 has no gradient, that of k3+ is not clamped. 0: no clamps, as TRL.
    """
    x = ref_logprobs - logprobs
    if estimator == "k1":
        return -x
    k2 = 0.5 * x.square()
    if estimator == "k2":
        return k2
    if clamp:
        x = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = x.expm1() - x  # exp(x) - 1 would round small values of it away
    if clamp:
        k3 = k3.clamp(-clamp, clamp)
    if estimator == "k3":
        return k3
    assert estimator == "k3+", f"unknown KL estimator {estimator!r}"
    return k2 - k2.detach() + k3.detach()


# Sampler-trainer mismatch --------------------------------------------------------------------------------------------------------


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    kind: str,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """(weights, is_outside), per token and without gradient: how much more likely the trainer finds what the sampler drew.

    The ratio is that of the same weights in two implementations: pi_old by the trainer over pi by vLLM, the log of it clamped to +-20.
    - none: the ratio as it is, for the metrics alone.
    - token_truncate: min(ratio, high). Truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You
      Off-Policy RL Training" (2025). sequence_truncate: the same of the whole sequence, whose ratio is the product of its tokens': Liu et
      al., "When Speed Kills Stability" (2025).
    - token_mask: the ratio inside [low, high], 0 outside. IcePop (Ring-1T, arXiv 2510.18855), with 0.5 and 5. sequence_mask: the same
      of the whole sequence.
    `is_outside` marks the tokens whose weight is truncated or 0.
    """
    log_ratio = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    if kind.startswith("sequence"):
        log_ratio = sequence_sum(log_ratio, sequence_ids)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if kind == "none":
        return ratio, torch.zeros_like(mask)
    if kind.endswith("truncate"):
        return ratio.clamp(max=high), ratio > high
    assert kind.endswith("mask"), f"unknown correction {kind!r}"
    is_outside = (ratio < low) | (ratio > high)
    return torch.where(is_outside, 0.0, ratio), is_outside


# Aggregation ---------------------------------------------------------------------------------------------------------------------


def aggregation_weights(lengths_B: Tensor, kind: str, constant: float) -> Tensor:
    """What each token of a completion counts in the loss of an update, shape B; the loss is the sum of weight x loss of token.

    `lengths_B` are the trained tokens of all completions of the update, over all ranks and micro-batches (0: the completion is left
    out, and not counted as a sequence): that is what makes loss and gradient independent of packing and of the number of ranks.
    - token_mean: 1 / (all tokens of the update), as verl and EasyR1. Long completions count more. DAPO (arXiv 2503.14476), eq. 12, writes
      it for the tokens of one group.
    - seq_mean_token_mean: 1 / (sequences x own length). GRPO (arXiv 2402.03300), eq. 3. Each completion counts the same.
    - seq_mean_token_sum_norm: 1 / (sequences x constant). Dr. GRPO (arXiv 2503.20783): the constant is the limit of the completion length.
    """
    lengths_B = lengths_B.double()
    num_sequences = (lengths_B > 0).sum().clamp(min=1)
    if kind == "token_mean":
        return (1.0 / lengths_B.sum().clamp(min=1)).expand(len(lengths_B)).float()
    if kind == "seq_mean_token_mean":
        return (1.0 / (num_sequences * lengths_B.clamp(min=1))).float()
    assert kind == "seq_mean_token_sum_norm", f"unknown aggregation {kind!r}"
    return (1.0 / (num_sequences * constant)).expand(len(lengths_B)).float()


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the sum over positions where the boolean mask is true. Elsewhere the gradient is exactly 0, also beside inf or nan."""
    return torch.where(mask, values, 0.0).sum()
