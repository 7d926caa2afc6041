"""How fast new weights reach the engine: our sync against memcpy of the same bytes, on every rank at once.

    OMP_NUM_THREADS=1 python scripts/launch.py --ranks 2 benchmarks/bench_sync.py
    OMP_NUM_THREADS=1 python benchmarks/bench_sync.py                                # one rank: nothing to gather

Ours is `engine.sync(policy.full_weights())` as after every step: fp32 shards of FSDP2 are cast and gathered, and vLLM's
`reload_weights` loads them. Memcpy copies as many bytes as the engine's weights have, tensor by tensor. The two run in
turn; a round ends when all ranks are done. The goal is a ratio of bytes per second, ours over memcpy's, of at least
0.5. The row "gather and cast alone" is the same iterator with nobody at its end. Prints a table and, last, one JSON
line; with --profile also where the time of rank 0 goes.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import shutil
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import AutoTokenizer

from bench_common import (
    Trainer,
    flags_of,
    interleave,
    median_ratio,
    parser_of,
    print_table,
    save_random_model,
    shared_folder,
    times_row,
)
from flags import DTYPES, EngineSettings
from fsdp_utils import close_world, init_world, wait_for_all
from rollout import Engine

GOAL = 0.5


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--hidden", type=int, default=1024, help="hidden size; the FFN has 4 times that")
    add("--layers", type=int, default=8, help="decoder layers")
    add("--vocab", type=int, default=8192, help="vocabulary")
    dtype = "of the engine; the policy's parameters are fp32"
    add("--dtype", choices=DTYPES, default="bfloat16", help=dtype)
    add("--rounds", type=int, default=7, help="counted rounds, after two that are not")
    profile = "also print the functions of one sync that take longest, on rank 0"
    add("--profile", action="store_true", help=profile)
    args = parser.parse_args()

    world = init_world(tp_size=1, timeout_minutes=10)
    folder = shared_folder("bench_sync_")
    if world.is_main:
        save_random_model(folder, args.hidden, args.layers, 4 * args.hidden, args.vocab)
    wait_for_all()
    policy = Trainer(flags_of(folder, "--dtype", args.dtype), world).policy
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
        mib, place = num_bytes / 2**20, f"{world.num_trainers} ranks on {world.device.type}"
        print(f"{len(source)} tensors, {mib:.0f} MiB in {args.dtype}, {place}")
        speeds = [num_bytes / statistics.median(times) / 1e9 for times in seconds.values()]
        rows = [times_row(name, times, seconds["memcpy"]) for name, times in seconds.items()]
        rows = [[*row, speed] for row, speed in zip(rows, speeds, strict=True)]
        print_table(["", "median s", "min", "max", "speed by memcpy", "GB/s of each rank"], rows)
        ratio = median_ratio(seconds["memcpy"], seconds["sync"])
        summary = {"ratio": round(ratio, 3), "goal": GOAL, "mib": round(mib)}
        print(json.dumps(summary | {"ranks": world.num_trainers, "dtype": args.dtype}))
    engine.close()
    close_world()


if __name__ == "__main__":
    main()
