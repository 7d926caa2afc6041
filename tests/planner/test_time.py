"""Times: what the engine's cache, lengths and GPU do to a rollout, and what is counted as work."""

import itertools
from dataclasses import replace

import pytest

from flags import EngineSettings
from inputs.command_line import parse_flags
from model.engine_options import engine_options
from model.sizes import MOST_ON_GPU
from planner.dry_run import assumed_of, config_of, setup_of
from planner.memory import cache_bytes_per_token, engine_parts
from planner.report import report_of, text_of
from planner.setup import GIB, Setup
from planner.time import (
    Assumed,
    forward_flops,
    micro_batches,
    partial_seconds,
    phase_seconds,
    rollout_seconds,
    running_sequences,
    step_seconds,
)

COMMON = (
    "--train_data x#10000 --out_dir o --total_steps 1 --gradient_checkpointing --kl_coef 0.01 --plan_gpus 8 --model "
)
SETUPS = {
    "short": "Qwen/Qwen2.5-7B --prompts_per_step 1024 --max_prompt_tokens 512 --max_completion_tokens 1024",
    "long": "Qwen/Qwen2.5-7B --prompts_per_step 128 --max_completion_tokens 16384 --micro_batch_tokens 18432",
    "large": "Qwen/QwQ-32B --prompts_per_step 512 --group_size 5 --tensor_parallel_size 4",
    "few": "Qwen/QwQ-32B --prompts_per_step 8 --group_size 4 --tensor_parallel_size 8 --enforce_eager",
    "one_gpu": "Qwen/Qwen2.5-1.5B --prompts_per_step 64 --plan_gpus 1 --lora_rank 32 --plan_gpu RTX4090-24GB",
    "a100": "allenai/Llama-3.1-Tulu-3-8B-DPO --prompts_per_step 14 --plan_gpus 7 --plan_gpu A100-80GB",
}


def plan(name: str, more: str = "") -> tuple[Setup, Assumed]:
    args = parse_flags(f"{COMMON}{SETUPS[name]} {more}".split())
    return setup_of(args, config_of(args.model)), assumed_of(args)


def never_slower(found: list[tuple[Setup, Assumed]]) -> None:
    """Of setups with more and more cache: no rollout takes longer than the one before, and the last is faster than the
    first if it runs more sequences at a time.
    """
    caches = [engine_parts(setup)["KV cache"] for setup, _ in found]
    assert caches == sorted(caches) and caches[0] < 0 < caches[-1], "from none at all"
    seconds = [rollout_seconds(*each) for each in found]
    assert all(more <= less for less, more in itertools.pairwise(seconds)), seconds
    running = [running_sequences(*each) for each in found]
    assert running[0] == 1 < running[-1]
    assert seconds[-1] < 0.5 * seconds[0]


@pytest.mark.parametrize("name", SETUPS)
def test_more_cache_is_never_slower(name):
    setup, assumed = plan(name)
    shares = [replace(setup.engine, gpu_memory_utilization=share / 100) for share in range(1, 101)]
    never_slower([(replace(setup, engine=engine), assumed) for engine in shares])
    gpus = [replace(setup.hardware, gpu_bytes=1.05**n * GIB) for n in range(16, 128)]
    never_slower([(replace(setup, hardware=gpu), assumed) for gpu in gpus])


@pytest.mark.parametrize("mean", [256, 1024])
def test_a_full_engine_reads_the_weights_for_each_token_of_its_longest_completion(mean):
    """32 completions of 8 GPUs that all fit: as many steps as the longest completion has tokens; no step is skipped."""
    setup, assumed = plan("few", f"--plan_completion_tokens {mean} --plan_prompt_tokens 1024")
    assert running_sequences(setup, assumed) == 32
    weights = 1024 * 2 * setup.model.parameters / 8 / (0.6 * 3.35e12)
    cache = 32 * mean * (1024 + mean / 2) * cache_bytes_per_token(setup) / (0.6 * 3.35e12)
    host = 1024 * (0.015 + 2 * 64 * 15e-6)
    assert rollout_seconds(setup, assumed) == pytest.approx(weights + cache + host, rel=0.03), "and prompts, links"


def test_half_the_cache_is_twice_the_rounds():
    """Where the weights are all that is read: completions as long as the limit, in rounds of what the cache holds."""
    setup, assumed = plan("few", "--plan_completion_tokens 1024 --plan_prompt_tokens 1024")
    per_sequence = 2048 * cache_bytes_per_token(setup)
    rest = sum(engine_parts(setup).values()) - engine_parts(setup)["KV cache"]
    seconds = {}
    for running in (4, 8, 16):
        gpu = replace(setup.hardware, gpu_bytes=(rest + running * per_sequence) / 0.6)
        found = replace(setup, hardware=gpu)
        assert running_sequences(found, assumed) == pytest.approx(running, rel=1e-6)
        seconds[running] = rollout_seconds(found, assumed)
    assert seconds[4] - seconds[8] == pytest.approx(2 * (seconds[8] - seconds[16]), rel=1e-3)


