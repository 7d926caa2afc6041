"""Memory is measured phase by phase, compared with the dry run's figures, and refused where it cannot suffice."""

import mmap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from faked_memory import FakeGpu
from fsdp_utils import World
from inputs.command_line import parse_flags
from planner import meter, watch
from planner.dry_run import config_of, setup_of
from planner.memory import checkpoint_bytes, disk_bytes
from planner.watch import MemoryWatch, check_disk, check_fit, predicted_bytes

GIB = 2**30
MIB = 2**20
CPU = World(rank=0, size=1, tp_size=1, device=torch.device("cpu"))


def hold(size: int) -> mmap.mmap:
    """So many bytes of resident memory, until they are closed."""
    block = mmap.mmap(-1, size)
    for offset in range(0, size, mmap.PAGESIZE):
        block[offset] = 1
    return block


def test_each_phase_has_its_own_peak_and_one_without_a_figure_counts_to_the_phase_around_it():
    """Within 8 MiB: what Python itself takes meanwhile."""
    memory = MemoryWatch(CPU, {})
    with memory.phase("sync"):
        pass
    base = memory.metrics()["memory/sync_gib"]
    with memory.phase("update"):
        hold(96 * MIB).close()
    with memory.phase("sample"), memory.phase("reward"):
        hold(48 * MIB).close()
    with memory.phase("sync"):
        pass
    found = memory.metrics()
    over_base = {name: (value - base) * 1024 for name, value in found.items()}
    assert over_base["memory/update_gib"] == pytest.approx(96, abs=8)
    assert over_base["memory/sample_gib"] == pytest.approx(48, abs=8)
    assert over_base["memory/sync_gib"] == pytest.approx(0, abs=8)
    assert found["memory/peak_gib"] == found["memory/update_gib"]
    assert found["memory/host_gib"] >= found["memory/update_gib"], "the host's figure holds the processes below, too"
    assert "memory/reward_gib" not in found
    assert "memory/pinned_gib" not in found, "nothing is pinned without a GPU"


def test_what_comes_before_the_first_phase_is_the_loading():
    memory = MemoryWatch(CPU, {})
    meter.restart(CPU.device)
    block = hold(64 * MIB)
    with memory.phase("sample"):
        block.close()
    with memory.phase("update"):
        pass
    found = memory.metrics()
    assert (found["memory/load_gib"] - found["memory/update_gib"]) * 1024 == pytest.approx(64, abs=8)
    with memory.phase("sample"):
        pass
    assert "memory/load_gib" not in memory.metrics()


def test_a_phase_near_the_limit_is_warned_of_once_with_the_flags_to_change():
    memory = MemoryWatch(CPU, {})
    memory.limit, memory.host_limit = 10 * GIB, 100 * GIB
    metrics = {"memory/sample_gib": 9.6, "memory/update_gib": 9.4, "memory/host_gib": 96.0}
    near = [line for line in memory.remarks(metrics) if line.startswith("warning")]
    assert [line.split(" takes")[0] for line in near] == ["warning: sample", "warning: host"]
    assert "9.6 of 10.0 GiB" in near[0] and "lower --max_completion_tokens" in near[0]
    assert "fewer --reward_workers" in near[1]
    assert memory.remarks(metrics) == []
    assert len(memory.remarks(metrics | {"memory/update_gib": 9.7})) == 1


def test_the_first_update_is_followed_by_prediction_against_truth():
    memory = MemoryWatch(CPU, {"update": 3 * GIB, "sample": 2 * GIB, "host": 5 * GIB})
    assert memory.remarks({"memory/evaluate_gib": 1.0, "memory/host_gib": 4.0}) == []  # step 0
    (report,) = memory.remarks({"memory/sample_gib": 2.25, "memory/update_gib": 2.875, "memory/host_gib": 4.0})
    assert report.endswith(
        "in brackets what the dry run predicts: sample 2.25 (2.00), update 2.88 (3.00), host 4.00 (5.00)"
    )
    assert memory.remarks({"memory/update_gib": 2.9}) == []


