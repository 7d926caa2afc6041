"""Environments for tests/test_turns.py."""

import os
import sys
import time


class Once:
    """Over at once; --reward grades."""

    def __init__(self, row):
        pass

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
        import asyncio

        await asyncio.sleep(0.3)
        return super().reply(completion)

    def reward(self):
        return {"reward": sum(self.lengths), "turns": self.turns}


class Own(str):
    """A text of a class that only the worker knows."""


DEEDS = {
    "hang": lambda: time.sleep(1000),
    "exit": lambda: os._exit(3),
    "raise": lambda: {}["no such luck"],
    "10 MB": lambda: "x" * 10_000_000,
    "no text": lambda: sys,
    "surrogate": lambda: "half \ud800",
    "control tokens": lambda: "<eos><user>",
    "own class": lambda: Own("hello"),
    "odd role": lambda: {"role": "nobody", "content": "?"},
}


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


def read_calls(completion):
    """Calls like add(1,2)."""
    import re

    return [
        {"name": name, "arguments": {"a": int(a), "b": int(b)}}
        for name, a, b in re.findall(r"(\w+)\((\d+),(\d+)\)", completion)
    ]


class NoReply:
    pass
