"""Episodes of more than one turn: the policy answers, an environment or a tool replies, the policy answers again.

--environment or --tools asks for them; the seam is `Engine(play=...)`, the generator that samples a call's completions.

    turns = Turns(settings, grading, prompt_format, tokenizer, num_workers)
    engine = Engine(..., play=turns.play)   # then `engine.sample` returns whole episodes; of servers: fleet.turns

Tokens are never made again. What was sampled stays as it was; a reply is rendered by the chat template, once, and its
tokens are appended. A completion is all of it: only its sampled tokens have log-probs and a loss (`is_sampled`), and
attention sees both. Environments run in workers (`extras/turns/episode.py`), a worker for all turns of an episode.
docs/turns.md
"""

import itertools
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from batch import Completion, Metrics, OnFinished, Row
from data import UnusableRow, render
from extras.turns.episode import Environments, Messages, Reply, Turn, columns_for
from flags import Grading, PromptFormat, Sampling, TurnLimits
from fsdp_utils import gather_from_ranks
from grading import Grade
from grading.pool import Failure
from run import Observer
from runtime.progress import progress
from runtime.rank import requested

REPLY_STEPS = 4  # of the engine, from the end of a turn to the next one: replies come meanwhile, others sample on
REPLY_SECONDS = 3.0  # that an engine then waits for a reply, on a busy machine, too; see `Turns.replies`
SIGNAL_SECONDS = 0.2  # between two looks for a signal
TOKEN_CHARACTERS = 64  # of a token, at most: a reply of more than so many for each token of room is too long anyway


class EpisodeState(Enum):
    """The event that an episode waits for after a reply."""

    TURN = auto()  # the policy's
    REPLY = auto()  # another one from the environment
    END = auto()  # nothing: it is over


@dataclass(eq=False)
class Episode(Completion):
    """A completion of several turns."""

    row: Row | None = None
    number: int = 0  # among all of the process
    is_sampled: list[bool] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)  # the texts of the policy
    transcript: str = ""  # all texts so far, with the template's tokens around replies

    def add(self, part: Completion, text: str, is_sampled: bool) -> None:
        """Appends a turn of the policy, or what stands before its next one."""
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.versions += part.versions
        self.is_sampled += [is_sampled] * len(part.token_ids)
        self.transcript += text
        if part.routes is not None:  # of all tokens so far: earlier turns keep the routes by which they were sampled
            before = part.routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate([before, part.routes[len(before) :]])

    def finish(self, b: int, tokenizer: Tokenizer, on_finished: OnFinished | None) -> None:
        """Gives the grader the text of the last turn, and all that was sampled."""
        self.text = self.transcript
        sampled = list(itertools.compress(self.token_ids, self.is_sampled))
        if on_finished is not None:
            on_finished(b, self.turns[-1], sampled, self.finish_reason == "length", self.grade)


