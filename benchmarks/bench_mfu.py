"""How well an update uses the GPU: seconds, tokens/s, FLOP/s and MFU of `update_policy` on random weights of a real shape, flag by flag.

    torchrun --standalone --nproc_per_node 1 benchmarks/bench_mfu.py --model Qwen/Qwen2.5-1.5B                  # one GPU of 80 GB
    torchrun --standalone --nproc_per_node 1 benchmarks/bench_mfu.py --model Qwen/Qwen2.5-7B --variants LoRA "LoRA, compiled"

Two micro-batches of --micro_batch_tokens on each rank, of sequences with lognormal lengths (mean 600, at most 2,048). FLOPs and MFU are
those of `throughput.py`; recomputation does not count. "full logits": the head in one chunk. "padded": every sequence is as long as the
longest, and the tokens of the padding count for nothing. A variant that does not fit is said so. Prints a table, the attention that ran,
and, last, one JSON line. Written for CUDA against the libraries, but not run there yet; on CPU, which has no MFU, take a small --model.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from plan import Plan
from throughput import peak_flops, update_flops

import policy as policy_module
import train_grpo
from batch import training_costs
from bench_common import build, print_table
from bench_memory import fill_randomly
from bench_update import make_rollout
from fsdp_utils import World, close_world, init_world, wait_for_all
from model import sizes
from planner.dry_run import config_of
from policy import Policy
from update import add_advantages, pack_updates, update_policy

GOAL = 0.5  # MFU
COMMON = "--train_data none#1000 --out_dir none --total_steps 1 --max_prompt_tokens 16"
VARIANTS = {  # name -> flags
    "full": "--gradient_checkpointing",
    "full, bf16 parameters": "--gradient_checkpointing --param_dtype bfloat16",
    "full, optimizer on host": "--gradient_checkpointing --offload optimizer",
    "full, activations on host": "--gradient_checkpointing --offload_activations",
    "full, compiled": "--gradient_checkpointing --compile_layers",
    "full, full logits": "--gradient_checkpointing",
    "full, padded": "--gradient_checkpointing",
    "LoRA": "--gradient_checkpointing --lora_rank 8",
    "LoRA, compiled": "--gradient_checkpointing --lora_rank 8 --compile_layers",
}


def seconds_of(
    args: argparse.Namespace, lengths: list[int], vocab: int, rounds: int, world: World
) -> tuple[list[float], Policy]:
    """Seconds of each update after a first one that is not counted, and the policy."""
    policy, _, optimizer = build(args, world)
    rollout = make_rollout(
        [length - 15 for length in lengths], vocab
    )  # a prompt of 16 tokens and the shift make it `length` positions
    times = []
    for index in range(-1, rounds):
        plan = Plan(len(lengths), 1, 1, 1, 1, 1, 0)
        (batches,) = add_advantages(pack_updates(rollout, plan, args, world, policy.parity_length), rollout)
        wait_for_all()
        start = time.perf_counter()
        metrics = update_policy(
            policy, optimizer, batches, int(rollout.completion_lengths_B.sum()), True, 1e-6, args, world
        )
        assert not metrics["optim/skipped_updates"], "nothing was updated"
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        if index >= 0:
            times.append(time.perf_counter() - start)
    return times, policy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder with config.json or a name of models.json")
    parser.add_argument(
        "--micro_batch_tokens", type=int, default=16_384, help="of each of the two micro-batches of a rank"
    )
    parser.add_argument(
        "--mean_length", type=int, default=600, help="of the sequences, in positions; the longest have 2,048 at most"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted updates of each variant")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        metavar="NAME",
        help="some of them; default: all, without a GPU not the compiled",
    )
    given = parser.parse_args()
    world = init_world(tp_size=1, timeout_minutes=10)
    is_cuda = world.device.type == "cuda"
    names = given.variants or [name for name in VARIANTS if is_cuda or "compiled" not in name]
    peak = peak_flops(torch.cuda.get_device_name()) if is_cuda else None
    policy_module.fill = fill_randomly
    config = config_of(given.model)
    vocab = config.get_text_config().vocab_size
    chunk = sizes.HEAD_CHUNK_LOGITS
    longest = min(2048, given.micro_batch_tokens)
    draws = (
        np.random.default_rng(0).lognormal(np.log(given.mean_length) - 0.32, 0.8, 100_000).astype(int).clip(17, longest)
    )
    room = 0.97 * 2 * world.num_trainers * given.micro_batch_tokens  # so that two micro-batches on each rank hold them
    lengths = draws[: int((draws.cumsum() <= room).sum())]
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for name in names:
            args = train_grpo.parse_flags(
                ["--model", folder, *COMMON.split(), "--max_completion_tokens", str(longest), "--micro_batch_tokens",
                 str(given.micro_batch_tokens), *VARIANTS[name].split()]
            )  # fmt: skip
            sizes.HEAD_CHUNK_LOGITS = 10**12 if "full logits" in name else chunk
            try:
                times, policy = seconds_of(
                    args, [longest] * len(lengths) if "padded" in name else lengths.tolist(), vocab, given.rounds, world
                )
            except torch.OutOfMemoryError:
                rows.append([name, "out of memory"])
                found[name] = None
            else:
                median = statistics.median(times)
                cost = training_costs(lengths, policy.parity_length).sum()
                flops = update_flops(policy, cost, bool(args.lora_rank)) / median / world.num_trainers
                share = flops / peak if peak else float("nan")
                rows.append(
                    [
                        name,
                        median,
                        min(times),
                        max(times),
                        lengths.sum() / median / world.num_trainers,
                        flops / 1e12,
                        share,
                    ]
                )
                found[name] = round(flops / peak, 3) if peak else round(flops / 1e12, 4)
                del policy
            gc.collect()
            if is_cuda:
                torch.cuda.empty_cache()
    if world.is_main:
        header = ["", "median s", "min", "max", "tokens/s per rank", "TFLOP/s per rank", "MFU"]
        print_table(header, [row + [""] * (len(header) - len(row)) for row in rows])
        print(
            f"attention: {'torch.nn.attention.varlen.varlen_attn' if is_cuda else 'scaled_dot_product_attention on rectangles'}"
        )
        unit = "MFU" if peak else "TFLOP/s"
        print(
            json.dumps(
                {
                    "ratio": found,
                    "unit": unit,
                    "goal": GOAL,
                    "device": torch.cuda.get_device_name() if is_cuda else "cpu",
                    "ranks": world.num_trainers,
                }
            )
        )
    close_world()


if __name__ == "__main__":
    main()
