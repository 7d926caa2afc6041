"""Checkpoints: save, verify, resume, export.

    OUT_DIR/step_20/          the policy in Hugging Face format (with LoRA: merged)
    OUT_DIR/step_20/adapter/  with LoRA only: the adapter in peft's format
    OUT_DIR/step_20/trainer/  what a resume needs: the sharded trained parameters and optimizer state
                              (torch.distributed.checkpoint); progress.json, the state of the loop; evaluation.json, the
                              `eval/` metrics of the step; checksums.json, the size and SHA-256 of every file
    OUT_DIR/final             link to the last step's checkpoint, made when the run is complete
    OUT_DIR/best              link to the checkpoint that --keep_best protects

A checkpoint is written under a temporary name, flushed to the disk, and renamed when it is whole. `latest` verifies the
one that it returns. A disk that refuses a checkpoint costs that checkpoint: `Writer` warns and tries again.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from batch import Metrics, State
from flags import Saving
from fsdp_utils import HostGroup, World, gather_from_ranks, local_shard, new_host_group, wait_for_all
from guards.checksums import Checksums, checksums, complaints, flush, write_list
from guards.disk import DiskError, cause, free_space, tolerated
from guards.progress import moving, progress
from guards.shards import ShardPlanner, ShardReader, complaints_of_metadata
from guards.stall import beat
from policy import Policy
from report import read_metrics

Companions = list[PreTrainedTokenizerBase | ProcessorMixin | GenerationConfig]  # of the model, in its folder
Result = TypeVar("Result")

LIST = Path("trainer", "checksums.json")
REFUSED = (OSError, SafetensorError, CheckpointException)  # what a full disk ends in; the last is of `dcp`
LAST_PAUSES = (0.0, 10.0, 60.0)  # seconds before each attempt to write the checkpoint of the last step


# Which checkpoint ----------------------------------------------------------------------------------------------------


def checkpoints(out_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first."""
    found = [(path.name.removeprefix("step_"), path) for path in out_dir.glob("step_*")]
    return sorted((int(step), path) for step, path in found if step.isdigit())


def latest(out_dir: Path, world: World, say: Callable[[str], None]) -> tuple[int, Path | None]:
    """(step, folder) of the last checkpoint that is whole; (0, None) if none was ever written.

    All ranks call it: each verifies a part of the files. A damaged checkpoint is renamed to damaged_step_N, and the one
    before is looked at. Raises DiskError, on all ranks, if all are damaged.
    """
    while True:
        step, folder = gather_from_ranks([(0, None), *checkpoints(out_dir)][-1])[0]
        if folder is None:
            break
        has_lists = any((path / LIST).exists() for _, path in checkpoints(out_dir))
        if not gather_from_ranks(has_lists)[0]:  # what the main process sees counts: file systems may show it late
            say(f"warning: {folder} is of an older version, without checksums: it is not verified.")
            return step, folder
        wrong = complaints(folder, folder / LIST, world.trainer_rank, world.num_trainers)
        if world.is_main and not wrong:
            wrong = complaints_of_metadata(folder)
        wrong = [text for texts in gather_from_ranks(wrong) for text in texts]
        if not wrong:
            return step, folder
        if world.is_main:
            aside = set_aside(folder)
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            say(f"warning: {folder} is damaged: {wrong[0]}{more}. It is now {aside}; the checkpoint before is used.")
        wait_for_all()
    damaged = gather_from_ranks(sorted(path.name for path in out_dir.glob("damaged_step_*")))[0]
    if damaged:
        way_out = "put a good copy of one of them back as step_N, or remove them to start again from step 1"
        raise DiskError(f"{out_dir} has no checkpoint that is whole, only {', '.join(damaged)}; {way_out}.")
    return 0, None


def set_aside(folder: Path) -> Path:
    """The new name of a damaged checkpoint, so that its step can be saved again. Links to it are removed."""
    aside, number = folder.with_name(f"damaged_{folder.name}"), 2
    while aside.exists():
        aside, number = folder.with_name(f"damaged_{folder.name}_{number}"), number + 1
    folder.rename(aside)
    for link in (folder.with_name("final"), folder.with_name("best")):
        if link.is_symlink() and not link.exists():
            link.unlink()
    return aside


