"""Predicted against measured memory of an update under every memory policy: `planner/memory.py` against the run itself.

    OMP_NUM_THREADS=1 python scripts/launch.py --ranks 2 benchmarks/bench_memory.py
    python scripts/launch.py --ranks 1 benchmarks/bench_memory.py --model Qwen/Qwen2.5-1.5B \\
        --micro_batch_tokens 16384 --length 2048

The policy is that of `policy.build_policy`, with random weights. What is measured is one whole update of two full
micro-batches: log-probs, where there are any, backward passes, optimizer. A short update comes before it and makes
the optimizer's state.

CPU: "tensors" is the peak of live tensor bytes (`Tracker`), "process" the growth of the process's
resident memory at its peak. Host and device are the same RAM, so the prediction is that of a GPU plus that of the host.
Both leave out gloo's copy of what it reduces, which NCCL does not make (here the reduction is done in place); padding
of the CPU's attention (all sequences have one length); and what libraries keep from the first use of a shape (two
policies run first and are not counted).
CUDA: torch's allocator, live ("tensors") and reserved ("process"). The prediction is that of the GPU. Not run yet.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig

from batch import Rollout
from bench_common import Trainer, flags_of, make_rollout, parser_of, print_table, use_random_weights
from fsdp_utils import World, close_world, gather_from_ranks, init_world, local_shard
from planner.dry_run import config_of, setup_of
from planner.memory import gpu_phases, host_phases, optimizer_peak, without
from planner.setup import Setup

GOAL = 1.1  # the larger of predicted and measured over the other
MIB = 2**20
POLICIES = {
    "fp32": "",
    "fp32, checkpointing": "--gradient_checkpointing",
    "fp32, communicates once": "--gradient_checkpointing --communicate_once",
    "fp32, entropy": "--gradient_checkpointing --entropy_coef 0.01",
    "fp32, optimizer on host": "--gradient_checkpointing --offload optimizer",
    "fp32, all on host": "--gradient_checkpointing --offload all",
    "bf16": "--param_dtype bfloat16",
    "bf16, checkpointing": "--gradient_checkpointing --param_dtype bfloat16",
    "bf16, optimizer on host": "--gradient_checkpointing --param_dtype bfloat16 --offload optimizer",
    "bf16, all on host": "--gradient_checkpointing --param_dtype bfloat16 --offload all",
    "reference": "--gradient_checkpointing --kl_coef 0.01",
    "reference on host": "--gradient_checkpointing --kl_coef 0.01 --offload_reference",
    "LoRA": "--lora_rank 8",
    "LoRA, checkpointing, KL": "--lora_rank 8 --gradient_checkpointing --kl_coef 0.01",
    "LoRA, dropout": "--lora_rank 8 --gradient_checkpointing --lora_dropout 0.05",
}
SMALL = {
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
COMMON = "--max_prompt_tokens 1 --prompts_per_step 64 --learning_rate 1e-5"


def reduce_scatter_in_place(
    output: Tensor, input: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup, async_op: bool
) -> None:
    """In the place of gloo's `reduce_scatter_single`, which clones its input."""
    dist.all_reduce(input, op=op, group=group)
    output.copy_(input.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)])


class Tracker(TorchDispatchMode):
    """Counts the bytes of live storages, and their maximum; not what a kernel takes and frees inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # of the storages that are alive
        self.live = self.peak = 0

    def __enter__(self) -> Tracker:
        resize_ = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> object:  # FSDP frees what it gathered in this way
            result = resize_(storage, size)
            if storage._cdata in self.sizes:
                self.resize(storage._cdata, size)
            return result

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", counted)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.patch.stop()

    def __torch_dispatch__(self, op: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        result = op(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.watch(tensor)
        return result

    def watch(self, tensor: Tensor) -> None:
        storage = local_shard(tensor).untyped_storage()
        if storage._cdata not in self.sizes:
            self.resize(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self.forget, storage._cdata)

    def resize(self, key: int, size: int) -> None:
        self.live += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.live)

    def forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def restart(self) -> None:
        self.peak = self.live


class Meter:
    """Bytes beyond those at its start, now and at most since `restart`: (tensors, process)."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.tracker = Tracker()
        self.restart()
        self.start = (0, self.resident("VmRSS"))
        if self.is_cuda:
            self.start = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())

    def restart(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return
        self.tracker.restart()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now

    def peaks(self) -> tuple[int, int]:
        if self.is_cuda:
            found = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        else:
            found = (self.tracker.peak, self.resident("VmHWM"))
        return found[0] - self.start[0], found[1] - self.start[1]

    @staticmethod
    def resident(field: str) -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":")]
        return int(line.split()[1]) * 1024


