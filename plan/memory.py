"""The memory that a run takes: formulas for each phase, in bytes. Pure functions of a `Setup`.

Read `gpu_phases` (one GPU), `host_phases` (one node) and `checkpoint_bytes` (disk) first. The
formulas of the passes were fitted to the storages of the real model; `benchmarks/bench_memory.py`
compares them with real updates. They assume several micro-batches per update, full of completion
tokens. --micro_batch_tokens does not bound attention's copy of shared keys and values: for it,
groups of the shortest completions are assumed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from model.sizes import HEAD_CHUNK_LOGITS, HEAD_GROWTH, OPTIMIZER_CHUNK
from plan.setup import GIB, Setup
from runtime.ways_out import LARGER_SHARE, WAYS_OUT

REDUCE = 4  # gradients are reduced in fp32
FRAGMENTATION = 1.05  # what torch's allocator holds, over the live tensors
CONTEXT = 2.5 * GIB  # per GPU: CUDA context, NCCL buffers, workspaces of the matrix products
# The engine beside weights and cache, without and with CUDA graphs (vLLM #11743: 2.95 + 1.27 GiB).
ENGINE_WORKING = {True: 2.5 * GIB, False: 4.0 * GIB}
# NCCL buffers, graphs. vLLM's issue 47654 logged 1.4 GiB of these.
ENGINE_ASLEEP = {True: 0.5 * GIB, False: 2.0 * GIB}
# Bytes of a parameter -> bytes of an element that the optimizer works on: fp32 copies or moments.
CHUNK_BYTES = {2: 28, 4: 8}
# Host RAM of one rank without weights: libraries, CUDA's host side, pinned buffers, the rollout. One
# rank on an H100 took 11.2 to 12.4 GiB; several share what they map of libraries.
PROCESS_HOST = 12 * GIB

Parts = dict[str, float]  # bytes by what they are for
# The engine's parts.
ENGINE = ("engine weights", "engine working", "KV cache", "engine asleep", "weights arriving")


def total(parts: Parts) -> float:
    return sum(parts.values())


def without(parts: Parts, *names: str) -> Parts:
    return {name: size for name, size in parts.items() if name not in names}


def largest(moments: list[Parts]) -> Parts:
    return max(moments, key=total)


def needed(parts: Parts) -> float:
    """Bytes that a GPU must have for these tensors: the trainer's allocator does not fragment the engine's share."""
    engine = sum(parts.get(name, 0) for name in ENGINE)
    return FRAGMENTATION * total(without(parts, *ENGINE)) + engine + CONTEXT


def gpu_phases(setup: Setup) -> dict[str, Parts]:
    """Phase -> what a GPU holds at its peak."""
    m = setup.model
    # The batches of a step stay on the GPU, with their routes, until the next step's take their place.
    updating = static_parts(setup, on_host=False) | {"routes": setup.routes_bytes}
    static = without(updating, "gradients")
    awake = engine_parts(setup)
    asleep = {"engine asleep": ENGINE_ASLEEP[setup.engine.enforce_eager]}
    tensor = max(m.table, m.largest)
    loaded = tensor * (setup.compute_bytes if setup.has_lora else setup.trained_bytes)
    if setup.has_reference_model:
        loaded = max(loaded, tensor * setup.reference_itemsize)
    # The largest parameter and its shard; the next is gathered while the engine copies this one.
    gathered = setup.compute_bytes * (tensor * (1 + 1 / setup.num_shards) + m.largest)
    # vLLM pads a table of no multiple of 64 rows, until a sync ends: the head comes beside it.
    padded = 0 if m.is_tied or m.vocab % 64 == 0 else setup.table_bytes
    passes = largest([logprobs_peak(setup), logprobs_peak(setup.reference_setup)])
    updates = [update_peak(setup)] + ([update_peak(setup.critic_setup)] if setup.critic else [])
    phases = {
        "load": without(largest([static, without(static, "optimizer") | {"one tensor": loaded}]), "routes"),
        "rollout": static | awake,
        "logprobs": static | passes | shards_from_host(setup) | asleep,
        "update": static | largest(updates) | asleep,
        "optimizer": updating | optimizer_peak(setup) | asleep,
        "sync": static | {"gathered": gathered} | without(awake, "KV cache") | {"weights arriving": padded},
    }
    if setup.has_servers:
        del phases["rollout"]
        phases = {name: without(parts, *ENGINE) for name, parts in phases.items()}
        # A server takes a tensor at a time, and keeps the layer that it is in.
        arriving = setup.table_bytes + setup.compute_bytes * m.layer_parameters / setup.servers.tensor_parallel_size
        phases["server"] = awake | {"weights arriving": arriving + padded}
    if (not setup.run.has_kl or setup.run.over_vocabulary) and not setup.old_logprob_passes:
        del phases["logprobs"]
    return phases


def static_parts(setup: Setup, on_host: bool) -> Parts:
    """Bytes that outlast a phase: on one GPU, or in the host RAM of one node."""
    parts = {"parameters": setup.stored_bytes, "gradients": setup.gradient_bytes, "optimizer": setup.state_bytes}
    if setup.critic:  # its gradients are there in its own update alone
        parts |= {"critic": setup.critic_setup.stored_bytes, "critic's optimizer": setup.critic_setup.state_bytes}
    offloaded = {"none": [], "optimizer": ["optimizer", "critic's optimizer"], "all": [*parts]}[setup.memory.offload]
    if setup.has_reference_model:
        parts["reference"] = setup.reference_bytes
    if setup.memory.offload_reference:
        offloaded.append("reference")
    ranks = setup.hardware.ranks_per_node if on_host else 1
    return {name: size * ranks / setup.num_shards for name, size in parts.items() if (name in offloaded) == on_host}


def shards_from_host(setup: Setup) -> Parts:
    """Bytes on one GPU of the shards that are on their way in a pass: of a layer, and of the next one."""
    if setup.memory.offload == "all":
        model = setup.model
    elif setup.has_reference_model and setup.memory.offload_reference:
        model = setup.reference_setup.model
    else:
        return {}
    return {"shards from host": model.layer_parameters * setup.compute_bytes / setup.num_shards * 2}


def engine_parts(setup: Setup) -> Parts:
    """Bytes on one GPU of the awake engine. It takes its whole share of the GPU: the rest of it is KV cache."""
    weights = setup.weight_bytes / setup.servers.tensor_parallel_size
    working = ENGINE_WORKING[setup.engine.enforce_eager]
    share = setup.engine.gpu_memory_utilization * setup.hardware.gpu_bytes
    cache = max(share - weights - working, 0.0)
    return {"engine weights": weights, "engine working": working, "KV cache": cache}


def cache_bytes_per_token(setup: Setup) -> float:
    """Keys and values of a token on one GPU of its engine, which divides them by heads."""
    parts = min(setup.servers.tensor_parallel_size, setup.model.kv_heads)
    return setup.model.kv_per_token * setup.compute_bytes / parts


def sequence_bytes(setup: Setup, length: float) -> float:
    """Bytes that a sequence of this length takes of the cache on one GPU of its engine."""
    return length * cache_bytes_per_token(setup) + setup.model.state_bytes / setup.servers.tensor_parallel_size


def sequences_at_once(setup: Setup) -> float:
    """Sequences of the full model length that fit into one engine's cache. Below 1 vLLM does not start."""
    return engine_parts(setup)["KV cache"] / sequence_bytes(setup, setup.engine.max_model_len)


