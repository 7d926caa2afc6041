"""How much memory a run takes: formulas for each phase, in bytes. Pure functions of a `Setup`.

Read `gpu_phases` (one GPU), `host_phases` (one node) and `checkpoint_bytes` (disk) first. The formulas of the passes
were fitted to the storages of the real model; `benchmarks/bench_memory.py` compares them with real updates. They assume
several micro-batches per update, full of completion tokens. --micro_batch_tokens does not bound attention's copy of
shared keys and values: for it, groups of the shortest completions are assumed.
"""

from __future__ import annotations

import math

from instruments.plan_setup import GIB, Setup
from model.sizes import HEAD_CHUNK_LOGITS, MOST_ON_GPU, OPTIMIZER_CHUNK

REDUCE = 4  # gradients are reduced in fp32
FRAGMENTATION = 1.05  # what torch's allocator holds, over the live tensors
CONTEXT = 2.5 * GIB  # per GPU: CUDA context, NCCL buffers, workspaces of the matrix products
# The engine beside weights and cache, without and with CUDA graphs.
ENGINE_WORKING = {True: 2.5 * GIB, False: 4.0 * GIB}  # vLLM's pull request 11743 logged 2.95 + 1.27 GiB
ENGINE_ASLEEP = {True: 0.5 * GIB, False: 2.0 * GIB}  # NCCL buffers, graphs; vLLM's issue 47654 logged 1.4 GiB of these
CHUNK_BYTES = {2: 28, 4: 8}  # bytes of a parameter -> of an element that the optimizer works on: fp32 copies or moments
SHORT_CACHE = 1 / 8  # of the sequences: with less the engine reads its weights for a few tokens at a time
PROCESS_HOST = 6 * GIB  # host RAM of one rank without weights: libraries, CUDA's host side, pinned buffers, the rollout

Parts = dict[str, float]  # bytes by what they are for
ENGINE = ("engine weights", "engine working", "KV cache", "engine asleep", "weights arriving")  # its parts


def needed(parts: Parts) -> float:
    """Bytes that a GPU must have for these tensors: the engine's share is not fragmented by the trainer's allocator."""
    return FRAGMENTATION * sum(without(parts, *ENGINE).values()) + sum(parts.get(name, 0) for name in ENGINE) + CONTEXT


def gpu_phases(setup: Setup) -> dict[str, Parts]:
    """Phase -> what a GPU holds at its peak."""
    m, memory = setup.model, setup.memory
    static, awake = without(static_parts(setup, on_host=False), "gradients"), engine_parts(setup)
    itemsize = setup.compute_bytes if setup.has_lora else setup.trained_bytes
    largest_tensor = m.table * itemsize  # the embedding, as it is loaded
    asleep = {"engine asleep": ENGINE_ASLEEP[setup.engine.enforce_eager]}
    # The largest parameter and its shard in --dtype; the next one is gathered while the engine copies this one.
    gathered = {"gathered": setup.compute_bytes * (m.table * (1 + 1 / setup.num_shards) + m.intermediate * m.hidden)}
    # vLLM pads a table whose rows are no multiple of 64, and keeps it to the end of a sync: the head comes beside it.
    kept = setup.compute_bytes * m.table * (m.vocab % 64 > 0 and m.root_trained >= 2 * m.table)
    comes_from_host = memory.offload == "all" or (setup.has_reference_model and memory.offload_reference)
    layer = (setup.of_reference.model if memory.offload != "all" else m).layer_parameters
    shards = {"shards from host": layer * setup.compute_bytes / setup.num_shards * 2 * comes_from_host}
    phases = {
        "load": largest([static, without(static, "optimizer") | {"one tensor": largest_tensor}]),
        "rollout": static | awake,
        "logprobs": static | largest([logprobs_peak(setup), logprobs_peak(setup.of_reference)]) | shards | asleep,
        "update": static | update_peak(setup) | asleep,
        "optimizer": static_parts(setup, on_host=False) | optimizer_peak(setup) | asleep,
        "sync": static | gathered | without(awake, "KV cache") | {"weights arriving": kept},
    }
    if setup.has_servers:
        phases = {name: without(parts, *ENGINE) for name, parts in phases.items() if name != "rollout"}
        arriving = setup.compute_bytes * (m.table + m.layer_parameters / setup.run.tensor_parallel_size)
        phases["server"] = awake | {"weights arriving": arriving + kept}  # a tensor, and the layer that it is in
    if (not setup.run.has_kl or setup.run.over_vocabulary) and not setup.old_logprob_passes:
        del phases["logprobs"]
    return {name: nonzero(parts) for name, parts in phases.items()}


