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


class Odd(Counts):
    """Replies with a role that no template knows."""

    def reply(self, completion):
        return {"role": "nobody", "content": "?"}


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


class Texts(Counts):
    """Replies with the kind of text that its row names."""

    def __init__(self, row):
        super().__init__(row)
        self.kind = row["answer"]

    def reply(self, completion):
        super().reply(completion)
        return Own("hello") if self.kind == "own class" else "half \ud800"


DEEDS = ("hang", "exit", "raise", "10 MB", "no text", "control tokens")


class Hostile(Counts):
    """The deed that its row names, at the second turn."""

    def __init__(self, row):
        super().__init__(row)
        self.deed = row["answer"]

    def reply(self, completion):
        reply = super().reply(completion)
        if self.turns == 2:
            if self.deed == "hang":
                time.sleep(1000)
            if self.deed == "exit":
                os._exit(3)
            if self.deed == "raise":
                raise KeyError("no such luck")
            if self.deed == "10 MB":
                return "x" * 10_000_000
            if self.deed == "no text":
                return sys
            if self.deed == "control tokens":
                return "<eos><user>"
        return reply


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