def misfits(setup: Setup) -> list[str]:
    """A sentence for each phase that does not fit, with flags to change; [] if all do."""
    room, sentences = setup.hardware.gpu_bytes, []
    for name, parts in gpu_phases(setup).items():
        if (size := needed(parts)) > room:
            lack = f"needs {size / GIB:.1f} GiB of {room / GIB:.1f}, {(size - room) / GIB:.1f} GiB too many"
            sentences.append(f"GPU, {name}: {lack}; {ways_out(setup, name)}")
    if sequences_at_once(setup) < 1:
        share = setup.engine.gpu_memory_utilization
        engine = total(without(engine_parts(setup), "KV cache"))
        sentences.append(
            f"GPU, rollout: --gpu_memory_utilization {share:g} is {share * room / GIB:.1f} GiB, "
            f"of which the engine needs {engine / GIB:.1f} without its cache: "
            f"not enough for one sequence of {setup.engine.max_model_len} tokens; {LARGER_SHARE}"
        )
    room = setup.hardware.host_bytes
    for name, parts in host_phases(setup).items():
        if (size := total(parts)) > room:
            lack = f"needs {size / GIB:.0f} GiB of {room / GIB:.0f} on each node"
            sentences.append(f"host RAM, {name}: {lack}; {WAYS_OUT['host'][0]}")
    return sentences


def ways_out(setup: Setup, name: str) -> str:
    """The flags to change for a phase on a GPU."""
    words, _ = WAYS_OUT["sample" if name == "rollout" else name]
    memory = replace(setup.memory, compile=True, gradient_checkpointing=False)
    compiled = needed(gpu_phases(replace(setup, memory=memory))["update"])
    if name == "update" and compiled < needed(gpu_phases(setup)["update"]):
        words += f", or --compile without --gradient_checkpointing, which needs {compiled / GIB:.1f} GiB"
    return words


