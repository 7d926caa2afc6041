"""Flags to change where memory does not suffice: for the sentence that ends a run, and for the dry run."""

RANKS = "start fewer ranks"
BATCH = "lower --micro_batch_tokens"
PASSES = f"{BATCH}, add --gradient_checkpointing"
SHARE = "lower --gpu_memory_utilization"
STATE = "give --offload optimizer or --param_dtype bfloat16, or --offload all, with --communicate_once if it fits"
ENGINE = f"{SHARE}, raise --tensor_parallel_size, or {STATE}"
BF16 = "give --param_dtype bfloat16"
# Phase -> what to change: on a GPU; on a CPU, where there is nothing to offload.
WAYS_OUT = {
    "load": (f"{SHARE}, or {STATE}", f"{RANKS}, or {BF16}"),
    "sample": (ENGINE, f"lower --max_completion_tokens, or {RANKS}"),
    "evaluate": (ENGINE, f"lower --eval_max_completion_tokens, or {RANKS}"),
    "sync": (ENGINE, RANKS),
    "logprobs": (f"{BATCH}, or add --offload_reference", BATCH),
    "update": (f"{PASSES}, or {STATE}", f"{PASSES}, or {BF16}"),
    "optimizer": (STATE, BF16),
    "server": (f"{SHARE}, or raise --tensor_parallel_size", RANKS),
    # Of evaluate.py:
    "engine": (f"{SHARE}, or raise --tensor_parallel_size", f"lower --max_completion_tokens, or {RANKS}"),
    "checkpoint": (BATCH, RANKS),
    "host": (f"use less of --offload, or {RANKS}", RANKS),
}
# The engine's share of the GPU holds its weights, but no sequence.
LARGER_SHARE = "raise --gpu_memory_utilization or --tensor_parallel_size"
