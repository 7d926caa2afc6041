"""A server that speaks as vLLM's does, without a model: for the faults of servers, and for what takes how long.

It takes part in the weight transfer for real, over gloo, and labels its tokens with the version that it was given.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import torch
from aiohttp import web
from vllm.distributed.utils import stateless_init_torch_distributed_process_group

from generation.weights import broadcast

TOKEN = 7


class FakeServer:
    """Each token takes `seconds`; a completion is as long as it may be. `spoil` makes a response of the answer."""

    def __init__(self, seconds: float = 0.0, port: int = 0) -> None:
        self.seconds, self.port = seconds, port
        self.version, self.tokens, self.paused, self.stuck, self.dies_in_sync = "default", 0, False, False, False
        self.hangs_up, self.used = False, set()  # when a connection that it has answered on is used again
        self.asked: list[str] = []  # the paths of all requests, as they came
        self.prompts: list[list[int]] = []  # of the completions that it gave
        self.received: list[torch.Tensor] = []  # of the last update
        self.spoil = lambda answer: web.json_response(answer)
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
        self.runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    def kill(self) -> None:
        """It is gone from one moment to the next, with its port."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()
        self.pool.shutdown(wait=False)

    async def answer(self, request: web.Request) -> web.Response:
        path, body = request.path.removeprefix("/"), await request.json() if request.can_read_body else {}
        self.asked.append(request.path_qs.removeprefix("/"))
        if path == "inference/v1/generate":
            return await self.generate(request, body)
        if path == "metrics":
            return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}\n')
        if path in ("pause", "resume"):
            self.paused = path == "pause"
        elif path == "finish_weight_update":
            self.version = body.get("weight_version", self.version)
        elif path in ("init_weight_transfer_engine", "update_weights"):
            do = self.meet if path.startswith("init") else self.receive
            await self.loop.run_in_executor(self.pool, do, next(iter(body.values())))
        return web.json_response({"world_size": 1})

    def meet(self, info: dict) -> None:
        place = info["master_address"], info["master_port"], info["rank_offset"], info["world_size"]
        self.group = stateless_init_torch_distributed_process_group(*place, "gloo")

    def receive(self, info: dict) -> None:
        self.received = []
        for dtype, shape in zip(info["dtype_names"], info["shapes"], strict=True):
            if self.dies_in_sync and self.received:
                raise RuntimeError("out of memory")
            self.received.append(torch.empty(shape, dtype=getattr(torch, dtype)))
            broadcast(self.group, self.received[-1])

    async def generate(self, request: web.Request, body: dict) -> web.Response:
        connection = request.transport.get_extra_info("peername")
        if self.hangs_up and connection in self.used:
            request.transport.abort()
        self.used.add(connection)
        versions: list[str] = []
        while len(versions) < body["sampling_params"]["max_tokens"]:
            await asyncio.sleep(self.seconds)
            while self.paused or self.stuck:
                await asyncio.sleep(0.01)
            versions.append(self.version)
            self.tokens += 1
        spans, count = [], len(versions)
        for version, tokens in groupby(versions):
            start = spans[-1]["end"] if spans else 0
            spans.append({"version": version, "start": start, "end": start + len(list(tokens))})
        content = [{"token_id": TOKEN, "logprob": -1.0, "rank": 1, "top_logprobs": []}] * count
        choice = {"index": 0, "finish_reason": "length", "token_ids": [TOKEN] * count}
        choice |= {"logprobs": {"content": content}, "weight_versions": spans}
        self.prompts.append(body["token_ids"])
        return self.spoil({"prompt_token_ids": body["token_ids"], "choices": [choice]})
