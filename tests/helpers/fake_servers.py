"""A server that speaks as vLLM's does, without a model: for the faults of servers, and for what takes how long.

It takes part in the weight transfer for real, over gloo, and labels its tokens with the version that it was given.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import torch
from aiohttp import web

from extras.servers.engine import ServerEngine, describe_weights
from extras.servers.fleet import Fleet, Server
from extras.servers.start import ServerProcess
from extras.servers.weights import Gloo
from flags import Sampling
from helpers.made_up import flags, make_grade, make_row
from policy import Policy
from runtime.rank import RunError
from sampling import Sampler
from schedule import make_plan
from warm_start import build_tokenizer

TOKEN = 7
KEY = "secret"  # all servers have it
WEIGHTS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "norm.weight": torch.ones(3)}
DESCRIPTION = {"names": list(WEIGHTS), "dtype_names": ["float32"] * 2, "shapes": [[2, 3], [3]]}
A, B = "/runs/a on node-a (process 7)", "/runs/b on node-b (process 8)"  # two runs
HAS = {
    "--model": "Qwen2ForCausalLM of 2 layers", "--max_model_len": 64, "--dtype": "float32", "--head_dtype": "float32",
}  # fmt: skip
TOKENIZER = build_tokenizer()


class FakeServer:
    """Each token takes `seconds`; a completion is as long as it may be. It says that it HAS, and answers `changes`."""

    def __init__(self, seconds: float = 0.0, port: int = 0) -> None:
        self.seconds, self.port = seconds, port
        self.version, self.tokens, self.paused, self.key, self.num_aborts = "default", 0, False, KEY, 0
        self.dies_in_sync: threading.Event | None = None  # it fails after the first tensor, and not before the event
        # Connections: it hangs up when one is used again, as vLLM's does with idle ones.
        self.used: set[asyncio.Transport] = set()
        self.asked: list[str] = []  # the paths of all requests, as they came
        self.prompts: list[list[int]] = []  # those of the completions that it gave
        self.received: list[torch.Tensor] = []  # the tensors of the last update
        self.hangs: str | None = None  # a path: requests of it wait for the event
        self.event = threading.Event()
        self.changes: dict[str, object] = {}  # in an answer or its choice; "status", "text" of the whole; or "stuck"
        self.pool = ThreadPoolExecutor(1)  # receives weights
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _start(self) -> None:
        app = web.Application()
        app.add_routes([web.route("*", "/{path:.*}", self.answer)])
        # aiohttp takes 0 s for no limit, and may then wait for ever for a connection that has just been opened.
        self.runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    def kill(self) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()
        self.pool.shutdown(wait=False)

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(text="Unauthorized", status=401)
        path, body = request.path.removeprefix("/"), await request.json() if request.can_read_body else {}
        self.asked.append(request.path_qs.removeprefix("/"))
        if path == "metrics":
            return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}\n')
        if path == self.hangs:
            await asyncio.to_thread(self.event.wait, 60.0)
        if path == "inference/v1/generate":
            return await self.generate(request, body)
        if path in ("pause", "resume"):
            self.paused = path == "pause"
            self.num_aborts += request.query.get("mode") == "abort"
        elif path in ("finish_weight_update", "update_weight_version"):
            self.version = body.get("weight_version", body.get("new_version", self.version))
        elif path in ("init_weight_transfer_engine", "update_weights"):
            do = self.meet if path.startswith("init") else self.receive
            await self.loop.run_in_executor(self.pool, do, next(iter(body.values())))
        return web.json_response({"weight_version": self.version, "results": [HAS]})

    def meet(self, info: dict) -> None:
        place = {"host": info["master_address"], "port": info["master_port"]}
        self.group = Gloo(info["rank_offset"], info["world_size"], timedelta(seconds=60), **place)

    def receive(self, info: dict) -> None:
        self.received = []
        for dtype, shape in zip(info["dtype_names"], info["shapes"], strict=True):
            if self.dies_in_sync and self.received:
                self.dies_in_sync.wait(10.0)
                raise RuntimeError("out of memory")
            self.received.append(torch.empty(shape, dtype=getattr(torch, dtype)))
            self.group.broadcast(self.received[-1], src=0)

    async def generate(self, request: web.Request, body: dict) -> web.Response:
        if request.transport in self.used:
            request.transport.abort()
        self.used.add(request.transport)
        versions: list[str] = []
        reason, num_aborts = "length", self.num_aborts
        while len(versions) < body["sampling_params"]["max_tokens"]:
            await asyncio.sleep(self.seconds)
            while self.num_aborts == num_aborts and (self.paused or "stuck" in self.changes):
                await asyncio.sleep(0.01)
            if self.num_aborts > num_aborts:
                reason = "abort"
                break
            versions.append(self.version)
            self.tokens += 1
        spans, count = [], len(versions)
        for version, tokens in groupby(versions):
            start = spans[-1]["end"] if spans else 0
            spans.append({"version": version, "start": start, "end": start + len(list(tokens))})
        content = [{"token_id": TOKEN, "logprob": -1.0, "rank": 1, "top_logprobs": []}] * count
        choice = {"index": 0, "finish_reason": reason, "token_ids": [TOKEN] * count}
        choice |= {"logprobs": {"content": content}, "weight_versions": spans}
        self.prompts.append(body["token_ids"])
        answer = {"prompt_token_ids": body["token_ids"], "choices": [choice | self.changes]} | self.changes
        return web.Response(text=answer.get("text") or json.dumps(answer), status=answer.get("status", 200))


@contextmanager
def engine_of(
    *servers: FakeServer | ServerProcess | Server, version: int = 0, in_flight: bool = False,
    policy: Policy | None = None, **changes: object,
) -> Iterator[ServerEngine]:  # fmt: skip
    """An engine over these servers, whose fleet has these `changes`. `said` is what it told the console."""
    said, output = [], os.fstat(1)
    found = [each if isinstance(each, Server) else Server(each.url, each.url) for each in servers]
    options = {"run": A, "stop_ids": [], "needed": {}, "turns": None, "timeout": 300.0, "most": 64} | changes
    fleet = Fleet(servers=found, key=KEY, say=said.append, **options)
    with suppress(RunError):  # the first sync raises it again
        fleet.call(fleet.begin())
    engine = ServerEngine(
        fleet=fleet, tokenizer=TOKENIZER, device=torch.device("cpu"), version=version, in_flight=in_flight,
        weights=DESCRIPTION if policy is None else describe_weights(policy),
    )  # fmt: skip
    engine.said, engine.policy = said, policy
    try:
        yield engine
    finally:
        engine.close()
        for each in servers:
            if isinstance(each, FakeServer):
                each.kill()
    assert os.path.samestat(os.fstat(1), output), "vLLM turns off the output of the process while gloo connects"


def synced(engine: ServerEngine) -> ServerEngine:
    engine.sync(iter(WEIGHTS.items()) if engine.policy is None else engine.policy.full_weights())
    return engine


def sampler_over(engine: ServerEngine, **changes: object) -> Sampler:
    """4 prompts a step, of 2 completions each; all are correct."""
    args = flags(prompts_per_step=4, group_size=2, engine="server", **changes)
    data = SimpleNamespace(
        rows=[make_row([i, i], where=f"row {i}") for i in range(400)],
        indices_of_step=lambda step, count, *_: np.arange((step - 1) * count, step * count),
        indices_from=lambda start, count, _: np.arange(start, start + count),
    )
    grader = SimpleNamespace(
        callback_for=lambda *_: lambda *_: None, collect_from_ranks=lambda: [make_grade(1.0, is_correct=True)] * 8,
        grading=SimpleNamespace(truncated="score"),
    )  # fmt: skip
    run = SimpleNamespace(phase=lambda _: nullcontext(), reward_failures=lambda *_: None)
    return Sampler(engine, grader, data, make_plan(args, 400), Sampling.from_flags(args, num_samples=2), run)
