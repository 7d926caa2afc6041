"""The dispatcher of `pool.py`: gives items to workers, ends those that are late, replaces those that are gone.

A worker with a late item is killed. If it has other items in work, it is retired: it gets no more, and is killed when
those are done. Where items share a worker and nobody can tell which of them ended or blocked it, each is done again
alone, in a worker that ends with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
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

from grading.worker import HEADER, Outcome, Status, die_with_parent, work

INF = math.inf
LOAD_SECONDS = 120.0  # what a worker may take to import a user's module
MESSAGE_SECONDS = 2  # that a worker may stop in the middle of a message
MAX_MESSAGE = 2**26  # bytes of a worker's message
MAX_FAILED_LOADS = 5  # in a row, of workers that replace others
STATUS_SECONDS = 1.0  # between two messages to a caller who waits
RETRY_SECONDS = 1.0  # until an item that failed is tried again; doubled each time, up to 64 s


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
    retry_at: float = 0.0  # after a failure
    is_alone: bool = False  # it must not share a worker
    start: float = 0.0  # of this try
    deadline: float = 0.0
    num_extensions: int = 0  # of the deadline
    cpu_seconds: float = 0.0  # that the worker had used when it got the item


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


class _Dispatcher:
    """Outcomes stay here until the caller asks for them: nothing ever waits for a caller who is busy."""

    def __init__(self, caller: Connection) -> None:
        self.caller = caller
        self.setup, *messages = caller.recv()
        self.workers: list[_Worker] = []
        self.queue: deque[_Item] = deque()
        self.queue_alone: deque[_Item] = deque()
        self.delayed: list[_Item] = []  # items that failed and will be tried again
        self.outcomes: dict[int, bytes] = {}
        self.is_asked = False  # for the outcomes
        self.status_at = 0.0
        self.is_loaded = False  # one worker has loaded: before that, the others would only fail like it
        self.num_failed_loads = 0  # in a row
        self.failure: str | None = None  # why there can be no workers
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload([self.setup.preload])
        self._take(messages)

    def step(self) -> None:
        """Hands out items, starts workers, waits for the next message. Raises EOFError if the caller is gone."""
        self._hand_out()
        self._start_workers()
        is_idle = not (self.queue or self.queue_alone or self.delayed or any(worker.items for worker in self.workers))
        if self.is_asked and (self.failure or (self.is_loaded and is_idle)):
            self.caller.send(self.failure or self.outcomes)
            self.outcomes, self.is_asked = {}, False
        times = [worker.deadline for worker in self.workers] + [item.retry_at for item in self.delayed]
        times += [self.status_at] if self.is_asked else []
        until = min(times, default=INF)
        sources = {source: worker for worker in self.workers for source in (worker.connection, worker.process.sentinel)}
        ready = wait([self.caller, *sources], None if until == INF else max(0.0, until - time.monotonic()))
        if self.caller in ready:
            self._take(self.caller.recv())
        for worker in dict.fromkeys(sources[source] for source in ready if source is not self.caller):
            self._hear(worker)
        now = time.monotonic()
        if self.is_asked and self.status_at <= now:
            self.status_at = now + STATUS_SECONDS
            self.caller.send(self._status(now))
        for worker in [each for each in self.workers if each.deadline <= now]:
            self._end_or_extend(worker, now)
        for item in [each for each in self.delayed if each.retry_at <= now]:
            self.delayed.remove(item)
            self._queue_of(item).append(item)

    def _status(self, now: float) -> Status:
        num_done, num_left = len(self.outcomes), len(self.queue) + len(self.queue_alone) + len(self.delayed)
        at_work = [(worker.process.pid, item) for worker in self.workers for item in worker.items.values()]
        if not at_work:
            return Status(num_done, num_left)
        pid, item = min(at_work, key=lambda pair: pair[1].start)
        return Status(num_done, num_left + len(at_work), pid, item.key, now - item.start)

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
                same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_SECONDS, 0))
        process = self.context.Process(target=work, args=(theirs, self.setup))
        process.start()
        theirs.close()
        self.workers.append(_Worker(process, ours, time.monotonic() + LOAD_SECONDS))

    def _hand_out(self) -> None:
        """Gives the items, in their order, to the workers that have the fewest."""
        limits = self.setup.limits
        while self.queue_alone and (free := self._workers_with_less_than(1)):
            if sum(item.is_alone for worker in self.workers for item in worker.items.values()) == limits.num_workers:
                break  # the other items go on, too
            free[0].is_retired = True
            self._give(free[0], self.queue_alone.popleft())
        while self.queue and (free := self._workers_with_less_than(limits.in_flight)):
            self._give(min(free, key=lambda worker: len(worker.items)), self.queue.popleft())

    def _workers_with_less_than(self, num_items: int) -> list[_Worker]:
        ready = [worker for worker in self.workers if not (worker.is_loading or worker.is_retired)]
        return [worker for worker in ready if len(worker.items) < num_items]

    def _queue_of(self, item: _Item) -> deque[_Item]:
        return self.queue_alone if item.is_alone else self.queue

    def _give(self, worker: _Worker, item: _Item) -> None:
        item.start, item.num_extensions = time.monotonic(), 0
        item.deadline = item.start + self.setup.limits.timeout
        item.cpu_seconds = _state(worker.process.pid)[1]
        try:
            worker.connection.send((item.key, item.data))
            worker.items[item.key] = item
        except OSError:  # it does not read, or it is gone; of this item it may have read a part
            self._queue_of(item).appendleft(item)
            self._redo_alone(worker)

    def _hear(self, worker: _Worker) -> None:
        """Takes in one message of the worker. A worker that has none is gone, and its items with it."""
        try:
            if not worker.connection.poll():
                raise EOFError
            message = worker.connection.recv_bytes(MAX_MESSAGE)
            key, is_failed, is_leaving = (None, False, False) if worker.is_loading else HEADER.unpack_from(message)
        except (EOFError, OSError, struct.error):  # the user's function may close the pipe, or write into it
            self._note_end(worker)
            return
        if worker.is_loading and message:
            self._remove(worker)
            self._note_failed_load(message.decode(errors="replace"))
            return
        if worker.is_loading:
            worker.is_loading, self.is_loaded, self.num_failed_loads = False, True, 0
            return
        outcome = message[HEADER.size :]
        worker.is_retired |= is_leaving
        item = worker.items.pop(key, None)  # None: it was late, and has failed
        if item is not None and is_failed:
            self._note_failure(item, outcome)
        elif item is not None:
            self.outcomes[key] = outcome
        self._end_if_done(worker)

    def _note_end(self, worker: _Worker) -> None:
        """The worker has ended by itself: its item has failed. Where items share workers, nobody knows which one."""
        if self._is_shared(worker):
            self._redo_alone(worker)
            return
        status = self._remove(worker)
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        if worker.is_loading:
            self._note_failed_load(f"the worker process ended while it was loading ({how}).")
        for item in worker.items.values():
            self._note_failure(item, pickle.dumps(Outcome(None, f"error: it ended its process ({how})")))

    def _is_shared(self, worker: _Worker) -> bool:
        """Whether other items than one may have to do with what the worker does: threads that were late go on."""
        is_alone = any(item.is_alone for item in worker.items.values())
        return self.setup.limits.in_flight > 1 and not is_alone and not worker.is_loading

    def _redo_alone(self, worker: _Worker) -> None:
        self._remove(worker)
        for item in worker.items.values():
            item.is_alone = True
        self.queue_alone.extend(worker.items.values())

    def _end_or_extend(self, worker: _Worker, now: float) -> None:
        """Fails the late items of a worker and retires it, unless an answer has just come.

        Its items are done again instead if they share it and one of them keeps the others from running: the worker has
        been stopped, or has computed most of the time. Twice an item, it gets more time instead if the worker wants to
        run and got less than half of its time on a processor: then the machine was busy, or stopped.
        """
        if worker.connection.poll():
            return
        if worker.is_loading:
            self._remove(worker)
            self._note_failed_load(f"loading took longer than {LOAD_SECONDS:g} s.")
            return
        timeout = self.setup.limits.timeout
        state, cpu_seconds = _state(worker.process.pid)
        for item in [each for each in worker.items.values() if each.deadline <= now]:
            is_busy = cpu_seconds - item.cpu_seconds > timeout / 2
            if self._is_shared(worker) and (is_busy or state == "T"):
                self._redo_alone(worker)
                return
            if state == "R" and not is_busy and item.num_extensions < 2:
                item.deadline += timeout
                item.num_extensions += 1
                continue
            worker.is_retired = True
            del worker.items[item.key]
            self._note_failure(item, pickle.dumps(Outcome(None, "timeout")))
        self._end_if_done(worker)

    def _end_if_done(self, worker: _Worker) -> None:
        if worker.is_retired and not worker.items:
            self._remove(worker)

    def _note_failure(self, item: _Item, outcome: bytes) -> None:
        """The item has failed once more: it waits for the next try, or this is its outcome."""
        item.num_failures += 1
        if item.num_failures > self.setup.limits.num_retries:
            self.outcomes[item.key] = outcome
            return
        delay = RETRY_SECONDS * 2 ** min(item.num_failures - 1, 6)
        item.retry_at = time.monotonic() + delay * random.uniform(0.75, 1.25)  # not all at the same moment
        self.delayed.append(item)

    def _note_failed_load(self, reason: str) -> None:
        """The first worker must load. Later ones may fail, but not MAX_FAILED_LOADS in a row."""
        self.num_failed_loads += 1
        if not self.is_loaded or self.num_failed_loads == MAX_FAILED_LOADS:
            self.failure = reason

    def _remove(self, worker: _Worker) -> int:
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
            self._remove(worker)
        # These would end by themselves, but as orphans, which the first process of many containers never reaps.
        for pid in (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid):
            if pid is not None:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it is why we end
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _state(pid: int) -> tuple[str, float]:
    """Linux: the state of the process ("R" runnable, "S" asleep, "T" stopped), and the processor time it has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
