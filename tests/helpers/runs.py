"""Programs, started as a user would start them, and what they have written.

They start in a second instead of fifteen: as forks of a process that has imported torch, vLLM and our files.
scripts/launch.py runs in a fork of it, and its ranks are forks of the launcher, with the arguments, environment,
session and exit that they would have. A fork draws no pictures of a run, unless it is asked to. One run of each kind,
and what is about the start as such, goes through the real launcher.
"""

from __future__ import annotations

import ctypes
import io
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import psutil
import torch

import extras.servers.start
import watch.results
from helpers.made_up import command_line

ROOT = Path(__file__).parent.parent.parent
CALL = "tests/helpers/call.py"
WARMED_BY = "tests.helpers.warm"
PICTURES = "GRPO_TEST_PICTURES"  # environment: draw them
WARM = "GRPO_TEST_WARM"  # environment: the address of the warm process
COPY = "GRPO_TEST_COPY"  # environment: the folder of another tree, of which a fork runs a program
GUARD_SECONDS = 900.0  # what hangs ends then: ten times what the longest run takes beside a busy suite
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
ENVIRONMENT |= {"PYTHONPATH": os.pathsep.join(sys.path)}
ASKS = """() {
    local place; place=$(mktemp -d "$ASKED/XXXXXX")
    printf '%s\\0' "$@" > "$place/command"; env -0 > "$place/environment"; touch "$place/is_asked"
    until [ -e "$place/status" ]; do sleep 0.05; done
    return "$(cat "$place/status")"
}"""  # in place of a bash script's `python`
INSTEAD = {
    "BASH_FUNC_ask%%": ASKS, "BASH_FUNC_python%%": '() { ask python "$@"; }',
    "BASH_FUNC_exec%%": '() { "$@"; exit; }',
}  # fmt: skip
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([WARMED_BY])
if WARM in os.environ:  # conftest.py has started it
    forkserver._forkserver._forkserver_address = os.environ[WARM]
    forkserver._forkserver._forkserver_alive_fd = os.pipe()[1]
    forkserver._forkserver.ensure_running = lambda: None


def become(environment: dict[str, str], outputs: list[str]) -> None:
    """This fork has a session and an environment of its own, and writes into these files."""
    os.setsid()
    os.chdir(ROOT)
    for number, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), number)
    os.environ.clear()
    os.environ.update(environment)


def run_program(command: list[str]) -> None:
    """Ends this process as `python -u`, which is left out, would end with this script and its arguments."""
    sys.argv[:] = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    status: object = 1
    try:
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as ending:
        status = ending.code or 0
    except BaseException:  # noqa: BLE001  it is the hook's to tell
        sys.excepthook(*sys.exc_info())
    if isinstance(status, str):
        print(status, file=sys.stderr)
    with suppress(BaseException):
        util._exit_function()
    sys.stderr.flush()
    ctypes.PyDLL(None).exit(status if isinstance(status, int) else 1)  # C++ code puts shared memory away


class ForkedRank(subprocess.Popen):
    """As scripts/launch.py starts it: in a session of its own."""

    def _execute_child(self, command, _, preexec_fn, close_fds, pass_fds, cwd, environment, *rest) -> None:
        self.pid, self._child_created = os.fork(), True
        if self.pid == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):  # heard by a launcher
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            become(environment, [])
            if preexec_fn:
                preexec_fn()
            run_program(command[2:])  # without `python -u`


def forget(root: Path) -> None:
    """From here on this process finds no code of the tree, only that of installed packages."""

    def is_own(path: object) -> bool:
        return str(path).startswith(f"{root}/") and not str(path).startswith(f"{root}/.venv/")

    for name, module in list(sys.modules.items()):
        places = [vars(module).get("__file__"), *vars(module).get("__path__", ())]
        if name != "__main__" and any(map(is_own, places)):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path and not is_own(f"{path}/")]


