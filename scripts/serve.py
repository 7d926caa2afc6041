"""Starts a generation server for a run with `--engine server --server_urls`: stock vLLM, with what the run needs.

    VLLM_API_KEY=... python scripts/serve.py --model Qwen/Qwen3-4B-Base --max_model_len 10240 --host 0.0.0.0 --port 8000

It takes --tensor_parallel_size of the GPUs that it sees, or the CPU. It holds random weights until the run sends its
own. It serves one run at a time, and ends within 10 s of SIGTERM or Ctrl-C. docs/generation.md
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from flags import DTYPES, EngineSettings
from generation.start import server_command, server_environment
from inputs.checks import LOOPBACK, default_dtype
from inputs.command_line import exit_with_error, parser_of
from model.engine_options import engine_options


def parse_arguments() -> argparse.Namespace:
    parser = parser_of({}, __doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="the run's --model; its weights are not read")
    add("--max_model_len", type=int, required=True, help="the run's --max_prompt_tokens + its longest completion")
    add("--dtype", default=default_dtype(), choices=DTYPES, help="the run's --dtype")
    add("--head_dtype", choices=DTYPES, help="the run's --head_dtype; leave it out if the run does")
    add("--tensor_parallel_size", type=int, default=1, help="GPUs that share the model")
    add("--enforce_eager", action="store_true", help="no CUDA graphs: the server starts faster and samples slower")
    add("--gpu_memory_utilization", type=float, default=0.9, help="share of a GPU's memory that the server takes")
    add("--host", default="127.0.0.1", help="address to listen on; beyond the loopback only with VLLM_API_KEY")
    add("--port", type=int, default=8000, help="port to listen on")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.host not in LOOPBACK and not os.environ.get("VLLM_API_KEY"):
        wrong = f"--host {args.host}: others could change the weights of this server"
        exit_with_error(ValueError(f"{wrong}; set VLLM_API_KEY to a secret, here and for the run."))
    settings = EngineSettings(
        max_model_len=args.max_model_len, dtype=args.dtype, head_dtype=args.head_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization, enforce_eager=args.enforce_eager,
    )  # fmt: skip
    is_cuda = torch.cuda.is_available()
    try:
        options = engine_options(args.model, settings, is_cuda, args.tensor_parallel_size)
    except (ValueError, OSError) as error:
        exit_with_error(error)
    backend = "nccl_with_deadline" if is_cuda else "gloo"
    command = server_command(options, backend, args.port, args.host)
    os.execve(command[0], command, server_environment(backend))


if __name__ == "__main__":
    main()
