"""How much memory a run takes: a closed form per phase, in bytes, as pure functions of a `Setup` (`shapes.py`). No model, no GPU, no torch.

`gpu_phases` is the table per GPU, `host_phases` per node, `checkpoint_bytes` on disk. The formulas of the passes were fitted to the trace
of the real model (`tracing.py`; a test compares them). Assumed: each micro-batch is as full as --micro_batch_tokens allows, all of its
positions are completion tokens, and there are more than one per update. With --share_prompts attention's copy of keys and values is not
bounded by that flag: whole groups of the shortest completions are assumed for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.sizes import HEAD_CHUNK_LOGITS, OPTIMIZER_CHUNK
from planner.setup import COMPUTE, GIB, Setup

REDUCE = 4  # gradients are reduced in fp32
FRAGMENTATION = 1.05  # what torch's allocator holds over the live tensors
CONTEXT = 2.5 * GIB  # per GPU: CUDA context, NCCL buffers, workspaces of the matrix products
# The engine, without and with CUDA graphs: awake (vLLM's pull request 11743 logged 2.95 + 1.27 GiB beside weights and cache), and asleep,
# when graphs and NCCL buffers stay (its issue 47654 logged 1.4 GiB of graphs).
ENGINE_WORKING = {True: 2.5 * GIB, False: 4.0 * GIB}
ENGINE_ASLEEP = {True: 0.5 * GIB, False: 2.0 * GIB}
CHUNK_BYTES = {
    2: 28,
    4: 8,
}  # each of them takes, by the bytes of a parameter: fp32 copies and what rounds them; two moments from the host
PROCESS_HOST = (
    6 * GIB
)  # host RAM of one rank without weights: libraries, CUDA's host side, pinned staging, the rollout, such a chunk


@dataclass(frozen=True)
class Phase:
    """Bytes on one GPU by what they are for. The engine's are its own budget and do not fragment the trainer's."""

    trainer: dict[str, float]
    engine: dict[str, float]

    @property
    def live(self) -> float:
        return sum(self.trainer.values()) + sum(self.engine.values())

    @property
    def needed(self) -> float:
        """Live bytes and what comes on top of them unseen."""
        return FRAGMENTATION * sum(self.trainer.values()) + sum(self.engine.values()) + CONTEXT


def update_peak(setup: Setup, is_first_micro: bool = False) -> dict[str, float]:
    """Bytes on one GPU when a backward pass needs most, beside what is there all the time.

    The largest of four moments: the head, with the checkpoints of all layers; the layer that runs when the one after it is being reduced;
    the first layer, when all gradients are there; the reduction of embedding and head. Peaks of the MLP's and the norm's backward are
    told apart because small micro-batches have the second. `is_first_micro`: no gradients of an earlier one are there yet.
    """
    m, p, tokens = setup.model, setup.policy, setup.run.micro_batch_tokens
    h, i, layers, table = m.hidden, m.intermediate, m.layers, m.vocab * m.hidden
    is_lora, is_recomputed = bool(p.lora_rank), p.gradient_checkpointing
    gradient_bytes = 0 if p.offload == "all" else setup.trained_bytes  # per parameter of this GPU's shard
    trained_layer = m.lora_layer_parameters(p.lora_rank, p.lora_targets) if is_lora else m.layer_parameters
    gathered_layer = COMPUTE * (m.layer_parameters + (trained_layer if is_lora else 0))
    root, head_gradient = COMPUTE * m.root_parameters, 0 if is_lora else COMPUTE * table
    one, two = (
        root + (layers if p.gather_parameters_once else n) * gathered_layer for n in (1, 2)
    )  # gathered at a time
    all_gradients = gradient_bytes * setup.trainable / setup.ranks
    before = 0 if is_first_micro else all_gradients

    inputs = tokens * (2 * h + 4 * m.head_dim)  # the embedded tokens, the rotation's angles
    saved = saved_per_layer(setup)
    if is_lora:
        weights, mlp = 0, tokens * (4 * i + 2 * h)
    else:
        weights, mlp = max(2 * m.layer_parameters, 6 * i * h + 30 * tokens * h), tokens * (4 * i + 2 * h) + 2 * i * h
    # Of shared prompts the copies of keys and values, their gradients, and with grouped queries those of each query head before.
    copies = setup.run.keys_per_position * (8 * m.kv + (4 * m.q if m.kv < m.q else 0))
    attention = tokens * (copies + 12 * m.q + 4 * m.head_dim + (9 if is_lora else 11) * h)
    kept_per_layer = 0 if p.offload_activations else tokens * 2 * h if is_recomputed else saved
    kept = layers * kept_per_layer + (8 if is_lora else 10) * tokens * h  # and the last norm
    chunk = tokens if p.keeps_full_logits else min(tokens, HEAD_CHUNK_LOGITS // m.vocab)
    # Bytes a logit in the backward pass: the last chunk is there, the others are computed again; the entropy's gradient is a second tensor.
    again = 8 if chunk < tokens or setup.run.trains_entropy else 6
    head = max(8 * chunk * m.vocab, head_gradient + again * chunk * m.vocab)

    def backward_of(layer: int) -> dict[str, float]:
        below = layer * kept_per_layer
        own = max(mlp + saved, attention, weights) if is_recomputed else max(mlp, attention - saved, weights)
        reduced = layers - layer if is_first_micro else 0
        return {
            "gradients": max(before, reduced * gradient_bytes * trained_layer / setup.ranks),
            "checkpoints" if is_recomputed else "activations": below,
            "one layer": own,
            "gathered": two,
            "reduction": head_gradient + (REDUCE * trained_layer if layer < layers else 0),
        }

    moments = [
        {"gradients": before, "checkpoints" if is_recomputed else "activations": kept, "gathered": one, "logits": head},
        {"gradients": before, "one layer": inputs, "gathered": max(2 * (root + gathered_layer), one)},
        backward_of(layers),
        backward_of(max(layers - 1, 1)),
        backward_of(1),
    ]
    if not is_lora:
        tables = (1 if m.is_tied else 2) * COMPUTE * table
        of_layers = gradient_bytes * layers * trained_layer / setup.ranks
        still = one if p.gather_parameters_once else 0  # after all micro-batches but the last
        moments.append(
            {
                "gradients": max(before, of_layers),
                "gathered": still,
                "reduction": tables + REDUCE * (tables // COMPUTE + h),
            }
        )
    peak = max(moments, key=lambda moment: sum(moment.values()))
    return peak | {"gradients, whole": REDUCE * setup.trainable * p.reduce_gradients_once}


def saved_per_layer(setup: Setup) -> float:
    """Bytes that the backward pass of a layer needs from its forward pass, without recomputation."""
    m, p, tokens = setup.model, setup.policy, setup.run.micro_batch_tokens
    norms = 12 if p.lora_rank else 16  # a frozen norm needs no normalized input
    saved = tokens * (
        8 * m.intermediate + norms * m.hidden + 4 * m.q + 4 * m.kv * setup.run.keys_per_position + 4 * m.heads
    )
    if (
        p.lora_rank and p.lora_dropout
    ):  # an adapter keeps its input after dropout and the mask (one byte a number), not the input before
        inputs = sum(m.projections[name][0] for name in p.lora_targets)
        saved += tokens * (3 * inputs - 2 * m.intermediate - 4 * m.hidden)
    return saved + tokens * 2 * p.lora_rank * len(p.lora_targets)


def logprobs_peak(setup: Setup) -> dict[str, float]:
    """Bytes on one GPU at most in a forward pass without gradients."""
    m, tokens = setup.model, setup.run.micro_batch_tokens
    chunk = tokens if setup.policy.keeps_full_logits else min(tokens, HEAD_CHUNK_LOGITS // m.vocab)
    root, layer = COMPUTE * m.root_parameters, COMPUTE * m.layer_parameters
    is_reference_alone = (
        setup.has_reference_model and setup.run.updates_per_pass == 1 and not setup.run.needs_first_logprobs
    )
    stays = setup.policy.gather_parameters_once and not is_reference_alone
    kept = m.layers * layer * stays  # and FSDP's buffer of the last one beside it
    of_mlp = tokens * ((8 if setup.policy.lora_rank else 6) * m.intermediate + 8 * m.hidden)
    of_attention = tokens * (6 * m.hidden + 4 * m.head_dim + 4 * m.q + 4 * m.kv * (1 + setup.run.keys_per_position))
    moments = [
        {"gathered": 2 * (root + layer), "one layer": tokens * (2 * m.hidden + 4 * m.head_dim)},
        {"gathered": root + max(3 * layer, kept), "one layer": max(of_mlp, of_attention)},
        {"gathered": root + layer + kept, "logits": 8 * chunk * m.vocab, "one layer": 2 * tokens * m.hidden},
    ]
    return max(moments, key=lambda moment: sum(moment.values()))


def optimizer_peak(setup: Setup) -> dict[str, float]:
    """Bytes on one GPU that the step takes where it goes through shards piece by piece: parameters are bf16, or state is on the host."""
    m, p = setup.model, setup.policy
    is_chunked = p.offload == "optimizer" or (p.offload == "none" and setup.trained_bytes == 2)
    largest = max(m.vocab, m.intermediate) * m.hidden
    if p.lora_rank:
        largest = p.lora_rank * max(max(m.projections[name]) for name in p.lora_targets)
    return {"one chunk": is_chunked * CHUNK_BYTES[setup.trained_bytes] * min(OPTIMIZER_CHUNK, largest / setup.ranks)}


def resident(setup: Setup) -> dict[str, float]:
    """Bytes on one training GPU all the time, from the first update on."""
    p = setup.policy
    parts = {}
    if p.offload != "all":
        parts["parameters"] = setup.stored_bytes / setup.ranks
    if p.offload == "none":
        parts["optimizer"] = setup.state_bytes / setup.ranks
    if setup.has_reference_model and not p.offload_reference:
        parts["reference"] = setup.model.parameters * COMPUTE / setup.ranks
    return parts


def engine_parts(setup: Setup) -> dict[str, float]:
    """Bytes on one GPU of the awake engine: it takes its share of the GPU whole, and what weights and work leave becomes KV cache."""
    run = setup.run
    weights = setup.model.parameters * COMPUTE / run.tensor_parallel_size
    working = ENGINE_WORKING[run.enforce_eager]
    budget = run.gpu_memory_utilization * setup.hardware.gpu_bytes
    return {"engine weights": weights, "engine working": working, "KV cache": budget - weights - working}


def sequences_at_once(setup: Setup) -> float:
    """Sequences of the full model length whose keys and values fit into one engine's cache; below 1 vLLM does not start."""
    per_gpu = (
        setup.run.max_model_len
        * setup.model.kv_bytes_per_token
        / min(setup.run.tensor_parallel_size, setup.model.kv_heads)
    )
    return engine_parts(setup)["KV cache"] / per_gpu


