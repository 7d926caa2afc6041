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

from batch import OnFinished, Rollout, Row, rollout_of
from engine.options import engine_options, stop_ids
from flags import EngineSettings, Sampling, Servers
from fsdp_utils import World, broadcast_from_main, end_if_requested, gather_from_ranks, set_allocator
from model.weights import load_config
from runtime.stall import WAITS, beat
from runtime.start import RunError, requested
from servers.fleet import Fleet, Request, Server, Turns
from servers.start import start_server
from servers.weights import fit_of

TICK = 0.1  # seconds between two looks of ranks that wait for servers


class Inputs(Protocol):
    """What is needed of an `load_inputs.Inputs`."""

    tokenizer: PreTrainedTokenizerBase
    turns: Turns | None


class Log(Protocol):
    """What is needed of a `run.Run`."""

    out_dir: Path
    world: World
    say: Callable[[str], None]


@dataclass
class ServerEngine:
    """Every rank has one; that of the main rank has the servers."""

    seconds_E = np.zeros(1)  # not measured: servers sample while the ranks do other things
    fleet: Fleet | None  # of the main rank
    tokenizer: PreTrainedTokenizerBase
    weights: dict[str, list]  # their names, dtypes and shapes
    device: torch.device  # where they come from
    version: int  # of the weights that the next `sync` brings
    in_flight: bool = False  # completions under way go on under new weights; otherwise a sync waits for them
    begun: dict[tuple[int, ...], list[Request]] = field(default_factory=dict)  # by the seed of their call
    progress: str = ""  # as it was told last

    def begin(self, rows: list[Row], sampling: Sampling, seed: tuple[int, ...], is_first: bool = False) -> None:
        """The servers sample these rows, for a later call of `sample` with this seed. `is_first`: before all others."""
        if self.fleet is not None and seed not in self.begun:
            self.begun[seed] = [Request(row, sampling) for row in rows for _ in range(sampling.num_samples)]
            self.fleet.call(self.fleet.put(self.begun[seed], is_first))

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
        requests, told = self.begun.pop(seed, []), set()

        def is_done() -> bool:
            for b, request in enumerate(requests):
                if request.completion is not None and b not in told:
                    request.completion.tell(b, self.tokenizer, on_finished)
                    told.add(b)
            return len(told) == len(requests)

        self.wait(is_done, lambda: f"{description}: {len(requests) - len(told)} completions unfinished")
        end_if_requested()
        rollout = broadcast_from_main(rollout_of([request.completion for request in requests]))
        return replace(rollout, rows=[row for row in rows for _ in range(sampling.num_samples)])

    def wait(self, is_done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Returns on all ranks when `is_done()` on the main one, or after a signal. RunError: servers are lost."""
        is_over = False
        while not is_over:
            news = self.fleet and (is_done(), f"{what()} ({self.fleet.describe()})", self.fleet.error)
            heard = gather_from_ranks((news, requested()), is_progress=False)
            (done, doing, error), _ = heard[0]
            if error:
                raise RunError(error)
            who = "" if self.fleet else f"{WAITS}: the main one "
            beat(f"{who}waits for the servers: {doing}", is_progress=doing != self.progress)
            self.progress = doing
            is_over = done or any(is_requested for _, is_requested in heard)
            time.sleep(0.0 if is_over else TICK)

    def sync(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """All servers take new weights, one full tensor at a time; the first call waits until they have started."""
        self.wait(lambda: self.fleet.call(self.fleet.settle(self.in_flight)), lambda: "before the weights change")
        if self.fleet is not None:
            self.fleet.call(self.fleet.prepare(self.weights, self.device, self.version))
        for name, tensor in named_parameters:
            beat(f"sends {name}")
            if self.fleet is not None:
                self.fleet.send(tensor)
            del tensor
        beat("waits for the servers to go on")
        if self.fleet is not None:
            self.fleet.call(self.fleet.finish())
        self.version += 1

    def sleep(self) -> None:
        """The servers have GPUs of their own."""

    def close(self) -> None:
        if self.fleet is not None:
            self.fleet.close()


def build_servers(
    model: str,
    settings: EngineSettings,
    servers: Servers,
    inputs: Inputs,
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
        log.say(f"waits for {', '.join(each.name for each in found)}")
        needed = fit_of(load_config(model), settings.max_model_len, settings.dtype, settings.head_dtype)
        stops, turns = stop_ids(inputs.tokenizer, settings.stop_tokens), {"turns": inputs.turns}
        run = f"{log.out_dir.resolve()} on {socket.gethostname()} (process {os.getpid()})"
        fleet = Fleet(found, stops, key, log.say, run, needed, **turns)
    set_allocator(is_expandable=True)  # as beside an engine in the ranks
    return ServerEngine(fleet, inputs.tokenizer, weights, device, version, servers.in_flight)
