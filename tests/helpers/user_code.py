"""What a user may write, well or badly: rewards, environments, tools. Runs load this file by its path."""

import asyncio
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
        os.closerange(3, 4096)
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


class Once:
    """Over at once; --reward grades."""

    def __init__(self, row): ...

    def reply(self, completion):
        return None


class Counts:
    """Replies with the number of the turn, for ever; each turn's reward is the length of its text."""

    def __init__(self, row):
        self.lengths = []

    def reply(self, completion):
        self.lengths.append(float(len(completion) % 4))
        return f"turn {self.turns}"

    def reward(self):
        return self.lengths


class Waits(Counts):
    """An async one, which takes a while; a number as reward."""

    async def reply(self, completion):
        await asyncio.sleep(0.3)
        return super().reply(completion)

    def reward(self):
        return {"reward": sum(self.lengths), "turns": self.turns}


class Own(str):
    """A text of a class that only the worker knows."""


DEEDS = {
    "hang": lambda: time.sleep(1000), "exit": lambda: os._exit(3), "raise": lambda: {}["no such luck"],
    "10 MB": lambda: "x" * 10_000_000, "no text": lambda: sys, "surrogate": lambda: "half \ud800",
    "control tokens": lambda: "<eos><user>", "own class": lambda: Own("hello"),
    "odd role": lambda: {"role": "nobody", "content": "?"},
}  # fmt: skip


class Hostile(Counts):
    """The deed that its row names, at the second turn; a sub-score that a class of its own names."""

    def __init__(self, row):
        super().__init__(row)
        self.deed = DEEDS.get(row["answer"])

    def reply(self, completion):
        reply = super().reply(completion)
        return self.deed() if self.turns == 2 and self.deed else reply

    def reward(self):
        return {"reward": 1.0, Own("x"): 0.5}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def divide(a: int, b: int) -> float:
    """Divides two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a / b


def read_calls(completion):
    """Calls like add(1,2)."""
    return [
        {"name": name, "arguments": {"a": int(a), "b": int(b)}}
        for name, a, b in re.findall(r"(\w+)\((\d+),(\d+)\)", completion)
    ]


class NoReply: ...
