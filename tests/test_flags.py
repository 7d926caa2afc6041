"""The flags: their declarations, what may change on resume, the arithmetic of batches and rates."""

import pytest

from command_line import parse_flags
from flags import FLAGS, GROUPS, AdamW, Lora, Memory, Sampling
from gate.checks import free_on_resume
from helpers.made_up import flags
from schedule import make_plan


def test_the_length_of_a_run_is_in_epochs():
    """Rounded down to whole steps. In episodes: test_setups.py (tulu8b_rlvr_7plus1)."""
    args = flags(prompts_per_step=1024, epochs=12, total_steps=None, keep_last=True)
    plan = make_plan(args, num_rows=8_532)
    assert plan.steps_per_epoch == 8532 / 1024
    assert plan.total_steps == 100, "12 epochs are 99.98 steps: the last one reaches into the next epoch"
    args.keep_last = False
    assert make_plan(args, num_rows=8_532).total_steps == 96
    with pytest.raises(ValueError, match="--stop_after 7 is beyond the last step, 6; leave it out"):
        make_plan(flags(total_steps=6, stop_after=7), num_rows=1000)
    assert make_plan(flags(total_steps=6, stop_after=6), num_rows=1000).total_steps == 6
    with pytest.raises(ValueError, match="31 usable rows, fewer than --prompts_per_step 32"):
        make_plan(flags(), num_rows=31)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"learning_rate": 1.0, "lr_schedule": "linear", "warmup_ratio": 1 / 3}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
    ({"learning_rate": 2.0, "lr_schedule": "cosine"}, [2.0, 1.7071068, 1.0, 0.2928932]),
    ({"learning_rate": 3.0, "lr_schedule": "constant"}, [3.0] * 4),
])  # fmt: skip
def test_the_schedule_warms_up_and_falls_without_a_wasted_update(changes, expected):
    plan = make_plan(flags(total_steps=len(expected), **changes), num_rows=32)
    assert [plan.rate(u) for u in range(len(expected))] == pytest.approx(expected)


def test_an_update_knows_its_place_and_the_last_of_a_step_moves_the_reference():
    args = flags(prompts_per_update=8, num_iterations=2, total_steps=2, lr_schedule="linear", learning_rate=1, seed=7)
    plan = make_plan(args, num_rows=64)
    assert (plan.updates_per_pass, plan.updates_per_step, plan.total_updates) == (4, 8, 16)
    found = [plan.update(step, i) for step in (1, 2) for i in range(plan.updates_per_step)]
    assert [each.index for each in found] == list(range(16))
    assert [each.rate for each in found] == pytest.approx([1 - i / 16 for i in range(16)])
    assert [each.is_first for each in found] == ([True] + [False] * 7) * 2
    assert {(each.seed, each.max_grad_norm) for each in found} == {(7, 1.0)}
    args = flags(prompts_per_update=16, num_iterations=2, kl_coef=1, reference_every=2, reset_optimizer=True)
    plan = make_plan(args, num_rows=64)
    assert plan.updates_per_step == 4
    moves = [[plan.update(step, i).reference_mixup for i in range(4)] for step in (1, 2, 3, 4)]
    assert moves == [[0, 0, 0, 0], [0, 0, 0, 1]] * 2
    assert [plan.update(2, i).resets_optimizer for i in range(4)] == [False, False, False, True]


def test_defaults_depend_on_other_flags_and_lists_are_of_their_type():
    command = "--model M --train_data D --out_dir O --total_steps 1 --prompts_per_step 3"
    args, lora = parse_flags(command.split()), parse_flags(f"{command} --lora_rank 1 --engine server".split())
    assert (args.learning_rate, lora.learning_rate) == (1e-6, 1e-5)
    assert (args.gpu_memory_utilization, lora.gpu_memory_utilization) == (0.6, 0.9)
    assert args.prompts_per_update == 3
    absent = {"eval_data": [], "stop_tokens": [], "eval_samples": [1], "lora_targets": None}
    assert (absent | {"eval_max_completion_tokens": [1024]}).items() <= vars(flags()).items()
    given = "--model m --train_data a b --out_dir o --eval_data c d --eval_temperature 1 0.5"
    args = parse_flags(f"{given} --eval_samples 4 8 --lora_targets q_proj v_proj".split())
    assert (args.train_data, args.eval_data, args.eval_temperature) == (["a", "b"], ["c", "d"], [1.0, 0.5])
    assert (args.eval_samples, args.lora_targets) == ([4, 8], ["q_proj", "v_proj"])


def test_what_may_change_when_a_run_continues():
    """What a step computes does not: flags of model, data, algorithm and sampling."""
    length, free = {"total_steps", "epochs", "total_episodes"}, free_on_resume(flags())
    some = {"out_dir", "eval_data", "save_every", "micro_batch_tokens", "offload", "engine", "after_step", "plan_gpu"}
    fixed = {"model", "train_data", "seed", "group_size", "learning_rate", "advantage", "temperature", "lora_rank"}
    assert length | some <= free and not free & fixed and len(free) == 44
    for reads_it in ({"lr_schedule": "cosine"}, {"warmup_ratio": 0.1}):
        assert free_on_resume(flags(**reads_it)) == free - length, reads_it
    for name in ("kl_estimator", "policy_loss", "advantage"):
        assert free_on_resume(flags(**{name: "my.py:f"})) == free - length, "its file may read total_steps"


def test_each_flag_is_declared_once_with_a_default_in_its_range():
    declared = [each.name for group in GROUPS.values() for each in group]
    assert len(declared) == len(set(declared)) == len(FLAGS)
    for each in FLAGS.values():
        low, high = each.within or (float("-inf"), float("inf"))
        values = each.default if isinstance(each.default, list) else [each.default]
        assert not each.within or all(value is None or low <= value <= high for value in values), each.name
        assert set(each.only_with.split()) <= FLAGS.keys(), each.name


@pytest.mark.parametrize(("settings", "given", "expected"), [
    ({}, "", "float32"),
    ({"NUM_GPUS": "8"}, "", "bfloat16"),  # counted by scripts/setup.sh
    ({"PATH": "{gpus}"}, "", "bfloat16"),
    ({"PATH": "{gpus}", "NUM_GPUS": "0"}, "", "float32"),  # DEVICE=cpu
    ({"PATH": "{gpus}", "CUDA_VISIBLE_DEVICES": ""}, "", "float32"),
    ({}, "--param_dtype bfloat16", "bfloat16"),
    ({}, "--dry_run", "bfloat16"),  # plans for GPUs
    ({"NUM_GPUS": "8"}, "--dtype float32", "float32"),
])  # fmt: skip
def test_the_arithmetic_is_bfloat16_on_gpus_and_float32_on_cpus(settings, given, expected, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    for name in ("NUM_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value.format(gpus=tmp_path))
    assert parse_flags(f"--model m --train_data a --out_dir o {given}".split()).dtype == expected


def test_frozen_objects_take_defaults_and_values_of_the_flags():
    assert Memory() == Memory.from_flags(flags(dtype="bfloat16"))
    assert AdamW() == AdamW.from_flags(flags()) and Lora() == Lora.from_flags(flags())
    assert AdamW.from_flags(flags(learning_rate=0.5, adam_beta2=0.95)) == AdamW(learning_rate=0.5, adam_beta2=0.95)
    assert Lora.from_flags(flags(lora_targets="q_proj")).lora_targets == ("q_proj",)
    assert Sampling.from_flags(flags(temperature=0.7), num_samples=5, top_p=0.9) == Sampling(5, 0.7, 1024, 0.9)
    with pytest.raises(AttributeError):
        Memory().dtype = "float32"
