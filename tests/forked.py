"""Ranks that start in a second instead of fifteen: forks of a process that has imported torch, vLLM and the program and
done nothing else.

Half of the suite's time was the import of libraries, rank by rank. A rank started here runs the script as `torchrun`
would start it, with its own arguments, environment and process group; what is not there is the launcher. Runs in which
the launcher, or a start as such, is looked at go through the real one (`helpers.start`).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["train_grpo", "rollout"]
)  # nothing that is imported starts threads or draws random numbers


def run_rank(script: str, arguments: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    """In the new process."""
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def run_ranks(num_ranks: int, script: str, arguments: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """What all ranks printed, and 1 for the exit code if one of them failed, when the others are stopped."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / "stdout", Path(folder) / "stderr"]
        for file in outputs:
            file.touch()
        ranks = []
        for rank in range(num_ranks):
            environment = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(
                CONTEXT.Process(target=run_rank, args=(script, arguments, environment, list(map(str, outputs))))
            )
            ranks[-1].start()
        deadline, running = time.monotonic() + timeout, list(ranks)
        while running and not any(rank.exitcode for rank in ranks) and time.monotonic() < deadline:
            wait([rank.sentinel for rank in running], timeout=1)
            running = [rank for rank in ranks if rank.exitcode is None]
        for rank in running:
            rank.terminate()
            rank.join(10)
            rank.kill()
        is_failed = any(rank.exitcode != 0 for rank in ranks)
        return subprocess.CompletedProcess(
            [script, *arguments], int(is_failed), *(file.read_text() for file in outputs)
        )
