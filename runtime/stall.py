"""Where a stall is noticed (`Watch.report_stall`): what each rank is doing, and for which of them the others wait.

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
    line: str = "an unknown line"  # of `own_line`
    quiet_seconds: float = 0.0  # since the last progress, but for time in which the process was stopped
    problem: str = ""  # why it does not run: "has ended", or what another rank sees

    @property
    def waits(self) -> bool:
        return self.doing.startswith(WAITS) and not self.problem


def problem_of(rank: Rank, silent: float) -> str:
    """Why the process does not run, after "rank 1 ..."; "" if it does. `silent`: seconds since it last wrote."""
    if rank.host != socket.gethostname():
        return "has not been heard of: it or its host is stopped or unreachable" if silent >= STALE_SECONDS else ""
    status = psutil.STATUS_DEAD
    with suppress(psutil.Error):
        status = psutil.Process(rank.pid).status()
    if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        return "was killed"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"is stopped, by SIGSTOP or a debugger (`kill -CONT {rank.pid}` resumes it)"
    return f"is in a call that lets no other Python thread run (pid {rank.pid})" if silent >= STALE_SECONDS else ""


def report(ranks: list[Rank], seconds: float) -> str:
    """A line with the likely cause, and a table: ranks that do the same in one line, first those that do not wait."""
    groups = defaultdict(list)  # what is said -> the ranks it is said of
    for rank in sorted(ranks, key=lambda rank: (not rank.problem, rank.waits, -rank.quiet_seconds)):
        where = f"on {rank.host}, in {rank.phase} of step {rank.step}, at {rank.line}"
        groups[f"{rank.problem or rank.doing} {where}"].append(rank.rank)
    names = [", ".join(map(str, sorted(numbers))) for numbers in groups.values()]
    who = [f"each of the ranks {name}" if "," in name else f"rank {name}" for name in names]
    lines = [f"{group} {what}" for group, what in zip(who, groups, strict=True)]
    cause = f"{lines[0]}; the others wait" if len(lines) > 1 else lines[0]
    if all(rank.waits for rank in ranks):
        places = sorted({f"{rank.phase} of step {rank.step}" for rank in ranks})
        why = "look at the network between them" if len(places) == 1 else f"they are in {' and '.join(places)}"
        cause = f"all ranks wait for each other: {why}"
    return "\n  ".join([f"STALL: no progress for {seconds:.0f} s: {cause}", *lines])


def own_line() -> str:
    """The innermost line of our own code at which the main thread is, for example: update.py:158 update_policy."""
    for each, number in traceback.walk_stack(sys._current_frames()[threading.main_thread().ident]):
        file = each.f_code.co_filename
        if file.startswith(f"{ROOT}/") and "site-packages" not in file:
            return f"{file.removeprefix(f'{ROOT}/')}:{number} {each.f_code.co_name}"
    return Rank.line


class Watch(threading.Thread):
    """Writes this rank's file; reads those of the others when this rank makes no progress."""

    def __init__(self, folder: Path, rank: int, num_ranks: int, limit: float) -> None:
        super().__init__(name="stall watch", daemon=True)
        folder.mkdir(exist_ok=True)
        self.files, self.limit = [folder / f"rank_{number}.json" for number in range(num_ranks)], limit
        self.own = Rank(rank, socket.gethostname(), os.getpid())
        self.seen = [(Rank(number), 0.0) for number in range(num_ranks)]  # with the time of the clock
        self.clock = 0.0  # seconds; it stands still while this process is stopped
        self.count, self.moved, self.is_told = -1, 0, False
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
        moved = self.moved  # bytes read from and written to files so far
        with suppress(psutil.Error, AttributeError):  # not Linux, or not allowed
            counters = psutil.Process().io_counters()
            moved = counters.read_chars + counters.write_chars
        has_progress = self.count != BOARD.count or moved - self.moved >= LEAST_MOVED
        self.count, self.moved = BOARD.count, moved
        self.own = replace(self.own, quiet_seconds=0.0 if has_progress else self.own.quiet_seconds + elapsed)
        self.write()
        if self.is_told and has_progress:
            self.tell("STALL: over, the run continues")
        elif not self.is_told and self.own.quiet_seconds >= self.limit - 2 * STALE_SECONDS:
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
            if new != self.seen[number][0]:
                self.seen[number] = new, self.clock
        found, since = self.seen[number]
        problem = found.problem or problem_of(found, self.clock - since)
        return replace(found, quiet_seconds=found.quiet_seconds + self.clock - since, problem=problem)

    def report_stall(self) -> None:
        """Reports a stall, if there is one and this is the lowest rank that runs."""
        if all(self.look_at(number).problem for number in range(self.own.rank)):
            ranks = [self.look_at(number) for number in range(len(self.files))]
            seconds = min(rank.quiet_seconds for rank in ranks if rank.problem not in ("has ended", "was killed"))
            if seconds >= self.limit:
                self.tell(report(ranks, seconds))

    def tell(self, text: str) -> None:
        """Prints the text; leaves that of a stall to scripts/launch.py as a reason."""
        self.is_told = not self.is_told
        print(text, flush=True)
        with suppress(OSError):
            self.files[0].with_name("stall.txt").write_text(text if self.is_told else "", "utf-8", "replace")