def peak_phase(phases: dict[str, Phase]) -> str:
    """The name of the phase that needs most."""
    return max(phases, key=lambda name: phases[name].needed)


def gpu_phases(setup: Setup) -> dict[str, Phase]:
    """Phase -> what a GPU holds at its peak. With GPUs that only sample, "rollout" is one of those and the others are the trainer's."""
    m, p, run = setup.model, setup.policy, setup.run
    static, is_apart = resident(setup), run.generation_gpus > 0
    largest = m.vocab * m.hidden  # parameters of the embedding
    asleep = {} if is_apart else {"engine asleep": ENGINE_ASLEEP[run.enforce_eager]}
    weights, working, cache = engine_parts(setup).items()
    awake = {} if is_apart else dict([weights, working])
    one_of_next = m.intermediate * m.hidden * COMPUTE  # gathered while the engine copies
    gathered = (
        m.parameters * COMPUTE if p.syncs_whole_model else largest * COMPUTE * (1 + 1 / setup.ranks) + one_of_next
    )
    gradients = {} if p.offload == "all" else {"gradients": setup.trainable * setup.trained_bytes / setup.ranks}
    of_reference = setup.run.has_kl and p.offload_reference and not p.lora_rank
    h2d = (
        m.layer_parameters * COMPUTE / setup.ranks * 2 * (of_reference or p.offload == "all")
    )  # shards on their way from host RAM
    loading = {"one tensor": largest * (COMPUTE if p.lora_rank else setup.trained_bytes)}
    phases = {
        "load": Phase({k: v for k, v in static.items() if k != "optimizer"} | loading, {}),
        "rollout": Phase({} if is_apart else static, dict([weights, working, cache])),
        "logprobs": Phase(static | logprobs_peak(setup) | {"shards from host": h2d}, asleep),
        "update": Phase(static | update_peak(setup), asleep),
        "optimizer": Phase(static | gradients | optimizer_peak(setup), asleep),
        "sync": Phase(static | {"gathered": gathered}, awake),
    }
    if setup.run.updates_per_pass == 1 and not run.needs_first_logprobs and not run.has_kl:
        del phases["logprobs"]  # the only update makes its own old log-probs
    return phases