def without(parts: Parts, *names: str) -> Parts:
    return {name: part for name, part in parts.items() if name not in names}


def nonzero(parts: Parts) -> Parts:
    return {name: part for name, part in parts.items() if part}


def static_parts(setup: Setup, on_host: bool) -> Parts:
    """Bytes that outlast a phase: on one GPU, or in the host RAM of one node."""
    parts = {"parameters": setup.stored_bytes, "gradients": setup.gradient_bytes, "optimizer": setup.state_bytes}
    moved = {"none": set(), "optimizer": {"optimizer"}, "all": set(parts)}[setup.memory.offload]
    if setup.has_reference_model:
        parts["reference"] = setup.of_reference.model.parameters * setup.compute_bytes
    if setup.memory.offload_reference:
        moved.add("reference")
    shards = setup.hardware.gpus / setup.hardware.nodes if on_host else 1  # on the node, or on the GPU
    return {name: part * shards / setup.num_shards for name, part in parts.items() if (name in moved) == on_host}


def engine_parts(setup: Setup) -> Parts:
    """Bytes on one GPU of the awake engine. It takes its whole share of the GPU: the rest of it is KV cache."""
    weights = setup.model.parameters * setup.compute_bytes / setup.run.tensor_parallel_size
    working = ENGINE_WORKING[setup.engine.enforce_eager]
    budget = setup.engine.gpu_memory_utilization * setup.hardware.gpu_bytes
    return {"engine weights": weights, "engine working": working, "KV cache": max(budget - weights - working, 0.0)}


def cache_bytes_per_token(setup: Setup) -> float:
    """Keys and values of a token on one GPU of its engine, which divides them by heads."""
    return setup.model.kv_per_token * setup.compute_bytes / min(setup.run.tensor_parallel_size, setup.model.kv_heads)


def sequences_at_once(setup: Setup) -> float:
    """Sequences of the full model length that fit into one engine's cache. Below 1 vLLM does not start."""
    return engine_parts(setup)["KV cache"] / (setup.engine.max_model_len * cache_bytes_per_token(setup))


def short_cache(setup: Setup) -> list[str]:
    """A warning if the cache holds less than `SHORT_CACHE` of what an engine would run at a time."""
    wanted, held = min(setup.plan.completions_per_step / setup.num_engines, MOST_ON_GPU), sequences_at_once(setup)
    is_short = 1 <= held < SHORT_CACHE * wanted
    return [f"the cache holds {held:.1f} of an engine's {wanted:g} sequences"] if is_short else []


def misfits(setup: Setup, free: float | None = None) -> list[str]:
    """What does not fit, one sentence each; empty if all does.

    `free`: bytes of the GPU that nobody has taken; then tensors alone count, without what is kept in reserve.
    """
    h, found, reserve = setup.hardware, [], () if free is None else ("processes",)
    for name, parts in gpu_phases(setup).items():
        size, has = (needed(parts), h.gpu_bytes) if free is None else (sum(parts.values()), free)
        if size > has and (free is None or name != "server"):  # a server's GPU is another one
            too_many = (size - has) / GIB
            found.append(f"GPU, {name}: needs {size / GIB:.1f} GiB of {has / GIB:.1f}, {too_many:.1f} GiB too many")
    if sequences_at_once(setup) < 1:
        share, others = setup.engine.gpu_memory_utilization, sum(without(engine_parts(setup), "KV cache").values())
        given = f"--gpu_memory_utilization {share:g} is {share * h.gpu_bytes / GIB:.1f} GiB, of which the engine"
        left = f"needs {others / GIB:.1f} without its cache: not enough for one sequence of"
        found.append(f"GPU, rollout: {given} {left} {setup.engine.max_model_len} tokens")
    for name, parts in host_phases(setup).items():
        if (size := sum(without(parts, *reserve).values())) > h.host_bytes:
            found.append(f"host RAM, {name}: needs {size / GIB:.0f} GiB of {h.host_bytes / GIB:.0f} on each node")
    return found


