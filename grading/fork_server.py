"""Makes the fork server of the workers end with its caller, at once. Only the fork server imports this.

Python's own end takes every module apart: a second, and many on a busy machine, in which nobody needs the process.
"""

import atexit
import os

atexit.register(os._exit, 0)