def host_phases(setup: Setup) -> dict[str, dict[str, float]]:
    """Phase -> bytes of host RAM on one node by what they are for: while loading, while running, while writing a checkpoint."""
    m, p, hardware = setup.model, setup.policy, setup.hardware
    per_node = 1 / hardware.nodes
    ranks = hardware.gpus / hardware.nodes
    kept = {"processes": ranks * PROCESS_HOST}
    if p.offload == "all":
        kept["parameters"] = setup.stored_bytes * per_node
        kept["gradients"] = setup.trainable * setup.trained_bytes * per_node
    if p.offload != "none":
        kept["optimizer"] = setup.state_bytes * per_node
    if setup.has_reference_model and p.offload_reference:
        kept["reference"] = m.parameters * COMPUTE * per_node
    if p.sleep_level == 1:
        kept["engines asleep (level 1)"] = setup.engines * per_node * m.parameters * COMPUTE
    if p.offload_activations:
        per_layer = 2 * m.hidden * setup.run.micro_batch_tokens if p.gradient_checkpointing else saved_per_layer(setup)
        kept["activations"] = ranks * m.layers * per_layer
    copied = (setup.trainable * setup.trained_bytes + setup.state_bytes) * per_node * p.async_checkpoint
    dtype_bytes = COMPUTE if p.lora_rank else setup.trained_bytes
    read = ranks * m.parameters if p.loads_on_every_rank else m.vocab * m.hidden
    return {
        "load": {k: v for k, v in kept.items() if k not in ("gradients", "activations")}
        | {"weights, read": read * dtype_bytes},
        "run": kept,
        "checkpoint": kept
        | {"the policy, gathered on rank 0": m.parameters * COMPUTE, "what is written meanwhile": copied},
    }


def checkpoint_bytes(setup: Setup) -> float:
    """On disk: the policy in bf16, and what a resume needs: parameters as they are kept and optimizer state (with LoRA the adapter's)."""
    trained = setup.trainable * setup.trained_bytes
    return setup.model.parameters * COMPUTE + trained + setup.state_bytes
