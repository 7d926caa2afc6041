"""What one GPU gives to updates: speed and memory flag by flag, beside the dry run, and where the time goes.

    python benchmarks/bench_gpu.py                                  # all parts
    python benchmarks/bench_gpu.py ladder head                      # some
    python benchmarks/bench_gpu.py ladder --model Qwen/Qwen2.5-7B --micro_batch_tokens 8192 \
        --flags "--param_dtype bfloat16 --offload optimizer"

`profile`: the share of an update's time that each kind of kernel has, in eager mode and compiled. `ladder`: MFU and
peak memory of an update with one flag more at each rung, beside the dry run's. `offload`: how far the numbers are from
those of a resident optimizer after one update, and after three. `head`: its seconds by the logits made at a time.

Of the model the shape alone is read: weights are random and made on the device, with a head of its own. Each case is a
process of its own, which leaves nothing on the GPU; what fails, fails alone. On a CPU it runs as well, with a small
--model. Prints tables and, last, a JSON line.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType

import policy as policy_module
from batch import Update
from bench_common import GIB, Trainer, apart, flags_of, make_rollout, parser_of, print_table, seconds_of, synchronize
from extras.models.adamw import join
from fsdp_utils import World, close_world, init_world, local_shard, set_allocator
from gate.machine import check_device
from model import head, sizes
from model.optimizer import parameters_of
from plan.dry_run import config_of, setup_of
from plan.memory import ENGINE, gpu_phases, with_grown_head, without
from plan.setup import Setup
from plan.time import phase_seconds
from runtime.cards import GPUS
from step_metrics import update_flops

RATE = 1e-3  # of `offload`
LADDER = {  # rung -> flags
    "eager": "--gradient_checkpointing",
    "--compile": "--gradient_checkpointing --compile",
    "without checkpoints": "--compile",
    "--communicate_once": "--compile --communicate_once",
}
KINDS = {  # of kernels: a regular expression of their names; the first that fits
    "products": r"gemm|cutlass|nvjet|xmma|cublas|splitk|grouped_mm|\bmm\b|addmm|linear",
    "attention": r"flash|fmha|attention",
    "optimizer, clipping": r"multi_tensor|adam|foreach",
    "copies": r"memcpy|memset|copy|chunk_cat|split_with_sizes|catarray|fill",
    "compiled": r"triton|cpp_fused",
    "reductions": r"reduce|softmax|norm",
    "elementwise": r"elementwise|vectorized|unrolled",
    "indices": r"index|gather|scatter|sort|cumsum|scan|embedding",
    "other": "",
}
Row = dict[str, object]


class Size(NamedTuple):
    """The shape of the model and of an update."""

    model: str  # a name of plan/models.json, or a folder
    tokens: int  # of a micro-batch
    micros: int  # micro-batches of an update
    length: int  # positions of a sequence, of which an eighth is its prompt
    flags: str = ""  # more of train_grpo.py


@torch.no_grad()
def fill_with_random(root: nn.Module, model: nn.Module, path: str, device: torch.device) -> None:
    """In the place of `model.weights.fill`: reads no file."""
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    model.tie_weights()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        own = local_shard(parameter)
        if own.ndim > 1:
            own.normal_(std=0.02)
        elif ".lora_" not in name:
            own.fill_(1.0 if "norm" in name else 0.0)


@contextmanager
def one_rank() -> Iterator[World]:
    world = init_world(tp_size=1, timeout_minutes=5)
    check_device(world.device, share_prompts=False)
    set_allocator(is_expandable=True)
    yield world
    close_world()


def make_trainer(size: Size, flags: str, world: World) -> tuple[Trainer, Update, Setup]:
    """(what is trained, an update of whole micro-batches, the same for the dry run)."""
    prompt, count = size.length // 8, size.micros * size.tokens // size.length
    completion, config = size.length - prompt + 1, config_of(size.model)
    config.tie_word_embeddings = False
    words = (
        f"--dtype bfloat16 --learning_rate 1e-6 --prompts_per_step {count} --group_size 1 --micro_batch_tokens "
        f"{size.tokens} --max_prompt_tokens {prompt} --plan_prompt_tokens {prompt} "
        f"--max_completion_tokens {completion} --plan_completion_tokens {completion} --plan_gpus 1 {size.flags} {flags}"
    )
    if world.device.type == "cuda":
        words_of_name = re.split(r"[ -]", torch.cuda.get_device_name())
        words += "".join(f" --plan_gpu {name}" for name in GPUS if name.partition("-")[0] in words_of_name)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(policy_module, "fill", fill_with_random):
        config.save_pretrained(folder)
        args = flags_of(folder, *words.split())
        setup = setup_of(args, config)
        if world.device.type == "cuda":
            size = torch.cuda.get_device_properties(world.device).total_memory
            setup = with_grown_head(replace(setup, hardware=replace(setup.hardware, gpu_bytes=size)))
        trainer = Trainer(args, world, setup.memory.head_growth)
    update = trainer.prepare(make_rollout([completion] * count, config.get_text_config().vocab_size, prompt))
    return trainer, update, setup


def rung(size: Size, name: str, flags: str) -> Row:
    """The second and third update with these flags: speed and memory, beside the dry run's."""
    with one_rank() as world:
        trainer, update, setup = make_trainer(size, flags, world)
        start = time.perf_counter()
        norm = trainer.train(update)["optim/grad_norm"]
        synchronize()
        first = time.perf_counter() - start
        if is_cuda := world.device.type == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(lambda: trainer.train(update), rounds=2, warm_up=0)
        useful = update_flops(trainer.policy, update) / setup.hardware.flops  # seconds at the card's peak
    planned, phases = phase_seconds(setup), gpu_phases(setup)
    parts = [without(phases[phase], *ENGINE) for phase in ("logprobs", "update", "optimizer") if phase in phases]
    return {
        "flags": name, "grad norm": norm, "first s": first, "s": seconds,
        "tokens/s": size.micros * size.tokens / seconds,
        "MFU": useful / seconds,
        "planned MFU": useful / sum(planned[part] for part in ("update", "optimizer", "host transfers")),
        "GiB": torch.cuda.max_memory_allocated() / GIB if is_cuda else None,
        "planned GiB": max(sum(each.values()) for each in parts) / GIB,
        "head growth": setup.memory.head_growth,
        "reserved GiB": torch.cuda.max_memory_reserved() / GIB if is_cuda else None,
    }  # fmt: skip


