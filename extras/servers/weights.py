"""Weights on their way from the trainer to a generation server: a process group of the main rank and its workers.

vLLM's own weight transfer, of which this file has two backends: NCCL with a deadline, and gloo for CPUs. Servers load
them with `--worker-extension-cls extras.servers.weights.Extension --middleware extras.servers.weights.check_key`.
"""

import hmac
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from transformers import PretrainedConfig
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup, create_tcp_store
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.utils.nccl import unpinned_nccl_env

from engine.cpu_copies import renew_copies
from engine.options import head_dtypes

TENSOR_SECONDS = 120.0  # that a worker waits for a tensor of a trainer that may have gone


# The trainer's side, and what both sides need -------------------------------------------------------------------------


class Gloo:
    """On CPUs what vLLM's PyNcclCommunicator is on GPUs."""

    def __init__(self, rank: int, world_size: int, timeout: timedelta, **address: object) -> None:
        store = create_tcp_store(**address, world_size=world_size, is_master=rank == 0, timeout=timeout)
        self.group = ProcessGroupGloo(store, rank, world_size, timeout)

    def broadcast(self, tensor: Tensor, src: int, stream: None = None) -> None:
        self.group.broadcast(tensor, src).wait()

    def destroy(self) -> None:
        self.group = None


Link = Gloo | PyNcclCommunicator


def open_link(listener: socket.socket, num_workers: int, device: torch.device, seconds: float) -> Link:
    """Meets a server's workers at the listening socket.

    It raises RuntimeError where the server has gone, on CPU within `seconds`.
    """
    host, port = listener.getsockname()
    group = {"host": host, "port": port, "listen_socket": listener, "rank": 0, "world_size": 1 + num_workers}
    if device.type == "cpu":
        return Gloo(**group, timeout=timedelta(seconds=seconds))
    meeting = StatelessProcessGroup.create(**group, store_timeout=int(seconds))
    with unpinned_nccl_env():  # as the workers do
        return PyNcclCommunicator(meeting, device)


# The server's side ----------------------------------------------------------------------------------------------------


class NcclEngine(NCCLWeightTransferEngine):
    """NCCL with a deadline.

    vLLM's own would wait for ever for a trainer that has gone, and looks through the whole model for each tensor.
    """

    def receive(self, tensor: Tensor) -> None:
        """Fills it with what the trainer sends. Raises RuntimeError after `TENSOR_SECONDS`; a new run connects anew."""
        self.model_update_group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        arrived = torch.cuda.Event()
        arrived.record()
        deadline = time.monotonic() + TENSOR_SECONDS
        while not arrived.query():
            if time.monotonic() > deadline:
                self.shutdown()  # aborts the kernel that waits
                raise RuntimeError(f"no weights came for {TENSOR_SECONDS:g} s: the trainer has gone, or hangs")
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
    """Gloo, for a worker on CPU."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        address = {"host": init_info.master_address, "port": init_info.master_port}
        self.model_update_group = Gloo(rank, init_info.world_size, timedelta(seconds=TENSOR_SECONDS), **address)

    def update_weights(self, update_info: dict[str, list]) -> None:
        # Not the base class's, which ends by synchronizing an accelerator.
        self.receive_weights(self.parse_update_info(update_info))

    def receive(self, tensor: Tensor) -> None:
        self.model_update_group.broadcast(tensor, src=0)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        renew_copies(self.model)


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
WeightTransferEngineFactory.register_engine("nccl_with_deadline", NcclEngine)


def fit_of(config: PretrainedConfig, max_model_len: int, dtype: str, head_dtype: str | None) -> dict[str, object]:
    """Flag of scripts/serve.py -> the value that a server must have for its run.

    It compares the model by architecture and sizes: on another machine its path may differ.
    """
    text = config.get_text_config()
    sizes = f"{text.num_hidden_layers} layers, hidden size {text.hidden_size}, vocabulary of {text.vocab_size}"
    model = f"{', '.join(config.architectures or ())} of {sizes}"
    return {"--model": model, "--max_model_len": max_model_len, "--dtype": dtype, "--head_dtype": head_dtype or dtype}


class Extension:
    """Methods for vLLM's workers, which import this file for them."""

    def own_fit(self) -> dict[str, object]:
        config, heads = self.vllm_config.model_config, head_dtypes(self.get_model())
        dtype = str(config.dtype).removeprefix("torch.")
        return fit_of(config.hf_config, config.max_model_len, dtype, ", ".join(heads))


async def check_key(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Asks for VLLM_API_KEY everywhere: vLLM does so where text is sampled, but not where weights are changed.

    A server without a key answers nobody.
    """
    key, given = os.environ.get("VLLM_API_KEY", ""), request.headers.get("authorization", "")
    if not key or not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
        return JSONResponse({"error": "this server wants its VLLM_API_KEY"}, 401)
    return await call_next(request)
