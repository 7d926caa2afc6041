"""Times: what cache, lengths, GPUs, servers and copies of the policy do to a step."""

import functools
import itertools
from dataclasses import replace

import pytest
from transformers import Qwen2Config

from command_line import parse_flags
from engine.options import EngineDemand, engine_options
from flags import EngineSettings
from model.sizes import MOST_ON_GPU
from plan import time
from plan.dry_run import config_of, setup_of
from plan.memory import ENGINE, cache_bytes_per_token, checkpoint_bytes, gpu_phases, host_phases, without
from plan.setup import Setup
from plan.table import report_of, text_of
from plan.time import phase_seconds, rollout_seconds, running_sequences, step_seconds, traffic

COMMON = "--train_data x#10000 --out_dir o --total_steps 1 --gradient_checkpointing --kl_coef 0.01 --plan_gpus 8 "
SETUPS = {
    "short": "Qwen/Qwen2.5-7B --prompts_per_step 1024 --max_prompt_tokens 512 --max_completion_tokens 1024",
    "long": "Qwen/Qwen2.5-7B --prompts_per_step 128 --max_completion_tokens 16384 --micro_batch_tokens 18432",
    "few": "Qwen/QwQ-32B --prompts_per_step 8 --group_size 4 --tensor_parallel_size 8",
    "one_gpu": "Qwen/Qwen2.5-1.5B --prompts_per_step 64 --plan_gpus 1 --lora_rank 32 --plan_gpu RTX4090-24GB",
    "servers": "Qwen/Qwen3-4B-Base --prompts_per_step 24 --group_size 16 --max_completion_tokens 8192 "
    "--micro_batch_tokens 10240 --plan_gpus 2",
    "copies": "Qwen/Qwen2.5-7B --prompts_per_step 256 --plan_gpus 16 --plan_nodes 2",
}
SERVERS = "--engine server --generation_gpus 2 3 4 5 6 7 "
PLAIN = {"param_dtype": "bfloat16", "communicate_once": False}  # nothing goes through FSDP on one GPU
PARAMETERS = 7_615_616_512  # Qwen2.5-7B has so many


@functools.cache
def plan(name: str, more: str = "") -> Setup:
    args = parse_flags(f"{COMMON} --model {SETUPS[name]} {more}".split())
    return setup_of(args, config_of(args.model))


@pytest.mark.parametrize("name", list(SETUPS)[:4])
def test_more_cache_is_never_slower(name):
    setup = plan(name)
    found = [replace(setup, engine=replace(setup.engine, gpu_memory_utilization=x / 100)) for x in range(1, 101)]
    seconds, running = list(map(rollout_seconds, found)), list(map(running_sequences, found))
    assert all(more <= less for less, more in itertools.pairwise(seconds)), seconds
    assert running[0] == 1 < running[-1] and seconds[-1] < 0.5 * seconds[0]


def test_compile_leaves_a_third_of_the_bytes_between_products():
    """By hand, of 7B in bf16 with recomputed layers: four passes of bytes, of which two thirds go."""
    lengths = "--plan_prompt_tokens 200 --plan_completion_tokens 800 --plan_gpu H100-80GB"
    eager, compiled = (phase_seconds(plan("short", f"{lengths} {flag}")) for flag in ("", "--compile"))
    position_bytes = 28 * (84 * 3584 + 20 * (3584 + 512) + 10 * 18944)
    saved = 1024 * 8 / 8 * 1000 * position_bytes * 2 / 3 / (3.35e12 * 0.8)
    assert eager["update"] - compiled["update"] == pytest.approx(4 * saved)
    assert eager["logprobs"] - compiled["logprobs"] == pytest.approx(saved), "of the reference"
    fp32_head = phase_seconds(plan("short", f"{lengths} --head_dtype float32"))
    more = 1024 * 800 * 6 * 152064 / (3.35e12 * 0.8)
    assert fp32_head["update"] - eager["update"] == pytest.approx(2 * more)


def test_each_token_of_the_longest_completion_reads_the_weights():
    """32 completions on 8 GPUs all fit; without CUDA graphs the host, which prepares them, is slower."""
    setup = plan("few", "--plan_completion_tokens 256 --plan_prompt_tokens 1024")
    eager = replace(setup, engine=replace(setup.engine, enforce_eager=True))
    assert running_sequences(setup) == 32
    weights = 1024 * 2 * setup.model.parameters / 8 / (0.6 * 3.35e12)
    cache = 32 * 256 * (1024 + 256 / 2) * cache_bytes_per_token(setup) / (0.6 * 3.35e12)
    reduced = 1024 * 2 * 64 * 15e-6
    prompts = rollout_seconds(eager) - 1024 * 0.015
    assert 0 < prompts < 0.5
    assert rollout_seconds(setup) == pytest.approx(weights + cache + reduced + prompts, rel=0.03), "and links"


