"""Weights on their way from the trainer to a generation server: a process group of the main rank and its workers.
Also whose server it is: no other run may send weights to it.

vLLM's own weight transfer, of which this file has two backends: NCCL with a deadline, and gloo for CPUs. Servers load
them with `--worker-extension-cls generation.weights.Extension --middleware generation.weights.check_key`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import vllm.distributed.utils
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup
from transformers import PretrainedConfig
from vllm.distributed.utils import StatelessProcessGroup, stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from model.engine_options import head_dtypes

# vLLM turns off the output of the whole process while gloo connects. Two threads that do so at once, for two servers,
# would leave it off; what others print meanwhile is lost.
vllm.distributed.utils.suppress_stdout = contextlib.nullcontext
PATIENCE = timedelta(minutes=10)  # of a worker that waits for a tensor of a trainer that may have gone
LEASE = 20.0  # seconds without a word from its run after which a server is free: that run was killed


# The trainer's side ---------------------------------------------------------------------------------------------------


@dataclass
class Link:
    """A process group of the main rank and the workers of a server."""

    send: Callable[[Tensor], None]  # sends a tensor to all of them
    close: Callable[[], None] = lambda: None


def open_link(listener: socket.socket, num_workers: int, device: torch.device, seconds: float) -> Link:
    """Meets a server's workers at the listening socket.

    It raises RuntimeError where the server has gone, on CPU within `seconds`.
    """
    place = {"host": listener.getsockname()[0], "port": listener.getsockname()[1], "listen_socket": listener}
    place |= {"rank": 0, "world_size": 1 + num_workers}
    if device.type == "cpu":
        timeout = timedelta(seconds=seconds)
        group = stateless_init_torch_distributed_process_group(**place, backend="gloo", timeout=timeout)
        return Link(lambda tensor: broadcast(group, tensor))
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    meeting = StatelessProcessGroup.create(**place, store_timeout=int(seconds))
    with unpinned_nccl_env():  # as the workers do
        communicator = PyNcclCommunicator(meeting, device)

    def send(tensor: Tensor) -> None:  # in the current stream: that of the gather before it and of the free after it
        communicator.broadcast(tensor.contiguous(), src=0, stream=torch.cuda.current_stream())

    return Link(send, communicator.destroy)


def broadcast(group: ProcessGroup, tensor: Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor.contiguous()], options).wait()


# The server's side ----------------------------------------------------------------------------------------------------


class NcclEngine(NCCLWeightTransferEngine):
    """vLLM's own would wait for ever for a trainer that has gone, and looks through the whole model for each tensor."""

    def receive(self, tensor: Tensor) -> None:
        """Fills it with what the trainer sends. Raises RuntimeError after `PATIENCE`; the next run connects anew."""
        self.model_update_group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        arrived = torch.cuda.Event()
        arrived.record()
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while not arrived.query():
            if time.monotonic() > deadline:
                self.shutdown()  # aborts the kernel that waits
                raise RuntimeError(f"no weights came for {PATIENCE}: the trainer has gone, or hangs")
            time.sleep(0.0001)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        def arriving() -> Iterator[tuple[str, Tensor]]:
            rows = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
            for name, dtype, shape in rows:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self.receive(tensor)
                yield name, tensor

        try:
            self.model.load_weights(arriving())
        except RuntimeError:  # the trainer has gone: only after an end, also of a part, can the next update begin
            super().finish_weight_update()
            raise


class GlooEngine(NcclEngine):
    """The same for a worker on CPU."""

    group: ProcessGroup | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        self.group = stateless_init_torch_distributed_process_group(
            init_info.master_address, init_info.master_port, init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size, backend="gloo", timeout=PATIENCE,
        )  # fmt: skip

    def update_weights(self, update_info: dict[str, list]) -> None:
        # Not the base class's, which ends by synchronizing an accelerator.
        self.receive_weights(self.parse_update_info(update_info))

    def receive(self, tensor: Tensor) -> None:
        broadcast(self.group, tensor)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        for module in self.model.modules():  # a tied head multiplies by a packed copy, which the reload does not renew
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self.group = None


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
WeightTransferEngineFactory.register_engine("nccl_with_deadline", NcclEngine)


class Extension:
    """Of vLLM's workers, which import this file for it."""

    def own_head_dtypes(self) -> list[str]:
        return head_dtypes(self.get_model())


def describe_model(config: PretrainedConfig) -> str:
    """In the same words for the run and for a server, whose paths of the model may differ."""
    text = config.get_text_config()
    sizes = f"{text.num_hidden_layers} layers, hidden size {text.hidden_size}, vocabulary of {text.vocab_size}"
    return f"{', '.join(config.architectures or ())} of {sizes}"


async def describe_server(request: Request) -> dict[str, object]:
    """What must fit a run, by the flags of scripts/serve.py, and the number of workers."""
    engine = request.app.state.engine_client
    (heads, *_), config = await engine.collective_rpc("own_head_dtypes"), engine.vllm_config.model_config
    dtype = str(config.dtype).removeprefix("torch.")
    return {
        "world_size": engine.vllm_config.parallel_config.world_size_across_dp,
        "--model": describe_model(config.hf_config), "--max_model_len": config.max_model_len,
        "--dtype": dtype, "--head_dtype": ", ".join(heads) or dtype,
    }  # fmt: skip


class Owner:
    """The run that this server belongs to."""

    claim: dict[str, str] = {}  # as its main rank makes it; empty: the server is free
    heard = 0.0  # when that was repeated last

    def hear(self, claim: dict[str, str], do: str, now: float) -> str:
        """Why the run of this claim may not "take" the server, "keep" or "free" it; nothing if it may.

        A new start of the same run takes the server from the one before, which may not keep it then.
        """
        is_same = do == "take" and all(claim.get(name) == self.claim.get(name) for name in ("run", "out_dir"))
        if self.claim and claim != self.claim and not is_same and now - self.heard < LEASE:
            holder = "{out_dir} on {host} (process {pid})".format_map(self.claim)
            way_out = f"end that run, or give other --server_urls; {LEASE:g} s after a kill the server is free"
            return f"belongs to the run {holder}; {way_out}."
        self.claim, self.heard = {} if do == "free" else claim, now
        return ""


OWNER = Owner()


async def check_key(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """vLLM asks for VLLM_API_KEY where text is sampled, but not where weights are changed: this asks everywhere.

    Its own route is /owner, where a run says each second that the server is its own.
    """
    key, given = os.environ.get("VLLM_API_KEY", ""), request.headers.get("authorization", "")
    if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
        return JSONResponse({"error": "this server wants its VLLM_API_KEY"}, 401)
    if request.url.path != "/owner":
        return await call_next(request)
    asked = await request.json()
    if refusal := OWNER.hear(asked["claim"], asked["do"], time.monotonic()):
        return PlainTextResponse(refusal, 409)
    return JSONResponse(await describe_server(request) if asked["do"] == "take" else {})