def test_on_a_gpu_a_phase_counts_all_that_is_taken_and_nothing_that_the_sleeping_engine_gave_back(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    device = torch.device("cuda")
    gpu.engine, gpu.reserved, gpu.reserved_peak, gpu.allocated_peak = 40 * GIB, 10 * GIB, 10 * GIB, 9 * GIB
    assert meter.peak(device) == (52 * GIB, 51 * GIB)  # awake
    gpu.asleep = 39 * GIB  # one GiB stays: graphs
    gpu.reserved, gpu.reserved_peak, gpu.allocated_peak = 12 * GIB, 60 * GIB, 55 * GIB
    assert meter.peak(device) == ((2 + 1 + 60) * GIB, (2 + 1 + 55) * GIB)


def test_a_sync_is_not_charged_with_what_the_update_held_in_reserve(monkeypatch):
    """The engine wakes up into memory that torch has just given back."""
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: vars(gpu).update(reserved_peak=gpu.reserved)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: vars(gpu).update(reserved=20 * GIB))
    gpu.engine, gpu.asleep = 47 * GIB, 45 * GIB
    memory = MemoryWatch(replace(CPU, device=torch.device("cuda")), {})
    with memory.phase("update"):
        gpu.reserved = gpu.reserved_peak = gpu.allocated_peak = 60 * GIB
    with memory.phase("sync"):
        gpu.asleep = 0
        gpu.reserved_peak = gpu.allocated_peak = 22 * GIB
    assert memory.peaks["update"] == (64 * GIB, 64 * GIB)
    assert memory.peaks["sync"] == ((2 + 47 + 22) * GIB, (2 + 47 + 22) * GIB)


def test_what_others_have_taken_is_missing():
    with pytest.raises(ValueError, match=r"GPU, .* needs \d+\.\d GiB of 20\.0"):
        check_fit(setup(), free=20 * GIB)


def test_nodes_are_summed_over_their_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert watch.largest_node([1, 2, 5, 1, 0, 0]) == 6


