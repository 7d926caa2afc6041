"""The flags of the algorithm, which of them go together, and the sentence that says what they amount to.

Each flag names a function or a branch of `grpo.py`, where the equations and their sources are. A flag that would do nothing beside
the others is refused: a clip or a KL term that its author believes in and that is not there is a wrong result that nobody notices.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

ADVANTAGES = ("grpo", "grpo_batch_std", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "none")
NORMALISED = (
    "grpo",
    "grpo_batch_std",
    "reinforce++",
    "reinforce++_baseline",
)  # advantages that are divided by a standard deviation
POLICY_LOSSES = ("clip", "gspo", "gspo_token", "cispo", "sapo", "reinforce")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")
CORRECTIONS = ("none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask")


def add_algorithm_flags(parser: ArgumentParser) -> None:
    """Every choice of the algorithm but rewards, batch sizes and temperature."""
    add = parser.add_argument_group("advantage").add_argument
    says = "reward - group mean over the group's std (grpo) or over that of the step (grpo_batch_std) or as it is (dr_grpo); reward - mean of "
    says += "the others (rloo); standardised over all tokens of the step, without and with the group mean taken off first (reinforce++, "
    add(
        "--advantage", choices=ADVANTAGES, default="grpo", help=says + "reinforce++_baseline); the reward itself (none)"
    )
    add(
        "--advantage_ddof",
        type=int,
        default=1,
        help="the std divides by the count minus this: 1 (EasyR1, TRL, verl) or 0",
    )
    add("--advantage_eps", type=float, default=1e-6, help="added to the std (EasyR1, verl: 1e-6; TRL: 1e-4)")
    says = "DAPO: groups without signal are replaced by newly sampled prompts; signal: some completions but not all are right (right), or "
    add(
        "--dynamic_sampling",
        choices=["off", "right", "reward"],
        default="off",
        help=says + "not all rewards are equal (reward)",
    )
    says = "with --dynamic_sampling: after so many rounds of sampling in a step, groups without signal fill what is missing of P"
    add("--max_sampling_rounds", type=int, default=10, help=says)

    add = parser.add_argument_group("policy loss").add_argument
    says = "clipped ratio of the token (clip: PPO, GRPO, DAPO) or of the sequence (gspo; gspo_token with token-level gradient); "
    says += "clipped weight on the log-prob (cispo); soft gate (sapo); no ratio (reinforce)"
    add("--policy_loss", choices=POLICY_LOSSES, default="clip", help=says)
    add(
        "--clip_low",
        type=float,
        default=0.2,
        help="the ratio pi / pi_old is clipped below 1 - this (cispo: 1 is no lower bound)",
    )
    add("--clip_high", type=float, default=0.2, help="the ratio pi / pi_old is clipped above 1 + this")
    add(
        "--dual_clip",
        type=float,
        default=0.0,
        help="where A < 0 the loss is at most -A x this (above 1; EasyR1, verl: 3); 0: no such bound",
    )
    add("--sapo_tau_pos", type=float, default=1.0, help="steepness of SAPO's gate where A > 0")
    add("--sapo_tau_neg", type=float, default=1.05, help="steepness of SAPO's gate where A <= 0")
    says = "mean over all tokens of the update (token_mean); mean over its completions of their token means (seq_mean_token_mean), or "
    says += "of their token sums over a constant (seq_mean_token_sum_norm: Dr. GRPO)"
    add("--loss_aggregation", choices=AGGREGATIONS, default="token_mean", help=says)
    add(
        "--loss_constant_tokens",
        type=int,
        help="the constant of seq_mean_token_sum_norm; default: --max_completion_tokens",
    )
    add(
        "--entropy_coef",
        type=float,
        default=0.0,
        help="weight of the entropy of the token distribution, which is subtracted from the loss",
    )

    add = parser.add_argument_group("KL to the reference").add_argument
    add("--kl_coef", type=float, default=0.0, help="weight of KL(policy || reference); 0: no reference is loaded")
    add(
        "--kl_estimator",
        choices=KL_ESTIMATORS,
        default="k3",
        help="Schulman's estimators; k3+ has the value of k3 and the gradient of k2",
    )
    says = "k3: log-ratio within +-20, value within +- this (EasyR1, verl: 10; a clamped token has no gradient); 0: no clamps (TRL)"
    add("--kl_clamp", type=float, default=10.0, help=says)
    add(
        "--kl_in",
        choices=["loss", "reward"],
        default="loss",
        help="a term of the loss, or taken off the reward before the advantage is made",
    )

    add = parser.add_argument_group("sampler-trainer mismatch").add_argument
    says = "weight of the policy loss: the ratio trainer / sampler under the same model weights, per token or sequence, at most the maximum "
    add(
        "--rollout_correction",
        choices=CORRECTIONS,
        default="none",
        help=says + "(truncate) or 0 outside the range (mask: IcePop)",
    )
    add(
        "--rollout_correction_max",
        type=float,
        default=2.0,
        help="largest ratio (truncated importance sampling: 2; IcePop: 5)",
    )
    add("--rollout_correction_min", type=float, default=0.5, help="smallest ratio that is not masked (IcePop: 0.5)")


def check_effects(
    args: Namespace, add_flags: Callable[[ArgumentParser], None], needs: list[tuple[tuple[str, ...], bool, str]]
) -> None:
    """Raises ValueError for a flag that was changed and does nothing. `needs`: (flags, whether they do something, where they would)."""
    parser = ArgumentParser()
    add_flags(parser)
    defaults = vars(parser.parse_args([]))
    for names, has_effect, where in needs:
        for name in names:
            if not has_effect and getattr(args, name) != defaults[name]:
                default = "leave it out" if defaults[name] is None else f"leave it at {defaults[name]}"
                raise ValueError(
                    f"--{name} {getattr(args, name)} has no effect here, only with {where}: {default}, or change the other."
                )


def check_algorithm(args: Namespace) -> None:
    """Raises ValueError for flags of the algorithm that contradict each other, or that do nothing beside the others."""
    clips = args.policy_loss in ("clip", "gspo", "gspo_token")
    needs = [  # (flags, whether they do something, where they would)
        (("advantage_ddof", "advantage_eps"), args.advantage in NORMALISED, f"--advantage {', '.join(NORMALISED)}"),
        (("max_sampling_rounds",), args.dynamic_sampling != "off", "--dynamic_sampling"),
        (
            ("clip_low", "clip_high"),
            clips or args.policy_loss == "cispo",
            "--policy_loss clip, gspo, gspo_token, cispo",
        ),
        (("dual_clip",), clips, "--policy_loss clip, gspo, gspo_token"),
        (("sapo_tau_pos", "sapo_tau_neg"), args.policy_loss == "sapo", "--policy_loss sapo"),
        (
            ("loss_constant_tokens",),
            args.loss_aggregation == "seq_mean_token_sum_norm",
            "--loss_aggregation seq_mean_token_sum_norm",
        ),
        (("kl_estimator", "kl_clamp", "kl_in"), args.kl_coef > 0, "--kl_coef above 0"),
        (("kl_clamp",), args.kl_estimator in ("k3", "k3+"), "--kl_estimator k3, k3+"),
        (("rollout_correction_max",), args.rollout_correction != "none", "--rollout_correction"),
        (
            ("rollout_correction_min",),
            args.rollout_correction.endswith("mask"),
            "--rollout_correction token_mask, sequence_mask",
        ),
    ]
    check_effects(args, add_algorithm_flags, needs)
    if args.advantage_ddof not in (0, 1):
        raise ValueError(f"--advantage_ddof {args.advantage_ddof}: must be 0 or 1.")
    if 0 < args.dual_clip <= 1:
        raise ValueError(f"--dual_clip {args.dual_clip:g}: must be above 1, or 0 for none.")
    low, high = args.rollout_correction_min, args.rollout_correction_max
    if args.rollout_correction.endswith("mask") and low >= high:
        raise ValueError(f"--rollout_correction_min {low:g} must be below --rollout_correction_max {high:g}.")
    if args.kl_in == "reward" and args.kl_estimator == "k3+":
        raise ValueError(
            "--kl_estimator k3+ differs from k3 in its gradient alone, and with --kl_in reward there is none: use k3."
        )
    if args.kl_in == "reward" and args.advantage == "reinforce++" and args.policy_loss == "gspo":
        reason = "weighs whole sequences, but --advantage reinforce++ with --kl_in reward differs from token to token"
        raise ValueError(f"--policy_loss gspo {reason}: use gspo_token.")
    if args.dynamic_sampling != "off" and args.epochs is not None:
        raise ValueError(
            f"--epochs {args.epochs}: with --dynamic_sampling the steps in an epoch are known only afterwards; give --total_steps."
        )
    if args.dynamic_sampling != "off" and args.keep_last:
        raise ValueError(
            "--keep_last has no effect with --dynamic_sampling, which goes through all epochs in a row anyway: leave it out."
        )


def describe_algorithm(args: Namespace) -> str:
    """What the flags amount to, in words and equations: for the first lines of the log."""
    std = f"std (ddof {args.advantage_ddof}) + {args.advantage_eps:g}"
    advantage = {
        "grpo": f"(r - mean of group) / (group {std})",
        "grpo_batch_std": f"(r - mean of group) / (the step's {std})",
        "dr_grpo": "r - mean of group",
        "rloo": "r - mean of the group's others",
        "reinforce++": f"(return - mean over tokens of the step) / ({std})",
        "reinforce++_baseline": f"r - mean of group, then (. - mean over tokens of the step) / ({std})",
        "none": "r",
    }[args.advantage]
    bounds = f"[{1 - args.clip_low:g}, {1 + args.clip_high:g}]"
    loss = {
        "clip": f"token ratio in {bounds}",
        "gspo": f"sequence ratio in {bounds}",
        "gspo_token": f"sequence ratio with token gradient in {bounds}",
        "cispo": f"logprob x detached ratio in {bounds}",
        "sapo": f"soft gate of tau {args.sapo_tau_pos:g} / {args.sapo_tau_neg:g}",
        "reinforce": "logprob, no ratio",
    }[args.policy_loss]
    constant = args.loss_constant_tokens or args.max_completion_tokens
    parts = [
        f"advantage {args.advantage}: {advantage}",
        f"loss {args.policy_loss}: {loss}" + (f", at most {args.dual_clip:g} x -A" if args.dual_clip else ""),
        args.loss_aggregation
        + (f" over {constant} tokens" if args.loss_aggregation == "seq_mean_token_sum_norm" else ""),
    ]
    if args.kl_coef:
        has_clamp = args.kl_clamp and args.kl_estimator.startswith("k3")
        parts.append(
            f"KL {args.kl_coef:g} x {args.kl_estimator}{f' (clamped to {args.kl_clamp:g})' if has_clamp else ''} in the {args.kl_in}"
        )
    else:
        parts.append("no KL")
    if args.entropy_coef:
        parts.append(f"entropy bonus {args.entropy_coef:g}")
    if args.rollout_correction != "none":
        low = args.rollout_correction_min if args.rollout_correction.endswith("mask") else 0
        parts.append(f"rollout correction {args.rollout_correction} to [{low:g}, {args.rollout_correction_max:g}]")
    if args.dynamic_sampling != "off":
        parts.append(f"dynamic sampling by {args.dynamic_sampling}, at most {args.max_sampling_rounds} rounds")
    if args.truncated != "score":
        parts.append(f"truncated: {args.truncated}")
    parts.append(f"{args.passes_per_step} passes a step" if args.passes_per_step > 1 else "one pass a step")
    return "algorithm: " + "; ".join(parts) + f"; temperature {args.temperature:g} in sampler and trainer"
