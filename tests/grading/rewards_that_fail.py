"""Rewards of one's own that misbehave in every way, for the tests of the graders."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

KEPT = []


def score(completion, answer, columns):
    """Does what the completion says."""
    if completion == "loop":
        while True:
            with contextlib.suppress(BaseException):  # as math-verify and many others do: no signal gets through
                time.sleep(0.001)
    if completion == "allocate":
        while True:
            KEPT.append(bytearray(1 << 24))
    if completion == "raise":
        raise ValueError("no such luck")
    if completion == "nan":
        return float("nan")
    if completion == "exit":
        sys.exit(3)
    if completion == "hard exit":
        os._exit(0)
    if completion == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)  # a thread may go on for a moment
    if completion == "hold the interpreter":
        re.match("(a+)+b", "a" * 40)
    if completion == "close every file":
        os.closerange(3, 30)
    if completion == "half a character":
        raise ValueError("\udc80")
    if completion == "leave a child":
        return float(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    if completion == "fork a child and exit":  # which holds all that the worker has open
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    if completion == "sleep":
        time.sleep(0.5)
    return float(answer in completion)
