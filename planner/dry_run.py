"""`train_grpo.py --dry_run`: what a run amounts to and whether it fits, before anything is rented or loaded.

It needs the run's flags, the model's config (in a folder, in `models.json`, or on the hub) and the number of training
rows; no GPU, no weights, no data. The exit code is 0 if the run fits and 3 if not. Read `dry_run` first. `setup_of`
reads the flags, `memory.py` has the bytes, `time.py` the seconds, `advice.py` what would have to change.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from flags import EngineSettings, Lora, Memory, PromptFormat, Saving, make_plan, take
from fsdp_utils import is_main_process
from inputs.checks import check_flags, launched_world_size
from inputs.choices import algorithm_of
from inputs.records import parse_source
from model.sizes import GPUS, MOST_LAG, check_config
from model.vision import check_images
from model.weights import load_config
from planner import memory
from planner.advice import misfits, solutions
from planner.setup import GIB, Hardware, RunShape, Setup, shape_of
from planner.split import splits_of, text_of_splits
from planner.time import (
    PAUSE,
    SWITCH,
    Assumed,
    micro_batches,
    nodes_of,
    partial_seconds,
    phase_seconds,
    step_seconds,
    traffic,
    waiting_seconds,
)

TABLE = Path(__file__).parent / "models.json"
WORTH_SAYING = 0.05  # of a step
TRACED_LAYERS = 8  # all peaks are linear in the number of layers, so a few layers show as much as all of them
ROWS = {  # of data sets that are not on the disk
    "hiyouga/math12k@train": 12_000,
    "hiyouga/math12k@test": 500,
    "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints": 29_946,
    "simplelr_qwen_level3to5": 8_532,
    "openai/gsm8k/main@train": 7_473,
    "openai/gsm8k/main@test": 1_319,
    "hamishivi/DAPO-Math-17k-Processed_filtered@train": 12_643,
}


def dry_run(args: argparse.Namespace) -> int:
    """Prints the report and returns the exit code. Raises ValueError for a run that could not start on any machine."""
    config = config_of(args.model)
    setup = setup_of(args, config)
    if args.plan_split:
        splits = splits_of(setup, assumed_of(args))
        if is_main_process():
            print(json.dumps([asdict(x) for x in splits], indent=2) if args.json else text_of_splits(setup, splits))
        return 0 if splits[0].fits else 3
    report = report_of(setup, assumed_of(args))
    if args.trace:
        report["trace"] = traced(setup, config)
    if is_main_process():
        print(json.dumps(report, indent=2) if args.json else text_of(setup, report))
    return 0 if report["fits"] else 3


def config_of(model: str) -> PretrainedConfig:
    """The config in a folder, in `models.json`, or else on the hub. Raises ValueError."""
    table = json.loads(TABLE.read_text())
    if model in table and not Path(model).exists():
        return AutoConfig.for_model(**table[model])
    try:
        return load_config(model)
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(error).splitlines()[0]} Without network these are known: {', '.join(table)}.") from None


def rows_of(train_data: list[str]) -> int | None:
    """Training rows by #ROWS, lines on the disk and the table; None if those of a source are not known."""
    total = 0
    for source in train_data:
        what, split, count = parse_source(source)
        if count is None and Path(what).is_file() and what.endswith(".jsonl"):
            count = sum(1 for line in Path(what).read_bytes().splitlines() if line.strip())
        elif count is None:
            names = (f"{what}@{split}" if split else what, f"{what}@train", Path(what).stem)
            count = next((ROWS[name] for name in names if name in ROWS), None)
        if count is None:
            return None
        total += count
    return total


