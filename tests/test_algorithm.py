"""The flags of the algorithm: what contradicts itself or would do nothing is refused, and the log says what is computed."""

import pytest

from algorithm import check_algorithm, describe_algorithm
from helpers import flags


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantage": "rloo", "advantage_ddof": 0}, ["--advantage_ddof 0", "no effect", "leave it at 1"]),
        ({"advantage": "none", "advantage_eps": 1e-4}, ["--advantage_eps 0.0001", "no effect"]),
        ({"advantage_ddof": 2}, ["--advantage_ddof 2", "0 or 1"]),
        ({"max_sampling_rounds": 3}, ["--max_sampling_rounds 3", "--dynamic_sampling"]),
        ({"policy_loss": "sapo", "clip_high": 0.28}, ["--clip_high 0.28", "cispo"]),
        ({"policy_loss": "reinforce", "clip_low": 0.1}, ["--clip_low 0.1", "no effect"]),
        ({"policy_loss": "cispo", "dual_clip": 3}, ["--dual_clip 3", "gspo"]),
        ({"dual_clip": 0.5}, ["--dual_clip 0.5", "above 1"]),
        ({"sapo_tau_neg": 2}, ["--sapo_tau_neg 2", "--policy_loss sapo"]),
        ({"loss_constant_tokens": 100}, ["--loss_constant_tokens 100", "leave it out", "seq_mean_token_sum_norm"]),
        ({"kl_estimator": "k1"}, ["--kl_estimator k1", "--kl_coef above 0"]),
        ({"kl_in": "reward"}, ["--kl_in reward", "--kl_coef above 0"]),
        ({"kl_coef": 0.1, "kl_estimator": "k2", "kl_clamp": 5}, ["--kl_clamp 5", "k3"]),
        ({"kl_coef": 0.1, "kl_estimator": "k3+", "kl_in": "reward"}, ["k3+", "use k3"]),
        ({"rollout_correction_max": 3}, ["--rollout_correction_max 3", "no effect"]),
        (
            {"rollout_correction": "token_truncate", "rollout_correction_min": 0.1},
            ["--rollout_correction_min 0.1", "mask"],
        ),
        (
            {"rollout_correction": "token_mask", "rollout_correction_min": 2.5},
            ["--rollout_correction_min 2.5", "below", "2"],
        ),
        (
            {"advantage": "reinforce++", "policy_loss": "gspo", "kl_coef": 1, "kl_in": "reward"},
            ["gspo", "use gspo_token"],
        ),
        ({"dynamic_sampling": "right", "epochs": 2, "total_steps": None}, ["--epochs 2", "give --total_steps"]),
        ({"dynamic_sampling": "right", "keep_last": True}, ["--keep_last", "no effect"]),
    ],
)
def test_what_contradicts_itself_or_has_no_effect_is_refused(changes, words):
    with pytest.raises(ValueError) as error:
        check_algorithm(flags(**changes))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"advantage": "grpo_batch_std", "advantage_ddof": 0, "advantage_eps": 1e-4},
        {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 3},
        {"policy_loss": "sapo", "sapo_tau_pos": 2, "entropy_coef": 0.001},
        {"loss_aggregation": "seq_mean_token_sum_norm", "loss_constant_tokens": 100},
        {"kl_coef": 0.1, "kl_estimator": "k3+", "kl_clamp": 0},
        {
            "advantage": "reinforce++",
            "policy_loss": "gspo_token",
            "kl_coef": 0.1,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
        {"rollout_correction": "sequence_mask", "rollout_correction_min": 0.1, "rollout_correction_max": 3},
        {"dynamic_sampling": "reward", "max_sampling_rounds": 2},
    ],
)
def test_what_goes_together_is_accepted(changes):
    check_algorithm(flags(**changes))


def test_the_log_states_every_choice():
    assert describe_algorithm(flags()) == (
        "algorithm: advantage grpo: (r - mean of group) / (group std (ddof 1) + 1e-06); loss clip: token ratio in [0.8, 1.2]; token_mean; "
        "no KL; one pass a step; temperature 1 in sampler and trainer"
    )
    changes = {
        "advantage": "reinforce++",
        "policy_loss": "cispo",
        "clip_low": 1,
        "clip_high": 4,
        "kl_coef": 0.01,
        "kl_in": "reward",
    }
    changes |= {
        "loss_aggregation": "seq_mean_token_sum_norm",
        "max_completion_tokens": 77,
        "entropy_coef": 0.001,
        "passes_per_step": 2,
    }
    changes |= {
        "rollout_correction": "token_mask",
        "dynamic_sampling": "right",
        "truncated": "mask",
        "advantage_ddof": 0,
    }
    said = describe_algorithm(flags(**changes))
    for words in (
        "reinforce++: (return - mean over tokens of the step) / (std (ddof 0) + 1e-06)",
        "cispo: logprob x detached ratio in [0, 5]",
        "over 77 tokens",
        "KL 0.01 x k3 (clamped to 10) in the reward",
        "entropy bonus 0.001",
        "token_mask to [0.5, 2]",
        "dynamic sampling by right, at most 10 rounds",
        "truncated: mask",
        "2 passes",
    ):
        assert words in said
