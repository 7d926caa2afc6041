"""CISPO: no token loses its gradient; its weight is clipped: --policy_loss cispo"""

from grpo import Loss, Tokens, token_ratio


def cispo(t: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """-A x logprob, weighted with the detached token ratio clipped to [1 - clip_low, 1 + clip_high].

    CISPO, MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5: no token loses its gradient. The paper has no lower bound
    (clip_low 1) and tunes clip_high alone; TRL's `epsilon_high` is our 1 + clip_high.
    """
    ratio = token_ratio(t.logprobs, t.old_logprobs)
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return Loss(-weight * t.advantages * t.logprobs, ratio, ratio < 1.0 - clip_low, ratio > 1.0 + clip_high)
