"""Calls a function in processes that can be killed: for code that may hang, allocate without end, or end its process.

    pool = Pool("grading.score:RewardWorker", ("exact", None), num_workers=4, timeout=5.0)
    pool.submit(17, item)           # returns at once: a worker has the item while the caller goes on
    outcomes = pool.collect()       # {17: value or Failure}, as soon as everything that was submitted is done
    outcomes = pool.pop_done()          # what is done by now

`pebble` starts the workers, kills late ones and replaces those that are gone. A worker calls
`function = factory(*arguments)` once and then `function(item)` item by item; or `in_flight` items
at a time, each in a thread, for functions that wait. An item that is late or ends its worker is
tried once more, alone: another item of the same worker, or a busy machine, may have been to blame.
The workers end when the caller ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pkgutil
import resource
import signal
import sys
import sysconfig
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

from pebble import ProcessExpired, ProcessPool
from pebble.common import Result, ResultStatus
from pebble.pool.process import PoolManager, dictionary_values

MEMORY_GIB = 4.0  # a worker's data, beyond what a bare one has
LOAD_SECONDS = 120.0  # what a worker may take to import a user's module
MAX_POOLS = 2  # that may break in a row, before an item is done: workers end while they load
SPARE = 64 << 20  # bytes beyond a worker's limit, to tell that its memory has run out
WORN_OUT = signal.SIGUSR2  # ends a worker that an earlier item has damaged, before it begins another
LIBRARIES = (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parent), "<")


class Failure(str):
    """Stands in the place of an item's value, and says why there is none: "timeout" or "error: ..."."""


class Item(NamedTuple):
    """A call that is to be made."""

    key: int
    given: object  # what the function gets
    has_failed: bool = False  # once


class Pool:
    """Items and values must be picklable; keys are numbers, each in use once at a time."""

    def __init__(
        self,
        factory: str,
        arguments: tuple,
        num_workers: int,
        timeout: float,
        in_flight: int = 1,
        changed: threading.Condition | None = None,
        shared_modules: Sequence[str] = (),
    ) -> None:
        """Starts the workers at the first item. `timeout`: seconds per item. `changed`: a condition that several
        pools share, to be waited for together. `shared_modules`: loaded once, because workers are copies of a process.
        """
        self.num_workers, self.timeout, self.in_flight = num_workers, timeout, in_flight
        self.setup = (factory, arguments, MEMORY_GIB)
        self.shared_modules = ["grading.fork_server", factory.partition(":")[0], *shared_modules]
        self.queue: deque[Item] = deque()
        self.at_work: dict[Future, list[Item]] = {}  # the items that share a worker
        self.outcomes: dict[int, object] = {}  # value or Failure
        self.changed = changed or threading.Condition()
        self.num_pools = 0
        self._start()
        Finalize(None, self.close, exitpriority=10)  # at the exit of a caller that ends by an exception

    def _start(self) -> None:
        context = ForkServerContext()
        context.Process = _Worker
        context.set_forkserver_preload(self.shared_modules)
        self.pool = ProcessPool(self.num_workers, initializer=_load, initargs=self.setup, context=context)
        self.pool._pool_manager = _Manager(self.pool._context, context)
        self.num_pools += 1
        # Why there can be no workers
        self.failure = "" if self.num_pools <= MAX_POOLS else "the workers end while they are loading"

    def submit(self, key: int, given: object) -> None:
        with self.changed:
            self.queue.append(Item(key, given))
            self._feed()

    @property
    def num_left(self) -> int:
        return len(self.queue) + sum(map(len, self.at_work.values()))

    def _feed(self) -> None:
        """Hands items to the workers: few in advance, so that those that wait can share a worker."""
        while self.queue and len(self.at_work) < 2 * self.num_workers and not self.failure:
            items = [self.queue.popleft()]
            while self.queue and len(items) < self.in_flight and not (items[0].has_failed or self.queue[0].has_failed):
                items.append(self.queue.popleft())
            timeout = self.timeout + (len(items) > 1)  # where several share a worker, it minds the time itself
            try:
                future = self.pool.schedule(_work, [[item.given for item in items], self.timeout], timeout=timeout)
            except RuntimeError:  # the pool is broken
                self.queue.extendleft(items)
                self._start()
                continue
            self.at_work[future] = items
            future.add_done_callback(self._finish)

    def _finish(self, future: Future) -> None:
        """Keeps the outcomes of the items, or does these again. Called in a thread of pebble's."""
        with self.changed:
            items = self.at_work.pop(future)
            error = future.exception()
            if not isinstance(error, BrokenProcessPool):
                self.num_pools = 1  # it works
            failure = None  # if one of the items is to blame
            match error:
                case None:
                    self.outcomes |= zip([item.key for item in items], future.result(), strict=True)
                    items = []
                case ValueError():
                    self.failure = str(error)
                case TimeoutError():
                    failure = Failure("timeout")
                case ProcessExpired() if error.exitcode != -WORN_OUT:  # else an earlier item has worn the worker out
                    failure = Failure(f"error: it ended its process (exit status {error.exitcode % 256})")
            for item in items:
                if failure and item.has_failed:
                    self.outcomes[item.key] = failure
                else:
                    self.queue.append(item._replace(has_failed=True) if failure else item)
            self._feed()
            self.changed.notify()

    def collect(self, on_wait: Callable[[int], None] = lambda _: None) -> dict[int, object]:
        """The value, or Failure, of every item since the last call. Raises ValueError if there can be no workers.

        `on_wait` hears once a second how many items are left.
        """
        with self.changed:
            while not self.changed.wait_for(lambda: self.failure or not self.at_work, 1.0):
                on_wait(self.num_left)
            return self.pop_done()

    def pop_done(self) -> dict[int, object]:
        """The values and failures that are there, each once; raises as `collect`."""
        if self.failure:
            self.close()
            raise ValueError(self.failure)
        with self.changed:
            outcomes, self.outcomes = self.outcomes, {}
        return outcomes

    def close(self) -> None:
        """Ends the workers with all that they have started."""
        self.queue.clear()
        self.pool.stop()
        self.pool.join()


