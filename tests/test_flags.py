"""The flags: mistakes are refused with a way out; the arithmetic of batches and rates; functions of the user's own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flags as flags_module
from flags import (
    FLAGS,
    GROUPS,
    AdamW,
    Lora,
    Memory,
    Sampling,
    algorithm_of,
    check_flags,
    free_on_resume,
    make_plan,
    parse_source,
    take,
)
from grpo import Graded, Tokens, as_loss
from helpers import ROOT, flags


def test_the_documented_qwq_batch_is_2560_completions_and_4_updates_a_step():
    args = flags(
        prompts_per_step=512,
        group_size=5,
        prompts_per_update=128,
        epochs=15,
        total_steps=None,
        micro_batch_tokens=16384,
    )
    check_flags(args, num_ranks=8)
    plan = make_plan(args, num_rows=12_000)
    assert (plan.completions_per_step, plan.updates_per_step, plan.steps_per_epoch) == (2560, 4, 23)
    assert (plan.total_steps, plan.total_updates) == (345, 1380)
    args.num_iterations = 2
    plan = make_plan(args, num_rows=12_000)
    assert (plan.updates_per_pass, plan.updates_per_step, plan.total_steps, plan.total_updates) == (4, 8, 345, 2760)


def test_a_kept_last_step_reaches_into_the_next_epoch():
    args = flags(prompts_per_step=1024, epochs=12, total_steps=None)
    args.keep_last = True
    plan = make_plan(args, num_rows=8_532)
    assert plan.steps_per_epoch == 8532 / 1024
    assert plan.total_steps == 100, "12 epochs are 99.98 steps"
    args.keep_last = False
    assert make_plan(args, num_rows=8_532).total_steps == 96


def test_episodes_are_completions_rounded_down_to_whole_steps():
    args = flags(prompts_per_step=14, group_size=16, prompts_per_update=7, total_episodes=10_000_000, total_steps=None)
    assert make_plan(args, num_rows=1000).total_steps == 44_642


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
        ({"micro_batch_tokens": 100}, 1, ["--micro_batch_tokens 100", "2048"]),
        ({"epochs": 2}, 1, ["2 of --total_steps", "exactly one"]),
        ({"total_steps": None}, 1, ["0 of --total_steps", "exactly one"]),
        ({"total_steps": None, "total_episodes": 100}, 1, ["--total_episodes 100", "256"]),
        ({"eval_every": 5}, 1, ["--eval_every 5", "--eval_data"]),
        ({"eval_before_training": True}, 1, ["--eval_before_training needs --eval_data"]),
        ({"total_steps": 0}, 1, ["--total_steps 0", "at least 1"]),
        ({"profile_steps": 0}, 1, ["--profile_steps 0", "at least 1"]),
        ({"temperature": 0.001}, 1, ["--temperature 0.001", "at least 0.01 and at most 100"]),
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
        ({"max_sampling_rounds": 3}, 1, ["--max_sampling_rounds 3", "--dynamic_sampling"]),
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


def test_too_few_rows_for_one_step_are_refused():
    with pytest.raises(ValueError, match="31 usable rows, fewer than --prompts_per_step 32"):
        make_plan(flags(), num_rows=31)


def rates(learning_rate: float, schedule: str, warmup: float, total_steps: int) -> list[float]:
    args = flags(learning_rate=learning_rate, lr_schedule=schedule, warmup_ratio=warmup, total_steps=total_steps)
    plan = make_plan(args, num_rows=32)
    return [plan.rate(u) for u in range(total_steps)]


def test_the_schedule_warms_up_to_the_peak_and_falls_without_a_wasted_update():
    assert rates(1.0, "linear", 1 / 3, 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert rates(2.0, "cosine", 0.0, 4) == pytest.approx([2.0, 1.7071, 1.0, 0.2929], abs=1e-4)
    assert set(rates(3.0, "constant", 0.0, 4)) == {3.0}


def test_an_update_knows_its_place_in_the_run():
    args = flags(prompts_per_update=8, num_iterations=2, total_steps=2, lr_schedule="linear", learning_rate=1, seed=7)
    plan = make_plan(args, num_rows=64)
    found = [plan.update(step, i) for step in (1, 2) for i in range(plan.updates_per_step)]
    assert [each.index for each in found] == list(range(16))
    assert [each.rate for each in found] == pytest.approx([1 - i / 16 for i in range(16)])
    assert [each.is_first for each in found] == ([True] + [False] * 7) * 2
    assert {(each.seed, each.max_grad_norm) for each in found} == {(7, 1.0)}


def test_what_may_change_when_a_run_continues():
    free = {
        "out_dir", "eval_every", "eval_before_training", "save_every", "keep_checkpoints", "async_checkpoint",
        "timeout_minutes", "max_skipped_updates", "reward_workers", "stop_after", "profile_steps", "micro_batch_tokens",
        "share_prompts", "gradient_checkpointing", "gpu_memory_utilization", "enforce_eager", "offload",
        "offload_reference", "offload_activations", "reduce_gradients_once", "gather_parameters_once", "compile_layers",
        "dry_run", "json", "trace", "plan_gpus", "plan_nodes", "plan_gpu", "plan_gpu_memory_gib",
        "plan_host_memory_gib", "plan_network_gb_s", "plan_rows", "plan_flops_share", "plan_memory_share",
        "plan_link_share", "plan_length_share",
    }  # fmt: skip
    length = {"total_steps", "epochs", "total_episodes"}
    assert free_on_resume(flags()) == free | length
    assert free_on_resume(flags(lr_schedule="cosine")) == free_on_resume(flags(warmup_ratio=0.1)) == free


def test_each_flag_is_declared_once_and_its_default_is_within_its_range():
    declared = [each.name for group in GROUPS.values() for each in group]
    assert len(declared) == len(set(declared)) == len(FLAGS)
    for each in FLAGS.values():
        low, high = each.within or (float("-inf"), float("inf"))
        values = each.value if isinstance(each.value, list) else [each.value]
        assert not each.within or all(value is None or low <= value <= high for value in values), each.name
        assert each.only_with is None or each.only_with in FLAGS, each.name


def test_lists_are_lists_of_their_type():
    args = flags()
    assert (args.profile_steps, args.eval_data, args.loss_args) == ([], [], [])
    assert (args.eval_samples, args.eval_max_completion_tokens) == ([1], [1024])
    assert (args.data_weights, args.lora_targets) == (None, None)
    given = "--model m --train_data a b --out_dir o --profile_steps 2 30 --eval_data c d --data_weights 1 0.5"
    args = flags_module.parse_flags(f"{given} --eval_samples 4 8 --lora_targets q_proj v_proj".split())
    assert (args.train_data, args.profile_steps, args.eval_data) == (["a", "b"], [2, 30], ["c", "d"])
    assert (args.data_weights, args.eval_samples, args.lora_targets) == ([1.0, 0.5], [4, 8], ["q_proj", "v_proj"])


def test_the_frozen_objects_have_the_defaults_of_the_flags_and_take_their_values():
    assert Memory() == take(Memory, flags()) and AdamW() == take(AdamW, flags()) and Lora() == take(Lora, flags())
    assert take(AdamW, flags(learning_rate=0.5, adam_beta2=0.95)) == AdamW(learning_rate=0.5, adam_beta2=0.95)
    assert take(Lora, flags(lora_targets="q_proj")).lora_targets == ("q_proj",)
    assert take(Sampling, flags(temperature=0.7), num_samples=5, top_p=0.9) == Sampling(5, 0.7, 1024, 0.9)
    with pytest.raises(AttributeError):
        Memory().dtype = "float32"


def test_a_source_is_what_split_and_rows(tmp_path):
    assert parse_source("owner/name@train#64") == ("owner/name", "train", 64)
    assert parse_source("a.jsonl#10") == ("a.jsonl", None, 10)
    assert parse_source("owner/name") == ("owner/name", None, None)
    (tmp_path / "x@y#3").touch()
    assert parse_source(str(tmp_path / "x@y#3")) == (str(tmp_path / "x@y#3"), None, None)


# The algorithm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantage": "rloo", "advantage_ddof": 0}, ["--advantage_ddof 0", "no effect", "leave it at 1"]),
        ({"advantage": "none", "advantage_eps": 1e-4}, ["--advantage_eps 0.0001", "no effect"]),
        ({"policy_loss": "sapo", "clip_high": 0.28}, ["--clip_high 0.28", "cispo"]),
        ({"policy_loss": "reinforce", "clip_low": 0.1}, ["--clip_low 0.1", "no effect"]),
        ({"policy_loss": "cispo", "dual_clip": 3}, ["--dual_clip 3", "gspo"]),
        ({"sapo_tau_neg": 2}, ["--sapo_tau_neg 2", "--policy_loss sapo"]),
        ({"loss_constant_tokens": 100}, ["--loss_constant_tokens 100", "leave it out", "seq_mean_token_sum_norm"]),
        ({"kl_coef": 0.1, "kl_estimator": "k2", "kl_clamp": 5}, ["--kl_clamp 5", "k3"]),
        ({"rollout_correction_max": 3}, ["--rollout_correction_max 3", "no effect"]),
        (
            {"rollout_correction": "token_truncate", "rollout_correction_min": 0.1},
            ["--rollout_correction_min 0.1", "mask"],
        ),
        ({"advantage": "ppo"}, ["--advantage ppo", "use grpo, ", "or FILE.py:FUNCTION"]),
        ({"policy_loss": "ppo"}, ["--policy_loss ppo", "use clip, ", "or FILE.py:FUNCTION"]),
        ({"kl_coef": 1, "kl_estimator": "k4"}, ["--kl_estimator k4", "use k1, k2, k3, k3+ or FILE.py:FUNCTION"]),
        ({"rollout_correction": "token_clip"}, ["--rollout_correction token_clip", "token_truncate"]),
        ({"loss_aggregation": "mean"}, ["--loss_aggregation mean", "use token_mean, "]),
        ({"loss_aggregation": "my.py:mean"}, ["--loss_aggregation my.py:mean", "use token_mean, "]),
    ],
)
def test_a_choice_that_is_not_there_or_a_flag_without_effect_is_refused(changes, words):
    args = flags(**changes)
    check_flags(args, num_ranks=1)
    with pytest.raises(ValueError) as error:
        algorithm_of(args)
    for word in words:
        assert word in str(error.value)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


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
    args = flags(**changes)
    check_flags(args, num_ranks=1)
    algorithm_of(args)


def test_the_log_states_every_choice():
    assert algorithm_of(flags()).description == (
        "algorithm: advantage grpo (advantage_ddof 1, advantage_eps 1e-06): (r - mean of group) / (std of group + eps)"
        "; loss clip (clip_low 0.2, clip_high 0.2, dual_clip 0): The larger of -A x ratio and -A x ratio clipped to "
        "[1 - clip_low, 1 + clip_high], with the ratio of the token; token_mean: Mean over all tokens of the update, "
        "as verl and EasyR1: long completions count more; no KL; one pass per rollout; temperature 1 in sampler and "
        "trainer"
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
        "num_iterations": 2,
    }
    changes |= {
        "rollout_correction": "token_mask",
        "dynamic_sampling": "correct",
        "truncated": "mask",
        "advantage_ddof": 0,
    }
    said = algorithm_of(flags(**changes)).description
    for words in (
        "reinforce++ (advantage_ddof 0, advantage_eps 1e-06): (return - mean over tokens of the step) / (std + eps);",
        "cispo (clip_low 1, clip_high 4): -A x logprob, weighted with the detached token ratio clipped to [1 - clip",
        "seq_mean_token_sum_norm (loss_constant_tokens 77): Mean over the completions of their token sums / a con",
        "KL 0.01 x k3 (kl_clamp 10): exp(x) - x - 1",
        ", in the reward;",
        "entropy bonus 0.001;",
        "token_mask (rollout_correction_min 0.5, rollout_correction_max 2): The ratio of the token inside [min, max]",
        "dynamic sampling by correct, at most 10 rounds;",
        "truncated: mask;",
        "2 passes per rollout;",
    ):
        assert words in said


@pytest.mark.parametrize("name", flags_module.CHOICES)
def test_each_choice_has_a_whole_first_sentence(name):
    for function in flags_module.functions_of(name).values():
        sentence = flags_module.summary(function)
        assert len(sentence) > 5 and sentence.count("(") == sentence.count(")"), sentence


# Functions of the user's own ------------------------------------------------------------------------------------------

OWN = '''"""Losses of one's own."""
from __future__ import annotations
from dataclasses import dataclass
import torch
from grpo import Loss, token_ratio
from scale_of_loss import SCALE