def setup_of(args: argparse.Namespace, config: PretrainedConfig) -> Setup:
    """The flags as a Setup. Raises ValueError for flags that contradict each other, the model or the hardware."""
    gpus = args.plan_gpus or (launched_world_size() if "WORLD_SIZE" in os.environ else 8)
    if args.plan_nodes < 1 or gpus % args.plan_nodes:
        nodes = f"--plan_nodes {args.plan_nodes}"
        raise ValueError(f"--plan_gpus {gpus} is not divisible by {nodes}; it counts the GPUs of all nodes.")
    check_flags(args, gpus)
    limits = args.max_prompt_tokens, max(args.max_completion_tokens, *args.eval_max_completion_tokens)
    check_config(args.model, config, limits, args.tensor_parallel_size)
    check_images(args.model, config, take(PromptFormat, args))
    model, lora = shape_of(config, args.model), take(Lora, args)
    if unknown := set(lora.lora_targets or ()) - set(model.projections):
        known = ", ".join(model.projections)
        raise ValueError(f"--lora_targets {' '.join(sorted(unknown))}: the dry run knows {known}.")
    algorithm_of(args)  # raises for choices that do not exist, or flags without effect
    num_rows = args.plan_rows or rows_of(args.train_data)
    if num_rows is None and args.epochs is not None:
        data = f"--train_data {' '.join(args.train_data)}"
        raise ValueError(f"--epochs {args.epochs}: how many rows {data} has is not known here; give --plan_rows.")
    plan = make_plan(args, args.prompts_per_step if num_rows is None else num_rows)
    has_kl = args.kl_coef != 0
    needs_first = args.num_iterations > 1 or (has_kl and args.kl_in == "reward") or lora.lora_dropout > 0
    run = take(
        RunShape, args, num_rows=num_rows, has_kl=has_kl,
        needs_first_logprobs=needs_first, trains_entropy=args.entropy_coef != 0,
        num_checkpoints=most_checkpoints(take(Saving, args), min(plan.total_steps, args.stop_after or math.inf)),
    )  # fmt: skip
    engine = take(EngineSettings, args, max_model_len=sum(limits))
    gpu_memory, flops, memory_speed, link_speed, host_speed = GPUS[args.plan_gpu]
    hardware = Hardware(
        name=args.plan_gpu, gpus=gpus, nodes=args.plan_nodes,
        gpu_bytes=(args.plan_gpu_memory_gib or gpu_memory) * GIB, host_bytes=args.plan_host_memory_gib * GIB,
        flops=flops * 1e12, memory_speed=memory_speed * 1e12,
        link_speed=link_speed * 1e9, network_speed=args.plan_network_gb_s * 1e9, host_speed=host_speed * 1e9,
        generation_gpus=generation_gpus_of(args),
    )  # fmt: skip
    return Setup(model, take(Memory, args), lora, engine, plan, run, hardware)


def generation_gpus_of(args: argparse.Namespace) -> int:
    """GPUs of generation servers; those of --server_urls have --tensor_parallel_size each, and so has the only one."""
    if args.engine == "colocated":
        return 0
    return len(args.generation_gpus) or (len(args.server_urls) or 1) * args.tensor_parallel_size


def most_checkpoints(saving: Saving, last_step: float) -> int:
    """On the disk at a time: those that are kept, the best one, and the one that is being written."""
    num_saves = math.ceil(last_step / (saving.save_every or last_step))
    most = saving.keep_checkpoints + 1 + (saving.keep_best is not None)
    return min(num_saves, most) if saving.keep_checkpoints else num_saves


def assumed_of(args: argparse.Namespace) -> Assumed:
    """What the flags assume. Raises ValueError for a mean length above its limit."""

    def mean_length(kind: str, mean: float | None, limit: int) -> float:
        if mean is not None and mean > limit:
            raise ValueError(f"--plan_{kind}_tokens {mean:g} is the mean; use at most --max_{kind}_tokens {limit}.")
        return limit / 2 if mean is None else mean

    return Assumed(
        flops=args.plan_flops_share, memory=args.plan_memory_share, link=args.plan_link_share,
        prompt=mean_length("prompt", args.plan_prompt_tokens, args.max_prompt_tokens),
        completion=mean_length("completion", args.plan_completion_tokens, args.max_completion_tokens),
    )  # fmt: skip


def traced(setup: Setup, config: PretrainedConfig) -> dict[str, dict[str, float]]:
    """What a pass takes beside `memory.resident`, by trace and by formula, with at most `TRACED_LAYERS` layers."""
    from planner.trace import trace_update  # here: it brings parts of torch that nothing else needs

    layers = min(setup.model.layers, TRACED_LAYERS)
    config, setup = copy.deepcopy(config), replace(setup, model=replace(setup.model, layers=layers))
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = layers, (getattr(text, "layer_types", None) or [])[:layers] or None
    peaks, report = trace_update(setup, config), {}
    for name, parts in (("logprobs", memory.logprobs_peak(setup)), ("update", memory.update_peak(setup))):
        found, formula = peaks[name] - peaks["static"], sum(parts.values())
        report[name] = {"layers": layers, "traced_gib": gib(found), "formula_gib": gib(formula)}
    return report