@pytest.mark.parametrize(("prompts", "running"), [(8, 64), (1024, MOST_ON_GPU)])
def test_the_engine_is_planned_with_the_sequences_that_it_is_started_with(prompts, running):
    """Not vLLM's default, which depends on the GPU (256 on an A100, 1,024 on an H100)."""
    for gpu in ("A100-80GB", "H100-80GB"):
        short = "--max_prompt_tokens 64 --max_completion_tokens 64"
        setup, assumed = plan("short", f"--prompts_per_step {prompts} {short} --plan_gpus 1 --plan_gpu {gpu}")
        settings = EngineSettings(128)
        options = engine_options("m", settings, is_cuda=True, tp_size=1, most_sequences=prompts * 8)
        assert running_sequences(setup, assumed) == options["max_num_seqs"] == running


def test_the_head_counts_where_it_is_computed_and_the_embedding_nowhere():
    model = plan("short")[0].model
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    attention = 2 * 28 * 3584 * 100**2
    assert forward_flops(model, 100, 0) == 2 * matrices * 100 + attention
    assert forward_flops(model, 100, 40) - forward_flops(model, 100, 0) == 2 * 152_064 * 3584 * 40


def test_mean_lengths_are_half_of_the_limits_unless_they_are_given():
    assert plan("long")[1].prompt == 512 and plan("long")[1].completion == 8192
    given = plan("long", "--plan_prompt_tokens 100 --plan_completion_tokens 3000.5")[1]
    assert (given.prompt, given.completion) == (100, 3000.5)
    assert phase_seconds(plan("long")[0], given)["update"] < 0.5 * phase_seconds(*plan("long"))["update"]


@pytest.mark.parametrize(("length", "expected"), [(3000, 32), (1024, 10), (256, 3)])
def test_micro_batches_hold_whole_sequences(length, expected):
    """256 completions on 8 GPUs, caps of 4096 tokens: one of 3000 alone; else half a sequence of room is left."""
    cap = "--max_prompt_tokens 1024 --max_completion_tokens 3072 --micro_batch_tokens 4096 --prompts_per_step 32"
    setup, assumed = plan("short", f"{cap} --plan_prompt_tokens 128 --plan_completion_tokens {length - 128}")
    assert micro_batches(setup, assumed) == expected


def test_smaller_micro_batches_are_slower():
    seconds = [phase_seconds(*plan("short", f"--micro_batch_tokens {cap}"))["update"] for cap in (16384, 8192, 4096)]
    assert seconds == sorted(seconds) and seconds[-1] > 1.05 * seconds[0]


def test_an_engine_without_nvlink_pays_for_its_all_reduces():
    found = (
        plan("short", f"--tensor_parallel_size 4 --plan_gpus 4 --plan_gpu {x}") for x in ("L40S-48GB", "A100-80GB")
    )
    large = ((replace(x, hardware=replace(x.hardware, gpu_bytes=200 * GIB)), assumed) for x, assumed in found)
    slow, fast = (rollout_seconds(*each) for each in large)
    assert slow > 1.5 * fast, "though the L40S has more FLOPs"


def test_partial_rollouts_pay_where_a_few_completions_are_long_and_cost_nothing_where_all_are_alike():
    without, partial = partial_seconds(*plan("long", "--plan_completion_tokens 2000"))
    assert partial < 0.8 * without
    without, partial = partial_seconds(*plan("long", "--plan_completion_tokens 16384"))
    assert partial == pytest.approx(without)
    assert partial_seconds(*plan("short", "--engine server")) is None
    setup, assumed = plan("long", "--plan_completion_tokens 2000 --partial_rollouts")
    assert partial_seconds(setup, assumed)[1] == step_seconds(setup, assumed)


@pytest.mark.parametrize(
    ("more", "expected"),
    [("2000", "--partial_rollouts would save"), ("2000 --partial_rollouts", "without it"), ("16384", None)],
)
def test_the_dry_run_says_when_partial_rollouts_pay(more, expected):
    setup, assumed = plan("long", f"--plan_completion_tokens {more}")
    text = text_of(report_of(setup, assumed))
    assert "--partial_rollouts" not in text if expected is None else expected in text
