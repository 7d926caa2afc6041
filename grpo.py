"""The algorithm: advantages, policy losses, KL, correction of the sampler's mismatch, aggregation, and the total loss.

Each choice is one function, which `algorithm.py` finds by its name in `NAMES`. Rare ones are in
`extras/losses/`, one paper a file. To add one, write the function and name it there, or keep it in
a file of your own: `--policy_loss my_loss.py:f` (also --advantage, --kl_estimator). The parameters
after `*` are the flags of the same names: only those have an effect. `--help` and the log show the
first sentence of its docstring. How the choices compare with TRL's and verl's: `docs/algorithm.md`.

The functions are pure: tensors in, tensors out, no model, device or rank. Dimensions: `batch.py`,
and T: the completion tokens of a step, one completion after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from batch import Batch

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: a larger ratio would only overflow (EasyR1 and verl clamp token ratios alike)


# Advantages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The graded groups of completions of a step, the input of an advantage."""

    rewards_PG: Tensor  # float32; with --kl_in reward, minus the KL penalties of all tokens of the completion
    returns_T: Tensor  # from the token's turn on; with --kl_in reward, minus the KL penalties of these tokens
    lengths_B: Tensor  # completion tokens, with what an environment said
    mask_T: Tensor  # bool: the token is trained
    step: int = 1  # 1, 2, ..., total_steps
    total_steps: int = 1
    columns: list[dict[str, object]] = field(default_factory=list)  # of each prompt's row: P
    # From the grades, as they were given:
    parts: dict[str, Tensor] = field(default_factory=dict)  # verifier or sub-score -> [P, G], without its weight
    is_correct_PG: Tensor | None = None  # bool: full marks from the first verifier of the reward
    is_truncated_PG: Tensor | None = None  # bool: stopped by the length limit
    # From episodes of up to K turns (docs/turns.md); None: each completion is one turn
    turns_T: Tensor | None = None  # int64: the turn of each token, 0, 1, ...
    states_B: list[list[bytes]] | None = None  # what the environment said before each turn; b"" before the first
    turn_rewards_PGK: Tensor | None = None  # float32; nan where an episode has fewer turns; None: none by turn
    # Where some completions could not be graded: the step's groups of which more, or fewer, are left
    other_groups: tuple[Groups, ...] = ()


def grpo(g: Groups, *, advantage_ddof: int, advantage_eps: float) -> Tensor:
    """(r - mean of group) / (std of group + eps). DeepSeekMath (arXiv 2402.03300), 4.1.2, without ddof and eps."""
    std_P1 = g.rewards_PG.std(dim=1, correction=advantage_ddof, keepdim=True)
    return divided(centred(g.rewards_PG), std_P1 + advantage_eps)


def grpo_batch_std(g: Groups, *, advantage_ddof: int, advantage_eps: float) -> Tensor:
    """(r - mean of group) / (std of the step + eps). Lite PPO (arXiv 2508.08221); TRL: `scale_rewards="batch"`."""
    rewards = torch.cat([each.rewards_PG.flatten() for each in (g, *g.other_groups)])
    return divided(centred(g.rewards_PG), rewards.std(correction=advantage_ddof) + advantage_eps)


def dr_grpo(g: Groups) -> Tensor:
    """r - mean of group. Dr. GRPO (arXiv 2503.20783), section 3.2."""
    return centred(g.rewards_PG)


def rloo(g: Groups) -> Tensor:
    """r - mean of the group's other rewards. RLOO (arXiv 2402.14740), section 2.3."""
    group_size = g.rewards_PG.shape[1]
    return centred(g.rewards_PG) * group_size / max(group_size - 1, 1)


def reward_itself(g: Groups) -> Tensor:
    """The reward itself, without a baseline."""
    return g.rewards_PG


def zero(g: Groups) -> Tensor:
    """Nothing is learnt from rewards, all from the reference: distillation, by --kl_coef."""
    return torch.zeros_like(g.rewards_PG)


