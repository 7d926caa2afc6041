"""Checkpoints between numbers of ranks: saved on one, loaded on another, bit for bit the same; agreement on errors."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule

import checkpoint
from extras.teacher.moving import move_references
from flags import Saving
from fsdp_utils import World, gather_from_ranks
from helpers.distributed import on_ranks, parsed, train
from helpers.made_up import build, make_model_of_family
from helpers.runs import largest_file
from runtime.files import DiskError
from schedule import UpdateStep

CHAIN = [  # ranks, flags of memory
    (1, ""), (2, "--shard_ranks 1 --offload optimizer"), (4, "--shard_ranks 2 --offload all"), (2, ""), (1, ""),
]  # fmt: skip
# The last ones are a family with windows and one with experts, in folders beside the runs.
MOVING = "--kl_coef 1 --reference_every 1 --reference_mixup 0.5"
SAVED = (
    f"--param_dtype float32 {MOVING}", "--param_dtype bfloat16", "--lora_rank 3",
    "--model FOLDER/gemma_3 --dtype float32", "--model FOLDER/qwen3_moe",
)  # fmt: skip
STATE = {"prompts_drawn": 12}


def writer(path: str, folder: Path, world: World, said: list[str]) -> checkpoint.Writer:
    folder.mkdir(parents=True, exist_ok=True)
    companions = checkpoint.files_of(path, torch.float32) if world.is_main else {}
    return checkpoint.Writer(folder, companions, Saving(keep_checkpoints=0), world, said.append)


def reshard(whole: World, path: str, folder: str, step: str, words: str) -> None:
    """Step 1 trains and saves; each later one loads the checkpoint before and saves it again."""
    number = int(step)
    for place, case in enumerate(SAVED):
        given = f"--model {path} --prompts_per_step 4 {case} {words}".replace("FOLDER", folder)
        runs, args = Path(folder) / str(place), parsed(given, whole.num_trainers)
        world = replace(whole, shard_ranks=args.shard_ranks)
        policy, _, optimizer = build(args, world)
        is_plain = world.num_trainers == 1 and (args.dtype == "float32" or args.param_dtype == "bfloat16")
        assert isinstance(policy, FSDPModule) is not is_plain
        if number == 1:
            train((policy, None, optimizer), args, world, 2)
            move_references(policy, optimizer, UpdateStep(0, 0.0, True, 1.0, 0, reference_mixup=0.5))
        else:
            assert checkpoint.latest(runs, world, print) == (number - 1, runs / f"step_{number - 1}")
            assert checkpoint.load(runs / f"step_{number - 1}", policy, optimizer) == STATE
        writer(path, runs, world, said := []).save(number, policy, optimizer, STATE)
        assert not said


@pytest.fixture(scope="module")
def runs(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reshard")
    make_model_of_family(folder / "gemma_3", "gemma3_text", sliding_window=8)
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    make_model_of_family(folder / "qwen3_moe", "qwen3_moe", **sizes)
    for step, (num_ranks, flags) in enumerate(CHAIN, start=1):
        on_ranks(num_ranks, reshard, policy, folder, step, flags)
    return folder


def everything_in(folder) -> dict[str, object]:
    """Name -> the whole tensor, or value, in the shards of a checkpoint."""
    reader = dcp.FileSystemReader(folder / "trainer")
    listed = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(each.size, dtype=each.properties.dtype) if hasattr(each, "size") else None
        for name, each in listed.items()
    }
    dcp.load(found, storage_reader=reader, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    return found


@pytest.mark.parametrize("case", SAVED)
def test_checkpoints_keep_every_bit_between_1_2_and_4_ranks(case, runs):
    folder = runs / str(SAVED.index(case))
    first = everything_in(folder / "step_1")
    kinds = {name.rpartition(".")[2] for name, value in first.items() if isinstance(value, torch.Tensor)}
    assert {"exp_avg", "exp_avg_sq", "weight"} <= kinds
    assert all(value.any() for name, value in first.items() if name.endswith("exp_avg_sq") and "lora_A" not in name)
    for step in range(2, len(CHAIN) + 1):
        found = everything_in(folder / f"step_{step}")
        assert found.keys() == first.keys()
        for name, expected in first.items():
            is_same = found[name].equal(expected) if isinstance(expected, torch.Tensor) else found[name] == expected
            assert is_same, f"step {step}: {name}"
        assert json.loads((folder / f"step_{step}" / "trainer" / "progress.json").read_text()) == STATE
        for file in folder.glob("step_1/**/*.safetensors"):  # the exported policy, and the adapter
            assert (folder / f"step_{step}" / file.relative_to(folder / "step_1")).read_bytes() == file.read_bytes()
    assert len(list((folder / "step_3" / "trainer").glob("*.distcp"))) > 1


def full_disk(world: World, path: str, place: str) -> None:
    """Only the second rank cannot write: both give up the checkpoint, or end if it is required."""
    folder, said, why = Path(place), [], "a file could not be written to its end"
    args = parsed(f"--model {path} --prompts_per_step 4 {SAVED[0]}", world.num_trainers)
    policy, _, optimizer = build(args, world)
    train((policy, None, optimizer), args, world, 1)
    saving = writer(path, folder, world, said)
    saving.save(10, policy, optimizer, STATE)
    with nullcontext() if world.is_main else largest_file(100_000):
        saving.save(20, policy, optimizer, STATE)
        with pytest.raises(DiskError, match=f"step 20 could not be written: {why} .*; make room"):
            saving.save(20, policy, optimizer, STATE, is_required=True)
    assert f"step 20 could not be written: {why} (" in said.pop()
    gather_from_ranks(None)  # the main process has removed what was begun
    assert [each.name for each in folder.iterdir()] == ["step_10"]
    saving.save(21, policy, optimizer, STATE)
    assert checkpoint.latest(folder, world, said.append) == (21, folder / "step_21")
    shards = folder / "step_21" / "trainer" / "__1_0.distcp"
    if world.is_main:
        shards.write_bytes(shards.read_bytes()[:-1])
    assert checkpoint.latest(folder, world, said.append) == (10, folder / "step_10")
    assert len(said) == world.is_main


def test_a_disk_that_refuses_one_rank_costs_only_this_checkpoint(policy, tmp_path):
    on_ranks(2, full_disk, policy, tmp_path)