def best_checkpoint(out_dir: Path, metric: str) -> Path | None:
    """The checkpoint with the largest value of the metric, of several the first; None if no checkpoint has one.

    Where a signal cut the evaluation short, it was made after the checkpoint: then the log has the value.
    """
    logged = {record["step"]: record.get(metric) for record in read_metrics(out_dir)}
    values = {folder: value for step, folder in checkpoints(out_dir) if (value := logged.get(step)) is not None}
    for _, folder in checkpoints(out_dir):
        with contextlib.suppress(OSError, ValueError, KeyError):  # damaged, or not evaluated
            values[folder] = json.loads((folder / "trainer" / "evaluation.json").read_text())[metric]
    return max(values, key=values.get, default=None)


def point(link: Path, folder: Path) -> None:
    """Makes the link, which stands beside the folder, point to it."""
    unfinished = link.with_name(f".{link.name}")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(folder.name)
    unfinished.replace(link)


def link_final(out_dir: Path, step: int) -> None:
    """Points OUT_DIR/final at the checkpoint of `step`."""
    point(out_dir / "final", out_dir / f"step_{step}")


# Save ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """What the main process adds to the shards."""

    step: int
    policy: Policy
    weights: dict[str, Tensor]  # in the engine's dtype; empty on the other ranks
    state: State
    evaluation: Metrics


