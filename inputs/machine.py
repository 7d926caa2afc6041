"""Whether the launch fits the machine, and what a machine announces but cannot do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from inputs.checks import check_engines, launched_world_size


def check_launch(tp_size: int, dtype: str) -> None:
    """Raises ValueError if GPUs stay idle or are too few, if ranks form no whole engines, or for fp32 on CUDA.

    Reads the environment only: nothing is started and no GPU memory is taken.
    """
    world_size = launched_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count()
    if num_gpus > local_size:
        command = f"torchrun --nproc_per_node {num_gpus} {Path(sys.argv[0]).name} ..."
        hide = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(local_size)))}"
        raise ValueError(
            f"{num_gpus} GPUs are visible but the world size is {world_size}: start it with the script or torchrun "
            f"({command}), or hide the others with {hide}."
        )
    if 0 < num_gpus < local_size:
        started = f"{local_size} processes were started on this node"
        raise ValueError(f"{started} but only {num_gpus} GPUs are visible; one rank needs one GPU.")
    if num_gpus and dtype == "float32":
        raise ValueError("--dtype float32: packed attention on CUDA computes in bfloat16; leave --dtype out.")
    check_engines(tp_size, world_size)


def avoid_broken_amx() -> None:
    """CPU: keeps torch and vLLM off the AMX tile unit where a (virtual) machine announces it but traps its use.

    The first bf16 matrix product would end the process with SIGILL; a forked child finds that out. Call this before it:
    oneDNN, which both libraries bring, reads its limit once. Where the unit works, the process asks Linux for it: the
    attention of vLLM uses it without asking.
    """
    if not torch.cpu._is_amx_tile_supported():
        return
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        child = os.fork()
        if child == 0:
            operand = torch.ones(64, 64, dtype=torch.bfloat16)
            _ = operand @ operand
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            torch.cpu._init_amx()
            return
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # for the matrix products of torch and vLLM
    if "AMX" not in os.environ["ONEDNN_MAX_CPU_ISA"]:
        torch.cpu._is_amx_tile_supported = lambda: False  # what vLLM asks before it chooses its attention kernel
