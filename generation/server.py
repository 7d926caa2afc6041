"""vLLM's own server, all of whose processes end with the first of them: `python -m generation.server FLAGS`.

vLLM starts the others by multiprocessing's spawn, which imports this file in them before all else: they would stay, and
keep their GPU, when the first one is killed, also while they are still importing torch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import psutil

from generation.start import OWN_SERVER

LOOK = 0.5  # seconds


def end_with_server() -> None:
    """Ends all processes of a server when the first of them, which the run holds, has ended."""
    first = os.getsid(0)
    with suppress(psutil.Error):  # it is gone
        while psutil.Process(first).status() != psutil.STATUS_ZOMBIE:
            time.sleep(LOOK)
    os.killpg(first, signal.SIGKILL)


if __name__ == "__mp_main__" and OWN_SERVER in os.environ:  # in a process that vLLM has started
    threading.Thread(target=end_with_server, daemon=True).start()

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
