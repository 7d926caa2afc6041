"""Calls a function in processes that can be killed: for code that may hang, allocate without end, or end its process.

    limits = Limits(num_workers=4, timeout=5.0, memory_gib=4.0)
    pool = Pool("grading.score:make_handler", ("exact", None), limits, "grading.preload")
    pool.submit(17, item)           # never blocks: a worker has the item while the caller goes on
    outcomes = pool.collect()       # {17: Outcome(value, status)}, as soon as everything that was submitted is done

Nothing less than a process will do: a thread cannot be stopped, and a signal is swallowed by the first
`except Exception` (math-verify and SymPy have many). There are four kinds of processes:

    caller        The trainer. A thread of it sends what `submit` puts into a queue, so a full pipe stops nobody.
    dispatcher    `serve`: gives items to idle workers, kills those that are late, replaces those that are gone. It is a
                  process because the caller's interpreter is busy with the engine. It is a command of its own because
                  `multiprocessing` would run the caller's main script, which imports torch, in every worker.
    fork server   The standard library's. It imports the module `preload` once; then it forks workers in milliseconds.
    worker        `_work`: calls `function = factory(*arguments)` once and then `function(item)` item by item.

When the caller ends, however it ends, so do all the others, with what items have started in the workers' groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe, forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

LOAD_SECONDS = 120.0  # what a worker may take to import a user's module
MAX_FAILED_LOADS = 5  # in a row, of workers that replace others
MAX_STARTS = 4  # of the dispatcher, until a `collect` is answered
MAX_TEXT = 500  # characters of an error message that travel


@dataclass(frozen=True)
class Outcome:
    """What became of an item: `value` with status "ok", or None with status "timeout" or "error: ..."."""

    value: object
    status: str


@dataclass(frozen=True)
class Limits:
    num_workers: int
    timeout: float  # seconds per item; up to three times that for a worker that wants to run but is not let
    memory_gib: float  # data of each worker


@dataclass(frozen=True)
class _Setup:
    factory: str
    arguments: tuple[object, ...]
    limits: Limits
    preload: str


# The caller -----------------------------------------------------------------------------------------------------------


class Pool:
    """The caller's end. Items and values must be picklable; keys are numbers, each in use once at a time."""

    def __init__(self, factory: str, arguments: tuple[object, ...], limits: Limits, preload: str) -> None:
        """Starts the processes and waits until a first worker has called `factory` ("module:function").

        Raises ValueError with the factory's own words if it fails.
        """
        self.setup = _Setup(factory, arguments, limits, preload)
        self.pending: dict[int, bytes] = {}
        self._start()
        self.collect()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
        self.dispatcher = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from grading import pool; pool.serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        theirs.close()
        self.queue: SimpleQueue[object] = SimpleQueue()
        self.sender = threading.Thread(target=_send, args=(self.queue, self.connection), daemon=True)
        self.sender.start()
        for message in (self.setup, *self.pending.items()):
            self.queue.put(message)

    def submit(self, key: int, item: object) -> None:
        """Hands an item over and returns at once. Raises PicklingError or AttributeError if it cannot be sent."""
        assert key not in self.pending, f"key {key} is in use"
        self.pending[key] = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)  # the dispatcher never unpickles it
        self.queue.put((key, self.pending[key]))

    def collect(self) -> dict[int, Outcome]:
        """The outcome of every item submitted since the last call; waits for those that are not done yet.

        A dispatcher that was killed (for memory, say) is replaced, and the new one does all of the work again.
        """
        for _ in range(MAX_STARTS):
            self.queue.put("collect")
            try:
                answer = self.connection.recv()
            except (EOFError, ConnectionResetError):
                status = self.close()
                self._start()
                continue
            if isinstance(answer, str):
                self.close()
                raise ValueError(answer)
            self.pending.clear()
            return {key: pickle.loads(outcome) for key, outcome in answer.items()}
        self.close()
        raise RuntimeError(f"the dispatcher of the workers ended {MAX_STARTS} times, last with exit status {status}.")

    def close(self) -> int:
        """Ends the dispatcher, which ends the workers; returns its exit status."""
        self.dispatcher.terminate()
        status = self.dispatcher.wait()
        self.queue.put(None)
        self.sender.join()
        self.connection.close()
        return status


def _send(queue: SimpleQueue[object], connection: Connection) -> None:
    """The life of the caller's thread: sends all that is in the queue at once, until the last of it is None."""
    while True:
        messages = [queue.get()]
        while not queue.empty():
            messages.append(queue.get())
        if messages[-1] is None:
            return
        try:
            connection.send(messages)
        except OSError:  # the dispatcher is gone; `collect` will find out
            return


# The dispatcher -------------------------------------------------------------------------------------------------------


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
class _Worker:
    process: ForkServerProcess
    connection: Connection
    deadline: float  # of the item that it works on; while it loads, of the loading
    is_loading: bool = True
    key: int | None = None  # of the item that it works on
    cpu_seconds: float = 0.0  # that it had used when it got the item
    num_extensions: int = 0  # of the item's deadline

    @property
    def is_busy(self) -> bool:
        return self.is_loading or self.key is not None


