"""The main rank's talk with the generation servers: which one samples what, and what happens when one fails.

One thread with an event loop, so that servers sample while the main rank trains. A server is lost at its first fault,
and for good. The others get its requests. The run ends if none is left, or if one is lost at its start or amid a
transfer of weights: the reason is `Fleet.error`.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec
import torch
from torch import Tensor

from batch import Completion, Row
from extras.servers.start import ServerProcess
from extras.servers.weights import Link, open_link
from extras.turns.turns import Next, Turns
from flags import Sampling
from model.sizes import MOST_ON_GPU
from runtime.machine import own_address
from runtime.start import RunError, end_at_once, requested, signal_name

TIMEOUT = 600.0  # seconds: a server that gives no answer at its start, or no token, for so long is dead
MEETING = 60.0  # seconds that a server has to come for its weights
LEAVE = 10.0  # seconds that the main rank has to end after a failed transfer, or one that stands still at a signal
ANSWER = 5.0  # seconds that a server has to answer what is quickly said
ENDING = 1.0  # seconds from a dying server's last words, which are those of its sockets, to its exit status
LOOK = 1.0  # seconds between two looks at a server
TAIL = 1500  # characters of the log that are shown when a server is lost
TOKENS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")  # vLLM's metrics that tell progress


class ServerFault(Exception):
    """A server has answered or done something else than it was asked to."""


class Taken(ServerFault):
    """A server has other weights than those of this run."""


UNREACHABLE = (aiohttp.ClientError, OSError)
FAULTS = (ServerFault, msgspec.DecodeError, *UNREACHABLE)


# What a server answers; msgspec checks it, and is many times as fast as json.


class TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: Annotated[float, msgspec.Meta(lt=1e-3)]


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class VersionSpan(msgspec.Struct):
    """The tokens from `start` to `end` were made by the weights of this version."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: Logprobs
    weight_versions: list[VersionSpan]
    finish_reason: Literal["stop", "length"]


class Answer(msgspec.Struct):
    prompt_token_ids: list[int]
    choices: tuple[Choice]


class WeightInfo(msgspec.Struct):
    weight_version: str


class Fits(msgspec.Struct):
    results: list[dict[str, object]]  # what `Extension.own_fit` says of each worker


@dataclass(eq=False)
class SampleRequest:
    """One completion that is asked for."""

    row: Row
    sampling: Sampling
    completion: Completion | None = None  # None: it is not finished
    episode: Completion | None = None  # its turns so far; None: there are no turns


@dataclass(eq=False)
class Server:
    """One server, as the main rank sees it."""

    name: str  # for the console
    url: str
    process: ServerProcess | None = None  # None: somebody else has started it
    state: str = "starts"  # then "ready", at last perhaps "lost"
    requests: dict[asyncio.Task[None], SampleRequest] = field(default_factory=dict)  # unfinished ones
    num_workers: int = 1
    identity: str = ""  # the same under each of its addresses; "": it is not known yet
    link: Link | None = None  # to its workers; None: they have not met the main rank
    update: asyncio.Task[None] | None = None  # waits until it has the weights that are being sent, and samples on
    tokens: float = 0.0  # by its own count


def reason_of(error: Exception) -> str:
    """Why a server is lost, in words; aiohttp's name its own settings."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return "it cannot be reached: it has ended, its name is wrong, or a firewall is between"
    return str(error) or f"no answer ({type(error).__name__})"


def weights_of_run(version: str, run: str) -> int:
    """The number of the weights that a server gives this version. Raises Taken if they are not this run's."""
    sender, _, number = version.rpartition(":")
    if not sender:
        raise Taken("its weights were not sent: it was started anew")
    if sender != run:
        raise Taken(f"it has weights of the run {sender}; give each run servers of its own")
    return int(number)


