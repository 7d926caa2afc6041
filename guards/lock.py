"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import TextIO

LOCK_SECONDS = 60.0  # that a start waits for the end of another run


def lock_file(file: Path, where: str) -> TextIO:
    """The open file, locked until it is closed or this process ends. Raises ValueError if another process keeps it.

    Waits up to `LOCK_SECONDS` for one that is ending: a killed rank with many GiB takes some seconds. The kernel drops
    the lock with its process, so nothing that has ended can hold it. The file names its holder.
    """
    lock = file.open("a+")
    deadline, is_told = time.monotonic() + LOCK_SECONDS, False
    while not _is_locked(lock):
        lock.seek(0)
        taken = f"{where} is in use by {lock.read().strip() or 'a process that has just begun'}"
        if time.monotonic() > deadline:
            lock.close()
            raise ValueError(f"{taken}; end that run, or choose another folder.")
        if not is_told:
            print(f"{taken}; waiting up to {LOCK_SECONDS:g} s for its end", flush=True)
        is_told = True
        time.sleep(1)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}: {' '.join(sys.argv)}")
    lock.flush()
    return lock


def _is_locked(file: TextIO) -> bool:
    """Locks it, if nobody else does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
