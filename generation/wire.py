"""The main rank's talk with the generation servers: which one samples what, and what happens when one fails.

One thread with an event loop, so that servers sample while the main rank trains. A server "starts", "waits" for its
first weights, is "ready", or "lost": after its first fault, and for good. The others get its requests. The run ends if
none is left, or if one is lost at its start or amid a transfer of weights: the reason is `Fleet.error`.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import re
import resource
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import torch
from torch import Tensor

from batch import Row
from flags import Sampling
from generation.start import ServerProcess
from generation.weights import Link, open_link
from guards.start import RunError, note_reason, requested, signal_name
from inputs.machine import own_address
from model.sizes import MOST_ON_GPU

TIMEOUT = 600.0  # seconds: a server that gives no answer at its start, or no token, for so long is dead
MEETING = 60.0  # seconds that a server has to come for its weights
LEAVE = 10.0  # seconds that the main rank has to end after a failed transfer, or one that stands still at a signal
GOODBYE = 3.0  # seconds that a server has for each request at the end of a run
LOOK = 1.0  # seconds between two looks at a server
TAIL = 1500  # characters of the log that are shown when a server is lost
TOKENS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total\b.* (\S+)$", re.MULTILINE)


class ServerFault(Exception):
    """A server has said or done something else than it was asked to."""


class Unusable(ServerFault):
    """A server of another run, or one that does not fit this run. The text goes on after the server's name."""


UNREACHABLE = (aiohttp.ClientError, OSError)
FAULTS = (ServerFault, msgspec.DecodeError, UnicodeError, *UNREACHABLE)

# What a server answers; msgspec checks it, and is many times as fast as json.
Logprob = msgspec.defstruct("Logprob", [("token_id", int), ("logprob", float), ("rank", int | None, None)])
Logprobs = msgspec.defstruct("Logprobs", [("content", list[Logprob])])
Versions = msgspec.defstruct("Versions", [("version", str), ("start", int), ("end", int)])
Choice = msgspec.defstruct(
    "Choice",
    [("token_ids", list[int]), ("logprobs", Logprobs), ("weight_versions", list[Versions]), ("finish_reason", str)],
)
Answer = msgspec.defstruct("Answer", [("prompt_token_ids", list[int]), ("choices", list[Choice])])


@dataclass(frozen=True)
class Completion:
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32, of the weights that made each token
    is_truncated: bool


@dataclass
class Request:  # of one completion
    row: Row
    b: int  # its index in the call
    sampling: Sampling
    results: queue.SimpleQueue[tuple[int, Completion]]


@dataclass(eq=False)
class Server:
    """One server, as the main rank sees it."""

    name: str  # for the console
    url: str
    process: ServerProcess | None = None  # None: somebody else has started it
    state: str = "starts"
    under_way: dict[asyncio.Task[None], Request] = field(default_factory=dict)
    row: Row | None = None  # of the last one
    num_workers: int = 1
    link: Link | None = None  # to its workers; None: they have not met the main rank
    update: asyncio.Task[None] | None = None  # waits for its answer to the weights that are being sent
    version: int = -1  # of its weights
    tokens: float = 0.0  # by its own count
    since: float = 0.0  # when it last made progress
    doing: str = ""  # "samples 3", by weights of version 3, "updates", or nothing; for the timeline
    doing_since: float = 0.0


def read_completion(content: bytes, prompt: list[int], sampling: Sampling) -> Completion:
    """Raises ServerFault or msgspec's errors if it is not what was asked for."""
    answer = msgspec.json.decode(content, type=Answer)
    if answer.prompt_token_ids != prompt or len(answer.choices) != 1:
        raise ServerFault("it answers another prompt")
    (choice,) = answer.choices
    ids, logprobs, spans = choice.token_ids, choice.logprobs.content, choice.weight_versions
    lengths = [span.end - span.start for span in spans]
    is_ended, is_long = choice.finish_reason in ("stop", "length"), 0 < len(ids) <= sampling.max_completion_tokens
    mistakes = {
        f"a completion of {len(ids)} tokens ended by {choice.finish_reason!r}": not (is_ended and is_long),
        "the log-probs are not those of its tokens": [each.token_id for each in logprobs] != ids,
        "a log-prob is above 0": not all(each.rank and -math.inf < each.logprob < 1e-3 for each in logprobs),
        "it does not say which weights made which token": [0, *np.cumsum(lengths)]
        != [*(x.start for x in spans), len(ids)],
        "its weights were not sent: it was started anew": not all(span.version.isdecimal() for span in spans),
    }
    for mistake in (mistake for mistake, is_made in mistakes.items() if is_made):
        raise ServerFault(mistake)
    return Completion(
        np.array(ids, dtype=np.int32),
        np.array([each.logprob for each in logprobs], dtype=np.float32),
        np.repeat(np.array([int(span.version) for span in spans], dtype=np.int32), lengths),
        choice.finish_reason == "length",
    )


