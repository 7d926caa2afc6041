"""What an update costs: ours against bare torch on the same tokens, and against padded batches.

    OMP_NUM_THREADS=1 python benchmarks/bench_update.py
    OMP_NUM_THREADS=1 python benchmarks/bench_update.py --group_size 8 --prompt_tokens 512     # also --share_prompts
    OMP_NUM_THREADS=1 python benchmarks/bench_update.py --compile                              # also --compile

Ours is `pack_updates`, `add_advantages` and `update_policy` as in training: packed, chunked head, FSDP2 on one rank,
all metrics. Bare is forward, backward and fused AdamW of the same Hugging Face model with its own attention: one
sequence at a time without any padding, logits of the completion only, and the simplest policy-gradient loss, with no
metric and no clipping. Padded is the same with 8 sequences at a time, with an attention mask, padded to the
longest of the step (as TRL pads) or of the micro-batch. Lengths are lognormal.

All start from the same fp32 weights and run in turn in one process of one thread. Their CPU seconds are compared, which
other programs disturb less than wall time. The goals: bare seconds / ours at least 0.90, padded / ours at least 2.0.
Prints a table and, last, one JSON line. With --compile it has the graphs and breaks of a layer, and how often one was
compiled again for 20 micro-batches of different lengths. The goal: at most once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from batch import Rollout
from bench_common import Trainer, flags_of, interleave, make_rollout, parser_of, print_times, save_random_model
from fsdp_utils import close_world, init_world

GOALS = {"bare": 0.90, "padded": 2.0}
PADDED_ROWS = 8  # sequences in a padded micro-batch


def lognormal_lengths(count: int, mean: float, longest: int, sigma: float = 0.7) -> list[int]:
    """The quantiles of the distribution in a random order, so that a few sequences have its mean and its tail."""
    distribution = NormalDist(np.log(mean) - sigma**2 / 2, sigma)
    lengths = [min(round(np.exp(distribution.inv_cdf((i + 0.5) / count))), longest) for i in range(count)]
    return np.random.default_rng(0).permutation(lengths).tolist()


def bare(model: Path, rollout: Rollout, rows: int = 1, longest: int = 0) -> Callable[[], None]:
    """A function that does the update with nothing but torch and transformers, once per call.

    It takes `rows` sequences at a time, padded to at least `longest` tokens.
    """
    hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = AdamW(hf_model.parameters(), lr=1e-6, fused=True)
    num_tokens, before = int(rollout.trained_lengths_B.sum()), len(rollout.rows[0].ids)
    prompts = [row.ids for row in rollout.rows]
    sequences = list(zip(prompts, rollout.completions, rollout.rewards_B, strict=True))

    def backward(some: list[tuple]) -> None:
        width = max(longest, *(len(completion) for _, completion, _ in some)) if rows > 1 else len(some[0][1])
        ids = np.zeros((len(some), before + width), int)
        mask, advantages = np.zeros((len(some), width)), np.zeros((len(some), width))
        for i, (prompt, completion, advantage) in enumerate(some):
            ids[i, : before + len(completion)] = [*prompt, *completion]
            mask[i, : len(completion)], advantages[i, : len(completion)] = 1, advantage
        ids, weights = torch.from_numpy(ids), torch.from_numpy(mask * advantages / num_tokens).float()
        attention_mask = None if rows == 1 else F.pad(torch.from_numpy(mask).long(), (before, 0), value=1)
        output = hf_model(ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=width + 1)
        logits = output.logits[:, :-1]
        del output
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, before:].flatten(), reduction="none")
        (losses.view(weights.shape) * weights).sum().backward()

    def run() -> None:
        for start in range(0, len(sequences), rows):
            backward(sequences[start : start + rows])
        optimizer.step()
        optimizer.zero_grad()

    return run


def count_compilations(trainer: Trainer, vocab: int, lengths: list[int]) -> dict[str, int]:
    """Graphs and breaks of the first of these micro-batches, of one sequence each; graphs of all others together."""
    before, seen = (counters["stats"]["unique_graphs"], counters["graph_break"].total()), []
    for length in lengths:
        trainer.train(trainer.prepare(make_rollout([length], vocab)))
        seen.append((counters["stats"]["unique_graphs"] - before[0], counters["graph_break"].total() - before[1]))
    return {"graphs": seen[0][0], "breaks": seen[0][1], "recompilations": seen[-1][0] - seen[0][0]}


def measure_times(args: argparse.Namespace, lengths: list[int]) -> tuple[dict[str, list[float]], dict[str, int]]:
    """CPU seconds of each variant in each counted round; with --compile what `count_compilations` finds."""
    rollout = make_rollout(lengths, args.vocab, args.prompt_tokens, args.group_size)
    world, counts = init_world(tp_size=1, timeout_minutes=5), {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        save_random_model(model, args.hidden, args.layers, args.vocab)

        def trainer_of(*more: str) -> Trainer:
            return Trainer(flags_of(model, "--dtype", "float32", "--micro_batch_tokens", "8192", *more), world)

        def ours(*more: str) -> Callable[[], None]:
            trainer = trainer_of(*more)
            return lambda: trainer.train(trainer.prepare(rollout))

        variants = {"ours": ours()}
        if args.group_size > 1:
            variants["ours, prompts shared"] = ours("--share_prompts", "--group_size", str(args.group_size))
        if args.compile:
            counts = count_compilations(trainer_of("--compile"), args.vocab, lognormal_lengths(20, 600.0, 2048))
            variants["ours, compiled"] = ours("--compile")
        variants |= {
            "bare": bare(model, rollout),
            "padded to longest of step": bare(model, rollout, PADDED_ROWS, max(lengths)),
            "padded to longest of micro": bare(model, rollout, PADDED_ROWS),
        }
        seconds = interleave(variants, args.rounds, clock=time.process_time)
    close_world()
    return seconds, counts


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--hidden", type=int, default=256, help="hidden size; the FFN has 4 times that")
    add("--layers", type=int, default=4, help="decoder layers")
    add("--vocab", type=int, default=1024, help="the head then has 6 %% of the matrices, as in a 7B model")
    add("--sequences", type=int, default=32, help="sequences of the update")
    add("--group_size", type=int, default=1, help="sequences of a prompt; above 1: ours also with --share_prompts")
    add("--prompt_tokens", type=int, default=16, help="tokens of each prompt")
    add("--mean_length", type=float, default=600.0, help="mean of the lognormal lengths before they are cut, in tokens")
    add("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    add("--compile", action="store_true", help="ours with --compile, too")
    args = parser.parse_args()
    lengths = lognormal_lengths(args.sequences, args.mean_length, longest=2048)
    seconds, counts = measure_times(args, lengths)
    print(f"{len(lengths)} sequences, {sum(lengths)} completion tokens, the longest {max(lengths)}; CPU seconds")
    ratios = print_times(seconds, "ours")
    summary = {"ratio": ratios.pop("bare"), "goal": GOALS["bare"], "padded_goal": GOALS["padded"]}
    print(json.dumps(summary | counts | {name: ratio for name, ratio in ratios.items() if name != "ours"}))


if __name__ == "__main__":
    main()