def test_memory_of_processes_below_counts(monkeypatch):
    import subprocess
    import sys

    code = "import subprocess, sys; x = bytearray(64 << 20); print('made', flush=True); sys.stdin.read()"
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    before = meter.resident_of_children()
    with subprocess.Popen([sys.executable, "-c", below], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        grown = meter.resident_of_children() - before
        child.stdin.close()
    assert grown > 64 * MIB


# What cannot fit ----------------------------------------------------------------------------------------------------


def setup(**hardware):
    flags = "--model Qwen/Qwen2.5-7B --train_data x#1000 --out_dir o --total_steps 1 --prompts_per_step 8"
    flags += " --micro_batch_tokens 4096 --gradient_checkpointing --plan_gpus 8"
    args = parse_flags(flags.split())
    found = setup_of(args, config_of(args.model))
    return replace(found, hardware=replace(found.hardware, **hardware))


def test_a_run_that_fits_is_taken():
    check_fit(setup(), free=79 * GIB)


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ({"gpus": 1}, r"GPU, .* needs \d+\.\d GiB of 79\.0"),
        ({"host_bytes": 1 * GIB}, r"host RAM, .* needs \d+ GiB of 1 on each node"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_and_the_dry_run_offered(hardware, words):
    with pytest.raises(ValueError, match=words) as error:
        check_fit(setup(**hardware), free=79 * GIB)
    assert "start the same command with --dry_run" in str(error.value)


def test_a_cache_without_room_for_one_sequence_is_refused():
    small = setup()
    with pytest.raises(ValueError, match="leaves the engine .* not enough for one sequence"):
        check_fit(replace(small, engine=replace(small.engine, gpu_memory_utilization=0.2)), free=79 * GIB)


def test_the_prediction_for_a_gpu_is_what_the_dry_run_says_it_needs():
    from planner.memory import gpu_phases

    found = setup()
    phases = gpu_phases(found)
    predicted = predicted_bytes(found, World(0, 8, 1, torch.device("cuda")))
    assert predicted["sample"] == predicted["load"] == predicted["sync"] == phases["rollout"].needed
    assert predicted["update"] == max(phases["update"].needed, phases["optimizer"].needed)
    assert "checkpoint" not in predicted


def test_on_a_cpu_the_prediction_leaves_the_reserve_out_and_a_rank_holds_what_is_offloaded(monkeypatch, tmp_path):
    config = config_of("Qwen/Qwen2.5-1.5B")
    config.save_pretrained(tmp_path)
    flags = f"--model {tmp_path} --train_data x#100 --out_dir o --total_steps 1 --plan_gpus 2 --prompts_per_step 8"
    plain, moved = (setup_of(parse_flags(f"{flags} {more}".split()), config) for more in ("", "--offload all"))
    monkeypatch.setattr(meter, "peak_resident", lambda: GIB)
    world = replace(CPU, size=2)
    found, offloaded = predicted_bytes(plain, world), predicted_bytes(moved, world)
    assert found["host"] == 2 * max(size for name, size in found.items() if name != "host")
    assert found["sample"] < GIB + 12 * plain.model.parameters / 2 + 2 * plain.model.parameters + 1.01 * GIB
    kept = 12 * plain.model.parameters / 2
    assert found["sample"] - kept == pytest.approx(offloaded["sample"] - kept - 4 * plain.model.parameters / 2)


@pytest.mark.parametrize(("total", "is_refused"), [(80 * GIB, True), (320 * GIB, False)])
def test_a_run_on_a_gpu_asks_for_the_memory_of_that_gpu(total, is_refused, tmp_path, monkeypatch):
    """Qwen2.5-7B with fp32 masters on a single GPU: 16 bytes for each of its 7.6 billion parameters."""
    config_of("Qwen/Qwen2.5-7B").save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total, total))
    monkeypatch.setattr(watch, "host_bytes", lambda: 1000 * GIB)
    monkeypatch.setattr(watch.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000 * GIB))
    flags = f"--model {tmp_path} --train_data x --out_dir {tmp_path} --total_steps 1 --prompts_per_step 8"
    flags += " --gradient_checkpointing"
    world = World(rank=0, size=1, tp_size=1, device=torch.device("cuda"))
    if is_refused:
        with pytest.raises(ValueError, match=r"the run does not fit, .* GiB of 80\.0"):
            watch.watch_memory(parse_flags(flags.split()), 100, world)
    else:
        assert watch.watch_memory(parse_flags(flags.split()), 100, world).limit == total


@pytest.mark.parametrize(
    ("flags", "num"),
    [
        ("--keep_checkpoints 2", 1),  # only the last step is saved
        ("--keep_checkpoints 2 --save_every 10", 3),
        ("--keep_checkpoints 2 --save_every 10 --keep_best eval/x/avg@1 --eval_data x --eval_every 5", 4),
        ("--keep_checkpoints 2 --save_every 40", 3),  # after 40, 80, 100
        ("--keep_checkpoints 0 --save_every 40", 3),
        ("--keep_checkpoints 0 --save_every 10", 10),
        ("--keep_checkpoints 0 --save_every 10 --stop_after 25", 3),
    ],
)
def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_does_not_start(flags, num, tmp_path, monkeypatch):
    common = "--model Qwen/Qwen2.5-7B --train_data x#1000 --out_dir o --total_steps 100 --prompts_per_step 8 "
    args = parse_flags([*common.split(), *flags.split()])
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


def test_a_model_that_the_dry_run_does_not_know_is_watched_without_a_prediction(monkeypatch):
    def unknown(args, config):
        raise ValueError("the dry run knows the architectures llama, ...")

    monkeypatch.setattr(watch, "setup_of", unknown)
    monkeypatch.setattr(watch, "load_config", lambda path: None)
    memory = watch.watch_memory(parse_flags(["--model", "m", "--train_data", "x", "--out_dir", "o"]), 100, CPU)
    (report,) = memory.remarks({"memory/update_gib": 1.0})
    assert report == "memory, GiB per rank at the peak, host per node; the dry run has no figures for it: update 1.00"
