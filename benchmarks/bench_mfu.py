"""How well an update uses the GPU: seconds, tokens/s, FLOP/s and MFU of `update_policy`, flag by flag.

    python scripts/launch.py --ranks 1 benchmarks/bench_mfu.py --model Qwen/Qwen2.5-1.5B      # one GPU of 80 GB
    python scripts/launch.py --ranks 1 benchmarks/bench_mfu.py --model Qwen/Qwen2.5-7B \\
        --variants LoRA "LoRA, compiled"

The model has random weights in a real shape. An update has two micro-batches of --micro_batch_tokens on each rank;
the lengths of the sequences are lognormal (mean 600, at most 2,048). FLOPs and MFU are those of `metrics.py`:
recomputation does not count. "full logits": the head works in one chunk. "padded": every sequence is as long as the
longest one, and the tokens of the padding count for nothing. A variant that does not fit is reported as such. Prints a
table, the attention that ran, and, last, one JSON line. Written for CUDA against the libraries, but not run there yet;
on a CPU, which has no MFU, use a small --model.
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

from batch import Rollout, training_costs
from bench_common import Trainer, flags_of, make_rollout, parser_of, print_table, use_random_weights
from fsdp_utils import World, close_world, init_world, wait_for_all
from metrics import peak_flops
from model import sizes
from model.attention import check_device, kernel_name
from planner.dry_run import config_of
from policy import Policy
from update import update_flops

GOAL = 0.5  # MFU
VARIANTS = {  # name -> flags
    "full": "--gradient_checkpointing",
    "full, bf16 parameters": "--gradient_checkpointing --param_dtype bfloat16",
    "full, optimizer on host": "--gradient_checkpointing --offload optimizer",
    "full, full logits": "--gradient_checkpointing",
    "full, padded": "--gradient_checkpointing",
    "LoRA": "--gradient_checkpointing --lora_rank 8",
}


def draw_lengths(mean: int, longest: int, room: float) -> np.ndarray:
    """Lognormal lengths of sequences, in positions, as many as fit into the room."""
    draws = np.random.default_rng(0).lognormal(np.log(mean) - 0.32, 0.8, 100_000).astype(int).clip(17, longest)
    return draws[: int((draws.cumsum() <= room).sum())]


def seconds_of(args: argparse.Namespace, rollout: Rollout, rounds: int, world: World) -> tuple[list[float], Policy]:
    """Seconds of each update after a first one that is not counted, and the policy."""
    trainer = Trainer(args, world)
    times = []
    for index in range(-1, rounds):
        update = trainer.prepare(rollout)
        wait_for_all()
        start = time.perf_counter()
        trainer.train(update)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        if index >= 0:
            times.append(time.perf_counter() - start)
    return times, trainer.policy


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a folder with config.json or a name of models.json")
    add("--micro_batch_tokens", type=int, default=16_384, help="tokens of each of a rank's two micro-batches")
    add("--mean_length", type=int, default=600, help="mean length in positions; the longest have 2,048")
    add("--rounds", type=int, default=5, help="counted updates of each variant")
    some = "some of them; default: all, without a GPU not the compiled"
    add("--variants", nargs="+", choices=list(VARIANTS), metavar="NAME", help=some)
    given = parser.parse_args()
    world = init_world(tp_size=1, timeout_minutes=10)
    check_device(world.device, share_prompts=False)
    is_cuda = world.device.type == "cuda"
    names = given.variants or [name for name in VARIANTS if is_cuda or "compiled" not in name]
    peak = peak_flops(torch.cuda.get_device_name()) if is_cuda else None
    use_random_weights()
    config = config_of(given.model)
    vocab, chunk = config.get_text_config().vocab_size, sizes.HEAD_CHUNK_LOGITS
    longest = min(2048, given.micro_batch_tokens)
    room = 0.97 * 2 * world.num_trainers * given.micro_batch_tokens  # so that two micro-batches on each rank hold them
    lengths = draw_lengths(given.mean_length, longest, room)
    limits = f"--max_prompt_tokens 16 --max_completion_tokens {longest} --micro_batch_tokens {given.micro_batch_tokens}"
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for name in names:
            args = flags_of(folder, *limits.split(), *VARIANTS[name].split())
            sizes.HEAD_CHUNK_LOGITS = 10**12 if "full logits" in name else chunk
            positions = [longest] * len(lengths) if "padded" in name else lengths.tolist()
            # A prompt of 16 tokens and the shift: 15 more positions than tokens of the completion.
            rollout = make_rollout([length - 15 for length in positions], vocab)
            try:
                times, policy = seconds_of(args, rollout, given.rounds, world)
            except torch.OutOfMemoryError:
                rows.append([name, "out of memory", *[""] * 5])
                found[name] = None
            else:
                median = statistics.median(times)
                cost = training_costs(lengths, policy.parity_length).sum()
                flops = update_flops(policy, cost) / median / world.num_trainers
                speed = lengths.sum() / median / world.num_trainers
                share = flops / peak if peak else float("nan")
                rows.append([name, median, min(times), max(times), speed, flops / 1e12, share])
                found[name] = round(flops / peak, 3) if peak else round(flops / 1e12, 4)
                del policy
            gc.collect()
            if is_cuda:
                torch.cuda.empty_cache()
    if world.is_main:
        print_table(["", "median s", "min", "max", "tokens/s per rank", "TFLOP/s per rank", "MFU"], rows)
        print(f"attention: {kernel_name(world.device)}")
        device = torch.cuda.get_device_name() if is_cuda else "cpu"
        summary = {"ratio": found, "unit": "MFU" if peak else "TFLOP/s", "goal": GOAL}
        print(json.dumps(summary | {"device": device, "ranks": world.num_trainers}))
    close_world()


if __name__ == "__main__":
    main()
