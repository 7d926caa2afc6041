"""Mistakes in the flags are refused with a way out, before torch is imported."""

import sys
from argparse import Namespace
from itertools import product

import pytest

from command_line import parse_flags
from flags import FLAGS, GROUPS, Flag
from gate.checks import CONTRADICTIONS, NEEDS, check_flags, check_ranges
from gate.choices import check_choices
from helpers.made_up import flags
from helpers.runs import said as output_of

NO_STEPS = "(without --total_steps)"
NO_REWARD = "--advantage zero --kl_coef 1 --reward none"
BEST = "--keep_best eval/d/avg@1 --eval_data x/d.jsonl"
MISTAKES = [  # ranks, flags beside the required ones, what the sentence says; those of the tables are below
    (1, "--group_size 1", "--group_size 1 has nothing to compare with for --advantage grpo; use 2 or more"),
    (1, "--advantage zero --kl_coef 1", "--advantage zero follows the reference, which is --model itself: give"),
    (1, "--reward none", "--reward none grades nothing for --advantage grpo to compare; give --advantage zero"),
    (1, f"{NO_REWARD} --dynamic_sampling reward", "--dynamic_sampling needs a reward"),
    (1, f"{NO_REWARD} --eval_data d --eval_every 1", "--eval_data needs a reward; leave it out, or give one"),
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
    (1, "--dual_clip 0.5", "--dual_clip 0.5: must be above 1"),
    (1, "--old_logprobs rollout --rollout_correction token_mask", "--old_logprobs rollout with .*_mask: .*tion none"),
    (1, "--advantage maxrl --reward math,length", "--advantage maxrl needs rewards that are not negative"),
    (1, "--advantage reinforce++ --policy_loss gspo --kl_coef 1 --kl_in reward", "gspo .*; use gspo_token"),
    (1, "--replay ./o", "--replay ./o is --out_dir, too; name another folder"),
    (1, "--engine server --server_urls 127.0.0.1:1", "needed is http://HOST:PORT"),
    (1, "--engine server --generation_gpus 5 6 7 --tensor_parallel_size 2", "2 does not divide the number of"),
    (1, "--reward math,length --overlong_cache_tokens 16 --max_completion_tokens 16", "all completions of .* too long"),
    (1, "--overlong_cache_tokens 5", "has no effect without the reward `length`"),
    (1, "--eval_data x.jsonl", "--eval_data x.jsonl is never evaluated"),
    (None, "--plan_gpus 4", "--plan_gpus has no effect without --dry_run"),
    (1, "--replay nowhere", "nowhere has no config.json; name the folder"),
    (1, "--train_data a b a", "--train_data names a more than once; name it once"),
    (1, "--engine server --server_urls http://h:1 http://h:1/", "--server_urls names http://h:1 more than once"),
    (1, "--truncated none", "--truncated none: use score, zero, mask, or a number"),
    (
        1,
        "--critic policy:lambda=1",
        "--critic policy:lambda=1: lambda=1; known are lam, alpha",
    ),
    (1, "--critic policy:lam=1.5", "lam=1.5; .* lam, critic_lam and whiten go from 0 to 1"),
    (1, "--critic policy:passes=1.5", "passes=1.5; .* warmup and whiten are whole numbers"),
    (1, "--critic policy:passes=0", "passes=0; .* passes from 1, the others from 0"),
    (1, "--critic policy:rate=1e-5 --learning_rate 0", "its rate follows the schedule of --learning_rate 0"),
]


def check(given: str, num_ranks: int) -> None:
    length = "" if given.startswith(NO_STEPS) else "--total_steps 10"
    given = given.removeprefix(NO_STEPS)
    check_flags(parse_flags(f"--model m --train_data d --out_dir o {length} {given}".split()), num_ranks)


@pytest.mark.parametrize(("num_ranks", "given", "words"), MISTAKES)
def test_contradictory_flags_are_named_with_a_way_out(num_ranks, given, words):
    with pytest.raises(ValueError, match=words) as error:
        check(given, num_ranks)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_a_critic_needs_no_group():
    check("--critic policy:lam=1,rate=1e-5 --group_size 1 --truncated -10 --engine server --server_urls http://h:1", 1)


def another(flag: Flag) -> object:
    """A value in its range that is not the default."""
    low, high = flag.within or (0, 2)
    values = [True] if flag.default is False else [flag.type(each) for each in flag.choices or ("1", "2", "0")]
    values += [0.5] * (flag.type is float)
    value = next(x for x in values if x != flag.default and (isinstance(x, str) or low <= x <= high))
    return [value] if flag.is_list else value


def given(*written: str) -> Namespace:
    """Flags with these values, or with others than the defaults, and with what they need to have an effect."""
    args, names = flags(), list(written)
    for each in names:
        name, _, value = each.partition("=")
        setattr(args, name.removeprefix("--"), FLAGS[name].type(value) if value else another(FLAGS[name]))
        partners = FLAGS[name].only_with.split()
        names += [] if set(partners) & set(names) else partners[:1]
    return args


def said(args: Namespace) -> str:
    with pytest.raises(ValueError) as error:
        check_ranges(args, GROUPS)
    return str(error.value)


def test_flags_of_the_tables_are_refused_with_their_reason():
    for firsts, seconds, reason in CONTRADICTIONS:
        for pair in product(firsts.split(), seconds.split()):
            args = given(*pair)
            both = " with ".join(FLAGS[each.partition("=")[0]].written(args) for each in pair)
            assert said(args) == f"{both}: {reason}; leave one of them out."
    for needing, partners, reason in NEEDS:
        assert said(given(needing)) == f"{needing.replace('=', ' ')} needs {partners.replace(' ', ' or ')}: {reason}."
        for partner in partners.split():
            check_ranges(given(needing, partner), GROUPS)


def test_a_flag_without_effect_is_refused_until_it_has_one():
    for flag in (flag for flag in FLAGS.values() if flag.only_with):
        args = flags()
        setattr(args, flag.name.removeprefix("--"), another(flag))
        assert said(args).startswith(f"{flag.written(args)} has no effect here, only with {flag.only_with.split()[0]}")
        check_ranges(given(flag.name), GROUPS)


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
    for wrong in ({"kl_in": "rewards"}, {"dtype": "float64"}, {"group_size": "8.5"}):
        with pytest.raises(SystemExit):
            flags(**wrong)
    assert "invalid choice: 'float64' (choose from " in capsys.readouterr().err


def test_flags_are_read_without_torch():
    program = (
        "import sys; from gate.checks import check_flags; from command_line import parse_flags; "
        "check_flags(parse_flags(sys.argv[1:])); print('torch' in sys.modules)"
    )
    required = "--model m --train_data d --out_dir o --total_steps 1"
    assert output_of([sys.executable, "-c", program, *required.split()]) == "False\n"
