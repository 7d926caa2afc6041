"""The engine on GPUs of its own: stock vLLM servers, which the main rank feeds; it has the verbs of `rollout.Engine`.

    engine = build_servers(model, settings, servers, tokenizer, policy, run, version)
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
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from batch import OnFinished, Rollout, Row
from flags import EngineSettings, Sampling, Servers
from fsdp_utils import broadcast_from_main, end_if_requested, gather_from_ranks, new_host_group
from generation.client import Completion, Fleet, Request, Server
from generation.start import ServerProcess
from guards.stall import WAITS, beat, note
from guards.start import RunError, requested
from model.engine_options import engine_options, stop_ids
from model.sizes import MOST_ON_GPU

if TYPE_CHECKING:
    from policy import Policy
    from run import Run

TICK = 0.5  # seconds after which the ranks that wait hear from the main rank


@dataclass
class Call:
    """Completions that are being sampled: of one call of `sample`, or begun ahead of it. On the main rank."""

    count: int
    results: queue.SimpleQueue[tuple[int, Completion]] = field(default_factory=queue.SimpleQueue)
    done: dict[int, Completion] = field(default_factory=dict)
    start: float = field(default_factory=time.monotonic)


def rollout_of(call: Call, texts: dict[int, str]) -> Rollout:
    """The completions of a call that is done. Without the rows, which every rank has."""
    done_B = [call.done[b] for b in range(call.count)]
    return Rollout(
        rows=[],
        completions=[done.token_ids for done in done_B],
        rollout_logprobs=[done.logprobs for done in done_B],
        texts=[texts[b] for b in range(call.count)],
        is_truncated_B=np.array([done.is_truncated for done in done_B], dtype=bool),
        versions=[done.versions for done in done_B],
    )


class ServerEngine:
    """Every rank has one; that of the main rank has the servers."""

    def __init__(
        self,
        fleet: Fleet | None,
        tokenizer: PreTrainedTokenizerBase,
        policy: Policy,
        run: Run,
        version: int,
        in_flight: bool = False,
    ) -> None:
        """`fleet`: of the main rank. `version`: of the first weights that `sync` brings.

        `in_flight`: completions under way go on under new weights; otherwise a sync waits for them.
        """
        self.fleet, self.tokenizer, self.policy, self.run = fleet, tokenizer, policy, run
        self.version, self.first_version, self.in_flight = version - 1, version, in_flight
        self.group = new_host_group()  # for news while the ranks wait, which are no progress
        self.begun: dict[tuple[int, ...], Call] = {}
        self.seconds_E = np.zeros(1)  # from the begin of the last call of `sample` to its last completion
        self.progress, self.start = "", time.monotonic()

    # Sampling ---------------------------------------------------------------------------------------------------------

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
        call, texts = self.begun.pop(seed, Call(0)), {}

        def take() -> bool:
            """Takes what is finished; true if that is all."""
            deadline = time.monotonic() + TICK
            while len(call.done) < call.count and (left := deadline - time.monotonic()) > 0:
                try:
                    b, done = call.results.get(timeout=left)
                except queue.Empty:
                    break
                call.done[b], ids = done, done.token_ids.tolist()
                texts[b] = self.tokenizer.decode(ids, skip_special_tokens=True)
                if on_finished is not None:
                    on_finished(b, texts[b], ids, done.is_truncated)
            return len(call.done) == call.count

        self.wait(take, lambda: f"{description}: {call.count - len(call.done)} completions unfinished")
        end_if_requested()
        self.seconds_E = np.array([time.monotonic() - call.start])
        rollout = broadcast_from_main(rollout_of(call, texts) if self.fleet is not None else None)
        return replace(rollout, rows=[row for row in rows for _ in range(sampling.num_samples)])

    def wait(self, is_done: Callable[[], bool], what: Callable[[], str], may_send: bool = True) -> None:
        """Returns on all ranks when `is_done` on the main one, or when a signal has come. Others hear of it by ticks.

        `may_send`: a server that has come back meanwhile gets the weights. Raises RunError, on all ranks, if no server
        is left.
        """
        while True:
            state, doing, error = self.news(is_done, what) if self.fleet is not None else ("", "", "")
            heard = gather_from_ranks((state, doing, error, requested()), self.group)
            state, doing, error, _ = heard[0]
            if error:
                raise RunError(error)
            (note if doing == self.progress else beat)(doing if self.fleet else f"{WAITS} (the main one {doing})")
            self.progress = doing
            if state == "done" or any(is_requested for *_, is_requested in heard):
                return
            if state == "back" and may_send:
                self.send(self.policy.full_weights(), ("waiting",))

    def news(self, is_done: Callable[[], bool], what: Callable[[], str]) -> tuple[str, str, str]:
        """(the state of the servers, what the main rank is doing, why the run ends), on the main rank."""
        done, servers = is_done(), self.fleet.servers
        while not self.fleet.said.empty():
            self.run.say(self.fleet.said.get())
        while not self.fleet.spans.empty():
            self.run.spans.append(self.fleet.spans.get())
        state = "done" if done else "back" if any(each.state == "waiting" for each in servers) else ""
        loads = ", ".join(f"{each.name} {each.state} with {len(each.under_way)} requests" for each in servers)
        tokens = sum(each.tokens for each in servers)
        doing = f"waits for the servers: {what()} ({loads}, {tokens:.0f} tokens in all)"
        return state, doing, "" if done else self.fleet.trouble()

    # Weights ----------------------------------------------------------------------------------------------------------

    def sync(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """All servers take new weights, one full tensor at a time, under their Hugging Face names."""
        if self.fleet is not None:
            self.fleet.call(self.fleet.set_open(False))
        self.wait(self.is_settled, lambda: "before the weights change", may_send=False)
        self.version += 1
        self.send(named_parameters, ("waiting", "ready"))

    def is_settled(self) -> bool:
        """Whether the weights may change. At the start: when all servers are there, or have had their time."""
        states = [each.state for each in self.fleet.servers]
        is_settled = self.in_flight or not any(each.under_way for each in self.fleet.servers)
        if self.version < self.first_version:
            is_late = time.monotonic() - self.start > self.fleet.timeout
            is_settled = "waiting" in states and (is_late or "away" not in states)
        time.sleep(0.0 if is_settled else 0.05)
        return is_settled

    def send(self, named_parameters: Iterable[tuple[str, Tensor]], states: tuple[str, ...]) -> None:
        """The servers in these states take the weights, and sample on. All ranks gather; the main one sends."""
        servers = []
        beat("waits for the servers to stand still")
        if self.fleet is not None:
            chosen = [each for each in self.fleet.servers if each.state in states]
            servers = self.fleet.call(self.fleet.prepare(chosen, self.policy.describe_weights(), self.run.world.device))
        for name, tensor in named_parameters:
            beat(f"sends {name}")
            for server in servers:
                try:
                    if server.send is not None and not server.update.done():  # else it has failed
                        server.send(tensor)
                except RuntimeError as error:  # of torch: the connection is broken
                    self.fleet.call(self.fleet.drop(server, error))
            del tensor
        beat("waits for the servers to go on")
        if self.fleet is not None:
            self.fleet.call(self.fleet.finish(servers, self.version))

    def sleep(self) -> None:
        """The servers have GPUs of their own."""

    def close(self) -> None:
        if self.fleet is not None:
            self.fleet.close()


def build_servers(
    model: str,
    settings: EngineSettings,
    servers: Servers,
    tokenizer: PreTrainedTokenizerBase,
    policy: Policy,
    run: Run,
    version: int,
) -> ServerEngine:
    """The engine of these servers; the main rank starts those that nobody else has started."""
    fleet = None
    if run.world.is_main:
        key, device = os.environ.get("VLLM_API_KEY") or secrets.token_hex(), run.world.device
        is_cuda, size = device.type == "cuda", servers.tensor_parallel_size
        backend = "nccl" if is_cuda else "gloo"
        options = engine_options(model, settings, is_cuda, size)
        gpus = [servers.generation_gpus[i : i + size] for i in range(0, len(servers.generation_gpus), size)]
        logs = [run.out_dir / "servers" / f"{i}.log" for i in range(len(gpus) or servers.num_servers)]
        started = [] if servers.server_urls else [ServerProcess(options, backend, key, log) for log in logs]
        for process, own in zip(started, gpus, strict=False):
            process.gpus = own
        found = [Server(f"server {i}", "", process) for i, process in enumerate(started)]
        found += [Server(url, url.rstrip("/")) for url in servers.server_urls]
        fleet = Fleet(found, stop_ids(tokenizer, settings.stop_tokens), key, servers.server_timeout, MOST_ON_GPU)
    return ServerEngine(fleet, tokenizer, policy, run, version, servers.in_flight)
