"""The engine on GPUs of its own: stock vLLM servers, which the main rank feeds; it has the verbs of `rollout.Engine`.

    engine = build_servers(model, settings, servers, tokenizer, weights, log, version)
    engine.sync(policy.full_weights())              # all servers get the weights, one tensor at a time
    engine.begin(rows, sampling, seed)              # --steps_ahead: the servers sample while the ranks train
    rollout = engine.sample(rows, sampling, seed)   # the same on every rank

The weights have a version: the number of steps that they were trained. Each completion says which made each of its
tokens. Random draws are the servers' own, so a run that is continued samples other completions. docs/generation.md
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from batch import OnFinished, Rollout, Row
from flags import EngineSettings, Sampling, Servers
from fsdp_utils import World, broadcast_from_main, end_if_requested, gather_from_ranks, set_allocator
from generation.start import start_server
from generation.weights import describe_model
from generation.wire import TIMEOUT, Completion, Fleet, Request, Server
from guards.stall import WAITS, beat
from guards.start import RunError, requested
from model.engine_options import engine_options, stop_ids
from model.sizes import MOST_ON_GPU
from model.weights import load_config

TICK = 0.5  # seconds after which the ranks that wait hear from the main rank


class Log(Protocol):
    """What is needed of a `run.Run`."""

    out_dir: Path
    world: World
    say: Callable[[str], None]
    note_span: Callable[[str, str, float, float], None]


@dataclass
class Call:
    """Completions that are being sampled, for a call of `sample`. On the main rank."""

    count: int
    results: queue.SimpleQueue[tuple[int, Completion]] = field(default_factory=queue.SimpleQueue)
    done: dict[int, Completion] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    start: float = field(default_factory=time.monotonic)

    def take(self, tokenizer: PreTrainedTokenizerBase, on_finished: OnFinished | None) -> bool:
        """Takes what is finished within TICK; true if that is all."""
        deadline = time.monotonic() + TICK
        while len(self.done) < self.count and (left := deadline - time.monotonic()) > 0:
            try:
                b, done = self.results.get(timeout=left)
            except queue.Empty:
                break
            self.done[b], ids = done, done.token_ids.tolist()
            self.texts[b] = tokenizer.decode(ids, skip_special_tokens=True)
            if on_finished is not None:
                on_finished(b, self.texts[b], ids, done.is_truncated)
        return len(self.done) == self.count

    def rollout(self) -> Rollout:
        """Of a call that is done. Without the rows, which every rank has."""
        done_B = [self.done[b] for b in range(self.count)]
        return Rollout(
            rows=[],
            completions=[done.token_ids for done in done_B],
            rollout_logprobs=[done.logprobs for done in done_B],
            texts=[self.texts[b] for b in range(self.count)],
            is_truncated_B=np.array([done.is_truncated for done in done_B], dtype=bool),
            versions=[done.versions for done in done_B],
        )


@dataclass
class ServerEngine:
    """Every rank has one; that of the main rank has the servers."""

    fleet: Fleet | None  # of the main rank
    tokenizer: PreTrainedTokenizerBase
    weights: dict[str, list]  # their names, dtypes and shapes
    device: torch.device  # where they come from
    version: int  # of the weights that the next `sync` brings
    in_flight: bool = False  # completions under way go on under new weights; otherwise a sync waits for them

    def __post_init__(self) -> None:
        self.begun: dict[tuple[int, ...], Call] = {}
        self.seconds_E = np.zeros(1)  # from the begin of the last call of `sample` to its last completion
        self.progress = ""

    def begin(self, rows: list[Row], sampling: Sampling, seed: tuple[int, ...], is_first: bool = False) -> None:
        """The servers sample these rows, for a later call of `sample` with this seed. `is_first`: before all others."""
        if self.fleet is not None and seed not in self.begun:
            call = self.begun[seed] = Call(len(rows) * sampling.num_samples)
            rows_B = [row for row in rows for _ in range(sampling.num_samples)]
            requests = [Request(row, b, sampling, call.results) for b, row in enumerate(rows_B)]
            self.fleet.call(self.fleet.put(requests, is_first))

    def sample(
        self,
        rows: list[Row],
        sampling: Sampling,
        seed: tuple[int, ...],
        description: str = "sample",
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """The completions of these rows, prompt-major; the same on every rank, which must give the same rows.

        `seed` is the name of the call, for `begin`. The main rank calls `on_finished(b, text, token_ids, is_truncated)`
        as soon as completion b is finished, or at once if it was finished before. Raises Stopped if a signal has come.
        """
        self.begin(rows, sampling, seed, is_first=True)
        call = self.begun.pop(seed, Call(0))
        self.wait(
            lambda: call.take(self.tokenizer, on_finished),
            lambda: f"{description}: {call.count - len(call.done)} completions unfinished",
        )
        end_if_requested()
        self.seconds_E = np.array([time.monotonic() - call.start])
        rollout = broadcast_from_main(call.rollout() if self.fleet is not None else None)
        return replace(rollout, rows=[row for row in rows for _ in range(sampling.num_samples)])

    def wait(self, is_done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Returns on all ranks when `is_done()` on the main one, or after a signal. RunError: servers are lost."""
        is_over = False
        while not is_over:
            news = False, "", ""
            if self.fleet is not None:
                done = is_done()
                news = done, f"waits for the servers: {what()} ({self.fleet.describe()})", self.fleet.error
            heard = gather_from_ranks((news, requested()), is_progress=False)
            (done, doing, error), _ = heard[0]
            if error:
                raise RunError(error)
            beat(doing if self.fleet else f"{WAITS} (the main one {doing})", is_progress=doing != self.progress)
            self.progress = doing
            is_over = done or any(is_requested for _, is_requested in heard)

    def sync(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """All servers take new weights, one full tensor at a time; the first call waits until they have started."""
        if self.fleet is not None:
            self.fleet.call(self.fleet.pause())
        self.wait(self.is_settled, lambda: "before the weights change")
        if self.fleet is not None:
            self.fleet.call(self.fleet.prepare(self.weights, self.device))
            self.fleet.check()
        for name, tensor in named_parameters:
            beat(f"sends {name}")
            if self.fleet is not None:
                self.fleet.send(tensor)
            del tensor
        beat("waits for the servers to go on")
        if self.fleet is not None:
            self.fleet.call(self.fleet.finish(self.version))
            self.fleet.check()
        self.version += 1

    def is_settled(self) -> bool:
        """Whether the weights may change."""
        servers = self.fleet.servers
        is_busy = any(each.state == "starts" or (each.under_way and not self.in_flight) for each in servers)
        time.sleep(0.05 if is_busy else 0.0)
        return not is_busy

    def sleep(self) -> None:
        """The servers have GPUs of their own."""

    def close(self) -> None:
        if self.fleet is not None:
            self.fleet.close()


def claim_of(out_dir: Path) -> dict[str, str]:
    """Names a run, by a number that it keeps in its folder, and this start of it: servers belong to one run."""
    file = out_dir / ".run_id"
    if not file.exists():
        file.write_text(secrets.token_hex())
    start = {"out_dir": str(out_dir.resolve()), "host": socket.gethostname(), "pid": str(os.getpid())}
    return {"run": file.read_text()} | start


def build_servers(
    model: str,
    settings: EngineSettings,
    servers: Servers,
    tokenizer: PreTrainedTokenizerBase,
    weights: dict[str, list],
    log: Log,
    version: int,
) -> ServerEngine:
    """The engine of these servers; the main rank starts those that nobody else has started."""
    fleet, device = None, log.world.device
    if log.world.is_main:
        key = os.environ.get("VLLM_API_KEY") or secrets.token_hex()
        is_cuda, size = device.type == "cuda", servers.tensor_parallel_size
        options = engine_options(model, settings, is_cuda, size)
        found = [Server(url, url.rstrip("/")) for url in servers.server_urls]
        for i in range(0 if found else max(1, len(servers.generation_gpus) // size)):
            gpus = servers.generation_gpus[i * size : (i + 1) * size] if is_cuda else ()
            file = log.out_dir / "servers" / f"{i}.log"
            process = start_server(options, "nccl_with_deadline" if is_cuda else "gloo", key, file, gpus)
            found.append(Server(f"server {i}", process.url, process))
        needed = {
            "--model": describe_model(load_config(model)), "--max_model_len": settings.max_model_len,
            "--dtype": settings.dtype, "--head_dtype": settings.head_dtype or settings.dtype,
        }  # fmt: skip
        stops, claim = stop_ids(tokenizer, settings.stop_tokens), claim_of(log.out_dir)
        fleet = Fleet(found, stops, key, log.say, log.note_span, TIMEOUT, MOST_ON_GPU, claim, needed)
    set_allocator(is_expandable=True)  # as beside an engine in the ranks
    return ServerEngine(fleet, tokenizer, weights, device, version, servers.in_flight)
