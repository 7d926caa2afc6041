"""Calls a function in worker processes that can be killed: for code that may hang, allocate without end, or end its process.

    pool = Pool("reward:make_scorer", ("math",), num_workers=4, timeout=5.0, memory_gib=4.0)
    pool.submit(17, item)           # never blocks: a worker has it while the caller goes on
    outcomes = pool.collect()       # {17: Outcome(value, status)}, once all that was submitted is done

Threads cannot be stopped and a signal is swallowed by the first `except Exception` (math-verify and SymPy have many), so nothing less
than a process will do. The caller starts one server process, which imports the function's module (no torch, no GPU, no threads: it is
safe to fork) and forks the workers from it; replacing a killed one takes milliseconds. Each worker calls
`function = factory(*arguments)` once and then `function(item)` item by item. When the caller ends, however it ends, so do server and
workers, with the processes that items have started in their workers' process groups.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

LOAD_SECONDS = 120.0  # what a worker may take to import a user's module
MAX_FAILED_LOADS = 5  # in a row, of workers that replace others
MAX_TEXT = 500  # characters of an error message that travel


@dataclass(frozen=True)
class Outcome:
    """What became of an item: `value` with status "ok", or None with status "timeout" or "error: ..."."""

    value: object
    status: str


# Frames: length and pickle ----------------------------------------------------------------------------------------------------------


def _frame(message: object) -> bytes:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return struct.pack(">Q", len(content)) + content


def _take_frames(received: bytearray) -> list[object]:
    """The whole frames at the start of `received`, which keeps the rest."""
    messages = []
    while len(received) >= 8:
        (length,) = struct.unpack(">Q", received[:8])
        if len(received) < 8 + length:
            break
        messages.append(pickle.loads(bytes(received[8 : 8 + length])))
        del received[: 8 + length]
    return messages


def _wait(
    readers: list[socket.socket], writers: list[socket.socket], seconds: float | None
) -> tuple[list[socket.socket], list[socket.socket]]:
    """Those that can be read from (or are closed) and written to, within `seconds`. Not `select`: a trainer may have 1,024 files open."""
    poll = select.poll()
    for each in {*readers, *writers}:
        poll.register(each, (select.POLLIN if each in readers else 0) | (select.POLLOUT if each in writers else 0))
    events = dict(poll.poll(None if seconds is None else math.ceil(seconds * 1000)))
    readable = [each for each in readers if events.get(each.fileno(), 0) & ~select.POLLOUT]
    return readable, [each for each in writers if events.get(each.fileno(), 0) & select.POLLOUT]


# The caller -------------------------------------------------------------------------------------------------------------------------


class Pool:
    """The caller's end. Items and values must be picklable; keys are any numbers of the caller's, each in use once at a time."""

    def __init__(
        self,
        factory: str,
        arguments: tuple[object, ...],
        num_workers: int,
        timeout: float,
        memory_gib: float,
        prepare: str = "",
    ) -> None:
        """Starts the server and waits until a first worker has called `factory` ("module:function").

        The server calls `prepare`, also "module:function", before it forks: what that loads and caches, all workers have.
        `timeout` is in seconds per item, up to three times that where the worker wants to run but is not let; `memory_gib` bounds the
        data of each worker. Raises ValueError with the factory's own words if it fails.
        """
        self.setup = (factory, arguments, num_workers, timeout, memory_gib, prepare)
        self.pending: dict[int, bytes] = {}
        self.done: dict[int, Outcome] = {}
        self.num_restarts = 0
        self._start()

    def _start(self) -> None:
        self.socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from grading import pool; pool.serve({theirs.fileno()})"
        self.server = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])},
        )
        theirs.close()
        self.received, self.outgoing = bytearray(), bytearray(_frame(self.setup))
        self.socket.setblocking(False)
        self.is_ready = False
        for key, item in self.pending.items():
            self.outgoing += _frame((key, item))
        while not self.is_ready:
            self._exchange(None)

    def submit(self, key: int, item: object) -> None:
        """Hands an item over; returns at once (but where a killed server has to be replaced). Raises PicklingError."""
        assert key not in self.pending and key not in self.done, f"key {key} is in use"
        pickled = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)  # the server passes it on as it is
        self.pending[key] = pickled
        self.outgoing += _frame((key, pickled))
        self._exchange(0)

    def collect(self) -> dict[int, Outcome]:
        """The outcome of every item submitted since the last call, waiting for those not done yet."""
        while self.pending:
            self._exchange(None)
        done, self.done = self.done, {}
        return done

    def close(self) -> None:
        """Ends the server and all workers."""
        self.socket.close()
        self.server.wait()

    def _exchange(self, wait: float | None) -> None:
        """Sends and receives what can be; with `wait` None at least something."""
        while True:
            readable, writable = _wait([self.socket], [self.socket] if self.outgoing else [], wait)
            if not readable and not writable:
                return None
            try:
                if writable:
                    del self.outgoing[: self.socket.send(self.outgoing[: 1 << 18])]
                if readable:
                    content = self.socket.recv(1 << 20)
                    if not content:
                        raise ConnectionResetError
                    self.received += content
            except (ConnectionResetError, BrokenPipeError):
                return self._restart()
            for kind, content in _take_frames(self.received):
                if kind == "ready":
                    self.is_ready = True
                elif kind == "failed":
                    self.close()
                    raise ValueError(content)
                else:
                    self.pending.pop(kind, None)
                    self.done[kind] = pickle.loads(content) if isinstance(content, bytes) else content
                    self.num_restarts = 0
            wait = 0 if self.outgoing or readable else wait
            if not self.outgoing and not readable:
                return None

    def _restart(self) -> None:
        """The server itself was killed (for memory, say): a new one gets what was not done."""
        self.socket.close()
        status = self.server.wait()
        self.num_restarts += 1
        if self.num_restarts > 3:
            raise RuntimeError(
                f"the server of the worker processes ended {self.num_restarts} times, last with exit status {status}."
            )
        self._start()


# The server -------------------------------------------------------------------------------------------------------------------------


@dataclass
class _Worker:
    pid: int
    socket: socket.socket
    deadline: float  # of the item it works on; while it loads, of the loading
    key: int | None = None
    cpu_seconds: float = 0.0  # that it had used when it got the item
    num_extensions: int = 0  # of the item's deadline
    is_loading: bool = True
    received: bytearray = field(default_factory=bytearray)


def serve(descriptor: int) -> None:
    """The server's life: takes items from the caller, gives them to idle workers, kills who is late, replaces who is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the workers and what they started end first
    _die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who then closes our socket
    caller = socket.socket(fileno=descriptor)
    received, outgoing, queue = bytearray(), bytearray(), deque()
    (factory, arguments, num_workers, timeout, memory_gib, prepare), *items = _wait_for_frames(caller, received)
    queue.extend(items)
    make = _imported(factory)
    if prepare:
        _imported(prepare)()
    caller.setblocking(False)
    workers: list[_Worker] = []
    num_failed_loads = 0
    is_ready = False  # one worker has loaded: before that, the others would only fail like it
    try:
        while True:
            while len(workers) < (num_workers if is_ready else 1):
                workers.append(_fork(make, arguments, memory_gib, [caller, *(worker.socket for worker in workers)]))
            for worker in workers:
                if queue and worker.key is None and not worker.is_loading:
                    worker.key, item = queue.popleft()
                    worker.deadline, worker.num_extensions = time.monotonic() + timeout, 0
                    worker.cpu_seconds = _cpu_seconds(worker.pid)[1]
                    _send_or_drop(worker, item, timeout)
            deadlines = [worker.deadline for worker in workers if worker.key is not None or worker.is_loading]
            wait = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            sockets = {worker.socket: worker for worker in workers}
            readable, writable = _wait([caller, *sockets], [caller] if outgoing else [], wait)
            if writable:
                del outgoing[: caller.send(outgoing[: 1 << 18])]
            if caller in readable:
                content = caller.recv(1 << 20)
                if not content:
                    return
                received += content
                queue.extend(_take_frames(received))
            messages = [message for each in readable if each is not caller for message in _hear(sockets[each], workers)]
            for worker in [
                w for w in workers if (w.key is not None or w.is_loading) and w.deadline <= time.monotonic()
            ]:
                if not worker.is_loading and _is_starved(worker, timeout):
                    worker.deadline += timeout
                    worker.num_extensions += 1
                    continue
                failure = ("failed", f"loading took longer than {LOAD_SECONDS:g} s.")
                messages.append(failure if worker.is_loading else (worker.key, Outcome(None, "timeout")))
                _remove(worker, workers)
            for message in messages:
                num_failed_loads = num_failed_loads + 1 if message[0] == "failed" else 0
                if message[0] == "failed" and is_ready and num_failed_loads < MAX_FAILED_LOADS:
                    continue  # it did load before: the next one is forked and may do better
                is_ready = is_ready or message[0] == "ready"
                outgoing += _frame(message)
    except (BrokenPipeError, ConnectionResetError):
        return  # the caller is gone
    finally:
        for worker in list(workers):
            _remove(worker, workers)


