"""The seconds of a step: FLOPs and bytes by formula, over the share of peak speeds that is reached.

It leaves out loading, evaluation, checkpoints, grading, and waiting for the slowest rank.
benchmarks/README.md has published runs beside it, and says how the constants were chosen.
"""

from __future__ import annotations

import math

from model.sizes import MOST_ON_GPU
from plan.memory import REDUCE, cache_bytes_per_token, engine_parts, sequence_bytes
from plan.setup import ModelShape, Setup

# Seconds that no formula of bytes or FLOPs explains.
# The host's part of a step in which each running completion gets a token, at least: without and with CUDA graphs.
TOKEN_STEP = {True: 0.015, False: 0.0025}
TOKEN_HOST = 33e-6  # the host's part for each of these completions
ALL_REDUCE = 15e-6  # a few MB between the GPUs of an engine: two in a layer
PASS = 0.03  # a pass of the trainer over a micro-batch
SWITCH = 5.0  # the engine goes to sleep, wakes up and loads the new weights, once a step
PAUSE = 1.0  # generation servers take new weights, beside the time of their transfer; assumed, not measured
# Counted: the part of a 7B model's `forward_bytes` that --compile leaves. A norm and its sum take 8
# bytes a number, rotary angles 4, the gate 6.
COMPILED = 1 / 3
HEAD_BYTES = 6  # a bf16 logit's, forwards, and as many backwards: it is written, read, and read again
# Shares of the data sheets' speeds that are reached; assumptions.
MEMORY_SHARE = 0.6  # the GPU memory's, in decoding and in the optimizer
STREAM_SHARE = 0.8  # the GPU memory's, between the matrix products of a pass
LINK_SHARE = 0.7  # links, network and bus
# Bytes a parameter that FSDP still moves on one GPU, counted in its code: a gather casts fp32 and copies; a gradient is
# cast and copied, and is added to the sum in each micro-batch.
CAST, COPIED, REDUCED, SUMMED = 6, 4, 14, 12


def forward_flops(model: ModelShape, length: float, num_logits: float) -> float:
    """FLOPs of a forward pass over a sequence of this length, of which `num_logits` positions go through the head.

    2 for each position and number of a matrix; for attention 2 x length^2 x width a layer: half of it is masked.
    The recurrence of linear attention, a few percent of its layer, is left out.
    """
    layers = model.layers * model.layer_matrices * length + model.attention_layers * model.q * length**2
    return 2 * (layers + model.table * num_logits)


def forward_bytes(setup: Setup, model: ModelShape, length: float, num_logits: float) -> tuple[float, float]:
    """Bytes that the layers, and the head, read and write between matrix products in a forward pass.

    A position takes in a layer in eager mode: a norm 36 a number; a sum 6, twice; rotary angles 20; the gate 10; a copy
    for an expert 14: it is made, weighted, put back and summed.
    """
    hidden = 36 * model.norms + 2 * 6 + 14 * model.experts
    position = hidden * model.hidden + 20 * (model.q + model.kv) + 10 * model.intermediate
    layers = model.layers * position * length * setup.compute_bytes / 2
    if setup.memory.compile:
        layers *= COMPILED
    return layers, HEAD_BYTES * setup.logit_bytes / 2 * model.vocab * num_logits


def micro_batches(setup: Setup) -> int:
    """Micro-batches of one rank in one update. Half a sequence of room is left in each."""
    sequence = setup.run.mean_prompt_tokens / setup.sharers + setup.run.mean_completion_tokens
    filled = max(sequence, setup.memory.micro_batch_tokens - sequence / 2)
    sequences = setup.plan.completions_per_step / setup.plan.updates_per_pass / setup.hardware.gpus
    return math.ceil(sequences * sequence / filled)


