"""Weights on their way from the trainer to a generation server: a process group of the main rank and its workers.

vLLM's own weight transfer. On CUDA it is its backend `nccl`; for CPUs this file adds the same over gloo. Servers load
it with `--worker-extension-cls generation.weights.Extension --middleware generation.weights.check_key`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta

import torch
import vllm.distributed.utils
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup
from vllm.distributed.utils import StatelessProcessGroup, stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

Send = Callable[[Tensor], None]

# vLLM turns off the output of the whole process while gloo connects. Two threads that do so at once, for two servers,
# would leave it off; what others print meanwhile is lost.
vllm.distributed.utils.suppress_stdout = contextlib.nullcontext
PATIENCE = timedelta(minutes=10)  # of a worker that waits for a tensor of a trainer that may have gone


# The trainer's side ---------------------------------------------------------------------------------------------------


def open_link(listener: socket.socket, num_workers: int, device: torch.device, seconds: float) -> Send:
    """Meets a server's workers at the listening socket; the function returned sends a tensor to all of them.

    It raises RuntimeError where the server has gone, on CPU within `seconds`.
    """
    place = {"host": listener.getsockname()[0], "port": listener.getsockname()[1], "listen_socket": listener}
    place |= {"rank": 0, "world_size": 1 + num_workers}
    if device.type == "cpu":
        timeout = timedelta(seconds=seconds)
        group = stateless_init_torch_distributed_process_group(**place, backend="gloo", timeout=timeout)
        return lambda tensor: broadcast(group, tensor)
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    meeting = StatelessProcessGroup.create(**place, store_timeout=int(seconds))
    with unpinned_nccl_env():  # as the workers do
        communicator = PyNcclCommunicator(meeting, device)
    # The current stream: that of the gather before it and of the free after it.
    return lambda tensor: communicator.broadcast(tensor.contiguous(), src=0, stream=torch.cuda.current_stream())


def broadcast(group: ProcessGroup, tensor: Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor.contiguous()], options).wait()


# The server's side ----------------------------------------------------------------------------------------------------


class GlooEngine(NCCLWeightTransferEngine):
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

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        def arriving() -> Iterator[tuple[str, Tensor]]:
            rows = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
            for name, dtype, shape in rows:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                broadcast(self.group, tensor)
                yield name, tensor

        try:
            self.model.load_weights(arriving())
        except RuntimeError:  # the trainer has gone: only after an end, also of a part, can the next update begin
            super().finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        for module in self.model.modules():  # a tied head multiplies by a packed copy, which the reload does not renew
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self.group = None


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)


class Extension:
    """Of vLLM's workers. That they import this file is all that is needed."""


async def check_key(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """vLLM asks for VLLM_API_KEY where text is sampled, but not where weights are changed: this asks everywhere."""
    key, given = os.environ.get("VLLM_API_KEY", ""), request.headers.get("authorization", "")
    if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
        return JSONResponse({"error": "this server wants its VLLM_API_KEY"}, 401)
    return await call_next(request)
