"""How long a step takes, and what it moves: FLOPs and bytes by formula, over the share of peak speeds that is reached.

An estimate for planning, not a measurement. It leaves out loading, evaluation, checkpoints, grading, and waiting for
the slowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.sizes import MOST_ON_GPU
from planner.memory import REDUCE, cache_bytes_per_token, engine_parts, kept_per_layer
from planner.setup import COMPUTE, ModelShape, Setup


@dataclass(frozen=True)
class Shares:
    """What is assumed, each from 0 to 1."""

    flops: float  # of peak FLOPs, in passes over whole sequences
    memory: float  # of the GPU memory's speed, in decoding and in the optimizer
    link: float  # of the speed between GPUs, between nodes, and to host RAM
    length: float  # mean length of prompts and completions, as a share of their limits


def training_flops(model: ModelShape, lengths: list[int]) -> int:
    """FLOPs of a forward and backward pass over sequences of these lengths.

    The convention of verl's FLOPs counter: 6 for each token and number of a matrix, embedding and head included; for
    attention 6 x length^2 x width a layer, because half of the square is masked.
    """
    of_layer = sum(inputs * outputs for inputs, outputs in model.projections.values())
    matrices = model.layers * of_layer + 2 * model.table
    return 6 * matrices * sum(lengths) + 6 * model.layers * model.q * sum(length**2 for length in lengths)


def micro_batches(setup: Setup, shares: Shares) -> int:
    """Micro-batches of one rank in one update."""
    plan, run = setup.plan, setup.run
    prompt, completion = shares.length * run.max_prompt_tokens, shares.length * run.max_completion_tokens
    tokens = plan.completions_per_step / plan.updates_per_pass * (prompt / setup.sharers(shares.length) + completion)
    return max(1, -(-int(tokens) // (setup.memory.micro_batch_tokens * setup.num_trainers)))


def traffic(setup: Setup, shares: Shares) -> dict[str, float]:
    """Bytes that one GPU moves in a step, by what for."""
    plan, run, memory, n = setup.plan, setup.run, setup.memory, setup.num_trainers
    per_iteration = micro_batches(setup, shares) * plan.updates_per_pass
    trained = per_iteration * plan.num_iterations
    is_once = memory.gather_parameters_once
    in_updates = plan.updates_per_step if is_once else 2 * trained
    in_pass = plan.updates_per_pass if is_once else per_iteration  # of the policy, without a gradient
    of_reference = run.has_kl * (per_iteration if setup.has_reference_model else in_pass)
    without_gradient = of_reference + setup.old_logprob_passes * in_pass
    reductions = plan.updates_per_step if memory.reduce_gradients_once else trained
    weights, others = setup.model.parameters * COMPUTE, (n - 1) / n
    from_host = 0.0
    if memory.offload == "all":  # and gradients to the host
        from_host += in_updates * setup.stored_bytes / n + trained * setup.gradient_bytes / n
    if memory.offload == "optimizer":
        from_host += plan.updates_per_step * 2 * setup.state_bytes / n
    if memory.offload_activations:
        from_host += 2 * trained * setup.model.layers * kept_per_layer(setup)
    if setup.has_reference_model and memory.offload_reference:
        from_host += per_iteration * weights / n
    return {
        "all-gather, log-probs": without_gradient * weights * others,
        "all-gather, update": in_updates * weights * others,
        "reduce-scatter": reductions * setup.trainable * REDUCE * others,
        "sync": weights * others,
        "to and from host": from_host,
    }


def link_speed(setup: Setup, shares: Shares) -> float:
    """Bytes per second of a collective on one GPU: by the links in the node, or by its network cards together."""
    h = setup.hardware
    if h.nodes == 1:
        return h.link_speed * shares.link
    return shares.link * min(h.link_speed, h.network_speed * (h.gpus / h.nodes) * h.nodes / (h.nodes - 1))


def rollout_seconds(setup: Setup, shares: Shares) -> float:
    """Prompts at the speed of FLOPs, then tokens in as many rounds as the cache needs. Each reads weights and cache."""
    plan, run, h, tp = setup.plan, setup.run, setup.hardware, setup.run.tensor_parallel_size
    prompt, completion = shares.length * run.max_prompt_tokens, shares.length * run.max_completion_tokens
    sequences = -(-plan.completions_per_step // setup.num_engines)
    per_token = cache_bytes_per_token(setup)
    cache = max(engine_parts(setup)["KV cache"], per_token)
    at_once = max(1.0, min(sequences, MOST_ON_GPU, cache / (per_token * (prompt + completion))))
    flops = training_flops(setup.model, [1]) / 3 * at_once / tp
    read = setup.model.parameters * COMPUTE / tp + at_once * per_token * (prompt + completion / 2)
    token = max(flops / (h.flops * shares.flops), read / (h.memory_speed * shares.memory))
    of_prompts = training_flops(setup.model, [int(prompt)]) / 3 * sequences / plan.group_size
    prefill = of_prompts / (tp * h.flops * shares.flops)
    return prefill + max(sequences * completion / at_once, run.max_completion_tokens) * token


def phase_seconds(setup: Setup, shares: Shares) -> dict[str, float]:
    """Phase -> seconds. A step is their sum. Communication hides behind longer computation, transfers do not."""
    plan, run, h, memory = setup.plan, setup.run, setup.hardware, setup.memory
    moved, link = traffic(setup, shares), link_speed(setup, shares)
    prompt = int(shares.length * run.max_prompt_tokens)
    length = int(shares.length * (run.max_prompt_tokens + run.max_completion_tokens))
    shared = training_flops(setup.model, [prompt]) * (1 - 1 / setup.sharers(shares.length))
    flops = plan.completions_per_step * (training_flops(setup.model, [length]) - shared) / setup.num_trainers
    speed = h.flops * shares.flops
    forward = flops / 3 * (run.has_kl + setup.old_logprob_passes) / speed
    passes = (2 / 3 if setup.has_lora else 1) + (1 / 3 if memory.gradient_checkpointing else 0)
    backward = flops * passes * plan.num_iterations / speed
    optimizer = plan.updates_per_step * (2 * setup.state_bytes + 3 * setup.gradient_bytes) / setup.num_trainers
    slower = 10 if memory.offload == "all" else 1  # there the optimizer works in host RAM, about ten times slower
    return {
        "rollout": rollout_seconds(setup, shares),
        "logprobs": max(forward, moved["all-gather, log-probs"] / link),
        "update": max(backward, (moved["all-gather, update"] + moved["reduce-scatter"]) / link),
        "host transfers": moved["to and from host"] / (h.host_speed * shares.link),
        "optimizer": optimizer * slower / (h.memory_speed * shares.memory),
        "sync": moved["sync"] / link,
    }
