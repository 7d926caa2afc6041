"""What would make a setup fit, or be faster: the fewest changes, and beside them the fastest. Each is tried out."""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import replace

from instruments.plan_memory import gpu_phases, host_phases, misfits, needed, short_cache
from instruments.plan_setup import GIB, Setup
from instruments.plan_time import step_seconds

MOST_CHANGES = 4  # that are tried together
FASTER = 0.98  # of the seconds; what gains less is as fast
PARTS = ("memory", "run", "engine", "hardware")  # of a setup, with its flags
Change = Mapping[str, object]  # flag -> its value


def flags_of(setup: Setup) -> Change:
    return {flag: value for part in PARTS for flag, value in vars(getattr(setup, part)).items()}


def with_changes(setup: Setup, changes: Change) -> Setup:
    own = {part: vars(getattr(setup, part)).keys() & changes.keys() for part in PARTS}
    changed = {part: {flag: changes[flag] for flag in flags} for part, flags in own.items()}
    return replace(setup, **{part: replace(getattr(setup, part), **values) for part, values in changed.items()})


def levers(setup: Setup) -> list[list[Change]]:
    """What could be changed on the same machines, and at last to more of them; in each list the mildest first."""
    plan, run, h, now = setup.plan, setup.run, setup.hardware, flags_of(setup)
    per_node, least = h.gpus // h.nodes, run.max_prompt_tokens + run.max_completion_tokens
    sizes = range(run.tensor_parallel_size + 1, per_node + 1)  # which divide GPUs and heads, and leave whole engines
    sizes = [n for n in sizes if math.gcd(h.gpus, setup.model.heads) % n == 0 and not setup.has_servers]
    shares = sorted((n / 20 for n in range(2, 19)), key=lambda share: abs(share - now["gpu_memory_utilization"]))
    values = {
        "gradient_checkpointing": [True],
        "communicate_once": [False],
        "share_prompts": [False],
        "micro_batch_tokens": dict.fromkeys(max(setup.memory.micro_batch_tokens // 2**n, least) for n in range(1, 8)),
        "gpu_memory_utilization": shares,
        "enforce_eager": [True],
        "shard_ranks": [n for n in range(setup.num_shards + 1, h.gpus + 1) if h.gpus % n == 0],
        "tensor_parallel_size": [n for n in sizes if plan.prompts_per_step % (h.gpus // n) == 0],
        "offload_reference": [True],
        "param_dtype": ["bfloat16"],
        "offload": ["none", "optimizer", "all"],
    }
    found: list[list[Change]] = [[{flag: x} for x in tried if x != now[flag]] for flag, tried in values.items()]
    if setup.has_servers or plan.prompts_per_step % (2 * setup.num_engines) == 0:
        found.append([{"gpus": 2 * h.gpus} | ({"nodes": 2 * h.nodes} if per_node >= 8 else {})])
    return found


def quickest(setups: Iterable[Setup]) -> list[Setup]:
    """The first of the setups that fit and are as fast as the fastest of them; none if none fits."""
    fit = [(step_seconds(each), each) for each in setups if not misfits(each)]
    limit = min((seconds for seconds, _ in fit), default=0.0) / FASTER
    return [each for seconds, each in fit if seconds <= limit][:1]


def fewest(setup: Setup) -> list[Setup]:
    """The setups that fit after the fewest changes: on the same machines first, then by speed."""
    for count in range(1, MOST_CHANGES + 1):
        chosen = itertools.combinations(levers(setup), count)
        tried = ((with_changes(setup, ChainMap(*each)) for each in itertools.product(*flags)) for flags in chosen)
        if found := list(itertools.chain.from_iterable(map(quickest, tried))):
            return sorted(found, key=lambda each: (each.hardware.gpus, step_seconds(each)))[:5]
    return []


def fastest(setup: Setup, start: Setup) -> Setup:
    """The fastest on the same machines that one change after the other leads to, from a setup that fits."""
    changes = [change for change in itertools.chain(*levers(setup)) if "gpus" not in change]
    changes += [{flag: flags_of(setup)[flag]} for flag in ChainMap(*changes)]  # and back again
    while True:
        fit = [each for change in changes if not misfits(each := with_changes(start, change))]
        best = min(fit, key=step_seconds, default=start)
        if step_seconds(best) >= FASTER * step_seconds(start):
            return start
        start = best


def advised(setup: Setup) -> dict[str, object]:
    """What would fit after the fewest changes, and what would be the fastest (None: one of these, or as it is)."""
    fits = not misfits(setup)
    few = [] if fits else fewest(setup)
    starts = [setup] if fits and short_cache(setup) else [each for each in few if each.hardware == few[0].hardware]
    best = quickest([*starts, *(fastest(setup, each) for each in starts)])
    return {
        "changes_that_would_fit": [described(setup, each) for each in few],
        "fastest_that_fits": described(setup, best[0]) if best != starts[:1] else None,
    }


def described(setup: Setup, changed: Setup) -> dict[str, object]:
    before, words = flags_of(setup), []
    for flag, value in flags_of(changed).items():
        if value != before[flag]:
            name = f"--plan_{flag}" if flag in ("gpus", "nodes") else f"--{flag}"
            words.append(f"{'' if value else 'no '}{name}" if isinstance(value, bool) else f"{name} {value}")
    return {
        "changes": words,
        "gpu_needed_gib": round(max(map(needed, gpu_phases(changed).values())) / GIB, 1),
        "host_peak_gib": round(max(sum(parts.values()) for parts in host_phases(changed).values()) / GIB),
        "step_seconds": round(step_seconds(changed)),
        "warnings": short_cache(changed),
    }