def run_fork(command: list[str], environment: dict[str, str], outputs: list[str], has_own_workers: bool) -> None:
    if COPY in environment:
        become(environment, outputs)
        os.chdir(environment[COPY])
        forget(ROOT)
        run_program(command)
    if PICTURES not in environment:
        watch.results.plot = lambda _: None
    if not has_own_workers:  # the warm process is the fork server, too
        forkserver._forkserver.ensure_running = lambda: None
        extras.servers.start.subprocess = SERVERS
    imported = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    become(imported | environment, outputs)
    is_warm = WARMED_BY in sys.modules or WARM not in environment
    assert is_warm, f"the warm process could not import {WARMED_BY}, of which multiprocessing says nothing"
    if command[0] == "torchrun":
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = ForkedRank
        sys.exit(run.main(command[1:]))
    if command[0] != "scripts/launch.py":
        run_program(command)
    sys.argv[:] = command
    import launch

    launch.subprocess = SimpleNamespace(Popen=ForkedRank, TimeoutExpired=subprocess.TimeoutExpired)
    sys.exit(launch.main())


def run_server(flags: list[str], environment: dict[str, str], log: str, owner: int) -> None:
    """In the new process: a generation server. Its processes are forks, too, and end with that of the owner."""

    def end_with_owner() -> None:
        psutil.Process(owner).wait()
        os.killpg(0, signal.SIGKILL)

    become(environment, [log, log])
    threading.Thread(target=end_with_owner, daemon=True).start()
    context_of = multiprocessing.get_context
    multiprocessing.get_context = lambda _: context_of("fork")
    torch._dynamo.config.disable = True  # the environment says so, but torch has been imported
    sys.argv[1:] = flags
    runpy.run_module("extras.servers.start", run_name="__main__")


class Forked(CONTEXT.Process):
    """With what the tests use of `subprocess.Popen`."""

    def poll(self) -> int | None:
        return self.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self.exitcode


Started = Forked | subprocess.Popen[bytes]
Done = subprocess.CompletedProcess[str]


def fork_server(command: list[str], env: dict[str, str], stdout: BinaryIO, **_: object) -> Forked:
    """In place of `subprocess.Popen` in extras/servers/start.py."""
    fork = Forked(target=run_server, args=(command[3:], env, stdout.name, os.getpid()))
    fork.start()
    return fork


SERVERS = SimpleNamespace(Popen=fork_server, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired)


def begin(
    command: list[str], stdout: Path, stderr: Path, environment: dict[str, str] = ENVIRONMENT,
    has_own_workers: bool = False,
) -> Started:  # fmt: skip
    """`python command`. The outputs may be one file. A run that is killed has workers of its own, which end with it."""
    if torch.cuda.is_available():  # forks cannot share a GPU
        with stdout.open("a") as out, stderr.open("a") as error:
            return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=out, stderr=error)
    fork = Forked(target=run_fork, args=(command, environment, [str(stdout), str(stderr)], has_own_workers))
    fork.start()
    return fork


def launched(*arguments: object) -> list[str]:
    return list(map(str, ["scripts/launch.py", "--ranks", *arguments]))


def ended(command: list[str], environment: dict[str, str], has_own_workers: bool = False) -> Done:
    """What a program and its ranks print, and its exit status. Raises TimeoutExpired, when all are ended."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder) / "stdout", Path(folder) / "stderr"
        run = begin(command, *outputs, environment, has_own_workers)
        try:
            status = run.wait(GUARD_SECONDS)
        finally:
            run.kill()
        return Done(command, status, *(file.read_text() for file in outputs))


def run_ranks(num_ranks: int, script: str, arguments: list[object], **environment: str) -> Done:
    return ended(launched(num_ranks, script, *arguments), ENVIRONMENT | environment)


def name_of(function: Callable) -> str:
    """By which `CALL` finds it in a process of its own."""
    return f"{function.__module__}:{function.__name__}"


def run_copy(folder: Path, *command: object) -> Done:
    """In another tree, which finds no code of this one."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"} | {COPY: str(folder)}
    return ended(list(map(str, command)), environment, has_own_workers=True)


