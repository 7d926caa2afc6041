"""Whether a setup fits; the fewest changes that would make it fit, and beside them the fastest. Each is tried out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from model.sizes import MOST_ON_GPU
from planner.memory import engine_parts, gpu_phases, host_phases, sequences_at_once, without
from planner.setup import GIB, Setup
from planner.time import Assumed, step_seconds

MOST_CHANGES = 4  # that are tried together
SHORT_CACHE = 1 / 8  # of the sequences: with less the engine reads its weights for a few tokens at a time
FASTER = 0.98  # of the seconds; what gains less is as fast
PARTS = ("memory", "run", "engine", "hardware")  # of a setup, with its flags
Change = dict[str, object]  # flag -> its value


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


def short_cache(setup: Setup) -> list[str]:
    """A sentence if the cache holds less than `SHORT_CACHE` of what an engine would run at a time."""
    wanted, held = min(setup.plan.completions_per_step / setup.num_engines, MOST_ON_GPU), sequences_at_once(setup)
    is_short = 1 <= held < SHORT_CACHE * wanted
    return [f"the cache holds {held:.1f} of an engine's {wanted:g} sequences"] if is_short else []


def flags_of(setup: Setup) -> Change:
    return {flag: value for part in PARTS for flag, value in vars(getattr(setup, part)).items()}


def with_changes(setup: Setup, changes: Change) -> Setup:
    for part in PARTS:
        own = getattr(setup, part)
        own = replace(own, **{flag: value for flag, value in changes.items() if flag in vars(own)})
        setup = replace(setup, **{part: own})
    return setup


def levers(setup: Setup) -> list[list[Change]]:
    """What could be changed on the same machines, and at last to more of them; in each list the mildest first."""
    plan, run, h, now = setup.plan, setup.run, setup.hardware, flags_of(setup)
    limits, per_node = (run.max_prompt_tokens, run.max_completion_tokens), h.gpus // h.nodes
    sizes = range(run.tensor_parallel_size + 1, per_node + 1)  # which divide GPUs and heads, and leave whole engines
    sizes = [n for n in sizes if math.gcd(h.gpus, setup.model.heads) % n == 0 and not setup.has_servers]
    shares = [n / 20 for n in range(2, 19)]
    halves = [setup.memory.micro_batch_tokens // 2**n for n in range(1, 8)]
    values = {
        "gradient_checkpointing": [True],
        "communicate_once": [False],
        "share_prompts": [False] if setup.sharers(*limits) > 1 else [],
        "micro_batch_tokens": list(dict.fromkeys(max(n, sum(limits)) for n in halves)),
        "gpu_memory_utilization": sorted(shares, key=lambda share: abs(share - now["gpu_memory_utilization"])),
        "enforce_eager": [True],
        "shard_ranks": [n for n in range(setup.num_shards + 1, h.gpus + 1) if h.gpus % n == 0],
        "tensor_parallel_size": [n for n in sizes if plan.prompts_per_step % (h.gpus // n) == 0],
        "offload_reference": [True] if setup.has_reference_model else [],
        "param_dtype": [] if setup.has_lora else ["bfloat16"],
        "offload": ["none", "optimizer", "all"],
    }
    found = [[{flag: value} for value in tried if value != now[flag]] for flag, tried in values.items()]
    if setup.has_servers or plan.prompts_per_step % (2 * setup.num_engines) == 0:
        found.append([{"gpus": 2 * h.gpus} | ({"nodes": 2 * h.nodes} if per_node >= 8 else {})])
    return found


def quickest(setups: Iterable[Setup], assumed: Assumed) -> list[Setup]:
    """The first of the setups that fit and are as fast as the fastest of them; none if none fits."""
    fit = [(step_seconds(each, assumed), each) for each in setups if not misfits(each)]
    limit = min((seconds for seconds, _ in fit), default=0.0) / FASTER
    return [each for seconds, each in fit if seconds <= limit][:1]


def fewest(setup: Setup, assumed: Assumed) -> list[Setup]:
    """The setups that fit after the fewest changes: on the same machines first, then by speed."""
    for count in range(1, MOST_CHANGES + 1):
        found = []
        for chosen in itertools.combinations(levers(setup), count):
            tried = (functools.reduce(with_changes, changes, setup) for changes in itertools.product(*chosen))
            found += quickest(tried, assumed)
        if found:
            return sorted(found, key=lambda each: (each.hardware.gpus, step_seconds(each, assumed)))[:5]
    return []


def fastest(setup: Setup, assumed: Assumed, start: Setup) -> Setup:
    """The fastest on the same machines that one change after the other leads to, from a setup that fits."""
    tried = [change for changes in levers(setup) for change in changes if "gpus" not in change]
    tried += [{flag: flags_of(setup)[flag]} for flag in dict.fromkeys(itertools.chain(*tried))]  # and back again
    while True:
        others = [each for change in tried if not misfits(each := with_changes(start, change))]
        nearest = min([start, *others], key=lambda each: step_seconds(each, assumed))
        if step_seconds(nearest, assumed) >= FASTER * step_seconds(start, assumed):
            return start
        start = nearest


def advised(setup: Setup, assumed: Assumed) -> dict[str, object]:
    """What would fit after the fewest changes, and what would be the fastest (None: one of these, or as it is)."""
    fits = not misfits(setup)
    few = [] if fits else fewest(setup, assumed)
    starts = [setup] if fits and short_cache(setup) else [each for each in few if each.hardware == few[0].hardware]
    best = quickest([*starts, *(fastest(setup, assumed, each) for each in starts)], assumed)
    return {
        "changes_that_would_fit": [described(setup, each, assumed) for each in few],
        "fastest_that_fits": described(setup, best[0], assumed) if best != starts[:1] else None,
    }


def described(setup: Setup, changed: Setup, assumed: Assumed) -> dict[str, object]:
    before, words = flags_of(setup), []
    for flag, value in flags_of(changed).items():
        if value != before[flag]:
            name = f"--plan_{flag}" if flag in ("gpus", "nodes") else f"--{flag}"
            words.append(f"{'' if value else 'no '}{name}" if isinstance(value, bool) else f"{name} {value}")
    return {
        "changes": words,
        "gpu_needed_gib": round(max(phase.needed for phase in gpu_phases(changed).values()) / GIB, 1),
        "host_peak_gib": round(max(sum(parts.values()) for parts in host_phases(changed).values()) / GIB),
        "step_seconds": round(step_seconds(changed, assumed)),
        "warnings": short_cache(changed),
    }
