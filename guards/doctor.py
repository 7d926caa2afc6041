"""The stall doctor: a thread of every rank that writes its heartbeat and reads those of the others.

The lowest rank that runs is in charge; the others only look at the ranks below theirs. When nobody has made progress
for --stall_seconds, it asks all ranks for their stacks, through its own heartbeat, and prints one report. Then it goes
on, or ends all ranks (--on_stall). A rank that is stopped cannot answer; what is known of it is its last heartbeat.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TextIO

from flags import Stalls
from fsdp_utils import World, gather_from_ranks
from guards.diagnosis import STALE_SECONDS, Rank, likely_cause, report, short_stack, stalled_seconds
from guards.heartbeat import (
    BOARD,
    Heartbeat,
    bytes_moved,
    heartbeat_file,
    process_fields,
    read,
    resident_bytes,
    state_of,
    stopped_children,
    write,
)
from guards.launched import note_reason

INTERVAL = 1.0  # seconds between two heartbeats, at most
SHORTEST = 0.1  # and at least, however many phases begin
LEAST_MOVED = 2**20  # bytes of files, between two looks, that are progress: this thread's own are less
ANSWER_SECONDS = 3.0  # that the others have to write their stacks


def start_doctor(out_dir: Path, world: World, stalls: Stalls) -> None:
    """Starts the thread. All ranks call it."""
    Doctor(out_dir, world, stalls, run=gather_from_ranks(uuid.uuid4().hex)[0]).start()


class Doctor(threading.Thread):
    """See above. Nothing but its own thread touches it, except for `end`."""

    def __init__(self, out_dir: Path, world: World, stalls: Stalls, run: str) -> None:
        super().__init__(name="stall doctor", daemon=True)
        self.out_dir, self.rank, self.num_ranks = out_dir, world.trainer_rank, world.num_trainers
        self.limit, self.is_fatal = stalls.seconds, stalls.on_stall == "stop"
        (out_dir / "ranks").mkdir(exist_ok=True)
        pid = os.getpid()
        self.heartbeat = Heartbeat(
            run=run, rank=self.rank, host=socket.gethostname(), pid=pid, started="".join(process_fields(pid)[19:20]),
            number=0, time="", step=0, phase="start", phase_seconds=0.0, doing="starts", quiet_seconds=0.0,
            resident_bytes=0, gpu_bytes=0,
        )  # fmt: skip
        self.is_written, self.has_ended = True, False
        self.count, self.moved, self.now = -1, 0, time.monotonic()  # progress, bytes and time of the last tick
        self.others: dict[int, Rank] = {}
        self.unseen = 0.0  # seconds since the last look at higher ranks
        self.num_reports, self.stalled = 0, 0.0  # of this stall
        self.stuck: TextIO = (out_dir / "ranks" / f"rank_{self.rank}.stuck.txt").open("w")
        self.write()
        atexit.register(self.end)

    def run(self) -> NoReturn:
        while True:
            BOARD.has_changed.wait(INTERVAL)
            BOARD.has_changed.clear()
            self.tick()
            time.sleep(SHORTEST)

    def end(self) -> None:
        """The rank ends, in order or by an exception: its silence is no stall."""
        faulthandler.cancel_dump_traceback_later()
        self.has_ended = True
        self.write()

    def tick(self) -> None:
        """One look. Time in which this process did not run does not count: it may have been stopped."""
        now = time.monotonic()
        elapsed, self.now = now - self.now, now
        elapsed = elapsed if elapsed < 2 * INTERVAL else INTERVAL
        self._expect_to_be_stuck()
        moved = bytes_moved()
        has_progress = self.count != BOARD.count or moved - self.moved >= LEAST_MOVED
        quiet = 0.0 if has_progress else self.heartbeat.quiet_seconds + elapsed
        self.count, self.moved = BOARD.count, moved
        self.heartbeat = replace(self.heartbeat, quiet_seconds=quiet)
        self.write()
        for number in range(self.rank):
            self._look_at(number, elapsed)
            if not self.others[number].is_silent:
                self._follow(self.others[number].heartbeat)
                break
        else:
            self._lead(elapsed)

    def write(self) -> None:
        """The heartbeat as of now; `quiet_seconds`, stall and stack stay."""
        board = BOARD
        self.heartbeat = replace(
            self.heartbeat, number=self.heartbeat.number + 1, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            step=board.step, phase=board.phase, phase_seconds=round(time.monotonic() - board.since, 1),
            doing=board.doing, resident_bytes=resident_bytes(), gpu_bytes=board.gpu_bytes, has_ended=self.has_ended,
        )  # fmt: skip
        try:
            write(self.heartbeat, heartbeat_file(self.out_dir, self.rank))
            self.is_written = True
        except OSError:  # the others cannot write either, perhaps: silence says nothing
            self.is_written = False

    def _expect_to_be_stuck(self) -> None:
        """faulthandler's own thread dumps all stacks if this one cannot run, because a call keeps the interpreter."""
        with contextlib.suppress(OSError):
            self.stuck.seek(0)
            self.stuck.truncate()
        faulthandler.dump_traceback_later(max(self.limit / 2, STALE_SECONDS), file=self.stuck)

    def _look_at(self, number: int, elapsed: float) -> None:
        before, found = self.others.get(number), read(heartbeat_file(self.out_dir, number))
        if found is None or found.run != self.heartbeat.run:  # not there yet, or being written
            found = before.heartbeat if before else replace(self.heartbeat, rank=number, number=-1, host="")
        is_same = before is not None and before.heartbeat.number == found.number
        silent = before.silent_seconds + elapsed if is_same else 0.0
        self.others[number] = Rank(found, silent, state_of(found))

    def _follow(self, leader: Heartbeat) -> None:
        if self.num_reports:  # the leader of then has been stopped, and is back
            self._say_it_is_over()
        if leader.stop:
            os._exit(1)  # whatever the main thread hangs in
        if leader.stall and leader.stall != self.heartbeat.stall:
            self._answer(leader.stall)

    def _answer(self, stall: str) -> None:
        """Writes the stacks of all threads to OUT_DIR/stalls/<stall>/rank_N.txt, the main thread's to the heartbeat."""
        file = self.out_dir / "stalls" / stall / f"rank_{self.rank}.txt"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("w+") as out:
                faulthandler.dump_traceback(out)
                out.seek(0)
                stack = short_stack(out.read())
        except OSError as error:
            stack = f"none ({error.strerror})"
        self.heartbeat = replace(self.heartbeat, stall=stall, stack=stack, stopped=stopped_children())
        self.write()

    def _ranks(self) -> list[Rank]:
        own = Rank(self.heartbeat, 0.0, "R")
        return [self.others.get(number, own) for number in range(self.num_ranks)]

    def _lead(self, elapsed: float) -> None:
        """Reports a stall after --stall_seconds, after twice and four times as long, and so on; says when it is over.

        While this rank itself makes progress, a look at the others every STALE_SECONDS is enough.
        """
        self.unseen += elapsed
        is_calm = not self.num_reports and self.heartbeat.quiet_seconds < min(self.limit / 2, STALE_SECONDS)
        if is_calm and self.unseen < STALE_SECONDS:
            return
        elapsed, self.unseen = self.unseen, 0.0
        for number in range(self.rank + 1, self.num_ranks):
            self._look_at(number, elapsed)
        seconds = stalled_seconds(self._ranks()) if self.is_written else self.heartbeat.quiet_seconds
        if seconds >= self.limit * 2**self.num_reports:
            self.num_reports += 1
            self._report(seconds)
        elif self.num_reports and seconds < self.limit:
            self._say_it_is_over()
        self.stalled = seconds

    def _say_it_is_over(self) -> None:
        print(f"the run goes on, after {self.stalled:.0f} s without progress", flush=True)
        self.num_reports = 0

    def _report(self, seconds: float) -> None:
        stall = f"step_{BOARD.step}_{time.strftime('%Y%m%dT%H%M%S')}"
        self._answer(stall)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not all(
            rank.is_silent or rank.heartbeat.stall == stall for rank in self._ranks()
        ):
            time.sleep(SHORTEST)
            for number in self.others:
                self._look_at(number, SHORTEST)
        ranks = [self._with_stuck(rank, stall) for rank in self._ranks()]
        folder = self.out_dir / "stalls" / stall
        text = report(ranks, seconds, folder)
        with contextlib.suppress(OSError):
            (folder / "report.txt").write_text(text + "\n")
        print(text, flush=True)
        if self.is_fatal:
            self._end_run(ranks, seconds, folder)

    def _with_stuck(self, rank: Rank, stall: str) -> Rank:
        """A rank that cannot answer may have left its stacks to faulthandler."""
        if rank.heartbeat.stall == stall:
            return rank
        try:
            dump = (self.out_dir / "ranks" / f"rank_{rank.heartbeat.rank}.stuck.txt").read_text()
            (self.out_dir / "stalls" / stall / f"rank_{rank.heartbeat.rank}.txt").write_text(dump)
        except OSError:
            dump = ""
        return replace(rank, heartbeat=replace(rank.heartbeat, stack=short_stack(dump)))

    def _end_run(self, ranks: list[Rank], seconds: float, folder: Path) -> NoReturn:
        """Ends all ranks with exit status 1; those that are stopped on this host, too."""
        way_on = "the same command continues from the last checkpoint"
        where = f"no progress for {seconds:.0f} s (--on_stall stop); all stacks: {folder}"
        reason = f"{likely_cause(ranks)}; {where}; {way_on}."
        if not note_reason(reason, "verdict"):
            print(f"error: {reason}", file=sys.stderr, flush=True)
        self.heartbeat = replace(self.heartbeat, stop=True)
        self.write()
        for rank in ranks:
            if rank.state in ("T", "t"):
                with contextlib.suppress(OSError):
                    os.kill(rank.heartbeat.pid, signal.SIGKILL)
        time.sleep(2 * INTERVAL)  # in which the others read it
        os._exit(1)
