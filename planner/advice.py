"""Whether a setup fits, and the fewest changes that would make it fit, tried out one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.memory import gpu_phases, host_phases, sequences_at_once
from planner.setup import GIB, Setup
from planner.time import Shares, step_seconds


def misfits(setup: Setup) -> list[str]:
    """What does not fit, one sentence each; empty if all does."""
    run, h = setup.run, setup.hardware
    found = []
    phases = gpu_phases(setup)
    for name, phase in phases.items():
        if phase.needed > h.gpu_bytes:
            over = (phase.needed - h.gpu_bytes) / GIB
            found.append(
                f"GPU, {name}: needs {phase.needed / GIB:.1f} GiB of {h.gpu_bytes / GIB:.1f}, {over:.1f} too many"
            )
    at_once = sequences_at_once(setup)
    if at_once < 1:
        found.append(
            f"GPU, rollout: --gpu_memory_utilization {run.gpu_memory_utilization:g} leaves the engine "
            f"{phases['rollout'].engine['KV cache'] / GIB:.1f} GiB for its cache, not enough for one sequence of {run.max_model_len} tokens"
        )
    for name, parts in host_phases(setup).items():
        if sum(parts.values()) > h.host_bytes:
            found.append(
                f"host RAM, {name}: needs {sum(parts.values()) / GIB:.0f} GiB of {h.host_bytes / GIB:.0f} on each node"
            )
    return found


@dataclass(frozen=True)
class Change:
    """One flag set to another value."""

    words: str
    apply: Callable[[Setup], Setup]


def levers(setup: Setup) -> list[list[Change]]:
    """What could be changed: one list per lever, the mildest change first."""
    run, p, h, m = setup.run, setup.policy, setup.hardware, setup.model
    longest = run.max_prompt_tokens + run.max_completion_tokens

    def of(part: str, words: str, **values: object) -> Change:
        return Change(words, lambda s: replace(s, **{part: replace(getattr(s, part), **values)}))

    caps = sorted(
        {max(run.micro_batch_tokens // 2**n, longest) for n in range(1, 8)} - {run.micro_batch_tokens}, reverse=True
    )
    sampling = run.generation_gpus or h.gpus
    sizes = [
        n for n in range(run.tensor_parallel_size + 1, h.gpus // h.nodes + 1) if sampling % n == 0 and m.heads % n == 0
    ]
    now = run.gpu_memory_utilization
    shares = sorted((n / 20 for n in range(2, 19) if abs(n / 20 - now) > 0.01), key=lambda share: abs(share - now))
    is_full = not p.lora_rank
    found = [
        [of("policy", "--gradient_checkpointing", gradient_checkpointing=True)] if not p.gradient_checkpointing else [],
        [of("policy", "--offload_activations", offload_activations=True)]
        if p.gradient_checkpointing and not p.offload_activations
        else [],
        [of("policy", "no --gather_parameters_once", gather_parameters_once=False)] if p.gather_parameters_once else [],
        [of("policy", "no --reduce_gradients_once", reduce_gradients_once=False)] if p.reduce_gradients_once else [],
        [of("run", "no --share_prompts", share_prompts=False)] if run.sharers() > 1 else [],
        [of("run", f"--micro_batch_tokens {cap}", micro_batch_tokens=cap) for cap in caps],
        [of("run", f"--gpu_memory_utilization {x:g}", gpu_memory_utilization=x) for x in shares],
        [
            of("run", f"--tensor_parallel_size {n}", tensor_parallel_size=n)
            for n in sizes
            if not run.prompts_per_step % (sampling // n)
        ],
        [of("policy", "--offload_reference", offload_reference=True)]
        if setup.has_reference_model and not p.offload_reference
        else [],
        [of("policy", "--param_dtype bfloat16", param_dtype="bfloat16")]
        if is_full and setup.trained_bytes == 4
        else [],
        [of("policy", f"--offload {x}", offload=x) for x in ("none", "optimizer", "all") if x != p.offload],
        [of("policy", "sleep level 2", sleep_level=2)] if p.sleep_level == 1 else [],
        [of("policy", "sync parameter by parameter", syncs_whole_model=False)] if p.syncs_whole_model else [],
        [of("policy", "head in chunks", keeps_full_logits=False)] if p.keeps_full_logits else [],
        [of("policy", "loading by rank 0", loads_on_every_rank=False)] if p.loads_on_every_rank else [],
        [of("hardware", f"{2 * h.nodes} nodes of {h.gpus // h.nodes} GPUs", nodes=2 * h.nodes, gpus=2 * h.gpus)]
        if not run.prompts_per_step % (2 * setup.engines) and not run.generation_gpus
        else [],
    ]
    return [changes for changes in found if changes]


def solutions(setup: Setup, shares: Shares, at_most: int = 5) -> list[dict[str, object]]:
    """The fewest changes that make the setup fit, tried out, with what they lead to: on the same machines first, then by speed."""

    def applied(changes: tuple[Change, ...]) -> Setup:
        result = setup
        for change in changes:
            result = change.apply(result)
        return result

    def best_of(chosen: tuple[list[Change], ...]) -> list[tuple[float, tuple[Change, ...], Setup]]:
        best = []
        for changes in itertools.product(*chosen):
            changed = applied(changes)
            if not misfits(changed):
                seconds = step_seconds(changed, shares)
                if not best or seconds < 0.98 * best[0][0]:  # of settings that are equally fast, the mildest
                    best = [(seconds, changes, changed)]
        return best

    for count in range(1, 5):
        found = [best for chosen in itertools.combinations(levers(setup), count) for best in best_of(chosen)]
        if found:
            found.sort(key=lambda best: (best[2].hardware.gpus, best[0]))
            return [
                {
                    "changes": [change.words for change in changes],
                    "gpu_needed_gib": round(max(phase.needed for phase in gpu_phases(changed).values()) / GIB, 1),
                    "host_peak_gib": round(max(sum(parts.values()) for parts in host_phases(changed).values()) / GIB),
                    "step_seconds": round(seconds),
                }
                for seconds, changes, changed in found[:at_most]
            ]
    return []