@dataclass
class Unused:
    x: int = 0

def good(t, *, clip_low, power, scale=SCALE):
    """-A x logprob^power. The rest is not said."""
    return Loss(-scale * t.advantages * t.logprobs**power - clip_low, token_ratio(t.logprobs, t.old_logprobs))
def tensor(t): return -t.advantages * t.logprobs
def no_parameter(): return 0
def not_after_the_star(t, clip_low): return t.logprobs
def wrong_shape(t): return t.logprobs.sum()
def no_tensor(t): return 1.0
def not_finite(t): return t.logprobs / 0
def no_gradient(t): return t.advantages
def detached(x): return x.detach() ** 2
def raises(t): raise KeyError("no such luck")
def wrong_mask(t): return Loss(t.logprobs, None, t.mask[:2])
def mask_of_numbers(t): return Loss(t.logprobs, None, t.advantages)
def of_completions(g, *, advantage_eps): return g.rewards_PG * 2 + advantage_eps
def of_tokens(g): return g.returns_T * 3
def of_groups(g): return g.rewards_PG.mean(dim=1)
def squared(x, *, kl_clamp): return x**2 * kl_clamp
NUMBER = 3
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "my_loss.py").write_text(OWN)
    (tmp_path / "scale_of_loss.py").write_text("SCALE = 2.0\n")
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    return str(tmp_path / "my_loss.py")


