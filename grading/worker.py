"""A worker of `pool.py`: calls the user's function, item by item, under limits of memory. What it shares with the
dispatcher is here, too.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import resource
import signal
import struct
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

MAX_TEXT = 500  # characters of an error message that travel
LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
NOT_THE_USERS = tuple(folder + os.sep for folder in [str(Path(__file__).parent), *LIBRARIES])
HEADER = struct.Struct("q??")  # of an answer: its key, whether the item failed, whether the worker wants to end


@dataclass(frozen=True)
class Outcome:
    """What became of an item: `value` with status "ok", or None with status "timeout" or "error: ..."."""

    value: object
    status: str


@dataclass(frozen=True)
class Status:
    """What there is to wait for, of a `collect` that is not answered yet."""

    num_done: int
    num_left: int
    pid: int | None = None  # of the worker with the item that has been in work for the longest time, if one is
    key: int = 0  # of that item
    seconds: float = 0.0


@dataclass(frozen=True)
class Limits:
    num_workers: int
    timeout: float  # seconds per item; up to three times that for a worker that wants to run but is not let
    memory_gib: float  # data of each worker
    in_flight: int = 1  # items that a worker has in work at a time
    num_retries: int = 0  # of an item that failed, whatever the reason


@dataclass(frozen=True)
class Setup:
    factory: str
    arguments: tuple[object, ...]
    limits: Limits
    preload: str


def die_with_parent(how: signal.Signals) -> None:
    """Linux: this process gets the signal when its parent dies, however it died."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, how)


def work(dispatcher: Connection, setup: Setup) -> NoReturn:
    """A worker's life. The dispatcher hears of whatever the function does, or this process ends."""
    os.setsid()  # what it starts can be killed with it
    pid, sending = os.getpid(), threading.Lock()
    die_with_parent(signal.SIGKILL)
    limit = int(setup.limits.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # not address space: libraries map more than they use
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        module, _, name = setup.factory.partition(":")
        function: Callable[[object], object] = getattr(importlib.import_module(module), name)(*setup.arguments)
        failure = ""
    except BaseException as error:  # noqa: BLE001  of the user's module, SystemExit included
        failure = _describe(error)
    if os.getpid() != pid:
        os._exit(0)  # a child that the module has forked and let return: its parent answers
    loaded_bytes = _resident_bytes()

    def answer(key: int, data: bytes) -> None:
        is_worn_out = is_failed = False
        try:
            outcome = pickle.dumps(Outcome(function(pickle.loads(data)), "ok"))
        except BaseException as error:  # noqa: BLE001  of the user's function: told, counted and named by the caller
            is_failed, is_worn_out = True, isinstance(error, MemoryError)
            outcome = pickle.dumps(Outcome(None, f"error: {_describe(error)}"))
        if os.getpid() != pid:
            os._exit(0)  # the same, of an item
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function left behind would ring in the next item
        is_full = _resident_bytes() - loaded_bytes > (limit - loaded_bytes) / 2  # the next item would fail
        with sending:
            dispatcher.send_bytes(HEADER.pack(key, is_failed, is_worn_out or is_full) + outcome)

    give = answer
    if setup.limits.in_flight > 1 and not failure:
        try:
            give = _threads(setup.limits.in_flight, answer)
        except RuntimeError as error:
            memory = f"{setup.limits.memory_gib:g} GiB"
            failure = f"{setup.limits.in_flight} threads in one process do not fit into {memory}: {error}"
    dispatcher.send_bytes(failure.encode())
    if failure:
        os._exit(1)
    while True:
        try:
            message = dispatcher.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # the dispatcher is gone
        give(*message)


def _threads(count: int, answer: Callable[[int, bytes], None]) -> Callable[[int, bytes], None]:
    """Starts threads that call `answer`; what is returned hands an item to one of them. Raises RuntimeError."""
    inbox: SimpleQueue[tuple[int, bytes]] = SimpleQueue()

    def run() -> NoReturn:
        while True:
            answer(*inbox.get())

    for _ in range(count):
        threading.Thread(target=run, daemon=True).start()
    return lambda key, data: inbox.put((key, data))


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"[:MAX_TEXT] + _place(error)
        return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair cannot be written to a file
    except BaseException:  # noqa: BLE001  the error's own text fails
        return type(error).__name__


def _place(error: BaseException) -> str:
    """Where in the user's files it was raised, " (my_reward.py, line 3)"; nothing if in no file of the user's."""
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if file.is_absolute() and not str(file).startswith(NOT_THE_USERS)]
    return f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0  # not Linux
