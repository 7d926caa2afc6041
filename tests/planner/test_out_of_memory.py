"""Memory that runs out, on a GPU or on the host, in any phase and on any rank, ends a run with one report."""

import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from faked_memory import FakeGpu
from flags import FLAGS
from fsdp_utils import World
from helpers import ROOT, run_ranks, training_flags
from planner import watch
from planner.out_of_memory import OutOfMemory
from planner.watch import MemoryWatch

GIB = 2**30
CPU = World(rank=3, size=4, tp_size=1, device=torch.device("cpu"))
TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 80.00 GiB of which 1.00 GiB is free."
)
CPU_TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
CPU_TORCH += "allocate 268435456 bytes. Error code 12 (Cannot allocate memory)"
PINNED = "Registering memory failed with cudaError: 2. Consider launching with CUDA_LAUNCH_BLOCKING=1 to debug."
LOWER_BATCH = "lower --micro_batch_tokens, add --gradient_checkpointing, or "


def report_of(memory: MemoryWatch, phase: str, error: BaseException) -> list[str]:
    with pytest.raises(OutOfMemory) as raised, memory.phase(phase):
        raise error
    return str(raised.value).splitlines()


@pytest.fixture
def on_gpu(monkeypatch) -> MemoryWatch:
    """The watch of a rank whose GPU has a gathered matrix of 3 GiB, in a run that has sampled."""
    gpu = FakeGpu(monkeypatch)
    stats = torch.cuda.memory_stats
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats(device) | {
        "allocated_bytes.all.current": 60 * GIB,
    })  # fmt: skip
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    blocks = [(3 * GIB, "active_allocated"), (GIB // 2, "inactive"), (GIB, "active_allocated")]
    blocks = [{"size": size, "state": state} for size, state in blocks]
    of_engine = {"segment_pool_id": (0, 7), "blocks": [{"size": 40 * GIB, "state": "active_allocated"}]}
    snapshot = [{"segment_pool_id": (0, 0), "blocks": blocks}, of_engine]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    memory = MemoryWatch(replace(CPU, device=torch.device("cuda")), {"sample": 50 * GIB, "update": 70 * GIB})
    gpu.engine, gpu.reserved, gpu.reserved_peak, gpu.allocated_peak = 40 * GIB, 8 * GIB, 8 * GIB, 8 * GIB
    with memory.phase("sample"):
        pass
    gpu.asleep, gpu.reserved, gpu.reserved_peak, gpu.allocated_peak = 39 * GIB, 76 * GIB, 76 * GIB, 74 * GIB
    return memory


def test_a_gpu_that_is_full_gives_its_allocator_the_prediction_beside_the_truth_and_the_flags(on_gpu):
    first, gpu, allocator, blocks, host, phases, sentence = report_of(on_gpu, "update", torch.OutOfMemoryError(TORCH))
    assert first.startswith("out of memory on rank 3 in phase update, at tests/planner/test_out_of_memory.py:")
    assert first.endswith("asked for 2.00 GiB")
    assert gpu.strip() == "GPU, GiB: 1.00 of 80.00 are free; the engine is asleep"
    assert allocator.strip() == "torch, GiB: allocated 60.00 (peak 114.00), reserved 116.00"
    assert blocks.strip() == "blocks, GiB: largest in use 3.00, 1.00; largest unused 0.50"
    assert "are left; this rank has" in host
    assert phases.endswith(
        "in brackets what the dry run predicts: load 50.00, sample 50.00 (50.00), update 79.00 (70.00)"
    )
    assert sentence == f"GPU memory ran out on rank 3 in phase update; {LOWER_BATCH}--offload optimizer."


@pytest.mark.parametrize(
    ("phase", "error", "begins", "ways"),
    [
        ("sample", torch.OutOfMemoryError(TORCH), "GPU memory", ["lower --gpu_memory_utilization."]),
        ("pack", torch.OutOfMemoryError(TORCH), "GPU memory", [LOWER_BATCH]),
        ("logprobs", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "GPU memory", [
            "add --offload_reference."]),
        ("update", torch.AcceleratorError("CUDA error: out of memory\nCUDA"), "GPU or pinned host memory", [
            "--offload optimizer; or use less of --offload"]),
        ("update", RuntimeError(PINNED), "host memory", [
            "update; use less of --offload"]),
        ("update", RuntimeError(CPU_TORCH), "host memory", ["update; use less of --offload"]),
        ("reward", OSError(12, "Cannot allocate memory"), "host memory", ["fewer --reward_workers"]),
    ],
)  # fmt: skip
def test_each_phase_and_each_kind_of_memory_has_its_flags(phase, error, begins, ways, on_gpu):
    sentence = report_of(on_gpu, phase, error)[-1]
    assert sentence.startswith(f"{begins} ran out on rank 3 in phase {phase}; ")
    assert all(way in sentence for way in ways), sentence


def test_what_the_engine_says_of_its_memory_stays_the_last_sentence(on_gpu):
    error = MemoryError("GPU memory ran out while the engine takes new weights; lower --gpu_memory_utilization.")
    error.__cause__ = torch.OutOfMemoryError(TORCH)
    assert report_of(on_gpu, "sync", error)[-1] == str(error)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError(CPU_TORCH), "asked for 0.25 GiB"),
        (RuntimeError("std::bad_alloc"), "asked for a size that the error does not tell"),
    ],
)
def test_on_a_cpu_no_flag_is_named_that_has_no_effect_there(error, asked):
    first, *_, sentence = report_of(MemoryWatch(CPU, {}), "update", error)
    assert first.endswith(asked)
    assert sentence == f"host memory ran out on rank 3 in phase update; {LOWER_BATCH}give --param_dtype bfloat16."