# The report ----------------------------------------------------------------------------------------------------------


def gib(value: float) -> float:
    return round(value / GIB, 2)


def in_gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: gib(value) for name, value in parts.items()}


def report_of(setup: Setup, assumed: Assumed) -> dict[str, object]:
    """All numbers as one object of plain types: the headline figures, then the tables behind them."""
    plan, run, h = setup.plan, setup.run, setup.hardware
    phases, on_host = memory.gpu_phases(setup), memory.host_phases(setup)
    peak = max(phases, key=lambda name: phases[name].needed)
    seconds, found = phase_seconds(setup, assumed), misfits(setup)
    of_step = step_seconds(setup, assumed)
    hours = of_step * plan.total_steps / 3600
    per_update = plan.completions_per_step // plan.updates_per_pass
    return {
        "prompts_per_step": plan.prompts_per_step,
        "group_size": plan.group_size,
        "completions_per_step": plan.completions_per_step,
        "updates_per_step": plan.updates_per_step,
        "steps_per_epoch": None if run.num_rows is None else plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "total_updates": plan.total_updates,
        "total_completions": plan.total_steps * plan.completions_per_step,
        "parameters": setup.model.parameters,
        "trainable_parameters": setup.trainable,
        "kv_bytes_per_token": setup.model.kv_bytes_per_token,
        "gpu_peak_gib": gib(phases[peak].live),
        "gpu_needed_gib": gib(phases[peak].needed),
        "gpu_peak_phase": peak,
        "gpu_capacity_gib": gib(h.gpu_bytes),
        "host_peak_gib": gib(max(sum(parts.values()) for parts in on_host.values())),
        "host_capacity_gib": gib(h.host_bytes),
        "checkpoint_gib": gib(memory.checkpoint_bytes(setup)),
        "disk_gib": gib(memory.disk_bytes(setup)),
        "step_seconds": round(of_step, 1),
        "total_hours": round(hours, 1),
        "total_gpu_hours": round(hours * (h.gpus + h.generation_gpus)),
        "fits": not found,
        "misfits": found,
        "changes_that_would_fit": solutions(setup, assumed) if found else [],
        "batch": {
            "training_rows": run.num_rows,
            "completions_per_update": per_update,
            "completions_per_update_and_gpu": per_update / setup.num_trainers,
            "completions_per_engine": plan.completions_per_step / setup.num_engines,
            "most_tokens_per_step": plan.completions_per_step * (run.max_prompt_tokens + run.max_completion_tokens),
            "micro_batches_per_update": micro_batches(setup, assumed),
            "logits_of_a_micro_batch_gib": gib(setup.memory.micro_batch_tokens * setup.model.vocab * 2),
            "sequences_at_once_per_engine": round(max(memory.sequences_at_once(setup), 0), 1),
        },
        "gpu_gib": {name: in_gib(x.parts | {"live": x.live, "needed": x.needed}) for name, x in phases.items()},
        "host_gib": {name: in_gib(parts) for name, parts in on_host.items()},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "waiting_seconds": {who: round(value, 1) for who, value in (waiting_seconds(setup, assumed) or {}).items()},
        "step_seconds_without_and_with_partial_rollouts": partial_seconds(setup, assumed),
        "traffic_gib_per_gpu_and_step": in_gib(traffic(setup, assumed)),
        "assumptions": assumptions(setup, assumed),
    }