class _Dispatcher:
    """Outcomes stay here until the caller asks for them: nothing ever waits for a caller who is busy."""

    def __init__(self, caller: Connection) -> None:
        self.caller = caller
        self.setup, *messages = caller.recv()
        self.workers: list[_Worker] = []
        self.queue: deque[tuple[int, bytes]] = deque()
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
        while self.failure is None and len(self.workers) < (self.setup.limits.num_workers if self.is_loaded else 1):
            self._start_worker()
        for worker in self.workers:
            if self.queue and not worker.is_busy:
                self._hand_out(worker)
        busy = [worker for worker in self.workers if worker.is_busy]
        if self.is_asked and (self.failure or (self.is_loaded and not self.queue and not busy)):
            self.caller.send(self.failure or self.outcomes)
            self.outcomes, self.is_asked = {}, False
        seconds = max(0.0, min(worker.deadline for worker in busy) - time.monotonic()) if busy else None
        sources = {source: worker for worker in self.workers for source in (worker.connection, worker.process.sentinel)}
        ready = wait([self.caller, *sources], seconds)
        if self.caller in ready:
            self._take(self.caller.recv())
        for worker in dict.fromkeys(sources[source] for source in ready if source is not self.caller):
            self._hear(worker)
        for worker in busy:
            if worker in self.workers and worker.is_busy and worker.deadline <= time.monotonic():
                self._end_or_extend(worker)

    def _take(self, messages: list[object]) -> None:
        self.is_asked = self.is_asked or "collect" in messages
        self.queue.extend(message for message in messages if message != "collect")

    def _start_worker(self) -> None:
        ours, theirs = Pipe()
        with socket.socket(fileno=os.dup(ours.fileno())) as same:  # no worker that stops in mid-message may stop us
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 1, 0))
        process = self.context.Process(target=_work, args=(theirs, self.setup))
        process.start()
        theirs.close()
        self.workers.append(_Worker(process, ours, time.monotonic() + LOAD_SECONDS))

    def _hand_out(self, worker: _Worker) -> None:
        worker.key, item = self.queue.popleft()
        worker.deadline, worker.num_extensions = time.monotonic() + self.setup.limits.timeout, 0
        worker.cpu_seconds = _cpu_seconds(worker.process.pid)[1]
        try:
            worker.connection.send_bytes(item)
        except OSError:  # it does not read, or it is gone
            worker.deadline = 0.0

    def _hear(self, worker: _Worker) -> None:
        """Takes in one message of the worker. A worker that has none is gone, and its item with it."""
        try:
            if not worker.connection.poll():
                raise EOFError
            message = worker.connection.recv()
        except (EOFError, OSError):
            status = self.remove(worker)
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            if worker.is_loading:
                self._note_failed_load(f"the worker process ended while it was loading ({how}).")
            elif worker.key is not None:
                self._note_failure(worker, f"error: it ended its process ({how})")
            return
        if not worker.is_loading:
            self.outcomes[worker.key], is_leaving = message
            worker.key = None
            if is_leaving:
                self.remove(worker)
        elif message is not None:
            self.remove(worker)
            self._note_failed_load(message)
        else:
            worker.is_loading, self.is_loaded, self.num_failed_loads = False, True, 0

    def _end_or_extend(self, worker: _Worker) -> None:
        """Ends a worker that is late, unless its answer has just come.

        Twice an item, it gets more time instead if it wants to run and got less than half of its time on a processor:
        then the machine was busy, or stopped.
        """
        if worker.connection.poll():
            return
        is_runnable, cpu_seconds = _cpu_seconds(worker.process.pid)
        is_starved = is_runnable and cpu_seconds - worker.cpu_seconds < self.setup.limits.timeout / 2
        if worker.key is not None and is_starved and worker.num_extensions < 2:
            worker.deadline += self.setup.limits.timeout
            worker.num_extensions += 1
            return
        self.remove(worker)
        if worker.is_loading:
            self._note_failed_load(f"loading took longer than {LOAD_SECONDS:g} s.")
        else:
            self._note_failure(worker, "timeout")

    def _note_failure(self, worker: _Worker, status: str) -> None:
        self.outcomes[worker.key] = pickle.dumps(Outcome(None, status))

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


def die_with_parent(how: signal.Signals) -> None:
    """Linux: this process gets the signal when its parent dies, however it died."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, how)


# A worker -------------------------------------------------------------------------------------------------------------


def _work(dispatcher: Connection, setup: _Setup) -> NoReturn:
    """A worker's life. The dispatcher hears of whatever the function does, or this process ends."""
    os.setsid()  # what it starts can be killed with it
    die_with_parent(signal.SIGKILL)
    limit = int(setup.limits.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # not address space: libraries map more than they use
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        module, _, name = setup.factory.partition(":")
        function: Callable[[object], object] = getattr(importlib.import_module(module), name)(*setup.arguments)
    except BaseException as error:  # noqa: BLE001  of the user's module, SystemExit included
        dispatcher.send(_describe(error))
        os._exit(1)
    dispatcher.send(None)
    loaded_bytes = _resident_bytes()
    while True:
        try:
            item = dispatcher.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # the dispatcher is gone
        is_worn_out = False
        try:
            outcome = pickle.dumps(Outcome(function(pickle.loads(item)), "ok"))
        except BaseException as error:  # noqa: BLE001  of the user's function: told, counted and named by the caller
            is_worn_out = isinstance(error, MemoryError)
            outcome = pickle.dumps(Outcome(None, f"error: {_describe(error)}"))
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function left behind would ring in the next item
        is_full = _resident_bytes() - loaded_bytes > (limit - loaded_bytes) / 2  # the next item would fail
        dispatcher.send((outcome, is_worn_out or is_full))


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_TEXT]
    except BaseException:  # noqa: BLE001  the error's own text fails
        return type(error).__name__


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0  # not Linux
