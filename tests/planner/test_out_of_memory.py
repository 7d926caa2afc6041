"""Memory that runs out, on a GPU or on the host, in any phase and on any rank, ends a run with one sentence."""

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
from planner.watch import MemoryWatch, OutOfMemory

GIB = 2**30
CPU = World(rank=3, size=4, tp_size=1, device=torch.device("cpu"))
TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 80.00 GiB of which 1.00 GiB is free."
)
CPU_TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
CPU_TORCH += "allocate 268435456 bytes. Error code 12 (Cannot allocate memory)"
PINNED = "Registering memory failed with cudaError: 2. Consider launching with CUDA_LAUNCH_BLOCKING=1 to debug."
LOWER_BATCH = "lower --micro_batch_tokens, add --gradient_checkpointing, "


def said(memory: MemoryWatch, phase: str, error: BaseException) -> str:
    with pytest.raises(OutOfMemory) as raised, memory.phase(phase):
        raise error
    return str(raised.value)


@pytest.fixture
def on_gpu(monkeypatch) -> MemoryWatch:
    FakeGpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    return MemoryWatch(replace(CPU, device=torch.device("cuda")), {})


@pytest.mark.parametrize(
    ("phase", "error", "begins", "ways"),
    [
        ("sample", torch.OutOfMemoryError(TORCH), "GPU memory", ["2.00 GiB", "lower --gpu_memory_utilization."]),
        ("pack", torch.OutOfMemoryError(TORCH), "GPU memory", [LOWER_BATCH]),
        ("logprobs", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "GPU memory", [
            "a size that the error does not tell", "add --offload_reference."]),
        ("update", torch.AcceleratorError("CUDA error: out of memory\nCUDA"), "GPU or pinned host memory", [
            "--offload optimizer; or use less of --offload"]),
        ("update", RuntimeError(PINNED), "host memory", [
            "update; use less of --offload"]),
        ("update", RuntimeError(CPU_TORCH), "host memory", ["0.25 GiB in phase update; use less of --offload"]),
        ("reward", OSError(12, "Cannot allocate memory"), "host memory", ["fewer --reward_workers"]),
    ],
)  # fmt: skip
def test_each_phase_and_each_kind_of_memory_has_its_flags(phase, error, begins, ways, on_gpu):
    sentence = said(on_gpu, phase, error)
    assert sentence.startswith(f"{begins} ran out on rank 3, asked for ") and f" in phase {phase}; " in sentence
    assert all(way in sentence for way in ways), sentence


def test_what_the_engine_says_of_its_memory_stays_the_last_sentence(on_gpu):
    error = MemoryError("GPU memory ran out while the engine takes new weights; lower --gpu_memory_utilization.")
    error.__cause__ = torch.OutOfMemoryError(TORCH)
    assert said(on_gpu, "sync", error) == str(error)


def test_on_a_cpu_no_flag_is_named_that_has_no_effect_there():
    sentence = said(MemoryWatch(CPU, {}), "update", RuntimeError(CPU_TORCH))
    expected = f"host memory ran out on rank 3, asked for 0.25 GiB in phase update; {LOWER_BATCH}"
    assert sentence == f"{expected}or give --param_dtype bfloat16."


def test_the_errors_of_python_and_numpy_count_and_a_phase_inside_another_reports_alone():
    memory = MemoryWatch(CPU, {})
    with pytest.raises(OutOfMemory) as raised, memory.phase("sample"), memory.phase("reward"):
        np.zeros(2**50)
    assert "asked for 8.00 PiB in phase reward; " in str(raised.value)
    assert str(raised.value).count("ran out") == 1


@pytest.mark.parametrize("error", [RuntimeError("shapes"), ValueError("out of memory"), OSError(28, "No space")])
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as raised, MemoryWatch(CPU, {}).phase("update"):
        raise error
    assert raised.value is error


def test_the_ways_out_are_flags_of_the_program():
    assert set(re.findall(r"--\w+", str(watch.WAYS_OUT))) <= set(FLAGS)
    assert watch.WAYS_OUT.keys() == {*watch.PHASES, "host"}


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
def test_a_run_whose_last_rank_gets_no_memory_ends_with_the_sentence(num_ranks, function, phase, way, policy, tmp_path):
    """The limit is a real one, of the process's address space."""
    flags = training_flags(policy, tmp_path / "run", eval_data=None, eval_every=None, eval_before_training=None)
    start = time.monotonic()
    done = run_ranks(num_ranks, str(ROOT / "tests/starved_run.py"), [function, str(num_ranks - 1), *flags], 200)
    assert done.returncode == 1
    assert time.monotonic() - start < 190, "nobody waits for the rank that is gone"
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: host memory ran out")]
    assert error.startswith(
        f"error: host memory ran out on rank {num_ranks - 1}, asked for 1.00 GiB in phase {phase}; "
    )
    assert way in error
    assert "OutOfMemory" not in done.stderr, "no traceback of it"