def centred(rewards_PG: Tensor) -> Tensor:
    """r - mean of group; exactly 0, not rounding noise, in a group of equal rewards."""
    has_signal_P1 = rewards_PG.amax(dim=1, keepdim=True) > rewards_PG.amin(dim=1, keepdim=True)
    return torch.where(has_signal_P1, rewards_PG - rewards_PG.mean(dim=1, keepdim=True), 0.0)


def divided(values: Tensor, scale: Tensor) -> Tensor:
    """values / scale, and 0 where the value is 0: with --advantage_eps 0 a group of equal rewards has the scale 0."""
    return torch.where(values == 0, 0.0, values / scale)


def to_go(values: Tensor) -> Tensor:
    """Along the last dimension, the sum of this value and later ones."""
    return values.flip(-1).cumsum(-1).flip(-1)


# Policy losses, per token ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of a micro-batch, the input of a policy loss. Each field has the shape N."""

    logprobs: Tensor  # the policy's, with gradient
    old_logprobs: Tensor  # under the weights that sampled, by the trainer (with --old_logprobs rollout the sampler)
    rollout_logprobs: Tensor  # under the same weights, by the sampler
    advantages: Tensor
    mask: Tensor  # bool: a completion token that is trained
    sequence_ids: Tensor  # int64, the sequence that the token belongs to
    entropies: Tensor | None = None  # of the policy's distribution, in nats, with gradient
    ref_logprobs: Tensor | None = None  # the reference's; None without --kl_coef
    step: int = 1  # 1, 2, ..., total_steps; this and the next are plain numbers
    total_steps: int = 1


class Loss(NamedTuple):
    """The result of a policy loss, which may also return the first field alone."""

    per_token: Tensor
    # For the metrics alone:
    ratio: Tensor | None = None  # pi / pi_old; None: the token ratio
    is_low: Tensor | None = None  # bool: clipped, because the ratio is too small; None: nothing is clipped
    is_high: Tensor | None = None  # bool: clipped, because the ratio is too large
    metrics: dict[str, Tensor] | None = None  # name -> a value per token: the mean is logged as loss/<name>


def clip(t: Tokens, *, clip_low: float, clip_high: float, dual_clip: float) -> Loss:
    """The larger of -A x ratio and -A x ratio clipped to [1 - clip_low, 1 + clip_high], with the ratio of the token.

    PPO (arXiv 1707.06347), eq. 7; clip_high above clip_low is DAPO's clip-higher (arXiv 2503.14476, section 3.1).
    """
    return clipped(token_ratio(t.logprobs, t.old_logprobs), t.advantages, clip_low, clip_high, dual_clip)


def reinforce(t: Tokens) -> Loss:
    """-A x logprob, without a ratio: later updates of a step are off-policy and not corrected. Williams (1992)."""
    return Loss(-t.advantages * t.logprobs)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float) -> Loss:
    """`clip` of any ratio. The marked tokens are those without a gradient.

    `dual_clip` c > 1: where A < 0, the loss is at most -A x c (arXiv 1912.09729, eq. 5); 0: not used.
    """
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high))
    is_low = (ratio < 1.0 - low) & (advantages < 0)
    is_high = (ratio > 1.0 + high) & (advantages > 0)
    if dual_clip:
        is_beyond = (ratio > dual_clip) & (advantages < 0)
        loss, is_high = torch.where(is_beyond, -advantages * dual_clip, loss), is_high | is_beyond
    return Loss(loss, ratio, is_low, is_high)


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old of each token, its log clamped to +-20. `old_logprobs` must not require grad."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


# KL, per token --------------------------------------------------------------------------------------------------------
# Estimates of KL(policy || reference) from tokens that the policy sampled, with x = ref_logprob - logprob (Schulman,
# "Approximating KL Divergence", 2020).


def k1(x: Tensor) -> Tensor:
    """-x: unbiased; as a loss on on-policy tokens its gradient has mean zero."""
    return -x


