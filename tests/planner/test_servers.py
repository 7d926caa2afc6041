"""Generation servers in the dry run: whose memory is whose, who waits for whom."""

from dataclasses import replace

import pytest

from inputs.command_line import parse_flags
from planner.dry_run import assumed_of, config_of, dry_run, setup_of
from planner.memory import gpu_phases, host_phases
from planner.setup import Setup
from planner.time import Assumed, phase_seconds, rollout_seconds, step_seconds, traffic, waiting_seconds

FLAGS = (
    "--model Qwen/Qwen3-4B-Base --train_data x#10000 --out_dir o --total_steps 10 --prompts_per_step 24 "
    "--group_size 16 --max_completion_tokens 8192 --micro_batch_tokens 10240 --gradient_checkpointing "
)
SERVERS = "--engine server --plan_gpus 2 --generation_gpus 2 3 4 5 6 7 "


def plan(more: str) -> tuple[Setup, Assumed]:
    args = parse_flags((FLAGS + more).split())
    return setup_of(args, config_of(args.model)), assumed_of(args)


def test_ranks_hold_no_engine_and_servers_nothing_of_the_trainer():
    phases, colocated = gpu_phases(plan(SERVERS)[0]), gpu_phases(plan("--plan_gpus 2")[0])
    assert "rollout" not in phases
    for name in phases.keys() - {"server"}:
        assert phases[name].engine == {}
        assert phases[name].trainer == colocated[name].trainer
    assert phases["server"].trainer == {}
    weights_and_cache = colocated["rollout"].engine.items()
    assert weights_and_cache < phases["server"].engine.items(), "and the weights that arrive"


def test_servers_are_counted_by_gpus_by_urls_or_by_their_number():
    tp = "--engine server --plan_gpus 2 --tensor_parallel_size 2 "
    for more, gpus in (("--generation_gpus 2 3 4 5", 4), ("--server_urls http://localhost:1", 2), ("", 2)):
        setup, _ = plan(tp + more)
        assert (setup.num_trainers, setup.hardware.generation_gpus, setup.num_engines) == (2, gpus, gpus // 2)


def test_a_step_ahead_takes_as_long_as_the_slower_of_the_two_and_the_sync():
    setup, assumed = plan(SERVERS + "--steps_ahead 1")
    seconds = phase_seconds(setup, assumed)
    train = sum(seconds.values()) - seconds["rollout"] - seconds["sync"]
    assert step_seconds(setup, assumed) == pytest.approx(max(seconds["rollout"], train) + seconds["sync"])
    waits = waiting_seconds(setup, assumed)
    assert min(waits.values()) == 0 and max(waits.values()) == pytest.approx(abs(seconds["rollout"] - train))
    on_policy = replace(setup, run=replace(setup.run, steps_ahead=0))
    assert step_seconds(on_policy, assumed) == pytest.approx(sum(seconds.values()))
    assert waiting_seconds(on_policy, assumed) == pytest.approx({"ranks": seconds["rollout"], "servers": train})


def test_in_flight_two_steps_ahead_nobody_waits_for_the_longest_completion():
    """One step ahead it does not help: the step after is begun when this one is complete."""
    one, one_in_flight, two, two_in_flight = (
        rollout_seconds(*plan(SERVERS + more))
        for more in ("--steps_ahead 1", "--steps_ahead 1 --in_flight", "--steps_ahead 2", "--steps_ahead 2 --in_flight")
    )
    assert one == one_in_flight == two > 1.2 * two_in_flight


def test_each_server_gets_the_weights_from_the_main_rank():
    setup, assumed = plan(SERVERS + "--steps_ahead 1")
    assert traffic(setup, assumed)["to servers"] == 6 * setup.model.parameters * 2
    assert traffic(*plan("--plan_gpus 2"))["to servers"] == 0
    processes = [host_phases(each)["run"]["processes"] for each in (setup, plan("--plan_gpus 2")[0])]
    assert processes[0] > processes[1]


def test_the_report_says_who_waits(capsys):
    args = parse_flags([*FLAGS.split(), *SERVERS.split(), "--steps_ahead", "4", "--in_flight", "--dry_run"])
    dry_run(args)
    text = capsys.readouterr().out
    assert "on 2 + 6 x H100-80GB" in text and "6 servers of 1 GPUs" in text
    assert "sampling 4 steps ahead: ranks wait " in text