# The passes ----------------------------------------------------------------------------------------------------------


def update_peak(setup: Setup) -> Parts:
    """Bytes on one GPU at most in a backward pass, with the gradients of an earlier micro-batch.

    The largest of five moments: the head, with what all layers keep; the last layer; the layer before it, while the
    last one is reduced; the reduction of embedding and head; where they are tied, the sum of their gradients.
    """
    m, tokens, compute = setup.model, setup.counted_tokens, setup.compute_bytes
    is_once, is_sharded = setup.memory.communicate_once, not setup.is_plain
    root = is_sharded * compute * m.root_parameters
    layer = compute * (is_sharded * m.layer_parameters + setup.adapter_per_layer)
    one = root + (m.layers if is_once else 1) * layer  # gathered at a time
    two = one if is_once else one + layer
    if setup.memory.gradient_checkpointing:
        kept_name, kept = "checkpoints", 2 * tokens * m.hidden  # a layer's input
    else:
        kept_name, kept = "activations", saved_per_layer(setup)
    last_norm = (8 if setup.has_lora else 10) * tokens * m.hidden
    head_gradient = is_sharded * setup.head_gradient_bytes
    trained_per_layer = setup.adapter_per_layer if setup.has_lora else is_sharded * m.layer_parameters
    # A logit and, for pieces or the cast of its gradient, 3; over the vocabulary four fp32 numbers, two of each model.
    logit = 16 if setup.run.over_vocabulary else 3 + setup.logit_bytes
    in_layer = {"one layer": backward_of_layer(setup), "gathered": two}
    head = {
        kept_name: m.layers * kept + last_norm,
        "gathered": one,
        "logits": setup.head_gradient_bytes + logit * logits_at_once(setup),
    }
    if setup.run.over_vocabulary:  # the head keeps the reference's last hidden states and its head
        teacher = setup.reference_setup.model
        head["teacher"] = (setup.memory.micro_batch_tokens + teacher.vocab) * teacher.hidden * compute
    moments = [
        head,
        {kept_name: m.layers * kept} | in_layer | {"reduction": head_gradient},
        {kept_name: (m.layers - 1) * kept} | in_layer | {"reduction": head_gradient + REDUCE * trained_per_layer},
    ]
    if setup.run.over_vocabulary:  # the reference's pass, before the policy's
        moments.append(logprobs_peak(setup.reference_setup))
    if is_sharded and not setup.has_lora:
        moments.append({"gathered": is_once * one, "reduction": root_reduction(setup)})
        if m.is_tied:  # two gradients, and their sum
            reduction = 3 * setup.table_bytes + REDUCE * m.layer_parameters
            moments.append({"gathered": one if is_once else root, "reduction": reduction})
    if is_once:  # their shards come only as the whole ones go, in the last backward pass
        return largest(moments) | {"gradients, whole": REDUCE * setup.trainable}
    return {"gradients": gradients_in_passes(setup)} | largest(moments)


def root_reduction(setup: Setup) -> float:
    """Bytes on one GPU while the gradients of embedding, head and last norm are reduced."""
    trained = setup.model.root_trained
    itemsize = REDUCE
    if setup.trained_bytes == 2 and not has_sums_apart(setup):  # cast, to be added to the shard
        itemsize += setup.compute_bytes
    reduced = itemsize * trained / setup.num_shards + setup.table_bytes * (setup.num_shards > 1)
    unreduced = (trained - setup.model.hidden) * setup.compute_bytes
    return REDUCE * trained + max(unreduced, reduced)


def has_sums_apart(setup: Setup) -> bool:
    """Whether FSDP keeps apart, in fp32 and on the GPU, what copies of the policy add up in the last micro-batch."""
    return setup.num_shards < setup.hardware.gpus and not setup.memory.communicate_once


def gradients_in_passes(setup: Setup) -> float:
    """Bytes on one GPU of the gradients' shards."""
    shards = static_parts(setup, on_host=False).get("gradients", 0)
    if not has_sums_apart(setup):
        return shards
    sums = REDUCE * setup.trainable / setup.num_shards
    return sums + shards if setup.trained_bytes < REDUCE else sums