def _is_starved(worker: _Worker, timeout: float) -> bool:
    """True, at most twice an item, of a worker that wants to run and got less than half of its time: the machine was busy, or stopped."""
    is_runnable, cpu_seconds = _cpu_seconds(worker.pid)
    return is_runnable and cpu_seconds - worker.cpu_seconds < timeout / 2 and worker.num_extensions < 2


def _cpu_seconds(pid: int) -> tuple[bool, float]:
    """Linux: whether the process is runnable, and the processor time that it has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False, 0.0
    return fields[0] == "R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _imported(name: str) -> Callable[..., object]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _hear(worker: _Worker, workers: list[_Worker]) -> list[tuple[object, object]]:
    """Messages for the caller from what the worker says; one that has nothing more to say is gone, and its item with it."""
    try:
        content = worker.socket.recv(1 << 20)
    except ConnectionResetError:
        content = b""
    if not content:
        lost_key, was_loading = worker.key, worker.is_loading
        status = _remove(worker, workers)
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        if was_loading:
            return [("failed", f"the worker process ended while it was loading ({how}).")]
        return [(lost_key, Outcome(None, f"error: it ended its process ({how})"))] if lost_key is not None else []
    worker.received += content
    answers: list[tuple[object, object]] = []
    for message in _take_frames(worker.received):
        if worker.is_loading:
            worker.is_loading = False
            answers.append(message)  # ("ready", None) or ("failed", why)
        elif worker.key is not None:
            outcome, is_leaving = message
            answers.append((worker.key, outcome))
            worker.key = None
            if is_leaving:
                _remove(worker, workers)
    return answers


def _send_or_drop(worker: _Worker, item: object, timeout: float) -> None:
    """Sends the item; a worker that does not take it is found by its deadline or its closed socket."""
    worker.socket.settimeout(timeout)
    try:
        worker.socket.sendall(_frame(item))
    except (TimeoutError, BrokenPipeError, ConnectionResetError):
        worker.deadline = 0.0


def _remove(worker: _Worker, workers: list[_Worker]) -> int:
    """Kills the worker with what it started in its process group; its exit status, negative for a signal."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # before its setsid, or gone already
        os.kill(worker.pid, signal.SIGKILL)
    worker.socket.close()
    workers.remove(worker)
    return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