@dataclass(eq=False)
class Fleet:
    """All servers. What begins with `_`, and what is a coroutine, runs in the event loop's thread."""

    servers: list[Server]
    stop_ids: list[int]
    key: str
    say: Callable[[str], None]
    note_span: Callable[[str, str, float, float], None]  # hears which server did what when
    timeout: float = TIMEOUT
    most: int = MOST_ON_GPU  # requests that a server gets at a time
    claim: dict[str, str] = field(default_factory=dict)  # names this run and this start of it
    needed: dict[str, object] = field(default_factory=dict)  # flag of scripts/serve.py -> its value for this run
    pending: deque[Request] = field(default_factory=deque)
    is_open: bool = False  # requests are given to servers
    is_sending: bool = False  # weights
    moved: float = 0.0  # when the last tensor was sent
    error: str = ""  # why the run cannot go on

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="servers", daemon=True)
        self.thread.start()
        self.call(self._open())

    def call(self, coroutine: Coroutine[None, None, None]) -> None:
        """From another thread: runs it in the loop, and waits."""
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    async def _open(self) -> None:
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each request is a connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        # A connection for each request: vLLM's server closes one that is idle for 5 s, perhaps while the next request
        # is on its way, and that would look like a server that has died.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.session = aiohttp.ClientSession(headers=headers, connector=connector)
        self.watchers = [asyncio.create_task(self._or_lose(each, self._watch(each))) for each in self.servers]
        self.watchers.append(asyncio.create_task(self._watch_signals()))

    def close(self) -> None:
        """From another thread: ends the requests under way, the servers that the run has started, and the thread."""
        self.call(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(self._part, self.servers))
        await self.session.close()

    async def _part(self, server: Server) -> None:
        if server.process is not None:
            await asyncio.to_thread(server.process.end)
        elif server.state in ("waits", "ready"):  # it is this run's, and stays up for another
            with suppress(*FAULTS):
                await self.ask(server, "shutdown_weight_transfer_engine", {}, timeout=GOODBYE)
            with suppress(*FAULTS):
                await self._own(server, "free", GOODBYE)
        if server.link is not None:
            await asyncio.to_thread(server.link.close)
        server.link = None

    async def ask(
        self, server: Server, path: str, body: object = None, method: str = "POST", timeout: float | None = TIMEOUT
    ) -> bytes:
        """The body of the answer. Raises one of `FAULTS`. `timeout`: seconds; None: for ever."""
        limit = aiohttp.ClientTimeout(total=timeout and min(timeout, self.timeout), sock_connect=10)
        async with self.session.request(method, f"{server.url}/{path}", json=body, timeout=limit) as response:
            content = await response.read()
        if response.status == 409:
            raise Unusable(content.decode(errors="replace"))
        if response.status != 200:
            said = " ".join(content[:200].decode(errors="replace").split())
            raise ServerFault(f"/{path.partition('?')[0]} answers with status {response.status}: {said}")
        return content

    # Requests ---------------------------------------------------------------------------------------------------------

    async def put(self, requests: Sequence[Request], is_first: bool = False) -> None:
        """Queues them; `is_first`: before all others."""
        self.pending = deque([*requests, *self.pending] if is_first else [*self.pending, *requests])
        self._dispatch()

    async def pause(self) -> None:
        """No request is given to a server any more; those under way go on."""
        self.is_open = False

    def _dispatch(self) -> None:
        """Gives what is pending to the servers with the fewest unfinished requests; a prompt's to one of them."""
        while self.pending and self.is_open:
            free = [each for each in self.servers if each.state == "ready" and len(each.under_way) < self.most]
            if not free:
                return
            request = self.pending.popleft()
            same = [each for each in free if each.row is request.row]
            server = min(same or free, key=lambda each: len(each.under_way))
            server.row = request.row
            task = self.loop.create_task(self._or_lose(server, self._complete(server, request)))
            server.under_way[task] = request
            if not server.doing:
                self._note(server, f"samples {server.version}")

    async def _complete(self, server: Server, request: Request) -> None:
        prompt, sampling = request.row.ids.tolist(), request.sampling
        # Without a seed: with one, vLLM on CPU ends as soon as a prefill is chunked (v1/worker/gpu_model_runner.py).
        params = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_completion_tokens,
            "stop_token_ids": self.stop_ids, "logprobs": 0, "detokenize": False,
        }  # fmt: skip
        body = {"token_ids": prompt, "sampling_params": params, "return_token_ids": True}
        content = await self.ask(server, "inference/v1/generate", body, timeout=None)
        completion = read_completion(content, prompt, sampling)
        del server.under_way[asyncio.current_task()]
        if not server.under_way:
            self._note(server, "")
        request.results.put((request.b, completion))
        self._dispatch()

    def _note(self, server: Server, doing: str) -> None:
        now = time.time()
        if server.doing:
            self.note_span(server.name, server.doing, server.doing_since, now)
        server.doing, server.doing_since = doing, now

    # Weights: the main rank calls prepare, then send for each tensor, then finish -------------------------------------

    async def prepare(self, weights: dict[str, list], device: torch.device) -> None:
        """All servers stand still now, and wait for these weights."""

        async def prepare(server: Server) -> None:
            self._note(server, "updates")
            if server.link is not None:  # unfinished completions stay; their keys and values are computed anew
                await self.ask(server, "pause?mode=keep&clear_cache=true")
            else:  # what it does, and holds, is left over from a run that has ended, perhaps amid an update
                await self.ask(server, "pause?mode=abort&clear_cache=true")
                for path in ("finish_weight_update", "shutdown_weight_transfer_engine"):
                    with suppress(ServerFault):
                        await self.ask(server, path, {})
                await self._meet(server, device)
            await self.ask(server, "start_weight_update")
            update = self.ask(server, "update_weights", {"update_info": weights}, timeout=None)
            server.update = asyncio.create_task(self._or_lose(server, update))

        self.is_sending, self.moved = True, time.monotonic()
        await self._with_all(prepare)

    async def _meet(self, server: Server, device: torch.device) -> None:
        """Opens a process group with the server's workers. Each server has its own: a dead one hurts no other."""
        host = own_address(urlsplit(server.url).hostname)
        listener = socket.create_server((host, 0))
        info = {"master_address": host, "master_port": listener.getsockname()[1], "rank_offset": 1}
        info["world_size"] = 1 + server.num_workers
        answer = self.ask(server, "init_weight_transfer_engine", {"init_info": info})
        link = asyncio.to_thread(open_link, listener, server.num_workers, device, min(self.timeout, MEETING))
        try:
            server.link, _ = await asyncio.gather(link, answer)  # the first that fails: the other may wait for ever
        except RuntimeError as error:
            raise ServerFault(f"it did not come to take weights: {error}") from None

    def send(self, tensor: Tensor) -> None:
        """From another thread: the next tensor goes to all servers. Raises RunError if one is lost."""
        for server in [each for each in self.servers if each.state != "lost"]:
            try:
                server.link.send(tensor)
            except RuntimeError as error:  # of torch: the connection is broken
                self.call(self._lose(server, error))
        self.moved = time.monotonic()
        self.check()

    async def finish(self, version: int) -> None:
        """The servers have all weights. They sample on, and say of what follows that this version made it."""

        async def finish(server: Server) -> None:
            await asyncio.wait_for(server.update, self.timeout)
            await self.ask(server, "finish_weight_update", {"weight_version": str(version)})
            await self.ask(server, "resume")
            server.state, server.version = "ready", version
            self._note(server, f"samples {version}" if server.under_way else "")

        await self._with_all(finish)
        self.is_sending, self.is_open = False, True
        self._dispatch()

    async def _with_all(self, do: Callable[[Server], Coroutine[None, None, object]]) -> None:
        await asyncio.gather(*(self._or_lose(each, do(each)) for each in self.servers if each.state != "lost"))

    def describe(self) -> str:
        loads = ", ".join(f"{each.name} {each.state} with {len(each.under_way)} requests" for each in self.servers)
        return f"{loads}, {sum(each.tokens for each in self.servers):.0f} tokens in all"

    # Faults -----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.error:
            raise RunError(self.error)

    async def _or_lose(self, server: Server, work: Coroutine[None, None, object]) -> None:
        try:
            await work
        except FAULTS as error:
            await self._lose(server, error)

    async def _lose(self, server: Server, error: Exception) -> None:
        """The server is lost. The others get its requests, before all that is pending; or the run ends."""
        if server.state == "lost":
            return
        is_starting, server.state = server.state == "starts", "lost"
        reason, tail = str(error) or f"no answer ({type(error).__name__})", ""
        if server.process is not None:
            reason = server.process.how_it_ended() or reason
            server.process.kill()
            tail = f". {server.process.log} ends with:\n{server.process.log.read_text(errors='replace')[-TAIL:]}"
        requests, tasks = list(server.under_way.values()), set(server.under_way) - {asyncio.current_task()}
        server.under_way = {}
        for task in tasks:
            task.cancel()
        self._note(server, "")
        if is_starting or self.is_sending or all(each.state == "lost" for each in self.servers):
            when = "amid a transfer of weights" if self.is_sending else "and no other is left"
            lost = "did not start" if is_starting else f"was lost {when}"
            fault = f"{lost}: {reason}; the same command goes on from the last checkpoint{tail}"
            self.error = self.error or f"{server.name} {reason if isinstance(error, Unusable) else fault}"
            if self.is_sending:
                self.loop.call_later(LEAVE, self._leave)
        else:
            moved = f"; {len(requests)} unfinished completions are sampled elsewhere" if requests else ""
            self.say(f"{server.name} is lost for the rest of this run: {reason}{moved}")
            self.pending.extendleft(reversed(requests))
            self._dispatch()

    def _leave(self) -> None:
        """Ends the process: its main thread may wait in a broadcast that nobody answers, over NCCL for ever."""
        if not note_reason(self.error, "mistake"):
            print(f"error: {self.error}", file=sys.stderr, flush=True)
        os._exit(1)

    async def _watch_signals(self) -> None:
        """After a signal ends the run if a transfer stands still: the main thread is in it, and cannot hear."""
        while not (requested() and self.is_sending and time.monotonic() - self.moved > LEAVE):
            await asyncio.sleep(LOOK)
        fault = f"{signal_name()}: ended in a transfer of weights that stood still ({self.describe()})"
        self.error = self.error or f"{fault}; the same command goes on from the last checkpoint"
        self._leave()

    async def _own(self, server: Server, do: str, timeout: float | None = TIMEOUT) -> dict[str, object]:
        """Tells the server that this run will "take", "keep" or "free" it. Raises one of `FAULTS`."""
        content = await self.ask(server, "owner", {"claim": self.claim, "do": do}, timeout=timeout)
        return msgspec.json.decode(content, type=dict)

    async def _watch(self, server: Server) -> None:
        """Takes the server when it answers, keeps it, and sees whether it makes progress. Raises one of `FAULTS`."""
        server.since = time.monotonic()
        while server.state != "lost":
            if server.process is not None and (how := server.process.how_it_ended()):
                raise ServerFault(how)
            if server.state == "starts":
                with suppress(*UNREACHABLE):
                    await self._take(server)
                    server.since = time.monotonic()
            else:
                await self._own(server, "keep")
                if self.is_sending or not server.under_way:
                    server.since = time.monotonic()
                else:
                    content = await self.ask(server, "metrics", method="GET")
                    before, server.tokens = server.tokens, sum(map(float, TOKENS.findall(content.decode())))
                    server.since = server.since if server.tokens == before else time.monotonic()
            if time.monotonic() - server.since > self.timeout:
                raise ServerFault(f"no {'answer' if server.state == 'starts' else 'token'} for {self.timeout:g} s")
            await asyncio.sleep(LOOK)

    async def _take(self, server: Server) -> None:
        """Raises Unusable if the server does not have what the run needs. A larger --max_model_len will do."""
        found = await self._own(server, "take", timeout=5.0)
        wrong = [
            f"{name} {found.get(name)}, needed is {needed}" for name, needed in self.needed.items()
            if found.get(name) != needed and not (name == "--max_model_len" and found[name] > needed)
        ]  # fmt: skip
        if wrong:
            raise Unusable(f"does not fit this run: it has {'; '.join(wrong)}.")
        server.num_workers, server.state = found["world_size"], "waits"