# The passes ----------------------------------------------------------------------------------------------------------


def largest(moments: list[Parts]) -> Parts:
    return max(moments, key=lambda moment: sum(moment.values()))


def update_peak(setup: Setup) -> Parts:
    """Bytes on one GPU at most in a backward pass, with the gradients of an earlier micro-batch.

    The largest of six moments: the head, with what all layers keep; the start of the forward pass; the last layer; the
    layer before it, while the last one is reduced; the reduction of embedding and head; where they are tied, the sum of
    their gradients.
    """
    m, memory, tokens, compute = setup.model, setup.memory, setup.counted_tokens, setup.compute_bytes
    root, is_once = compute * m.root_parameters, memory.communicate_once
    layer = compute * (m.layer_parameters + (setup.trained_per_layer if setup.has_lora else 0))
    one, two = (root + (m.layers if is_once else n) * layer for n in (1, 2))  # gathered at a time
    kept_name = "checkpoints" if memory.gradient_checkpointing else "activations"
    kept = 2 * tokens * m.hidden if memory.gradient_checkpointing else saved_per_layer(setup)  # a layer's input, or all
    last_norm = (8 if setup.has_lora else 10) * tokens * m.hidden
    head_gradient, embedded = 0 if setup.has_lora else compute * m.table, 2 * m.hidden + 4 * m.head_dim  # with angles
    of_layer = {"one layer": backward_of_layer(setup), "gathered": two}
    reduced = head_gradient + REDUCE * setup.trained_per_layer  # of the layer after this one
    moments = [
        {kept_name: m.layers * kept + last_norm, "gathered": one, "logits": head_bytes(setup)} | followed(setup),
        {"one layer": tokens * embedded, "gathered": max(2 * (root + layer), one)},
        {kept_name: m.layers * kept} | of_layer | {"reduction": head_gradient},
    ]
    if setup.run.over_vocabulary:  # the pass of the reference, before that of the policy
        moments.append(logprobs_peak(setup.of_reference))
    if m.layers > 1:
        moments.append({kept_name: (m.layers - 1) * kept} | of_layer | {"reduction": reduced})
    if not setup.has_lora:
        cast = compute * (setup.trained_bytes == 2 and not has_sums_apart(setup))  # to be added to the shard
        shard = (REDUCE + cast) * m.root_trained / setup.num_shards
        last = max((m.root_trained - m.hidden) * compute, shard + compute * m.table * (setup.num_shards > 1))
        moments.append({"gathered": is_once * one, "reduction": REDUCE * m.root_trained + last})
        if m.root_trained < 2 * m.table:  # tied: two gradients, and their sum
            gathered = one if is_once else root
            moments.append({"gathered": gathered, "reduction": 3 * compute * m.table + REDUCE * m.layer_parameters})
    if is_once:  # shards of them come only as whole ones go, in the last backward pass
        return largest(moments) | {"gradients, whole": REDUCE * setup.trainable}
    return {"gradients": gradients_in_passes(setup)} | largest(moments)


def followed(setup: Setup) -> Parts:
    """What the head keeps of a reference that is followed over the vocabulary: its last hidden states, its head."""
    teacher = setup.of_reference.model
    numbers = (setup.memory.micro_batch_tokens + teacher.vocab) * teacher.hidden
    return {"teacher": numbers * setup.compute_bytes} if setup.run.over_vocabulary else {}


