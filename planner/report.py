"""The report of a dry run: built once as an object of plain types, which JSON prints as it is; then told as text."""

from __future__ import annotations

from dataclasses import replace

from model.sizes import MOST_LAG
from planner import memory, time
from planner.advice import advised, misfits, short_cache
from planner.setup import GIB, Setup
from planner.time import Assumed

WORTH_SAYING = 0.05  # of a step
TEXT = """\
dry run: {model} on {machines}; nothing is started

model       {parameters:,} parameters, {trainable_parameters:,} trained; \
{kv_bytes_per_token:,} bytes of KV cache per token
step        {prompts_per_step} prompts x {group_size} = {completions_per_step} completions; \
at most {most_tokens_per_step:,} tokens, prompts included
updates     {updates_per_step} per step, each of {completions_per_update} completions \
({completions_per_update_and_gpu:g} per GPU), in {micro_batches_per_update} micro-batches \
of at most {micro_batch_tokens} tokens
run         {epochs}{total_steps} steps, {total_updates} updates, {total_completions:,} completions
sampling    {engines}, {completions_per_engine:g} completions each; \
the cache holds {sequences_at_once_per_engine:g} sequences of {max_model_len} tokens at once

GPU memory at the peak of each phase, in GiB per GPU
{gpu_table}

host RAM, in GiB per node; a checkpoint takes {checkpoint_gib:.1f} GiB of disk, \
all that are kept {disk_gib:.1f}
{host_table}

time        {step_seconds:.0f} s per step: {times}
            {remarks}{total_hours:,.1f} hours, {total_gpu_hours:,} GPU hours
traffic     {moved} GiB per GPU and step

assumed: {assumed}

{verdict}"""


def gib(size: float) -> float:
    return round(size / GIB, 2)


def in_gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: gib(size) for name, size in parts.items()}


def report_of(setup: Setup, assumed: Assumed) -> dict[str, object]:
    """All numbers as one object of plain types: the headline figures, then the tables behind them."""
    plan, run, h = setup.plan, setup.run, setup.hardware
    phases, on_host, seconds = memory.gpu_phases(setup), memory.host_phases(setup), time.step_seconds(setup, assumed)
    peak, found = max(phases, key=lambda name: phases[name].needed), misfits(setup)
    per_update, hours = plan.completions_per_step // plan.updates_per_pass, seconds * plan.total_steps / 3600
    kind, samplers = ("servers", f" + {h.generation_gpus}") if setup.has_servers else ("engines", "")
    return {
        "model": setup.model.name,
        "machines": f"{h.gpus}{samplers} x {h.name}, {h.nodes} node{'s' * (h.nodes > 1)}",
        "engines": f"{setup.num_engines} {kind} of {run.tensor_parallel_size} GPUs",
        "prompts_per_step": plan.prompts_per_step,
        "group_size": plan.group_size,
        "completions_per_step": plan.completions_per_step,
        "completions_per_update": per_update,
        "completions_per_update_and_gpu": per_update / h.gpus,
        "completions_per_engine": plan.completions_per_step / setup.num_engines,
        "updates_per_step": plan.updates_per_step,
        "total_steps": plan.total_steps,
        "total_updates": plan.total_updates,
        "total_completions": plan.total_steps * plan.completions_per_step,
        "training_rows": run.num_rows,
        "steps_per_epoch": None if run.num_rows is None else plan.steps_per_epoch,
        "max_model_len": setup.engine.max_model_len,
        "most_tokens_per_step": plan.completions_per_step * (run.max_prompt_tokens + run.max_completion_tokens),
        "micro_batch_tokens": setup.memory.micro_batch_tokens,
        "micro_batches_per_update": time.micro_batches(setup, assumed),
        "sequences_at_once_per_engine": round(max(memory.sequences_at_once(setup), 0), 1),
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
        "step_seconds": round(seconds, 1),
        "total_hours": round(hours, 1),
        "total_gpu_hours": round(hours * (h.gpus + h.generation_gpus)),
        "gpu_gib": {name: in_gib(x.parts | {"live": x.live, "needed": x.needed}) for name, x in phases.items()},
        "host_gib": {name: in_gib(parts | {"needed": sum(parts.values())}) for name, parts in on_host.items()},
        "seconds": {name: round(value, 1) for name, value in time.phase_seconds(setup, assumed).items()},
        "traffic_gib_per_gpu_and_step": in_gib(time.traffic(setup, assumed)),
        "remarks": remarks(setup, assumed),
        "assumptions": assumptions(setup, assumed),
        "fits": not found,
        "misfits": found,
        "warnings": short_cache(setup),
    } | advised(setup, assumed)