class _Manager(PoolManager):
    """Looks for the item of a dead worker when all that the worker has written is read.

    Pebble looks at once. A worker writes in a pipe which item it takes; where that is not read yet, pebble forgets the
    death, so that the item is late, or gives up the pool.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.deaths: dict[int, int] = {}  # exit status by process id
        self.num_wasted = 0  # workers that have ended without an item

    def update_workers(self) -> None:
        """Called by one of pebble's threads."""
        workers = self.worker_manager
        self.deaths |= workers.inspect_workers()
        if self.num_wasted > 2 * workers.workers_number:
            raise BrokenProcessPool("workers end without an item")
        workers.create_workers()

    def process_next_message(self, timeout: float) -> None:
        """Called by another one, which reads the pipe."""
        deaths = dict(self.deaths)
        if deaths and self._has_read_everything():
            for pid in deaths:
                del self.deaths[pid]
            lost = [task for task in dictionary_values(self.task_manager.tasks) if task.worker_id in deaths]
            for task in lost:
                error = ProcessExpired("it ended", code=deaths[task.worker_id])
                self.task_manager.task_done(task.id, Result(ResultStatus.ERROR, error))
            self.num_wasted += len(deaths) - len(lost)
        super().process_next_message(timeout)

    def _has_read_everything(self) -> bool:
        try:
            return not self.worker_manager.pool_channel.poll(0)
        except OSError:  # it is closed
            return False


class _Worker(ForkServerProcess):
    """A worker that does not import the caller's main script, and takes along what it has started."""

    def start(self) -> None:
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.kill()  # before it leads a group

    def is_alive(self) -> bool:
        if super().is_alive():
            return True
        self.terminate()
        return False

    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return 256 if code == 0 else code  # pebble would take 0 for an end that was asked for


# In a worker ----------------------------------------------------------------------------------------------------------

OWN = types.SimpleNamespace(loaded=Failure(), is_worn_out=False, pid=0)  # what this worker has


def _load(factory: str, arguments: tuple, memory_gib: float) -> None:
    """Prepares the worker and loads the function. If that fails, the first item's answer says why."""
    os.setsid()  # what it starts can be killed with it
    limit = int(memory_gib * 2**30)  # bytes of data: what libraries map and do not use is not counted
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the fork server
        limit += int(Path("/proc/self/statm").read_text("ascii").split()[5]) * resource.getpagesize()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # and that with the caller, when nobody holds this
    forkserver._forkserver._forkserver_alive_fd = None
    signal.setitimer(signal.ITIMER_REAL, LOAD_SECONDS)  # its signal ends the process
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit + SPARE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(WORN_OUT, signal.SIG_IGN)  # by a user's code it would have the item tried for ever
    OWN.pid = os.getpid()
    OWN.loaded = _outcome(lambda _: pkgutil.resolve_name(factory)(*arguments), None)


def _work(items: list[object], timeout: float) -> list[object]:
    """The value, or Failure, of each item. Raises ValueError if the function could not be loaded."""
    if OWN.is_worn_out:
        signal.signal(WORN_OUT, signal.SIG_DFL)
        os.kill(OWN.pid, WORN_OUT)  # the items go to another worker
    if isinstance(OWN.loaded, Failure):
        raise ValueError(OWN.loaded.removeprefix("error: "))
    if len(items) == 1:
        return [_outcome(OWN.loaded, items[0])]
    threads = ThreadPoolExecutor(len(items))
    futures = [threads.submit(_outcome, OWN.loaded, item) for item in items]
    OWN.is_worn_out |= bool(wait(futures, timeout).not_done)
    return [future.result() if future.done() else Failure("timeout") for future in futures]


def _outcome(function: Callable[[object], object], item: object) -> object:
    """What the user's code returns, or the Failure that it ends in."""
    try:
        outcome = function(item)
    except BaseException as error:  # noqa: BLE001  the user's code: the caller counts and names it
        if isinstance(error, MemoryError):
            OWN.is_worn_out = True
            _, limit = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        outcome = Failure(f"error: {_describe(error)}")
    if os.getpid() != OWN.pid:
        os._exit(0)  # a child that the user's code has forked and let return
    signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that it has left behind
    return outcome


def _describe(error: BaseException) -> str:
    """The error and where in the user's files it was raised: "ValueError: no (my_reward.py, line 3)"."""
    text = type(error).__name__
    with contextlib.suppress(BaseException):  # its own text may fail
        text += f": {error}"[:500]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(LIBRARIES):
            text += f" ({Path(frame.filename).name}, line {frame.lineno})"
            break
    return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair cannot be written to a file
