"""The main rank's talk with the generation servers: which one samples what, and whether all of them are well.

One thread with an event loop, so that servers sample while the main rank trains. The first fault of a server ends the
run: `Fleet.error` is its sentence, which the main rank raises when it needs the servers again.
"""

import asyncio
import re
import resource
import socket
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec
import torch
from torch import Tensor

from batch import Completion, Row
from extras.servers.start import ServerProcess
from extras.servers.weights import Link, open_link
from extras.turns.turns import EpisodeState, Turns
from flags import Sampling
from model.sizes import MOST_ON_GPU
from runtime.machine import own_address
from runtime.rank import RunError
from runtime.start import end_at_once

TIMEOUT_SECONDS = 600.0  # a server that does not answer at its start, or makes no progress, for so long has failed
MEETING_SECONDS = 60.0  # that a server has to come for its weights
ANSWER_SECONDS = 5.0  # that a server has to answer what is quickly said
WATCH_SECONDS = 1.0  # between two looks at a server
DEATH_SECONDS = 1.0  # from the end of a dying server's sockets to its exit status
EXIT_SECONDS = 10.0  # that the main rank has to end by itself after a fault amid a transfer of weights
LOG_CHARACTERS = 1500  # of the end of a server's log, which are shown when it has failed
TOKENS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total.* (\S+)$", re.MULTILINE)  # vLLM's metrics of progress


class ServerFault(Exception):
    """A server has answered or done something else than it was asked to."""


UNREACHABLE = (aiohttp.ClientError, OSError)
FAULTS = (ServerFault, msgspec.DecodeError, *UNREACHABLE)


# What a server answers; msgspec checks it, and is many times as fast as json.


class TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float


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


class FitAnswer(msgspec.Struct):
    results: list[dict[str, object]]  # what `Extension.own_fit` says of each worker


@dataclass(eq=False)
class Request:
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
    is_ready: bool = False  # it has started, and fits the run
    num_requests: int = 0  # unfinished ones
    num_workers: int = 1
    unreachable: str = ""  # why it could not be asked at first
    link: Link | None = None  # to its workers; None: they have not met the main rank
    update: asyncio.Task[None] | None = None  # waits until it has the weights that are being sent, and samples on
    tokens: float = 0.0  # by its own count


def reason_of(error: Exception) -> str:
    """A fault in words."""
    return str(error) or f"no answer ({type(error).__name__})"


def weights_of_run(version: str, run: str) -> int:
    """The number of the weights that a server gives this version. Raises ServerFault if they are not this run's."""
    sender, _, number = version.rpartition(":")
    if not sender:
        raise ServerFault("its weights were not sent: it was started anew")
    if sender != run:
        raise ServerFault(f"it has weights of the run {sender}; give each run servers of its own")
    return int(number)