def remarks(setup: Setup, assumed: Assumed) -> list[str]:
    """Who waits for whom; what --partial_rollouts saves, where it is given or would save more than `WORTH_SAYING`."""
    if (waits := time.waiting_seconds(setup, assumed)) is not None:
        ahead = f"sampling {setup.plan.steps_ahead} steps ahead" if setup.plan.steps_ahead else "one after the other"
        return [f"{ahead}: {', '.join(f'{who} wait {seconds:.1f} s' for who, seconds in waits.items())} of a step"]
    ways = (replace(setup, plan=replace(setup.plan, partial_rollouts=is_partial)) for is_partial in (False, True))
    without, partial = (time.step_seconds(way, assumed) for way in ways)
    if setup.plan.partial_rollouts:
        return [f"--partial_rollouts: {partial:.1f} s a step, {without:.1f} without it"]
    if without - partial <= WORTH_SAYING * without or setup.model.tower_parameters:
        return []
    saved = f"{without - partial:.1f} s of {without:.1f} s a step, for tokens of up to {MOST_LAG} steps ago"
    return [f"--partial_rollouts would save {saved}"]


def assumptions(setup: Setup, assumed: Assumed) -> list[str]:
    h, eager = setup.hardware, setup.engine.enforce_eager
    working, asleep = gib(memory.ENGINE_WORKING[eager]), gib(memory.ENGINE_ASLEEP[eager])
    network = f", {h.network_speed / 1e9:.0f} between nodes" if h.nodes > 1 else ""
    reserve = f"{gib(memory.CONTEXT):g} GiB for CUDA's context and NCCL"
    flops = f"{assumed.flops:.0%} of {h.flops / 1e12:.0f} TFLOP/s"
    speed = f"{time.MEMORY_SHARE:.0%} of {h.memory_speed / 1e12:.2f} TB/s"
    links = f"{time.LINK_SHARE:.0%} of {h.link_speed / 1e9:.0f} GB/s in a node{network}"
    sync = f"{time.PAUSE:g} s beside the transfer" if setup.has_servers else f"{time.SWITCH:g} s of sleep and wake-up"
    return [
        f"memory: needed = {memory.FRAGMENTATION:g} x the trainer's + the engine's tensors + {reserve}",
        f"engine: {working:g} GiB beside weights and cache, of which {asleep:g} stay while it sleeps",
        f"host: {gib(memory.PROCESS_HOST):g} GiB for each process without its weights",
        "micro-batches: full of completion tokens; the work of a vision tower is not counted",
        f"speeds: {flops}, {speed}, {links}, {h.host_speed / 1e9:.0f} to the host",
        f"time: prompts of {assumed.prompt:g} tokens, completions of {assumed.completion:g}; sync with {sync}; "
        "one round of sampling; no loading, evaluation, checkpoints, waiting for graders",
    ]


def text_of(report: dict) -> str:
    """The report for people."""
    rows, steps = report["training_rows"], report["steps_per_epoch"]
    moved = report["traffic_gib_per_gpu_and_step"].items()
    return TEXT.format_map(report | {
        "epochs": "" if rows is None else f"{steps:g} steps per epoch of {rows} rows; ",
        "gpu_table": table_of(report["gpu_gib"]),
        "host_table": table_of(report["host_gib"]),
        "times": ", ".join(f"{name} {seconds:.1f}" for name, seconds in report["seconds"].items()),
        "remarks": "".join(f"{remark}\n            " for remark in report["remarks"]),
        "moved": ", ".join(f"{name} {size:,.0f}" for name, size in moved if size),
        "assumed": "\n         ".join(report["assumptions"]),
        "verdict": verdict_of(report),
    })  # fmt: skip


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
    """Whether the run fits; if not, what would; and what would be faster."""
    if report["fits"]:
        spare = 1 - report["gpu_needed_gib"] / report["gpu_capacity_gib"]
        gpu = f"{report['gpu_needed_gib']:.1f} of {report['gpu_capacity_gib']:.1f} GiB, {spare:.0%} to spare"
        host = f"{report['host_peak_gib']:.0f} of {report['host_capacity_gib']:.0f} GiB"
        lines = [f"fits: {report['gpu_peak_phase']} needs {gpu} beyond the reserve; the host needs {host}"]
    elif few := report["changes_that_would_fit"]:
        lines = ["does not fit:", *report["misfits"], "would fit, with the fewest changes:", *map(line_of, few)]
    else:
        lines = ["does not fit:", *report["misfits"], "no combination of up to four changes makes it fit"]
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    if fast := report["fastest_that_fits"]:
        lines += ["the fastest that fits the same machines:", line_of(fast)]
    return "\n".join(lines)


def line_of(each: dict) -> str:
    needs = f"{each['gpu_needed_gib']} GiB on a GPU, {each['host_peak_gib']} on the host"
    return "; ".join([f"  {' '.join(each['changes'])}: {needs}, {each['step_seconds']} s per step", *each["warnings"]])