def has_sums_apart(setup: Setup) -> bool:
    """Whether FSDP keeps apart, in fp32 and on the GPU, what copies of the policy add up in the last micro-batch."""
    return setup.num_copies > 1 and not setup.memory.communicate_once


def gradients_in_passes(setup: Setup) -> float:
    """Bytes on one GPU, of the shards."""
    shards = static_parts(setup, on_host=False).get("gradients", 0)
    if not has_sums_apart(setup):
        return shards
    return REDUCE * setup.trainable / setup.num_shards + (shards if setup.trained_bytes < REDUCE else 0)


def head_chunk(setup: Setup) -> int:
    """Tokens whose logits are made at a time."""
    return min(setup.memory.micro_batch_tokens, HEAD_CHUNK_LOGITS // setup.model.vocab)


def head_bytes(setup: Setup) -> float:
    """The head's peak: logits that their gradient replaces, and the weight's gradient. Over the vocabulary there may be
    four fp32 numbers a logit: two of each model.
    """
    gradient = 0 if setup.has_lora else setup.compute_bytes * setup.model.table
    return gradient + (16 if setup.run.over_vocabulary else logit_bytes(setup)) * head_chunk(setup) * setup.model.vocab


def logit_bytes(setup: Setup) -> int:
    """Of a logit in the head's dtype, and 3 for pieces in eager mode or the cast of its gradient."""
    return 3 + (2 if setup.compute_bytes == 2 and setup.memory.head_dtype != "float32" else 4)


def backward_of_layer(setup: Setup) -> float:
    """What a layer takes in its backward pass: the largest of MLP, attention, and weights with the norm's gradients."""
    m, tokens, has_lora = setup.model, setup.counted_tokens, setup.has_lora
    h, i, compute = m.hidden, m.intermediate, setup.compute_bytes
    mlp, weights = tokens * (4 * i + 2 * h), 0
    if not has_lora:
        mlp += compute * i * h
        weights = max(compute * m.layer_parameters, 3 * compute * i * h + 30 * tokens * h)
    # Copies of keys and values, and their gradients; with grouped queries first a gradient for each query head.
    copies = setup.keys_per_position * (8 * m.kv + (4 * m.q if m.kv < m.q else 0))
    attention = tokens * (copies + 12 * m.q + 4 * m.head_dim + (9 if has_lora else 11) * h + head_norms(setup))
    saved = saved_per_layer(setup)
    if setup.memory.gradient_checkpointing:
        return max(mlp + saved, attention, weights)
    return max(mlp, attention - saved, weights)


def saved_per_layer(setup: Setup) -> float:
    """Bytes that the backward pass of a layer needs from its forward pass, without recomputation."""
    m, lora, tokens = setup.model, setup.lora, setup.counted_tokens
    norms = 12 if setup.has_lora else 16  # a frozen norm does not need its normalized input
    keys = 4 * m.kv * setup.keys_per_position
    saved = tokens * (8 * m.intermediate + norms * m.hidden + 4 * m.q + keys + 4 * m.heads + head_norms(setup))
    if setup.has_lora and lora.lora_dropout:
        # An adapter keeps its input after dropout, and the mask (one byte a number), not the input before.
        inputs = sum(m.projections[name][0] for name in setup.lora_targets)
        saved += tokens * (3 * inputs - 2 * m.intermediate - 4 * m.hidden)
    return saved + tokens * 2 * lora.lora_rank * len(setup.lora_targets)


def head_norms(setup: Setup) -> int:
    """Bytes that the norms of a token's queries and keys save: their input in fp32, and normalized as in `norms`."""
    return setup.model.has_head_norms * (4 if setup.has_lora else 6) * (setup.model.q + setup.model.kv)


def logprobs_peak(setup: Setup) -> Parts:
    """Bytes on one GPU at most in a pass without gradients: at its start, in a layer or in the head."""
    m, tokens = setup.model, setup.counted_tokens
    root, layer = setup.compute_bytes * m.root_parameters, setup.compute_bytes * m.layer_parameters
    is_of_policy = setup.old_logprob_passes > 0 or not setup.has_reference_model
    kept = m.layers * layer * (setup.memory.communicate_once and is_of_policy)  # and FSDP's buffer of the last layer
    mlp = tokens * ((8 if setup.has_lora else 6) * m.intermediate + 8 * m.hidden)
    kernel = 4 * m.q + 4 * m.kv * (1 + setup.keys_per_position)
    attention = tokens * (6 * m.hidden + 4 * m.head_dim + max(kernel, 10 * m.q * m.has_head_norms))  # 10: in the norm
    logits = logit_bytes(setup) * head_chunk(setup) * m.vocab
    return largest([
        {"gathered": 2 * (root + layer), "one layer": tokens * (2 * m.hidden + 4 * m.head_dim)},
        {"gathered": root + max(3 * layer, kept), "one layer": max(mlp, attention)},
        {"gathered": root + layer + kept, "logits": logits, "one layer": 2 * tokens * m.hidden},
    ])  # fmt: skip


def optimizer_peak(setup: Setup) -> Parts:
    """Bytes on one GPU that the optimizer takes where it works in chunks: bf16 parameters, or state on the host."""
    m, memory = setup.model, setup.memory
    is_chunked = memory.offload == "optimizer" or (memory.offload == "none" and setup.trained_bytes == 2)
    tensor = max(m.vocab, m.intermediate) * m.hidden
    if setup.has_lora:
        tensor = setup.lora.lora_rank * max(max(m.projections[name]) for name in setup.lora_targets)
    chunk = min(OPTIMIZER_CHUNK, tensor / setup.num_shards)
    return {"one chunk": is_chunked * CHUNK_BYTES[setup.trained_bytes] * chunk}


# Host RAM and disk ---------------------------------------------------------------------------------------------------


def host_phases(setup: Setup) -> dict[str, Parts]:
    """Phase -> bytes of host RAM on one node, which is taken to hold all generation servers."""
    ranks = setup.hardware.gpus / setup.hardware.nodes  # of a node
    static = static_parts(setup, on_host=True)
    kept = {"processes": (ranks + setup.hardware.generation_gpus) * PROCESS_HOST} | static
    stored = setup.compute_bytes if setup.has_lora else setup.trained_bytes
    rounding = {"parameters": stored, "gradients": setup.trained_bytes, "reference": setup.compute_bytes}
    kept["rounding of pinned memory"] = sum(
        static.get(name, 0) * (pinned_share(setup, itemsize) - 1) for name, itemsize in rounding.items()
    )
    read = {"weights, read": setup.model.table * stored}
    written = {"the policy, gathered on rank 0": setup.model.parameters * setup.compute_bytes}
    phases = {"load": without(kept, "gradients") | read, "run": kept, "checkpoint": kept | written}
    return {name: nonzero(parts) for name, parts in phases.items()}


def pinned_share(setup: Setup, itemsize: int) -> float:
    """What FSDP's shards take in page-locked memory, over their bytes: torch rounds each up to a power of two
    (CachingHostAllocator.h). The optimizer's state is pinned in place, without rounding.
    """
    m = setup.model
    matrices = [(m.layers, inputs * outputs) for inputs, outputs in m.projections.values()] + [(2, m.table)]
    shards = [(count, numbers * itemsize / setup.num_shards) for count, numbers in matrices]
    pinned = sum(count * 2 ** math.ceil(math.log2(size)) for count, size in shards)
    return pinned / sum(count * size for count, size in shards)


def checkpoint_bytes(setup: Setup) -> float:
    """On disk: the policy in --dtype; for a resume the trained parameters as kept, and the optimizer's state."""
    adapter = setup.gradient_bytes if setup.has_lora else 0  # once more, in peft's format
    return setup.model.parameters * setup.compute_bytes + setup.gradient_bytes + setup.state_bytes + adapter


def disk_bytes(setup: Setup) -> float:
    """On disk, of all checkpoints that are there at a time."""
    return setup.run.num_checkpoints * checkpoint_bytes(setup)
