"""The memory of an update under every memory policy: predicted (`plan/memory.py`), and measured.

    OMP_NUM_THREADS=1 python scripts/launch.py --ranks 2 benchmarks/bench_memory.py

The weights are random. What is measured is the peak of live tensor bytes in one whole update of two full micro-batches:
log-probs, where there are any, backward passes, optimizer. A short update comes before it and makes the optimizer's
state. It runs on CPUs, where host and device are the same RAM: the prediction is that of a GPU plus that of the host.
Both sides leave out gloo's copy of what it reduces, which NCCL does not make (here the reduction is done in place), and
padding of the CPU's attention (all sequences have one length). On a GPU each run compares its own peaks with the
prediction.
"""

from __future__ import annotations

import argparse
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
from transformers import AutoConfig, AutoModelForCausalLM

from batch import Rollout
from bench_common import Trainer, flags_of, make_rollout, parser_of, print_table
from fsdp_utils import World, close_world, gather_from_ranks, init_world, local_shard
from plan.dry_run import config_of, setup_of
from plan.memory import ENGINE, gpu_phases, host_phases, optimizer_peak, without
from plan.setup import Setup

GOAL = 1.1  # the larger of predicted and measured over the other
MIB = 2**20
POLICIES = {
    "fp32": "",
    "fp32, checkpointing": "--gradient_checkpointing",
    "fp32, communicates once": "--gradient_checkpointing --communicate_once",
    "fp32, entropy": "--gradient_checkpointing --entropy_coef 0.01",
    "fp32 arithmetic": "--dtype float32",
    "fp32 arithmetic, checkpointing": "--dtype float32 --gradient_checkpointing",
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
    "model_type": "qwen2", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
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
        self.sizes: dict[int, int] = {}  # bytes of each storage that is alive
        self.live = self.peak = 0

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


def measured(args: argparse.Namespace, rollout: Rollout, world: World) -> int:
    """Bytes at the peak of an update with these flags on this rank, after a short one."""
    tracker, resize_ = Tracker(), torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, size: int) -> object:  # FSDP frees what it gathered in this way
        result = resize_(storage, size)
        if storage._cdata in tracker.sizes:
            tracker.resize(storage._cdata, size)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", counted), tracker:
        trainer = Trainer(args, world)
        for part in (rollout.select(np.arange(world.num_trainers)), rollout):
            gc.collect()
            tracker.peak = tracker.live
            update = trainer.prepare(part)
            trainer.train(update)
            del update
    return tracker.peak


def predicted(setup: Setup) -> float:
    """Bytes of one rank at the peak of the same phases, on the GPU and the host together."""
    phases = gpu_phases(setup)
    names = ("logprobs", "update", "optimizer")
    device = max(sum(without(phases[name], *ENGINE).values()) for name in names if name in phases)
    if setup.memory.offload == "all":  # chunks are in host RAM, and `host_phases` counts them as the process's own
        device = max(device, *optimizer_peak(replace(setup, memory=replace(setup.memory, offload="none"))).values())
    host = host_phases(setup)["run"]
    return device + sum(without(host, "processes", "rounding of pinned memory").values()) / setup.hardware.gpus


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", help="a folder with config.json or a name of models.json; default: 32 M parameters")
    add("--micro_batch_tokens", type=int, default=1024, help="tokens of each of the two micro-batches of a rank")
    add("--length", type=int, default=128, help="tokens of each sequence; divides --micro_batch_tokens")
    given = parser.parse_args()
    world = init_world(tp_size=1, timeout_minutes=5)
    dist.reduce_scatter_single = reduce_scatter_in_place
    config = config_of(given.model) if given.model else AutoConfig.for_model(**SMALL)
    num_sequences = 2 * world.num_trainers * given.micro_batch_tokens // given.length
    rollout = make_rollout([given.length] * num_sequences, config.vocab_size, prompt_tokens=1)
    rows, ratios = [], {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # on the main rank alone, which reads it
        gc.freeze()  # what has been imported need not be looked through for each policy
        sizes = f"--max_completion_tokens {given.length} --micro_batch_tokens {given.micro_batch_tokens}"
        common = f"{COMMON} {sizes} --plan_gpus {world.num_trainers}".split()
        for name, flags in POLICIES.items():
            args = flags_of(folder, *common, *flags.split())
            used, expected = max(gather_from_ranks(measured(args, rollout, world))), predicted(setup_of(args, config))
            rows.append([name, f"{expected / MIB:.1f}", f"{used / MIB:.1f}", f"{expected / used:.3f}"])
            ratios[name] = round(expected / used, 3)
    if world.is_main:
        print_table(["MiB on a rank", "predicted", "measured", "ratio"], rows)
        worst = max(max(ratio, 1 / ratio) for ratio in ratios.values())
        print(json.dumps({"worst_ratio": round(worst, 3), "goal": GOAL, "ranks": world.num_trainers, "ratios": ratios}))
    close_world()


if __name__ == "__main__":
    main()
