"""Whether a setup fits; the fewest changes that would make it fit, and beside them the fastest. Each is tried out."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from model.sizes import MOST_ON_GPU
from planner.memory import engine_parts, gpu_phases, host_phases, sequences_at_once, without
from planner.setup import GIB, Setup
from planner.time import Assumed, step_seconds

MOST_CHANGES = 4  # that are tried together
SHORT_CACHE = 1 / 8  # of the sequences: with less the engine reads its weights for a few tokens at a time
FASTER = 0.98  # of the seconds; what gains less is as fast
Change = dict[str, object]  # flag -> its value
PARTS = {  # of a setup, by flag
    "gradient_checkpointing": "memory", "communicate_once": "memory", "share_prompts": "memory",
    "micro_batch_tokens": "memory", "param_dtype": "memory", "offload": "memory", "offload_reference": "memory",
    "shard_ranks": "memory",
    "tensor_parallel_size": "run", "gpu_memory_utilization": "engine", "enforce_eager": "engine",
    "nodes": "hardware", "gpus": "hardware",
}  # fmt: skip


def misfits(setup: Setup, free: float | None = None) -> list[str]:
    """What does not fit, one sentence each; empty if all does.

    `free`: bytes of the GPU that nobody has taken; then tensors alone count, without what is kept in reserve.
    """
    h, found, reserve = setup.hardware, [], () if free is None else ("processes",)
    for name, phase in gpu_phases(setup).items():
        needed, has = (phase.needed, h.gpu_bytes) if free is None else (phase.live, free)
        if needed > has and (free is None or name != "server"):  # a server's GPU is another one
            needed, has = needed / GIB, has / GIB
            found.append(f"GPU, {name}: needs {needed:.1f} GiB of {has:.1f}, {needed - has:.1f} too many")
    if sequences_at_once(setup) < 1:
        share, cache = setup.engine.gpu_memory_utilization, engine_parts(setup)["KV cache"] / GIB
        left = f"--gpu_memory_utilization {share:g} leaves the engine {cache:.1f} GiB for its cache"
        found.append(f"GPU, rollout: {left}, not enough for one sequence of {setup.engine.max_model_len} tokens")
    for name, parts in host_phases(setup).items():
        if (needed := sum(without(parts, *reserve).values())) > h.host_bytes:
            found.append(f"host RAM, {name}: needs {needed / GIB:.0f} GiB of {h.host_bytes / GIB:.0f} on each node")
    return found


def short_cache(setup: Setup) -> str:
    """A sentence if the cache holds less than `SHORT_CACHE` of what an engine would run at a time; "" otherwise."""
    wanted, held = min(setup.plan.completions_per_step / setup.num_engines, MOST_ON_GPU), sequences_at_once(setup)
    return f"the cache holds {held:.1f} of an engine's {wanted:g} sequences" if 1 <= held < SHORT_CACHE * wanted else ""


def value_of(setup: Setup, flag: str) -> object:
    return getattr(getattr(setup, PARTS[flag]), flag)


def words_of(before: Setup, after: Setup) -> list[str]:
    """The flags in which they differ, as they are given."""
    found = []
    for flag, part in PARTS.items():
        if (value := value_of(after, flag)) != value_of(before, flag):
            name = f"--plan_{flag}" if part == "hardware" else f"--{flag}"
            found.append(f"{'' if value else 'no '}{name}" if isinstance(value, bool) else f"{name} {value}")
    return found


def with_change(setup: Setup, change: Change) -> Setup:
    for flag, value in change.items():
        part = getattr(setup, PARTS[flag])
        setup = replace(setup, **{PARTS[flag]: replace(part, **{flag: value})})
    return setup


def levers(setup: Setup) -> list[list[Change]]:
    """What could be changed on the same machines, and at last to more of them; in each list the mildest first."""
    plan, run, memory, h = setup.plan, setup.run, setup.memory, setup.hardware
    limits = run.max_prompt_tokens, run.max_completion_tokens
    caps = {max(memory.micro_batch_tokens // 2**n, sum(limits)) for n in range(1, 8)}
    now, per_node = setup.engine.gpu_memory_utilization, h.gpus // h.nodes
    shares = sorted((n / 20 for n in range(2, 19) if abs(n / 20 - now) > 0.01), key=lambda share: abs(share - now))
    shards = [n for n in range(setup.num_shards + 1, h.gpus + 1) if h.gpus % n == 0]
    sizes = range(run.tensor_parallel_size + 1, per_node + 1)  # which divide GPUs and heads, and leave whole engines
    sizes = [n for n in sizes if math.gcd(h.gpus, setup.model.heads) % n == 0 and not setup.has_servers]
    values = {
        "gradient_checkpointing": [True],
        "communicate_once": [False],
        "share_prompts": [False] if setup.sharers(*limits) > 1 else [],
        "micro_batch_tokens": sorted(caps, reverse=True),
        "gpu_memory_utilization": shares,
        "enforce_eager": [True],
        "shard_ranks": shards,
        "tensor_parallel_size": [n for n in sizes if plan.prompts_per_step % (h.gpus // n) == 0],
        "offload_reference": [True] if setup.has_reference_model else [],
        "param_dtype": [] if setup.has_lora else ["bfloat16"],
        "offload": ["none", "optimizer", "all"],
    }
    found = [[{flag: x} for x in tried if x != value_of(setup, flag)] for flag, tried in values.items()]
    if setup.has_servers or plan.prompts_per_step % (2 * setup.num_engines) == 0:
        found.append([{"gpus": 2 * h.gpus} | ({"nodes": 2 * h.nodes} if per_node >= 8 else {})])
    return [changes for changes in found if changes]


def fewest(setup: Setup, assumed: Assumed) -> list[Setup]:
    """The setups that fit after the fewest changes: on the same machines first, then by speed."""
    for count in range(1, MOST_CHANGES + 1):
        found = []
        for chosen in itertools.combinations(levers(setup), count):
            best = None
            for changes in itertools.product(*chosen):
                changed = with_change(setup, {flag: x for change in changes for flag, x in change.items()})
                if not misfits(changed):
                    seconds = step_seconds(changed, assumed)
                    if best is None or seconds < FASTER * best[0]:  # of settings that are equally fast, the mildest
                        best = seconds, changed
            found += [best] if best else []
        if found:
            return [each for _, each in sorted(found, key=lambda best: (best[1].hardware.gpus, best[0]))][:5]
    return []


def fastest(setup: Setup, assumed: Assumed, start: Setup) -> Setup:
    """The fastest on the same machines that one change after the other leads to, from a setup that fits."""
    tried = [change for changes in levers(setup) for change in changes if "gpus" not in change]
    tried += [{flag: value_of(setup, flag)} for flag in dict.fromkeys(flag for change in tried for flag in change)]
    seconds = step_seconds(start, assumed)
    while True:
        others = (with_change(start, change) for change in tried)
        fit = [(step_seconds(each, assumed), each) for each in others if not misfits(each)]
        nearest = min(fit, key=lambda each: each[0], default=(math.inf, start))
        if nearest[0] >= FASTER * seconds:
            return start
        seconds, start = nearest


def advised(setup: Setup, assumed: Assumed) -> dict[str, object]:
    """What would fit after the fewest changes, and what would be the fastest (None: one of these, or as it is)."""
    fits = not misfits(setup)
    few = [] if fits else fewest(setup, assumed)
    starts = [each for each in few if each.hardware.gpus == few[0].hardware.gpus]
    starts = [setup] if fits and short_cache(setup) else starts
    found = [fastest(setup, assumed, each) for each in starts]
    best = min(found, key=lambda each: step_seconds(each, assumed), default=None)
    told = best is not None and step_seconds(best, assumed) < FASTER * step_seconds(starts[0], assumed)
    return {
        "changes_that_would_fit": [described(setup, each, assumed) for each in few],
        "fastest_that_fits": described(setup, best, assumed) if told else None,
    }


def described(setup: Setup, changed: Setup, assumed: Assumed) -> dict[str, object]:
    warning = short_cache(changed)
    return {
        "changes": words_of(setup, changed),
        "gpu_needed_gib": round(max(phase.needed for phase in gpu_phases(changed).values()) / GIB, 1),
        "host_peak_gib": round(max(sum(parts.values()) for parts in host_phases(changed).values()) / GIB),
        "step_seconds": round(step_seconds(changed, assumed)),
        "warnings": [warning] if warning else [],
    }
