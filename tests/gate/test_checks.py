"""Mistakes in the flags are refused with a way out, before torch is imported."""

import sys

import pytest

from command_line import parse_flags
from gate.checks import check_flags
from gate.choices import check_choices
from helpers.made_up import flags
from helpers.runs import said

NO_STEPS = "(without --total_steps)"
VOCABULARY, NO_REWARD = "--kl_coef 1 --kl_over vocabulary", "--advantage zero --kl_coef 1 --reward none"
MOVING = "--kl_coef 1 --reference_every 5"
BEST = "--keep_best eval/d/avg@1 --eval_data x/d.jsonl"
MISTAKES = [  # ranks, flags beside the required ones, what the sentence says
    (1, "--group_size 1", "--group_size 1 has nothing to compare with for --advantage grpo; use 2 or more"),
    (1, "--reference r", "--reference r has no effect here, only with --kl_coef above 0"),
    (1, "--kl_coef 1 --kl_direction forward", "--kl_direction forward .* only with --kl_over vocabulary: leave it out"),
    (1, f"{VOCABULARY} --kl_in reward", "--kl_over vocabulary with --kl_in reward: a reward takes the KL of sampled"),
    (1, f"{VOCABULARY} --kl_estimator k2", "--kl_over vocabulary with --kl_estimator k2: .* exact; leave"),
    (1, "--advantage zero", "--advantage zero needs --kl_coef: it trains on nothing but the KL in the loss"),
    (1, "--advantage zero --kl_coef 1 --kl_estimator k1", "gradient of mean zero, .* learns nothing"),
    (1, "--advantage zero --kl_coef 1", "--advantage zero follows the reference, which is --model itself: give"),
    (1, "--reward none", "--reward none grades nothing for --advantage grpo to compare; give --advantage zero"),
    (1, f"{NO_REWARD} --dynamic_sampling reward", "--dynamic_sampling needs a reward"),
    (1, f"{NO_REWARD} --eval_data d --eval_every 1", "--eval_data needs a reward; leave it out, or give one"),
    (1, "--kl_coef 1 --hint_column h --image_column i", "--hint_column h with --image_column i: .* leave one of them"),
    (1, "--reference_every 5", "--reference_every 5 has no effect here, only with --kl_coef above 0"),
    (1, f"{MOVING} --lora_rank 8", "--lora_rank 8 with --reference_every 5: .* adapter off, which never"),
    (1, f"{MOVING} --reference r", "--reference_every 5 with --reference r: .* began as --model; leave one"),
    (1, "--kl_coef 1 --reference_mixup 0.5", "--reference_mixup 0.5 .* only with --reference_every above 0"),
    (1, "--kl_coef 1 --hint_column @groups", "--hint_column @groups: use a column, or @group, @feedback or both"),
    (1, "--kl_coef 1 --hint_column @group --kl_in reward", "--hint_column @group is for --kl_in loss"),
    (1, f"{NO_REWARD} --hint_column @group", "--hint_column @group .*; give a reward, .* not --reward none"),
    (1, "--kl_coef 1 --hint_column @feedback", "@feedback with --reward exact, which says nothing in words; give"),
    (8, "--prompts_per_step 100 --prompts_per_update 100", "--prompts_per_step 100 .* 8 engines .*; use 96 or 104"),
    (2, "--prompts_per_step 12 --prompts_per_update 8", "_update 8 .*--prompts_per_step 12; .* 1, 2, 3, 4, 6, 12"),
    (1, "--tensor_parallel_size 2", "--tensor_parallel_size 2 .* world size 1; use one of 1"),
    (4, "--shard_ranks 3", "--shard_ranks 3 does not divide the world size 4; use one of 1, 2, 4"),
    (1, "--micro_batch_tokens 100", "--micro_batch_tokens 100 cannot hold one sequence .* 2048"),
    (1, NO_STEPS, "0 of --total_steps.* exactly one"),
    (1, f"{NO_STEPS} --total_episodes 100", "--total_episodes 100 is less than one step.* at least 256"),
    (1, f"{NO_STEPS} --dynamic_sampling correct --epochs 2", "--dynamic_sampling correct with --epochs 2: .* no fixed"),
    (1, "--router_replay --partial_rollouts", "--router_replay with --partial_rollouts: routes are known of what"),
    (1, "--eval_every 5", "--eval_every 5 has no effect here, only with --eval_data: leave"),
    (1, "--keep_best eval/d/avg@1", "--keep_best eval/d/avg@1 is not evaluated; .* with --eval_data"),
    (1, f"{BEST} --eval_samples 3 --eval_every 1", "not evaluated; .*/avg@3, .*/pass@2, .*/pass@3, eval/d/maj@3"),
    (1, f"{BEST} --eval_every 10 --save_every 15", "each checkpoint, not --save_every 15 .*_every 10; .* a multiple"),
    (1, "--temperature 0.001", "--temperature 0.001: must be at least 0.01 and at most 2"),
    (1, "--learning_rate nan", "--learning_rate nan: must be at least 0"),
    (1, "--learning_rate inf", "--learning_rate inf: must be at least 0 and finite"),
    (1, "--plan_gpu H300", "--plan_gpu H300: use B200-180GB, .*, RTX3090-24GB, or memory, dense bf16 speed"),
    (1, "--plan_gpu A100", "--plan_gpu A100: use A100-80GB, A100-40GB, or memory"),
    (1, "--plan_gpu 24GiB:0TFLOPs:1TBs", "--plan_gpu 24GiB:0TFLOPs:1TBs: use .*, such as 23.5GiB:71TFLOPs:0.94TBs"),
    (1, "--reward_timeout 0", "--reward_timeout 0: must be above 0 and at most 1000000"),
    (1, "--eval_data d --eval_samples 1 0", "--eval_samples 0: must be at least 1"),
    (1, "--param_dtype bfloat16 --dtype float32", "--param_dtype bfloat16 with --dtype float32: .* finely"),
    (1, "--param_dtype bfloat16 --lora_rank 8", "--lora_rank 8 with --param_dtype bfloat16: adapters are"),
    (1, "--head_dtype bfloat16 --dtype float32", "--head_dtype bfloat16 with --dtype float32: .* would round"),
    (1, "--lora_alpha 16", "--lora_alpha 16.0 has no effect .* --lora_rank above 0: leave it out"),
    (1, "--dual_clip 0.5", "--dual_clip 0.5: must be above 1"),
    (1, "--old_logprobs rollout --rollout_correction token_mask", "--old_logprobs rollout with .*_mask: .*tion none"),
    (1, "--advantage maxrl --reward math,length", "--advantage maxrl needs rewards that are not negative"),
    (1, "--advantage reinforce++ --policy_loss gspo --kl_coef 1 --kl_in reward", "gspo .*; use gspo_token"),
    (1, "--dynamic_sampling reward --group_size 1 --advantage none", "--group_size 1 with --dynamic_sampling reward"),
    (1, "--replay r --partial_rollouts", "--partial_rollouts with --replay r: nothing is sampled"),
    (1, "--replay ./o", "--replay ./o is --out_dir, too; name another folder"),
    (1, "--prompt_format raw --system_prompt a", "--system_prompt a with --prompt_format raw: the former needs a"),
    (1, "--partial_rollouts --engine server", "--partial_rollouts with --engine server: .* --in_flight"),
    (1, "--steps_ahead 1", "only with --engine server"),
    (1, "--engine server --image_column image", "images are not sent to servers"),
    (1, "--engine server --server_urls http://127.0.0.1:1 --generation_gpus 7", "--generation_gpus 7: .* run already"),
    (1, "--engine server --server_urls 127.0.0.1:1", "needed is http://HOST:PORT"),
    (1, "--engine server --generation_gpus 5 6 7 --tensor_parallel_size 2", "2 does not divide the number of"),
    (1, "--reward math,length --overlong_cache_tokens 16 --max_completion_tokens 16", "all completions of .* too long"),
    (1, "--overlong_cache_tokens 5", "has no effect without the reward `length`"),
    (1, "--eval_data x.jsonl", "--eval_data x.jsonl is never evaluated"),
    (None, "--plan_gpus 4", "--plan_gpus has no effect without --dry_run"),
    (1, "--replay nowhere", "nowhere has no config.json; name the folder"),
    (1, "--train_data a b a", "--train_data names a more than once; name it once"),
    (1, "--engine server --server_urls http://h:1 http://h:1/", "--server_urls names http://h:1 more than once"),
]


