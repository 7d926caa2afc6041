"""Every flag once. So far: how a set of prompts is sampled, and which flags may change on resume."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How a set of prompts is sampled: training, or one held-out set."""

    num_samples: int
    temperature: float
    max_completion_tokens: int
    top_p: float = 1.0


FREE_FLAGS = {
    "out_dir", "eval_every", "eval_before_training", "save_every", "keep_checkpoints", "async_checkpoint",
    "timeout_minutes", "max_skipped_updates", "reward_workers", "stop_after", "profile_steps",
    "micro_batch_tokens", "share_prompts", "gradient_checkpointing", "gpu_memory_utilization", "enforce_eager", "offload",
    "offload_reference", "offload_activations", "reduce_gradients_once", "gather_parameters_once", "compile_layers",
    "dry_run", "json", "trace", "plan_gpus", "plan_nodes", "plan_gpu", "plan_gpu_memory_gib", "plan_host_memory_gib",
    "plan_network_gb_s", "plan_rows", "plan_flops_share", "plan_memory_share", "plan_link_share", "plan_length_share",
}  # fmt: skip
LENGTH_FLAGS = {"total_steps", "epochs", "total_episodes"}


def free_on_resume(args: Namespace) -> set[str]:
    """The flags that may differ when a run continues: they do not change what its steps compute.

    The length of the run is one of them, unless the learning rate depends on it.
    """
    return FREE_FLAGS if args.warmup_ratio or args.lr_schedule != "constant" else FREE_FLAGS | LENGTH_FLAGS
