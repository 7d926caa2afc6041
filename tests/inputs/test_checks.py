"""Mistakes in the flags are refused with a way out, before torch is imported."""

import subprocess
import sys

import pytest

from helpers import ROOT, flags
from inputs.checks import check_flags


@pytest.mark.parametrize(
    ("changes", "num_ranks", "words"),
    [
        ({"group_size": 1}, 1, ["--group_size 1", "at least 2"]),
        ({"prompts_per_step": 100, "prompts_per_update": 100}, 8, ["--prompts_per_step 100", "8 engines", "96 or 104"]),
        ({"prompts_per_step": 3, "prompts_per_update": 3}, 2, ["--prompts_per_step 3", "2 engines", "2 or 4"]),
        ({"prompts_per_step": 3, "prompts_per_update": 3}, 4, ["--prompts_per_step 3", "4 engines", "use 4."]),
        (
            {"prompts_per_step": 12, "prompts_per_update": 8},
            2,
            ["--prompts_per_update 8", "--prompts_per_step 12", "1, 2, 3, 4, 6, 12"],
        ),
        ({"tensor_parallel_size": 2}, 1, ["--tensor_parallel_size 2", "world size 1", "use one of 1."]),
        ({"tensor_parallel_size": 3}, 4, ["--tensor_parallel_size 3", "world size 4", "use one of 1, 2, 4."]),
        ({"tensor_parallel_size": 0}, 4, ["--tensor_parallel_size 0", "at least 1"]),
        ({"shard_ranks": 3}, 4, ["--shard_ranks 3", "world size 4", "use one of 1, 2, 4."]),
        ({"shard_ranks": 8}, 4, ["--shard_ranks 8 does not divide the world size 4", "use one of 1, 2, 4."]),
        ({"micro_batch_tokens": 100}, 1, ["--micro_batch_tokens 100", "2048"]),
        ({"max_kl": 0.1}, 1, ["--max_kl 0.1 has no effect with one update a step", "leave it out"]),
        ({"epochs": 2}, 1, ["2 of --total_steps", "exactly one"]),
        ({"total_steps": None}, 1, ["0 of --total_steps", "exactly one"]),
        ({"total_steps": None, "total_episodes": 100}, 1, ["--total_episodes 100", "256"]),
        (
            {"reward_timeout": 600, "reward_retries": 3},
            2,
            ["lets a completion be graded for 40 minutes", "wait --timeout"],
        ),
        ({"reward_retries": 101}, 1, ["--reward_retries 101", "at most 100"]),
        ({"eval_every": 5}, 1, ["--eval_every 5", "--eval_data"]),
        ({"eval_before_training": True}, 1, ["--eval_before_training needs --eval_data"]),
        ({"keep_best": "eval/d/avg@1"}, 1, ["--keep_best eval/d/avg@1 is not evaluated", "with --eval_data"]),
        (
            {
                "keep_best": "eval/d/avg@1",
                "eval_data": "x/d.jsonl",
                "eval_samples": 3,
                "eval_every": 1,
                "save_every": 1,
            },
            1,
            ["--keep_best eval/d/avg@1 is not evaluated", "eval/d/avg@3, eval/d/pass@2, eval/d/pass@3, eval/d/maj@3."],
        ),
        (
            {"keep_best": "eval/d/avg@1", "eval_data": "x/d.jsonl", "eval_every": 10, "save_every": 15},
            1,
            ["--keep_best", "a value for each checkpoint", "--save_every 15", "--eval_every 10", "multiple"],
        ),
        (
            {"keep_best": "eval/d/avg@1", "eval_data": "x/d.jsonl", "eval_every": 10},
            1,
            ["--save_every 0", "make the first a multiple"],
        ),
        ({"total_steps": 0}, 1, ["--total_steps 0", "at least 1"]),
        ({"profile_steps": 0}, 1, ["--profile_steps 0", "at least 1"]),
        ({"temperature": 0.001}, 1, ["--temperature 0.001", "at least 0.01 and at most 2"]),
        ({"learning_rate": -1}, 1, ["--learning_rate -1", "at least 0"]),
        ({"learning_rate": "nan"}, 1, ["--learning_rate nan", "at least 0"]),
        ({"adam_beta1": 1.5}, 1, ["--adam_beta1 1.5", "at most 0.99999"]),
        ({"gpu_memory_utilization": 7}, 1, ["--gpu_memory_utilization 7", "at most 1"]),
        ({"warmup_ratio": 3}, 1, ["--warmup_ratio 3", "at least 0 and at most 1"]),
        ({"reward_timeout": 0}, 1, ["--reward_timeout 0", "above 0"]),
        ({"eval_data": "d", "eval_top_p": 0}, 1, ["--eval_top_p 0", "above 0 and at most 1"]),
        (
            {"param_dtype": "bfloat16", "dtype": "float32"},
            1,
            ["--dtype float32", "--param_dtype bfloat16", "leave one of them out"],
        ),
        ({"param_dtype": "bfloat16", "lora_rank": 8}, 1, ["--param_dtype bfloat16 has no effect", "--lora_rank 8"]),
        (
            {"offload_reference": True, "lora_rank": 8, "kl_coef": 1},
            1,
            ["--offload_reference has no effect", "adapter"],
        ),
        ({"offload_reference": True}, 1, ["--offload_reference has no effect", "--kl_coef above 0", "leave it out"]),
        ({"lora_alpha": 16}, 1, ["--lora_alpha 16", "no effect", "--lora_rank above 0", "leave it at 32"]),
        ({"lora_targets": "q_proj"}, 1, ["--lora_targets q_proj", "no effect", "leave it out"]),
        ({"advantage_ddof": 2}, 1, ["--advantage_ddof 2", "at least 0 and at most 1"]),
        ({"dual_clip": 0.5}, 1, ["--dual_clip 0.5", "above 1"]),
        ({"kl_estimator": "k1"}, 1, ["--kl_estimator k1", "--kl_coef above 0"]),
        ({"kl_in": "reward"}, 1, ["--kl_in reward", "--kl_coef above 0"]),
        ({"kl_coef": 0.1, "kl_estimator": "k3+", "kl_in": "reward"}, 1, ["k3+", "use k3"]),
        (
            {"rollout_correction": "token_mask", "rollout_correction_min": 2.5},
            1,
            ["--rollout_correction_min 2.5", "below", "2"],
        ),
        (
            {"advantage": "reinforce++", "policy_loss": "gspo", "kl_coef": 1, "kl_in": "reward"},
            1,
            ["gspo", "use gspo_token"],
        ),
        ({"dynamic_sampling": "correct", "epochs": 2, "total_steps": None}, 1, ["--epochs 2", "give --total_steps"]),
        ({"dynamic_sampling": "correct", "keep_last": True}, 1, ["--keep_last", "no effect"]),
    ],
)
def test_flags_that_contradict_each_other_are_named_with_a_way_out(changes, num_ranks, words):
    with pytest.raises(ValueError) as error:
        check_flags(flags(**changes), num_ranks)
    for word in words:
        assert word in str(error.value)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_the_best_checkpoint_is_chosen_by_what_is_evaluated_for_each():
    evaluated = {"eval_data": "owner/sums@test[:9]", "eval_samples": 4, "eval_every": 5, "save_every": 10}
    check_flags(flags(**evaluated, keep_best="eval/sums_test[:9]/maj@4"))


def test_the_engines_are_counted_not_the_ranks(monkeypatch):
    changes = {"prompts_per_step": 4, "prompts_per_update": 4}
    check_flags(flags(**changes, tensor_parallel_size=2), num_ranks=8)
    monkeypatch.setenv("WORLD_SIZE", "8")
    check_flags(flags(**changes, tensor_parallel_size=2))
    with pytest.raises(ValueError, match="8 engines"):
        check_flags(flags(**changes))


def test_a_choice_that_argparse_knows_ends_the_program(capsys):
    for wrong in ({"kl_in": "rewards"}, {"dtype": "float16"}, {"plan_gpu": "H300"}, {"group_size": "8.5"}):
        with pytest.raises(SystemExit):
            flags(**wrong)
    assert "invalid choice: 'H300' (choose from " in capsys.readouterr().err


def test_flags_are_read_without_torch():
    program = (
        "import sys; from inputs.checks import check_flags; from inputs.command_line import parse_flags; "
        "check_flags(parse_flags(sys.argv[1:])); assert 'torch' not in sys.modules"
    )
    given = ["--model", "m", "--train_data", "d", "--out_dir", "o", "--total_steps", "1"]
    subprocess.run([sys.executable, "-c", program, *given], cwd=ROOT, check=True)
