"""From heartbeats to a sentence: why nobody makes progress, and the report around it. Pure functions."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from guards.heartbeat import WAITS, Heartbeat

STALE_SECONDS = 5.0  # a heartbeat that is older is of a process that does not run
START_SECONDS = 120.0  # longer than later: importing vLLM and starting the engine show no progress
TOGETHER_SECONDS = 2.0  # ranks that came to a halt within this time came to a halt together
ROOT = Path(__file__).parent.parent
FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
OWN_FRAMES = 5  # of our own code, in the report


@dataclass(frozen=True)
class Rank:
    """A rank as another one sees it."""

    heartbeat: Heartbeat
    silent_seconds: float  # since its heartbeat has last changed
    state: str  # of its process, see `state_of`

    @property
    def quiet_seconds(self) -> float:
        """Since its last progress."""
        return self.heartbeat.quiet_seconds + self.silent_seconds

    @property
    def is_halted(self) -> bool:
        """Its process is stopped, or is there no more."""
        return self.state in ("T", "t", "Z", "X")

    @property
    def is_silent(self) -> bool:
        return self.silent_seconds >= STALE_SECONDS or self.is_halted

    @property
    def place(self) -> str:
        return f"{self.heartbeat.phase} of step {self.heartbeat.step}"

    @property
    def name(self) -> str:
        return f"rank {self.heartbeat.rank} (process {self.heartbeat.pid} on {self.heartbeat.host})"


def stalled_seconds(ranks: list[Rank]) -> float:
    """How long there has been no progress anywhere, or a rank has not been running, although others may go on.

    A rank that waits while another one works is no stall.
    """
    running = [rank for rank in ranks if not rank.heartbeat.has_ended]
    silent = [rank.silent_seconds for rank in running if rank.is_halted or rank.silent_seconds >= 2 * STALE_SECONDS]
    quiet = [rank.quiet_seconds - START_SECONDS * (rank.heartbeat.phase == "start") for rank in running]
    return max(0.0, min(quiet, default=0.0), *silent)


def likely_cause(ranks: list[Rank]) -> str:
    """One sentence, without its full stop."""
    if silent := [rank for rank in ranks if _why_silent(rank)]:
        more = f" ({len(silent) - 1} more do not run, either)" if len(silent) > 1 else ""
        others = "; the others wait for it" if len(ranks) > 1 else ""
        return f"{silent[0].name} {_why_silent(silent[0])}, in {silent[0].place}{others}{more}"
    if helped := [rank for rank in ranks if rank.heartbeat.stopped]:
        processes = f"has started processes that are stopped: {helped[0].heartbeat.stopped}"
        return f"{helped[0].name} {helped[0].heartbeat.doing}, in {helped[0].place}, and {processes}"
    busy = [rank for rank in ranks if not rank.heartbeat.doing.startswith(WAITS)]
    if len({(rank.heartbeat.step, rank.heartbeat.phase) for rank in ranks}) > 1 and len(busy) in (0, len(ranks)):
        places = "; ".join(f"{_names(group)} in {place}" for place, group in _by_place(ranks).items())
        return f"the ranks are in different phases, each waiting for the others: {places}"
    if not busy:
        return f"all ranks wait for each other in {ranks[0].place}: look at the network between them"
    first = max(busy, key=lambda rank: rank.quiet_seconds)
    is_first = first.quiet_seconds - min(rank.quiet_seconds for rank in ranks) > TOGETHER_SECONDS
    doing = f"{first.heartbeat.doing}, in {first.place}, without progress for {first.quiet_seconds:.0f} s"
    if first.heartbeat.phase == "checkpoint":
        doing += ": the disk may be slow"
    if len(busy) < len(ranks) or (is_first and len(ranks) > 1):
        return f"{first.name} {doing}; the others wait for it"
    return f"{first.name} {doing}" + ("; so do all others" if len(ranks) > 1 else "")


def _why_silent(rank: Rank) -> str:
    """What is wrong with its process; "" if nothing is."""
    if rank.heartbeat.has_ended or rank.state in ("Z", "X"):
        return "has ended"
    if rank.state in ("T", "t"):
        return f"is stopped (by SIGSTOP or a debugger; `kill -CONT {rank.heartbeat.pid}` lets it go on)"
    if rank.silent_seconds < STALE_SECONDS:
        return ""
    if rank.state == "D":
        return "waits for a disk or a network file system"
    if rank.state == "?":
        return f"has not been heard of for {rank.silent_seconds:.0f} s: it or its host is stopped or unreachable"
    return "is in a call that lets no other Python thread run"


def _by_place(ranks: list[Rank]) -> dict[str, list[Rank]]:
    groups = defaultdict(list)
    for rank in ranks:
        groups[rank.place].append(rank)
    return groups


def _names(ranks: list[Rank]) -> str:
    """For example: ranks 0-2, 5."""
    numbers = sorted(rank.heartbeat.rank for rank in ranks)
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(runs)}"


def report(ranks: list[Rank], seconds: float, folder: Path) -> str:
    """What is printed: the cause, and where each rank is; ranks of which the same can be said share a paragraph."""
    groups: dict[tuple[str, ...], list[Rank]] = defaultdict(list)
    for rank in ranks:
        beat = rank.heartbeat
        doing = _why_silent(rank) or beat.doing
        groups[rank.place, doing, beat.host, beat.stack].append(rank)
    lines = [f"STALL: no progress for {seconds:.0f} s", f"  likely cause: {likely_cause(ranks)}."]
    for (place, doing, host, stack), group in groups.items():
        beats = [rank.heartbeat for rank in group]
        inside = max(rank.heartbeat.phase_seconds + rank.silent_seconds for rank in group)
        quiet = max(rank.quiet_seconds for rank in group)
        memory = f"{max(beat.resident_bytes for beat in beats) / 2**30:.1f} GiB of RAM"
        if gpu := max(beat.gpu_bytes for beat in beats):
            memory += f", {gpu / 2**30:.1f} GiB of tensors on the GPU when the phase began"
        lines.append(f"  {_names(group)} on {host}, in {place} for {inside:.0f} s, quiet for {quiet:.0f} s: {doing}")
        lines.append(f"    {memory}; stack: {stack or 'none: it does not answer'}")
    return "\n".join([*lines, f"  all stacks: {folder}"])


def short_stack(dump: str) -> str:
    """Of faulthandler's dump of all threads, the main thread's innermost frame and those of our own code.

    The main thread is the oldest, so it comes last. "" if it is missing: faulthandler leaves out what is beyond 100
    threads.
    """
    if dump.endswith("\n...\n"):
        return ""
    frames = [match.groupdict() for match in FRAME.finditer(dump.rpartition("(most recent call first)")[2])]
    own = [frame for frame in frames[1:] if _is_own(frame["file"])]
    found = frames[:1] + own[:OWN_FRAMES]
    return " < ".join(f"{_short_path(each['file'])}:{each['line']} {each['function']}" for each in found)


def _is_own(file: str) -> bool:
    is_relative = not file.startswith(("/", "<"))  # as the main script may have been given
    return is_relative or (Path(file).is_relative_to(ROOT) and "site-packages" not in file)


def _short_path(file: str) -> str:
    return file.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
