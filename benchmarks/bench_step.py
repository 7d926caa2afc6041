r"""A whole step of ours against TRL's GRPOTrainer: same model, prompts and lengths, seconds a step and peak memory.

    # With the training environment active, whose packages it sees: torch, transformers, vllm.
    python -m venv trl_env
    python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
        > trl_env/lib/python3.11/site-packages/training.pth
    trl_env/bin/pip install --no-deps trl==1.16.0 accelerate==1.15.0

    # Completions of different lengths, as in training; then all of one length.
    python benchmarks/bench_step.py --trl_env trl_env --mean_tokens 20
    python benchmarks/bench_step.py --trl_env trl_env
    python benchmarks/bench_step.py --trl_env trl_env --hidden 512 --layers 8 --prompts 16 --max_tokens 128 \
        --mean_tokens 40

Ours is `train_grpo.py` on two ranks (FSDP2, vLLM, and `FLAGS`), with the seconds of its metrics.jsonl. TRL generates
with transformers (one process of two threads, two DDP processes, two FSDP2 ranks) or with its colocated vLLM (two DDP
processes, two FSDP2 ranks; `bench_step_trl.py` says what has to be patched for CPU). Everything is fp32, with one
optimizer update a step, KL 0, no gradient checkpointing, no evaluation and no checkpoint. Each process has one thread,
except for the first variant. No completion ends early, or, with --mean_tokens, lengths are geometric
(`bench_common.save_random_model`). The reward costs nothing.

The programs run in turn, --rounds times; the first steps of each run are not counted. The median step of each round is
taken, then the median of the rounds; a ratio is TRL's seconds over ours in the same round. Goals: 3 x the fastest of
TRL's with FSDP2 or vLLM, 2 x its fastest, and no more memory than its thriftiest (PSS of the process tree: shared pages
count once). Prints a table and, last, a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import AutoConfig

from bench_common import ROOT, launch, median_ratio, parser_of, print_table, save_random_model, train
from inputs.machine import prepare_cpu
from model.sizes import CPU_BLOCK, cpu_cache_bytes

GOALS = {"trl_fsdp2_or_vllm": 3.0, "trl_best": 2.0, "memory": 1.0}
OURS = "ours, 2 ranks"
FLAGS = {"communicate_once": True, "share_prompts": True}
TRL = {  # name -> processes, flags
    "TRL generate, 1 process x 2 threads": (1, ["--threads", "2"]),
    "TRL generate, 2 DDP processes": (2, []),
    "TRL generate, 2 FSDP2 ranks": (2, ["--fsdp"]),
    "TRL vLLM, 2 DDP processes": (2, ["--vllm"]),
    "TRL vLLM, 2 FSDP2 ranks": (2, ["--vllm", "--fsdp"]),
}


def run_ours(folder: Path, out_dir: Path, args: argparse.Namespace) -> tuple[float, float, float]:
    """(median seconds of a step, peak GiB, mean tokens of a completion)."""
    flags = {"prompts_per_step": args.prompts, "group_size": args.group_size, "max_completion_tokens": args.max_tokens}
    flags |= {"total_steps": args.steps, "micro_batch_tokens": args.micro_batch_tokens}
    steps, peak = train(folder, out_dir, 2, flags | FLAGS)
    seconds = statistics.median(step["time/step_s"] for step in steps)
    return seconds, peak, statistics.mean(step["completion/tokens_mean"] for step in steps)


def run_trl(
    folder: Path, out: Path, args: argparse.Namespace, num_ranks: int, flags: list[str]
) -> tuple[float, float, float]:
    """(median seconds of a step, peak GiB, mean tokens of a completion)."""
    sequences, config = args.prompts * args.group_size // num_ranks, AutoConfig.from_pretrained(folder)
    cache = cpu_cache_bytes(config, 16 + args.max_tokens, 4, 1, sequences)  # of fp32; ours and TRL's alike
    flags = [*flags, "--cache_bytes", str(cache), "--cache_block", str(CPU_BLOCK)]
    settings = {"model": folder, "out": out, "prompts": args.prompts, "group_size": args.group_size}
    settings |= {"max_tokens": args.max_tokens, "steps": args.steps}
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    program = [str(ROOT / "benchmarks" / "bench_step_trl.py"), *arguments, *flags]
    python = str(Path(args.trl_env).absolute() / "bin" / "python")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    command = [python, *(launcher if num_ranks > 1 else []), *program]
    peak = launch(command, {"OMP_NUM_THREADS": "2" if "--threads" in flags else "1"})
    result = json.loads(out.read_text())
    # Its first step is left out already.
    return statistics.median(result["seconds"][1:]), peak, statistics.mean(result["tokens"][1:])


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    trl_env = "folder of TRL's environment, or $TRL_ENV; none: ours alone"
    add("--trl_env", default=os.environ.get("TRL_ENV"), help=trl_env)
    hidden = "hidden size; the FFN has 4 times that, a head 64; vocabulary 64"
    add("--hidden", type=int, default=256, help=hidden)
    add("--layers", type=int, default=4, help="decoder layers")
    add("--prompts", type=int, default=32, help="prompts of a step")
    add("--group_size", type=int, default=8, help="completions per prompt")
    add("--max_tokens", type=int, default=64, help="tokens of a completion")
    mean_tokens = "mean of geometric lengths before the limit; 0: all reach the limit"
    add("--mean_tokens", type=float, default=0, help=mean_tokens)
    micro_batch_tokens = "of ours; TRL's micro-batches have 32 completions"
    add("--micro_batch_tokens", type=int, default=600, help=micro_batch_tokens)
    add("--steps", type=int, default=6, help="steps of a run, the first two of which are not counted")
    add("--rounds", type=int, default=3, help="runs of each program, in turn")
    skip = "leave out the variants of TRL whose name contains one of these"
    add("--skip", nargs="*", default=[], help=skip)
    args = parser.parse_args()
    prepare_cpu()  # sets what the programs inherit

    variants = {name: how for name, how in TRL.items() if args.trl_env and not any(word in name for word in args.skip)}
    seconds: dict[str, list[float]] = {name: [] for name in (OURS, *variants)}
    peaks: dict[str, list[float]] = {name: [] for name in seconds}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_random_model(model, args.hidden, args.layers, 4 * args.hidden, mean_tokens=args.mean_tokens)
        for round_index in range(args.rounds):
            for name in seconds:
                out = Path(folder) / f"{name}_{round_index}".replace(" ", "_")
                found = run_ours(model, out, args) if name == OURS else run_trl(model, out, args, *variants[name])
                one, peak, tokens = found
                seconds[name].append(one)
                peaks[name].append(peak)
                told = f"{one:.2f} s a step, {peak:.2f} GiB, completions of {tokens:.1f} tokens"
                print(f"round {round_index + 1}: {name}: {told}", file=sys.stderr, flush=True)
    ratios = {name: median_ratio(times, seconds[OURS]) for name, times in seconds.items()}
    rows = [
        [name, statistics.median(x), min(x), max(x), ratios[name], statistics.median(peaks[name])]
        for name, x in seconds.items()
    ]
    print_table(["", "median s a step", "min", "max", "ours is faster", "peak GiB"], rows)
    summary: dict[str, object] = {"seconds": round(statistics.median(seconds[OURS]), 3), "goal": GOALS}
    if variants:
        hard = [ratio for name, ratio in ratios.items() if "FSDP2" in name or "vLLM" in name]
        memory = statistics.median(peaks[OURS]) / min(statistics.median(peaks[name]) for name in variants)
        found = {"trl_best": min(ratios[name] for name in variants), "memory": memory}
        if hard:
            found["trl_fsdp2_or_vllm"] = min(hard)
        summary["ratio"] = {name: round(value, 2) for name, value in found.items()}
    print(json.dumps(summary | {"rounds": args.rounds}))


if __name__ == "__main__":
    main()