def profile(size: Size, name: str, flags: str) -> Row:
    """The shares of an update's wall time in the kernels of each kind, and the longest kernels."""
    with one_rank() as world:
        trainer, update, _ = make_trainer(size, flags, world)
        for _ in range(2):
            trainer.train(update)
        synchronize()
        is_cuda, kinds = world.device.type == "cuda", torch.profiler.ProfilerActivity
        start = time.perf_counter()
        with torch.profiler.profile(activities=[kinds.CPU, *[kinds.CUDA] * is_cuda]) as profiler:
            trainer.train(update)
            synchronize()
            wall = time.perf_counter() - start
    shares, longest = dict.fromkeys(["busy", *KINDS], 0.0), []
    for event in profiler.key_averages():
        if event.is_user_annotation or is_cuda != (event.device_type == DeviceType.CUDA):
            continue
        share = (event.self_device_time_total if is_cuda else event.self_cpu_time_total) / 1e6 / wall
        kind = next(kind for kind, names in KINDS.items() if re.search(names, event.key, re.IGNORECASE))
        shares["busy"] += share
        shares[kind] += share
        longest.append((share, event.count, event.key[:100]))
    return {"flags": name, "s": wall} | shares | {"longest": sorted(longest, reverse=True)[:8]}


def offload(size: Size, param_dtype: str) -> list[Row]:
    """The distance of an update with its state, or all, on the host from one on the device.

    After one update only AdamW's kernels differ: the largest difference over (number + rate) is below 1e-6, and 0 for
    `optimizer`. After three, bf16 passes have made other gradients of that, and Adam divides small ones by themselves:
    the whole difference over the whole change is at most 0.03.
    """
    states: dict[str, list[list[Tensor]]] = {}
    with one_rank() as world:
        for where in ("none", "optimizer", "all"):
            trainer, update, _ = make_trainer(size, f"--param_dtype {param_dtype} --offload {where}", world)
            states[where] = [masters(trainer.optimizer)]
            for _ in range(3):
                trainer.train(update, rate=RATE)
                states[where].append(masters(trainer.optimizer))
    rows = []
    for where in ("optimizer", "all"):
        row: Row = {"offload": f"{param_dtype}, {where}"}
        for count in (1, 3):
            triples = list(zip(states["none"][count], states[where][count], states["none"][0], strict=True))
            furthest = max(((a - b).abs() / (a.abs() + RATE)).max().item() for a, b, _ in triples)
            distance = sum((a - b).double().square().sum().item() for a, b, _ in triples) ** 0.5
            change = sum((a - start).double().square().sum().item() for a, _, start in triples) ** 0.5
            row |= {f"largest, {count}": furthest, f"of the change, {count}": distance / change}
        rows.append(row)
    return rows


