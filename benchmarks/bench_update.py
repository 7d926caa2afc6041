"""What an update costs: ours against bare torch on the same tokens, against padded batches, and its peak memory against full logits.

    OMP_NUM_THREADS=1 python benchmarks/bench_update.py                       # fp32
    OMP_NUM_THREADS=1 python benchmarks/bench_update.py --dtype bfloat16      # bare and padded: torch.autocast
    OMP_NUM_THREADS=1 python benchmarks/bench_update.py --group_size 8 --prompt_tokens 512     # ours also with --share_prompts

Ours is `pack_updates`, `add_advantages` and `update_policy` as in training: packed, chunked head, FSDP2 on one rank, all metrics. Bare is
forward, backward and fused AdamW of the same Hugging Face model with its own attention, one sequence at a time without any padding, logits
of the completion only, and the simplest policy-gradient loss, with no metric and no clipping. Padded is the same with --padded_rows
sequences at a time, with an attention mask, padded to the longest of the step (as TRL pads) or of the micro-batch. Lengths are lognormal.
All start from the same weights and run in turn in one process of one thread; what is compared are its CPU seconds, which other programs on
the machine disturb less than wall time. The goals: bare seconds / ours at least 0.90, padded / ours at least 2.0 for both paddings.
Memory is the peak resident set of a process that runs one update, less what it had before: ours, bare, and ours with one chunk (full
logits), at --memory_vocab. Prints two tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import psutil
import torch
from plan import Plan
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import train_grpo
from batch import Rollout
from bench_common import build, interleave, median_ratio, print_table, save_random_model, times_row
from fsdp_utils import World, close_world, init_world
from model import sizes
from update import add_advantages, pack_updates, update_policy

GOALS = {"bare": 0.90, "padded": 2.0}


def make_rollout(lengths: list[int], vocab: int, prompt_tokens: int = 16, group_size: int = 1) -> Rollout:
    """Random prompts and, `group_size` to each, completions of these lengths, with advantages and sampled log-probs."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, prompt_tokens).astype(np.int32) for _ in lengths]
    return Rollout(
        prompts=[prompts[b // group_size] for b in range(len(lengths))],
        completions=[rng.integers(0, vocab, n).astype(np.int32) for n in lengths],
        rollout_logprobs=[np.full(n, -np.log(vocab), dtype=np.float32) for n in lengths],
        texts=[""] * len(lengths),
        is_truncated_B=np.zeros(len(lengths), dtype=bool),
        advantages=[np.full(n, rng.normal(), dtype=np.float32) for n in lengths],
    )


def lognormal_lengths(count: int, mean: float, longest: int, sigma: float = 0.7) -> list[int]:
    """The quantiles of the distribution in a random order, so that a few sequences have its mean and its tail."""
    distribution = NormalDist(np.log(mean) - sigma**2 / 2, sigma)
    lengths = [min(round(np.exp(distribution.inv_cdf((i + 0.5) / count))), longest) for i in range(count)]
    return np.random.default_rng(0).permutation(lengths).tolist()


def ours(model: Path, rollout: Rollout, dtype: str, micro_batch_tokens: int, world: World, *more_flags: str):
    """A function that does our update of the rollout, once per call."""
    flags = ["--model", str(model), "--train_data", "-", "--out_dir", "-", "--dtype", dtype, "--prompts_per_step", "1"]
    args = train_grpo.parse_flags([*flags, "--micro_batch_tokens", str(micro_batch_tokens), *more_flags])
    model, _, optimizer = build(args, world)
    plan = Plan(
        len(rollout.texts),
        updates_per_pass=1,
        updates_per_step=1,
        steps_per_epoch=1,
        total_steps=1,
        total_updates=1,
        warmup_updates=0,
    )
    num_tokens = int(rollout.trained_lengths_B.sum())

    def run() -> None:
        (batches,) = add_advantages(pack_updates(rollout, plan, args, world), rollout)
        update_policy(model, optimizer, batches, num_tokens, True, args.learning_rate, args, world)

    return run


def bare(model: Path, rollout: Rollout, dtype: str, rows: int = 1, longest: int = 0):
    """A function that does the update with nothing but torch and transformers, `rows` sequences at a time, padded to at least `longest`."""
    hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = AdamW(hf_model.parameters(), lr=1e-6, fused=True)
    num_tokens, before = int(rollout.trained_lengths_B.sum()), len(rollout.prompts[0])
    sequences = list(zip(rollout.prompts, rollout.completions, rollout.advantages, strict=True))

    def run() -> None:
        for start in range(0, len(sequences), rows):
            some = sequences[start : start + rows]
            width = max(longest, *(len(completion) for _, completion, _ in some)) if rows > 1 else len(some[0][1])
            ids, mask, advantages = (
                np.zeros((len(some), before + width), int),
                np.zeros((len(some), width)),
                np.zeros((len(some), width)),
            )
            for i, (prompt, completion, advantage) in enumerate(some):
                ids[i, : before + len(completion)] = [*prompt, *completion]
                mask[i, : len(completion)], advantages[i, : len(completion)] = 1, advantage
            ids, mask, weights = (
                torch.from_numpy(ids),
                torch.from_numpy(mask),
                torch.from_numpy(mask * advantages / num_tokens).float(),
            )
            attention_mask = None if rows == 1 else F.pad(mask.long(), (before, 0), value=1)
            with torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext():
                logits = (
                    hf_model(ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=width + 1)
                    .logits[:, :-1]
                    .float()
                )
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, before:].flatten(), reduction="none")
            (losses.view(weights.shape) * weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def peak_memory(args: argparse.Namespace) -> None:
    """Prints by how many MiB one update raises the peak resident set: what `--peak_of` runs, in a process of its own."""
    lengths = [1024] * (args.memory_tokens // 1024)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder), 64, 2, 192, args.memory_vocab)
        rollout = make_rollout(lengths, args.memory_vocab)
        if args.peak_of == "full_logits":
            sizes.HEAD_CHUNK_LOGITS = 10**12
        if args.peak_of == "bare":
            run = bare(Path(folder), rollout, args.dtype)
        else:
            run = ours(
                Path(folder),
                rollout,
                args.dtype,
                16 * len(lengths) + args.memory_tokens,
                init_world(tp_size=1, timeout_minutes=5),
            )
        before = psutil.Process().memory_info().rss
        run()
        print("peak", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256, help="hidden size; the FFN has 4 times that")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument(
        "--vocab",
        type=int,
        default=1024,
        help="of the timed model; the head has 6 %% of the matrices, as in a 7B model",
    )
    parser.add_argument("--sequences", type=int, default=32, help="sequences of the update")
    parser.add_argument(
        "--group_size",
        type=int,
        default=1,
        help="of them have the same prompt; above 1: ours also with --share_prompts",
    )
    parser.add_argument("--prompt_tokens", type=int, default=16, help="of each prompt")
    parser.add_argument(
        "--mean_length", type=float, default=600.0, help="of the lognormal lengths before they are cut, in tokens"
    )
    parser.add_argument("--max_length", type=int, default=2048, help="where they are cut, in tokens")
    parser.add_argument("--micro_batch_tokens", type=int, default=8192, help="of ours")
    parser.add_argument("--padded_rows", type=int, default=8, help="sequences in a padded micro-batch")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the arithmetic; parameters are fp32"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument(
        "--memory_vocab", type=int, default=151_936, help="vocabulary of the model whose memory is measured"
    )
    parser.add_argument("--memory_tokens", type=int, default=4096, help="completion tokens of its micro-batch")
    parser.add_argument(
        "--peak_of", choices=["ours", "bare", "full_logits"], help="only measure the memory of this one"
    )
    args = parser.parse_args()
    if args.peak_of:
        peak_memory(args)
        return

    peaks = {}
    for name in ("ours", "bare", "full_logits"):
        done = subprocess.run(
            [sys.executable, *sys.argv, "--peak_of", name], capture_output=True, text=True, check=True
        )
        peaks[name] = float(done.stdout.split()[-1])
    lengths = lognormal_lengths(args.sequences, args.mean_length, args.max_length)
    rollout = make_rollout(lengths, args.vocab, args.prompt_tokens, args.group_size)
    world = init_world(tp_size=1, timeout_minutes=5)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        save_random_model(model, args.hidden, args.layers, 4 * args.hidden, args.vocab)
        variants = {"ours": ours(model, rollout, args.dtype, args.micro_batch_tokens, world)}
        if args.group_size > 1:
            sharing = ["--share_prompts", "--group_size", str(args.group_size)]
            variants["ours, prompts shared"] = ours(
                model, rollout, args.dtype, args.micro_batch_tokens, world, *sharing
            )
        variants |= {
            "bare": bare(model, rollout, args.dtype),
            "padded to longest of step": bare(model, rollout, args.dtype, args.padded_rows, max(lengths)),
            "padded to longest of micro": bare(model, rollout, args.dtype, args.padded_rows),
        }
        seconds = interleave(variants, args.rounds, clock=time.process_time)
    print(
        f"{len(lengths)} sequences, {sum(lengths)} completion tokens: mean {np.mean(lengths):.0f}, longest {max(lengths)}"
    )
    print_table(
        ["", "median CPU s", "min", "max", "over ours"],
        [[*times_row(*x), median_ratio(x[1], seconds["ours"])] for x in seconds.items()],
    )
    print_table(
        ["", f"peak MiB, {args.memory_tokens} x {args.memory_vocab}"],
        [[name, f"{peak:.0f}"] for name, peak in peaks.items()],
    )
    ratios = {name: round(median_ratio(times, seconds["ours"]), 3) for name, times in seconds.items() if name != "ours"}
    peaks = {name: round(peak) for name, peak in peaks.items()}
    print(
        json.dumps(
            {
                "ratio": ratios.pop("bare"),
                "goal": GOALS["bare"],
                **ratios,
                "padded_goal": GOALS["padded"],
                "peak_mib": peaks,
            }
        )
    )
    close_world()


if __name__ == "__main__":
    main()