class Writer:
    """Writes checkpoints: while the caller waits, or in the background from a copy in host RAM. Every rank has one."""

    def __init__(
        self, out_dir: Path, companions: Companions, saving: Saving, world: World, say: Callable[[str], None]
    ) -> None:
        self.out_dir, self.saving, self.world, self.say = out_dir, saving, world, say
        self.companions = files_of(companions) if world.is_main else {}
        self.group = new_host_group() if saving.async_checkpoint else None
        self.thread = ThreadPoolExecutor(max_workers=1) if saving.async_checkpoint else None
        self.pending: Future[str | None] | None = None
        self.pending_step = 0
        self.num_refused = 0  # saves in a row
        self.next_try: int | None = None  # step, after a save that the disk refused

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether to save after this step: at its period, after the last step, or again. All ranks call it."""
        if self.pending is not None and all(gather_from_ranks(self.pending.done())):
            self.wait()
        is_turn = self.saving.save_every > 0 and step % self.saving.save_every == 0
        return is_last or is_turn or (self.next_try is not None and step >= self.next_try)

    def is_saved(self, step: int) -> bool:
        """Whether there is nothing to save after this step. All ranks call it. It waits for the save before."""
        self.wait()
        return gather_from_ranks(step == 0 or (self.out_dir / f"step_{step}").exists())[0]

    def save_before_end(self, step: int, policy: Policy, optimizer: Optimizer, state: State, metrics: Metrics) -> None:
        """For a run that a signal ends: one attempt, if there is something to save. Raises DiskError on all ranks."""
        if not self.is_saved(step):
            self.save(step, policy, optimizer, state, metrics)
        if not self.is_saved(step):
            raise DiskError(f"the checkpoint of step {step} could not be written; the one before is the last.")

    def save(
        self, step: int, policy: Policy, optimizer: Optimizer, state: State, metrics: Metrics, is_last: bool = False
    ) -> None:
        """Writes OUT_DIR/step_<step>, then removes the oldest ones. All ranks call it. It waits for the save before it.

        `state` comes back from `load`; of the step's metrics the `eval/` ones are kept. If the disk of any rank refuses
        the checkpoint, what was written of it is removed, a warning says so, and `is_due` asks again 1, 2, 4, ... steps
        later. The last step's checkpoint is written before this returns; it is tried three times, and then DiskError is
        raised on all ranks.
        """
        self.wait()
        for pause in LAST_PAUSES if is_last else (0.0,):
            time.sleep(pause)
            refused = self._save(step, policy, optimizer, state, metrics, is_last)
            if refused is None:
                break
        if is_last and refused is not None:
            last = [(0, "the start"), *checkpoints(self.out_dir)][-1][1]
            way_on = f"make room, and start the same command again, which continues from {last}"
            raise DiskError(f"the checkpoint of the last step, {step}, could not be written: {refused}; {way_on}.")
        if self.pending is None:
            self._note(step, refused)

    def wait(self) -> None:
        """Returns when no rank writes a checkpoint any more."""
        if self.pending is not None:
            beat("waits for the last checkpoint, which is written in the background")
            pending, self.pending = self.pending, None
            self._note(self.pending_step, pending.result())

    def _save(
        self, step: int, policy: Policy, optimizer: Optimizer, state: State, metrics: Metrics, is_last: bool
    ) -> str | None:
        """Why the disk refused the checkpoint; None if it did not, or if it is written in the background."""
        unfinished = self.out_dir / f"unfinished_step_{step}"
        parameters, optimizer_state = get_state_dict(policy, optimizer)
        shards = {"model": without_frozen(policy, parameters), "optimizer": optimizer_state}
        weights = gather_weights(policy, self.world)
        beat("writes the checkpoint")
        evaluation = {name: x for name, x in metrics.items() if name.startswith("eval/") and math.isfinite(x)}
        content = Content(step, policy, weights, state, evaluation)
        try:
            self._together(lambda: self._make_folder(unfinished))
            self._together(lambda: policy.save_adapter(unfinished / "adapter", self.world))
            if self.thread is None or is_last:
                num_bytes = 2 * (size_of(shards) + size_of(weights))  # written, and read again for the checksums
                with moving("write the checkpoint", num_bytes):
                    self._write(content, lambda: dcp.save(shards, checkpoint_id=unfinished / "trainer"))
                return None
        except DiskError as error:
            return str(error)
        # returns when the copy is made
        written = dcp.async_save(shards, checkpoint_id=unfinished / "trainer", process_group=self.group)
        self.pending, self.pending_step = self.thread.submit(self._write_in_background, content, written.result), step
        return None

    def _write_in_background(self, content: Content, write_shards: Callable[[], object]) -> str | None:
        try:
            self._write(content, write_shards, self.group)
        except DiskError as error:
            return str(error)
        return None

    def _write(self, content: Content, write_shards: Callable[[], object], group: HostGroup = None) -> None:
        """Shards, their checksums by the rank that wrote them, the rest. Raises DiskError on all ranks."""
        unfinished = self.out_dir / f"unfinished_step_{content.step}"
        self._together(write_shards, group)
        own = (unfinished / "trainer").glob(f"__{self.world.trainer_rank}_*")  # as `dcp` names them
        sums = self._together(lambda: checksums(unfinished, own), group)
        self._together(lambda: self._complete(content, unfinished, sums), group)

    def _together(self, work: Callable[[], Result], group: HostGroup = None) -> list[Result]:
        """What `work` gives on each rank. Raises DiskError, on all ranks, if the disk refuses something on one.

        Then nothing is left of the checkpoint: a disk that is full needs the room.
        """
        result, refused = None, None
        try:
            result = work()
        except REFUSED as error:
            refused = f"{reason(error)} ({free_space(self.out_dir)})"
        outcomes = gather_from_ranks((result, refused), group)
        if reasons := [why for _, why in outcomes if why]:
            self._remove_unfinished()
            raise DiskError(reasons[0])
        return [result for result, _ in outcomes]

    def _remove_unfinished(self) -> None:
        for leftover in self.out_dir.glob("unfinished_step_*") if self.world.is_main else ():
            shutil.rmtree(leftover, ignore_errors=True)

    def _make_folder(self, unfinished: Path) -> None:
        """Also removes what a kill left half-written."""
        self._remove_unfinished()
        if self.world.is_main:
            unfinished.mkdir()

    def _complete(self, content: Content, unfinished: Path, sums: list[Checksums]) -> None:
        """On the main process: adds the rest, renames the folder, removes old ones."""
        if not self.world.is_main:
            return
        export(content.policy, content.weights, self.companions, unfinished)
        trainer = unfinished / "trainer"
        (trainer / "progress.json").write_text(json.dumps(content.state) + "\n")
        (trainer / "evaluation.json").write_text(json.dumps(content.evaluation) + "\n")
        known = {name: each for part in sums for name, each in part.items()}
        files = {str(file.relative_to(unfinished)): file for file in unfinished.rglob("*") if file.is_file()}
        rest = [files[name] for name in sorted(files.keys() - known.keys())]
        write_list(unfinished, unfinished / LIST, known | checksums(unfinished, rest))
        unfinished.rename(self.out_dir / f"step_{content.step}")
        with tolerated(str(self.out_dir / "best")):  # the checkpoint is whole, whatever happens now
            flush(self.out_dir)
            self._remove_old()

    def _remove_old(self) -> None:
        """Beyond --keep_checkpoints, but for the one that `final` points to, and the best.

        A complete run that is being prolonged always has a final policy.
        """
        protected, keep = {(self.out_dir / "final").resolve().name}, self.saving.keep_checkpoints
        if self.saving.keep_best and (best := best_checkpoint(self.out_dir, self.saving.keep_best)):
            point(self.out_dir / "best", best)
            protected.add(best.name)
        for _, old in checkpoints(self.out_dir)[: -keep if keep else 0]:
            if old.name not in protected:
                shutil.rmtree(old.rename(old.with_name(f"unfinished_{old.name}")), ignore_errors=True)

    def _note(self, step: int, refused: str | None) -> None:
        """Sets when to try again."""
        if refused is None:
            self.num_refused, self.next_try = 0, None
            return
        self.num_refused, self.next_try = self.num_refused + 1, step + 2**self.num_refused
        left = f"older checkpoints are untouched, the next attempt is after step {self.next_try}"
        self.say(f"warning: the checkpoint of step {step} could not be written: {refused}; {left}.")


def reason(error: BaseException) -> str:
    """Why the disk refused something; of a failure in `dcp`, that of the first rank."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    # torch does not pass on what the system said.
    return "a file could not be written to its end" if "unexpected pos" in str(error) else cause(error)


