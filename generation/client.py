"""The main rank's talk with the generation servers: which server samples what, and what happens when one fails.

One thread with an event loop, so that servers sample while the main rank trains. A server is `away` (it does not answer
yet, or no more), `waiting` (it answers, but does not hold our weights), `ready`, or `given up`.
"""

from __future__ import annotations

import asyncio
import math
import queue
import re
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import torch

from batch import Row
from flags import Sampling
from generation.start import ServerProcess
from generation.transfer import Send, open_link
from inputs.machine import own_address
from report import Span

Result = TypeVar("Result")
MEETING = 60.0  # seconds that a server has to come for its weights
LOOK = 1.0  # seconds between two looks at a server
MOST_STARTS = 3  # of a server that never answers
MOST_FAILURES = 5  # of a completion, each on a server that failed meanwhile
TOKENS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total\b.* (\S+)$", re.MULTILINE)


class ServerFault(Exception):
    """A server has said or done something else than it was asked to."""


FAULTS = (ServerFault, aiohttp.ClientError, msgspec.DecodeError, UnicodeError, OSError, asyncio.TimeoutError)


# What a server answers ------------------------------------------------------------------------------------------------


class Logprob(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int | None = None


class Logprobs(msgspec.Struct):
    content: list[Logprob]


class VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: Logprobs
    weight_versions: list[VersionSpan]
    finish_reason: str


class Answer(msgspec.Struct):
    prompt_token_ids: list[int]
    choices: list[Choice]


@dataclass(frozen=True)
class Completion:
    """What came back for one request."""

    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32, of the weights that made each token
    is_truncated: bool


def read_completion(content: bytes, prompt: list[int], sampling: Sampling) -> Completion:
    """Raises ServerFault or msgspec's errors if it is not what was asked for."""
    answer = msgspec.json.decode(content, type=Answer)
    if answer.prompt_token_ids != prompt or len(answer.choices) != 1:
        raise ServerFault("it answers another prompt")
    (choice,) = answer.choices
    ids, logprobs, spans = choice.token_ids, choice.logprobs.content, choice.weight_versions
    if choice.finish_reason not in ("stop", "length") or not 0 < len(ids) <= sampling.max_completion_tokens:
        raise ServerFault(f"a completion of {len(ids)} tokens ended by {choice.finish_reason!r}")
    if [each.token_id for each in logprobs] != ids:
        raise ServerFault(f"the log-probs of {len(logprobs)} tokens are not those of its {len(ids)} tokens")
    if not all(each.rank and -math.inf < each.logprob < 1e-3 for each in logprobs):
        raise ServerFault("a log-prob is not a number, or above 0")
    lengths = [span.end - span.start for span in spans]
    if [0, *np.cumsum(lengths)] != [*(span.start for span in spans), len(ids)]:
        raise ServerFault("it does not say which weights made which token")
    if not all(span.version.isdecimal() for span in spans):
        raise ServerFault(f"its weights are {spans[0].version!r}, which were not sent: it was started anew")
    return Completion(
        np.array(ids, dtype=np.int32),
        np.array([each.logprob for each in logprobs], dtype=np.float32),
        np.repeat(np.array([int(span.version) for span in spans], dtype=np.int32), lengths),
        choice.finish_reason == "length",
    )


# Requests and servers -------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """One completion to be sampled."""

    row: Row
    b: int  # its index in the call
    sampling: Sampling
    results: queue.SimpleQueue[tuple[int, Completion]]
    num_failures: int = 0


@dataclass(eq=False)
class Server:
    """One server, as the main rank sees it."""

    name: str  # for the console
    url: str
    process: ServerProcess | None = None  # None: somebody else has started it
    state: str = "away"
    under_way: dict[asyncio.Task[None], Request] = field(default_factory=dict)
    send: Send | None = None  # sends a tensor to its workers; None: they have not met the main rank
    update: asyncio.Task[bytes] | None = None  # its answer to the weights that are being sent
    num_workers: int = 1
    tokens: float = 0.0  # by its own count
    since: float = field(default_factory=time.monotonic)  # when it last made progress
    num_faults: int = 0  # in a row
    has_answered: bool = False  # since it was last started
    version: int = -1  # of its weights
    doing: str = ""  # "samples 3", by weights of version 3, "updates", or nothing; for the timeline
    doing_since: float = 0.0


class Fleet:
    """All servers. What begins with `_`, and what is a coroutine, runs in the event loop's thread."""

    def __init__(self, servers: list[Server], stop_ids: list[int], key: str, timeout: float, most: int) -> None:
        """`timeout`: seconds without progress; `most`: requests that a server gets at a time."""
        self.servers, self.stop_ids, self.timeout, self.most = servers, stop_ids, timeout, most
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.pending: deque[Request] = deque()
        self.is_open = False  # requests are given to servers
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()  # for the console
        self.spans: queue.SimpleQueue[Span] = queue.SimpleQueue()  # what servers did when
        self.error = ""  # why the run cannot go on
        self.last_seen = time.monotonic()  # a server that answers
        self.is_silent = False  # none has answered for too long, as of the last look
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="servers", daemon=True)
        self.thread.start()
        self.call(self._open())

    def call(self, coroutine: Coroutine[None, None, Result]) -> Result:
        """From another thread: runs it in the loop, and waits."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    async def _open(self) -> None:
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each request is a connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        # A connection for each request: vLLM's server closes one that is idle for 5 s, perhaps while the next request
        # is on its way, and that would look like a server that has died.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self.session = aiohttp.ClientSession(headers=self.headers, timeout=timeout, connector=connector)
        self.watchers = [asyncio.create_task(self._watch(server)) for server in self.servers]

    def close(self) -> None:
        """From another thread: ends the requests under way, the servers that this process has started, the threads."""
        self.call(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _close(self) -> None:
        tasks = [*self.watchers, *(task for server in self.servers for task in server.under_way)]
        tasks += [server.update for server in self.servers if server.update is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.session.close()
        for server in self.servers:
            server.send = None
        processes = [server.process for server in self.servers if server.process and server.process.process]
        await asyncio.gather(*(asyncio.to_thread(process.end) for process in processes))
        await self.loop.shutdown_default_executor()

    # Requests ---------------------------------------------------------------------------------------------------------

    async def put(self, requests: Sequence[Request], is_first: bool = False) -> None:
        """Queues them; `is_first`: before all others."""
        self.pending = deque([*requests, *self.pending] if is_first else [*self.pending, *requests])
        self._dispatch()

    async def set_open(self, is_open: bool) -> None:
        """Whether requests are given to servers; those under way go on."""
        self.is_open = is_open
        self._dispatch()

    def _dispatch(self) -> None:
        """Gives what is pending to the servers with the fewest unfinished requests; a prompt's to one of them."""
        while self.pending and self.is_open:
            free = [each for each in self.servers if each.state == "ready" and len(each.under_way) < self.most]
            if not free:
                return
            request, rows = self.pending.popleft(), {}
            for each in free:
                last = next(reversed(each.under_way.values()), None)
                rows[each] = last is not None and last.row is request.row
            server = min(free, key=lambda each: (not rows[each], len(each.under_way)))
            server.under_way[self.loop.create_task(self._complete(server, request))] = request
            if not server.doing:
                self._note(server, f"samples {server.version}")

    def _note(self, server: Server, doing: str) -> None:
        """From now on the server does this."""
        now = time.time()
        if server.doing:
            self.spans.put(Span(server.name, server.doing, round(server.doing_since, 3), round(now, 3)))
        server.doing, server.doing_since = doing, now

    async def _complete(self, server: Server, request: Request) -> None:
        task = asyncio.current_task()
        try:
            completion = await self._generate(server, request)
        except FAULTS as error:
            self.lose(server, error)
            return
        del server.under_way[task]
        if not server.under_way:
            self._note(server, "")
        server.num_faults = 0
        request.results.put((request.b, completion))
        self._dispatch()

    async def _generate(self, server: Server, request: Request) -> Completion:
        prompt, sampling = request.row.ids.tolist(), request.sampling
        # Without a seed: with one, vLLM on CPU ends as soon as a prefill is chunked (v1/worker/gpu_model_runner.py).
        params = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_completion_tokens,
            "stop_token_ids": self.stop_ids, "logprobs": 0, "detokenize": False,
        }  # fmt: skip
        body = {"token_ids": prompt, "sampling_params": params, "return_token_ids": True}
        content = await self.ask(server, "inference/v1/generate", body, timeout=None)
        return read_completion(content, prompt, sampling)

    async def ask(self, server: Server, path: str, body: object = None, timeout: float | None = 0) -> bytes:
        """The body of the answer to a POST. Raises one of `FAULTS`. `timeout`: None: for ever; 0: the usual one."""
        limit = aiohttp.ClientTimeout(total=self.timeout if timeout == 0 else timeout, sock_connect=10)
        async with self.session.post(f"{server.url}/{path}", json=body, timeout=limit) as response:
            content = await response.read()
        if response.status != 200:
            said = " ".join(content[:200].decode(errors="replace").split())
            raise ServerFault(f"/{path.partition('?')[0]} answers with status {response.status}: {said}")
        return content

    # Weights ----------------------------------------------------------------------------------------------------------

    async def prepare(self, servers: list[Server], weights: dict[str, list], device: torch.device) -> list[Server]:
        """Those of the servers that stand still now, and wait for these weights."""

        async def prepare(server: Server) -> None:
            self._note(server, "updates")
            try:
                if server.send is None:  # what it may still sample is for a run that has ended
                    await self.ask(server, "pause?mode=abort&clear_cache=true")
                    await self._meet(server, device)
                    with suppress(ServerFault):  # that run may have ended amid an update, which goes on now
                        await self.ask(server, "start_weight_update")
                else:  # unfinished completions stay; their keys and values are computed anew
                    await self.ask(server, "pause?mode=keep&clear_cache=true")
                    await self.ask(server, "start_weight_update")
                update = self.ask(server, "update_weights", {"update_info": weights}, timeout=None)
                server.update = asyncio.create_task(update)
            except FAULTS as error:
                self.lose(server, error)

        await asyncio.gather(*map(prepare, servers))
        return [server for server in servers if server.send is not None]

    async def _meet(self, server: Server, device: torch.device) -> None:
        """Opens a process group with the server's workers. Each server has its own: a dead one hurts no other."""
        host = own_address(urlsplit(server.url).hostname)
        listener = socket.create_server((host, 0))
        info = {"master_address": host, "master_port": listener.getsockname()[1], "rank_offset": 1}
        info["world_size"] = 1 + server.num_workers
        answer = asyncio.create_task(self.ask(server, "init_weight_transfer_engine", {"init_info": info}))
        seconds = min(self.timeout, MEETING)
        try:
            server.send = await asyncio.to_thread(open_link, listener, server.num_workers, device, seconds)
        except RuntimeError as error:
            raise ServerFault(f"it did not come to take weights: {error}") from None
        await answer

    async def finish(self, servers: list[Server], version: int) -> None:
        """The servers that have all weights sample on, and say of what follows that this version made it."""

        async def finish(server: Server) -> None:
            if server.send is None:
                return
            try:
                await asyncio.wait_for(server.update, self.timeout)
                await self.ask(server, "finish_weight_update", {"weight_version": str(version)})
                await self.ask(server, "resume")
                server.state, server.version = "ready", version
                self._note(server, f"samples {version}" if server.under_way else "")
            except FAULTS as error:
                self.lose(server, error)

        await asyncio.gather(*map(finish, servers))
        await self.set_open(True)

    # Faults -----------------------------------------------------------------------------------------------------------

    def lose(self, server: Server, error: BaseException | str) -> None:
        """The server is away; its requests go to the others, before all that is pending."""
        if server.state in ("away", "given up"):
            return
        requests = list(server.under_way.values())
        for task in server.under_way:
            if task is not asyncio.current_task():
                task.cancel()
        server.under_way = {}
        self._note(server, "")
        server.state, server.send, server.since = "away", None, time.monotonic()
        server.num_faults += 1
        reason = str(error) or type(error).__name__
        if server.process is not None:
            reason = server.process.how_it_ended() or reason
            server.process.kill()
        moved = f"; {len(requests)} unfinished completions are sampled elsewhere" if requests else ""
        self.said.put(f"{server.name}: {reason}{moved}")
        for request in requests:
            request.num_failures += 1
            if request.num_failures >= MOST_FAILURES:
                self.error = f"{request.row.where} was under way on {MOST_FAILURES} servers that failed: {reason}"
        self.pending.extendleft(reversed(requests))
        self._dispatch()

    async def drop(self, server: Server, error: RuntimeError) -> None:
        """The server is lost while weights are sent to it; if it has said why, that is the reason."""
        if server.update is not None and server.update.done() and not server.update.cancelled():
            self.lose(server, server.update.exception() or error)
        self.lose(server, f"it was lost while weights were sent: {error}")

    async def _watch(self, server: Server) -> None:
        """Looks after one server: starts it, finds it, sees whether it makes progress."""
        while server.state != "given up":
            try:
                await (self._look_for(server) if server.state == "away" else self._look_at(server))
            except FAULTS as error:
                self.lose(server, error)
            if any(each.state in ("waiting", "ready") for each in self.servers):
                self.last_seen = time.monotonic()
            self.is_silent = time.monotonic() - self.last_seen > self.timeout
            await asyncio.sleep(LOOK)

    async def _look_for(self, server: Server) -> None:
        process = server.process
        if process is not None and (process.process is None or process.how_it_ended()):
            if process.process is not None and not server.has_answered:
                server.num_faults += 1
                self.said.put(f"{server.name}: {process.how_it_ended()} at its start; see {process.log}")
            if server.num_faults >= MOST_STARTS:
                server.state = "given up"
                self.said.put(f"{server.name} is given up; its log ends with:\n{process.last_words()}")
                return
            process.start()
            server.url, server.has_answered = process.url, False
        elif process is None and server.num_faults:
            await asyncio.sleep(min(2.0**server.num_faults, 30.0))  # one that answers nonsense would come back at once
        limit = aiohttp.ClientTimeout(total=5)
        async with self.session.get(f"{server.url}/health", timeout=limit) as response:
            if response.status != 200:
                return
        async with self.session.get(f"{server.url}/get_world_size", timeout=limit) as response:
            server.num_workers = msgspec.json.decode(await response.read(), type=dict[str, int])["world_size"]
        server.state, server.has_answered = "waiting", True

    async def _look_at(self, server: Server) -> None:
        """Raises ServerFault if it has ended, or does not go on with its requests."""
        if server.process is not None and (how := server.process.how_it_ended()):
            raise ServerFault(how)
        if not server.under_way or server.state != "ready":
            server.since = time.monotonic()
            return
        limit = aiohttp.ClientTimeout(total=self.timeout)
        async with self.session.get(f"{server.url}/metrics", timeout=limit) as response:
            tokens = sum(map(float, TOKENS.findall(await response.text())))
        if tokens != server.tokens:
            server.tokens, server.since = tokens, time.monotonic()
        elif time.monotonic() - server.since > self.timeout:
            raise ServerFault(f"no token for {self.timeout:g} s")

    def trouble(self) -> str:
        """Why the run cannot go on; "" if it can."""
        if not self.error and all(server.state == "given up" for server in self.servers):
            self.error = "no generation server is left: see the lines above and the logs in OUT_DIR/servers"
        elif not self.error and self.is_silent:
            names = ", ".join(server.name for server in self.servers)
            self.error = f"no generation server has answered for --server_timeout {self.timeout:g} s ({names})"
        return self.error and f"{self.error}; the same command goes on from the last checkpoint."
