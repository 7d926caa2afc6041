"""The main rank's talk with the generation servers: which one samples what, and what happens when one fails.

One thread with an event loop, so that servers sample while the main rank trains. A server is lost at its first fault,
and for good. The others get its requests. The run ends if none is left, or if one is lost at its start or amid a
transfer of weights: the reason is `Fleet.error`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
import torch
from torch import Tensor

from batch import Completion, Row
from flags import Sampling
from grading.episode import Environments
from grading.pool import Outcome
from model.sizes import MOST_ON_GPU
from runtime.machine import own_address
from runtime.start import RunError, end_at_once, requested, signal_name
from servers.start import ServerProcess
from servers.weights import Link, open_link

TIMEOUT = 600.0  # seconds: a server that gives no answer at its start, or no token, for so long is dead
MEETING = 60.0  # seconds that a server has to come for its weights
LEAVE = 10.0  # seconds that the main rank has to end after a failed transfer, or one that stands still at a signal
ANSWER = 5.0  # seconds that a server has to answer what is quickly said
ENDING = 1.0  # seconds from a dying server's last words, which are those of its sockets, to its exit status
LOOK = 1.0  # seconds between two looks at a server
TAIL = 1500  # characters of the log that are shown when a server is lost
TOKENS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")  # vLLM's metrics that tell progress


class ServerFault(Exception):
    """A server has said or done something else than it was asked to."""


class Taken(ServerFault):
    """A server has other weights than those of this run."""


UNREACHABLE = (aiohttp.ClientError, OSError)
FAULTS = (ServerFault, msgspec.DecodeError, *UNREACHABLE)

# What a server answers; msgspec checks it, and is many times as fast as json.
LogProb, Rank = Annotated[float, msgspec.Meta(lt=1e-3)], Annotated[int, msgspec.Meta(ge=1)]
Logprob = msgspec.defstruct("Logprob", [("token_id", int), ("logprob", LogProb), ("rank", Rank)])
Logprobs = msgspec.defstruct("Logprobs", [("content", list[Logprob])])
Versions = msgspec.defstruct("Versions", [("version", str), ("start", int), ("end", int)])
Reason = Literal["stop", "length"]
Choice = msgspec.defstruct(
    "Choice",
    [("token_ids", list[int]), ("logprobs", Logprobs), ("weight_versions", list[Versions]), ("finish_reason", Reason)],
)
Answer = msgspec.defstruct("Answer", [("prompt_token_ids", list[int]), ("choices", tuple[Choice])])
Worker = msgspec.defstruct("Worker", [("identity", str), ("fit", dict[str, object])])
Workers = msgspec.defstruct("Workers", [("results", list[Worker])])
WeightInfo = msgspec.defstruct("WeightInfo", [("weight_version", str)])


@dataclass(eq=False)
class Request:
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
    under_way: dict[asyncio.Task[None], Request] = field(default_factory=dict)
    num_workers: int = 1
    identity: str = ""  # the same under each of its addresses; "": it is not known yet
    link: Link | None = None  # to its workers; None: they have not met the main rank
    update: asyncio.Task[None] | None = None  # waits until it has the weights that are being sent, and samples on
    tokens: float = 0.0  # by its own count


class Turns(Protocol):
    """What is needed of a `turns.Turns`."""

    environments: Environments
    begin: Callable[[Row], Completion]
    room: Callable[[Completion, Sampling], int]
    end_turn: Callable[[Completion, Completion], None]
    end_reply: Callable[[Completion, Outcome, Sampling], str]


def reason_of(error: Exception) -> str:
    """Why a server is lost, in words; aiohttp's name its own settings."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number, said = error.os_error.errno or 0, error.os_error.strerror
        return f"it cannot be reached ({os.strerror(number) if number > 0 else said or 'nobody listens there'})"
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
    ids, logprobs, spans = choice.token_ids, choice.logprobs.content, choice.weight_versions
    mistakes = {
        "it answers another prompt": answer.prompt_token_ids != prompt,
        f"a completion of {len(ids)} tokens": not 0 < len(ids) <= most_tokens,
        "the log-probs are not those of its tokens": [each.token_id for each in logprobs] != ids,
        "it does not say which weights made which token": [0, *(span.end for span in spans)]
        != [*(span.start for span in spans), len(ids)],
    }
    for mistake in (mistake for mistake, is_made in mistakes.items() if is_made):
        raise ServerFault(mistake)
    versions = []
    for span in spans:
        versions += [weights_of_run(span.version, run)] * (span.end - span.start)
    return Completion(ids, [each.logprob for each in logprobs], versions, choice.finish_reason)


