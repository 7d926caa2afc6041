"""Checkpoints: save, resume, export.

    OUT_DIR/step_20/            the policy in Hugging Face format (with LoRA: merged)
    OUT_DIR/step_20/adapter/    with LoRA only: the adapter in peft's format
    OUT_DIR/step_20/critic/     with --critic only: the value model, which --critic reads again
    OUT_DIR/step_20/trainer/    what a resume needs: the sharded trained parameters, optimizer state and moving
                                reference (torch.distributed.checkpoint); progress.json, the state of the loop
    OUT_DIR/step_20/sizes.json  the size of every other file
    OUT_DIR/final               link to the last step's checkpoint, made when the run is complete
    OUT_DIR/best                link to the checkpoint that --keep_best protects

A checkpoint is written under a temporary name and renamed when it is whole. `latest` finds files that are missing or
cut off. A checkpoint that the disk refuses is left out; the one of the last step must be written. `trainer/` holds
pickles: trust it as you trust code. The exported policy (safetensors) holds none.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from flags import Saving
from fsdp_utils import World, broadcast_from_main, gather_from_ranks
from policy import Policy, empty_policy
from runtime.files import STATE, DiskError, best_effort, cause, checkpoints, find_damage, free_space, write_sizes
from runtime.history import read_metrics
from runtime.progress import progress
from runtime.rank import RunError

Companions = dict[str, bytes]  # name -> content of the files beside the weights of a model
Weights = dict[str, Tensor]  # by name, in the engine's dtype
State = dict[str, object]  # of the loop, by name: progress.json

MOST_REFUSED = 3  # checkpoints in a row that the disk may refuse: what is trained without one is lost
REFUSED = (OSError, SafetensorError, CheckpointException)  # what a full disk ends in; the last is of `dcp`
COPIED = (  # files of a tokenizer, and of a processor
    "*token*.json", "*processor*.json", "tekken.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


# Which checkpoint ----------------------------------------------------------------------------------------------------


def latest(out_dir: Path, world: World, say: Callable[[str], None]) -> tuple[int, Path | None]:
    """(step, folder) of the last checkpoint that is whole; (0, None) if none was ever written. All ranks call it.

    A damaged one becomes damaged_step_N, so that its step can be saved again. Raises DiskError, on all ranks, if there
    are only damaged ones.
    """
    found = 0, None
    for step, folder in reversed(checkpoints(out_dir)) if world.is_main else ():
        if not (damage := find_damage(folder)):
            found = step, folder
            break
        aside = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)  # of an earlier start
        folder.rename(aside)
        say(f"warning: {folder} is damaged: {damage}. It is now {aside}; the checkpoint before is used.")
    found, damaged = broadcast_from_main((found, sorted(path.name for path in out_dir.glob("damaged_step_*"))))
    if damaged and found[1] is None:
        way_out = "put a good copy of one of them back as step_N, or remove them to start again from step 1"
        raise DiskError(f"{out_dir} has no checkpoint that is whole, only {', '.join(damaged)}; {way_out}.")
    return found


def best_checkpoint(out_dir: Path, metric: str) -> Path | None:
    """The checkpoint with the largest value of the metric in the log, of several the first; None if none has one."""
    logged = {record["step"]: record.get(metric) for record in read_metrics(out_dir)}
    values = {folder: value for step, folder in checkpoints(out_dir) if (value := logged.get(step)) is not None}
    return max(values, key=values.get, default=None)


def set_link(link: Path, folder: Path) -> None:
    """Makes the link, which stands beside the folder, point to it."""
    unfinished = link.with_name(f".{link.name}")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(folder.name)
    unfinished.replace(link)


# Save ----------------------------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """Writes checkpoints. Every rank has one."""

    out_dir: Path
    companions: Companions
    saving: Saving
    world: World
    say: Callable[[str], None]
    num_refused: int = 0  # checkpoints in a row

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether to save after this step: at its period, and after the last one."""
        return is_last or (self.saving.save_every > 0 and step % self.saving.save_every == 0)

    def save(self, step: int, policy: Policy, optimizer: Optimizer, state: State, is_required: bool = False) -> None:
        """Writes OUT_DIR/step_<step>, if it is not there, then removes the oldest ones. All ranks call it.

        `state` comes back from `load`. Step 0 is --model, and is not written. If the disk of any rank refuses
        something, nothing is left of this checkpoint, and a warning says so. If it is required, or the last of
        `MOST_REFUSED` in a row, DiskError is raised instead, on all ranks.
        """
        if gather_from_ranks(step == 0 or (self.out_dir / f"step_{step}").exists())[0]:
            return
        last = [(0, "the start"), *checkpoints(self.out_dir)][-1][1]
        if state.get("is_broken"):
            reason = f"step {step} is not saved, because none of its updates was finite; {last} is the last checkpoint"
            if is_required:
                raise RunError(f"{reason}. Lower --learning_rate in a new --out_dir.")
            self.say(f"warning: {reason}.")
            return
        try:
            self._save(step, policy, optimizer, state)
            self.num_refused = 0
        except DiskError as error:
            refused = f"the checkpoint of step {step} could not be written: {error}"
            self.num_refused += 1
            if is_required or self.num_refused >= MOST_REFUSED:
                way_on = f"make room, and start the same command again, which continues from {last}"
                raise DiskError(f"{refused}; {way_on}.") from error
            self.say(f"warning: {refused}; the run continues, and {last} is its last checkpoint.")

    def _save(self, step: int, policy: Policy, optimizer: Optimizer, state: State) -> None:
        """Raises DiskError on all ranks."""
        unfinished = self.out_dir / f"unfinished_step_{step}"
        shards, weights = shards_of(policy, optimizer), gather_weights(policy, self.world)
        self._remove_unfinished()  # what a kill left
        self._together(lambda: unfinished.mkdir() if self.world.is_main else None)
        if policy.adapter:
            self._together(lambda: policy.adapter.save(unfinished / "adapter", self.world))
        for name, other in policy.beside.items():
            self._together(partial(other.save, unfinished / name, self.world))
        self._together(lambda: dcp.save(shards, checkpoint_id=unfinished / "trainer"))
        self._together(lambda: self._complete(unfinished, policy, weights, state))

    def _together(self, work: Callable[[], None]) -> None:
        """Does the work of each rank. Raises DiskError on all ranks if the disk of one refuses something.

        The unfinished checkpoint is removed before: a full disk needs the room.
        """
        refused = ""
        try:
            work()
        except REFUSED as error:
            refused = f"{reason(error)} ({free_space(self.out_dir)})"
        if refusals := list(filter(None, gather_from_ranks(refused))):
            self._remove_unfinished()
            raise DiskError(refusals[0])

    def _remove_unfinished(self) -> None:
        for leftover in self.out_dir.glob("unfinished_step_*") if self.world.is_main else ():
            shutil.rmtree(leftover, ignore_errors=True)

    def _complete(self, unfinished: Path, policy: Policy, weights: Weights, state: State) -> None:
        """On the main process: writes the rest, renames the folder, removes old checkpoints."""
        if not self.world.is_main:
            return
        export(policy, weights, self.companions, unfinished)
        for file in unfinished.rglob("*.safetensors"):  # which its library lets the owner alone read
            file.chmod((unfinished / "config.json").stat().st_mode)
        (unfinished / STATE).write_text(json.dumps(state) + "\n", "utf-8")
        write_sizes(unfinished)
        unfinished.rename(self.out_dir / unfinished.name.removeprefix("unfinished_"))
        with best_effort(str(self.out_dir / "best"), ValueError):  # the checkpoint is whole, whatever happens now
            self._remove_old()

    def _remove_old(self) -> None:
        """Removes the oldest beyond --keep_checkpoints, but not the best one, nor the one that `final` points to."""
        protected, keep = {(self.out_dir / "final").resolve().name}, self.saving.keep_checkpoints
        if self.saving.keep_best and (best := best_checkpoint(self.out_dir, self.saving.keep_best)):
            set_link(self.out_dir / "best", best)
            protected.add(best.name)
        for _, old in checkpoints(self.out_dir)[: -keep if keep else 0]:
            if old.name not in protected:
                shutil.rmtree(old.rename(old.with_name(f"unfinished_{old.name}")), ignore_errors=True)


