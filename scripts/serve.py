"""Starts a generation server for a run with `--engine server --server_urls`: stock vLLM, with what the run needs.

    VLLM_API_KEY=... python scripts/serve.py --model Qwen/Qwen3-4B-Base --max_model_len 10240 --host 0.0.0.0 --port 8000

It answers nobody without the key VLLM_API_KEY; if that is not set, it makes one and prints it. It takes
--tensor_parallel_size of the GPUs that it sees, or the CPU. It holds random weights until the run sends its own. It
has the weights of one run at a time, and ends within 10 s of SIGTERM or Ctrl-C. docs/generation.md
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from command_line import exit_with_error, parser_of
from extras.servers.start import server_command, server_environment
from flags import DTYPES, INF, EngineSettings, default_dtype, flag
from gate.checks import LOOPBACK, check_ranges
from gate.models import check_path

# fmt: off
FLAGS = {"server": [
    flag("--model", None, "the run's --model; its weights are not read", is_required=True),
    flag("--max_model_len", None, "the run's --max_prompt_tokens + its longest completion", (1, INF),
         is_required=True, type=int),
    flag("--dtype", None, "the run's --dtype, which has the same default", choices=DTYPES),
    flag("--head_dtype", None, "the run's --head_dtype; leave it out if the run does", choices=DTYPES),
    flag("--tensor_parallel_size", 1, "GPUs that share the model", (1, INF)),
    flag("--enforce_eager", False, "no CUDA graphs: the server starts faster and samples slower"),
    flag("--gpu_memory_utilization", 0.9, "share of a GPU's memory that the server takes", (0.01, 1)),
    flag("--host", "127.0.0.1", "address to listen on; 0.0.0.0: all that the machine has"),
    flag("--port", 8000, "port to listen on", (1, 65535)),
]}
# fmt: on


def main() -> None:
    args = parser_of(FLAGS, __doc__.partition("\n\n")[0]).parse_args()
    args.dtype = args.dtype or default_dtype()
    settings = EngineSettings(
        max_model_len=args.max_model_len, dtype=args.dtype, head_dtype=args.head_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization, enforce_eager=args.enforce_eager,
    )  # fmt: skip
    try:
        check_ranges(args, FLAGS)
        check_path(args.model)
        # torch takes seconds to import: mistakes are reported before
        from engine.options import engine_options
        from gate.machine import check_compiler, usable_gpus
        from runtime.machine import choose_interface

        num_gpus, wanted = usable_gpus(), args.tensor_parallel_size
        if 0 < num_gpus < wanted:
            raise ValueError(f"--tensor_parallel_size {wanted}: only {num_gpus} GPUs are visible.")
        is_cuda = num_gpus > 0
        if is_cuda:
            check_compiler()
        options = engine_options(args.model, settings, is_cuda, wanted)
    except (ValueError, OSError) as error:
        exit_with_error(error)
    backend = "nccl_with_deadline" if is_cuda else "gloo"
    if args.host in LOOPBACK:
        choose_interface()  # the sockets that take weights use it
    if not os.environ.get("VLLM_API_KEY"):
        os.environ["VLLM_API_KEY"] = key = secrets.token_hex()  # not a flag, which `ps` would show to all
        host = socket.gethostname() if args.host in ("0.0.0.0", "::") else args.host
        url = f"http://[{host}]:{args.port}" if ":" in host else f"http://{host}:{args.port}"
        print("A new key was made for this server. Its run, and further servers of that run, need it:")
        print(f"VLLM_API_KEY={key} python scripts/launch.py ... --engine server --server_urls {url}", flush=True)
    command = server_command(options, backend, args.port, args.host)
    os.execve(command[0], command, server_environment(backend))


if __name__ == "__main__":
    main()