def run_script(command: list[str], environment: dict[str, str]) -> Done:
    """What a bash script in the repository's root prints, and its exit status; each `python` in it is a fork."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder) / "stdout", Path(folder) / "stderr"
        with outputs[0].open("a") as stdout, outputs[1].open("a") as stderr:
            given = environment | INSTEAD | {"ASKED": folder}
            script = subprocess.Popen(command, cwd=ROOT, env=given, stdout=stdout, stderr=stderr)
        while script.poll() is None:
            for asked in Path(folder).glob("*/is_asked"):
                asked.unlink()
                _, *program = (asked.parent / "command").read_text().split("\0")[:-1]
                entries = (asked.parent / "environment").read_text().split("\0")[:-1]
                own = dict(each.split("=", 1) for each in entries if not each.startswith("BASH_FUNC"))
                status = begin(program, *outputs, own).wait()
                (asked.parent / "unfinished").write_text(str(status))
                (asked.parent / "unfinished").rename(asked.parent / "status")
            time.sleep(0.02)
        return Done(command, script.returncode, *(file.read_text() for file in outputs))


def as_user(run_it: Callable, *command: object, **settings: object) -> Done:
    """`bash COMMAND` in the environment of a user, who has set nothing of the tests; `run_it`: for real, or forked."""
    of_tests = ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "NGPU")
    kept = {name: value for name, value in os.environ.items() if name not in of_tests}
    return run_it(["bash", *map(str, command)], kept | {name: str(value) for name, value in settings.items()})


def succeeded(done: Done) -> Done:
    assert done.returncode == 0, f"{done.args} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def torchrun(num_ranks: int, script: str, *arguments: object, **environment: str) -> Done:
    """`torchrun --nproc_per_node num_ranks script arguments`, by our launcher; fails the test if it fails."""
    return succeeded(run_ranks(num_ranks, script, list(arguments), **environment))


def run_command(command: list[str], environment: dict[str, str] = ENVIRONMENT, cwd: Path = ROOT) -> Done:
    """What a command says."""
    options = {"cwd": cwd, "env": environment, "capture_output": True, "text": True, "check": False}
    return subprocess.run(command, **options, timeout=GUARD_SECONDS)


def said(command: list[str], environment: dict[str, str] = ENVIRONMENT) -> str:
    """The standard output of a command in the repository's root, which must succeed."""
    return succeeded(run_command(command, environment)).stdout


def training_flags(policy: Path, out_dir: Path, **changes: object) -> list[str]:
    """A short run on the tiny policy: 8 prompts x 4 completions, 2 updates a step."""
    flags = {
        "model": policy, "train_data": policy / "train.jsonl", "eval_data": policy / "heldout.jsonl",
        "out_dir": out_dir, "max_prompt_tokens": 8, "max_completion_tokens": 12, "prompts_per_step": 8,
        "group_size": 4, "prompts_per_update": 4, "micro_batch_tokens": 128, "kl_coef": 0.01, "learning_rate": 1e-3,
        "total_steps": 4, "eval_every": 2, "eval_before_training": True, "save_every": 2,
    } | changes  # fmt: skip
    return command_line(flags)


NO_EVAL = dict.fromkeys(["eval_data", "eval_every", "eval_before_training"])  # `changes` of these flags


def copy_at(step: int, run_dir: Path, copy: Path) -> Path:
    """A copy of a run folder in which the checkpoint of this step is the last one, as after a kill."""
    shutil.copytree(run_dir, copy, symlinks=True)
    (copy / "final").unlink()
    for folder in copy.glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    return copy


# What runs leave behind -----------------------------------------------------------------------------------------------


def lines(file: Path) -> list[dict]:
    """The objects of a .jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> its last line of metrics.jsonl."""
    return {record["step"]: record for record in lines(run_dir / "metrics.jsonl")}


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """What a step computes: the same in every run with the same flags."""
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "perf/", "memory/"))}


def wait_for(condition: Callable[[], object], seconds: float = GUARD_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond this: writing fails in the middle, as on a full disk or at a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
