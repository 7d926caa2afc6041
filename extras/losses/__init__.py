"""Losses, advantages and corrections beyond the common ones, one paper a file: `--policy_loss gmpo`, for example.

The seam: `algorithm.py` reads `NAMES`, and imports a file when a flag names its function. Each file names its source.
To write your own, copy one, and give `--policy_loss my_loss.py:f`, or name it here.
"""

NAMES: dict[str, dict[str, str]] = {  # flag -> name -> module:function
    "--advantage": {
        "maxrl": "extras.losses.maxrl:maxrl",
        "mt_grpo": "extras.losses.mt_grpo:mt_grpo",
        "reinforce++": "extras.losses.reinforce_pp:reinforce_pp",
        "reinforce++_baseline": "extras.losses.reinforce_pp:reinforce_pp_baseline",
        "gdpo": "extras.losses.gdpo:gdpo",
        "opo": "extras.losses.opo:opo",
        "pass_at_k": "extras.losses.pass_at_k:pass_at_k",
        "gigpo": "extras.losses.gigpo:gigpo",
        "gpg": "extras.losses.gpg:gpg",
        "a_star_po": "extras.losses.a_star_po:optimal_advantage",
    },
    "--policy_loss": {
        "gspo": "extras.losses.gspo:gspo",
        "gspo_token": "extras.losses.gspo:gspo_token",
        "cispo": "extras.losses.cispo:cispo",
        "sapo": "extras.losses.sapo:sapo",
        "dppo": "extras.losses.dppo:dppo",
        "dppo_kl": "extras.losses.dppo:dppo_kl",
        "gmpo": "extras.losses.gmpo:gmpo",
        "vespo": "extras.losses.vespo:vespo",
        "off_policy_mask": "extras.losses.off_policy_mask:off_policy_mask",
        "high_entropy": "extras.losses.high_entropy:high_entropy",
        "clip_cov": "extras.losses.cov:clip_cov",
        "kl_cov": "extras.losses.cov:kl_cov",
        "fipo": "extras.losses.fipo:fipo",
        "rlsd": "extras.losses.rlsd:rlsd",
        "dis": "extras.losses.dis:dis",
        "a_star_po": "extras.losses.a_star_po:a_star_po",
    },
    "--kl_estimator": {"k3+": "extras.losses.k3_plus:k3_plus"},
    "--rollout_correction": {
        "token_truncate": "extras.losses.corrections:token_truncate",
        "sequence_truncate": "extras.losses.corrections:sequence_truncate",
        "token_mask": "extras.losses.corrections:token_mask",
        "sequence_mask": "extras.losses.corrections:sequence_mask",
    },
}
