"""The engine on GPUs of its own: stock vLLM servers, which the main rank feeds; it has the verbs of `rollout.Engine`.

--engine server asks for it; `train_grpo.load_models` takes it in place of `rollout.Engine`.

    engine = build_servers(model, settings, servers, tokenizer, turns, run, version)
    engine.weights = describe_weights(policy)
    engine.sync(policy.full_weights())              # all servers get the weights, one tensor at a time
    engine.begin(rows, sampling, seed)              # --steps_ahead: the servers sample while the ranks train
    rollout = engine.sample(rows, sampling, seed)   # the same on every rank

The weights have a version: the number of steps that they were trained. Each completion says which made each of its
tokens. Random draws are the servers' own, so a run that is continued samples other completions. docs/generation.md
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from batch import OnFinished, Rollout, Row, rollout_of
from engine.options import engine_options, stop_ids
from extras.servers.fleet import Fleet, Request, Server
from extras.servers.start import start_server
from extras.servers.weights import fit_of
from extras.turns.turns import Turns
from flags import EngineSettings, Sampling, Servers
from fsdp_utils import broadcast_from_main, end_if_requested, gather_from_ranks, set_allocator
from model.weights import load_config
from policy import Policy
from run import Run
from runtime.rank import RunError, beat, requested

LOOK_SECONDS = 0.1  # between two looks of ranks that wait for servers


def describe_weights(policy: Policy) -> dict[str, list]:
    """Names, dtypes and shapes of the tensors of `Policy.full_weights`, in the form of vLLM's weight transfer."""
    named = policy.named_weights()
    return {
        "names": [name for name, _, _ in named],
        "dtype_names": [str(policy.dtype).removeprefix("torch.")] * len(named),
        "shapes": [list(parameter.shape) for _, parameter, _ in named],
    }


@dataclass(kw_only=True)
class ServerEngine:
    """Every rank has one; the main rank's has the servers."""

    seconds_E = np.zeros(1)  # not measured: servers sample while the ranks do other things
    fleet: Fleet | None  # None: this is not the main rank
    tokenizer: PreTrainedTokenizerBase
    device: torch.device  # where the weights are
    version: int  # number of the weights that the next `sync` brings
    in_flight: bool  # unfinished completions go on under new weights; otherwise a sync waits for them
    weights: dict[str, list] = field(default_factory=dict)  # names, dtypes and shapes of what `sync` sends
    begun: dict[tuple[int, ...], list[Request]] = field(default_factory=dict)  # by the seed of their call
    last_progress: object = None  # as the ranks last heard it

    def begin(self, rows: list[Row], sampling: Sampling, seed: tuple[int, ...], is_first: bool = False) -> None:
        """Has servers sample these rows, for a later call of `sample` with this seed. `is_first`: before all others."""
        if self.fleet is not None and seed not in self.begun:
            self.begun[seed] = [Request(row, sampling) for row in rows for _ in range(sampling.num_samples)]
            self.fleet.call(self.fleet.enqueue(self.begun[seed], is_first))

    def sample(
        self,
        rows: list[Row],
        sampling: Sampling,
        seed: tuple[int, ...],
        description: str = "sample",
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """As `rollout.Engine.sample`; the main rank calls `on_finished`. `seed` names the call, for `begin`."""
        self.begin(rows, sampling, seed, is_first=True)
        requests = self.begun.pop(seed, [])
        unfinished = dict(enumerate(requests))

        def is_done() -> bool:
            for b, request in list(unfinished.items()):
                if request.completion is not None:
                    request.completion.finish(b, self.tokenizer, on_finished)
                    del unfinished[b]
            return not unfinished

        self.wait(is_done)
        end_if_requested()
        rollout = broadcast_from_main(rollout_of([request.completion for request in requests]))
        return replace(rollout, rows=[row for row in rows for _ in range(sampling.num_samples)])

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Returns on all ranks when `is_done()` on the main one, or after a signal. RunError: a server has failed."""
        while True:
            status = (is_done(), self.fleet.progress(), self.fleet.error) if self.fleet else None
            statuses, signals = zip(*gather_from_ranks((status, requested())), strict=True)
            is_over, progress, error = statuses[0]
            if error:
                raise RunError(error)
            if progress != self.last_progress:
                beat()
            self.last_progress = progress
            if is_over or any(signals):
                return
            time.sleep(LOOK_SECONDS)

    def sync(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Sends new weights to all servers, a full tensor at a time; the first call waits until they have started."""
        fleet = self.fleet
        self.wait(lambda: fleet.call(fleet.pause_dispatch(self.in_flight)))
        if fleet is not None:
            fleet.call(fleet.prepare(self.weights, self.device, self.version))
        for _, tensor in named_parameters:
            beat()
            if fleet is not None:
                fleet.send(tensor)
            del tensor  # before the next one is gathered
        if fleet is not None:
            fleet.call(fleet.finish())
        self.version += 1

    def sleep(self) -> None:
        """Does nothing: the servers have GPUs of their own."""

    def close(self) -> None:
        if self.fleet is not None:
            self.fleet.close()


def build_servers(
    model: str,
    settings: EngineSettings,
    servers: Servers,
    tokenizer: PreTrainedTokenizerBase,
    turns: Turns | None,
    run: Run,
    version: int,
) -> ServerEngine:
    """The engine of these servers; the main rank starts those that nobody else has started.

    Raises RunError if one of --server_urls answers that it has another key or model.
    """
    fleet, device = None, run.world.device
    if run.world.is_main:
        key = os.environ.get("VLLM_API_KEY") or secrets.token_hex()
        fleet_servers = [Server(url, url.rstrip("/")) for url in servers.server_urls]
        if not fleet_servers:
            options = engine_options(model, settings, device.type == "cuda", servers.tensor_parallel_size)
            fleet_servers = start_servers(options, servers, key, run)
        run.say(f"waits for {', '.join(server.name for server in fleet_servers)}")
        fleet = Fleet(
            servers=fleet_servers,
            stop_ids=stop_ids(tokenizer, settings.stop_tokens),
            key=key,
            say=run.say,
            run=f"{run.out_dir.resolve()} on {socket.gethostname()} (process {os.getpid()})",
            needed=fit_of(load_config(model), settings.max_model_len, settings.dtype, settings.head_dtype),
            turns=turns,
        )
        fleet.call(fleet.begin())
    set_allocator(is_expandable=True)  # as beside an engine in the ranks
    return ServerEngine(
        fleet=fleet, tokenizer=tokenizer, device=device, version=version, in_flight=servers.in_flight
    )  # fmt: skip


def start_servers(options: dict[str, object], servers: Servers, key: str, run: Run) -> list[Server]:
    """Starts as many as fit on --generation_gpus; on CPUs one, or one for each number of that flag."""
    is_cuda, size = run.world.device.type == "cuda", servers.tensor_parallel_size
    started = []
    for i in range(max(1, len(servers.generation_gpus) // size)):
        gpus = servers.generation_gpus[i * size : (i + 1) * size] if is_cuda else ()
        log = run.out_dir / "servers" / f"{i}.log"
        process = start_server(options, "nccl_with_deadline" if is_cuda else "gloo", key, log, gpus)
        started.append(Server(f"server {i}", process.url, process))
    return started