def test_the_host_takes_its_time_for_each_sequence():
    """Of a small model with many completions: 33 us for each in a step, 2.5 ms for one alone."""
    setup = plan("one_gpu", "--plan_completion_tokens 500 --plan_gpu H100-80GB --plan_prompt_tokens 1")
    assert running_sequences(setup) == 512
    tokens, alone = 512 * 500, 1024 - 500
    assert rollout_seconds(setup) == pytest.approx(tokens * 33e-6 + alone * 0.0025, rel=0.02)


@pytest.mark.parametrize(("prompts", "running"), [(8, 64), (1024, MOST_ON_GPU)])
def test_the_plan_has_the_sequences_that_the_engine_starts_with(prompts, running, monkeypatch):
    """Not vLLM's default, which depends on the GPU (256 on an A100, 1,024 on an H100)."""
    monkeypatch.setattr("engine.options.load_config", lambda path: Qwen2Config())
    for gpu in ("A100-80GB", "H100-80GB"):
        short = "--max_prompt_tokens 64 --max_completion_tokens 64"
        found = plan("short", f"--prompts_per_step {prompts} {short} --plan_gpus 1 --plan_gpu {gpu}")
        options = engine_options("m", EngineSettings(128), is_cuda=True, tp_size=1, demand=EngineDemand(prompts * 8))
        assert running_sequences(found) == options["max_num_seqs"] == running


def test_mean_lengths_are_half_of_the_limits_unless_given():
    half, given = plan("long"), plan("long", "--plan_prompt_tokens 100 --plan_completion_tokens 3000.5")
    assert (half.run.mean_prompt_tokens, half.run.mean_completion_tokens) == (512, 8192)
    assert (given.run.mean_prompt_tokens, given.run.mean_completion_tokens) == (100, 3000.5)
    assert phase_seconds(given)["update"] < 0.5 * phase_seconds(half)["update"]


@pytest.mark.parametrize(("flags", "once", "each"), [
    ("", 0, 46), ("--communicate_once", 24, 12), ("--param_dtype bfloat16", 0, 0), ("--plan_gpus 8", 0, 0),
    ("--param_dtype bfloat16 --communicate_once", 18, 12),  # nothing is cast for a gather
    ("--lora_rank 8", 0, 46),  # of the adapters; the base is plain
])  # fmt: skip
def test_on_one_gpu_fsdp_copies_what_plain_tensors_spare(flags, once, each):
    """Bytes a parameter, of an update and of each micro-batch: a gather 10, twice or once; a gradient 14, a sum 12."""
    setup = plan("short", f"--model Qwen/Qwen2.5-1.5B --plan_gpus 1 {flags}")
    number, parameters = time.micro_batches(setup), setup.adapters or setup.model.parameters
    assert traffic(setup)["copies on one GPU"] == (once + each * number) * parameters
    plain = replace(setup, memory=replace(setup.memory, **PLAIN))
    seconds = (phase_seconds(each)["update"] for each in (setup, plain))
    if setup.hardware.gpus == 1 and not setup.has_lora:
        copies = traffic(setup)["copies on one GPU"] / (0.8 * setup.hardware.memory_speed)
        assert next(seconds) - next(seconds) == pytest.approx(copies)


@pytest.mark.parametrize(("length", "expected"), [(3000, 32), (1024, 10), (256, 3)])
def test_micro_batches_hold_whole_sequences(length, expected):
    """256 completions on 8 GPUs, caps of 4096 tokens; half a sequence of room is left, if several fit."""
    caps = "--max_prompt_tokens 1024 --max_completion_tokens 3072 --micro_batch_tokens 4096 --prompts_per_step 32"
    means = f"--plan_prompt_tokens 128 --plan_completion_tokens {length - 128}"
    assert time.micro_batches(plan("short", f"{caps} {means}")) == expected


@pytest.mark.parametrize(("mean", "is_faster"), [(2000, True), (16384, False)])
def test_partial_rollouts_pay_where_a_few_completions_are_long(mean, is_faster):
    ways = (f"--plan_completion_tokens {mean}", f"--plan_completion_tokens {mean} --partial_rollouts")
    without, partial = (step_seconds(plan("long", way)) for way in ways)
    assert partial < 0.8 * without if is_faster else partial == pytest.approx(without)


