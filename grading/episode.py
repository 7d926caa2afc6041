"""Environments, in worker processes: one object of the user's class for each episode. docs/turns.md

    class Environment:
        def __init__(self, row): ...          # the columns of the data row, "answer" among them
        def reply(self, completion): ...      # to the text of a turn: the next user turn; None: the episode is over
        def reward(self): ...                 # optional: a number, a dict with sub-scores, or a list, a number a turn

A request brings all texts of its episode. The worker that has its object tells it the new one. If that worker has died,
the next one makes a new object and tells it all texts again.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from grading import Grade
from grading.own import WrongReturn, awaited, load_own, read_reward
from grading.pool import Outcome, Pool
from grading.tools import Toolbox

Messages = list[dict[str, str]]


class Turn(NamedTuple):
    """A request."""

    episode: int  # its number
    row: dict[str, object]
    texts: tuple[str, ...]  # of all turns of the policy
    is_last: bool  # there is no room for another turn


def columns_for(columns: dict[str, object], answer: str) -> dict[str, object]:
    """The row of a `Turn`: the answer that was read is "answer". With --reward none, none was read."""
    return columns | {"answer": answer} if answer else columns


class Reply(NamedTuple):
    """The answer to it."""

    messages: Messages  # of the next turn; []: the episode is over
    grade: Grade | None = None  # then, if the class has a reward()


class Environments:
    """The trainer's side: the workers. All turns of an episode go to one of them, so each is a pool."""

    def __init__(self, handled: tuple[str | None, str | None], num_workers: int, timeout: float, in_flight: int):
        """`handled`: the arguments of `EpisodeWorker`. Raises ValueError or FileNotFoundError if it cannot be used."""
        self.changed = threading.Condition(threading.RLock())
        one = {"num_workers": 1, "timeout": timeout, "in_flight": in_flight, "changed": self.changed}
        self.pools = [Pool("grading.episode:EpisodeWorker", handled, **one) for _ in range(num_workers)]
        for pool in self.pools:  # all load now: no episode shall wait for that
            pool.submit(0, None)
        try:
            self.has_reward: bool = [pool.collect()[0].value for pool in self.pools][0]
        except ValueError as error:
            named = f"--environment {handled[0]}" if handled[0] else f"--tools {handled[1]}"
            raise ValueError(f"{named}: {error}") from None

    def submit(self, turn: Turn) -> None:
        self.pools[turn.episode % len(self.pools)].submit(turn.episode, turn)

    def pop_replies(self, seconds: float = 0.0) -> dict[int, Outcome]:
        """Number of an episode -> what was replied, of those that are there within so many seconds."""
        with self.changed:
            self.changed.wait_for(lambda: any(pool.outcomes or pool.failure for pool in self.pools), seconds)
        return {number: outcome for pool in self.pools for number, outcome in pool.pop_done().items()}

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


class EpisodeWorker:
    """In a worker. Answers a `Turn` with a `Reply`, and None with whether the class has a reward()."""

    def __init__(self, environment: str | None, tools: str | None) -> None:
        """`environment`: file.py:Class; None: `tools`. Raises ValueError for what is neither."""
        if environment is None:
            self.kind, self.name = Toolbox.of(tools), "tools"
        else:
            self.kind, self.name = load_own(environment)
            if not callable(getattr(self.kind, "reply", None)):
                raise ValueError(f"{self.name} has no method reply(self, completion); see docs/turns.md")
        self.has_reward = callable(getattr(self.kind, "reward", None))
        self.episodes: dict[int, tuple[object, int]] = {}  # the object, and how many texts it has been told

    def __call__(self, turn: Turn | None) -> Reply | bool:
        if turn is None:
            return self.has_reward
        environment, told = self.episodes.pop(turn.episode, None) or (self.kind(turn.row), 0)
        reply = None
        for number, text in enumerate(turn.texts[told:], start=told + 1):
            environment.turns = number
            reply = awaited(environment.reply(text))
        if reply is None or turn.is_last:
            return Reply([], self.grade(environment) if self.has_reward else None)
        self.episodes[turn.episode] = environment, len(turn.texts)
        return Reply(self.read_messages(reply))

    def read_messages(self, reply: object) -> Messages:
        """The messages that are meant. Raises WrongReturn."""
        messages = [{"role": "user", "content": reply}] if isinstance(reply, str) else reply
        messages = [messages] if isinstance(messages, dict) else messages
        try:
            # Texts that can be written; of a class of the user's, whose file the trainer does not load, the mere text.
            read = [{name: each[name].encode().decode() for name in ("role", "content")} for each in messages]
        except (TypeError, KeyError, AttributeError, UnicodeEncodeError):
            read = []
        if not read:
            needed = "a text, a message or a list of messages, each with a role and a text as content, or None"
            raise WrongReturn(f"{self.name}.reply returned {reply!r:.200}, not {needed}")
        return read

    def grade(self, environment: object) -> Grade:
        """What reward() says: the parts begin with the whole, so that it decides whether the episode is correct."""
        result, name = awaited(environment.reward()), f"{self.name}.reward"
        if not isinstance(result, (list, tuple)):
            score, parts = read_reward(result, name)
            return Grade(score, "ok", {self.name: score} | parts)
        if len(result) != environment.turns:
            raise WrongReturn(f"{name} returned {result!r:.200} for {environment.turns} turns, not a list of that many")
        of_turns = {f"turn_{k}": read_reward(each, name)[0] for k, each in enumerate(result, start=1)}
        score = sum(of_turns.values())
        return Grade(score, "ok", {self.name: score} | of_turns)