@dataclass(eq=False)
class Fleet:
    """All servers. What begins with `_`, and what is a coroutine, runs in the event loop's thread."""

    servers: list[Server]
    stop_ids: list[int]
    key: str
    say: Callable[[str], None]
    run: str  # names this start of the run, to users of the same server, too
    needed: dict[str, object]  # flag of scripts/serve.py -> its value for this run
    timeout: float = TIMEOUT
    most: int = MOST_ON_GPU  # requests that a server gets at a time
    pending: list[Request] = field(default_factory=list)
    phase: str = "closed"  # "open": requests are given to servers; "sending": weights
    version: int = -1  # of the servers' weights
    moved: float = 0.0  # when the last tensor was sent
    error: str = ""  # why the run cannot go on
    turns: Turns | None = None  # None: a completion has one
    thinking: dict[int, Request] = field(default_factory=dict)  # waits for its environment, by the episode's number

    def __post_init__(self) -> None:
        self.loop, self.closing = asyncio.new_event_loop(), asyncio.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=[self._live()], name="servers")
        self.thread.daemon = True
        self.thread.start()

    def call(self, coroutine: Coroutine[None, None, object]) -> object:
        """From another thread: runs it in the loop, and waits."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """From another thread: ends the requests under way, the servers that the run has started, and the thread."""
        self.loop.call_soon_threadsafe(self.closing.set)
        self.thread.join()
        self.loop.close()

    async def _live(self) -> None:
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each request is a connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        # Each has its own: vLLM's server closes one that is idle for 5 s, perhaps while the next request is on its way,
        # and that would look like a server that has died.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        async with aiohttp.ClientSession(headers=headers, connector=connector) as self.session:
            self.tasks = [self._start(self._or_lose(each, self._watch(each))) for each in self.servers]
            self.tasks += [self._start(self._hear())] if self.turns else []
            await self.closing.wait()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*map(self._part, self.servers))

    async def _part(self, server: Server) -> None:
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
            said = " ".join(content[:500].decode(errors="replace").split())
            raise ServerFault(f"/{path.partition('?')[0]} answers with status {response.status}: {said}")
        return content

    # Requests ---------------------------------------------------------------------------------------------------------

    async def put(self, requests: Sequence[Request], is_first: bool = False) -> None:
        """Queues them; `is_first`: before all others."""
        for each in requests if self.turns is not None else ():
            each.episode = each.episode or self.turns.begin(each.row)
        self.pending = [*requests, *self.pending] if is_first else [*self.pending, *requests]
        self._dispatch()

    async def settle(self, in_flight: bool) -> bool:
        """Gives no request to a server any more. Whether the weights may change, if those under way may go on."""
        self.phase = "closed"
        return not any(x.state == "starts" or (x.under_way and not in_flight) for x in self.servers)

    def _dispatch(self) -> None:
        """Gives what is pending to the servers with the fewest unfinished requests."""
        while self.pending and self.phase == "open":
            free = [each for each in self.servers if each.state != "lost" and len(each.under_way) < self.most]
            if not free:
                return
            request = self.pending.pop(0)
            server = min(free, key=lambda each: len(each.under_way))
            task = self._start(self._or_lose(server, self._complete(server, request)))
            server.under_way[task] = request

    async def _complete(self, server: Server, request: Request) -> None:
        prompt, sampling, limit = request.row.ids.tolist(), request.sampling, request.sampling.max_completion_tokens
        if request.episode is not None:
            prompt, limit = prompt + request.episode.token_ids, self.turns.room(request.episode, sampling)
        # Without a seed: with one, vLLM on CPU ends as soon as a prefill is chunked (v1/worker/gpu_model_runner.py).
        params = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": limit,
            "stop_token_ids": self.stop_ids, "logprobs": 0, "detokenize": False,
        }  # fmt: skip
        body = {"token_ids": prompt, "sampling_params": params, "return_token_ids": True}
        content = await self.ask(server, "inference/v1/generate", body)
        completion = read_completion(content, prompt, limit, self.run)
        if request.episode is None:
            request.completion = completion
        else:
            self.thinking[request.episode.number] = request
            self.turns.end_turn(request.episode, completion)
        del server.under_way[asyncio.current_task()]
        self._dispatch()

    async def _hear(self) -> None:
        """Takes up what environments reply; their next turns come before all that is pending."""
        try:
            while True:
                for number, outcome in (await asyncio.to_thread(self.turns.environments.take, LOOK)).items():
                    request = self.thinking[number]
                    comes = self.turns.end_reply(request.episode, outcome, request.sampling)
                    if comes != "reply":
                        del self.thinking[number]
                    if comes == "turn":
                        await self.put([request], is_first=True)
                    if comes == "end":
                        request.completion = request.episode
        except ValueError as error:  # there can be no workers
            self.error = str(error)

    # Weights: the main rank calls prepare, then send for each tensor, then finish -------------------------------------

    async def prepare(self, weights: dict[str, list], device: torch.device, version: int) -> None:
        """All servers stand still now, and wait for these weights.

        Those that have them all sample on, and say of what follows that this version made it.
        """
        self.phase, self.version, self.moved = "sending", version, time.monotonic()
        await self._with_all(lambda server: self._prepare(server, weights, device))

    async def _prepare(self, server: Server, weights: dict[str, list], device: torch.device) -> None:
        if server.link is not None:  # unfinished completions stay; their keys and values are computed anew
            await self._check_run(server)
            await self.ask(server, "pause?mode=keep&clear_cache=true")
        else:  # what it does, and holds, is left over from a run that has ended, perhaps amid an update
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
        stream = torch.cuda.current_stream() if tensor.is_cuda else None  # that of the gather before, the free after
        for server in [each for each in self.servers if each.state != "lost"]:
            try:
                server.link.broadcast(tensor.contiguous(), src=0, stream=stream)
            except RuntimeError as error:  # of torch: the connection is broken
                self.call(self._lose(server, error))
        self.moved = time.monotonic()
        if self.error:
            raise RunError(self.error)

    async def finish(self) -> None:
        """The servers have been sent all weights."""
        await self._with_all(lambda server: server.update)
        self.phase = "open"
        self._dispatch()

    async def _with_all(self, do: Callable[[Server], Awaitable[None]]) -> None:
        """Raises RunError if one of them is lost."""
        servers = [each for each in self.servers if each.state != "lost"]
        await asyncio.gather(*(self._or_lose(each, asyncio.wait_for(do(each), self.timeout)) for each in servers))
        if self.error:
            raise RunError(self.error)

    def describe(self) -> str:
        loads = ", ".join(f"{each.name} {each.state} ({len(each.under_way)} requests)" for each in self.servers)
        loads += f", {len(self.thinking)} wait for their environment" if self.turns else ""
        return f"{loads}, {sum(each.tokens for each in self.servers):.0f} tokens in all"

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
            tail = f". {server.process.log} ends with:\n{server.process.log.read_text('utf-8', 'replace')[-TAIL:]}"
        requests, tasks = list(server.under_way.values()), set(server.under_way) - {asyncio.current_task()}
        server.under_way = {}
        for task in tasks:
            task.cancel()
        if is_starting:
            self.error = self.error or f"{server.name} cannot be used: {reason}{tail}"
        elif is_sending or all(each.state == "lost" for each in self.servers):
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
            await self.put(requests, is_first=True)

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
        workers = msgspec.json.decode(answer, type=Workers).results
        fit, server.identity = workers[0].fit, workers[0].identity
        for twin in self.servers:
            if twin is not server and twin.identity == server.identity:
                raise ServerFault(f"it is {twin.name} by another name; give each server once.")
        mistakes = [
            f"{name} {fit.get(name)}, needed is {needed}" for name, needed in self.needed.items()
            if fit.get(name) != needed and not (name == "--max_model_len" and fit[name] > needed)
        ]  # fmt: skip
        if mistakes:
            raise ServerFault(f"it does not fit this run: it has {'; '.join(mistakes)}.")
        server.state, server.num_workers = "ready", len(workers)

    async def _count_tokens(self, server: Server) -> None:
        lines = (await self.ask(server, "metrics", timeout=ANSWER, method="GET")).decode().splitlines()
        server.tokens = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(TOKENS))

    async def _watch(self, server: Server) -> None:
        """Checks the server when it answers, then whether it makes progress. Raises one of `FAULTS`."""
        since = time.monotonic()
        while server.state != "lost":
            if server.process is not None and (how := server.process.how_it_ended()):
                raise ServerFault(how)
            is_up, tokens = server.state == "ready", server.tokens
            with suppress(*((TimeoutError,) if is_up else UNREACHABLE)):
                await (self._count_tokens(server) if is_up else self._check_fit(server))
                if server.tokens != tokens or self.phase == "sending" or not server.under_way:
                    since = time.monotonic()
            if time.monotonic() - since > self.timeout:
                raise ServerFault(f"no {'token' if is_up else 'answer'} for {self.timeout:g} s")
            if self.phase == "sending" and requested() and time.monotonic() - self.moved > LEAVE:
                raise ServerFault(f"the transfer stands still, and {signal_name()} asks the run to end")
            await asyncio.sleep(LOOK)