def test_the_errors_of_python_and_numpy_count_and_a_phase_inside_another_reports_alone():
    memory = MemoryWatch(CPU, {})
    with pytest.raises(OutOfMemory) as raised, memory.phase("sample"), memory.phase("reward"):
        np.zeros(2**50)
    assert "in phase reward, at " in str(raised.value)
    assert "asked for 8.00 PiB" in str(raised.value)
    assert str(raised.value).count("out of memory") == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), ValueError("out of memory"), OSError(28, "No space")]
)
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as raised, MemoryWatch(CPU, {}).phase("update"):
        raise error
    assert raised.value is error


def test_the_ways_out_are_flags_of_the_program():
    texts = " ".join([*watch.WAYS_OUT.values(), *watch.WAYS_OUT_ON_CPU.values()])
    assert set(re.findall(r"--\w+", texts)) <= set(FLAGS)
    assert watch.WAYS_OUT.keys() == watch.WAYS_OUT_ON_CPU.keys() == {*watch.PHASES, "host"}


def test_before_linux_kills_a_rank_it_is_said_once_that_little_is_left(monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_LOOKS", 0.0)
    memory = MemoryWatch(CPU, {})
    for left in (4 * GIB, 2 * GIB, 1 * GIB):
        monkeypatch.setattr(watch, "available_bytes", lambda left=left: (left, 100 * GIB))
        with memory.phase("update"):
            pass
    (warning,) = capsys.readouterr().err.splitlines()
    assert "after phase update, 2.00 of 100.00 GiB of host RAM are left" in warning
    assert "fewer --reward_workers" in warning


@pytest.mark.parametrize(
    ("num_ranks", "function", "phase", "way"),
    [
        (2, "grpo.total_loss", "update", "--gradient_checkpointing"),
        (1, "rollout.seed_everything", "sample", "lower --max_completion_tokens"),
        (1, "rollout._repack_head", "load", "--param_dtype bfloat16"),  # in the first sync
    ],
)
def test_a_run_whose_last_rank_gets_no_memory_ends_with_the_report(num_ranks, function, phase, way, policy, tmp_path):
    """The limit is a real one, of the process's address space."""
    flags = training_flags(policy, tmp_path / "run", eval_data=None, eval_every=None, eval_before_training=None)
    start = time.monotonic()
    done = run_ranks(num_ranks, str(ROOT / "tests/starved_run.py"), [function, str(num_ranks - 1), *flags], 200)
    assert done.returncode == 1
    assert time.monotonic() - start < 190, "nobody waits for the rank that is gone"
    error = done.stderr[done.stderr.index("error: out of memory") :].splitlines()
    assert error[0].startswith(f"error: out of memory on rank {num_ranks - 1} in phase {phase}, at ")
    assert error[0].endswith("asked for 1.00 GiB")
    assert "in brackets what the dry run predicts: load" in error[2] and f"{phase} " in error[2]
    assert error[3].startswith(f"host memory ran out on rank {num_ranks - 1} in phase {phase}; ") and way in error[3]
    assert done.stderr.count("error: out of memory") == 1
    assert "OutOfMemory" not in done.stderr, "no traceback of it"