def reason(error: BaseException) -> str:
    """The reason why the disk refused something; for a failure in `dcp`, the first rank's."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    # torch does not pass on what the system said.
    return "a file could not be written to its end" if "unexpected pos" in str(error) else cause(error)


def gather_weights(policy: Policy, world: World) -> Weights:
    """The whole policy as the engine gets it, in host RAM of the main process; empty elsewhere. All ranks call it."""
    weights, count = {}, len(policy.named_weights())
    for name, parameter in progress("gather the weights", items=policy.full_weights(), total=count):
        if world.is_main:
            weights[name] = parameter.to("cpu", copy=True)
    return weights


def files_of(path: str, dtype: torch.dtype, stop_ids: Sequence[int] = ()) -> Companions:
    """All that the export of a policy of --model writes, but its weights; those of the tokenizer are copied.

    Made once, at the start: what cannot be saved ends the run there. Raises ValueError.
    """
    model = empty_policy(path, dtype, dtype).model
    with tempfile.TemporaryDirectory() as made:
        try:
            model.save_pretrained(made, state_dict={})
            load_generation_config(path, model.config, stop_ids).save_pretrained(made)
        except (ValueError, StrictDataclassError) as error:
            what = f"its config.json or generation_config.json could not be saved with a checkpoint: {error}"
            raise ValueError(f"--model {path}: {what}") from None
        files = {file.name: file.read_bytes() for file in Path(made).iterdir()}
    files["config.json"] = json.dumps(with_old_names(json.loads(files["config.json"])), indent=2).encode()
    folder = path if Path(path).is_dir() else snapshot_download(path, allow_patterns=COPIED)
    for file in (each for pattern in COPIED for each in Path(folder).glob(pattern)):
        files[str(file.relative_to(folder))] = file.read_bytes()
    return files


def with_old_names(config: dict[str, object]) -> dict[str, object]:
    """The config that has the angles of positions under the names that transformers 4 reads, too."""
    named = {name: with_old_names(value) if name == "text_config" else value for name, value in config.items()}
    by_kind = config.get("rope_parameters") or {}
    angles = dict(by_kind.get("full_attention") or by_kind)  # some have others in each kind of layer
    kind = angles.pop("rope_type", None)
    if kind is None:
        return named
    for name, in_neox in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
        if name in angles:
            named[in_neox if config["model_type"] == "gpt_neox" else name] = angles.pop(name)
    if windows := by_kind.get("sliding_attention"):
        named["rope_local_base_freq"] = windows["rope_theta"]
    scaling = angles | {"type": kind, "rope_type": kind} if kind != "default" or angles else None
    named["rope_scaling"] = scaling  # null, too: some types have another default
    if kind == "longrope":
        named["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
        if config["model_type"].startswith("phi"):  # which takes three fields alone
            del scaling["original_max_position_embeddings"], scaling["rope_type"]
    return named


def load_generation_config(path: str, config: PretrainedConfig, stop_ids: Sequence[int]) -> GenerationConfig:
    """The generation_config.json of a folder or hub id, with more ids at which a completion ends.

    What is invalid, and could not be saved again, is left out, and said.
    """
    file = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    derived = GenerationConfig.from_model_config(config).to_diff_dict()
    stored = json.loads(Path(file).read_text("utf-8")) if file else derived
    given = stored.pop("eos_token_id", None)
    if given is None:
        given = derived.get("eos_token_id")
    ends = given if isinstance(given, list) else [given]
    ends = [i for i in dict.fromkeys([*ends, *stop_ids]) if i is not None]  # each once, in this order
    kept = {}
    for name, value in [*stored.items()] * 2:  # one that is invalid without another comes behind it the second time
        with suppress(ValueError, TypeError):
            GenerationConfig(**kept | {name: value}).validate(strict=True)
            kept[name] = value
    if invalid := [f"{name} = {value!r}" for name, value in stored.items() if name not in kept]:
        print(f"warning: generation_config of --model: left out as invalid: {', '.join(invalid)}", flush=True)
    return GenerationConfig(**kept, eos_token_id=ends[0] if len(ends) == 1 else ends or None)


def export(policy: Policy, weights: Weights, companions: dict[str, bytes], folder: Path) -> None:
    """Writes the policy with these weights in Hugging Face format. `companions`: of `files_of`."""
    policy.model.save_pretrained(folder, state_dict=weights)
    for name, content in companions.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


# Load ----------------------------------------------------------------------------------------------------------------


def load(folder: Path, policy: Policy, optimizer: Optimizer) -> State:
    """The `state` that was saved. Restores parameters, optimizer and moving reference in place, on any number of ranks.

    Raises DiskError for shards that are not of this policy and optimizer, or of other parameters of it.
    """
    shards = shards_of(policy, optimizer)
    try:
        dcp.load(shards, checkpoint_id=folder / "trainer", planner=SameParameters(folder, policy))
    except CheckpointException as error:
        raise DiskError(f"{folder} cannot be loaded: {reason(error)}") from error
    restore(policy, optimizer, shards)
    return json.loads((folder / STATE).read_text("utf-8"))


def restore(policy: Policy, optimizer: Optimizer, shards: dict[str, dict[str, object]]) -> None:
    """Takes parameters and optimizer state from what `shards_of` has given and `dcp` has filled."""
    parts = {"model_state_dict": shards["model"], "optim_state_dict": shards["optimizer"]}
    set_state_dict(policy, optimizer, **parts, options=StateDictOptions(strict=False))  # frozen ones stay


class SameParameters(DefaultLoadPlanner):
    """Refuses shards of other parameters of the policy than the trained ones: the rest would be as in --model."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        super().__init__()
        self.folder = folder
        self.known = {f"model.{name}" for name, _ in policy.named_parameters(remove_duplicate=False)}

    def create_local_plan(self) -> LoadPlan:
        saved = {key for key in self.metadata.state_dict_metadata if key.startswith("model.")}
        trained = self.known.intersection(self.state_dict)
        kinds = {"trained and are frozen now": saved - trained, "frozen and are trained now": trained - saved}
        found = []
        for kind, names in kinds.items():
            if names:
                found.append(f"{len(names)} parameters were {kind}, such as {min(names).removeprefix('model.model.')}")
        if found and saved <= self.known:  # else it is another policy
            way_on = f"go on from its weights, by --model {self.folder} with another --out_dir"
            raise ValueError(f"{' and '.join(found)}; train the same again, or {way_on}")
        return super().create_local_plan()


def shards_of(policy: Policy, optimizer: Optimizer) -> dict[str, dict[str, object]]:
    """Trained parameters, optimizer state, a reference that moves, and what is beside. --model has the rest."""
    parameters, state = get_state_dict(policy, optimizer)
    for name, parameter in policy.named_parameters(remove_duplicate=False):  # tied: both names
        if not parameter.requires_grad:
            parameters.pop(name, None)
    shards = {"model": parameters, "optimizer": state}
    for reference in policy.moving_references:
        # They share the storage: loading writes into the reference.
        shards["reference"] = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    return shards | policy.beside
