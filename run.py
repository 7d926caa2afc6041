"""The run folder: who may write to it, what describes the run, its logs and its clock. Nothing of the algorithm.

`docs/runs.md` lists its files. `checkpoint.py` writes step_N/ and final, `evaluate.py` eval/, `report.py`
curves.png, this file the others.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
import torch

from batch import Metrics, Rollout, Sampled, Update, own_values
from data import PromptData
from flags import FLAGS, Recording
from fsdp_utils import World, broadcast_from_main, end_if_requested
from gate.agreement import INPUTS, digests_of, versions
from metrics import Work, merge_updates, throughput
from model.special_tokens import describe_tags
from runtime.files import DiskError, append, best_effort, checkpoints, lock_file, must_write, write
from runtime.history import read_metrics
from runtime.stall import BOARD, in_phase
from runtime.start import RunError
from watch.console import Console
from watch.curves import plot, seconds_of_phases
from watch.reference import judgement
from watch.rollouts import Keeper, bytes_of_tokens, file_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from watch.memory import MemoryWatch

IDLE_STEPS = 5


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


@dataclass
class Run:
    """The clock of a run, on every rank, and its records, which the main process writes."""

    out_dir: Path
    lock: TextIO | None  # from `open_run_folder`, on the main process
    world: World
    memory: MemoryWatch
    total_steps: int
    recording: Recording
    tokenizer: PreTrainedTokenizerBase
    after_step: Callable[[int, Metrics], object] | None = None  # the function of --after_step
    is_stopped: bool = False  # it has returned "stop"
    step: int = 0
    last_step: int = 0
    num_done: int = 0  # steps that are trained and logged
    start: float | None = None  # when the step began, by the clock
    seconds: dict[str, float] = field(default_factory=dict)  # phase of the step -> its time
    updates: list[Metrics] = field(default_factory=list)  # those of the step so far
    num_idle: int = 0  # steps in a row without an advantage
    rollouts: Keeper = field(init=False)
    console: Console = field(init=False)

    def __post_init__(self) -> None:
        tokens = bytes_of_tokens(self.tokenizer) if self.world.is_main and self.recording.keep_rollouts else None
        self.rollouts = Keeper(self.out_dir, self.recording.keep_rollouts, tokens)
        self.console = Console(self.out_dir, self.world.is_main, self.recording)

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
        """Adds the wall time of the block, less that of phases inside it; on CUDA with the work that it queued."""
        if name == "update":  # the last moment to end without it
            end_if_requested()
        start = time.perf_counter()
        self.start = self.start or start  # the clock of a run starts with its first phase
        before = sum(self.seconds.values())
        self.console.tell_phase(name, self.step)
        with in_phase(name, self.step), self.memory.phase(name), torch.profiler.record_function(name):
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        if BOARD.phase != "loop":  # a phase within another one
            self.console.tell_phase(BOARD.phase, self.step)
        inside = sum(self.seconds.values()) - before
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start - inside

    def record(self, metrics: Metrics) -> None:
        """Keeps the metrics of an update."""
        self.updates.append(metrics)

    def metrics(self) -> Metrics:
        """The step so far: its updates as one, `time/<phase>_s`, and `time/step_s` since the last line."""
        times = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        times["time/step_s"] = time.perf_counter() - self.start if self.start else 0.0
        return merge_updates(self.updates) | times

    def log(self, step: int, metrics: Metrics, work: Work | None = None, seconds_RE: Sequence[np.ndarray] = ()) -> None:
        """Appends the line of a step to metrics.jsonl, prints it, starts the next clock. `work`: of a trained step."""
        own = self.metrics()
        metrics = own | metrics
        if work is not None:
            metrics |= throughput(work, seconds_RE, own, self.world)
        metrics |= self.memory.metrics()
        self.start = time.perf_counter()
        self.seconds, self.updates = {}, []
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON knows no nan
        self._append_to_log({"step": step, **finite})
        if self.after_step and step:  # 0 is an evaluation before training
            self._call_hook(step, broadcast_from_main(metrics))
        self.console.tell_step(step, self.total_steps, metrics, seconds_of_phases(metrics))
        for remark in self._remarks(metrics):
            self.say(remark)

    def _remarks(self, metrics: Metrics) -> Iterator[str]:
        """Says it once when nothing was there to learn for some steps."""
        has_signal = metrics.get("reward/frac_groups_with_signal") != 0
        if has_signal and metrics.get("optim/grad_norm") != 0:
            self.num_idle = 0
            return
        self.num_idle += 1
        if self.num_idle == IDLE_STEPS:
            reason = "optim/grad_norm is 0, although rewards differ: see docs/symptoms.md, The reward does not rise"
            if not has_signal:
                reason = "all rewards of a group are the same: see docs/symptoms.md, The reward is always 0"
            yield f"warning: for {IDLE_STEPS} steps {reason}"

    def logged(self, steps: Container[int]) -> dict[int, Metrics]:
        """The lines of metrics.jsonl of these steps, the same on every rank."""
        metrics = {}
        for line in read_metrics(self.out_dir) if self.world.is_main else ():
            if (step := line.pop("step")) in steps:
                metrics[step] = {name: math.nan if x is None else x for name, x in line.items()}
        return broadcast_from_main(metrics)

    def recall(self, last: int) -> None:
        """--after_step gets the lines of all steps to this one again, so that what it keeps is as it was."""
        for step, metrics in self.logged(range(1, last + 1)).items() if self.after_step else ():
            self._call_hook(step, metrics)

    def _call_hook(self, step: int, metrics: Metrics) -> None:
        """Calls --after_step on every rank; what the main process gets decides. Raises RunError if it fails."""
        try:
            is_stopped = self.after_step(step, metrics) == "stop"
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            raise RunError(
                f"--after_step fails after step {step}: {type(error).__name__}: {error}; "
                "mend it. A step that is not evaluated has no metrics of eval/."
            ) from error
        self.is_stopped = broadcast_from_main(is_stopped)

    def say(self, text: str) -> None:
        self.console.say(text)

    def describe_start(self, resumed_from: int, inputs: Iterable[str] = ()) -> None:
        """Appends command, code, packages and hardware to starts.jsonl, and writes uncommitted changes to a patch.

        `inputs`: what flags name, with files of one's own. The tracker starts, too, and goes on after `resumed_from`.
        """
        self.console.start(resumed_from)
        if not self.world.is_main:
            return
        changes = _git("diff", "HEAD") + _own_files(inputs)
        stamp = time.strftime("%Y%m%dT%H%M%S")
        if changes:
            self._write(f"changes_{stamp}.patch", changes)
        device = platform.processor() or platform.machine()
        if self.world.device.type == "cuda":
            device = torch.cuda.get_device_name(self.world.device)
        self._append("starts.jsonl", {
            "time": stamp, "resumed_from": resumed_from, "command": [sys.executable, *sys.argv],
            "world_size": self.world.num_trainers, "tensor_parallel_size": self.world.tp_size,
            "device": device, "cores": os.cpu_count(), "commit": _git("rev-parse", "HEAD").strip() or None,
            "has_uncommitted_changes": bool(changes), "python": platform.python_version(), "packages": versions(),
        })  # fmt: skip

    def describe_data(self, datasets: list[PromptData]) -> None:
        """Says what the sets hold, shows the first prompt as the model sees it, and writes excluded_rows.jsonl."""
        for data in datasets:
            self.say("\n".join(data.describe("excluded_rows.jsonl")))
        train, *held_out = datasets
        trained = {(row.ids.tobytes(), row.encoded_images) for row in train.rows}
        for data in held_out:
            count = sum((row.ids.tobytes(), row.encoded_images) in trained for row in data.rows)
            if count:
                self.say(f"warning: {count} of the {len(data.rows)} prompts of {data.name} are training prompts, too")
        self.say("\n".join([*describe_tags(self.tokenizer), f"first prompt: {train.rows[0].text!r}"]))
        lines = ""
        for data in datasets:
            for row, reason in data.excluded:
                lines += json.dumps({"set": data.name, "row": row, "reason": reason}) + "\n"
        if self.world.is_main and lines:
            self._write("excluded_rows.jsonl", lines)

    def keep(self, sampled: Sampled, trained: Rollout, updates: list[Update]) -> None:
        """Keeps the completions of a step: all in rollouts/, a few in samples.jsonl. `updates` trained on `trained`."""
        self.samples(sampled.step, trained, sampled.group_size)
        if self.recording.keep_rollouts:
            old_logprobs = own_values(trained, updates, attrgetter("old_logprobs_N"))
            self.rollouts.keep(dataclasses.replace(sampled, logprobs=old_logprobs))

    @contextmanager
    def kept_if_it_ends(self, sampled: Sampled, trained: Rollout, updates: list[Update]) -> Iterator[None]:
        """Keeps the step's completions if the block ends the run with a sentence, which then names the file."""
        try:
            yield
        except RunError as error:  # on every rank alike
            self.keep(sampled, trained, updates)
            self.rollouts.wait()
            file = file_of(self.out_dir, self.step)
            if not broadcast_from_main(file.exists()):  # the main process writes it; no rank ends before
                raise
            raise RunError(f"{error} {file} holds the step's tokens, with both log-probs, for --replay.") from error

    def samples(self, step: int, rollout: Rollout, group_size: int) -> None:
        """Appends the first two completions of each of the first two groups to samples.jsonl."""
        for b in (0, 1, group_size, group_size + 1):
            if b < len(rollout.texts):
                advantage = round(float(rollout.advantages[b].mean()), 4) if rollout.advantages else None
                self._append("samples.jsonl", {"step": step, "advantage": advantage} | rollout.describe(b))

    def reward_failures(self, step: int, rollout: Rollout) -> None:
        """Appends what could not be graded to reward_failures.jsonl and names the first three on the console."""
        failed = [b for b, grade in enumerate(rollout.grades) if grade.is_failed]
        for b in failed:
            row, status, text = rollout.rows[b], rollout.grades[b].status, rollout.texts[b]
            record = {"step": step, "row": row.where, "reward_status": status, "answer": row.answer, "completion": text}
            self._append("reward_failures.jsonl", record)
            if b in failed[:3]:
                self.say(f"step {step}: reward {status}, of {row.where}: {text[-100:]!r}")
        if len(failed) > 3:
            self.say(f"step {step}: {len(failed)} completions were not graded; all are in reward_failures.jsonl")

    @contextmanager
    def loading(self, saved_step: int) -> Iterator[None]:
        """The block loads the model: from here on the run can fail."""
        self.console.tell_phase("load", saved_step)
        with self.memory.loading():
            yield

    def finish(self, how: str) -> None:
        """Waits until all files are complete; `how` the run has ended, for status.json."""
        self.rollouts.wait()
        self.console.finish(how)

    def plot(self, is_over: bool = False) -> None:
        """Draws curves.png; after the last step only when the run is over."""
        if self.world.is_main and (is_over or not self.is_last):
            with best_effort(str(self.out_dir / "curves.png"), ValueError):  # the log is damaged
                plot(self.out_dir)

    def judge(self) -> None:
        """Says whether a run of a documented set-up has reached the published figures; nothing of other runs."""
        if self.world.is_main and (text := judgement(self.out_dir)):
            self.say(text)

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

    def _append(self, name: str, record: dict[str, object]) -> None:
        """Appends a line to another file, if the disk takes it."""
        if self.world.is_main:
            with best_effort(str(self.out_dir / name)):
                append(self.out_dir / name, json.dumps(record, ensure_ascii=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        with best_effort(str(self.out_dir / name)):
            write(self.out_dir / name, text)


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
    """What git says of this folder, by default the code's; "" without git or a repository."""
    if not (git := shutil.which("git")):
        return ""
    command = [git, "-C", folder or str(Path(__file__).parent), *arguments]
    output = subprocess.run(command, capture_output=True, check=False).stdout
    return output.decode("utf-8", "backslashreplace")