def gather_weights(policy: Policy, world: World) -> dict[str, Tensor]:
    """The whole policy as the engine gets it, in host RAM of the main process; empty elsewhere. All ranks call it."""
    weights, count = {}, len(policy.describe_weights()["names"])
    for name, parameter in progress("gather the weights", items=policy.full_weights(), total=count):
        if world.is_main:
            weights[name] = parameter.to("cpu", copy=True)
    return weights


def size_of(tensors: dict[str, object]) -> int:
    """Bytes of this rank's shards, in a dict of any depth."""
    return sum(local_shard(each).nbytes for each in tree_iter(tensors) if isinstance(each, Tensor))


def files_of(companions: Companions) -> dict[str, bytes]:
    """Name -> content of the files that they are saved as.

    Made once: the library of the tokenizers reports a full disk as a plain `Exception`, which nobody should catch.
    """
    with tempfile.TemporaryDirectory() as folder:
        for each in companions:
            each.save_pretrained(folder)
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def export(policy: Policy, weights: dict[str, Tensor], companions: dict[str, bytes], folder: Path) -> None:
    """Writes the policy with these weights, which are in the engine's dtype, in Hugging Face format.

    `companions`: of `files_of`. Raises OSError or SafetensorError.
    """
    policy.model.save_pretrained(folder, state_dict=weights)
    config = copy.deepcopy(policy.model.config)
    config.dtype = policy.dtype  # save_pretrained wrote that of the fp32 masters
    config.save_pretrained(folder)
    for name, content in companions.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


# Load ----------------------------------------------------------------------------------------------------------------


def load(folder: Path, policy: Policy, optimizer: Optimizer) -> State:
    """The `state` that was saved. Restores parameters and optimizer state in place, on any number of ranks.

    Raises DiskError for shards that are not of this policy and optimizer, or hold anything but numbers.
    """
    parameters, optimizer_state = get_state_dict(policy, optimizer)
    shards = {"model": without_frozen(policy, parameters), "optimizer": optimizer_state}
    try:
        with moving("load the checkpoint", size_of(shards)):
            dcp.load(shards, storage_reader=ShardReader(folder / "trainer"), planner=ShardPlanner())
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise DiskError(f"{folder} cannot be loaded: {cause(first)}") from error
    everything = parameters | shards["model"]
    set_state_dict(policy, optimizer, model_state_dict=everything, optim_state_dict=shards["optimizer"])
    return json.loads((folder / "trainer" / "progress.json").read_text())


def without_frozen(policy: Policy, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that are trained. With LoRA the others are the base model, which a resume reads from --model."""
    named = policy.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    return {name: value for name, value in parameters.items() if name not in frozen}
