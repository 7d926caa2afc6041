"""Memory is measured phase by phase, compared with the dry run's figures, refused where it cannot suffice, and a run
without memory ends with one sentence.
"""

import json
import mmap
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bench_memory import POLICIES
from command_line import parse_flags
from flags import FLAGS
from fsdp_utils import World
from helpers.runs import PROGRAMS, run_ranks, torchrun, training_flags
from plan.dry_run import config_of, setup_of
from plan.memory import checkpoint_bytes, disk_bytes, gpu_phases, needed
from watch import memory as watch
from watch.memory import MemoryWatch, check_disk, check_fit, predicted_bytes

GIB = 2**30
MIB = 2**20
CPU = World(trainer_rank=0, num_trainers=1, tp_size=1, device=torch.device("cpu"))


def hold(size: int) -> mmap.mmap:
    """So many bytes of resident memory, until they are closed."""
    block = mmap.mmap(-1, size)
    for offset in range(0, size, mmap.PAGESIZE):
        block[offset] = 1
    return block


def test_each_phase_has_its_own_memory_peak():
    """Each phase has its own peak, and a phase without a figure counts to the phase around it. Within 8 MiB: what
    Python itself takes meanwhile.
    """
    memory = MemoryWatch(CPU, {})
    watch.restart(CPU.device)
    block = hold(64 * MIB)  # before the first phase: loading
    with memory.phase("update"):
        block.close()
        hold(96 * MIB).close()
    with memory.phase("sample"), memory.phase("reward"):
        hold(48 * MIB).close()
    with memory.phase("sync"):
        pass
    found = memory.metrics()
    for name, size in {"load": 64, "update": 96, "sample": 48}.items():
        over = (found[f"memory/{name}_gib"] - found["memory/sync_gib"]) * 1024
        assert over == pytest.approx(size, abs=8), name
    assert found["memory/peak_gib"] == found["memory/update_gib"] and "memory/reward_gib" not in found
    assert found["memory/host_gib"] >= found["memory/update_gib"], "the host's figure holds the processes below, too"
    assert "memory/load_gib" not in memory.metrics(), "they begin anew"


def test_a_phase_near_the_limit_is_warned_of_once_with_flags():
    """A phase near the limit is warned of once, with the flags to change."""
    memory = MemoryWatch(CPU, {})
    memory.limit, memory.host_limit = 10 * GIB, 100 * GIB
    metrics = {"memory/sample_gib": 9.6, "memory/update_gib": 9.4, "memory/host_gib": 96.0}
    near = [line for line in memory.remarks(metrics) if line.startswith("warning")]
    assert [line.split(" takes")[0] for line in near] == ["warning: sample", "warning: host"]
    assert "9.6 of 10.0 GiB" in near[0] and "lower --max_completion_tokens" in near[0]
    assert memory.remarks(metrics) == []


def test_the_first_update_compares_prediction_and_measurement():
    """After the first update a line compares the prediction with the measured memory."""
    memory = MemoryWatch(CPU, {"update": 3 * GIB, "sample": 2 * GIB, "host": 5 * GIB})
    assert memory.remarks({"memory/evaluate_gib": 1.0, "memory/host_gib": 4.0}) == []  # step 0
    (report,) = memory.remarks({"memory/sample_gib": 2.25, "memory/update_gib": 2.875, "memory/host_gib": 4.0})
    assert report.endswith(
        "in brackets what the dry run predicts: sample 2.25 (2.00), update 2.88 (3.00), host 4.00 (5.00)"
    )
    assert memory.remarks({"memory/update_gib": 2.9}) == []


def fake_gpu(monkeypatch: pytest.MonkeyPatch, taken: int = 0, **stats: int) -> None:
    """What torch says of a GPU of 80 GiB that is not there. Its own figures hold what a sleeping engine gave back."""
    names = {"peak": "reserved_bytes.all.peak", "now": "reserved_bytes.all.current", "used": "allocated_bytes.all.peak"}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: ((80 - taken) * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {x: stats.get(key, 0) * GIB for key, x in names.items()})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)


