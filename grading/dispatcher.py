"""The dispatcher of `pool.py`: gives items to workers, ends those that are late, replaces those that are gone.

A worker with a late item is killed. If it has other items in work, it is retired: it gets no more, and is killed when
those are done. If a worker ends while it has several items, each of them is done again, alone in a worker.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import Pipe, forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from grading.worker import Outcome, die_with_parent, work

INF = math.inf
LOAD_SECONDS = 120.0  # what a worker may take to import a user's module
MAX_FAILED_LOADS = 5  # in a row, of workers that replace others
RETRY_SECONDS = 1.0  # until an item that failed is tried again; doubled each time, up to the next
MAX_RETRY_SECONDS = 60.0


def serve(descriptor: int) -> None:
    """The dispatcher's life. It ends with the caller, and with its own children, of which one is the fork server."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the workers and what they started end first
    signal.signal(signal.SIGCHLD, lambda *_: sys.exit(1) if os.waitpid(-1, os.WNOHANG)[0] else None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who then ends us
    die_with_parent(signal.SIGTERM)
    with contextlib.suppress(EOFError, ConnectionError):  # the caller is gone
        dispatcher = _Dispatcher(Connection(descriptor))
        try:
            while True:
                dispatcher.step()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            dispatcher.close()


@dataclass(eq=False)
class _Item:
    key: int
    data: bytes
    num_failures: int = 0
    is_alone: bool = False  # a worker ended while it had this one among others: that must not happen to others again
    deadline: float = 0.0  # of a try; while the item waits for the next one, its time
    cpu_seconds: float = 0.0  # that the worker had used when it got the item
    num_extensions: int = 0  # of the deadline


@dataclass(eq=False)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    load_deadline: float
    is_loading: bool = True
    is_retired: bool = False  # it gets no more items
    items: dict[int, _Item] = field(default_factory=dict)  # that it works on, by their keys

    @property
    def deadline(self) -> float:
        deadlines = [self.load_deadline] if self.is_loading else [item.deadline for item in self.items.values()]
        return min(deadlines, default=INF)

    def has_room_for(self, item: _Item, in_flight: int) -> bool:
        if self.is_loading or self.is_retired:
            return False
        is_alone = item.is_alone or any(each.is_alone for each in self.items.values())
        return len(self.items) < (1 if is_alone else in_flight)


class _Dispatcher:
    """Outcomes stay here until the caller asks for them: nothing ever waits for a caller who is busy."""

    def __init__(self, caller: Connection) -> None:
        self.caller = caller
        self.setup, *messages = caller.recv()
        self.workers: list[_Worker] = []
        self.queue: deque[_Item] = deque()
        self.delayed: list[_Item] = []  # items that failed and will be tried again
        self.outcomes: dict[int, bytes] = {}
        self.is_asked = False  # for the outcomes
        self.is_loaded = False  # one worker has loaded: before that, the others would only fail like it
        self.num_failed_loads = 0  # in a row
        self.failure: str | None = None  # why there can be no workers
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload([self.setup.preload])
        self._take(messages)

    def step(self) -> None:
        """Starts workers, hands out items, waits for the next message. Raises EOFError if the caller is gone."""
        self._start_workers()
        self._hand_out()
        is_done = self.is_loaded and not (self.queue or self.delayed or any(worker.items for worker in self.workers))
        if self.is_asked and (self.failure or (is_done and not any(worker.is_loading for worker in self.workers))):
            self.caller.send(self.failure or self.outcomes)
            self.outcomes, self.is_asked = {}, False
        until = min((each.deadline for each in (*self.workers, *self.delayed)), default=INF)
        sources = {source: worker for worker in self.workers for source in (worker.connection, worker.process.sentinel)}
        ready = wait([self.caller, *sources], None if until == INF else max(0.0, until - time.monotonic()))
        if self.caller in ready:
            self._take(self.caller.recv())
        for worker in dict.fromkeys(sources[source] for source in ready if source is not self.caller):
            self._hear(worker)
        now = time.monotonic()
        for worker in [each for each in self.workers if each.deadline <= now]:
            self._end_or_extend(worker, now)
        self.queue.extend(item for item in self.delayed if item.deadline <= now)
        self.delayed = [item for item in self.delayed if item.deadline > now]

    def _take(self, messages: list[object]) -> None:
        self.is_asked = self.is_asked or "collect" in messages
        self.queue.extend(_Item(key, data) for key, data in (each for each in messages if each != "collect"))

    def _start_workers(self) -> None:
        wanted = self.setup.limits.num_workers if self.is_loaded else 1
        num_fresh = sum(not worker.is_retired for worker in self.workers)
        while self.failure is None and num_fresh < wanted and len(self.workers) < 2 * wanted:
            self._start_worker()
            num_fresh += 1

    def _start_worker(self) -> None:
        ours, theirs = Pipe()
        with socket.socket(fileno=os.dup(ours.fileno())) as same:  # no worker that stops in mid-message may stop us
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 1, 0))
        process = self.context.Process(target=work, args=(theirs, self.setup))
        process.start()
        theirs.close()
        self.workers.append(_Worker(process, ours, time.monotonic() + LOAD_SECONDS))

    def _hand_out(self) -> None:
        """Gives the queue's items, in their order, to the workers that have the fewest."""
        while self.queue:
            item = self.queue[0]
            free = [each for each in self.workers if each.has_room_for(item, self.setup.limits.in_flight)]
            if not free:
                return
            worker = min(free, key=lambda each: len(each.items))
            worker.items[item.key] = self.queue.popleft()
            item.deadline, item.num_extensions = time.monotonic() + self.setup.limits.timeout, 0
            item.cpu_seconds = _cpu_seconds(worker.process.pid)[1]
            try:
                worker.connection.send((item.key, item.data))
            except OSError:  # it does not read, or it is gone
                item.deadline = 0.0

    def _hear(self, worker: _Worker) -> None:
        """Takes in one message of the worker. A worker that has none is gone, and its items with it."""
        try:
            if not worker.connection.poll():
                raise EOFError
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._note_end(worker)
            return
        if not worker.is_loading:
            key, outcome, is_failed, is_leaving = message
            worker.is_retired |= is_leaving
            item = worker.items.pop(key, None)  # None: it was late, and has failed
            if item is not None and is_failed:
                self._note_failure(item, outcome)
            elif item is not None:
                self.outcomes[key] = outcome
            self._end_if_done(worker)
        elif message is not None:
            self.remove(worker)
            self._note_failed_load(message)
        else:
            worker.is_loading, self.is_loaded, self.num_failed_loads = False, True, 0

    def _note_end(self, worker: _Worker) -> None:
        """The worker has ended by itself: its item has failed, or one of its items, and nobody knows which."""
        status = self.remove(worker)
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        if worker.is_loading:
            self._note_failed_load(f"the worker process ended while it was loading ({how}).")
        elif len(worker.items) == 1:
            (item,) = worker.items.values()
            self._note_failure(item, pickle.dumps(Outcome(None, f"error: it ended its process ({how})")))
        else:
            for item in worker.items.values():
                item.is_alone = True
            self.queue.extendleft(worker.items.values())

    def _end_or_extend(self, worker: _Worker, now: float) -> None:
        """Fails the late items of a worker and retires it, unless an answer has just come.

        Twice an item, it gets more time instead if the worker wants to run and got less than half of its time on a
        processor: then the machine was busy, or stopped.
        """
        if worker.connection.poll():
            return
        if worker.is_loading:
            self.remove(worker)
            self._note_failed_load(f"loading took longer than {LOAD_SECONDS:g} s.")
            return
        timeout = self.setup.limits.timeout
        is_runnable, cpu_seconds = _cpu_seconds(worker.process.pid)
        for item in [each for each in worker.items.values() if each.deadline <= now]:
            is_starved = is_runnable and cpu_seconds - item.cpu_seconds < timeout / 2
            if item.deadline and is_starved and item.num_extensions < 2:
                item.deadline += timeout
                item.num_extensions += 1
                continue
            worker.is_retired = True
            del worker.items[item.key]
            self._note_failure(item, pickle.dumps(Outcome(None, "timeout")))
        self._end_if_done(worker)

    def _end_if_done(self, worker: _Worker) -> None:
        if worker.is_retired and not worker.items:
            self.remove(worker)

    def _note_failure(self, item: _Item, outcome: bytes) -> None:
        """The item has failed once more: it waits for the next try, or this is its outcome."""
        item.num_failures += 1
        if item.num_failures > self.setup.limits.num_retries:
            self.outcomes[item.key] = outcome
            return
        item.deadline = time.monotonic() + min(RETRY_SECONDS * 2 ** (item.num_failures - 1), MAX_RETRY_SECONDS)
        self.delayed.append(item)

    def _note_failed_load(self, reason: str) -> None:
        """The first worker must load. Later ones may fail, but not MAX_FAILED_LOADS in a row."""
        self.num_failed_loads += 1
        if not self.is_loaded or self.num_failed_loads == MAX_FAILED_LOADS:
            self.failure = reason

    def remove(self, worker: _Worker) -> int:
        """Kills the worker with what it started in its process group; its exit status, negative for a signal."""
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # before its setsid, or gone already
            worker.process.kill()
        self.workers.remove(worker)
        worker.connection.close()
        worker.process.join()
        status = worker.process.exitcode
        worker.process.close()
        if status == 255:  # it may mean that the fork server is gone
            time.sleep(0.1)  # then the signal of that ends us here
        return status

    def close(self) -> None:
        for worker in list(self.workers):
            self.remove(worker)
        # These would end by themselves, but as orphans, which the first process of many containers never reaps.
        for pid in (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid):
            if pid is not None:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it is why we end
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _cpu_seconds(pid: int) -> tuple[bool, float]:
    """Linux: whether the process is runnable, and the processor time that it has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False, 0.0
    return fields[0] == "R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
