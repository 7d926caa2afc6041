"""The flags of `evaluate.py`: how each set is sampled, and what is refused before a model is read."""

import pytest

from flags import GROUPS, Sampling
from inputs import command_line
from inputs.checks import check_flags, check_ranges
from inputs.evaluation import FLAGS, check_names, load_inputs, parse_flags, settings_per_set

REQUIRED = ["--model", "m", "--data", "d"]


def test_settings_are_one_for_all_sets_or_one_for_each():
    given = {"samples": [1, 32], "temperature": [0.6], "top_p": [0.95], "max_completion_tokens": [100, 200]}
    assert settings_per_set(2, "eval_", **given) == [Sampling(1, 0.6, 100, 0.95), Sampling(32, 0.6, 200, 0.95)]
    given |= {"samples": [1], "max_completion_tokens": [100]}
    for change, words in (
        ({"samples": [1, 2]}, "--eval_samples has 2 values for 3 sets"),
        ({"temperature": [0.0], "samples": [4]}, "--eval_samples 4 at --eval_temperature 0 are 4 times the same"),
    ):
        with pytest.raises(ValueError, match=words):
            settings_per_set(3, "eval_", **given | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["samples", "1", "0"], "samples 0: must be at least 1"),
        (["top_p", "1.5"], "top_p 1.5: must be above 0 and at most 1"),
        (["temperature", "nan"], "temperature nan: must be at least 0 and at most 2"),
    ],
)
def test_a_setting_out_of_range_is_refused_in_training_and_by_the_command(change, words):
    name, *values = change
    args = command_line.parse_flags(["--model", "m", "--train_data", "d", "--out_dir", "o", f"--eval_{name}", *values])
    with pytest.raises(ValueError, match=f"--eval_{words}"):
        check_ranges(args, GROUPS)
    with pytest.raises(ValueError, match=f"--{words}"):
        check_ranges(parse_flags([*REQUIRED, f"--{name}", *values]), FLAGS)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("reward_timeout", -1, "-1: must be above 0"),
        ("reward_timeout", 0, "0: must be above 0 and at most 1000000."),
        ("reward_workers", -2, "-2: must be at least 0"),
        ("reward_memory_gib", 0.01, "0.01: must be at least 0.25"),
    ],
)
def test_a_flag_of_the_reward_out_of_range_is_refused_before_anything_is_read(name, value, words):
    """The model "m" and the data "d" are not there: nothing looked for them."""
    of_training = ["--model", "m", "--train_data", "d", "--out_dir", "o", "--total_steps", "1"]
    wrong = [f"--{name}", str(value)]
    with pytest.raises(ValueError, match=f"^--{name} {words}"):
        check_flags(command_line.parse_flags([*of_training, *wrong]))
    with pytest.raises(ValueError, match=f"^--{name} {words}"):
        load_inputs(parse_flags([*REQUIRED, *wrong]))


def test_logits_coarser_than_the_rest_are_refused():
    args = parse_flags([*REQUIRED, "--dtype", "float32", "--head_dtype", "bfloat16"])
    with pytest.raises(ValueError, match="--head_dtype bfloat16 would round what --dtype float32 computes"):
        load_inputs(args)


def test_sets_of_the_same_name_are_refused():
    check_names(["a/test.jsonl", "b/test.jsonl@train", "owner/test@test"])
    with pytest.raises(ValueError, match="test, test are reported under their names"):
        check_names(["a/test.jsonl", "b/test.jsonl"])
