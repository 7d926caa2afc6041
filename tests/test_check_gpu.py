"""The check of a new machine: on a CPU it passes with what a CPU can do, and what is wrong stands out."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO
from unittest.mock import Mock

import pytest
import torch

import bench_common
import check_gpu
from check_gpu import Line, Place, gap_lines
from command_line import parse_flags
from helpers.runs import CONTEXT, ROOT, Forked, begin
from model import sizes
from plan.dry_run import config_of, setup_of
from plan.memory import misfits

ONE = Place(ROOT, "Qwen/Qwen2.5-1.5B", 1, is_cuda=True)


def test_on_a_cpu_it_runs_what_a_cpu_can_and_says_so(tmp_path, monkeypatch, capsys):
    """Kernels, a run, kill and resume; two ranks are left out here, because other tests start those."""

    def fork(command: list[object], stdout: TextIO, **_: object) -> Forked:
        return begin([str(part) for part in command[1:]], *[Path(stdout.name)] * 2, has_own_workers=True)

    monkeypatch.setattr(check_gpu, "Popen", fork)
    monkeypatch.setattr(bench_common, "get_context", lambda _: CONTEXT)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--ranks", "1", "--out_dir", str(tmp_path)])
    ended = pytest.raises(SystemExit, check_gpu.main)
    shown = capsys.readouterr().out
    assert ended.value.code == 0, shown
    assert "GPU: none: what follows is what a CPU can check" in shown
    assert "LOOK" not in shown and "nothing to look at" in shown
    report = (tmp_path / "gpu_check.md").read_text()
    titles = re.findall(r"^## (.*)$", report, re.MULTILINE)
    assert titles == ["machine", "kernels", "run", "kill and resume", "sync"] and report in shown
    assert re.search(r"For a report, .*, 1 ranks:\nok    torch: .*\n(.*\n)*ok    sample, speed: ", shown)
    figures = dict(re.findall(r"ok    (.*?): (?:off by |cosine |norm )?(\d[\d.,e-]*)", report))
    assert all(0 < float(figures[f"attention, {kind}forwards"]) < 0.05 for kind in ("", "window of 64, "))
    assert 0.999 < float(figures["attention, gradients"]) <= 1
    assert 0 < float(figures["one engine: gap after sleep, wake and sync"]) < 1e-4
    assert float(figures["sample, speed"].replace(",", "")) > 0
    assert re.search(r"ok    weights after sleep and sync: 0 of \d\d tensors differ: none", report)


@pytest.mark.parametrize(("count", "capability", "free", "wrong"), [
    (2, (9, 0), 79.0, []),
    (1, (9, 0), 79.0, ["GPUs that CUDA can use: 1 (expected: 2)"]),  # a MIG slice, or a GPU has failed
    (2, (7, 0), 79.0, ["GPU 0: V100, compute capability 7.0, 79.0", "GPU 1: V100"]),
    (2, (9, 0), 40.0, ["GPU 0: V100, compute capability 9.0, 40.0 of 80.0 GiB free (expected: 8.0 or", "GPU 1: V100"]),
])  # fmt: skip
def test_gpus_that_are_lost_too_old_or_taken_stand_out(count, capability, free, wrong, monkeypatch):
    memory = free * check_gpu.GIB, 80 * check_gpu.GIB
    answers = {"init": None, "device_count": count, "get_device_name": "V100", "get_device_capability": capability}
    for name, answer in (answers | {"mem_get_info": memory}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    found = [str(line).removeprefix("LOOK  ") for line in check_gpu.find_gpus(seen=2) if not line.is_ok]
    assert len(found) == len(wrong) and all(map(str.startswith, found, wrong))


def test_a_driver_that_answers_nobody_and_a_missing_compiler_stand_out(monkeypatch, tmp_path):
    """As after an upgrade of the driver without a restart: torch sees no GPU, and says why when it is asked for one."""
    (tmp_path / "0000:1b:00.0").mkdir()
    monkeypatch.setattr(check_gpu, "INSTALLED", tmp_path)
    monkeypatch.setattr(check_gpu, "apart", lambda find: find())
    monkeypatch.setattr(check_gpu.metadata, "version", lambda _: "1.0")
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError("The NVIDIA driver is too old")))
    monkeypatch.setattr(check_gpu.shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    lines = check_gpu.lines_of("machine", check_gpu.check_machine, ONE)
    found = [str(line) for line in lines if not line.is_ok and line.what not in ("/dev/shm", "free disk")]
    missing = "compiler: too little, or missing\n      a C compiler (gcc or clang) is missing: Triton compiles with it"
    assert found[0].startswith(f"LOOK  {missing}")
    assert found[-1].startswith("LOOK  machine: RuntimeError: The NVIDIA driver is too old")


def steps(*gaps: float) -> list[dict[str, float]]:
    return [{"policy/rollout_gap_mean": gap, "optim/grad_norm": 1.0} for gap in gaps]


@pytest.mark.parametrize(("gaps", "wrong"), [
    ((0.002, 0.002, 0.003), []),
    ((0.05, 0.05, 0.05), ["at first"]),
    ((0.002, 0.002, 0.3), ["after sleep, wake and sync"]),  # the engine woke up with other weights
])  # fmt: skip
def test_an_engine_with_other_weights_than_the_trainer_stands_out(gaps, wrong):
    found = [line.what.rpartition("gap ")[2] for line in gap_lines(ONE, "x", steps(*gaps)) if not line.is_ok]
    assert [name.removeprefix("to the trainer ") for name in found] == wrong


def test_memory_beyond_the_dry_run_stands_out_on_a_gpu(tmp_path, monkeypatch):
    speeds = ("perf/update_mfu", "perf/update_tokens_per_s_per_gpu", "perf/sample_tokens_per_s_per_gpu", "time/sync_s")
    record = dict.fromkeys(speeds, 0.5) | {"step": 1, "memory/update_gib": 11.0, "memory/sample_gib": 9.9}
    answers = {"make_model": None, "apart": 79.0, "planned": {"update": 10.0, "sample": 10.0}}
    for name, answer in (answers | {"read_metrics": [record | steps(0.001)[0]] * 2}).items():
        monkeypatch.setattr(check_gpu, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(Place, "train", lambda *_: tmp_path)
    (line,) = [line for line in check_gpu.check_run(ONE) if not line.is_ok]
    assert line.what == "memory, update, against the dry run" and "wrong by +10%: please report it" in line.advice


def test_the_dry_run_is_asked_for_the_run_that_was_made(tmp_path):
    """Its flags are those in the run folder. Qwen2.5-1.5B in full: 16 bytes a parameter, and an engine of 0.4 x 80."""
    command = f"--model Qwen/Qwen2.5-1.5B --train_data x#64 --out_dir {tmp_path} {check_gpu.COMMON}"
    args = parse_flags(f"{command} {check_gpu.SIZE[True]}".split())
    (tmp_path / "config.json").write_text(json.dumps(vars(args) | {"dtype": "bfloat16"}))
    planned, parameters = check_gpu.planned(tmp_path, 80 * check_gpu.GIB), 1_543_714_304
    assert planned["sample"] == pytest.approx(1.05 * 12 * parameters / 2**30 + 0.4 * 80 + 2.5)
    assert planned["load"] == planned["sync"] == planned["sample"]
    growth = 7 * 5 * sizes.HEAD_CHUNK_LOGITS / 2**30  # larger chunks of logits, which fit
    assert 1.05 * 16 * parameters / 2**30 < planned["update"] - growth < planned["sample"]


@pytest.mark.parametrize(("gib", "shape"), [
    ([79.1, 79.1], "1.5B"), ([60.0], "1.5B"), ([79.1, 44.3], "0.5B"), ([39.4], "0.5B"), ([23.5], "0.5B"), ([], "0.5B"),
])  # fmt: skip
def test_the_shape_fits_the_smallest_gpu(gib, shape, tmp_path, monkeypatch):
    """No GPU here: CUDA answers nothing, as with an old driver. The plan of the run, whose table is not tied, fits."""

    def properties(index: int) -> SimpleNamespace:
        if not gib:
            raise RuntimeError("The NVIDIA driver on your system is too old")
        return SimpleNamespace(total_memory=gib[index] * check_gpu.GIB)

    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gib) or 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(check_gpu, "apart", lambda find: find())
    monkeypatch.setattr(check_gpu, "write_report", lambda place: seen.append(place) or 0)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--out_dir", str(tmp_path)])
    pytest.raises(SystemExit, check_gpu.main)
    assert f"Qwen2.5-{shape}" in seen[0].model
    config = config_of(seen[0].model)
    config.tie_word_embeddings = False
    command = f"--model {seen[0].model} --train_data d#64 --out_dir o --dry_run --plan_gpus 1 {check_gpu.COMMON}"
    setup = setup_of(parse_flags(f"{command} {check_gpu.SIZE[True]}".split()), config)
    smallest = min(gib, default=23.5) * check_gpu.GIB
    assert not misfits(replace(setup, hardware=replace(setup.hardware, gpu_bytes=smallest)))


@pytest.mark.parametrize(("held", "is_same", "wrong"), [(2.5, True, 0), (5.0, True, 1), (2.5, False, 1)])
def test_the_memory_of_a_sleeping_engine_is_reported(held, is_same, wrong, monkeypatch):
    def found(find: partial) -> tuple[float, float, bool]:
        return (held - 1.75, 2.0, is_same) if find.keywords["is_offloaded"] else (held, 1.0, True)

    monkeypatch.setattr(check_gpu, "apart", found)
    lines = list(check_gpu.check_sleep(ONE))
    assert "which frees 1.75; a sync takes 2.0 s, not 1.0" in lines[1].figure
    assert sum(not line.is_ok for line in lines) == wrong


RUNG = {"MFU": 0.34, "planned MFU": 0.36, "tokens/s": 35_800.0, "first s": 40.0, "GiB": 35.0, "planned GiB": 36.0}
RUNG |= {"grad norm": 1.0}


@pytest.mark.parametrize(("changes", "wrong"), [
    ({}, []), ({"MFU": 0.1}, [""]), ({"GiB": 36.5}, [": memory of tensors"]),
    ({"grad norm": 1.05}, [": first gradient"]),  # of other arithmetic
])  # fmt: skip
def test_a_rung_that_is_slow_large_or_wrong_stands_out(changes, wrong, monkeypatch):
    """Each rung of the ladder is asked for by its name; its gradient is compared with that of the first."""
    asked, first = [], [RUNG]
    monkeypatch.setattr(check_gpu, "apart", lambda find: asked.append(find) or RUNG | changes)
    lines = list(check_gpu.check_rung("--compile", first, ONE))
    assert asked[0].args[1:] == ("--compile", "--gradient_checkpointing --compile") and len(first) == 2
    assert lines[0].figure == f"MFU {(RUNG | changes)['MFU']:.1%}, 35,800 tokens/s; 40 s the first time"
    assert [line.what.removeprefix("update, --compile") for line in lines if not line.is_ok] == wrong


@pytest.mark.parametrize(("compiled", "is_ok"), [(0.03, True), (0.09, False)])
def test_a_head_that_is_slower_than_in_eager_mode_stands_out(compiled, is_ok, monkeypatch):
    rows = [{"head": "eager", "s": 0.08}, {"head": "chunks", "s": 0.02}, {"head": "one", "s": compiled}]
    monkeypatch.setattr(check_gpu, "apart", lambda find: rows)
    (line,) = check_gpu.check_head(ONE)
    assert line.figure.startswith("eager 80.0 ms, chunks 20.0 ms, one ") and line.is_ok == is_ok


def test_a_folder_of_something_else_is_not_removed(tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--out_dir", str(tmp_path)])
    pytest.raises(SystemExit, check_gpu.main)
    assert "holds something else" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_the_gpus_of_the_user_are_the_ones_that_are_used(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert Place(tmp_path, None, 2, is_cuda=True).visible(2) == {"CUDA_VISIBLE_DEVICES": "4,5"}


def test_a_failing_check_is_reported_and_the_others_run(tmp_path, monkeypatch, capsys):
    def broken(place):
        raise RuntimeError("no such kernel")
        yield

    monkeypatch.setattr(check_gpu, "check_machine", broken)
    answers = {"check_run": [Line("slow", "1", "2", False, "do this")], "check_resume": [Line("fine", "1")]}
    for name, answer in (answers | {"apart": [], "check_sync": []}).items():
        monkeypatch.setattr(check_gpu, name, lambda *_, answer=answer: answer)
    assert check_gpu.write_report(Place(tmp_path, None, 1, is_cuda=False)) == 2
    report = (tmp_path / "gpu_check.md").read_text()
    assert report in (shown := capsys.readouterr().out) and "LOOK  slow" in shown.partition("For a report")[2]
    assert "LOOK  machine: RuntimeError: no such kernel" in report
    assert "LOOK  slow: 1 (expected: 2)\n      do this" in report and "ok    fine: 1\n" in report