def assumptions(setup: Setup, assumed: Assumed) -> list[str]:
    h, eager = setup.hardware, setup.engine.enforce_eager
    working, asleep = gib(memory.ENGINE_WORKING[eager]), gib(memory.ENGINE_ASLEEP[eager])
    tensors = f"{memory.FRAGMENTATION:g} x the trainer's + the engine's tensors"
    images = "the tower runs before the decoder, where memory is free; its work and pixel values are not counted"
    reached = f"{assumed.flops:.0%} of {h.flops / 1e12:.0f} TFLOP/s, {assumed.memory:.0%} of"
    network = f", {h.network_speed / 1e9:.0f} between nodes" if h.nodes > 1 else ""
    links = f"{assumed.link:.0%} of {h.link_speed / 1e9:.0f} GB/s in a node{network}"
    left_out = "no loading, evaluation, checkpoints, waiting for graders"
    sync = f"sync with {SWITCH:g} s of sleeping and waking up"
    if setup.has_servers:
        sync = f"sync with {PAUSE:g} s beside the transfer"
    return [
        f"memory: needed = {tensors} + {gib(memory.CONTEXT):g} GiB for CUDA's context and NCCL",
        f"engine: {working:g} GiB beside weights and cache, of which {asleep:g} stay while it sleeps",
        f"host: {gib(memory.PROCESS_HOST):g} GiB for each process without its weights",
        "micro-batches: full, and all of their positions are completion tokens",
        *([f"images: {images}"] if setup.model.tower_parameters else []),
        *([copies_of(setup)] if setup.num_copies > 1 else []),
        *(["sampling: one round; groups without signal cost more"] if setup.run.dynamic_sampling != "off" else []),
        f"speeds: {reached} {h.memory_speed / 1e12:.2f} TB/s, {links}, {h.host_speed / 1e9:.0f} to the host",
        f"time: prompts of {assumed.prompt:g} tokens, completions of {assumed.completion:g}; {sync}; {left_out}",
    ]


def copies_of(setup: Setup) -> str:
    """How many copies of the policy there are, and which way their collectives go."""
    shards, copies = setup.num_shards, setup.num_copies
    groups = nodes_of(setup, shards), nodes_of(setup, copies, stride=shards)
    inner, outer = ("the node's links" if nodes == 1 else "the network" for nodes in groups)
    return f"copies: {copies} of the policy on {shards} GPUs each; shards go over {inner}, the all-reduce over {outer}"


TEXT = """\
dry run: {setup.model.name} on {gpus} x {setup.hardware.name}, {nodes}; nothing is started

model       {parameters:,} parameters, {trainable_parameters:,} trained; \
{kv_bytes_per_token:,} bytes of KV cache per token
step        {prompts_per_step} prompts x {group_size} = {completions_per_step} completions; \
at most {most_tokens_per_step:,} tokens, prompts included
updates     {updates_per_step} per step, each of {completions_per_update} completions \
({completions_per_update_and_gpu:g} per GPU), in {micro_batches_per_update} micro-batches \
of at most {setup.memory.micro_batch_tokens} tokens
run         {epochs}{total_steps} steps, {total_updates} updates, {total_completions:,} completions
sampling    {setup.num_engines} {engines} of {setup.run.tensor_parallel_size} GPUs, \
{completions_per_engine:g} completions each; \
the cache holds {sequences_at_once_per_engine:g} sequences of {setup.engine.max_model_len} tokens at once
logits      {logits_of_a_micro_batch_gib:.2f} GiB in bf16 for a whole micro-batch; the chunked head never holds them

GPU memory at the peak of each phase, in GiB per GPU
{gpu_table}

host RAM, in GiB per node; a checkpoint takes {checkpoint_gib:.1f} GiB of disk, \
all that are kept {disk_gib:.1f}
{host_table}

time        {step_seconds:.0f} s per step: {times}
            {waits}{total_hours:,.1f} hours, {total_gpu_hours:,} GPU hours
traffic     {moved} GiB per GPU and step

assumed: {assumed}

{trace}{verdict}"""


