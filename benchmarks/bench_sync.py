"""How fast new weights reach the engine: our sync against memcpy of the same bytes, on every rank at once.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/bench_sync.py
    OMP_NUM_THREADS=1 python benchmarks/bench_sync.py                                       # one rank: nothing to gather

Ours is `engine.sync(policy.full_weights())` as after every step: fp32 shards of FSDP2 are cast, gathered, and loaded by
vLLM's `reload_weights`. Memcpy copies as many bytes as the engine's weights have, tensor by tensor. The two run in turn; a round ends when
all ranks are done. The goal is a ratio of bytes per second, ours over memcpy's, of at least 0.5. The second table says where the time of
rank 0 goes: gathering alone is the same iterator with nobody at its end. Prints two tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import AutoTokenizer

import train_grpo
from bench_common import build, interleave, median_ratio, print_table, save_random_model, times_row
from flags import EngineSettings
from fsdp_utils import close_world, gather_from_ranks, init_world, wait_for_all
from policy import DTYPES
from rollout import Engine

GOAL = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size; the FFN has 4 times that")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers")
    parser.add_argument("--vocab", type=int, default=8192, help="vocabulary")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bfloat16", help="of the engine; the policy's parameters are fp32"
    )
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds, after two that are not")
    parser.add_argument(
        "--profile", action="store_true", help="also print the functions of one sync that take longest, on rank 0"
    )
    args = parser.parse_args()

    world = init_world(tp_size=1, timeout_minutes=10)
    folder = Path(gather_from_ranks(tempfile.mkdtemp(prefix="bench_sync_"))[0])
    if world.is_main:
        save_random_model(folder, args.hidden, args.layers, 4 * args.hidden, args.vocab)
    wait_for_all()
    flags = train_grpo.parse_flags(
        ["--model", str(folder), "--train_data", "-", "--out_dir", "-", "--dtype", args.dtype]
    )
    policy, _, _ = build(flags, world)
    engine = Engine(str(folder), AutoTokenizer.from_pretrained(folder), world, EngineSettings(128, args.dtype))
    source = [tensor.clone() for _, tensor in policy.full_weights()]
    target = [torch.zeros_like(tensor) for tensor in source]
    num_bytes = sum(tensor.nbytes for tensor in source)

    def memcpy() -> None:
        for new, old in zip(source, target, strict=True):
            old.copy_(new)
        wait_for_all()

    def gather() -> None:
        for _ in policy.full_weights():
            pass
        wait_for_all()

    def sync() -> None:
        engine.sync(policy.full_weights())
        wait_for_all()

    seconds = interleave({"memcpy": memcpy, "gather and cast alone": gather, "sync": sync}, args.rounds, warm_up=2)
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(sync)
        if world.is_main:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    if world.is_main:
        shutil.rmtree(folder)
        print(
            f"{len(source)} tensors, {num_bytes / 2**20:.0f} MiB in {args.dtype}, {world.num_trainers} ranks on {world.device.type}"
        )
        rows = [
            [*times_row(name, times, seconds["memcpy"]), num_bytes / statistics.median(times) / 1e9]
            for name, times in seconds.items()
        ]
        print_table(["", "median s", "min", "max", "speed by memcpy", "GB/s of each rank"], rows)
        ratio = median_ratio(seconds["memcpy"], seconds["sync"])
        print(
            json.dumps(
                {
                    "ratio": round(ratio, 3),
                    "goal": GOAL,
                    "mib": round(num_bytes / 2**20),
                    "ranks": world.num_trainers,
                    "dtype": args.dtype,
                }
            )
        )
    engine.close()
    close_world()


if __name__ == "__main__":
    main()
