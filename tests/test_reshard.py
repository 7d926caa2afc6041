"""Checkpoints between numbers of ranks: saved on one, loaded on another, bit for bit the same; agreement on errors."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from helpers.distributed import SAVED, STATE, on_ranks
from helpers.made_up import make_model_of_family

CHAIN = [  # ranks, flags of memory
    (1, ""), (2, "--shard_ranks 1 --offload optimizer"), (4, "--shard_ranks 2 --offload all"), (2, ""), (1, ""),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reshard")
    make_model_of_family(folder / "gemma_3", "gemma3_text", sliding_window=8)
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    make_model_of_family(folder / "qwen3_moe", "qwen3_moe", **sizes)
    for step, (num_ranks, flags) in enumerate(CHAIN, start=1):
        on_ranks(num_ranks, "distributed:reshard", policy, folder, step, flags)
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
    """From 1 rank to 2 and 4 and back, parameters and optimizer stay the same to the bit."""
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


def test_a_disk_that_refuses_one_rank_costs_only_this_checkpoint(policy, tmp_path):
    """A disk that refuses one rank costs all ranks this checkpoint alone."""
    on_ranks(2, "distributed:full_disk", policy, tmp_path)
