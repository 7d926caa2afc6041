"""The signals to a rank: the first asks the run to end, a second one ends it. Standard library only.

scripts/launch.py passes a signal on to all ranks as SIGTERM. A rank that gets one by itself tells the launcher by
SIGUSR2. The launcher obeys a second signal; without it (torchrun, by hand) each rank does.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Literal

from runtime.rank import FIRST_SIGNAL
from runtime.start import LAUNCHER, NOT_FINISHED, end_at_once, signal_name

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SECOND = "ended by a second signal"


@dataclass
class SignalRecord:
    """The first signal, when it came, and the grace of a run that has something to save."""

    first: int | None = None
    time: float = 0.0  # when the first came, by the clock
    grace: float | None = None  # seconds; None: nothing to save yet

    def classify(self, number: int) -> Literal["first", "again", "second"]:
        """The kind of this signal; "again": the first one by another way.

        A terminal and a launcher may both send it; Slurm may send SIGTERM itself, and SIGUSR1 through its script.
        """
        now = time.monotonic()
        if self.first is None:
            self.first, self.time = number, now
            return "first"
        longest = 0.5 if number == self.first else 5.0
        return "second" if now - self.time > longest else "again"


_signals = SignalRecord()


def listen() -> None:
    """Hears signals in a thread: the main one may be waiting for other ranks for minutes. Until `arm` one ends it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in HEARD:
        signal.signal(number, lambda *_: None)  # C code then writes the number into the pipe, whatever Python does
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_hear_signals, args=(reader,), name="signals", daemon=True).start()


def arm(grace_seconds: float) -> None:
    """From now on a signal is a request, which the run meets within so many seconds."""
    _signals.grace = grace_seconds


def _hear_signals(reader: int) -> None:
    while True:
        for number in os.read(reader, 64):
            if number not in HEARD:
                continue
            place = _signals.classify(number)
            if place == "first":
                FIRST_SIGNAL.append(number)
                _obey()
            elif place == "second" and LAUNCHER not in os.environ:
                end_at_once(128 + number, SECOND)


def _obey() -> None:
    if LAUNCHER in os.environ:
        os.kill(int(os.environ[LAUNCHER]), signal.SIGUSR2)
    if _signals.grace is None:
        end_at_once(NOT_FINISHED, f"{signal_name()}: ended before the first step; nothing is lost")
    text = (
        f"{signal_name()}: the run could not save within --grace_seconds {_signals.grace:g}; the same command continues"
    )
    timer = threading.Timer(_signals.grace, end_at_once, (1, text))
    timer.daemon = True
    timer.start()
