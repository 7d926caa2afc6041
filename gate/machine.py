"""Whether the launch fits the machine, before any weight is read: GPUs, compiler, shared memory, disk, host memory.

scripts/check_gpu.py asks the same functions, and looks at all else of a machine.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from fsdp_utils import World, gather_from_ranks, is_main_process
from runtime.parts import part
from runtime.rank import launched_world_size, local_world_size
from runtime.start import check_divides

INSTALLED = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU that the driver has, whether it answers or not
CGROUPS = Path("/sys/fs/cgroup")  # where Linux shows the limits of groups of processes
OWN_GROUPS = Path("/proc/self/cgroup")
SHARED = Path("/dev/shm")
GIB = 2**30
LONGEST_FOLDER = 70  # a socket's path has 107 bytes, vLLM's 37 of them behind the folder


def check_launch(tp_size: int, dtype: str, server_gpus: int = 0) -> None:
    """Raises ValueError if GPUs stay idle, are too few or cannot be used. `server_gpus`: how many servers take."""
    check_temporary_folder()
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
    if num_gpus:
        check_compiler()
        if local_size > 1:
            check_shared_memory()
    check_divides("--tensor_parallel_size", tp_size, "the world size", world_size)


def check_temporary_folder() -> None:
    """Raises ValueError if the names of sockets in it would be too long: no worker could start."""
    if len(tempfile.gettempdir()) > LONGEST_FOLDER:
        raise ValueError(
            f"TMPDIR {tempfile.gettempdir()} is too long for the sockets in it; "
            f"give a folder of at most {LONGEST_FOLDER} characters, for example TMPDIR=/tmp."
        )


def check_compiler() -> str:
    """Says what Triton compiles with, at the first call of a kernel. Raises ValueError if something is missing."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    found, header = list(filter(shutil.which, compilers)), Path(sysconfig.get_path("include")) / "Python.h"
    missing = [] if found else [f"a C compiler ({' or '.join(compilers)})"]
    missing += [] if header.exists() else [str(header)]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} is missing: Triton compiles with it on GPUs; "
            "install gcc and python3-dev (or python3-devel), or set CC to a compiler."
        )
    return f"{found[0]}, {header}"


def check_shared_memory() -> str:
    """Says how large /dev/shm is. Raises ValueError below 1 GiB: too little for several ranks. Docker gives 64 MB."""
    size = shutil.disk_usage(SHARED).total / GIB
    if size < 1:
        raise ValueError(
            f"{SHARED} has {size:.2f} GiB, and NCCL and vLLM talk through it: give at least 1 GiB; "
            "start the container with --shm-size 16g or --ipc host."
        )
    return f"{size:.1f} GiB"


def check_room(args: Namespace) -> None:
    """Compares disk and host memory with what the dry run says of this launch; nothing is said of a model that it does
    not know, nor without plan/. Raises ValueError if not even one checkpoint fits.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    needs = None
    with suppress(ValueError):
        needs = part("plan.dry_run", "free disk").needs_of_launch(args)
    if needs and is_main_process():
        check_disk(Path(args.out_dir), *needs["checkpoints"])
    if needs and usable_gpus() and needs["host"] > (room := memory_limit()):
        print(
            f"warning: the ranks of this node need {needs['host'] / GIB:.0f} GiB of memory, and may take "
            f"{room / GIB:.0f} (its RAM, or a container's limit): Linux would end one without a word; "
            "raise the limit (docker run --memory), start fewer ranks, or use less of --offload.",
            flush=True,
        )


def check_disk(out_dir: Path, size: float, count: int) -> None:
    """Prints a warning if `count` checkpoints of `size` bytes do not fit on the disk. Raises ValueError if one
    does not.
    """
    folder = next(each for each in (out_dir.absolute(), *out_dir.absolute().parents) if each.exists())
    free = shutil.disk_usage(folder).free
    given = f"--out_dir {out_dir}: {free / GIB:.1f} GiB are free on its disk"
    if free < size:
        raise ValueError(f"{given}, and one checkpoint takes {size / GIB:.1f}; use a larger disk.")
    kept = sum(file.stat().st_size for file in out_dir.glob("step_*/**/*") if file.is_file())
    if free + kept < count * size:
        print(
            f"warning: {given}; the checkpoints that are there at a time take {count * size / GIB:.1f}, each "
            f"{size / GIB:.1f}: lower --keep_checkpoints, or use a larger disk.",
            flush=True,
        )


def memory_limit() -> int:
    """Bytes of RAM that the processes of this node may take: all, or what a container or Slurm sets (cgroups)."""
    limits = [psutil.virtual_memory().total]
    for line in OWN_GROUPS.read_text("utf-8").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:  # version 2
            root, name = CGROUPS, "memory.max"
        elif "memory" in kinds.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):  # a container sees its own group as the root
            with suppress(OSError, ValueError):  # there is none here, or it says "max"
                limits.append(int((folder / name).read_text("utf-8")))
    return min(limits)


def head_growth(args: Namespace, world: World) -> int:
    """The size of a chunk of logits over the least, by the dry run for the smallest GPU: one for all ranks, all phases
    and the continued run. All ranks call it. 1 on CPU, for a model that it does not know, and without plan/.
    """
    if world.device.type != "cuda":
        return 1
    size = min(gather_from_ranks(torch.cuda.get_device_properties(world.device).total_memory))
    with suppress(ValueError):
        return part("plan.dry_run", "the head's chunks").head_growth(args, size)
    return 1


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
