"""Where a stall is noticed (`StallWatch.report_stall`): what each rank is doing, and for which of them the others wait.

A thread of every rank writes OUT_DIR/ranks/rank_N.json once a second and when a phase begins. When no rank has made
progress for --stall_seconds, the lowest one that runs prints a table, once. That never ends a run: --timeout_minutes
does, and the first line of the table is then the reason. Files, not torch's store: any rank may be the one that stops.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

WAITS = "waits for the other ranks"  # so begins what a rank is doing that others keep from going on
INTERVAL, SHORTEST = 1.0, 0.1  # seconds between two writings: at most, and at least
STALE_SECONDS = 5.0  # a file that is older is of a process that does not run
LEAST_MOVED = 2**20  # bytes of files, between two looks, that are progress, as of a checkpoint: this thread's are less
ROOT = Path(__file__).parent.parent


@dataclass
class Board:
    """What this process is doing. Its main thread writes it, the watch reads it."""

    step: int = 0
    phase: str = "start"
    doing: str = "starts"
    count: int = 0  # grows with all progress
    has_changed: threading.Event = field(default_factory=threading.Event)  # the phase


BOARD = Board()


def beat(doing: str, is_progress: bool = True) -> None:
    """Says what this rank does now, and for what it waits, as the end of a sentence that begins with "rank 1".

    `is_progress=False`: it is in the same place as before. It costs less than a microsecond: nothing is written here.
    """
    BOARD.doing = doing
    BOARD.count += is_progress


@contextmanager
def in_phase(name: str, step: int) -> Iterator[None]:
    """The block is phase `name` of the step. After an exception the phase stays: it is where the rank ended."""
    outer = BOARD.phase
    _enter(name, step)
    yield
    _enter("loop" if outer == "start" else outer, step)


def _enter(phase: str, step: int) -> None:
    BOARD.phase, BOARD.step = phase, step
    beat("computes")
    BOARD.has_changed.set()


@dataclass(frozen=True)
class Rank:
    """The content of a rank's file."""

    rank: int
    host: str = "an unknown host"
    pid: int = 0
    time: str = ""
    step: int = 0
    phase: str = "start"
    doing: str = "starts"
    line: str = "an unknown line"  # from `own_line`
    quiet_seconds: float = 0.0  # since the last progress, but for time in which the process was stopped
    problem: str = ""  # why it does not run, after "rank 1": "has ended", or what another rank sees

    @property
    def waits(self) -> bool:
        return self.doing.startswith(WAITS) and not self.problem


def report(ranks: list[Rank], seconds: float) -> str:
    """A line with the likely cause, and a table: ranks that do the same in one line, first those that do not wait."""
    groups = defaultdict(list)  # what ranks do, and where -> their numbers
    for rank in sorted(ranks, key=lambda rank: (not rank.problem, rank.waits, -rank.quiet_seconds)):
        place = f"{rank.phase} of step {rank.step}"
        groups[f"{rank.problem or rank.doing} on {rank.host}, in {place}, at {rank.line}"].append(rank.rank)
    lines = []
    for activity, numbers in groups.items():
        names = ", ".join(map(str, sorted(numbers)))
        lines.append(f"each of the ranks {names} {activity}" if len(numbers) > 1 else f"rank {names} {activity}")
    cause = f"{lines[0]}; the others wait" if len(lines) > 1 else lines[0]
    if all(rank.waits for rank in ranks):
        cause = "all ranks wait for each other: look at the network between them, and whether they do the same"
    return "\n  ".join([f"STALL: no progress for {seconds:.0f} s: {cause}", *lines])


def own_line() -> str:
    """The innermost line of our own code at which the main thread is, for example: update.py:158 update_policy."""
    for frame, number in traceback.walk_stack(sys._current_frames()[threading.main_thread().ident]):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and "site-packages" not in file.parts:
            return f"{file.relative_to(ROOT)}:{number} {frame.f_code.co_name}"
    return Rank.line