# A worker ---------------------------------------------------------------------------------------------------------------------------


def _fork(
    make: Callable[..., Callable[[object], object]],
    arguments: tuple[object, ...],
    memory_gib: float,
    foreign: list[socket.socket],
) -> _Worker:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            for each in (ours, *foreign):
                each.close()
            _work(theirs, make, arguments, memory_gib)
        finally:
            os._exit(1)  # never back into the server's code, whatever was raised
    theirs.close()
    return _Worker(pid, ours, time.monotonic() + LOAD_SECONDS)


def _work(
    server: socket.socket,
    make: Callable[..., Callable[[object], object]],
    arguments: tuple[object, ...],
    memory_gib: float,
) -> NoReturn:
    """A worker's life. Whatever the function does, raising included, is told to the server or ends this process."""
    os.setsid()  # what it starts can be killed with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent(signal.SIGKILL)
    limit = int(memory_gib * 2**30)
    resource.setrlimit(
        resource.RLIMIT_DATA, (limit, limit)
    )  # data, not address space: libraries map more than they use
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        function = make(*arguments)
    except BaseException as error:  # noqa: BLE001  of the user's module, SystemExit included
        server.sendall(_frame(("failed", _describe(error))))
        os._exit(1)
    server.sendall(_frame(("ready", None)))
    loaded_bytes = _resident_bytes()
    received = bytearray()
    while True:
        (item,) = _wait_for_frames(server, received)
        is_worn_out = False
        try:
            outcome = pickle.dumps(Outcome(function(pickle.loads(item)), "ok"))
        except BaseException as error:  # noqa: BLE001  of the user's function: told, counted and named by the caller
            is_worn_out = isinstance(error, MemoryError)
            outcome = pickle.dumps(Outcome(None, f"error: {_describe(error)}"))
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function left behind would ring in the next item
        is_leaving = (
            is_worn_out or _resident_bytes() - loaded_bytes > (limit - loaded_bytes) / 2
        )  # it would fail the next item
        server.sendall(_frame((outcome, is_leaving)))


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_TEXT]
    except BaseException:  # noqa: BLE001  the error's own text fails
        return type(error).__name__


def _wait_for_frames(connection: socket.socket, received: bytearray) -> list[object]:
    """One or more frames; ends the process if the other side is gone."""
    while not (frames := _take_frames(received)):
        content = connection.recv(1 << 20)
        if not content:
            os._exit(0)
        received += content
    return frames


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0  # not Linux


def _die_with_parent(how: signal.Signals) -> None:
    """Linux: this signal when the parent dies, however it died."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, how)