def text_of(setup: Setup, report: dict) -> str:
    """The report for people."""
    nodes, rows, epochs, trace = setup.hardware.nodes, report["batch"]["training_rows"], "", ""
    host = {name: parts | {"needed": round(sum(parts.values()), 1)} for name, parts in report["host_gib"].items()}
    if rows is not None:
        epochs = f"{report['steps_per_epoch']:g} steps per epoch of {rows} rows; "
    if "trace" in report:
        peaks = report["trace"].items()
        found = (f"{name} {x['traced_gib']:.2f} GiB ({x['formula_gib']:.2f} by formula)" for name, x in peaks)
        layers = report["trace"]["update"]["layers"]
        trace = f"traced with {layers} layers, beside what is always there: {', '.join(found)}\n\n"
    parts = {
        "nodes": f"{nodes} node{'s' * (nodes > 1)}",
        "gpus": gpus_of(setup),
        "engines": "servers" if setup.has_servers else "engines",
        "waits": waits_of(setup, report) + partial_of(setup, report),
        "epochs": epochs,
        "gpu_table": table_of(report["gpu_gib"]),
        "host_table": table_of(host),
        "times": ", ".join(f"{name} {x:.1f}" for name, x in report["seconds"].items()),
        "moved": ", ".join(f"{name} {x:,.0f}" for name, x in report["traffic_gib_per_gpu_and_step"].items()),
        "assumed": "\n         ".join(report["assumptions"]),
        "trace": trace,
        "verdict": verdict_of(report),
    }
    return TEXT.format(setup=setup, **report["batch"], **(report | parts))


def gpus_of(setup: Setup) -> str:
    h = setup.hardware
    return f"{h.gpus} + {h.generation_gpus}" if setup.has_servers else str(h.gpus)


def waits_of(setup: Setup, report: dict) -> str:
    """A line on who waits for whom; "" without servers."""
    if not setup.has_servers:
        return ""
    ahead = f"sampling {setup.run.steps_ahead} steps ahead" if setup.run.steps_ahead else "one after the other"
    waits = ", ".join(f"{who} wait {seconds:.1f} s" for who, seconds in report["waiting_seconds"].items())
    return f"{ahead}: {waits} of a step\n            "


def partial_of(setup: Setup, report: dict) -> str:
    """A line on --partial_rollouts, where it is given or would save more than `WORTH_SAYING`; "" otherwise."""
    if setup.has_servers:
        return ""
    without, partial = report["step_seconds_without_and_with_partial_rollouts"]
    if setup.run.partial_rollouts:
        return f"--partial_rollouts: {partial:.1f} s a step, {without:.1f} without it\n            "
    saved = without - partial
    if saved <= WORTH_SAYING * without or setup.model.tower_parameters:
        return ""
    price = f"for tokens of up to {MOST_LAG} steps ago"
    return f"--partial_rollouts would save {saved:.1f} s of {without:.1f} s a step, {price}\n            "


def table_of(columns: dict[str, dict[str, float]]) -> str:
    """A table with one row per key of the inner dicts, in the order in which they come up; "live" and "needed" last."""
    names = dict.fromkeys(part for parts in columns.values() for part in parts)
    names = sorted(names, key=lambda name: name in ("live", "needed"))
    width = max(len(name) for name in names) + 4
    lines = [" " * width + "".join(f"{column:>12}" for column in columns)]
    for name in names:
        cells = (f"{parts[name]:12.1f}" if name in parts else " " * 12 for parts in columns.values())
        lines.append((f"  {name:<{width - 2}}" + "".join(cells)).rstrip())
    return "\n".join(lines)


def verdict_of(report: dict) -> str:
    """Whether the run fits; if not, what would."""
    if report["fits"]:
        spare = 1 - report["gpu_needed_gib"] / report["gpu_capacity_gib"]
        gpu = f"{report['gpu_needed_gib']:.1f} of {report['gpu_capacity_gib']:.1f} GiB, {spare:.0%} to spare"
        host = f"{report['host_peak_gib']:.0f} of {report['host_capacity_gib']:.0f} GiB"
        return f"fits: {report['gpu_peak_phase']} needs {gpu} beyond the reserve; the host needs {host}"
    changes = ["no combination of up to four changes makes it fit"]
    if report["changes_that_would_fit"]:
        changes = ["would fit (the same machines first, then the fastest):"]
    for x in report["changes_that_would_fit"]:
        needs = f"{x['gpu_needed_gib']} GiB on a GPU, {x['host_peak_gib']} on the host, {x['step_seconds']} s per step"
        changes.append(f"  {' '.join(x['changes'])}: {needs}")
    return "\n".join(["does not fit:", *(f"  {words}" for words in report["misfits"]), *changes])
