"""--shard_ranks in the plan: what each GPU and each node holds, which way the collectives go, what is written."""

from dataclasses import replace

import pytest

from inputs.command_line import parse_flags
from planner.advice import advised, misfits
from planner.dry_run import assumed_of, config_of, setup_of
from planner.memory import checkpoint_bytes, gpu_phases, host_phases
from planner.report import report_of
from planner.setup import Setup
from planner.time import link_speed, phase_seconds, traffic

PARAMETERS = 7_615_616_512  # of Qwen2.5-7B
FLAGS = (
    "--model Qwen/Qwen2.5-7B --train_data x#10000 --out_dir o --total_steps 1 --prompts_per_step 256 --kl_coef 0.01 "
    "--gradient_checkpointing --plan_gpus 16 --plan_nodes 2 "
)


def plan(more: str = "", network: float = 50e9) -> Setup:
    args = parse_flags((FLAGS + more).split())
    setup = setup_of(args, config_of(args.model))
    return replace(setup, hardware=replace(setup.hardware, network_speed=network))


ASSUMED = assumed_of(parse_flags(FLAGS.split()))


@pytest.mark.parametrize(("shard_ranks", "copies"), [(8, 2), (2, 8)])
def test_a_gpu_holds_its_share_of_one_copy(shard_ranks, copies):
    found = plan(f"--shard_ranks {shard_ranks}")
    assert (found.num_trainers, found.num_copies) == (16, copies)
    parts = gpu_phases(found)["optimizer"].trainer
    expected = {"parameters": 4, "gradients": 4, "optimizer": 8, "reference": 2}  # bytes of a parameter
    assert {name: parts[name] * shard_ranks / PARAMETERS for name in expected} == expected
    assert report_of(found, ASSUMED)["completions_per_update_and_gpu"] == 2048 / 16, "each GPU trains its own"


def test_a_node_holds_as_many_copies_as_its_gpus_make_up():
    """Two nodes of 8: one copy on both, one on each, two on each."""
    moved = "--offload all --offload_reference "
    found = [host_phases(plan(moved + more)) for more in ("", "--shard_ranks 8", "--shard_ranks 4")]
    for name, size in (("parameters", 4), ("gradients", 4), ("optimizer", 8), ("reference", 2)):
        in_nodes = [phases["run"][name] / (size * PARAMETERS) for phases in found]
        assert in_nodes == [0.5, 1, 2], name
    gathered = [phases["checkpoint"]["the policy, gathered on rank 0"] / (2 * PARAMETERS) for phases in found]
    assert gathered == [1, 1, 1]
    assert all(phases["run"]["rounding of pinned memory"] > 0 for phases in found)


def test_a_checkpoint_is_written_once():
    assert checkpoint_bytes(plan("--shard_ranks 2")) == checkpoint_bytes(plan()) == PARAMETERS * (2 + 4 + 8)


def test_copies_exchange_the_shards_of_their_gradients():
    """A ring: each GPU sends (n - 1) / n of an all-gather, and twice that of an all-reduce."""
    whole, shared = traffic(plan(), ASSUMED), traffic(plan("--shard_ranks 8"), ASSUMED)
    assert whole["all-reduce of copies"] == 0
    micro_batches = whole["reduce-scatter"] / (4 * PARAMETERS * 15 / 16)
    assert shared["reduce-scatter"] == pytest.approx(micro_batches * 4 * PARAMETERS * 7 / 8)
    assert shared["all-reduce of copies"] == pytest.approx(2 * (4 * PARAMETERS / 8) * 1 / 2), "once in the update"
    assert shared["sync"] == pytest.approx(2 * PARAMETERS * 7 / 8)
    once = traffic(plan("--shard_ranks 8 --communicate_once"), ASSUMED)
    assert once["all-reduce of copies"] == shared["all-reduce of copies"]
    assert once["reduce-scatter"] == pytest.approx(shared["reduce-scatter"] / micro_batches)


@pytest.mark.parametrize(
    ("members", "stride", "speed"),
    [
        (8, 1, 450e9),  # a node: NVLink
        (2, 4, 450e9),  # every fourth GPU of a node
        (2, 8, 10e9),  # one GPU in each node: its own card
        (16, 1, 8 * 10e9 * 2 * 15 / 16),  # both nodes: 8 cards carry the half that each node lacks
        (4, 4, 2 * 10e9 * 2 * 3 / 4),  # two GPUs in each node
    ],
)
def test_a_collective_is_as_fast_as_what_it_goes_over(members, stride, speed):
    assert link_speed(plan(network=10e9), members, stride) == pytest.approx(0.7 * speed)


def test_the_report_says_which_way_they_go():
    whole, shared = (report_of(plan(more), ASSUMED)["assumptions"] for more in ("", "--shard_ranks 8"))
    ways = "shards go over the node's links, the all-reduce over the network"
    assert f"copies: 2 of the policy on 8 GPUs each; {ways}" in shared
    assert "copies" not in " ".join(whole)


def test_shards_within_a_node_are_faster_where_the_network_is_slow():
    whole, shared = (phase_seconds(plan(more, network=5e9), ASSUMED) for more in ("", "--shard_ranks 8"))
    assert shared["update"] < 0.8 * whole["update"]
    assert shared["logprobs"] < 0.8 * whole["logprobs"]
    fast = phase_seconds(plan("--shard_ranks 8"), ASSUMED)
    exchanged = 2 * 4 * PARAMETERS / 8 / 2  # of a ring of two
    per_byte = 1 / (0.7 * 5e9) - 1 / (0.7 * 50e9)
    assert shared["update"] - fast["update"] == pytest.approx(exchanged * per_byte), "the all-reduce, and nothing else"


def test_what_does_not_fit_in_copies_is_advised_to_have_fewer():
    tight = plan("--shard_ranks 2")
    assert misfits(tight)
    advice = [each["changes"] for each in advised(tight, ASSUMED)["changes_that_would_fit"]]
    assert ["--shard_ranks 4"] in advice
    assert not misfits(plan("--shard_ranks 4"))
