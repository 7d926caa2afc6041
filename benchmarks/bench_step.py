r"""A whole step of ours against TRL's GRPOTrainer: same model, prompts and lengths, seconds a step and peak memory.

    # With the training environment active, whose packages it sees: torch, transformers, vllm.
    python -m venv trl_env
    python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
        > trl_env/lib/python3.11/site-packages/training.pth
    trl_env/bin/pip install --no-deps trl==1.16.0 accelerate==1.15.0

    python benchmarks/bench_step.py --trl_env trl_env --mean_tokens 20    # lengths differ, as in training
    python benchmarks/bench_step.py --trl_env trl_env                     # all of one length
    python benchmarks/bench_step.py                                       # ours alone
    # A real model, whose chat template makes longer prompts:
    python benchmarks/bench_step.py --trl_env trl_env --model FOLDER --prompts 4 --prompt_tokens 64 --max_tokens 48

Ours is `train_grpo.py` on two ranks (FSDP2, vLLM, and `FLAGS`), with the seconds of its metrics.jsonl. TRL generates
with transformers (one process of two threads, two DDP processes, two FSDP2 ranks) or with its colocated vLLM (two DDP
processes, two FSDP2 ranks; `bench_step_trl.py` says what has to be patched for CPU). Each is started as its
documentation says: ours by scripts/launch.py, TRL's processes by torchrun. Everything is fp32, with one optimizer
update a step, KL 0, no gradient checkpointing, no evaluation and no checkpoint. Each process has one thread, except for
the first variant. No completion ends early, or, with --mean_tokens, lengths are geometric
(`bench_common.save_random_model`), or, with --model, a real model ends them. The reward costs nothing.

The programs run in turn, --rounds times; the first two steps of each run are not counted. The median step of each round
is taken, then the median of the rounds; a ratio is TRL's seconds over ours in the same round. Goals: 3 x the fastest of
TRL's with FSDP2 or vLLM, 2 x its fastest, and no more memory than its thriftiest (PSS of the process tree: shared pages
count once). Prints a table and, last, a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from transformers import AutoConfig

from bench_common import ROOT, median_ratio, parser_of, print_table, save_random_model
from model.sizes import CPU_BLOCK, cpu_cache_bytes
from runtime.machine import prepare_cpu

GOALS = {"trl_fsdp2_or_vllm": 3.0, "trl_best": 2.0, "memory": 1.0}
OURS = "ours, 2 ranks"
FLAGS = "--communicate_once --share_prompts --learning_rate 1e-6 --dtype float32"
TRL = {  # name -> processes, settings
    "TRL generate, 1 process x 2 threads": (1, {"threads": 2}),
    "TRL generate, 2 DDP processes": (2, {}),
    "TRL generate, 2 FSDP2 ranks": (2, {"fsdp": True}),
    "TRL vLLM, 2 DDP processes": (2, {"vllm": True}),
    "TRL vLLM, 2 FSDP2 ranks": (2, {"vllm": True, "fsdp": True}),
}
Found = tuple[float, float, float]  # median seconds of a step, peak GiB, mean tokens of a completion


def torchrun(num_ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]


def peak_of(command: list[str], threads: int = 1) -> float:
    """The peak memory in GiB of a program and its children, as PSS: shared pages count once.

    Raises RuntimeError with the end of the output if the program fails.
    """
    settings = os.environ | {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    peak = 0
    with tempfile.TemporaryFile("w+") as output:
        root = psutil.Popen(command, cwd=ROOT, env=settings, stdout=output, stderr=subprocess.STDOUT)
        while root.poll() is None:
            peak = max(peak, memory_of_tree(root))
            time.sleep(0.5)
        if root.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {root.returncode}:\n{output.read()[-4000:]}")
    return peak / 2**30


def memory_of_tree(root: psutil.Process) -> int:
    """Bytes of a process and all below it, without those that have just ended."""
    total = 0
    with suppress(psutil.Error):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


def run_ours(model: Path, task: Path, out_dir: Path, args: argparse.Namespace) -> Found:
    flags = {
        "model": model, "train_data": task / "train.jsonl", "out_dir": out_dir, "reward": f"{task}/reward.py:score",
        "prompts_per_step": args.prompts, "group_size": args.group_size,
        "max_prompt_tokens": args.prompt_tokens, "max_completion_tokens": args.max_tokens, "total_steps": args.steps,
        "micro_batch_tokens": args.micro_batch_tokens,
    }  # fmt: skip
    words = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    peak = peak_of([sys.executable, "scripts/launch.py", "--ranks", "2", "train_grpo.py", *words, *FLAGS.split()])
    steps = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()][2:]
    seconds = statistics.median(step["time/step_s"] for step in steps)
    return seconds, peak, statistics.mean(step["completion/tokens_mean"] for step in steps)


def run_trl(model: Path, task: Path, out: Path, args: argparse.Namespace, variant: str) -> Found:
    num_ranks, more = TRL[variant]
    sequences, config = args.prompts * args.group_size // num_ranks, AutoConfig.from_pretrained(model)
    longest = args.prompt_tokens + args.max_tokens
    settings = {
        "model": str(model), "data": str(task / "train.jsonl"), "out": str(out), "prompts": args.prompts,
        "group_size": args.group_size, "max_tokens": args.max_tokens, "longest": longest, "steps": args.steps,
        "threads": 1, "fsdp": False, "vllm": False,
        "cache_bytes": cpu_cache_bytes(config, longest, 4, 1, sequences),  # as large as ours
        "cache_block": CPU_BLOCK,
    } | more  # fmt: skip
    launcher = [str(Path(args.trl_env).absolute() / "bin" / "python"), *(torchrun(num_ranks) if num_ranks > 1 else [])]
    program = [str(ROOT / "benchmarks" / "bench_step_trl.py"), json.dumps(settings)]
    peak = peak_of([*launcher, *program], settings["threads"])
    measured = json.loads(out.read_text())  # the first step is left out already
    return statistics.median(measured["seconds"][1:]), peak, statistics.mean(measured["tokens"][1:])


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--trl_env", help="folder of TRL's environment; none: ours alone")
    add("--model", type=Path, help="folder of a model in Hugging Face format; none: a random one")
    add("--hidden", type=int, default=256, help="hidden size; the FFN has 4 times that, a head 64; vocabulary 64")
    add("--layers", type=int, default=4, help="decoder layers")
    add("--prompts", type=int, default=32, help="prompts of a step")
    add("--group_size", type=int, default=8, help="completions per prompt")
    add("--prompt_tokens", type=int, default=16, help="tokens of a prompt at most, chat template included")
    add("--max_tokens", type=int, default=64, help="tokens of a completion")
    add("--mean_tokens", type=float, default=0, help="mean of geometric lengths before the limit; 0: all reach it")
    add("--micro_batch_tokens", type=int, default=600, help="tokens of our micro-batches; TRL's have 32 completions")
    add("--steps", type=int, default=6, help="steps of a run")
    add("--rounds", type=int, default=3, help="runs of each program, in turn")
    return parser.parse_args()


def main() -> None:
    args = parse()
    prepare_cpu()  # sets what the programs inherit
    variants = TRL if args.trl_env else {}
    seconds: dict[str, list[float]] = {name: [] for name in (OURS, *variants)}
    peaks: dict[str, list[float]] = {name: [] for name in seconds}
    with tempfile.TemporaryDirectory() as folder:
        model = task = Path(folder) / "model"
        save_random_model(task, args.hidden, args.layers, mean_tokens=args.mean_tokens)
        model = args.model or model
        for round_index in range(args.rounds):
            for name in seconds:
                out = Path(folder) / f"{name}_{round_index}".replace(" ", "_")
                where = model, task, out, args
                measured = run_ours(*where) if name == OURS else run_trl(*where, name)
                seconds[name].append(measured[0])
                peaks[name].append(measured[1])
                text = "{:.2f} s a step, {:.2f} GiB, completions of {:.1f} tokens".format(*measured)
                print(f"round {round_index + 1}: {name}: {text}", file=sys.stderr, flush=True)
    ratios = {name: median_ratio(times, seconds[OURS]) for name, times in seconds.items()}
    peak = {name: statistics.median(values) for name, values in peaks.items()}
    rows = [[name, statistics.median(x), min(x), max(x), ratios[name], peak[name]] for name, x in seconds.items()]
    print_table(["", "median s a step", "min", "max", "ours is faster", "peak GiB"], rows)
    summary = {"seconds": round(statistics.median(seconds[OURS]), 3), "goal": GOALS, "rounds": args.rounds}
    if variants:
        hard = min(ratios[name] for name in variants if "FSDP2" in name or "vLLM" in name)
        memory = peak[OURS] / min(peak[name] for name in variants)
        best_ratios = {"trl_fsdp2_or_vllm": hard, "trl_best": min(ratios[name] for name in variants), "memory": memory}
        summary["ratio"] = {name: round(value, 2) for name, value in best_ratios.items()}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
