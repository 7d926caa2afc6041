"""The arithmetic of batches and the learning-rate schedule."""

import pytest
from transformers import Gemma2Config, MistralConfig, Qwen2Config

from helpers import flags
from plan import check_flags, check_model, learning_rate, make_plan


def test_the_documented_qwq_batch_is_2560_completions_and_4_updates_a_step():
    args = flags(
        prompts_per_step=512,
        group_size=5,
        prompts_per_update=128,
        epochs=15,
        total_steps=None,
        micro_batch_tokens=16384,
    )
    check_flags(args, world_size=8)
    plan = make_plan(args, num_rows=12_000)
    assert (plan.completions_per_step, plan.updates_per_step, plan.steps_per_epoch) == (2560, 4, 23)
    assert (plan.total_steps, plan.total_updates) == (345, 1380)
    args.passes_per_step = 2
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
    ("changes", "world_size", "words"),
    [
        ({"group_size": 1}, 1, ["--group_size 1", "at least 2"]),
        ({"prompts_per_step": 100, "prompts_per_update": 100}, 8, ["--prompts_per_step 100", "8 engines", "96 or 104"]),
        ({"prompts_per_step": 3, "prompts_per_update": 3}, 2, ["--prompts_per_step 3", "2 engines", "2 or 4"]),
        (
            {"prompts_per_step": 12, "prompts_per_update": 8},
            2,
            ["--prompts_per_update 8", "--prompts_per_step 12", "1, 2, 3, 4, 6, 12"],
        ),
        ({"micro_batch_tokens": 100}, 1, ["--micro_batch_tokens 100", "2048"]),
        ({"epochs": 2}, 1, ["2 of --total_steps", "exactly one"]),
        ({"total_steps": None}, 1, ["0 of --total_steps", "exactly one"]),
        ({"total_steps": None, "total_episodes": 100}, 1, ["--total_episodes 100", "256"]),
        ({"eval_every": 5}, 1, ["--eval_every 5", "--eval_data"]),
        ({"total_steps": 0}, 1, ["--total_steps 0", "at least 1"]),
        ({"temperature": 0.001}, 1, ["--temperature 0.001", "from 0.01 to 100"]),
        ({"learning_rate": -1}, 1, ["--learning_rate -1", "at least 0"]),
        ({"learning_rate": "nan"}, 1, ["--learning_rate nan", "at least 0"]),
        ({"adam_beta1": 1.5}, 1, ["--adam_beta1 1.5", "to 0.99999"]),
        ({"gpu_memory_utilization": 7}, 1, ["--gpu_memory_utilization 7", "to 1"]),
        ({"warmup_ratio": 3}, 1, ["--warmup_ratio 3", "from 0 to 1"]),
        ({"reward_timeout": 0}, 1, ["--reward_timeout 0", "from 1e-09"]),
    ],
)
def test_flags_that_contradict_each_other_are_named_with_a_way_out(changes, world_size, words):
    with pytest.raises(ValueError) as error:
        check_flags(flags(**changes), world_size)
    for word in words:
        assert word in str(error.value)


def test_the_engines_are_counted_not_the_ranks():
    check_flags(flags(prompts_per_step=4, prompts_per_update=4, tensor_parallel_size=2), world_size=8)


def test_limits_beyond_the_context_of_the_model_are_refused():
    check_model(flags(), Qwen2Config(max_position_embeddings=2048))
    with pytest.raises(ValueError, match="2047 tokens; lower them by 1"):
        check_model(flags(), Qwen2Config(max_position_embeddings=2047))


def test_models_that_the_packed_pass_does_not_compute_are_refused():
    check_model(flags(), MistralConfig(sliding_window=2048))
    with pytest.raises(ValueError, match="sliding-window attention of 2047 tokens"):
        check_model(flags(), MistralConfig(sliding_window=2047))
    check_model(flags(), Qwen2Config(sliding_window=16, use_sliding_window=False))
    with pytest.raises(ValueError, match="attn_logit_softcapping = 50.0 is not implemented"):
        check_model(flags(), Gemma2Config(sliding_window=8192))
    with pytest.raises(ValueError, match="--tensor_parallel_size 4 does not divide the model's 14 attention heads"):
        check_model(flags(tensor_parallel_size=4), Qwen2Config(num_attention_heads=14))


def test_too_few_rows_for_one_step_are_refused():
    with pytest.raises(ValueError, match="31 usable rows, fewer than --prompts_per_step 32"):
        make_plan(flags(), num_rows=31)


def test_the_schedule_warms_up_to_the_peak_and_falls_without_a_wasted_update():
    rates = [learning_rate(u, peak=1.0, schedule="linear", warmup_updates=2, total_updates=6) for u in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    cosine = [learning_rate(u, peak=2.0, schedule="cosine", warmup_updates=0, total_updates=4) for u in range(4)]
    assert cosine == pytest.approx([2.0, 1.7071, 1.0, 0.2929], abs=1e-4)
    assert {learning_rate(u, peak=3.0, schedule="constant", warmup_updates=0, total_updates=4) for u in range(4)} == {
        3.0
    }