def traffic(setup: Setup) -> dict[str, float]:
    """Purpose -> bytes that one GPU moves in a step."""
    plan, memory, n = setup.plan, setup.memory, setup.num_shards
    remote = (n - 1) / n  # the share that a GPU does not hold itself
    weights = setup.weight_bytes
    reference = setup.reference_setup.weight_bytes
    per_pass = micro_batches(setup) * plan.updates_per_pass
    trained = per_pass * plan.num_iterations
    # How often weights are gathered for the updates and for a pass, and gradients reduced.
    in_updates, in_pass, reductions = 2 * trained, per_pass, trained
    if memory.communicate_once:
        in_updates, in_pass, reductions = plan.updates_per_step, plan.updates_per_pass, plan.updates_per_step
    in_reference = setup.reference_passes * (per_pass if setup.has_reference_model else in_pass)
    from_host = 0.0
    if memory.offload == "all":  # and gradients to the host
        from_host += in_updates * setup.stored_bytes / n + trained * setup.gradient_bytes / n
    if memory.offload == "optimizer":
        from_host += plan.updates_per_step * 2 * setup.state_bytes / n
    if setup.has_reference_model and memory.offload_reference:
        from_host += in_reference * setup.reference_bytes / n
    copied = 0.0
    if setup.hardware.gpus == 1:  # of the base, unless it is plain, and of adapters
        base = setup.model.parameters * (not setup.is_plain)
        masters = setup.adapters if setup.has_lora else base
        gather = COPIED * (base + setup.adapters) + CAST * masters * (setup.trained_bytes > setup.compute_bytes)
        copied = gather * (in_updates + setup.old_logprob_passes * in_pass)
        if masters:
            copied += setup.trainable * (REDUCED * reductions + SUMMED * trained)
    return {
        "copies on one GPU": copied,
        "all-gather, log-probs": setup.old_logprob_passes * in_pass * weights * remote,
        "all-gather, reference": in_reference * reference * remote,
        "all-gather, update": in_updates * weights * remote,
        "reduce-scatter": reductions * setup.trainable * REDUCE * remote,
        "sync": weights * remote,
        # From the main rank's GPU, one server after the other.
        "to servers": weights * setup.num_engines * setup.has_servers,
        "to and from host": from_host,
    }


def link_speed(setup: Setup, members: int) -> float:
    """Bytes per second of a collective on one GPU, over so many neighbouring ranks.

    Across nodes the cards of all members in a node carry what the node does not have.
    """
    h = setup.hardware
    nodes = members // math.gcd(members, h.ranks_per_node)  # the largest number, if groups differ
    if nodes == 1:
        return LINK_SHARE * h.link_speed
    lacks = (members - 1) / members / ((nodes - 1) / nodes)  # what a GPU lacks, over what its node lacks
    return LINK_SHARE * min(h.link_speed, h.network_speed * members / nodes * lacks)


def rollout_seconds(setup: Setup) -> float:
    """Prompts, then tokens: the engine is full until the last completions run; the longest goes on alone to the limit.

    A step of a token reads the weights, or takes as long as its FLOPs. Reads of the cache and what the ranks of an
    engine exchange are added. The host prepares the next step meanwhile: the slower of the two counts. So more cache,
    which makes fewer steps, is never slower.
    """
    plan, run, h, m = setup.plan, setup.run, setup.hardware, setup.model
    tp = setup.servers.tensor_parallel_size
    prompt, completion = run.mean_prompt_tokens, run.mean_completion_tokens
    flops = setup.flops * tp
    memory = h.memory_speed * MEMORY_SHARE
    sequences = setup.completions_per_engine
    tokens = sequences * completion
    prompts = sequences / plan.group_size * prompt
    steps = tokens / running_sequences(setup)
    alone = max(run.longest_completion - completion, 0)
    # Servers sample the next steps meanwhile; a partial rollout waits for groups, not for the longest of all.
    if run.partial_rollouts or (setup.servers.in_flight and plan.steps_ahead > 1):
        alone = 0
    weights = setup.weight_bytes / tp / memory
    lone = m.active_parameters * setup.compute_bytes / tp / memory  # a token reads its experts alone
    prefill = forward_flops(m, prompt, 1) * sequences / plan.group_size / flops
    decode = max(steps * weights, tokens * forward_flops(m, 1, 1) / flops)
    cache = tokens * (prompt + completion / 2) * cache_bytes_per_token(setup) / memory
    exchanged = 4 * m.layers * m.hidden * setup.compute_bytes * (tp - 1) / tp * (tokens + prompts)
    links = exchanged / link_speed(setup, tp)
    reduced = 2 * m.layers * ALL_REDUCE * (tp > 1)
    step = TOKEN_STEP[setup.engine.enforce_eager]
    together = max(decode + cache + links + steps * reduced, steps * step, tokens * TOKEN_HOST)
    return prefill + together + alone * max(lone + reduced, step)


