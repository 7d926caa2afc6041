"""--router_replay: the experts that took each token in the engine, for the trainer to take again.

CUDA: vLLM returns them with a completion (its runner V2). CPU: the runner there (V1) does not, so
its routers are asked while they compute. What they choose is stored by the token's slot in the KV cache:
a prompt that is found in the cache has routes, too, those of the pass that computed it.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
from torch import Tensor, nn
from vllm import LLM, RequestOutput
from vllm.distributed.aux_output_connector import worker
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner

# A finished request -> [tokens - 1, layers, experts of a token], uint8, or uint16 of more than 256 experts. The last
# token was sampled, but never computed. Layers without experts count, and have zeros.
RoutesOf = Callable[[RequestOutput], np.ndarray]


def keep_on_each_rank() -> None:
    """CUDA, before the engine is made: vLLM 0.32 keeps routes on the first rank of an engine alone.

    With other executors that rank alone schedules. Here each does, and fails without routes.
    """
    worker.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)


def routes_reader(llm: LLM, is_cuda: bool) -> RoutesOf:
    """The function that returns the routes of a request, as soon as the engine has finished it."""
    return returned_routes if is_cuda else SlotRoutes(llm)


def returned_routes(request: RequestOutput) -> np.ndarray:
    routes = request.outputs[0].routed_experts
    assert len(routes) == num_computed(request), "vLLM returns the routes of all tokens but for the last one"
    return routes


def num_computed(request: RequestOutput) -> int:
    return len(request.prompt_token_ids) + len(request.outputs[0].token_ids) - 1


class SlotRoutes:
    """CPU: the routes of the tokens whose keys and values are in the cache of this rank's engine."""

    def __init__(self, llm: LLM) -> None:
        config = llm.llm_engine.vllm_config
        model, self.block_size = config.model_config, config.cache_config.block_size
        num_slots = config.cache_config.num_gpu_blocks * self.block_size
        shape = num_slots, model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        self.routes = np.zeros(shape, dtype=np.uint8 if model.get_num_experts() <= 256 else np.uint16)
        (self.runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        llm.apply_model(self.listen)

    def listen(self, model: nn.Module) -> None:
        """From now on the routers of vLLM's model say what they choose."""
        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self.keep, module.layer_id))

    def keep(self, layer: int, chosen_NA: Tensor) -> None:
        slots_N = next(iter(get_forward_context().slot_mapping.values()))  # the same in all layers
        self.routes[slots_N.numpy(), layer] = chosen_NA.numpy()

    def __call__(self, request: RequestOutput) -> np.ndarray:
        """A finished request has its blocks of the cache until the next step of the engine."""
        batch = self.runner.input_batch
        (name,) = (name for name in batch.req_id_to_index if name.rpartition("-")[0] == request.request_id)
        blocks = batch.block_table[0].get_numpy_array()[batch.req_id_to_index[name]]
        offsets = np.arange(num_computed(request))
        return self.routes[blocks[offsets // self.block_size] * self.block_size + offsets % self.block_size]