def tokens(number: int = 3) -> Tokens:
    logprobs, old, rollout = -torch.arange(1.0, 3 * number + 1).view(3, number)
    mask, ids = torch.ones(number, dtype=torch.bool), torch.zeros(number, dtype=torch.int64)
    return Tokens(logprobs.requires_grad_(), old, rollout, torch.tensor([1.0, -1.0, 0.5]), mask, ids)


def with_loss_args(own: str, function: str, *loss_args: str, **changes: object):
    args = flags(policy_loss=f"{own}:{function}", **changes)
    args.loss_args = list(loss_args)
    check_flags(args, num_ranks=1)
    return algorithm_of(args)


def test_a_loss_of_ones_own_takes_flags_and_loss_args(own):
    algorithm = with_loss_args(own, "good", "power=2", clip_low=0.25)
    t = tokens()
    loss = as_loss(algorithm.policy_loss(t), t)
    assert loss.per_token.tolist() == [-2 * a * x**2 - 0.25 for a, x in zip([1, -1, 0.5], [-1, -2, -3], strict=True)]
    assert loss.ratio.tolist() == pytest.approx([20.085537] * 3)
    assert not loss.is_low.any() and not loss.is_high.any()
    assert f"loss {own}:good (clip_low 0.25, power 2): -A x logprob^power;" in algorithm.description
    halved = with_loss_args(own, "good", "power=2", "scale=0.5").policy_loss(t)
    assert halved.per_token.tolist() == pytest.approx([-0.7, 1.8, -2.45])


