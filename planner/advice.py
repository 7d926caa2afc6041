"""Whether a setup fits, and the fewest changes that would make it fit. Each is tried out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner.memory import engine_parts, gpu_phases, host_phases, sequences_at_once
from planner.setup import GIB, Setup
from planner.time import Assumed, step_seconds

MOST_CHANGES = 4  # that are tried together


def misfits(setup: Setup) -> list[str]:
    """What does not fit, one sentence each; empty if all does."""
    h, found = setup.hardware, []
    phases = gpu_phases(setup)
    for name, phase in phases.items():
        if phase.needed > h.gpu_bytes:
            needed, has = phase.needed / GIB, h.gpu_bytes / GIB
            found.append(f"GPU, {name}: needs {needed:.1f} GiB of {has:.1f}, {needed - has:.1f} too many")
    if sequences_at_once(setup) < 1:
        share, cache = setup.engine.gpu_memory_utilization, engine_parts(setup)["KV cache"] / GIB
        left = f"--gpu_memory_utilization {share:g} leaves the engine {cache:.1f} GiB for its cache"
        found.append(f"GPU, rollout: {left}, not enough for one sequence of {setup.engine.max_model_len} tokens")
    for name, parts in host_phases(setup).items():
        needed = sum(parts.values())
        if needed > h.host_bytes:
            found.append(f"host RAM, {name}: needs {needed / GIB:.0f} GiB of {h.host_bytes / GIB:.0f} on each node")
    return found


@dataclass(frozen=True)
class Change:
    """Other values for one part of a setup."""

    words: str
    part: str
    values: dict[str, object]

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, **{self.part: replace(getattr(setup, self.part), **self.values)})


def lever(setup: Setup, part: str, flag: str, values: Iterable[object]) -> list[Change]:
    """One change for each of these values but the one that the flag has."""
    others = [value for value in values if value != getattr(getattr(setup, part), flag)]
    return [Change(words_of(flag, value), part, {flag: value}) for value in others]


def words_of(flag: str, value: object) -> str:
    if value is None or isinstance(value, bool):
        return f"--{flag}" if value else f"no --{flag}"
    return f"--{flag} {value}"


def levers(setup: Setup) -> list[list[Change]]:
    """What could be changed: one list per lever, the mildest change first."""
    plan, run, memory, h = setup.plan, setup.run, setup.memory, setup.hardware
    limits = run.max_prompt_tokens, run.max_completion_tokens
    caps = {max(memory.micro_batch_tokens // 2**n, sum(limits)) for n in range(1, 8)}
    now = setup.engine.gpu_memory_utilization
    shares = sorted((n / 20 for n in range(2, 19) if abs(n / 20 - now) > 0.01), key=lambda share: abs(share - now))
    more_shards = [n for n in range(setup.num_shards + 1, h.gpus) if h.gpus % n == 0]
    more_shards += [None] if setup.num_copies > 1 else []
    per_node, divided = h.gpus // h.nodes, math.gcd(h.gpus, setup.model.heads)  # what tensor parallelism divides
    sizes = [n for n in range(run.tensor_parallel_size + 1, per_node + 1) if divided % n == 0]
    sizes = [n for n in sizes if plan.prompts_per_step % (h.gpus // n) == 0 and not setup.has_servers]
    more = Change(f"{2 * h.nodes} nodes of {per_node} GPUs", "hardware", {"nodes": 2 * h.nodes, "gpus": 2 * h.gpus})
    found = [
        lever(setup, "memory", "gradient_checkpointing", [True]),
        lever(setup, "memory", "communicate_once", [False]),
        lever(setup, "memory", "share_prompts", [False] if setup.sharers(*limits) > 1 else []),
        lever(setup, "memory", "micro_batch_tokens", sorted(caps, reverse=True)),
        lever(setup, "engine", "gpu_memory_utilization", shares),
        lever(setup, "engine", "enforce_eager", [True]),
        lever(setup, "memory", "shard_ranks", more_shards),
        lever(setup, "run", "tensor_parallel_size", sizes),
        lever(setup, "memory", "offload_reference", [True] if setup.has_reference_model else []),
        lever(setup, "memory", "param_dtype", [] if setup.has_lora else ["bfloat16"]),
        lever(setup, "memory", "offload", ["none", "optimizer", "all"]),
        [more] if setup.has_servers or plan.prompts_per_step % (2 * setup.num_engines) == 0 else [],
    ]
    return [changes for changes in found if changes]


def best_of(setup: Setup, chosen: tuple[list[Change], ...], assumed: Assumed) -> tuple[float, list[str], Setup] | None:
    """(seconds per step, words, setup) of the fastest that fits, with one change of each lever; None if none fits."""
    best = None
    for changes in itertools.product(*chosen):
        changed = setup
        for change in changes:
            changed = change.apply(changed)
        if not misfits(changed):
            seconds = step_seconds(changed, assumed)
            if best is None or seconds < 0.98 * best[0]:  # of settings that are equally fast, the mildest
                best = seconds, [change.words for change in changes], changed
    return best


def solutions(setup: Setup, assumed: Assumed) -> list[dict[str, object]]:
    """The fewest changes that make the setup fit, with what they lead to: on the same machines first, then by speed."""
    for count in range(1, MOST_CHANGES + 1):
        tried = (best_of(setup, chosen, assumed) for chosen in itertools.combinations(levers(setup), count))
        found = sorted((best for best in tried if best), key=lambda best: (best[2].hardware.gpus, best[0]))
        if found:
            return [
                {
                    "changes": words,
                    "gpu_needed_gib": round(max(phase.needed for phase in gpu_phases(changed).values()) / GIB, 1),
                    "host_peak_gib": round(max(sum(parts.values()) for parts in host_phases(changed).values()) / GIB),
                    "step_seconds": round(seconds),
                }
                for seconds, words, changed in found[:5]
            ]
    return []