def logits_at_once(setup: Setup) -> int:
    """Logits that are made at a time."""
    vocab = setup.model.vocab
    most = HEAD_CHUNK_LOGITS if setup.run.over_vocabulary else setup.memory.head_growth * HEAD_CHUNK_LOGITS
    return min(setup.memory.micro_batch_tokens, most // vocab) * vocab


def with_grown_head(setup: Setup) -> Setup:
    """The setup with the largest chunks of logits that are of use and fit, `HEAD_GROWTH` times the least at most.

    A run takes them (`gate.machine.head_growth`); the dry run's report is of the least, which every run needs.
    """
    grown = replace(setup, memory=replace(setup.memory, head_growth=2 * setup.memory.head_growth))
    is_of_use = logits_at_once(grown) > logits_at_once(setup) and grown.memory.head_growth <= HEAD_GROWTH
    phases = gpu_phases(grown)
    most = max(needed(phases[name]) for name in ("logprobs", "update") if name in phases)
    return with_grown_head(grown) if is_of_use and most <= setup.hardware.gpu_bytes else setup


def backward_of_layer(setup: Setup) -> float:
    """Bytes of a layer in its backward pass: the largest of MLP, attention, and weights with the norm's gradients."""
    m, tokens, compute = setup.model, setup.counted_tokens, setup.compute_bytes
    norms = 9 if setup.has_lora else 11
    mlp = tokens * (4 * m.intermediate + (2 + 4 * m.experts) * m.hidden)  # gradients of experts' inputs and outputs
    weights = 0
    if not setup.has_lora:
        matrix = compute * m.largest
        mlp += matrix
        matrices = matrix * (1.5 if m.experts else 3)  # gate and up are one stack of experts
        weights = max(compute * m.layer_parameters, matrices + 30 * tokens * m.hidden)
    # Copies of keys and values, and their gradients; of grouped queries first one a query head.
    copies = setup.keys_per_position * (8 * m.kv + (4 * m.q if m.kv < m.q else 0))
    attention = tokens * (copies + 12 * m.q + 4 * m.head_dim + norms * m.hidden + head_norms(setup))
    attention = max(attention, row_tokens(setup) * (7 * m.hidden + 8 * m.linear_keys + 100 * m.linear_values))
    saved = saved_per_layer(setup)
    if setup.memory.gradient_checkpointing:
        return max(mlp + saved, attention, weights)
    return max(mlp, attention - saved, weights)


def row_tokens(setup: Setup) -> float:
    """Tokens in the rows of linear attention, which repeat a shared prompt, at most; 0 without it.

    What they take is that of transformers' own code; with flash-linear-attention it is less.
    """
    return setup.counted_tokens * setup.keys_per_position if setup.model.linear_values else 0


def saved_per_layer(setup: Setup) -> float:
    """Bytes that the backward pass of a layer needs from its forward pass, without recomputation."""
    m = setup.model
    tokens = setup.counted_tokens
    copies = m.experts * (2 if setup.has_lora else 4)  # of experts, which are frozen beside adapters, the outputs alone
    if setup.memory.compile:
        # Gate, up and their product; each norm's input and output, in bf16. What autograd kept of compiled Qwen2 and
        # Qwen3 layers of three shapes on a CPU was the same to 0.1 %; on a GPU it has not been measured.
        mlp = 6 * m.intermediate + (4 * m.norms + copies) * m.hidden
    else:
        norms = m.norms * (4 if setup.has_lora else m.norm_bytes)  # a frozen norm does not need its normalized input
        mlp = 8 * m.intermediate + (4 + copies + norms) * m.hidden
    keys = 4 * m.kv * setup.keys_per_position
    attention = tokens * (4 * m.q + keys + 4 * m.heads + head_norms(setup))
    linear = row_tokens(setup) * (2 * m.hidden + 8 * m.linear_keys + 84 * m.linear_values)
    saved = tokens * mlp + max(attention, linear)
    if setup.has_lora and setup.lora.lora_dropout:
        # An adapter keeps its input after dropout, not before, and the mask (one byte a number).
        inputs = sum(m.projections[name][0] for name in setup.lora_targets)
        saved += tokens * (3 * inputs - 2 * m.intermediate - 4 * m.hidden)
    return saved + tokens * 2 * setup.lora.lora_rank * len(setup.lora_targets)


def head_norms(setup: Setup) -> int:
    """Bytes that the norms of a token's queries and keys save: their input in fp32, and normalized as in `norms`;
    compiled, their input in bf16.
    """
    m = setup.model
    eager = 4 if setup.has_lora else m.norm_bytes
    return m.has_head_norms * (2 if setup.memory.compile else eager) * (m.q + m.kv)


def logprobs_peak(setup: Setup) -> Parts:
    """Bytes on one GPU at most in a pass without gradients: at its start, in a layer or in the head."""
    m = setup.model
    tokens = setup.counted_tokens
    gathered_bytes = 0 if setup.is_plain else setup.compute_bytes
    root = gathered_bytes * m.root_parameters
    layer = gathered_bytes * m.layer_parameters
    kept = 0  # the layers that stay gathered, and FSDP's buffer of the last one
    is_of_policy = setup.old_logprob_passes > 0 or not setup.has_reference_model
    if setup.memory.communicate_once and is_of_policy:
        kept = m.layers * layer
    mlp = tokens * ((8 if setup.has_lora else 6) * m.intermediate + 8 * (1 + m.experts) * m.hidden)
    kernel = 4 * m.q + 4 * m.kv * (1 + setup.keys_per_position)
    norm = 10 * m.q * m.has_head_norms
    attention = tokens * (6 * m.hidden + 4 * m.head_dim + max(kernel, norm))
    attention = max(attention, row_tokens(setup) * (2 * m.hidden + 57 * m.linear_values))
    embedded = tokens * (2 * m.hidden + 4 * m.head_dim)
    return largest([
        {"gathered": 2 * (root + layer), "one layer": embedded},
        {"gathered": root + max(3 * layer, kept), "one layer": max(mlp, attention)},
        {
            "gathered": root + layer + kept,
            "logits": (3 + setup.logit_bytes) * logits_at_once(setup),
            "one layer": 2 * tokens * m.hidden,
        },
    ])  # fmt: skip


def optimizer_peak(setup: Setup) -> Parts:
    """Bytes on one GPU that the optimizer takes where it works in chunks: bf16 parameters, or state on the host."""
    offload = setup.memory.offload
    if offload == "all" or (offload == "none" and setup.trained_bytes == 4):
        return {"two chunks": 0}
    # Two are in flight with --offload optimizer; without, one, which is 0.2 GiB less.
    elements = min(2 * OPTIMIZER_CHUNK, max(setup.model.table, setup.model.largest) / setup.num_shards)
    return {"two chunks": CHUNK_BYTES[setup.trained_bytes] * elements}


# Host RAM and disk ---------------------------------------------------------------------------------------------------


def host_phases(setup: Setup) -> dict[str, Parts]:
    """Phase -> bytes of host RAM on one node, which is taken to hold all generation servers."""
    processes = (setup.hardware.ranks_per_node + setup.hardware.generation_gpus) * PROCESS_HOST
    static = static_parts(setup, on_host=True)
    stored = setup.compute_bytes if setup.has_lora else setup.trained_bytes
    itemsizes = {"parameters": stored, "gradients": setup.trained_bytes, "reference": setup.reference_itemsize}
    rounding = 0
    for name, itemsize in itemsizes.items():
        rounding += static.get(name, 0) * (pinned_share(setup, itemsize) - 1)
    kept = {"processes": processes} | static | {"rounding of pinned memory": rounding}
    # Of what is sampled, and of what is trained.
    routes = {"routes": 2 * setup.hardware.ranks_per_node * setup.routes_bytes}
    read = {"weights, read": max(setup.model.table, setup.model.largest) * stored}
    written = {"the policy, gathered on rank 0": setup.weight_bytes}
    if setup.critic:
        written["the critic, gathered there"] = setup.critic_setup.weight_bytes
    return {
        "load": without(kept, "gradients") | read,
        "run": kept | routes,
        "checkpoint": kept | routes | written,
    }


def pinned_share(setup: Setup, itemsize: int) -> float:
    """The page-locked memory of FSDP's shards over their bytes: torch rounds each shard up to a power of two
    (CachingHostAllocator.h). The optimizer's state is pinned in place, without rounding.
    """
    m = setup.model
    matrices = [(m.num_projections[name], inputs * outputs) for name, (inputs, outputs) in m.projections.items()]
    matrices.append((2, m.table))
    if m.experts:
        matrices += [(m.layers, m.largest), (m.layers, m.largest / 2)]  # gate and up; down
    pinned = held = 0
    for count, numbers in matrices:
        shard = numbers * itemsize / setup.num_shards
        pinned += count * 2 ** math.ceil(math.log2(shard))
        held += count * shard
    return pinned / held


def checkpoint_bytes(setup: Setup) -> float:
    """On disk: the policy in --dtype; for a resume the trained parameters as kept, the optimizer's state, and a
    reference that moves; as much of a critic.
    """
    adapter = setup.gradient_bytes if setup.has_lora else 0  # once more, in peft's format
    reference = setup.reference_bytes if setup.plan.reference and setup.plan.reference.reference_every else 0
    critic = checkpoint_bytes(setup.critic_setup) if setup.critic else 0
    return setup.weight_bytes + setup.gradient_bytes + setup.state_bytes + adapter + reference + critic
