"""What an update costs: ours against bare torch on the same tokens, against padded batches, and its peak memory.

    OMP_NUM_THREADS=1 python benchmarks/bench_update.py                       # fp32
    OMP_NUM_THREADS=1 python benchmarks/bench_update.py --dtype bfloat16      # bare and padded: torch.autocast
    OMP_NUM_THREADS=1 python benchmarks/bench_update.py --group_size 8 --prompt_tokens 512     # also --share_prompts

Ours is `pack_updates`, `add_advantages` and `update_policy` as in training: packed, chunked head, FSDP2 on one rank,
all metrics. Bare is forward, backward and fused AdamW of the same Hugging Face model with its own attention: one
sequence at a time without any padding, logits of the completion only, and the simplest policy-gradient loss, with no
metric and no clipping. Padded is the same with --padded_rows sequences at a time, with an attention mask, padded to the
longest of the step (as TRL pads) or of the micro-batch. Lengths are lognormal.

All start from the same weights and run in turn in one process of one thread. The benchmark compares their CPU seconds,
which other programs on the machine disturb less than wall time. The goals: bare seconds / ours at least 0.90, padded /
ours at least 2.0 for both paddings. Memory is the peak resident set of a process that runs one update, less what it had
before: ours, bare, and ours with one chunk (full logits), at --memory_vocab. Prints two tables and, last, one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import psutil
import torch
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from batch import Rollout
from bench_common import (
    Trainer,
    flags_of,
    interleave,
    make_rollout,
    median_ratio,
    parser_of,
    print_table,
    save_random_model,
    times_row,
)
from fsdp_utils import close_world, init_world
from model import sizes

GOALS = {"bare": 0.90, "padded": 2.0}
MEMORY_OF = ("ours", "bare", "full_logits")


def lognormal_lengths(count: int, mean: float, longest: int, sigma: float = 0.7) -> list[int]:
    """The quantiles of the distribution in a random order, so that a few sequences have its mean and its tail."""
    distribution = NormalDist(np.log(mean) - sigma**2 / 2, sigma)
    lengths = [min(round(np.exp(distribution.inv_cdf((i + 0.5) / count))), longest) for i in range(count)]
    return np.random.default_rng(0).permutation(lengths).tolist()


def ours(rollout: Rollout, trainer: Trainer) -> Callable[[], None]:
    """A function that does our update of the rollout, once per call."""
    return lambda: trainer.train(trainer.prepare(rollout))


def bare(model: Path, rollout: Rollout, dtype: str, rows: int = 1, longest: int = 0) -> Callable[[], None]:
    """A function that does the update with nothing but torch and transformers, once per call.

    It takes `rows` sequences at a time, padded to at least `longest` tokens.
    """
    hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = AdamW(hf_model.parameters(), lr=1e-6, fused=True)
    num_tokens, before = int(rollout.trained_lengths_B.sum()), len(rollout.rows[0].ids)
    prompts = [row.ids for row in rollout.rows]
    sequences = list(zip(prompts, rollout.completions, rollout.rewards_B, strict=True))

    def run() -> None:
        for start in range(0, len(sequences), rows):
            some = sequences[start : start + rows]
            width = max(longest, *(len(completion) for _, completion, _ in some)) if rows > 1 else len(some[0][1])
            ids = np.zeros((len(some), before + width), int)
            mask, advantages = np.zeros((len(some), width)), np.zeros((len(some), width))
            for i, (prompt, completion, advantage) in enumerate(some):
                ids[i, : before + len(completion)] = [*prompt, *completion]
                mask[i, : len(completion)], advantages[i, : len(completion)] = 1, advantage
            ids, weights = torch.from_numpy(ids), torch.from_numpy(mask * advantages / num_tokens).float()
            mask = torch.from_numpy(mask)
            attention_mask = None if rows == 1 else F.pad(mask.long(), (before, 0), value=1)
            with torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext():
                output = hf_model(ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=width + 1)
                logits = output.logits[:, :-1].float()
                del output
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, before:].flatten(), reduction="none")
            (losses.view(weights.shape) * weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--hidden", type=int, default=256, help="hidden size; the FFN has 4 times that")
    add("--layers", type=int, default=4, help="decoder layers")
    vocab = "of the timed model; the head has 6 %% of the matrices, as in a 7B model"
    add("--vocab", type=int, default=1024, help=vocab)
    add("--sequences", type=int, default=32, help="sequences of the update")
    group_size = "sequences that have the same prompt; above 1: ours also with --share_prompts"
    add("--group_size", type=int, default=1, help=group_size)
    add("--prompt_tokens", type=int, default=16, help="tokens of each prompt")
    mean_length = "of the lognormal lengths before they are cut, in tokens"
    add("--mean_length", type=float, default=600.0, help=mean_length)
    add("--max_length", type=int, default=2048, help="where they are cut, in tokens")
    add("--micro_batch_tokens", type=int, default=8192, help="token cap of our micro-batches")
    add("--padded_rows", type=int, default=8, help="sequences in a padded micro-batch")
    dtype = "of the arithmetic; parameters are fp32"
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help=dtype)
    add("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    memory_vocab = "vocabulary of the model whose memory is measured"
    add("--memory_vocab", type=int, default=151_936, help=memory_vocab)
    add("--memory_tokens", type=int, default=4096, help="completion tokens of its micro-batch")
    add("--peak_of", choices=MEMORY_OF, help="only measure the memory of this one")
    return parser.parse_args()


def print_peak(args: argparse.Namespace) -> None:
    """Prints by how many MiB one update raises the peak resident set. `--peak_of` runs this alone in its process."""
    lengths = [1024] * (args.memory_tokens // 1024)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        save_random_model(model, 64, 2, 192, args.memory_vocab)
        rollout = make_rollout(lengths, args.memory_vocab)
        if args.peak_of == "full_logits":
            sizes.HEAD_CHUNK_LOGITS = 10**12
        if args.peak_of == "bare":
            run = bare(model, rollout, args.dtype)
        else:
            flags = f"--dtype {args.dtype} --micro_batch_tokens {16 * len(lengths) + args.memory_tokens}"
            run = ours(rollout, Trainer(flags_of(model, *flags.split()), init_world(tp_size=1, timeout_minutes=5)))
        before = psutil.Process().memory_info().rss
        run()
        print("peak", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20)


def measure_peaks() -> dict[str, float]:
    """MiB by which one update of each kind raises the peak resident set."""
    peaks = {}
    for name in MEMORY_OF:
        command = [sys.executable, *sys.argv, "--peak_of", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[name] = float(done.stdout.split()[-1])
    return peaks


def measure_times(args: argparse.Namespace, lengths: list[int]) -> dict[str, list[float]]:
    """CPU seconds of each variant in each counted round."""
    rollout = make_rollout(lengths, args.vocab, args.prompt_tokens, args.group_size)
    world = init_world(tp_size=1, timeout_minutes=5)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        save_random_model(model, args.hidden, args.layers, 4 * args.hidden, args.vocab)
        flags = f"--dtype {args.dtype} --micro_batch_tokens {args.micro_batch_tokens}".split()
        variants = {"ours": ours(rollout, Trainer(flags_of(model, *flags), world))}
        if args.group_size > 1:
            sharing = ["--share_prompts", "--group_size", str(args.group_size)]
            variants["ours, prompts shared"] = ours(rollout, Trainer(flags_of(model, *flags, *sharing), world))
        variants |= {
            "bare": bare(model, rollout, args.dtype),
            "padded to longest of step": bare(model, rollout, args.dtype, args.padded_rows, max(lengths)),
            "padded to longest of micro": bare(model, rollout, args.dtype, args.padded_rows),
        }
        seconds = interleave(variants, args.rounds, clock=time.process_time)
    close_world()
    return seconds


def main() -> None:
    args = parse_args()
    if args.peak_of:
        print_peak(args)
        return
    peaks = measure_peaks()
    lengths = lognormal_lengths(args.sequences, args.mean_length, args.max_length)
    seconds = measure_times(args, lengths)
    tokens = f"{sum(lengths)} completion tokens: mean {np.mean(lengths):.0f}, longest {max(lengths)}"
    print(f"{len(lengths)} sequences, {tokens}")
    ratios = {name: median_ratio(times, seconds["ours"]) for name, times in seconds.items()}
    rows = [[*times_row(name, times), ratios[name]] for name, times in seconds.items()]
    print_table(["", "median CPU s", "min", "max", "over ours"], rows)
    rows = [[name, f"{peak:.0f}"] for name, peak in peaks.items()]
    print_table(["", f"peak MiB, {args.memory_tokens} x {args.memory_vocab}"], rows)
    found = {name: round(ratio, 3) for name, ratio in ratios.items() if name != "ours"}
    summary = {"ratio": found.pop("bare"), "goal": GOALS["bare"], **found, "padded_goal": GOALS["padded"]}
    print(json.dumps(summary | {"peak_mib": {name: round(peak) for name, peak in peaks.items()}}))


if __name__ == "__main__":
    main()