def test_on_a_gpu_a_phase_leaves_out_what_the_engine_gave_back(monkeypatch):
    """On a GPU a phase counts all memory that is taken, but nothing that the sleeping engine gave back. CUDA has 2
    GiB; of an engine of 40, 1 stays; the trainer holds 12 now, 60 at the peak, of which it used 55.
    """
    fake_gpu(monkeypatch, taken=2 + 1 + 12, peak=40 + 60, now=40 + 12, used=40 + 55)
    assert watch.peak(torch.device("cuda")) == ((2 + 1 + 60) * GIB, (2 + 1 + 55) * GIB)


def test_a_node_sums_its_ranks_and_their_child_processes(monkeypatch):
    """A node's memory is the sum over its ranks, with the processes below them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert watch.largest_node([1, 2, 5, 1, 0, 0]) == 6
    code = "import subprocess, sys; x = bytearray(64 << 20); print('made', flush=True); sys.stdin.read()"
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    before = watch.resident_of_children()
    with subprocess.Popen([sys.executable, "-c", below], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        grown = watch.resident_of_children() - before
        child.stdin.close()
    assert grown > 64 * MIB


# What cannot fit ----------------------------------------------------------------------------------------------------


def setup(**hardware):
    flags = "--model Qwen/Qwen2.5-7B --train_data x#1000 --out_dir o --total_steps 1 --prompts_per_step 8"
    flags += " --micro_batch_tokens 4096 --gradient_checkpointing --plan_gpus 8"
    args = parse_flags(flags.split())
    found = setup_of(args, config_of(args.model))
    return replace(found, hardware=replace(found.hardware, **hardware))


def test_a_run_that_cannot_fit_is_refused_with_the_dry_run():
    """A run that cannot fit is refused, and the dry run is offered."""
    fits = setup()
    check_fit(fits, free=79 * GIB)
    for found, free, words in (
        (fits, 20, r"GPU, .* needs \d+\.\d GiB of 20\.0"),  # others have taken the rest
        (setup(host_bytes=1 * GIB), 79, r"host RAM, .* needs \d+ GiB of 1 on each node"),
    ):
        with pytest.raises(ValueError, match=f"{words}.*start the same command with --dry_run"):
            check_fit(found, free=free * GIB)


def test_the_prediction_for_a_gpu_is_the_need_of_the_dry_run():
    """The prediction for a GPU is what the dry run says that the run needs."""
    predicted, phases = predicted_bytes(setup(), replace(CPU, device=torch.device("cuda"))), gpu_phases(setup())
    assert predicted["sample"] == predicted["load"] == predicted["sync"] == needed(phases["rollout"])
    assert predicted["update"] == max(needed(phases["update"]), needed(phases["optimizer"]))


def test_on_a_cpu_the_prediction_leaves_the_reserve_out(monkeypatch, tmp_path):
    """On a CPU the prediction leaves the reserve out, and a rank holds what is offloaded."""
    config = config_of("Qwen/Qwen2.5-1.5B")
    config.save_pretrained(tmp_path)
    flags = f"--model {tmp_path} --train_data x#100 --out_dir o --total_steps 1 --plan_gpus 2 --prompts_per_step 8"
    plain, moved = (setup_of(parse_flags(f"{flags} {more}".split()), config) for more in ("", "--offload all"))
    monkeypatch.setattr(watch, "peak_resident", lambda: GIB)
    monkeypatch.setattr(watch, "resident_of_children", lambda: GIB // 8)
    world = replace(CPU, num_trainers=2)
    found, offloaded = predicted_bytes(plain, world), predicted_bytes(moved, world)
    assert found["host"] == 2 * (GIB // 8 + max(size for name, size in found.items() if name != "host"))
    kept, weights, tables = 12 * plain.model.parameters / 2, 2 * plain.model.parameters, 2 * 2 * plain.model.table
    for sequences, cache in ((None, GIB), (8, 16 * 2048 * plain.model.kv_per_token * 2)):
        size = predicted_bytes(plain, world, sequences)["sample"]
        assert size == pytest.approx((1 + 1 / 3) * GIB + 1.05 * kept + 1.5 * weights + tables + cache)
    gradients = 4 * plain.model.parameters / 2  # they are always there
    assert found["sample"] - 1.05 * kept == pytest.approx(offloaded["sample"] - kept - gradients)


def test_a_run_on_a_gpu_asks_for_the_memory_of_that_gpu(tmp_path, monkeypatch):
    """Qwen2.5-7B with fp32 masters on a single GPU: 16 bytes for each of its 7.6 billion parameters."""
    config_of("Qwen/Qwen2.5-7B").save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total, total))
    monkeypatch.setattr(watch, "host_bytes", lambda: 1000 * GIB)
    monkeypatch.setattr(watch.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000 * GIB))
    flags = f"--model {tmp_path} --train_data x --out_dir {tmp_path} --total_steps 1 --prompts_per_step 8"
    args = parse_flags([*flags.split(), "--gradient_checkpointing"])
    world, total = replace(CPU, device=torch.device("cuda")), 320 * GIB
    found = watch.watch_memory(args, 100, world)
    assert found.limit == total and total > found.predicted["update"] > 16 * 7.6e9
    total = 80 * GIB
    with pytest.raises(ValueError, match=r"the run does not fit, .* GiB of 80\.0"):
        watch.watch_memory(args, 100, world)


@pytest.mark.parametrize(
    ("flags", "num"),
    [
        ("--keep_checkpoints 2", 1),  # only the last step is saved
        ("--keep_checkpoints 2 --save_every 10 --keep_best eval/x/avg@1 --eval_data x --eval_every 5", 4),
        ("--keep_checkpoints 0 --save_every 40", 3),  # after 40, 80, 100
        ("--keep_checkpoints 0 --save_every 10 --stop_after 25", 3),
    ],
)
def test_a_run_whose_checkpoints_do_not_fit_the_disk_is_refused(flags, num, tmp_path, monkeypatch):
    """A run whose checkpoints do not fit on the disk does not start."""
    common = "--model Qwen/Qwen2.5-7B --train_data x#1000 --out_dir o --total_steps 100 --prompts_per_step 8 "
    args = parse_flags([*common.split(), *flags.split(), "--plan_gpus", "1"])
    found = setup_of(args, config_of(args.model))
    assert disk_bytes(found) == num * checkpoint_bytes(found)
    for name in ("step_10", "unfinished_step_20", "damaged_step_30"):  # the last is never removed
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * 500)
    free = int(disk_bytes(found)) - 1000
    monkeypatch.setattr(watch.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    check_disk(found, tmp_path)
    free -= 1
    with pytest.raises(ValueError, match=f"{num} checkpoints of 99.3 GiB need .* holds 9.31e-07 of .*; make room, "):
        check_disk(found, tmp_path)


def test_a_model_that_cannot_be_planned_is_watched_all_the_same(monkeypatch):
    """A model that the dry run does not know is watched without a prediction."""
    monkeypatch.setattr(watch, "setup_of", mock.Mock(side_effect=ValueError("the dry run knows ...")))
    monkeypatch.setattr(watch, "load_config", lambda path: None)
    memory = watch.watch_memory(parse_flags(["--model", "m", "--train_data", "x", "--out_dir", "o"]), 100, CPU)
    (report,) = memory.remarks({"memory/update_gib": 1.0})
    assert report.endswith("the dry run has no figures for it: update 1.00")


# Memory that runs out -------------------------------------------------------------------------------------------------

RANK_3 = replace(CPU, trainer_rank=3, num_trainers=4)
TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 80.00 GiB of which 1.00 GiB is free."
)
CPU_TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
CPU_TORCH += "allocate 268435456 bytes. Error code 12 (Cannot allocate memory)"
PINNED = "Registering memory failed with cudaError: 2. Consider launching with CUDA_LAUNCH_BLOCKING=1 to debug."
LOWER_BATCH = "lower --micro_batch_tokens, add --gradient_checkpointing, "


def said(memory: MemoryWatch, phase: str, error: BaseException) -> str:
    with pytest.raises(MemoryError) as raised, memory.phase(phase):
        raise error
    return str(raised.value)


@pytest.fixture
def on_gpu(monkeypatch) -> MemoryWatch:
    fake_gpu(monkeypatch)
    return MemoryWatch(replace(RANK_3, device=torch.device("cuda")), {})


@pytest.mark.parametrize(
    ("phase", "error", "begins", "way"),
    [
        ("sample", torch.OutOfMemoryError(TORCH), "GPU memory", "lower --gpu_memory_utilization"),
        ("sleep", RuntimeError("CUDA Error: out of memory at cumem.cpp:1"), "GPU memory", "--gpu_memory_utilization"),
        ("pack", torch.OutOfMemoryError(TORCH), "GPU memory", LOWER_BATCH),
        ("logprobs", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "GPU memory", "--offload_reference"),
        ("update", torch.AcceleratorError("CUDA error: out of memory\nCUDA"), "GPU or pinned host memory",
         "--offload optimizer; or use less of --offload"),
        ("update", RuntimeError(PINNED), "host memory", "use less of --offload"),
        ("reward", OSError(12, "Cannot allocate memory"), "host memory", "fewer --reward_workers"),
    ],
)  # fmt: skip
def test_each_phase_and_each_kind_of_memory_has_its_flags(phase, error, begins, way, on_gpu):
    sentence = said(on_gpu, phase, error)
    assert sentence.startswith(f"{begins} ran out on rank 3 in phase {phase}; ") and way in sentence
    assert str(error).splitlines()[0] in sentence, "which tells what was asked for"


def test_the_engines_sentence_about_its_memory_stays_the_last(on_gpu):
    """What the engine says about its memory stays the last sentence."""
    error = MemoryError("GPU memory ran out while the engine takes new weights; lower --gpu_memory_utilization.")
    error.__cause__ = torch.OutOfMemoryError(TORCH)
    assert said(on_gpu, "sync", error) == str(error)


def test_on_a_cpu_only_flags_with_an_effect_are_named():
    """On a CPU no flag is named that has no effect there, and a phase inside another one reports alone."""
    memory = MemoryWatch(RANK_3, {})
    sentence = said(memory, "update", RuntimeError(CPU_TORCH))
    expected = f"host memory ran out on rank 3 in phase update; {LOWER_BATCH}or give --param_dtype bfloat16"
    assert sentence == f"{expected} ({CPU_TORCH})."
    with pytest.raises(MemoryError) as raised, memory.phase("sample"), memory.phase("reward"):
        np.zeros(2**50)
    assert "in phase reward; " in str(raised.value) and "8.00 PiB" in str(raised.value)
    assert str(raised.value).count("ran out") == 1


@pytest.mark.parametrize("error", [RuntimeError("shapes"), OSError(28, "No space")])
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as raised, MemoryWatch(RANK_3, {}).phase("update"):
        raise error
    assert raised.value is error


def test_the_ways_out_are_flags_of_the_program():
    assert set(re.findall(r"--\w+", str(watch.WAYS_OUT))) <= set(FLAGS)
    assert watch.WAYS_OUT.keys() == {*watch.PHASES, "host"}


@pytest.mark.parametrize(
    ("num_ranks", "function", "phase", "way"),
    [
        (2, "grpo.total_loss", "update", "--gradient_checkpointing"),
        (1, "rollout.repack", "load", "--param_dtype bfloat16"),  # in the first sync
    ],
)
def test_a_rank_without_memory_ends_the_run_with_a_sentence(num_ranks, function, phase, way, policy, tmp_path):
    """A run whose last rank gets no memory ends with the sentence about it. The limit is a real one, of the
    process's address space.
    """
    flags = training_flags(policy, tmp_path / "run", eval_data=None, eval_every=None, eval_before_training=None)
    start = time.monotonic()
    done = run_ranks(num_ranks, PROGRAMS, ["starved", function, num_ranks - 1, *flags], 200)
    assert done.returncode == 1
    assert time.monotonic() - start < 190, "nobody waits for the rank that is gone"
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: host memory ran out")]
    assert f" ran out on rank {num_ranks - 1} in phase {phase}; " in error and way in error
    assert "OutOfMemory" not in done.stderr, "no traceback of it"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_update_takes_the_planned_memory_within_10_percent(num_ranks, tmp_path):
    """An update takes the memory that the planner says, within 10 percent, under every memory policy."""
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    AutoConfig.for_model("qwen2", **sizes).save_pretrained(tmp_path)
    batch = ("--micro_batch_tokens", 256, "--length", 32)
    done = torchrun(num_ranks, "benchmarks/bench_memory.py", "--model", tmp_path, *batch)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == num_ranks and found["ratios"].keys() == POLICIES.keys()
    assert all(0.9 <= ratio <= 1.1 for ratio in found["ratios"].values()), found["ratios"]