def read_completion(content: bytes, prompt: list[int], most_tokens: int, run: str) -> Completion:
    """Raises ServerFault, or msgspec's errors, if it is not what was asked for, or made by another run's weights."""
    answer, completion = msgspec.json.decode(content, type=Answer), Completion()
    (choice,) = answer.choices
    if answer.prompt_token_ids != prompt:
        raise ServerFault("it answers another prompt")
    if not 0 < len(choice.token_ids) <= most_tokens:
        raise ServerFault(f"a completion of {len(choice.token_ids)} tokens")
    if [token.token_id for token in choice.logprobs.content] != choice.token_ids:
        raise ServerFault("the log-probs are not those of its tokens")
    logprobs = [token.logprob for token in choice.logprobs.content]
    for span in choice.weight_versions:
        made = slice(span.start, span.end)
        version = weights_of_run(span.version, run)
        completion.extend(choice.token_ids[made], logprobs[made], version, choice.finish_reason)
    if completion.token_ids != choice.token_ids:
        raise ServerFault("it does not say which weights made which token")
    return completion


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
    timeout: float = TIMEOUT_SECONDS
    most: int = MOST_ON_GPU  # requests that a server gets at a time
    pending: list[Request] = field(default_factory=list)
    awaiting_reply: dict[int, Request] = field(default_factory=dict)  # from environments, by episode number
    phase: str = "closed"  # "open": requests are given to servers; "sending": weights
    version: int = -1  # number of the servers' weights
    num_sent: int = 0  # tensors of weights, in all
    error: str = ""  # why the run cannot go on

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.call(self._open())

    def call(self, coroutine: Coroutine[None, None, object]) -> object:
        """From another thread: runs it in the loop, and waits."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """From another thread: ends unfinished requests, the servers that the run has started, and the thread."""
        self.call(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _open(self) -> None:
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each request is a connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        # Each has its own: vLLM's server closes one that is idle for 5 s, perhaps while the next request is on its way,
        # and that would look like a server that has died.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"}, connector=connector)
        if self.turns is not None:
            self._start(self._collect_replies())

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(self._disconnect, self.servers))
        await self.session.close()

    async def _disconnect(self, server: Server) -> None:
        """A server that somebody else has started stays up: the next run closes its side of the link."""
        if server.process is not None:
            await asyncio.to_thread(server.process.end)
        if server.link is not None:
            await asyncio.to_thread(server.link.destroy)

    async def ask(
        self, server: Server, path: str, body: object = None, timeout: float | None = None, method: str = "POST"
    ) -> bytes:
        """The body of the answer. Raises one of `FAULTS`. `timeout`: seconds; None: for ever."""
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=ANSWER_SECONDS)
        async with self.session.request(method, f"{server.url}/{path}", json=body, timeout=limit) as response:
            content = await response.read()
        if response.status == 401:
            raise ServerFault("it has another key; set VLLM_API_KEY to the one that scripts/serve.py got or printed")
        if response.status != 200:
            text = " ".join(content[:500].decode(errors="replace").split())
            raise ServerFault(f"/{path.partition('?')[0]} answers with status {response.status}: {text}")
        return content

    # Requests ---------------------------------------------------------------------------------------------------------

    async def enqueue(self, requests: list[Request], is_first: bool = False) -> None:
        """Queues them; `is_first`: before all others."""
        if self.turns is not None:
            for request in requests:
                request.episode = request.episode or self.turns.begin(request.row)
        self.pending = requests + self.pending if is_first else self.pending + requests
        self._dispatch()

    async def pause_dispatch(self, in_flight: bool) -> bool:
        """Gives no request to a server any more. Returns whether the weights may change now.

        They may not while a server starts, nor before all completions are finished, unless these go on `in_flight`.
        """
        self.phase = "closed"
        return all(server.is_ready and (in_flight or not server.num_requests) for server in self.servers)

    def _dispatch(self) -> None:
        """Gives what is pending to the servers with the fewest unfinished requests."""
        while self.pending and self.phase == "open":
            server = min(self.servers, key=lambda server: server.num_requests)
            if server.num_requests >= self.most:
                return
            server.num_requests += 1
            self._start(self._complete(server, self.pending.pop(0)), server)

    async def _complete(self, server: Server, request: Request) -> None:
        sampling, episode = request.sampling, request.episode
        prompt, limit = request.row.ids.tolist(), sampling.max_completion_tokens
        if episode is not None:
            prompt += episode.token_ids
            limit = self.turns.room(episode, sampling)
        # Without a seed: with one, vLLM on CPU ends as soon as a prefill is chunked (v1/worker/gpu_model_runner.py).
        params = sampling.for_vllm(limit) | {"stop_token_ids": self.stop_ids}
        body = {"token_ids": prompt, "sampling_params": params, "return_token_ids": True}
        content = await self.ask(server, "inference/v1/generate", body)
        try:
            completion = read_completion(content, prompt, limit, self.run)
        except (ServerFault, msgspec.DecodeError):
            await self._check_run(server)  # another run aborts what this one has asked for
            raise
        if episode is None:
            request.completion = completion
        else:
            self.awaiting_reply[episode.number] = request
            self.turns.end_turn(episode, completion)
        server.num_requests -= 1
        self._dispatch()

    async def _collect_replies(self) -> None:
        """Takes up what environments reply; their next turns come before all that is pending."""
        try:
            while True:
                replies = await asyncio.to_thread(self.turns.environments.pop_replies, WATCH_SECONDS)
                for number, outcome in replies.items():
                    request = self.awaiting_reply.pop(number)
                    match self.turns.end_reply(request.episode, outcome, request.sampling):
                        case EpisodeState.TURN:
                            await self.enqueue([request], is_first=True)
                        case EpisodeState.REPLY:
                            self.awaiting_reply[number] = request
                        case EpisodeState.END:
                            request.completion = request.episode
        except ValueError as error:  # there can be no workers
            self._fail(str(error))

    # Weights: the main rank calls prepare, then send for each tensor, then finish -------------------------------------

    async def prepare(self, weights: dict[str, list], device: torch.device, version: int) -> None:
        """Stops all servers, which then wait for these weights.

        A server that has all of them samples on, and marks what follows with this version.
        """
        self.phase, self.version = "sending", version
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
        server.update = self._start(self._update(server, weights), server)

    async def _update(self, server: Server, weights: dict[str, list]) -> None:
        await self.ask(server, "update_weights", {"update_info": weights})
        await self.ask(server, "finish_weight_update", {"weight_version": self.weight_version})
        await self.ask(server, "resume")

    @property
    def weight_version(self) -> str:
        """The name of the weights that are sent, to servers; `weights_of_run` reads it."""
        return f"{self.run}:{self.version}"

    async def _check_run(self, server: Server) -> None:
        """Raises ServerFault if the server has weights of another run, or was started anew."""
        answer = await self.ask(server, "weight_info", timeout=ANSWER_SECONDS, method="GET")
        weights_of_run(msgspec.json.decode(answer, type=WeightInfo).weight_version, self.run)

    async def _meet(self, server: Server, device: torch.device) -> None:
        """Opens a process group with the server's workers, of its own: so a fault has a server's name."""
        host = own_address(urlsplit(server.url).hostname)
        listener = socket.create_server((host, 0))
        info = {
            "master_address": host, "master_port": listener.getsockname()[1],
            "rank_offset": 1, "world_size": 1 + server.num_workers,
        }  # fmt: skip
        answer = self.ask(server, "init_weight_transfer_engine", {"init_info": info})
        link = asyncio.to_thread(open_link, listener, server.num_workers, device, MEETING_SECONDS)
        try:
            server.link, _ = await asyncio.gather(link, answer)  # the first that fails: the other may wait for ever
        except RuntimeError as error:
            raise ServerFault(f"it did not come to take weights: {error}") from None

    def send(self, tensor: Tensor) -> None:
        """From another thread: the next tensor goes to all servers. Raises RunError after a fault."""
        stream = torch.cuda.current_stream() if tensor.is_cuda else None  # on it the tensor was gathered, and is freed
        for server in self.servers:
            try:
                server.link.broadcast(tensor.contiguous(), src=0, stream=stream)
            except RuntimeError as error:  # torch says so if the connection is broken
                self._blame(server, error)
        self.num_sent += 1
        self.raise_fault()

    async def finish(self) -> None:
        """Ends the transfer: all weights have been sent. Raises RunError after a fault."""
        await asyncio.wait([server.update for server in self.servers])
        self.raise_fault()
        self.phase = "open"
        self._dispatch()

    async def _with_all(self, do: Callable[[Server], Coroutine[None, None, None]]) -> None:
        """Raises RunError after a fault."""
        await asyncio.wait([self._start(do(server), server) for server in self.servers])
        self.raise_fault()

    def progress(self) -> list[tuple[bool, int, float]]:
        """A value that changes with all that servers do."""
        return [(server.is_ready, server.num_requests, server.tokens) for server in self.servers]

    # Faults -----------------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[None, None, None], server: Server | None = None) -> asyncio.Task[None]:
        """The task of some work. Its exception ends the run: one of `FAULTS` is the server's, another one ours."""

        def note(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if server is not None and isinstance(error, FAULTS):
                self._blame(server, error)
            elif error is not None:
                traceback.print_exception(error)
                self._fail(f"sampling failed: {error!r}")

        task = self.loop.create_task(work)
        task.add_done_callback(note)
        return task

    def _blame(self, server: Server, error: Exception) -> None:
        """Ends the run with what the server did, and how its process ended."""
        reason, tail = reason_of(error), ""
        if server.process is not None:
            reason = server.process.how_it_ended(DEATH_SECONDS) or reason
            log = server.process.log
            tail = f" {log} ends with:\n{log.read_text('utf-8', 'replace')[-LOG_CHARACTERS:]}"
        if server.is_ready:
            self._fail(f"{server.name} has failed: {reason}; with servers that run, the same command continues.{tail}")
        else:
            self._fail(f"{server.name} cannot be used: {reason}.{tail}")

    def _fail(self, sentence: str) -> None:
        """Ends the run with this sentence, unless it has one: the main rank raises it."""
        self.error = self.error or sentence
        if self.phase == "sending":  # the main rank may wait in a broadcast that nobody answers, over NCCL for ever
            self.loop.call_soon_threadsafe(self.loop.call_later, EXIT_SECONDS, end_at_once, 1, self.error)

    def raise_fault(self) -> None:
        if self.error:
            raise RunError(self.error)

    async def _check_fit(self, server: Server) -> None:
        """Raises ServerFault unless the server has what the run needs, or a larger --max_model_len."""
        answer = await self.ask(server, "collective_rpc", {"method": "own_fit"}, ANSWER_SECONDS)
        fits = msgspec.json.decode(answer, type=FitAnswer).results
        server.num_workers, misfits = len(fits), []
        for name, needed in self.needed.items():
            value = fits[0].get(name)
            if value != needed and not (name == "--max_model_len" and value > needed):
                misfits.append(f"{name} {value}, needed is {needed}")
        if misfits:
            raise ServerFault(f"it does not fit this run: it has {'; '.join(misfits)}")
        server.is_ready = True

    async def begin(self) -> None:
        """Looks at all servers, and watches them from then on. Raises RunError if one is not what the run needs."""
        await self._with_all(self._look)
        for server in self.servers:
            if server.process is None and not server.is_ready:
                self.say(f"{server.unreachable} so far: {server.url}")
            self._start(self._watch(server), server)

    async def _look(self, server: Server) -> None:
        """Checks the server until it fits, then counts its tokens. Before that it need not answer. Raises `FAULTS`."""
        try:
            if not server.is_ready:
                await self._check_fit(server)
            text = await self.ask(server, "metrics", timeout=ANSWER_SECONDS, method="GET")
            server.tokens = sum(map(float, TOKENS.findall(text.decode())))
        except UNREACHABLE as error:
            if server.is_ready and not isinstance(error, TimeoutError):  # too busy to answer is not gone
                raise
            server.unreachable = reason_of(error)

    async def _watch(self, server: Server) -> None:
        """Looks whether the server makes progress. Raises one of `FAULTS`."""
        progress, last_progress = None, time.monotonic()
        while True:
            if server.process is not None and (how := server.process.how_it_ended()):
                raise ServerFault(how)
            await self._look(server)
            before, progress = progress, (server.is_ready, server.tokens, self.num_sent)
            is_idle = server.is_ready and not server.num_requests and self.phase != "sending"
            if is_idle or progress != before:
                last_progress = time.monotonic()
            if time.monotonic() - last_progress > self.timeout:
                raise ServerFault(f"no {'progress' if server.is_ready else 'answer'} for {self.timeout:g} s")
            await asyncio.sleep(WATCH_SECONDS)
