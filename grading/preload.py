"""What the fork server of `pool.py` imports before it forks: the workers have all of it at once.

`preload_math.py` also grades a few answers: what the LaTeX parser and SymPy set up at their first use, workers then have, too.
"""

import contextlib
import signal

from grading.pool import die_with_parent

die_with_parent(signal.SIGKILL)  # the workers do the same: when the dispatcher is killed, all of them end
with contextlib.suppress(Exception):  # it fails again in a worker, which tells why
    import grading.score  # noqa: F401
