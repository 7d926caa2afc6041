"""Run under torchrun: a checkpoint from each number of ranks to the next, and a disk that refuses one of two ranks.

reshard: the first step trains two updates and saves; each later step loads the checkpoint before and saves it again.

torchrun --nproc_per_node N tests/distributed_checkpoint.py POLICY_FOLDER RUNS_FOLDER reshard STEP FLAGS
torchrun --nproc_per_node 2 tests/distributed_checkpoint.py POLICY_FOLDER RUNS_FOLDER full_disk
"""

import contextlib
import errno
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from transformers import AutoTokenizer

import checkpoint
from flags import Saving
from fsdp_utils import World, close_world, gather_from_ranks, init_world
from helpers import build, largest_file, make_rollout, train_once, whole_update
from ranks import parsed
from runtime.files import DiskError

# The last one is a family with windows, in a folder beside the runs.
CASES = ("--param_dtype float32", "--param_dtype bfloat16", "--lora_rank 3", "--model gemma_3")
STATE = {"prompts_drawn": 12}


def writer(path: str, folder: Path, world: World, said: list[str]) -> checkpoint.Writer:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return checkpoint.Writer(folder, [tokenizer], Saving(keep_checkpoints=0), world, said.append)


def reshard(path: str, folder: Path, step: int, flags: str) -> None:
    whole = init_world(tp_size=1, timeout_minutes=2)
    for number, case in enumerate(CASES):
        case = case.replace("gemma_3", str(folder / "gemma_3"))
        given = f"--model {path} --prompts_per_step 4 {case} {flags}"
        runs, args = folder / str(number), parsed(given, whole.num_trainers)
        world = replace(whole, shard_ranks=args.shard_ranks)
        policy, _, optimizer = build(args, world)
        if step == 1:
            for i in range(2):
                update = whole_update(make_rollout(), args, policy, world)
                train_once(policy, optimizer, update, args, world, rate=1e-3, index=i)
        else:
            assert checkpoint.latest(runs, world, print) == (step - 1, runs / f"step_{step - 1}")
            assert checkpoint.load(runs / f"step_{step - 1}", policy, optimizer) == STATE
        writer(path, runs, world, said := []).save(step, policy, optimizer, STATE)
        assert not said


def refusing(way: str) -> AbstractContextManager:
    """`dcp` tells other ranks of a failure in its own part; what comes after it, we do."""
    broken = OSError(errno.EIO, "Input/output error")
    return patch("runtime.files.checksums", side_effect=broken) if way == "checksums" else largest_file(100_000)


def full_disk(path: str, folder: Path) -> None:
    """Only the second rank cannot write: both give up the checkpoint, or end if it is required."""
    world, said = init_world(tp_size=1, timeout_minutes=2), []
    args = parsed(f"--model {path} --prompts_per_step 4 {CASES[0]}", world.num_trainers)
    policy, _, optimizer = build(args, world)
    train_once(policy, optimizer, whole_update(make_rollout(), args, policy, world), args, world, rate=1e-3)
    for way, why in (("shards", "a file could not be written to its end"), ("checksums", "Input/output error")):
        saving = writer(path, folder / way, world, said)
        saving.save(10, policy, optimizer, STATE)
        with contextlib.nullcontext() if world.is_main else refusing(way):
            saving.save(20, policy, optimizer, STATE)
            with pytest.raises(DiskError, match=f"step 20 could not be written: {why} .*; make room"):
                saving.save(20, policy, optimizer, STATE, is_required=True)
        assert f"step 20 could not be written: {why} (" in said.pop()
        gather_from_ranks(None)  # the main process has removed what was begun
        found = sorted(path.name for path in (folder / way).iterdir())
        assert found == ["step_10"], found
        saving.save(21, policy, optimizer, STATE)
        assert checkpoint.latest(folder / way, world, said.append) == (21, folder / way / "step_21")
    shards = folder / way / "step_21" / "trainer" / "__1_0.distcp"
    if world.is_main:
        shards.write_bytes(shards.read_bytes()[:-1])
    gather_from_ranks(None)
    assert checkpoint.latest(folder / way, world, said.append) == (10, folder / way / "step_10")
    assert len(said) == world.is_main


if __name__ == "__main__":
    path, folder, what, *more = sys.argv[1:]
    if what == "reshard":
        reshard(path, Path(folder), int(more[0]), more[1])
    else:
        full_disk(path, Path(folder))
    close_world()