class StallWatch(threading.Thread):
    """Writes this rank's file; reads those of the others when this rank makes no progress."""

    def __init__(self, folder: Path, rank: int, num_ranks: int, limit: float) -> None:
        super().__init__(name="stall watch", daemon=True)
        folder.mkdir(exist_ok=True)
        self.files = [folder / f"rank_{number}.json" for number in range(num_ranks)]
        self.limit = limit  # seconds
        self.own = Rank(rank, socket.gethostname(), os.getpid())
        self.last_seen = [(Rank(number), 0.0) for number in range(num_ranks)]  # with the time of the clock
        self.clock = 0.0  # seconds; it stands still while this process is stopped
        self.count = -1  # that of the board at the last look
        self.num_moved = 0  # bytes read from and written to files until then
        self.has_reported = False
        self.files[rank].touch()
        self.tick(0.0)
        atexit.register(self.write, "has ended")
        hook = sys.excepthook  # the launcher reports the phase in the file: it must be the one that failed
        sys.excepthook = lambda *error: self.write("has ended") or hook(*error)

    def run(self) -> None:
        now = time.monotonic()
        while True:
            BOARD.has_changed.wait(INTERVAL)
            BOARD.has_changed.clear()
            before, now = now, time.monotonic()
            self.tick(now - before)
            time.sleep(SHORTEST)

    def tick(self, elapsed: float) -> None:
        """Writes, and looks at the others if it is time to. `elapsed`: seconds since the last time."""
        elapsed = min(elapsed, 2 * INTERVAL)  # in the others this process was stopped
        self.clock += elapsed
        count, num_moved = self.count, self.num_moved
        self.count = BOARD.count
        with suppress(psutil.Error, AttributeError):  # not Linux, or not allowed
            counters = psutil.Process().io_counters()
            self.num_moved = counters.read_chars + counters.write_chars
        has_progress = self.count != count or self.num_moved - num_moved >= LEAST_MOVED
        self.own = replace(self.own, quiet_seconds=0.0 if has_progress else self.own.quiet_seconds + elapsed)
        self.write()
        if self.has_reported and has_progress:
            self.tell("STALL: over, the run continues", is_stall=False)
        elif not self.has_reported and self.own.quiet_seconds >= self.limit - 2 * STALE_SECONDS:
            self.report_stall()

    def write(self, problem: str = "") -> None:
        """In place: over NFS a file that is replaced may be seen late. A full disk keeps its block."""
        self.own = replace(
            self.own, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), step=BOARD.step, phase=BOARD.phase, doing=BOARD.doing,
            line=self.own.line if problem else own_line(), problem=problem,
        )  # fmt: skip
        with suppress(OSError), self.files[self.own.rank].open("r+", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self.own)))
            file.truncate()

    def look_at(self, number: int) -> Rank:
        with suppress(OSError, ValueError, TypeError):  # it is not there yet, or is being written
            new = Rank(**json.loads(self.files[number].read_bytes()))
            if new != self.last_seen[number][0]:
                self.last_seen[number] = new, self.clock
        rank, since = self.last_seen[number]
        silent = self.clock - since
        problem = rank.problem
        if silent >= STALE_SECONDS and not problem:
            stopped = f"is stopped (`kill -CONT {rank.pid}` resumes it)"
            problem = f"does not answer: its process {rank.pid} {stopped}, was killed, or hangs in a call"
        return replace(rank, quiet_seconds=rank.quiet_seconds + silent, problem=problem)

    def report_stall(self) -> None:
        """Reports a stall, if there is one and this is the lowest rank that runs."""
        if all(self.look_at(number).problem for number in range(self.own.rank)):
            ranks = [self.look_at(number) for number in range(len(self.files))]
            seconds = min(rank.quiet_seconds for rank in ranks)
            if seconds >= self.limit:
                self.tell(report(ranks, seconds), is_stall=True)

    def tell(self, text: str, is_stall: bool) -> None:
        """Prints the text; leaves that of a stall to scripts/launch.py as a reason."""
        self.has_reported = is_stall
        print(text, flush=True)
        with suppress(OSError):
            self.files[0].with_name("stall.txt").write_text(text if is_stall else "", "utf-8", "replace")
