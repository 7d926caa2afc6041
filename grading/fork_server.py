"""Makes the fork server of the workers end with its caller, at once. Only the fork server imports this.

Python's own end takes every module apart: a second, and many on a busy machine, in which nobody needs the process.
A user's code that prints must not fail where nobody reads it any more, as after `| head`.
"""

import atexit
import io
import os
import sys


class Outlet(io.FileIO):
    """As that of runtime/start.py, which nothing here may import: it drops what it cannot write."""

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


atexit.register(os._exit, 0)
for name in ("stdout", "stderr"):
    if stream := getattr(sys, name):  # None: it was closed
        outlet = io.BufferedWriter(Outlet(stream.fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(outlet, stream.encoding, "backslashreplace", line_buffering=True))