def test_a_loss_of_ones_own_may_return_its_values_alone(own):
    t = tokens()
    loss = as_loss(with_loss_args(own, "tensor").policy_loss(t), t)
    assert loss.per_token.tolist() == [1, -2, 1.5]
    assert loss.ratio.tolist() == pytest.approx([20.085537] * 3), "the token ratio, for the metrics"


def test_an_advantage_of_ones_own_is_of_completions_or_of_tokens(own):
    graded = Graded(
        torch.tensor([[1.0, 0.0]]), torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2, 1]), torch.ones(3).bool()
    )
    of_completions = algorithm_of(flags(advantage=f"{own}:of_completions", advantage_eps=0.5))
    assert of_completions.advantage(graded).tolist() == [[2.5, 0.5]]
    assert algorithm_of(flags(advantage=f"{own}:of_tokens")).advantage(graded).tolist() == [3, 3, 0]


def test_a_kl_estimate_of_ones_own(own):
    algorithm = algorithm_of(flags(kl_coef=0.1, kl_estimator=f"{own}:squared", kl_clamp=5))
    assert algorithm.kl_estimator(torch.tensor([2.0])).tolist() == [20]
    algorithm_of(flags(kl_coef=0.1, kl_estimator=f"{own}:detached", kl_in="reward"))  # needs no gradient there


