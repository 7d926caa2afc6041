"""SIGTERM, SIGUSR1, Ctrl-C: the run saves what it has trained and ends with exit status 0.

    listen()                   # at the very start: until `arm`, a signal ends the process at once
    arm(grace_seconds)         # from now on there is something to save
    if requested(): ...        # on this rank: abandon what can be abandoned
    end_if_requested()         # on all ranks together: raises Stopped if one of them was asked to

A signal is heard by a thread, because the main one may be waiting in a collective for minutes. A second signal, or the
end of the grace, ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from guards.launched import note_reason, pass_on_stop, wait_for_stops

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
AGAIN = 0.5  # seconds: what comes sooner is the same signal by another way (a launcher's, and a terminal's)
ANOTHER = 5.0  # the same, of another kind: Slurm may send SIGTERM itself, and SIGUSR1 through its script


class Stopped(Exception):
    """A signal has asked the run to end; every rank raises it at the same place."""


class _Listener:
    """What is known of the signals to this process."""

    def __init__(self) -> None:
        self.first: int | None = None  # the signal
        self.grace: float | None = None  # seconds; None: nothing to save yet


_listener = _Listener()


def listen() -> None:
    """Hears signals from now on."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in HEARD:
        signal.signal(number, lambda *_: None)  # C code then writes the number into the pipe, whatever Python does
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_hear, args=(reader,), name="signals", daemon=True).start()


def arm(grace_seconds: float) -> None:
    """From now on a signal is a request, which the run meets within so many seconds."""
    _listener.grace = grace_seconds


def requested() -> bool:
    """Whether this rank was asked to stop."""
    return _listener.first is not None


def signal_name() -> str:
    """Of the signal that this rank got; others may have got it instead."""
    return signal.Signals(_listener.first or signal.SIGTERM).name


def end_if_requested() -> None:
    """Raises Stopped on every rank if any of them was asked to stop. All ranks call it together."""
    from fsdp_utils import gather_from_ranks  # torch: `listen` comes before it is imported

    if any(gather_from_ranks(requested())):
        raise Stopped


def _hear(reader: int) -> None:
    heard_at = 0.0
    while True:
        for number in os.read(reader, 64):
            if number not in HEARD:
                continue
            if _listener.first is not None:
                if time.monotonic() - heard_at > (AGAIN if number == _listener.first else ANOTHER):
                    _end(128 + number, "ended by a second signal")
                continue
            _listener.first, heard_at = number, time.monotonic()
            is_passed_on = pass_on_stop()
            if _listener.grace is None:
                wait_for_stops()  # a rank that goes alone would be an error to those that wait for it
                text = f"{signal_name()}: ended before the first step; nothing is lost"
                _end(0 if is_passed_on or os.environ.get("WORLD_SIZE", "1") == "1" else 128 + number, text)
            timer = threading.Timer(_listener.grace, _give_up)
            timer.daemon = True
            timer.start()


def _give_up() -> None:
    text = f"{signal_name()}: the run could not save within --grace_seconds {_listener.grace:g}"
    _end(1, f"{text}; the same command continues from the last checkpoint")


def _end(status: int, text: str) -> None:
    """Ends the process, wherever its main thread is."""
    is_told = status != 0 and note_reason(text, "mistake")
    if not is_told and os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)
    os._exit(status)
