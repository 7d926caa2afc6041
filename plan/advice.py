"""Changes that would make a setup fit, the fewest and the fastest. All of them are tried out."""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import replace

from plan.memory import gpu_phases, host_phases, misfits, needed, short_cache, total
from plan.setup import GIB, Setup
from plan.time import step_seconds

MOST_CHANGES = 4  # the most that are tried together
FASTER = 0.98  # share of the seconds; a change that gains less is as fast
PARTS = ("memory", "run", "engine", "hardware")  # the parts of a setup that hold its flags
Change = Mapping[str, object]  # flag -> its value


def flags_of(setup: Setup) -> Change:
    return {flag: value for part in PARTS for flag, value in vars(getattr(setup, part)).items()}


def with_changes(setup: Setup, changes: Change) -> Setup:
    parts = {}
    for name in PARTS:
        part = getattr(setup, name)
        own = {flag: value for flag, value in changes.items() if flag in vars(part)}
        parts[name] = replace(part, **own)
    return replace(setup, **parts)


def levers(setup: Setup) -> list[list[Change]]:
    """Lists of changes on the same machines, and at last to more of them; in each list the mildest first."""
    plan, run, h = setup.plan, setup.run, setup.hardware
    now = flags_of(setup)
    least = run.max_prompt_tokens + run.max_completion_tokens
    sizes = []
    for n in range(run.tensor_parallel_size + 1, h.ranks_per_node + 1):
        if setup.has_servers or math.gcd(h.gpus, setup.model.heads) % n:
            continue
        if plan.prompts_per_step % (h.gpus // n) == 0:  # each engine has as many prompts
            sizes.append(n)
    shares = [n / 20 for n in range(2, 19)]
    shares.sort(key=lambda share: abs(share - now["gpu_memory_utilization"]))
    values = {
        "gradient_checkpointing": [True],
        "communicate_once": [False],
        "share_prompts": [False],
        "micro_batch_tokens": dict.fromkeys(max(setup.memory.micro_batch_tokens // 2**n, least) for n in range(1, 8)),
        "gpu_memory_utilization": shares,
        "enforce_eager": [True],
        "shard_ranks": [n for n in range(setup.num_shards + 1, h.gpus + 1) if h.gpus % n == 0],
        "tensor_parallel_size": sizes,
        "offload_reference": [True],
        "param_dtype": ["bfloat16"],
        "offload": ["none", "optimizer", "all"],
    }
    changes: list[list[Change]] = []
    for flag, tried in values.items():
        changes.append([{flag: value} for value in tried if value != now[flag]])
    if setup.has_servers or plan.prompts_per_step % (2 * setup.num_engines) == 0:
        more = {"gpus": 2 * h.gpus}
        if h.ranks_per_node >= 8:
            more["nodes"] = 2 * h.nodes
        changes.append([more])
    return changes


def quickest(setups: Iterable[Setup]) -> list[Setup]:
    """The first of the setups that fit and are as fast as the fastest of them; none if none fits."""
    fitting = [(step_seconds(setup), setup) for setup in setups if not misfits(setup)]
    limit = min((seconds for seconds, _ in fitting), default=0.0) / FASTER
    return [setup for seconds, setup in fitting if seconds <= limit][:1]


def fewest(setup: Setup) -> list[Setup]:
    """The setups that fit after the fewest changes: on the same machines first, then by speed."""
    for count in range(1, MOST_CHANGES + 1):
        fitting = []
        for lists in itertools.combinations(levers(setup), count):
            tried = [with_changes(setup, ChainMap(*changes)) for changes in itertools.product(*lists)]
            fitting += quickest(tried)
        if fitting:
            return sorted(fitting, key=lambda setup: (setup.hardware.gpus, step_seconds(setup)))[:5]
    return []


def fastest(setup: Setup, start: Setup) -> Setup:
    """The fastest on the same machines that one change after the other leads to, from a setup that fits."""
    changes = [change for change in itertools.chain(*levers(setup)) if "gpus" not in change]
    changes += [{flag: flags_of(setup)[flag]} for flag in ChainMap(*changes)]  # and back again
    while True:
        tried = [with_changes(start, change) for change in changes]
        fitting = [setup for setup in tried if not misfits(setup)]
        best = min(fitting, key=step_seconds, default=start)
        if step_seconds(best) >= FASTER * step_seconds(start):
            return start
        start = best


def advised(setup: Setup) -> dict[str, object]:
    """The setups that fit after the fewest changes, and the fastest (None: it is one of these, or the present one)."""
    few = []
    starts = []
    if misfits(setup):
        few = fewest(setup)
        starts = [changed for changed in few if changed.hardware == few[0].hardware]
    elif short_cache(setup):
        starts = [setup]
    best = quickest([*starts, *(fastest(setup, start) for start in starts)])
    return {
        "changes_that_would_fit": [described(setup, changed) for changed in few],
        "fastest_that_fits": described(setup, best[0]) if best != starts[:1] else None,
    }


def described(setup: Setup, changed: Setup) -> dict[str, object]:
    now = flags_of(setup)
    words = []
    for flag, value in flags_of(changed).items():
        if value == now[flag]:
            continue
        name = f"--plan_{flag}" if flag in ("gpus", "nodes") else f"--{flag}"
        if value is False:
            words.append(f"no {name}")
        else:
            words.append(name if value is True else f"{name} {value}")
    return {
        "changes": words,
        "gpu_needed_gib": round(max(map(needed, gpu_phases(changed).values())) / GIB, 1),
        "host_peak_gib": round(max(map(total, host_phases(changed).values())) / GIB),
        "step_seconds": round(step_seconds(changed)),
        "warnings": short_cache(changed),
    }