def running_sequences(setup: Setup) -> float:
    """Completions that an engine works on at a time: all of its step's, or as many as the cache or vLLM takes."""
    length = setup.run.mean_prompt_tokens + setup.run.mean_completion_tokens
    in_cache = engine_parts(setup)["KV cache"] / sequence_bytes(setup, length)
    return max(1.0, min(setup.completions_per_engine, MOST_ON_GPU, in_cache))


def step_seconds(setup: Setup) -> float:
    """The phases one after the other; with --steps_ahead the servers sample a coming step while the ranks train."""
    seconds = phase_seconds(setup)
    total = sum(seconds.values())
    if setup.plan.steps_ahead:
        training = total - seconds["rollout"] - seconds["sync"]
        total -= min(seconds["rollout"], training)
    return total


def pass_seconds(setup: Setup, products: float = 1, layers: float = 1, head: float = 1) -> float:
    """A pass over the step's completions: a forward one, or so many times its products, bytes of layers and of head."""
    h = setup.hardware
    prompt, completion = setup.run.mean_prompt_tokens, setup.run.mean_completion_tokens
    flops = forward_flops(setup.model, prompt + completion, completion)
    flops -= forward_flops(setup.model, prompt, 0) * (1 - 1 / setup.sharers)
    length = completion + prompt / setup.sharers
    layer_bytes, head_bytes = forward_bytes(setup, setup.model, length, completion)
    moved = layers * layer_bytes + head * head_bytes
    seconds = products * flops / setup.flops + moved / (h.memory_speed * STREAM_SHARE)
    return setup.plan.completions_per_step / h.gpus * seconds


def phase_seconds(setup: Setup) -> dict[str, float]:
    """Phase -> seconds. `step_seconds` says what a step makes of them."""
    plan, h, n = setup.plan, setup.hardware, setup.num_shards
    moved = traffic(setup)
    link = link_speed(setup, n)
    passes = micro_batches(setup) * plan.updates_per_pass * PASS
    reference = setup.reference_passes * (pass_seconds(setup.reference_setup) + passes)
    reference += moved["all-gather, reference"] / link
    logprobs = setup.old_logprob_passes * (pass_seconds(setup) + passes) + moved["all-gather, log-probs"] / link
    recomputed = setup.memory.gradient_checkpointing
    backward = (1 if setup.has_lora else 2) + recomputed
    update = pass_seconds(setup, products=1 + backward, layers=3 + recomputed, head=2)
    exchange = (moved["all-gather, update"] + moved["reduce-scatter"]) / link
    exchange += moved["copies on one GPU"] / (h.memory_speed * STREAM_SHARE)
    optimizer = plan.updates_per_step * (2 * setup.state_bytes + 3 * setup.gradient_bytes) / n
    if setup.memory.offload == "all":  # there the optimizer works in host RAM, about ten times slower
        optimizer *= 10
    sync = SWITCH + moved["sync"] / link
    if setup.has_servers:
        speed = h.link_speed if h.nodes == 1 else h.network_speed
        sync = PAUSE + moved["sync"] / link + moved["to servers"] / (LINK_SHARE * speed)
    seconds = {
        "rollout": rollout_seconds(setup),
        "logprobs": logprobs,
        "update": (update + passes * (1 + backward)) * plan.num_iterations + exchange,
        "host transfers": moved["to and from host"] / (h.host_speed * LINK_SHARE),
        "optimizer": optimizer / (h.memory_speed * MEMORY_SHARE),
        "sync": sync,
    }
    seconds["update" if setup.run.over_vocabulary else "logprobs"] += reference
    if setup.critic:  # a pass for values, then updates
        own = phase_seconds(setup.critic_setup)
        updates = sum(own[name] for name in ("update", "host transfers", "optimizer"))
        seconds["critic"] = pass_seconds(setup.critic_setup) + passes + setup.critic_passes * updates
    return seconds
