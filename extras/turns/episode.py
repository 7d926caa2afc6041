"""Environments (--environment), in worker processes: one object of the user's class for each episode. docs/turns.md

    class Environment:
        def __init__(self, row): ...          # the columns of the data row, "answer" among them
        def reply(self, completion): ...      # to the text of a turn: the next user turn; None: the episode is over
        def reward(self): ...                 # optional: a number, a dict with sub-scores, or a list, a number a turn

A request brings all texts of its episode. The worker that has its object tells it the new one. If
that worker has died, the next one makes a new object and tells it all texts again.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from extras.turns.tools import Toolbox
from grading import Grade
from grading.own import WrongReturn, awaited, read_reward
from grading.pool import Pool
from grading.user_code import load_own

Messages = list[dict[str, str]]


class Turn(NamedTuple):
    """A request to a worker."""

    episode: int  # the episode's number
    row: dict[str, object]
    texts: tuple[str, ...]  # all turns of the policy
    is_last: bool  # there is no room for another turn


def columns_for(columns: dict[str, object], answer: str) -> dict[str, object]:
    """The row of a `Turn`: the answer that was read is "answer". With --reward none, none was read."""
    return columns | {"answer": answer} if answer else columns


class Reply(NamedTuple):
    """A worker's answer to a `Turn`."""

    messages: Messages  # what comes before the next turn; []: the episode is over
    grade: Grade | None = None  # at the end, if the class has a reward()
    failures: Sequence[str] = ()  # of tools, each told once


class Environments:
    """The trainer's side: the workers. All turns of an episode go to one of them, so each is a pool."""

    def __init__(self, source: tuple[str | None, str | None], num_workers: int, timeout: float, in_flight: int):
        """`source`: the flags --environment and --tools. Raises ValueError or FileNotFoundError if it has no class."""
        self.changed = threading.Condition(threading.RLock())
        self.pools: list[Pool] = []
        for _ in range(num_workers):
            pool = Pool("extras.turns.episode:EpisodeWorker", source, 1, timeout, in_flight, changed=self.changed)
            pool.submit(0, None)  # all load now: no episode shall wait for that
            self.pools.append(pool)
        try:
            for pool in self.pools:
                self.has_reward: bool = pool.collect()[0]
        except ValueError as error:
            environment, tools = source
            flag = f"--environment {environment}" if environment else f"--tools {tools}"
            raise ValueError(f"{flag}: {error}") from None

    def submit(self, turn: Turn) -> None:
        self.pools[turn.episode % len(self.pools)].submit(turn.episode, turn)

    def pop_replies(self, seconds: float = 0.0) -> dict[int, object]:
        """The replies, or failures, that are there within so many seconds, by the number of their episode."""
        with self.changed:
            self.changed.wait_for(lambda: any(pool.outcomes or pool.failure for pool in self.pools), seconds)
        replies: dict[int, object] = {}
        for pool in self.pools:
            replies |= pool.pop_done()
        return replies

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


class EpisodeWorker:
    """Answers, in a worker, a `Turn` with a `Reply`, and None with whether the class has a reward()."""

    def __init__(self, environment: str | None, tools: str | None) -> None:
        """`environment`: file.py:Class; None: `tools`. Raises ValueError for what is neither."""
        if environment is None:
            self.kind, self.name = Toolbox.load(tools), "tools"
        else:
            self.kind, self.name = load_own(environment)
            if not callable(getattr(self.kind, "reply", None)):
                raise ValueError(f"{self.name} has no method reply(self, completion); see docs/turns.md")
        self.has_reward = callable(getattr(self.kind, "reward", None))
        self.episodes: dict[int, tuple[object, int]] = {}  # the object, and how many texts it has seen

    def __call__(self, turn: Turn | None) -> Reply | bool:
        if turn is None:
            return self.has_reward
        environment, num_seen = self.episodes.pop(turn.episode, None) or (self.kind(copy.deepcopy(turn.row)), 0)
        reply, failures = None, ()
        for number, text in enumerate(turn.texts[num_seen:], start=num_seen + 1):
            environment.turns = number
            reply = awaited(environment.reply(text))
            failures = environment.failures if isinstance(environment, Toolbox) else ()
        if reply is None or turn.is_last:
            return Reply([], self.grade(environment) if self.has_reward else None, failures)
        self.episodes[turn.episode] = environment, len(turn.texts)
        return Reply(self.read_messages(reply), failures=failures)

    def read_messages(self, reply: object) -> Messages:
        """The messages of a reply: a text, a message or a list of messages. Raises WrongReturn."""
        messages = [{"role": "user", "content": reply}] if isinstance(reply, str) else reply
        messages = [messages] if isinstance(messages, dict) else messages
        try:
            # Mere texts that can be written: the trainer cannot load a class of the user's.
            read = [{name: message[name].encode().decode() for name in ("role", "content")} for message in messages]
        except (TypeError, KeyError, AttributeError, UnicodeEncodeError):
            read = []
        if not read:
            raise WrongReturn(
                f"{self.name}.reply returned {reply!r:.200}, not a text, a message or a list of messages, "
                "each with a role and a text as content, or None"
            )
        return read

    def grade(self, environment: object) -> Grade:
        """The grade by reward(). Its first part is the whole: that one decides on `is_correct`."""
        result, name = awaited(environment.reward()), f"{self.name}.reward"
        if not isinstance(result, (list, tuple)):
            grade = read_reward(result, name)
            return replace(grade, parts={self.name: grade.reward} | grade.parts)
        if len(result) != environment.turns:
            raise WrongReturn(f"{name} returned {result!r:.200} for {environment.turns} turns, not a list of that many")
        rewards = tuple(read_reward(value, name).reward for value in result)
        parts = {f"turn_{number}": reward for number, reward in enumerate(rewards, start=1)}
        return Grade(sum(rewards), "ok", {self.name: sum(rewards)} | parts, turn_rewards=rewards)