class Template:
    """The chat template between two turns of the policy, learned from a text with marks."""

    def __init__(self, prompt_format: PromptFormat, tokenizer: Tokenizer) -> None:
        """Raises ValueError, with the reason, if the template cannot be continued."""
        self.prompt_format, self.tokenizer = prompt_format, tokenizer
        self.pieces = cache(self._pieces)  # a pattern of roles is rendered once
        try:
            self.pieces(("tool" if prompt_format.tools else "user",))
        except UnusableRow as error:
            raise ValueError(f"--environment, --tools: {error}; give --template_args, or another template.") from None
        escaped = self.plain(" ".join(tokenizer.all_special_tokens))
        if not set(escaped).isdisjoint(tokenizer.all_special_ids):
            raise ValueError("a reply could hold special tokens: the tokenizer of --model cannot write them as text.")

    def _after(self, *messages: tuple[str, str], continues: bool = True) -> str:
        """The text after the first Mark-A: the rest of the answer, then messages, each (role, content)."""
        pairs = (("user", "Mark-Q"), ("assistant", "Mark-A"), *messages)
        conversation = [{"role": role, "content": content} for role, content in pairs]
        return render(conversation, self.prompt_format, self.tokenizer, continues).partition("Mark-A")[2]

    def _pieces(self, roles: tuple[str, ...]) -> list[str]:
        """The texts before, between and after the contents of messages of these roles, from the policy's text on."""
        marks = [f"Mark-{i}" for i in range(len(roles))]
        end = self._after(continues=False)
        rest = self._after(*zip(roles, marks, strict=True))
        pieces = re.split("|".join(marks), rest)
        is_in_order = re.findall(r"Mark-\w+", rest) == marks
        if not rest.startswith(end) or not is_in_order or not pieces[0] or not pieces[-1]:
            raise UnusableRow(f"the chat template cannot continue an answer with a message of the role {roles[0]!r}")
        return pieces

    def plain(self, text: str) -> list[int]:
        """The tokens of a content; what looks like a special token is text."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def suffix(self, messages: Messages, last_id: int | None) -> tuple[list[int], str]:
        """The tokens, and the text, that go on after a turn of the policy to its next one.

        `last_id`: the token that has ended the turn; None: it was cut. Raises UnusableRow where the template refuses.
        """
        text, *pieces = self.pieces(tuple(message["role"] for message in messages))
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if last_id in ids[:2]:  # the turn has ended as in the template, which may write a space before that
            ids = ids[ids.index(last_id) + 1 :]
        for message, piece in zip(messages, pieces, strict=True):
            before, after = self.pieces((message["role"],))
            alone = self._after((message["role"], message["content"]))
            content = alone[len(before) : len(alone) - len(after)]  # some strip it, or write it as JSON
            ids = ids + self.plain(content) + self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            text += content + piece
        return ids, text


class Turns(Observer):
    """Plays episodes. Every rank has one; the one on an engine's first rank has the workers, and counts errors."""

    def __init__(
        self, limits: TurnLimits, grading: Grading, prompt_format: PromptFormat, tokenizer: Tokenizer, num_workers: int
    ) -> None:
        """Raises ValueError or FileNotFoundError for what cannot be used."""
        self.limits, self.tokenizer = limits, tokenizer
        self.template = Template(prompt_format, tokenizer)
        self.environments = None
        if num_workers:
            source = limits.environment, limits.tools
            self.environments = Environments(source, num_workers, grading.reward_timeout, grading.reward_in_flight)
        self.numbers = itertools.count(1)
        self.has_warned = False
        self.num_errors, self.has_told_error = 0, False  # of tools, since the last line

    def describe(self) -> str:
        """A line for the log."""
        return f"turns: at most {self.limits.max_turns}, with {self.limits.environment or self.limits.tools}"

    def step(self, step: int, metrics: Metrics) -> Metrics:
        count, self.num_errors = self.num_errors, 0
        return {"tools/errors": sum(gather_from_ranks(count))}

    def close(self) -> None:
        if self.environments is not None:
            self.environments.close()

    def begin(self, row: Row) -> Episode:
        return Episode(row=row, number=next(self.numbers))

    def room(self, episode: Episode, sampling: Sampling) -> int:
        """Tokens that its next turn may have."""
        left = sampling.max_completion_tokens - len(episode.token_ids)
        return min(left, self.limits.max_turn_tokens or left)

    def end_turn(self, episode: Episode, turn: Completion) -> None:
        """Takes up the turn, and asks the environment for its reply."""
        text = turn.read(self.tokenizer)
        episode.add(turn, text, is_sampled=True)
        episode.turns.append(text)
        episode.finish_reason = turn.finish_reason
        self._ask(episode, is_last=len(episode.turns) == self.limits.max_turns)

    def _ask(self, episode: Episode, is_last: bool) -> None:
        if self.environments is not None:
            row = columns_for(episode.row.columns, episode.row.answer)
            self.environments.submit(Turn(episode.number, row, tuple(episode.turns), is_last))

    def end_reply(self, episode: Episode, reply: Reply | Failure, sampling: Sampling) -> EpisodeState:
        """Takes up the reply."""
        if isinstance(reply, Failure):
            episode.grade = self.failed(str(reply))
            return EpisodeState.END
        if reply.failures and self.environments:  # of the ranks of an engine one counts
            if not self.has_told_error:
                print(f"warning: the tool {reply.failures[0]:.200}", flush=True)
            self.has_told_error = True
            self.num_errors += len(reply.failures)
        if not reply.messages:
            episode.grade = reply.grade
            return EpisodeState.END
        left, ids, text = sampling.max_completion_tokens - len(episode.token_ids), [], ""
        num_characters = sum(len(message["content"]) for message in reply.messages)
        if num_characters <= TOKEN_CHARACTERS * left:
            last_id = episode.token_ids[-1] if episode.finish_reason == "stop" else None
            try:
                ids, text = self.template.suffix(reply.messages, last_id)
            except UnusableRow as error:
                episode.grade = self.failed(f"error: {error}")
                return EpisodeState.END
        if not 0 < len(ids) < left:
            episode.finish_reason = "length"  # there is no room for another turn
            self._ask(episode, is_last=True)
            return EpisodeState.REPLY
        versions = episode.versions[-1:] * len(ids)  # that of the turn before
        episode.add(Completion(ids, logprobs=[0.0] * len(ids), versions=versions), text, is_sampled=False)
        return EpisodeState.TURN

    def failed(self, status: str) -> Grade:
        """The grade of an episode that has failed: by its environment, which nobody knows, or by a tool, which is 0."""
        return Grade(0.0, status, is_compared=self.limits.environment is None)

    # In an engine of the ranks ----------------------------------------------------------------------------------------

    def play(self, engine, rows: list[Row], sampling: Sampling, description: str) -> Iterator[tuple[int, Episode]]:
        """Yields (index, episode) of each row when it is over. `engine`: `rollout.Engine`.

        What is sampled is a function of the seed and of the replies: these enter the engine `REPLY_STEPS` after the
        turn, not when they come.
        """
        ready = [self.begin(row) for row in rows]  # for their next turns
        episodes = {episode.number: (i, episode) for i, episode in enumerate(ready)}
        requests = {}  # number of a request -> the episode whose turn it samples
        due = {}  # number of an episode -> step of the engine that takes its reply up
        self.outcomes = {}  # number of an episode -> its reply, not yet taken up
        self.is_late, step = False, 0
        with progress(description, total=len(rows), shown_after=0.0) as bar:
            while (ready or requests or due) and not engine.is_abandoned():
                if ready:
                    limits = [self.room(episode, sampling) for episode in ready]
                    so_far = [list(episode.token_ids) for episode in ready]
                    first = engine.add([episode.row for episode in ready], so_far, limits, sampling)
                    requests |= dict(enumerate(ready, start=first))
                    ready = []
                if requests:
                    step += 1
                    for request, turn in engine.step():
                        episode = requests.pop(request)
                        self.end_turn(episode, turn)
                        due[episode.number] = step + REPLY_STEPS
                for number, outcome in self.replies(engine, due, step if requests else math.inf):
                    i, episode = episodes[number]
                    match self.end_reply(episode, outcome, sampling):
                        case EpisodeState.TURN:
                            del due[number]
                            ready.append(episode)
                        case EpisodeState.END:
                            del due[number]
                            yield i, episode
                            bar.update()
            bar.refresh()

    def replies(self, engine, due: dict[int, int], step: float) -> list[tuple[int, Reply | Failure]]:
        """The replies, by episode, that are due at this step of the engine; the same on all of its ranks.

        They are waited for; after one that takes longer than `REPLY_SECONDS` replies are taken as they come.
        """
        wanted = [number for number, step_due in due.items() if step_due <= step]
        if not wanted and not (due and self.is_late):
            return []
        outcomes = self._wait(wanted, is_idle=step == math.inf) if self.environments is not None else None
        outcomes, self.is_late = engine.from_leader((outcomes, self.is_late))
        return outcomes

    def _wait(self, wanted: list[int], is_idle: bool) -> list[tuple[int, Reply | Failure]]:
        """The outcomes of the wanted episodes; once the environment is late, all that are there.

        `is_idle`: the engine samples nothing, so it waits for one at least.
        """
        begin, seconds = time.monotonic(), 0.0
        while not requested():
            self.outcomes |= self.environments.pop_replies(seconds)
            numbers = sorted(self.outcomes) if self.is_late else wanted
            if self.outcomes.keys() >= set(numbers) and (numbers or not is_idle):
                return [(number, self.outcomes.pop(number)) for number in numbers]
            if not self.is_late and time.monotonic() - begin > REPLY_SECONDS:
                self.is_late = True
                if not self.has_warned:
                    print("the environment takes long: what is sampled now depends on the clock", flush=True)
                self.has_warned = True
            seconds = SIGNAL_SECONDS
        return []