def masters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The fp32 numbers that are trained, on the host."""
    numbers = []
    for parameter in parameters_of(optimizer):
        own = local_shard(parameter.detach()).to("cpu", copy=True)
        if own.dtype == torch.bfloat16:
            own = join(own, local_shard(optimizer.state[parameter]["remainder"]).cpu())
        numbers.append(own)
    return numbers


def heads(size: Size) -> list[Row]:
    """Seconds of the head forwards and backwards over a micro-batch, in eager mode and by the logits made at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(size.model).get_text_config()
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16}
    linear = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **options)
    hidden = torch.randn(size.tokens, config.hidden_size, **options).requires_grad_()
    labels, rows = torch.randint(config.vocab_size, (size.tokens,), device=device), []

    def passes() -> None:
        hidden.grad = linear.weight.grad = None
        head.chunked_logprobs(hidden, linear, labels, 1.0)[0].sum().backward()

    with mock.patch.object(head, "FUSED_ON", set()):
        rows.append({"head": "in eager mode", "s": seconds_of(passes)})
    wanted = hidden.grad.float()
    for chunk in (1024, 2048, 4096, 8192):
        logits = chunk * config.vocab_size
        with mock.patch.object(sizes, "HEAD_CHUNK_LOGITS", logits):
            row: Row = {"head": f"chunks of {chunk:,} tokens", "s": seconds_of(passes)}
        rows.append(row | {"off by": ((hidden.grad.float() - wanted).norm() / wanted.norm()).item()})
    return rows


def table(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    columns = [name for name in rows[0] if name != "longest"]
    print_table(columns, [["-" if row.get(name) is None else row[name] for name in columns] for row in rows])
    for row in rows:
        for share, count, name in row.get("longest", []):
            print(f"  {row['flags']}: {share:6.1%} {count:6} x {name}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", help="some of profile, ladder, offload, head; default: all")
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B", help="shape: a name of plan/models.json or a folder")
    parser.add_argument("--micro_batch_tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--micro_batches", type=int, default=6, help="micro-batches of an update")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence; an eighth is its prompt")
    parser.add_argument("--flags", default="", help="more flags of train_grpo.py, for all updates")
    args = parser.parse_args()
    size = Size(args.model, args.micro_batch_tokens, args.micro_batches, args.length, args.flags)
    updates = {name: LADDER[name] for name in ("eager", "without checkpoints")}
    cases = {  # part -> what each of its processes runs
        "profile": [partial(profile, size, name, flags) for name, flags in updates.items()],
        "ladder": [partial(rung, size, name, flags) for name, flags in LADDER.items()],
        "offload": [partial(offload, size._replace(micros=2), dtype) for dtype in ("float32", "bfloat16")],
        "head": [partial(heads, size)],
    }
    found: dict[str, list[Row]] = {}
    for part in args.parts or cases:
        found[part] = []
        for case in cases[part]:
            try:
                rows = apart(case)
            except Exception as error:  # noqa: BLE001
                print(f"{part} failed: {type(error).__name__}: {error}", flush=True)
                continue
            found[part] += rows if isinstance(rows, list) else [rows]
        if found[part]:
            table(part, found[part])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(json.dumps({"goal": 0.45, "device": device, "torch": torch.__version__} | found))


if __name__ == "__main__":
    main()