def k2(x: Tensor) -> Tensor:
    """x^2 / 2: biased, but its gradient is that of KL(policy || reference)."""
    return 0.5 * x.square()


def k3(x: Tensor, *, kl_clamp: float) -> Tensor:
    """exp(x) - x - 1: unbiased and never negative; as a loss its gradient is that of KL(reference || policy).

    `kl_clamp` c > 0: x is clamped to +-20 and the value to +-c, as in EasyR1 and verl (`low_var_kl`, c = 10). 0: no
    clamps, as in TRL. A clamped token has no gradient.
    """
    if kl_clamp:
        x = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value = x.expm1() - x  # exp(x) - 1 would round small values of it away
    return value.clamp(-kl_clamp, kl_clamp) if kl_clamp else value


def no_kl(x: Tensor) -> Tensor:
    """0: the reference is there for a policy loss that reads its log-probs."""
    return 0.0 * x


# Sampler-trainer mismatch ---------------------------------------------------------------------------------------------
# Weights of the policy loss, per token: its probability by the trainer / by the sampler. The trainer's weights are from
# the beginning of the step; the sampler's may be older (--steps_ahead, --partial_rollouts).
# A correction returns them, and where they are truncated, or 0.


def no_correction(t: Tokens) -> tuple[Tensor, Tensor]:
    """The ratio is measured and not used."""
    return mismatch(t), torch.zeros_like(t.mask)


def mismatch(t: Tokens) -> Tensor:
    """pi_old by the trainer / pi_old by the sampler, without gradient, its log clamped to +-20; 1 where masked."""
    return log_mismatch(t).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def log_mismatch(t: Tokens) -> Tensor:
    return torch.where(t.mask, t.old_logprobs - t.rollout_logprobs, 0.0).detach()


# Aggregation ----------------------------------------------------------------------------------------------------------
# Weights of the tokens of each completion, shape B. The loss of an update is the sum of weight x token loss.
# `lengths_B` counts the trained tokens of all completions of the update, over all ranks and micro-batches, so loss and
# gradient do not depend on packing or ranks. A completion of length 0 is left out, and does not count as a sequence.


def token_mean(lengths_B: Tensor) -> Tensor:
    """Mean over all tokens of the update, as verl and EasyR1: long completions count more.

    DAPO (arXiv 2503.14476), eq. 12, writes it for the tokens of one group.
    """
    return (1.0 / lengths_B.double().sum().clamp(min=1)).expand(len(lengths_B)).float()


def seq_mean_token_mean(lengths_B: Tensor) -> Tensor:
    """Mean over the completions of their token means: each counts the same. GRPO (arXiv 2402.03300), eq. 3."""
    return (1.0 / (num_sequences(lengths_B) * lengths_B.double().clamp(min=1))).float()


def seq_mean_token_sum_norm(lengths_B: Tensor, *, max_completion_tokens: int, constant: float = 0.0) -> Tensor:
    """Mean over the completions of their token sums / a constant, or the limit of the length. Dr. GRPO (2503.20783)."""
    divisor = num_sequences(lengths_B) * (constant or max_completion_tokens)
    return (1.0 / divisor).expand(len(lengths_B)).float()


def prompt_mean(lengths_B: Tensor, *, group_size: int) -> Tensor:
    """Mean over the prompts of the token means of their groups: each prompt counts the same. ScaleRL (2510.13786)."""
    lengths_P1 = lengths_B.double().view(-1, group_size).sum(dim=1, keepdim=True)
    num_prompts = (lengths_P1 > 0).sum().clamp(min=1)
    return (1.0 / (num_prompts * lengths_P1.clamp(min=1))).expand(-1, group_size).flatten().float()


def num_sequences(lengths_B: Tensor) -> Tensor:
    """The number of completions with a trained token, at least 1."""
    return (lengths_B > 0).sum().clamp(min=1)