def test_a_flag_that_only_a_function_of_ones_own_uses_has_an_effect(own):
    with_loss_args(own, "good", "power=2", advantage="rloo", clip_low=0.3)
    args = flags(advantage=f"{own}:of_completions", policy_loss="reinforce", advantage_eps=1e-3)
    algorithm_of(args)


@pytest.mark.parametrize(
    ("changes", "loss_args", "words"),
    [
        ({"policy_loss": "no_such.py:f"}, [], ["no_such.py:f", "cannot be loaded", "No such file"]),
        ({"policy_loss": "broken.py:f"}, [], ["broken.py:f", "ModuleNotFoundError", "no_such_module"]),
        ({"policy_loss": "leaves.py:f"}, [], ["leaves.py:f", "cannot be loaded", "SystemExit: 3"]),
        ({"policy_loss": "my_loss.py:f"}, [], ["my_loss.py has no function 'f'", "it has ", "good"]),
        ({"policy_loss": "my_loss.py:NUMBER"}, [], ["no function 'NUMBER'"]),
        ({"policy_loss": "my_loss.py"}, [], ["--policy_loss", "my_loss.py", "FILE.py:FUNCTION"]),
        ({"policy_loss": "my_loss.py:no_parameter"}, [], ["no_parameter fails", "takes 0 positional arguments"]),
        ({"policy_loss": "my_loss.py:not_after_the_star"}, [], ["fails", "missing 1 required", "clip_low"]),
        ({"policy_loss": "my_loss.py:good"}, [], ["good: its parameter power has no value", "--loss_args power=VALUE"]),
        ({"policy_loss": "my_loss.py:good"}, ["power=2", "pwer=3"], ["--loss_args pwer", "leave it out"]),
        ({"policy_loss": "my_loss.py:good"}, ["power=2", "clip_low=0.1"], ["clip_low=0.1", "use --clip_low"]),
        ({"policy_loss": "my_loss.py:good"}, ["power=2", "power=3"], ["--loss_args power=3", "each name once"]),
        ({"policy_loss": "my_loss.py:good"}, ["power"], ["--loss_args power", "NAME=VALUE"]),
        ({"policy_loss": "my_loss.py:good"}, ["power=two"], ["fails on a trial", "TypeError"]),
        ({"policy_loss": "my_loss.py:good", "clip_high": 0.3}, ["power=2"], ["--clip_high 0.3 has no effect"]),
        ({}, ["power=2"], ["--loss_args power", "no function of yours"]),
        ({"policy_loss": "my_loss.py:wrong_shape"}, [], ["the shape []", "of the shape [7]"]),
        ({"policy_loss": "my_loss.py:no_tensor"}, [], ["returned a float", "of the shape [7]"]),
        ({"policy_loss": "my_loss.py:not_finite"}, [], ["not_finite returned values that are not finite"]),
        ({"policy_loss": "my_loss.py:no_gradient"}, [], ["without a gradient"]),
        ({"policy_loss": "my_loss.py:raises"}, [], ["fails on a trial with 7 tokens: KeyError: 'no such luck'"]),
        ({"policy_loss": "my_loss.py:wrong_mask"}, [], ["is_low: returned the shape [2]", "of the shape [7]"]),
        ({"policy_loss": "my_loss.py:mask_of_numbers"}, [], ["is_low: returned torch.float32", "torch.bool"]),
        ({"advantage": "my_loss.py:of_groups"}, [], ["the shape [1]", "of the shape [7] or [1, 2]"]),
        ({"kl_coef": 1, "kl_estimator": "my_loss.py:detached"}, [], ["--kl_estimator", "without a gradient"]),
    ],
)
def test_a_mistake_in_a_function_of_ones_own_is_told_in_a_sentence(changes, loss_args, words, own, monkeypatch):
    monkeypatch.chdir(Path(own).parent)
    args = flags(**changes)
    args.loss_args = loss_args
    with pytest.raises(ValueError) as error:
        algorithm_of(args)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_flags_are_read_without_torch():
    program = "import sys, flags; flags.check_flags(flags.parse_flags(sys.argv[1:])); assert 'torch' not in sys.modules"
    given = ["--model", "m", "--train_data", "d", "--out_dir", "o", "--total_steps", "1"]
    subprocess.run([sys.executable, "-c", program, *given], cwd=ROOT, check=True)
