"""A server that speaks as vLLM's does, without a model: for the faults of servers, and for what takes how long.

It takes part in the weight transfer for real, over gloo, and labels its tokens with the version that it was given.
"""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from aiohttp import web
from vllm.distributed.utils import stateless_init_torch_distributed_process_group

from generation.transfer import broadcast

TOKEN = 7


class FakeServer:
    """Each token takes `seconds`; a completion is as long as it may be. `spoil` makes a response of the answer."""

    def __init__(self, seconds: float = 0.0, port: int = 0) -> None:
        self.seconds, self.port = seconds, port
        self.version, self.tokens, self.paused, self.stuck, self.dies_in_sync = "default", 0, False, False, False
        self.hangs_up, self.used = False, set()  # when a connection that it has answered on is used again
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
        app.add_routes([
            web.get("/health", self.answer_ok), web.get("/get_world_size", self.world_size),
            web.get("/metrics", self.metrics), web.post("/pause", self.pause), web.post("/resume", self.resume),
            web.post("/init_weight_transfer_engine", self.meet), web.post("/start_weight_update", self.answer_ok),
            web.post("/update_weights", self.update), web.post("/finish_weight_update", self.finish),
            web.post("/inference/v1/generate", self.generate),
        ])  # fmt: skip
        self.runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    def kill(self) -> None:
        """It is gone from one moment to the next, with its port."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()
        self.pool.shutdown(wait=False)

    async def answer_ok(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}\n')

    async def pause(self, _: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({})

    async def resume(self, _: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({})

    async def meet(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        self.group = await self.loop.run_in_executor(
            self.pool, stateless_init_torch_distributed_process_group,
            info["master_address"], info["master_port"], info["rank_offset"], info["world_size"], "gloo",
        )  # fmt: skip
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]

        def receive() -> None:
            self.received = []
            for dtype, shape in zip(info["dtype_names"], info["shapes"], strict=True):
                if self.dies_in_sync and self.received:
                    raise RuntimeError("out of memory")
                self.received.append(torch.empty(shape, dtype=getattr(torch, dtype)))
                broadcast(self.group, self.received[-1])

        await self.loop.run_in_executor(self.pool, receive)
        return web.json_response({})

    async def finish(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"]
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
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
        starts = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
        spans = [
            {"version": versions[start], "start": start, "end": end}
            for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
        ]
        content = [{"token_id": TOKEN, "logprob": -1.0, "rank": 1, "top_logprobs": []}] * len(versions)
        choice = {"index": 0, "finish_reason": "length", "token_ids": [TOKEN] * len(versions)}
        choice |= {"logprobs": {"content": content}, "weight_versions": spans}
        self.prompts.append(body["token_ids"])
        answer = {"prompt_token_ids": body["token_ids"], "choices": [choice]}
        return self.spoil(json.loads(json.dumps(answer)))
