"""Whether the launch fits the GPUs, before any weight is read. scripts/check_gpu.py looks at all else of a machine."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from runtime.rank import launched_world_size, local_world_size
from runtime.start import check_divides

INSTALLED = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU that the driver has, whether it answers or not
LONGEST_FOLDER = 70  # a socket's path has 107 bytes, vLLM's 37 of them behind the folder


def check_launch(tp_size: int, dtype: str, server_gpus: int = 0) -> None:
    """Raises ValueError if GPUs stay idle, are too few or cannot be used. `server_gpus`: how many servers take."""
    if len(tempfile.gettempdir()) > LONGEST_FOLDER:
        raise ValueError(
            f"TMPDIR {tempfile.gettempdir()} is too long for the sockets in it; "
            f"give a folder of at most {LONGEST_FOLDER} characters, for example TMPDIR=/tmp."
        )
    world_size, local_size = launched_world_size(), local_world_size()
    num_gpus = usable_gpus()
    if num_gpus > local_size + server_gpus:
        raise ValueError(
            f"{num_gpus} GPUs are visible but the world size is {world_size}: "
            f"start it with its script or scripts/launch.py --ranks {num_gpus} {Path(sys.argv[0]).name} ..., "
            f"or hide the others with CUDA_VISIBLE_DEVICES={','.join(map(str, range(local_size)))}."
        )
    if 0 < num_gpus < local_size + server_gpus:
        for_servers = f" and {server_gpus} GPUs are for servers" if server_gpus else ""
        raise ValueError(
            f"{local_size} processes were started{for_servers} on this node, "
            f"but only {num_gpus} GPUs are visible; a MIG slice is none."
        )
    if num_gpus and dtype == "float32":
        raise ValueError("--dtype float32: packed attention on CUDA computes in bfloat16; give --dtype bfloat16.")
    check_divides("--tensor_parallel_size", tp_size, "the world size", world_size)


def usable_gpus() -> int:
    """The number of GPUs that this process sees. Raises ValueError if CUDA cannot use them: it would run on the CPU."""
    is_hidden = not torch.version.cuda or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    num_gpus = torch.cuda.device_count()
    if not is_hidden and not torch.cuda.is_available() and (num_gpus or any(INSTALLED.glob("*"))):
        raise ValueError(
            "this machine has GPUs, but CUDA cannot use them; bash scripts/check_gpu.sh says why. "
            "For a run on the CPU set CUDA_VISIBLE_DEVICES= (empty)."
        )
    return num_gpus


def check_alignment(device: torch.device) -> None:
    """Raises RuntimeError if the CUDA kernel's causal mask does not end with the last key."""
    queries, keys = (torch.zeros(n, 1, 64, dtype=torch.bfloat16, device=device) for n in (2, 3))
    values = torch.tensor([0, 2, 4], dtype=torch.bfloat16, device=device).view(3, 1, 1).repeat(1, 1, 64)
    ends = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (2, 3))
    means = varlen_attn(queries, keys, values, *ends, 2, 3, window_size=(-1, 0))[:, 0, 0].tolist()
    if means != [1, 2]:
        raise RuntimeError(
            f"--share_prompts: in torch {torch.__version__} varlen_attn's causal mask does not end with the last key: "
            f"two queries make {means} of the values 0, 2, 4, not [1, 2]. "
            "Leave the flag out, or use requirements.txt."
        )


def check_device(device: torch.device, share_prompts: bool) -> None:
    """CUDA: takes FlashAttention 3 where the GPU can run it (H100, H200) and `flash_attn_interface` is installed.

    Elsewhere torch's own (2) stays. Raises RuntimeError if the kernel cannot do --share_prompts.
    """
    if device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) == (9, 0):
        with suppress(ImportError, OSError, RuntimeError):  # missing, for another torch, or without a backward pass
            activate_flash_attention_impl("FA3")
    if share_prompts:
        check_alignment(device)
