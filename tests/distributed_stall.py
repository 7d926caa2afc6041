"""A rank that makes progress for a second, and comes to a halt in phase update of step 3; rank 1 in its own way.

tests/distributed_stall.py FAULT FOLDER RANK, of three ranks
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from runtime.stall import WAITS, StallWatch, beat, in_phase

FAULT, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def wait() -> None:
    beat(f"{WAITS} (gather)")
    time.sleep(600)


def hang() -> None:
    time.sleep(600)


FAULTS = {
    "hang": hang,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": lambda: sys.exit(1),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hold": lambda: ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1),
}

StallWatch(FOLDER, RANK, 3, limit=8.0).start()
with in_phase("update", 3):
    for _ in range(10):
        beat("runs a backward pass")
        time.sleep(0.1)
    FAULTS[FAULT]() if RANK == 1 else wait()