def check(given: str, num_ranks: int) -> None:
    length = "" if given.startswith(NO_STEPS) else "--total_steps 10"
    given = given.removeprefix(NO_STEPS)
    check_flags(parse_flags(f"--model m --train_data d --out_dir o {length} {given}".split()), num_ranks)


@pytest.mark.parametrize(("given", "said"), [
    ("f", "f: its parameter size is no flag; give it a default"),
    ("f:size=1,clip_low=1", "f:clip_low=...: what can be set here is size; flags are set as flags"),
])  # fmt: skip
def test_the_parameters_of_an_own_function_are_checked_at_the_start(given, said, tmp_path):
    (tmp_path / "mine.py").write_text("def f(t, *, clip_low, size): return t.logprobs\n")
    with pytest.raises(ValueError, match=said):
        check_choices(flags(policy_loss=f"{tmp_path}/mine.py:{given}"))


@pytest.mark.parametrize(("num_ranks", "given", "words"), MISTAKES)
def test_contradictory_flags_are_named_with_a_way_out(num_ranks, given, words):
    with pytest.raises(ValueError, match=words) as error:
        check(given, num_ranks)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize(("advantage", "size"), [("pass_at_k", 4), ("pass_at_k:k=8", 8), ("pass_at_k:k=2", 1)])
def test_a_group_for_pass_at_k_has_more_completions_than_k(advantage, size):
    words = f"--group_size {size} has nothing to compare with for --advantage {advantage}; use"
    with pytest.raises(ValueError, match=words):
        check_choices(flags(advantage=advantage, group_size=size))
    check_choices(flags(advantage=advantage, group_size=size + 2))


def test_a_replay_weighs_tokens_as_the_run_that_sampled_them(tmp_path):
    (tmp_path / "config.json").write_text('{"rollout_correction": "token_truncate"}')
    assert flags(replay=tmp_path).rollout_correction == "token_truncate"
    assert flags(replay=tmp_path, rollout_correction="none").rollout_correction == "none"
    assert flags(replay=tmp_path / "nowhere").rollout_correction == "none"


def test_keep_best_takes_a_metric_that_each_checkpoint_has():
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
    for wrong in ({"kl_in": "rewards"}, {"dtype": "float16"}, {"group_size": "8.5"}):
        with pytest.raises(SystemExit):
            flags(**wrong)
    assert "invalid choice: 'float16' (choose from " in capsys.readouterr().err


def test_flags_are_read_without_torch():
    program = (
        "import sys; from gate.checks import check_flags; from command_line import parse_flags; "
        "check_flags(parse_flags(sys.argv[1:])); print('torch' in sys.modules)"
    )
    required = "--model m --train_data d --out_dir o --total_steps 1"
    assert said([sys.executable, "-c", program, *required.split()]) == "False\n"