def test_ranks_hold_no_engine_and_servers_have_their_gpus_alone():
    setup, colocated = plan("servers", SERVERS), plan("servers", "--gpu_memory_utilization 0.9")
    phases, alone = gpu_phases(setup), gpu_phases(colocated)
    assert "rollout" not in phases
    for name in phases.keys() - {"server"}:
        assert phases[name] == without(alone[name], *ENGINE)
    engine_parts = {part: size for part, size in alone["rollout"].items() if part in ENGINE}
    assert without(phases["server"], "weights arriving") == engine_parts and phases["server"]["weights arriving"] > 0
    assert host_phases(setup)["run"]["processes"] > host_phases(colocated)["run"]["processes"]
    moved = [traffic(each)["to servers"] for each in (setup, colocated)]
    assert moved == [6 * setup.model.parameters * 2, 0], "the main rank sends to each server"
    for more, share in (("", 0.9), ("--gpu_memory_utilization 0.5", 0.5)):
        server = gpu_phases(plan("servers", SERVERS + more))["server"]
        engine = sum(size for part, size in server.items() if part in ENGINE and part != "weights arriving")
        assert engine == pytest.approx(share * 79 * 2**30)
    assert plan("servers").engine.gpu_memory_utilization == 0.6, "beside a trainer"


@pytest.mark.parametrize(("more", "gpus"), [
    ("--generation_gpus 2 3 4 5", 4), ("--dry_run --server_urls http://localhost:1", 2), ("", 2),
])  # fmt: skip
def test_servers_are_counted_by_gpus_by_urls_or_by_their_number(more, gpus):
    setup = plan("servers", f"--engine server --tensor_parallel_size 2 {more}")
    assert (setup.hardware.gpus, setup.hardware.generation_gpus, setup.num_engines) == (2, gpus, gpus // 2)


def test_a_step_ahead_takes_the_time_of_the_slower_side_and_in_flight_nobody_waits():
    setup = plan("servers", SERVERS + "--steps_ahead 1")
    seconds = phase_seconds(setup)
    train = sum(seconds.values()) - seconds["rollout"] - seconds["sync"]
    assert step_seconds(setup) == pytest.approx(max(seconds["rollout"], train) + seconds["sync"])
    on_policy = replace(setup, plan=replace(setup.plan, steps_ahead=0))
    assert step_seconds(on_policy) == pytest.approx(sum(seconds.values()))
    # One step ahead it does not help: the step after is begun when this one is complete.
    ways = ("--steps_ahead 1", "--steps_ahead 1 --in_flight", "--steps_ahead 2", "--steps_ahead 2 --in_flight")
    one, one_in_flight, two, two_in_flight = (rollout_seconds(plan("servers", SERVERS + way)) for way in ways)
    assert one == one_in_flight == two > 1.2 * two_in_flight
    text = text_of(report_of(plan("servers", SERVERS + "--steps_ahead 4 --in_flight")))
    assert "on 2 + 6 x H100-80GB" in text and "6 servers of 1 GPU," in text


def copies(more: str = "") -> Setup:
    """With --shard_ranks there are several."""
    setup = plan("copies", more)
    return replace(setup, hardware=replace(setup.hardware, network_speed=10e9))


@pytest.mark.parametrize("shard_ranks", [8, 2])
def test_a_gpu_holds_its_share_of_one_copy_which_is_written_once(shard_ranks):
    found = copies(f"--shard_ranks {shard_ranks}")
    assert found.hardware.gpus == 16
    parts = gpu_phases(found)["optimizer"]
    expected = {"parameters": 4, "gradients": 4, "optimizer": 8, "reference": 2}  # bytes
    assert {name: parts[name] * shard_ranks / PARAMETERS for name in expected} == expected
    assert report_of(found)["completions_per_update_and_gpu"] == 2048 / 16, "each GPU trains its own"
    assert checkpoint_bytes(found) == checkpoint_bytes(copies()) == PARAMETERS * (2 + 4 + 8)


def test_a_node_holds_as_many_copies_as_its_gpus_make_up():
    """Two nodes of 8: one copy on both, one on each, two on each."""
    moved = "--offload all --offload_reference "
    found = [host_phases(copies(moved + more)) for more in ("", "--shard_ranks 8", "--shard_ranks 4")]
    for name, size in (("parameters", 4), ("gradients", 4), ("optimizer", 8), ("reference", 2)):
        assert [phases["run"][name] / (size * PARAMETERS) for phases in found] == [0.5, 1, 2], name


def test_a_copy_exchanges_within_its_ranks_as_fast_as_what_that_goes_over():
    """A ring: each GPU sends (n - 1) / n of what it gathers."""
    whole, shared = (traffic(copies(more)) for more in ("", "--shard_ranks 8"))
    micro_batches = whole["reduce-scatter"] / (4 * PARAMETERS * 15 / 16)
    assert shared["reduce-scatter"] == pytest.approx(micro_batches * 4 * PARAMETERS * 7 / 8)
    assert shared["sync"] == pytest.approx(2 * PARAMETERS * 7 / 8)
    both = 8 * 10e9 * 2 * 15 / 16  # 8 cards carry the half that each node lacks
    for members, speed in ((8, 450e9), (16, both)):  # a node: NVLink
        assert time.link_speed(copies(), members) == pytest.approx(0.7 * speed)
