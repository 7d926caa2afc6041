"""Calls a function in processes that can be killed: for code that may hang, allocate without end, or end its process.

    limits = Limits(num_workers=4, timeout=5.0, memory_gib=4.0, in_flight=1, num_retries=0)
    pool = Pool("grading.score:Handler", ("exact", None), limits, "grading.preload")
    pool.submit(17, item)           # never blocks: a worker has the item while the caller goes on
    outcomes = pool.collect()       # {17: Outcome(value, status)}, as soon as everything that was submitted is done

Nothing less than a process will do: a thread cannot be stopped, and a signal is swallowed by the first
`except Exception` (math-verify and SymPy have many). There are four kinds of processes:

    caller        The trainer. A thread of it sends what `submit` puts into a queue, so a full pipe stops nobody.
    dispatcher    `dispatcher.py`: gives items to workers, kills those that are late, replaces those that are gone. It
                  is a process because the caller's interpreter is busy with the engine. It is a command of its own
                  because `multiprocessing` would run the caller's main script, which imports torch, in every worker.
    fork server   The standard library's. It imports the module `preload` once; then it forks workers in milliseconds.
    worker        `worker.py`: calls `function = factory(*arguments)` once and then `function(item)` item by item, or
                  `in_flight` items at a time, each in a thread: for functions that wait for something else.

When the caller ends, however it ends, so do all the others, with what items have started in the workers' groups.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from grading.worker import Limits, Outcome, Setup, Status

MAX_STARTS = 4  # of the dispatcher, until a `collect` is answered


class Pool:
    """The caller's end. Items and values must be picklable; keys are numbers, each in use once at a time."""

    def __init__(self, factory: str, arguments: tuple[object, ...], limits: Limits, preload: str) -> None:
        """Starts the processes and waits until a first worker has called `factory` ("module:function").

        Raises ValueError with the factory's own words if it fails.
        """
        self.setup = Setup(factory, arguments, limits, preload)
        self.pending: dict[int, bytes] = {}
        self._start()
        self.collect()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
        self.dispatcher = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from grading.dispatcher import serve; serve({theirs.fileno()})"],
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

    def collect(self, on_status: Callable[[Status], None] = lambda status: None) -> dict[int, Outcome]:
        """The outcome of every item submitted since the last call; waits for those that are not done yet.

        Meanwhile `on_status` hears about once a second how far they are.
        A dispatcher that was killed (for memory, say) is replaced, and the new one does all of the work again.
        """
        for _ in range(MAX_STARTS):
            self.queue.put("collect")
            try:
                while isinstance(answer := self.connection.recv(), Status):
                    on_status(answer)
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

    def item(self, key: int) -> object:
        """What was submitted and is not collected yet."""
        return pickle.loads(self.pending[key])

    def ask(self, item: object) -> object:
        """The value of one item, while nothing else is submitted. Raises ValueError with the status of a failure."""
        self.submit(0, item)
        outcome = self.collect()[0]
        if outcome.status != "ok":
            raise ValueError(outcome.status)
        return outcome.value

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