def measured(args: argparse.Namespace, rollout: Rollout, world: World) -> tuple[int, int]:
    """Peaks of an update with these flags on this rank, after a short one."""
    meter = Meter(world.device)
    with meter.tracker if not meter.is_cuda else torch.enable_grad():
        trainer = Trainer(args, world)
        for part in (rollout.take(np.arange(world.num_trainers)), rollout):
            meter.restart()
            update = trainer.prepare(part)
            trainer.train(update)
            del update
        return meter.peaks()


def predicted(setup: Setup, is_cuda: bool) -> float:
    """Bytes of one rank at the peak of the same phases."""
    phases = gpu_phases(setup)
    device = max(sum(phases[name].trainer.values()) for name in ("logprobs", "update", "optimizer") if name in phases)
    if is_cuda:
        return device
    if setup.memory.offload == "all":  # chunks are in host RAM, and `host_phases` counts them as the process's own
        device = max(device, *optimizer_peak(replace(setup, memory=replace(setup.memory, offload="none"))).values())
    host = host_phases(setup)["run"]
    return device + sum(without(host, "processes", "rounding of pinned memory").values()) / setup.num_trainers


def print_results(found: dict[str, tuple[float, int, int]], world: World) -> None:
    """`found`: policy -> bytes as predicted, of tensors, of the process. The last line is a JSON object."""
    rows = []
    for name, (expected, tensors, process) in found.items():
        of_tensors = f"{tensors / MIB:.1f}", f"{expected / tensors:.3f}"
        of_process = f"{process / MIB:.1f}", f"{expected / process:.3f}"
        rows.append([name, f"{expected / MIB:.1f}", *of_tensors, *of_process])
    print_table(["MiB on a rank", "predicted", "tensors", "ratio", "process", "ratio"], rows)
    ratios = {name: round(expected / tensors, 3) for name, (expected, tensors, _) in found.items()}
    worst = round(max(max(ratio, 1 / ratio) for ratio in ratios.values()), 3)
    place = {"ranks": world.num_trainers, "device": world.device.type}
    print(json.dumps({"worst_ratio": worst, "goal": GOAL, **place, "ratios": ratios}))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", help="a folder with config.json or a name of models.json; default: 32 M parameters")
    add("--micro_batch_tokens", type=int, default=1024, help="tokens of each of the two micro-batches of a rank")
    add("--length", type=int, default=128, help="tokens of each sequence; divides --micro_batch_tokens")
    names = list(POLICIES)
    add("--policies", nargs="+", choices=names, default=names, metavar="NAME", help="policies to measure")
    given = parser.parse_args()
    world = init_world(tp_size=1, timeout_minutes=5)
    is_cuda = world.device.type == "cuda"
    if not is_cuda:  # what is freed goes back to the system at once: large tensors are mapped one by one
        ctypes.CDLL(None).mallopt(-3, 2**18)  # M_MMAP_THRESHOLD
        dist.reduce_scatter_single = reduce_scatter_in_place
    config = config_of(given.model) if given.model else AutoConfig.for_model(**SMALL)
    num_sequences = 2 * world.num_trainers * given.micro_batch_tokens // given.length
    rollout = make_rollout([given.length] * num_sequences, config.vocab_size, prompt_tokens=1)
    use_random_weights()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        sizes = f"--max_completion_tokens {given.length} --micro_batch_tokens {given.micro_batch_tokens}"
        common = f"{COMMON} {sizes} --plan_gpus {world.num_trainers}".split()
        gc.freeze()  # what has been imported need not be looked through at each restart
        for policy in ("", "--lora_rank 8"):  # what libraries keep of these shapes for good belongs to no policy
            measured(flags_of(folder, *common, *policy.split()), rollout, world)
        for name in given.policies:
            args = flags_of(folder, *common, *POLICIES[name].split())
            peaks = np.max(gather_from_ranks(measured(args, rollout, world)), axis=0)
            found[name] = predicted(setup_of(args, config), is_cuda), *peaks.tolist()
    if world.is_main:
        print_results(found, world)
    close_world()


if __name__ == "__main__":
    main()
