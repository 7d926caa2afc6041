"""How long a step takes, and what it moves: FLOPs and bytes by formula, over peak speeds times the share of them that is reached.

An estimate for planning, not a measurement. Left out: loading, evaluation, checkpoints, grading, and what waits for the slowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.memory import REDUCE, engine_parts, saved_per_layer
from planner.setup import COMPUTE, ModelShape, Setup


@dataclass(frozen=True)
class Shares:
    """What is assumed, each from 0 to 1."""

    flops: float  # of peak FLOPs, in passes over whole sequences
    memory: float  # of the GPU memory's speed, in decoding and in the optimizer
    link: float  # of the speed between GPUs, nodes, and to host RAM
    length: float  # mean length of prompts and completions, as a share of their limits


def training_flops(model: ModelShape, lengths: list[int]) -> int:
    """FLOPs of a forward and backward pass over sequences of these lengths: 6 a parameter and token, and causal attention.

    The convention of verl's flops counter: embedding and head count as matrices, biases and norms do not, attention is 6 x length^2 x
    width a layer (half of the square is masked).
    """
    matrices = model.layers * sum(n * m for n, m in model.projections.values()) + 2 * model.vocab * model.hidden
    return 6 * matrices * sum(lengths) + 6 * model.layers * model.q * sum(length**2 for length in lengths)


def micro_batches(setup: Setup, shares: Shares) -> int:
    """Micro-batches of one rank in one update, for sequences of mean length."""
    run = setup.run
    prompt, completion = shares.length * run.max_prompt_tokens, shares.length * run.max_completion_tokens
    tokens = run.completions / run.updates_per_pass * (prompt / run.sharers(shares.length) + completion)
    return max(1, -(-int(tokens) // (run.micro_batch_tokens * setup.ranks)))


def passes_without_gradient(setup: Setup) -> float:
    """Passes over the whole rollout: the reference's, and the old log-probs' of all updates or of all but the first."""
    run = setup.run
    return run.has_kl + (1 if run.needs_first_logprobs else 1 - 1 / run.updates_per_pass)


def traffic(setup: Setup, shares: Shares) -> dict[str, float]:
    """Bytes that one training GPU moves in a step, by what for."""
    m, run, p = setup.model, setup.run, setup.policy
    away = (setup.ranks - 1) / setup.ranks
    per_pass = micro_batches(setup, shares) * run.updates_per_pass
    updates = run.updates_per_pass * run.passes_per_step
    trained = per_pass * run.passes_per_step
    in_updates = updates if p.gather_parameters_once else 2 * trained
    in_pass = run.updates_per_pass if p.gather_parameters_once else per_pass  # of the policy, without a gradient
    of_reference = run.has_kl * (per_pass if setup.has_reference_model else in_pass)
    without_gradient = of_reference + (passes_without_gradient(setup) - run.has_kl) * in_pass
    from_host = in_updates * setup.stored_bytes / setup.ranks if p.offload == "all" else 0.0
    if p.offload == "optimizer":
        from_host += updates * 2 * setup.state_bytes / setup.ranks
    if p.offload == "all":
        from_host += trained * setup.trainable * setup.trained_bytes / setup.ranks  # gradients, to the host
    if p.offload_activations:
        per_layer = 2 * m.hidden * run.micro_batch_tokens if p.gradient_checkpointing else saved_per_layer(setup)
        from_host += 2 * trained * m.layers * per_layer
    if setup.has_reference_model and p.offload_reference:
        from_host += per_pass * m.parameters * COMPUTE / setup.ranks
    return {
        "all-gather, log-probs": without_gradient * m.parameters * COMPUTE * away,
        "all-gather, update": in_updates * m.parameters * COMPUTE * away,
        "reduce-scatter": (updates if p.reduce_gradients_once else trained) * setup.trainable * REDUCE * away,
        "sync": m.parameters * COMPUTE * away,
        "to and from host": from_host,
    }


def link_speed(setup: Setup, shares: Shares) -> float:
    """Bytes per second of a collective on one GPU: by the links in the node, or by its network cards together."""
    h = setup.hardware
    if h.nodes == 1:
        return h.link_speed * shares.link
    return shares.link * min(h.link_speed, h.network_speed * (h.gpus / h.nodes) * h.nodes / (h.nodes - 1))


def rollout_seconds(setup: Setup, shares: Shares) -> float:
    """Prompts at the speed of FLOPs; then tokens in as many rounds as the cache makes necessary, each reading weights and cache once."""
    run, h, tp = setup.run, setup.hardware, setup.run.tensor_parallel_size
    prompt, completion = shares.length * run.max_prompt_tokens, shares.length * run.max_completion_tokens
    sequences = -(-run.completions // setup.engines)
    per_sequence = setup.model.kv_bytes_per_token / min(tp, setup.model.kv_heads)
    cache = max(engine_parts(setup)["KV cache"], per_sequence)
    at_once = max(
        1.0, min(sequences, 1024, cache / (per_sequence * (prompt + completion)))
    )  # vLLM: at most 1024 by default
    flops = training_flops(setup.model, [1]) / 3 * at_once / tp
    read = setup.model.parameters * COMPUTE / tp + at_once * per_sequence * (prompt + completion / 2)
    token = max(flops / (h.flops * shares.flops), read / (h.memory_speed * shares.memory))
    prefill = (
        training_flops(setup.model, [int(prompt)]) / 3 * sequences / run.group_size / (tp * h.flops * shares.flops)
    )
    return prefill + max(sequences * completion / at_once, run.max_completion_tokens) * token


def phase_seconds(setup: Setup, shares: Shares) -> dict[str, float]:
    """Phase -> seconds of a step. Communication hides behind computation where it is shorter; transfers from the host do not."""
    run, h = setup.run, setup.hardware
    moved = traffic(setup, shares)
    prompt, length = (
        int(shares.length * n) for n in (run.max_prompt_tokens, run.max_prompt_tokens + run.max_completion_tokens)
    )
    saved = training_flops(setup.model, [prompt]) * (1 - 1 / run.sharers(shares.length))
    rollout_flops = run.completions * (training_flops(setup.model, [length]) - saved) / setup.ranks
    speed, link = h.flops * shares.flops, link_speed(setup, shares)
    forward = rollout_flops / 3 * passes_without_gradient(setup) / speed
    factor = (2 / 3 if setup.policy.lora_rank else 1) + (1 / 3 if setup.policy.gradient_checkpointing else 0)
    backward = rollout_flops * factor * run.passes_per_step / speed
    updates = run.updates_per_pass * run.passes_per_step
    on_gpu = updates * (2 * setup.state_bytes + 3 * setup.trainable * setup.trained_bytes) / setup.ranks
    host = (
        10 if setup.policy.offload == "all" else 1
    )  # there the step runs on the host's memory, about ten times slower
    return {
        "rollout": rollout_seconds(setup, shares),
        "logprobs": max(forward, moved["all-gather, log-probs"] / link),
        "update": max(backward, (moved["all-gather, update"] + moved["reduce-scatter"]) / link),
        "host transfers": moved["to and from host"] / (h.host_speed * shares.link),
        "optimizer": on_gpu * host / (h.memory_speed * shares.memory),
        "sync": moved["sync"] / link,
    }


def step_seconds(setup: Setup, shares: Shares) -> float:
    """Sampling and training one after the other, or with GPUs of their own beside each other."""
    seconds = phase_seconds(setup, shares)
    training = sum(seconds.values()) - seconds["rollout"]
    return max(seconds["rollout"], training) if setup.run.generation_gpus else seconds["rollout"] + training
