"""A launch that does not fit the GPUs or the machine ends in one sentence, before weights are read; what may fit is
said. GPUs are faked by what torch says of them.
"""

import os
import re
import sys
import tempfile
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import grade
import serve
import show_data
from gate import digests, machine
from gate.inputs import Inputs
from gate.machine import check_launch
from helpers.made_up import flags, write_lines
from helpers.runs import run_command
from plan.dry_run import needs_of_launch


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch see 8 GPUs and torchrun's start of 8 ranks; takes changes of what torch says."""

    def fake(count=8, is_available=True):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)

    for name, value in (("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "8"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    fake()
    return fake


def check(**asked: object) -> None:
    check_launch(**{"tp_size": 1, "dtype": "bfloat16"} | asked)


UNUSABLE = "this machine has GPUs, but CUDA cannot use them; bash scripts/check_gpu.sh says why"


@pytest.mark.parametrize(("seen", "num_ranks", "asked", "said"), [  # seen: what torch says
    ({}, 1, {}, "8 GPUs are visible but the world size is 1: start it .*--ranks 8 .*CUDA_VISIBLE_DEVICES=0"),
    ({"count": 2}, 8, {}, "8 processes were started on this node, but only 2 GPUs are visible"),
    ({}, 8, {"server_gpus": 1}, "8 processes were started and 1 GPUs are for servers on this node, but only 8"),
    ({}, 8, {"dtype": "float32"}, "--dtype float32: packed attention on CUDA computes in bfloat16"),
    ({}, 8, {"tp_size": 3}, "--tensor_parallel_size 3 does not divide the world size 8; use one of 1, 2, 4, 8"),
    ({"is_available": False}, 8, {}, UNUSABLE),  # the driver is too old
    ({}, 8, {"tp_size": 4}, None),
    ({}, 7, {"server_gpus": 1}, None),
    ({}, 16, {"tp_size": 8}, None),  # all ranks of a node of several
])  # fmt: skip
def test_a_launch_that_does_not_fit_the_gpus_is_refused(seen, num_ranks, asked, said, gpus, monkeypatch):
    gpus(**seen)
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(num_ranks, 8)))
    with pytest.raises(ValueError, match=f"^.*{said}.*$") if said else nullcontext():  # one line
        check(**asked)


def test_a_folder_whose_sockets_would_have_too_long_names_is_refused(monkeypatch):
    for length, outcome in ((70, nullcontext()), (71, pytest.raises(ValueError, match="^TMPDIR /x+ .*TMPDIR=/tmp.$"))):
        monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (length - 1))
        with outcome:
            check()


@pytest.mark.parametrize("command", [
    "grade.py --reward math --input {0}/rows.jsonl --output {0}/graded.jsonl",
    "show_data.py --model {1} --data {1}/train.jsonl --environment docs/environments/guess_number.py:GuessNumber",
])  # fmt: skip
def test_programs_that_start_workers_without_a_launch_refuse_it_too(command, policy, tmp_path, monkeypatch):
    write_lines(tmp_path / "rows.jsonl", [{"completion": "2", "answer": "2"}])
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 93)
    monkeypatch.setattr("sys.argv", command.format(tmp_path, policy).split())
    with pytest.raises(SystemExit, match="^error: TMPDIR /x+ is too long .*TMPDIR=/tmp.$"):
        {"grade.py": grade, "show_data.py": show_data}[sys.argv[0]].main()


@pytest.mark.parametrize(("seen", "tp_size", "said"), [  # None: it is started as on GPUs
    ({}, 8, None),
    ({"count": 2}, 4, "--tensor_parallel_size 4: only 2 GPUs are visible"),
    ({"is_available": False}, 1, UNUSABLE),
    ({"count": 0, "is_available": False}, 1, "no GPU: as on a CPU"),
])  # fmt: skip
def test_a_server_that_does_not_fit_the_gpus_is_refused_too(seen, tp_size, said, gpus, policy, monkeypatch):
    """With an old driver, for one, its GPU build would be started with a CPU's options."""
    gpus(**seen)
    flags_of_it = f"serve.py --model {policy} --max_model_len 64 --tensor_parallel_size {tp_size} --dtype bfloat16"
    monkeypatch.setattr("sys.argv", flags_of_it.split())
    monkeypatch.setattr(os, "execve", lambda program, command, environment: print(*command))
    monkeypatch.delenv("RANK", raising=False)
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors, suppress(SystemExit):
        serve.main()
    if seen.get("count") == 0:
        assert '{"backend": "gloo"}' in out.getvalue()
    elif said is None:
        assert '{"backend": "nccl_with_deadline"}' in out.getvalue()
    else:
        assert re.fullmatch(f"error: .*{said}.*\n", errors.getvalue()) and not out.getvalue()


def test_a_servers_flags_are_checked_before_torch_is_imported():
    """The import takes seconds, on a busy machine a minute."""
    program = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('scripts/serve.py', run_name='__main__')"
    for wrong, said in (
        ("--model m", "the following arguments are required: --max_model_len"),
        ("--model m --max_model_len 0", "--max_model_len 0: must be at least 1"),
    ):
        done = run_command([sys.executable, "-c", program, *wrong.split()])
        assert done.returncode and done.stderr.startswith(f"error: {said}")


