"""The report of a dry run: an object of plain types, which JSON prints as it is, and the same as text."""

from __future__ import annotations

from plan import memory, time
from plan.memory import Parts, total
from plan.setup import GIB, Setup
from runtime.tables import counted, in_columns

TEXT = """\
dry run: {model} on {machines}; nothing is started

model       {parameters:,} parameters, {active}{trainable_parameters:,} trained; {critic}\
{kv_bytes_per_token:,} bytes of KV cache per token
step        {prompts} x {group_size} = {completions_per_step} completions
updates     {updates_per_step} per step, each of {completions_per_update} completions \
({completions_per_update_and_gpu:g} per GPU), in {micro_batches} of at most {micro_batch_tokens} tokens
run         {epochs}{steps}, {updates}, {total_completions:,} completions
sampling    {engines}, {completions_per_engine:g} completions each; \
the cache holds {sequences} of {max_model_len} tokens at once

GPU memory at the peak of each phase, in GiB per GPU
{gpu_table}

host RAM, in GiB per node; a checkpoint takes {checkpoint_gib:.1f} GiB of disk, \
all that are kept {disk_gib:.1f}
{host_table}

{time}

{verdict}"""
TIME = """\
time        {step_seconds:.0f} s per step: {times}
            with {mean_prompt_tokens:g} + {mean_completion_tokens:g} tokens at {flops_share:.0%} of peak FLOPs
            {total_hours:,.1f} hours, {total_gpu_hours:,} GPU hours"""
NO_TIME = "time        none is estimated, because the run does not fit"
FITS = """\
fits: {gpu_peak_phase} needs {gpu_needed_gib:.1f} of {gpu_capacity_gib:.1f} GiB, {spare:.0%} to spare \
beyond the reserve; the host needs {host_peak_gib:.0f} of {host_capacity_gib:.0f} GiB"""
PLAN_FIGURES = (
    "prompts_per_step", "group_size", "completions_per_step", "updates_per_step", "total_steps", "total_updates",
)  # fmt: skip


def gib(size: float) -> float:
    return round(size / GIB, 2)


def in_gib(parts: Parts) -> Parts:
    return {name: gib(size) for name, size in parts.items() if size}


def report_of(setup: Setup) -> dict[str, object]:
    """All numbers as one object of plain types: the headline figures, then the tables behind them."""
    plan, run, h = setup.plan, setup.run, setup.hardware
    phases, on_host = memory.gpu_phases(setup), memory.host_phases(setup)
    needed = {name: memory.needed(parts) for name, parts in phases.items()}
    peak = max(needed, key=needed.get)
    misfits = memory.misfits(setup)
    per_update = plan.completions_per_step // plan.updates_per_pass
    servers = f" + {h.generation_gpus}" if setup.has_servers else ""
    engines = counted(setup.num_engines, "server" if setup.has_servers else "engine")
    report = {name: getattr(plan, name) for name in PLAN_FIGURES}
    report |= {
        "model": setup.model.name,
        "machines": f"{h.gpus}{servers} x {h.name}, {counted(h.nodes, 'node')}",
        "engines": f"{engines} of {counted(setup.servers.tensor_parallel_size, 'GPU')}",
        "completions_per_update": per_update,
        "completions_per_update_and_gpu": per_update / h.gpus,
        "completions_per_engine": setup.completions_per_engine,
        "total_completions": plan.total_steps * plan.completions_per_step,
        "training_rows": run.num_rows,
        "steps_per_epoch": None if run.num_rows is None else plan.steps_per_epoch,
        "max_model_len": setup.engine.max_model_len,
        "micro_batch_tokens": setup.memory.micro_batch_tokens,
        "micro_batches_per_update": time.micro_batches(setup),
        "sequences_at_once_per_engine": round(max(memory.sequences_at_once(setup), 0), 1),
        "parameters": setup.model.parameters,
        "active_parameters": setup.model.active_parameters,
        "trainable_parameters": setup.trainable,
        "critic_parameters": setup.critic and setup.critic.parameters,
        "kv_bytes_per_token": setup.model.kv_per_token * setup.compute_bytes,
        "gpu_peak_gib": gib(total(phases[peak])),
        "gpu_needed_gib": gib(needed[peak]),
        "gpu_peak_phase": peak,
        "gpu_capacity_gib": gib(h.gpu_bytes),
        "host_peak_gib": gib(max(map(total, on_host.values()))),
        "host_capacity_gib": gib(h.host_bytes),
        "checkpoint_gib": gib(memory.checkpoint_bytes(setup)),
        "disk_gib": gib(run.num_checkpoints * memory.checkpoint_bytes(setup)),
        "step_seconds": None,
        "total_hours": None,
        "total_gpu_hours": None,
        "gpu_gib": {
            name: in_gib(parts | {"live": total(parts), "needed": needed[name]}) for name, parts in phases.items()
        },
        "host_gib": {name: in_gib(parts | {"needed": total(parts)}) for name, parts in on_host.items()},
        "seconds": {},
        "mean_prompt_tokens": run.mean_prompt_tokens,
        "mean_completion_tokens": run.mean_completion_tokens,
        "flops_share": setup.flops / h.flops,
        "fits": not misfits,
        "misfits": misfits,
    }
    if not misfits:  # a run that cannot exist takes no time
        seconds = time.step_seconds(setup)
        hours = seconds * plan.total_steps / 3600
        report["step_seconds"] = round(seconds, 1)
        report["total_hours"] = round(hours, 1)
        report["total_gpu_hours"] = round(hours * (h.gpus + h.generation_gpus))
        report["seconds"] = {name: round(value, 1) for name, value in time.phase_seconds(setup).items()}
    return report


def text_of(report: dict) -> str:
    """The report for people."""
    epochs = ""
    if report["training_rows"] is not None:
        epochs = f"{counted(report['steps_per_epoch'], 'step')} per epoch of {report['training_rows']} rows; "
    is_mixture = report["active_parameters"] < report["parameters"]
    words = report | {
        "active": f"{report['active_parameters']:,} of a token, " if is_mixture else "",
        "critic": f"a critic of {report['critic_parameters']:,}; " if report["critic_parameters"] else "",
        "epochs": epochs,
        "prompts": counted(report["prompts_per_step"], "prompt"),
        "sequences": counted(report["sequences_at_once_per_engine"], "sequence"),
        "steps": counted(report["total_steps"], "step"),
        "updates": counted(report["total_updates"], "update"),
        "micro_batches": counted(report["micro_batches_per_update"], "micro-batch"),
        "gpu_table": table_of(report["gpu_gib"]),
        "host_table": table_of(report["host_gib"]),
        "times": ", ".join(f"{name} {seconds:.1f}" for name, seconds in report["seconds"].items()),
        "time": NO_TIME,
        "verdict": "\n".join(["does not fit:", *report["misfits"]]),
    }
    if report["fits"]:
        spare = 1 - report["gpu_needed_gib"] / report["gpu_capacity_gib"]
        words |= {"time": TIME.format_map(words), "verdict": FITS.format(**report, spare=spare)}
    return TEXT.format_map(words)


def table_of(columns: dict[str, Parts]) -> str:
    """A table with one row per key of the inner dicts, in the order in which they come up; "live" and "needed" last."""
    names = dict.fromkeys(name for parts in columns.values() for name in parts)
    rows = [["", *(f"{column:>10}" for column in columns)]]
    for name in sorted(names, key=lambda name: name in ("live", "needed")):
        cells = [f"{parts[name]:10.1f}" if name in parts else "" for parts in columns.values()]
        rows.append([f"  {name}  ", *cells])
    return "\n".join(in_columns(rows))