def read_completion(content: bytes, prompt: list[int], most_tokens: int, run: str) -> Completion:
    """Raises ServerFault or msgspec's errors if it is not what was asked for, or was made by another run's weights."""
    answer = msgspec.json.decode(content, type=Answer)
    (choice,) = answer.choices
    token_ids, logprobs = choice.token_ids, choice.logprobs.content
    if answer.prompt_token_ids != prompt:
        raise ServerFault("it answers another prompt")
    if not 0 < len(token_ids) <= most_tokens:
        raise ServerFault(f"a completion of {len(token_ids)} tokens")
    if [token.token_id for token in logprobs] != token_ids:
        raise ServerFault("the log-probs are not those of its tokens")
    versions = []
    for span in choice.weight_versions:
        if span.start == len(versions):
            versions += [weights_of_run(span.version, run)] * (span.end - span.start)
    if len(versions) != len(token_ids):
        raise ServerFault("it does not say which weights made which token")
    return Completion(token_ids, [token.logprob for token in logprobs], versions, choice.finish_reason)


@dataclass(eq=False, kw_only=True)
class Fleet:
    """All servers. What begins with `_`, and what is a coroutine, runs in the event loop's thread."""

    servers: list[Server]
    stop_ids: list[int]
    key: str
    say: Callable[[str], None]
    run: str  # names this start of the run, to users of the same server, too
    needed: dict[str, object]  # flag of scripts/serve.py -> its value for this run
    turns: Turns | None  # None: a completion has one
    timeout: float = TIMEOUT
    most: int = MOST_ON_GPU  # requests that a server gets at a time
    pending: list[SampleRequest] = field(default_factory=list)
    awaiting_reply: dict[int, SampleRequest] = field(default_factory=dict)  # from environments, by episode number
    phase: str = "closed"  # "open": requests are given to servers; "sending": weights
    version: int = -1  # number of the servers' weights
    last_sent: float = 0.0  # when the last tensor was sent
    error: str = ""  # why the run cannot go on

    def __post_init__(self) -> None:
        self.loop, self.closing = asyncio.new_event_loop(), asyncio.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=[self._live()], daemon=True)
        self.thread.start()

    def call(self, coroutine: Coroutine[None, None, object]) -> object:
        """From another thread: runs it in the loop, and waits."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """From another thread: ends unfinished requests, the servers that the run has started, and the thread."""
        self.loop.call_soon_threadsafe(self.closing.set)
        self.thread.join()
        self.loop.close()

    async def _live(self) -> None:
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each request is a connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        # Each has its own: vLLM's server closes one that is idle for 5 s, perhaps while the next request is on its way,
        # and that would look like a server that has died.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {"Authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession(headers=headers, connector=connector) as self.session:
            for server in self.servers:
                self._start(self._or_lose(server, self._watch(server)))
            if self.turns is not None:
                self._start(self._collect_replies())
            await self.closing.wait()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*map(self._disconnect, self.servers))

    async def _disconnect(self, server: Server) -> None:
        if server.process is not None:
            await asyncio.to_thread(server.process.end)
        elif server.state == "ready" and server.link is not None:  # it stays up for another run
            with suppress(*FAULTS):
                await self._check_run(server)
                await self.ask(server, "shutdown_weight_transfer_engine", {}, ANSWER)
        if server.link is not None:
            await asyncio.to_thread(server.link.destroy)

    async def ask(
        self, server: Server, path: str, body: object = None, timeout: float | None = None, method: str = "POST"
    ) -> bytes:
        """The body of the answer. Raises one of `FAULTS`. `timeout`: seconds; None: for ever."""
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=10)
        async with self.session.request(method, f"{server.url}/{path}", json=body, timeout=limit) as response:
            content = await response.read()
        if response.status == 401:
            raise ServerFault("it has another key; set VLLM_API_KEY to the one that scripts/serve.py got or printed")
        if response.status != 200:
            text = " ".join(content[:500].decode(errors="replace").split())
            raise ServerFault(f"/{path.partition('?')[0]} answers with status {response.status}: {text}")
        return content

    # Requests ---------------------------------------------------------------------------------------------------------

    async def enqueue(self, requests: Sequence[SampleRequest], is_first: bool = False) -> None:
        """Queues them; `is_first`: before all others."""
        if self.turns is not None:
            for request in requests:
                request.episode = request.episode or self.turns.begin(request.row)
        if is_first:
            self.pending = [*requests, *self.pending]
        else:
            self.pending += requests
        self._dispatch()

    async def pause_dispatch(self, in_flight: bool) -> bool:
        """Gives no request to a server any more. Returns whether the weights may change now.

        They may not while a server starts, nor before all completions are finished, unless these go on `in_flight`.
        """
        self.phase = "closed"
        busy = [server for server in self.servers if server.requests and not in_flight]
        return not busy and all(server.state != "starts" for server in self.servers)

    def _dispatch(self) -> None:
        """Gives what is pending to the servers with the fewest unfinished requests."""
        servers = self._not_lost()
        while self.pending and servers and self.phase == "open":
            server = min(servers, key=lambda server: len(server.requests))
            if len(server.requests) >= self.most:
                return
            request = self.pending.pop(0)
            task = self._start(self._or_lose(server, self._complete(server, request)))
            server.requests[task] = request

    async def _complete(self, server: Server, request: SampleRequest) -> None:
        sampling, episode = request.sampling, request.episode
        prompt, limit = request.row.ids.tolist(), sampling.max_completion_tokens
        if episode is not None:
            prompt += episode.token_ids
            limit = self.turns.room(episode, sampling)
        # Without a seed: with one, vLLM on CPU ends as soon as a prefill is chunked (v1/worker/gpu_model_runner.py).
        params = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": limit,
            "stop_token_ids": self.stop_ids, "logprobs": 0, "detokenize": False,
        }  # fmt: skip
        body = {"token_ids": prompt, "sampling_params": params, "return_token_ids": True}
        content = await self.ask(server, "inference/v1/generate", body)
        completion = read_completion(content, prompt, limit, self.run)
        if episode is None:
            request.completion = completion
        else:
            self.awaiting_reply[episode.number] = request
            self.turns.end_turn(episode, completion)
        del server.requests[asyncio.current_task()]
        self._dispatch()

    async def _collect_replies(self) -> None:
        """Takes up what environments reply; their next turns come before all that is pending."""
        environments = self.turns.environments
        try:
            while True:
                for number, outcome in (await asyncio.to_thread(environments.pop_replies, LOOK)).items():
                    request = self.awaiting_reply.pop(number)
                    match self.turns.end_reply(request.episode, outcome, request.sampling):
                        case Next.TURN:
                            await self.enqueue([request], is_first=True)
                        case Next.REPLY:
                            self.awaiting_reply[number] = request
                        case Next.END:
                            request.completion = request.episode
        except ValueError as error:  # there can be no workers
            self.error = str(error)

    # Weights: the main rank calls prepare, then send for each tensor, then finish -------------------------------------

    async def prepare(self, weights: dict[str, list], device: torch.device, version: int) -> None:
        """All servers stand still now, and wait for these weights.

        Those that have them all sample on, and say of what follows that this version made it.
        """
        self.phase, self.version = "sending", version
        self.last_sent = time.monotonic()
        await self._with_all(lambda server: self._prepare(server, weights, device))

    async def _prepare(self, server: Server, weights: dict[str, list], device: torch.device) -> None:
        if server.link is not None:  # unfinished completions stay; their keys and values are computed anew
            await self._check_run(server)
            await self.ask(server, "pause?mode=keep&clear_cache=true")
        else:  # what it does, and holds, is another run's: as a rule of one that has ended, perhaps amid an update
            await self.ask(server, "update_weight_version", {"new_version": self.weight_version})
            await self.ask(server, "pause?mode=abort&clear_cache=true")
            for path in ("finish_weight_update", "shutdown_weight_transfer_engine"):
                with suppress(ServerFault):
                    await self.ask(server, path, {})
            await self._meet(server, device)
        await self.ask(server, "start_weight_update")
        server.update = asyncio.create_task(self._or_lose(server, self._update(server, weights)))

    async def _update(self, server: Server, weights: dict[str, list]) -> None:
        await self.ask(server, "update_weights", {"update_info": weights})
        await self.ask(server, "finish_weight_update", {"weight_version": self.weight_version})
        await self.ask(server, "resume")

    @property
    def weight_version(self) -> str:
        """What servers call the weights that are sent; `weights_of_run` reads it."""
        return f"{self.run}:{self.version}"

    async def _check_run(self, server: Server) -> None:
        """Raises Taken if the server has weights of another run, or was started anew; or another of `FAULTS`."""
        answer = await self.ask(server, "weight_info", timeout=ANSWER, method="GET")
        weights_of_run(msgspec.json.decode(answer, type=WeightInfo).weight_version, self.run)

    async def _meet(self, server: Server, device: torch.device) -> None:
        """Opens a process group with the server's workers. Each server has its own: a dead one hurts no other."""
        host = own_address(urlsplit(server.url).hostname)
        listener = socket.create_server((host, 0))
        info = {
            "master_address": host, "master_port": listener.getsockname()[1],
            "rank_offset": 1, "world_size": 1 + server.num_workers,
        }  # fmt: skip
        answer = self.ask(server, "init_weight_transfer_engine", {"init_info": info})
        link = asyncio.to_thread(open_link, listener, server.num_workers, device, min(self.timeout, MEETING))
        try:
            server.link, _ = await asyncio.gather(link, answer)  # the first that fails: the other may wait for ever
        except RuntimeError as error:
            raise ServerFault(f"it did not come to take weights: {error}") from None

    def send(self, tensor: Tensor) -> None:
        """From another thread: the next tensor goes to all servers. Raises RunError if one is lost."""
        stream = torch.cuda.current_stream() if tensor.is_cuda else None  # that of the gather before, the free after
        for server in self._not_lost():
            try:
                server.link.broadcast(tensor.contiguous(), src=0, stream=stream)
            except RuntimeError as error:  # torch says so if the connection is broken
                self.call(self._lose(server, error))
        self.last_sent = time.monotonic()
        if self.error:
            raise RunError(self.error)

    async def finish(self) -> None:
        """The servers have been sent all weights."""
        await self._with_all(lambda server: server.update)
        self.phase = "open"
        self._dispatch()

    async def _with_all(self, do: Callable[[Server], Awaitable[None]]) -> None:
        """Raises RunError if one of them is lost."""
        work = [self._or_lose(server, asyncio.wait_for(do(server), self.timeout)) for server in self._not_lost()]
        await asyncio.gather(*work)
        if self.error:
            raise RunError(self.error)

    def _not_lost(self) -> list[Server]:
        return [server for server in self.servers if server.state != "lost"]

    def describe(self) -> str:
        parts = [f"{server.name} {server.state} ({len(server.requests)} requests)" for server in self.servers]
        if self.turns is not None:
            parts.append(f"{len(self.awaiting_reply)} wait for their environment")
        num_tokens = sum(server.tokens for server in self.servers)
        return ", ".join([*parts, f"{num_tokens:.0f} tokens in all"])

    # Faults -----------------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """The task of some work that nobody waits for: an exception of it, which is no server's fault, ends the run."""

        def note(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                traceback.print_exception(error)
                self.error = self.error or f"sampling failed: {error!r}"

        task = self.loop.create_task(work)
        task.add_done_callback(note)
        return task

    async def _or_lose(self, server: Server, work: Coroutine[None, None, object]) -> None:
        try:
            await work
        except FAULTS as error:
            await self._lose(server, error)

    async def _lose(self, server: Server, error: Exception) -> None:
        """The server is lost. The others get its requests, before all that is pending; or the run ends."""
        if server.state == "lost" or self.error:
            return
        is_starting, is_sending = server.state == "starts", self.phase == "sending"
        server.state = "lost"
        reason, tail = await self._reason(server, error), ""
        if server.process is not None:
            server.process.process.kill()
            log = server.process.log
            tail = f". {log} ends with:\n{log.read_text('utf-8', 'replace')[-TAIL:]}"
        requests = list(server.requests.values())
        for task in server.requests:
            if task is not asyncio.current_task():
                task.cancel()
        server.requests = {}
        if is_starting:
            self.error = self.error or f"{server.name} cannot be used: {reason}{tail}"
        elif is_sending or not self._not_lost():
            when = "amid a transfer of weights" if is_sending else "and no other is left"
            way_out = "the same command continues from the last checkpoint"
            if server.process is None:
                way_out = f"start it again, then {way_out}"
            self.error = f"{server.name} was lost {when}: {reason}; {way_out}{tail}"
            if is_sending:
                self.loop.call_later(0.0 if requested() else LEAVE, self._leave)
        else:
            moved = f"; {len(requests)} unfinished completions are sampled elsewhere" if requests else ""
            self.say(f"{server.name} is lost for the rest of this run: {reason}{moved}")
            await self.enqueue(requests, is_first=True)

    async def _reason(self, server: Server, error: Exception) -> str:
        """How the server's process has ended, or whose weights it has now; else the error in words."""
        if server.process is not None:
            return server.process.how_it_ended(ENDING) or reason_of(error)
        if server.link is not None:
            try:
                await self._check_run(server)
            except Taken as taken:
                return str(taken)
            except FAULTS:
                pass
        return reason_of(error)

    def _leave(self) -> None:
        """Ends the process: its main thread may wait in a broadcast that nobody answers, over NCCL for ever."""
        end_at_once(1, self.error)

    async def _check_fit(self, server: Server) -> None:
        """Raises ServerFault unless the server has what the run needs, or a larger --max_model_len."""
        answer = await self.ask(server, "collective_rpc", {"method": "own_fit"}, ANSWER)
        fits = msgspec.json.decode(answer, type=Fits).results
        server.identity, server.num_workers = fits[0].get("identity"), len(fits)
        for twin in self.servers:
            if twin is not server and twin.identity == server.identity:
                raise ServerFault(f"it is {twin.name} by another name; give each server once.")
        misfits = []
        for name, needed in self.needed.items():
            value = fits[0].get(name)
            if value != needed and not (name == "--max_model_len" and value > needed):
                misfits.append(f"{name} {value}, needed is {needed}")
        if misfits:
            raise ServerFault(f"it does not fit this run: it has {'; '.join(misfits)}.")
        server.state = "ready"

    async def _count_tokens(self, server: Server) -> None:
        text = await self.ask(server, "metrics", timeout=ANSWER, method="GET")
        lines = [line for line in text.decode().splitlines() if line.startswith(TOKENS)]
        server.tokens = sum(float(line.rpartition(" ")[2]) for line in lines)

    async def _watch(self, server: Server) -> None:
        """Checks the server when it answers, then whether it makes progress. Raises one of `FAULTS`."""
        last_progress = time.monotonic()
        while server.state != "lost":
            if server.process is not None and (how := server.process.how_it_ended()):
                raise ServerFault(how)
            is_up, tokens = server.state == "ready", server.tokens
            try:
                await (self._count_tokens(server) if is_up else self._check_fit(server))
                if server.tokens != tokens or self.phase == "sending" or not server.requests:
                    last_progress = time.monotonic()
            except UNREACHABLE as error:
                # Nobody listens before a server is up. Later it may be too busy to answer, but not be gone.
                if is_up and not isinstance(error, TimeoutError):
                    raise
            if time.monotonic() - last_progress > self.timeout:
                raise ServerFault(f"no {'token' if is_up else 'answer'} for {self.timeout:g} s")
            if self.phase == "sending" and requested() and time.monotonic() - self.last_sent > LEAVE:
                raise ServerFault(f"the transfer stands still, and {signal_name()} asks the run to end")
            await asyncio.sleep(LOOK)
