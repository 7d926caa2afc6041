"""Memory is measured phase by phase; a run without memory ends with one sentence; an update takes what is planned."""

import importlib
import json
import mmap
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bench_memory import POLICIES
from flags import FLAGS
from helpers.made_up import ALONE
from helpers.runs import CALL, NO_EVAL, name_of, run_program, run_ranks, torchrun, training_flags
from runtime.ways_out import LARGER_SHARE, WAYS_OUT
from watch import memory as watch
from watch.memory import MemoryWatch

GIB, MIB = 2**30, 2**20


def hold(size: int) -> mmap.mmap:
    """So many bytes of resident memory, until they are closed."""
    block = mmap.mmap(-1, size)
    for offset in range(0, size, mmap.PAGESIZE):
        block[offset] = 1
    return block


def test_each_phase_has_its_own_memory_peak():
    """And one without a figure counts to that around it. Within 8 MiB: what Python itself takes."""
    memory = MemoryWatch(ALONE)
    watch.restart(ALONE.device)
    block = hold(64 * MIB)  # before the first phase: loading
    with memory.phase("update"):
        block.close()
        hold(96 * MIB).close()
    with memory.phase("sample"), memory.phase("reward"):
        hold(48 * MIB).close()
    with memory.phase("sync"):
        pass
    found = memory.step(1, {})
    for name, size in {"load": 64, "update": 96, "sample": 48}.items():
        over = (found[f"memory/{name}_gib"] - found["memory/sync_gib"]) * 1024
        assert over == pytest.approx(size, abs=8), name
    assert found["memory/peak_gib"] == found["memory/update_gib"] and "memory/reward_gib" not in found
    assert found["memory/host_gib"] >= found["memory/update_gib"], "the host's figure holds the processes below, too"
    assert "memory/load_gib" not in memory.step(1, {}), "they begin anew"


def test_a_node_sums_its_ranks_and_their_child_processes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert watch.largest_node([1, 2, 5, 1, 0, 0]) == 6
    code = "import sys; x = bytearray(64 << 20); print('made', flush=True); sys.stdin.read()"
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    before = watch.resident_of_children()
    with subprocess.Popen([sys.executable, "-c", below], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        grown = watch.resident_of_children() - before
        child.stdin.close()
    assert grown > 64 * MIB


RANK_3 = replace(ALONE, trainer_rank=3, num_trainers=4)
CPU_TORCH = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
LOWER_BATCH = "lower --micro_batch_tokens, add --gradient_checkpointing, "


def ended_with(memory: MemoryWatch, phase: str, error: BaseException) -> str:
    with pytest.raises(MemoryError) as raised, memory.phase(phase):
        raise error
    return str(raised.value)


def test_on_a_cpu_only_flags_with_an_effect_are_named_and_other_errors_pass():
    """And a phase inside another one reports alone."""
    memory = MemoryWatch(RANK_3)
    ways = f"{LOWER_BATCH}or give --param_dtype bfloat16 ({CPU_TORCH})."
    sentence = ended_with(memory, "update", RuntimeError(CPU_TORCH))
    assert sentence == f"memory ran out on rank 3 in phase update; {ways}"
    with pytest.raises(MemoryError) as raised, memory.phase("sample"), memory.phase("reward"):
        np.zeros(2**50)
    assert "in phase reward; " in str(raised.value) and "8.00 PiB" in str(raised.value)
    assert str(raised.value).count("ran out") == 1
    for error in (RuntimeError("shapes"), OSError(28, "No space")):
        with pytest.raises(type(error)) as raised, MemoryWatch(RANK_3).phase("update"):
            raise error
        assert raised.value is error


def test_the_ways_out_are_flags_of_the_program():
    assert set(re.findall(r"--\w+", f"{WAYS_OUT} {LARGER_SHARE}")) <= set(FLAGS)
    assert WAYS_OUT.keys() == {*watch.PHASES, "optimizer", "server", "engine", "host"}, "beside those of the loop"


def starved(where: str, rank: str, *flags: str) -> None:
    """Memory runs out on that rank at the first call of `where`: the process may grow by 64 MiB and asks for 1 GiB."""

    def ask(*arguments: object, **options: object) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, most))
        torch.empty(2**30, dtype=torch.uint8)

    if os.environ["RANK"] == rank:
        name, _, function = where.rpartition(".")
        setattr(importlib.import_module(name), function, ask)
    run_program(["train_grpo.py", *flags])


@pytest.mark.parametrize(("num_ranks", "function", "phase", "way"), [
    (2, "grpo.total_loss", "update", "--gradient_checkpointing"),
    (1, "rollout.repack", "load", "--param_dtype bfloat16"),  # in the first sync
])  # fmt: skip
def test_a_rank_without_memory_ends_the_run_with_a_sentence(num_ranks, function, phase, way, policy, tmp_path):
    """The limit, of the last rank, is a real one: of the process's address space."""
    flags = training_flags(policy, tmp_path / "run", **NO_EVAL)
    done = run_ranks(num_ranks, CALL, [name_of(starved), function, num_ranks - 1, *flags])
    assert done.returncode == 1, "nobody waits for the rank that is gone"
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: memory ran out")]
    assert f" ran out on rank {num_ranks - 1} in phase {phase}; " in error and way in error
    assert "OutOfMemory" not in done.stderr, "no traceback of it"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_update_takes_the_planned_memory_within_10_percent(num_ranks, tmp_path):
    AutoConfig.for_model(
        "qwen2", vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    given = ("--model", tmp_path, "--micro_batch_tokens", 256, "--length", 32)
    found = json.loads(torchrun(num_ranks, "benchmarks/bench_memory.py", *given).stdout.splitlines()[-1])
    assert found["ranks"] == num_ranks and found["ratios"].keys() == POLICIES.keys()
    assert all(0.9 <= ratio <= 1.1 for ratio in found["ratios"].values()), found["ratios"]