# The loss -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    """The choices of a run. The functions have their flags bound: they take the tensors alone."""

    advantage: Callable[[Groups], Tensor]
    policy_loss: Callable[[Tokens], Loss | Tensor]
    kl_estimator: Callable[[Tensor], Tensor]
    rollout_correction: Callable[[Tokens], tuple[Tensor, Tensor]]
    loss_aggregation: Callable[[Tensor], Tensor]
    old_logprobs: str  # whose: "trainer" or "rollout", the sampler
    is_corrected: bool  # the rollout correction's weights enter the loss
    kl_coef: float
    kl_in: str  # "loss" or "reward"
    kl_over: str  # "sampled": tokens, by the estimator; "vocabulary": the whole of it, in this direction
    has_teacher: bool  # the reference is of --reference, reads --hint_column, or is followed over the vocabulary
    kl_clamp: float  # bound of the estimate of the KL; 0: none
    entropy_coef: float
    group_size: int
    temperature: float  # logits are divided by it, in the sampler and in the trainer
    num_iterations: int  # passes over a rollout
    most_lag: int  # how many steps old the sampling weights may be; 0: they are the trained ones
    kl_direction: Callable[[Tensor, Tensor], Tensor] | None = None  # with --kl_over vocabulary

    @property
    def has_penalties(self) -> bool:
        """Whether the KL to the reference is taken off the rewards."""
        return self.kl_coef > 0 and self.kl_in == "reward"


def tokens_of(
    batch: Batch, logprobs_N: Tensor, old_logprobs_N: Tensor, entropies_N: Tensor, step: int = 1, total_steps: int = 1
) -> Tokens:
    """The tokens of the micro-batch under the policy, whose pass has given log-probs and entropies."""
    return Tokens(
        logprobs=logprobs_N,
        old_logprobs=old_logprobs_N,
        rollout_logprobs=batch.rollout_logprobs_N,
        advantages=batch.advantages_N,
        mask=batch.loss_mask_N,
        sequence_ids=batch.sequence_ids_N,
        entropies=entropies_N,
        ref_logprobs=batch.ref_logprobs_N,
        step=step,
        total_steps=total_steps,
    )


def total_loss(batch: Batch, t: Tokens, algorithm: Algorithm) -> Loss:
    """The policy loss, weighted for the sampler's mismatch, + coefficient x KL - coefficient x entropy."""
    loss = as_loss(algorithm.policy_loss(t), t)
    loss_N = loss.per_token
    if algorithm.is_corrected:
        weights_N, _ = algorithm.rollout_correction(t)
        loss_N = loss_N * weights_N
    if batch.ref_logprobs_N is not None and algorithm.kl_in == "loss":
        if batch.distilled is None:
            kl_N = algorithm.kl_estimator(batch.ref_logprobs_N - t.logprobs)
        else:
            kl_N = batch.distilled.kl_N  # over the vocabulary: the head has computed it, with its gradient
        loss_N = loss_N + algorithm.kl_coef * (kl_N * batch.kl_weights_N)
    if algorithm.entropy_coef:
        loss_N = loss_N - algorithm.entropy_coef * t.entropies
    return loss._replace(per_token=loss_N)


def as_loss(returned: Loss | Tensor, t: Tokens) -> Loss:
    """Fills in the fields that the function left out: they are needed for the metrics alone."""
    loss, nowhere = returned if isinstance(returned, Loss) else Loss(returned), torch.zeros_like(t.mask)
    return Loss(
        per_token=loss.per_token,
        ratio=token_ratio(t.logprobs, t.old_logprobs) if loss.ratio is None else loss.ratio,
        is_low=nowhere if loss.is_low is None else loss.is_low.bool(),
        is_high=nowhere if loss.is_high is None else loss.is_high.bool(),
        metrics=loss.metrics or {},
    )


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the sum where the mask is true. Elsewhere the gradient is exactly 0, also beside inf or nan."""
    return torch.where(mask, values, 0.0).sum()
