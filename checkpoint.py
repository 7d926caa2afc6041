"""Checkpoints: save, resume, export.

    OUT_DIR/step_20/          the policy in Hugging Face format (with LoRA: merged)
    OUT_DIR/step_20/adapter/  with LoRA only: the adapter in peft's format
    OUT_DIR/step_20/trainer/  what a resume needs: the sharded trained parameters and optimizer state
                              (torch.distributed.checkpoint), and progress.json, the state of the loop
    OUT_DIR/final             link to the last step's checkpoint, made when the run is complete

A checkpoint is written under a temporary name and renamed when it is whole: a folder named step_N is always complete.
"""

from __future__ import annotations

import copy
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from fsdp_utils import World, gather_from_ranks, new_host_group, wait_for_all
from policy import Policy

State = dict[str, int]  # of the loop, by name
Companions = list[PreTrainedTokenizerBase | ProcessorMixin | GenerationConfig]  # of the model, in its folder


def checkpoints(out_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first."""
    found = [(path.name.removeprefix("step_"), path) for path in out_dir.glob("step_*")]
    return sorted((int(step), path) for step, path in found if step.isdigit())


def latest(out_dir: Path) -> tuple[int, Path | None]:
    """(step, folder) of the last checkpoint; (0, None) without any. All ranks get what the main process sees."""
    return gather_from_ranks([(0, None), *checkpoints(out_dir)][-1])[0]


class Writer:
    """Writes checkpoints: while the caller waits, or in the background from a copy in host RAM. Every rank has one."""

    def __init__(self, out_dir: Path, companions: Companions, keep: int, in_background: bool, world: World) -> None:
        """`keep`: older checkpoints are removed beyond this number; 0 keeps all."""
        self.out_dir, self.companions, self.keep, self.world = out_dir, companions, keep, world
        self.group = new_host_group() if in_background else None
        self.thread = ThreadPoolExecutor(max_workers=1) if in_background else None
        self.pending: Future[None] | None = None

    def save(self, step: int, policy: Policy, optimizer: Optimizer, state: State) -> None:
        """Writes OUT_DIR/step_<step>, then removes the oldest ones. All ranks call it. It waits for the save before it.

        `state` comes back from `load`. The checkpoint that `final` points to is kept: a complete run that is being
        prolonged always has a final policy.
        """
        self.wait()
        unfinished = self.out_dir / f"unfinished_step_{step}"
        if self.world.is_main:
            for leftover in self.out_dir.glob("unfinished_step_*"):  # of a killed run
                shutil.rmtree(leftover)
        wait_for_all()
        parameters, optimizer_state = get_state_dict(policy, optimizer)
        shards = {"model": without_frozen(policy, parameters), "optimizer": optimizer_state}
        weights = gather_weights(policy, self.world)
        policy.save_adapter(unfinished / "adapter", self.world)
        if self.thread is None:
            dcp.save(shards, checkpoint_id=unfinished / "trainer")
            self._complete(step, policy, weights, state)
            wait_for_all()
        else:
            # returns when the copy is made
            written = dcp.async_save(shards, checkpoint_id=unfinished / "trainer", process_group=self.group)
            self.pending = self.thread.submit(lambda: (written.result(), self._complete(step, policy, weights, state)))

    def wait(self) -> None:
        """Returns when no rank writes a checkpoint any more. Raises what went wrong meanwhile (a full disk, say)."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
            wait_for_all()

    def _complete(self, step: int, policy: Policy, weights: dict[str, Tensor], state: State) -> None:
        """On the main process, when all shards are written: adds the rest, renames the folder, removes old ones."""
        if not self.world.is_main:
            return
        unfinished = self.out_dir / f"unfinished_step_{step}"
        export(policy, weights, self.companions, unfinished)
        (unfinished / "trainer" / "progress.json").write_text(json.dumps(state) + "\n")
        unfinished.rename(self.out_dir / f"step_{step}")
        for _, old in checkpoints(self.out_dir)[: -self.keep if self.keep else 0]:
            if old.name != (self.out_dir / "final").resolve().name:
                shutil.rmtree(old)


def gather_weights(policy: Policy, world: World) -> dict[str, Tensor]:
    """The whole policy as the engine gets it, in host RAM of the main process; empty elsewhere. All ranks call it."""
    weights = {}
    for name, parameter in policy.full_weights():
        if world.is_main:
            weights[name] = parameter.to("cpu", copy=True)
    return weights


def export(policy: Policy, weights: dict[str, Tensor], companions: Companions, folder: Path) -> None:
    """Writes the policy with these weights, which are in the engine's dtype, in Hugging Face format."""
    policy.model.save_pretrained(folder, state_dict=weights)
    config = copy.deepcopy(policy.model.config)
    config.dtype = policy.dtype  # save_pretrained wrote that of the fp32 masters
    config.save_pretrained(folder)
    for each in companions:
        each.save_pretrained(folder)


def load(folder: Path, policy: Policy, optimizer: Optimizer) -> State:
    """The `state` that was saved. Restores parameters and optimizer state in place, on any number of ranks."""
    parameters, optimizer_state = get_state_dict(policy, optimizer)
    shards = {"model": without_frozen(policy, parameters), "optimizer": optimizer_state}
    dcp.load(shards, checkpoint_id=folder / "trainer")
    everything = parameters | shards["model"]
    set_state_dict(policy, optimizer, model_state_dict=everything, optim_state_dict=shards["optimizer"])
    return json.loads((folder / "trainer" / "progress.json").read_text())


def without_frozen(policy: Policy, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that are trained. With LoRA the others are the base model, which a resume reads from --model."""
    named = policy.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    return {name: value for name, value in parameters.items() if name not in frozen}


def link_final(out_dir: Path, step: int) -> None:
    """Points OUT_DIR/final at the checkpoint of `step`."""
    unfinished = out_dir / ".final"
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(f"step_{step}")
    unfinished.replace(out_dir / "final")