def test_a_silent_gpu_driver_does_not_mean_a_run_on_the_cpu(gpus, monkeypatch, tmp_path):
    """After an upgrade of the driver without a restart neither nvidia-smi nor CUDA see a GPU."""
    (tmp_path / "0000:1b:00.0").mkdir()
    monkeypatch.setattr(machine, "INSTALLED", tmp_path)
    gpus(count=0, is_available=False)
    with pytest.raises(ValueError, match=UNUSABLE):
        check()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check()  # the user wants the CPU


def test_only_the_main_process_fetches_weights_before_ranks_meet(policy, monkeypatch, tmp_path):
    """Else the others would wait for a download in a collective, and its time-out would end the run."""
    fetched = []
    monkeypatch.setattr(digests, "weight_files", lambda path: fetched.append(path) or [])
    files = {"model": policy, "train_data": policy / "train.jsonl", "out_dir": tmp_path}
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        args = flags(**files, max_prompt_tokens=8, max_completion_tokens=12)
        (inputs := Inputs.load(args)).close()
        digests.digests_of_inputs(args, inputs)
        assert fetched == ([str(policy)] if rank == "0" else [])


# The first minute: what fails for the machine fails before weights are read -------------------------------------------


def start_on(gpus, monkeypatch, num_ranks: int, **changes: object) -> None:
    """Reads the inputs of a run on GPUs, of which torch says so."""
    gpus(count=num_ranks)
    for name, value in (("WORLD_SIZE", num_ranks), ("LOCAL_WORLD_SIZE", num_ranks), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("model.weights.fill", lambda *_: pytest.fail("weights come later"))
    Inputs.load(flags(max_prompt_tokens=8, max_completion_tokens=12, dtype="bfloat16", **changes)).close()


@pytest.fixture
def sound(policy, tmp_path, monkeypatch):
    """The files of a run that starts, on a machine that has all that it must have."""
    monkeypatch.setattr(machine, "SHARED", tmp_path)  # any disk
    return {"model": policy, "train_data": policy / "train.jsonl", "out_dir": tmp_path / "run"}


def test_a_missing_compiler_or_header_ends_the_start(gpus, sound, tmp_path, monkeypatch):
    start_on(gpus, monkeypatch, 1, **sound)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ValueError, match=r"^a C compiler \(gcc or clang\) is missing: .*; install gcc "):
        start_on(gpus, monkeypatch, 1, **sound)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match=r"^a C compiler .* and \S+/Python.h is missing: "):
        start_on(gpus, monkeypatch, 1, **sound)


def test_little_shared_memory_ends_the_start_of_several_ranks(gpus, sound, tmp_path, monkeypatch):
    """A file system of Docker's size: mounted where root may, else what it says is made up."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = run_command(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)]).returncode == 0
    if not mounted:
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(total=2**26, free=2**50))
    monkeypatch.setattr(machine, "SHARED", small)
    try:
        with pytest.raises(ValueError, match=rf"^{small} has 0.06 GiB, .*--shm-size 16g or --ipc host.$"):
            start_on(gpus, monkeypatch, 2, **sound)
        start_on(gpus, monkeypatch, 1, **sound)  # alone it needs none
    finally:
        if mounted:
            run_command(["umount", str(small)])


@pytest.mark.parametrize(("free", "said"), [
    (0.5, "one checkpoint takes "),  # checkpoints of a policy: the weights, and 12 bytes a parameter
    (1.5, "warning: .* the checkpoints that are there at a time take .*: lower --keep_checkpoints"),
    (2.5, None),
])  # fmt: skip
def test_a_small_disk_ends_the_start_or_is_said(free, said, sound, monkeypatch, capsys):
    """`free`: in checkpoints, of which two are there at a time: one is kept, and one is written."""
    args = flags(
        **sound, max_prompt_tokens=8, max_completion_tokens=12, keep_checkpoints=1, save_every=1, total_steps=4
    )
    size, count = needs_of_launch(args)["checkpoints"]
    parameters = sum(weight.numel() for weight in load_file(sound["model"] / "model.safetensors").values())
    assert (size, count) == (16 * parameters, 2)
    real = os.statvfs

    def statvfs(path: object) -> SimpleNamespace:
        whole = real(path)
        return SimpleNamespace(f_bavail=int(free * size), f_bfree=0, f_blocks=whole.f_blocks, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(ValueError, match=f"^--out_dir .*{said}.*$") if free < 1 else nullcontext():
        Inputs.load(args).close()
    shown = [line for line in capsys.readouterr().out.splitlines() if "disk" in line]
    assert [re.match(said or "", line) is not None for line in shown] == [True] * (1 < free < 2)


@pytest.mark.parametrize(("shown", "files"), [
    ("0::/", {"memory.max": "10737418240"}),
    ("0::/slurm/job_7/step_0", {"memory.max": "max", "slurm/job_7/memory.max": "10737418240"}),
    ("3:cpu:/\n4:hugetlb,memory:/docker/abc\n0::/", {"memory/memory.limit_in_bytes": "10737418240"}),
])  # fmt: skip
def test_a_containers_limit_below_the_hosts_phases_is_said(shown, files, gpus, sound, tmp_path, monkeypatch, capsys):
    """In both versions of cgroups, of the group and of those around it. Two ranks take 24 GiB."""
    (tmp_path / "own").write_text(shown)
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    start_on(gpus, monkeypatch, 2, **sound)
    said = r"^warning: .* need 24 GiB of memory, and may take 10 .*docker run --memory"
    assert re.search(said, capsys.readouterr().out, re.MULTILINE)
