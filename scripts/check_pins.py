"""The day a pin moves: whether the libraries still have what this program imports, calls and reads of them.

    python scripts/check_pins.py

It compares names and parameters, each at its line of the program, with the packages that are installed; it ends with
status 1 if one differs. What the program relies on beyond that, how the libraries behave, is what tests/ tries.
"""

import ast
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from vllm import SamplingParams
from vllm.distributed.utils import StatelessProcessGroup
from vllm.engine.arg_utils import EngineArgs

from density import files
from extras.servers.weights import GlooEngine
from flags import Sampling

FOREIGN = {"vllm", "torch", "transformers", "pebble", "peft", "safetensors"}
WORKER, RUNNER = "vllm.v1.worker.gpu_worker:Worker", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
# Methods that only CUDA runs: how our code writes a call -> where it is defined.
METHODS = {
    "self.llm.sleep": ["vllm.entrypoints.llm:LLM.sleep"],
    "self.llm.wake_up": ["vllm.entrypoints.llm:LLM.wake_up"],
    "self.llm.llm_engine.engine_core.reset_encoder_cache": [
        f"{kind}.reset_encoder_cache" for kind in ("vllm.v1.engine.core_client:InprocClient", WORKER, RUNNER)
    ],
    "reload_weights": [  # the worker and its runners (V2, V1), with the keywords of `collective_rpc`
        f"{kind}.reload_weights" for kind in (WORKER, RUNNER, "vllm.v1.worker.gpu_model_runner:GPUModelRunner")
    ],
}
# What only objects have: class -> names that we read, and methods that we call, also by their names, or take the place
# of, with their first parameters.
OBJECTS = {
    "pebble:ProcessPool": "_pool_manager _context schedule(function,args,kwargs,timeout) stop() join(timeout)",
    "pebble.pool.process:PoolManager": "worker_manager task_manager __init__(context,mp_context) update_workers() "
    "process_next_message(timeout)",
    "pebble.pool.process:WorkerManager": "pool_channel workers_number inspect_workers() create_workers()",
    "pebble.pool.process:TaskManager": "tasks task_done(task_id,result)",
    "pebble.pool.base_pool:Task": "id worker_id",
    "pebble.pool.channel:Channel": "poll",
    "vllm:LLM": "llm_engine request_counter enqueue(prompts,sampling_params) apply_model(func) reset_prefix_cache() "
    "collective_rpc(method)",
    "vllm.v1.engine.llm_engine:LLMEngine": "engine_core output_processor step() has_unfinished_requests() "
    "abort_request(request_ids,internal)",
    "vllm.v1.engine.core_client:InprocClient": "engine_core shutdown()",
    "vllm.v1.engine.core:EngineCore": "scheduler batch_queue",
    "vllm.v1.core.sched.scheduler:Scheduler": "kv_cache_manager",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "block_pool",
    "vllm.v1.core.block_pool:BlockPool": "cached_block_hash_to_block",
    "vllm.v1.engine.output_processor:OutputProcessor": "request_states",
    "vllm.v1.engine.output_processor:RequestState": "external_req_id logprobs_processor detokenizer",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": "output_token_ids()",
    "vllm.logprobs:FlatLogprobs": "logprobs",
    "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferEngine": "model_update_group parallel_config "
    "device model receive_weights(update_info) init_transfer_engine(init_info) finish_weight_update() shutdown() "
    "parse_update_info(update_dict)",
    "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferUpdateInfo": "names dtype_names shapes",
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod": "process_weights_after_loading"
    "(layer)",
    "vllm:RequestOutput": "request_id prompt_token_ids outputs finished",
    "vllm.outputs:CompletionOutput": "token_ids logprobs finish_reason routed_experts",
    "vllm.config:VllmConfig": "model_config cache_config",
    "vllm.config:ModelConfig": "get_num_experts() get_num_experts_per_tok() get_total_num_hidden_layers()",
    "vllm.config:CacheConfig": "num_gpu_blocks block_size",
    "vllm.v1.worker.cpu_worker:CPUWorker": "model_runner",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "input_batch",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_id_to_index block_table",
    "vllm.v1.worker.block_table:MultiGroupBlockTable": "__getitem__(idx)",
    "vllm.v1.worker.block_table:BlockTable": "get_numpy_array()",
    "vllm.forward_context:ForwardContext": "slot_mapping",
    "vllm.model_executor.layers.fused_moe.layer:MoERunner": "router layer_id",
    "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter": "set_capture_fn(capture_fn)",
    "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": "quant_method",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": "moe_kernel "
    "process_weights_after_loading(layer)",
    "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEKernel": "fused_experts",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts": "process_weights_after_loading"
    "(layer)",
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed": "make_group_name",
    "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeTopKRouter": "num_experts norm_topk_prob "
    "forward(hidden_states)",
    "transformers.models.qwen3_5.modeling_qwen3_5:Qwen3_5DecoderLayer": "linear_attn self_attn",
    "transformers.models.qwen3_5.modeling_qwen3_5:Qwen3_5GatedDeltaNet": "forward(hidden_states)",
    "vllm.model_executor.models.qwen3_5:Qwen3_5ForCausalLM": "hf_to_vllm_mapper load_weights(weights)",
    "transformers:PreTrainedModel": "_supports_attention_backend _keys_to_ignore_on_load_unexpected get_decoder() "
    "base_model_prefix",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator": "broadcast(tensor,src,stream)",
    "peft.tuners.lora:LoraLayer": "lora_A lora_B scaling lora_dropout reset_lora_parameters(adapter_name)",
}


def foreign_uses() -> Iterator[tuple[str, str, ast.Call | None]]:
    """(file:line, place, call) of imports of `FOREIGN`, calls of what they name, calls of `METHODS`."""
    for path in files().values():
        places, tree = {}, ast.parse(path.read_text("utf-8"))  # own name -> "module:" or "module:name."
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                places |= {each.asname or each.name: f"{node.module}:{each.name}." for each in node.names}
            elif isinstance(node, ast.Import):
                places |= {each.asname or each.name: f"{each.name}:" for each in node.names}
        places = {own: place for own, place in places.items() if re.split("[.:]", place)[0] in FOREIGN}
        yield from ((path.name, place[:-1], None) for place in places.values())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            where, name = f"{path.name}:{call.lineno}", ast.unparse(call.func)
            own, _, rest = name.partition(".")
            if own in places and "(" not in rest:
                yield where, (places[own] + rest).strip("."), call
            if name == "self.llm.collective_rpc":  # tells the workers what to call
                keywords = [ast.keyword(key.value) for key in call.keywords[0].value.keys]
                name, call = call.args[0].value, ast.Call(call.func, [], keywords)
            bound = ast.Call(call.func, [ast.Name("self"), *call.args], call.keywords)
            yield from ((where, place, bound) for place in METHODS.get(name, []))


def resolved_name(place: str) -> object:
    try:
        return pkgutil.resolve_name(place)
    except AttributeError:  # a module that its package does not import
        return pkgutil.resolve_name(place.replace(":", "."))


def fault_of_use(place: str, call: ast.Call | None) -> str:
    """What is wrong with a name that we import, or with the arguments of a call; empty if it fits."""
    try:
        found = resolved_name(place)
        starred = {ast.unparse(each) for each in (call.args if call else []) if isinstance(each, ast.Starred)}
        if call is None or starred - {"*ends"}:  # whose lengths are not in the source
            return ""
        signature = inspect.signature(found)
        keywords = [keyword.arg for keyword in call.keywords]
        given = [*call.args, *starred]  # the ends, of queries and of keys, are two
        bind = signature.bind_partial if None in keywords else signature.bind
        bind(*given, **dict.fromkeys(filter(None, keywords)))
    except ValueError:  # written in C, without a signature
        return ""
    except (TypeError, AttributeError, ImportError) as error:
        return str(error)
    return ""


def faults_of_object(place: str, wanted: str) -> Iterator[str]:
    """Attributes are looked for in the source: an object would have to be made."""
    kind = pkgutil.resolve_name(place)
    source = "".join(inspect.getsource(each) for each in kind.__mro__ if each.__module__.partition(".")[0] in FOREIGN)
    for name, has_call, parameters in re.findall(r"(\w+)(\()?([\w,]*)\)?", wanted):
        if not has_call:
            if not hasattr(kind, name) and not re.search(rf"\bself\.{name}\b|^    {name}:", source, re.MULTILINE):
                yield f"{place} has no {name}"
            continue
        method = inspect.getattr_static(kind, name, None)
        if method is None:
            yield f"{place} has no {name}"
        elif not isinstance(method, property):
            found = [*inspect.signature(getattr(method, "__func__", method)).parameters]
            own = found[1:] if found[0] == "self" else found
            needed = [each for each in parameters.split(",") if each]
            if own[: len(needed)] != needed:
                yield f"{place}.{name} takes {own}, needed are {needed}"


def faults_of_records() -> Iterator[str]:
    """Of what we hand over whole: the settings of a sampling, and what sends weights to a generation server."""
    sampling = Sampling(num_samples=2, temperature=0.6, max_completion_tokens=9, top_p=0.95).for_vllm(7)
    GlooEngine.update_info_cls(names=["a"], dtype_names=["float32"], shapes=[[2]])
    info = GlooEngine.init_info_cls(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2)
    if info.packed:
        yield "weights are packed for a transfer by default: ours are sent one by one"
    if EngineArgs.sleep_mode_offload_cudagraph:
        yield "CUDA graphs are offloaded in a sleep by default: scripts/check_gpu.py compares both"
    group = dict.fromkeys(("host", "port", "rank", "world_size", "listen_socket", "store_timeout"))
    for function, given in ((SamplingParams, sampling | {"stop_token_ids": [], "flat_logprobs": True}),
                            (StatelessProcessGroup.create, group)):  # fmt: skip
        try:
            inspect.signature(function).bind(**given)
        except TypeError as error:
            yield f"{function.__qualname__}: {error}"


def main() -> None:
    uses, faults = list(foreign_uses()), list(faults_of_records())
    wrong = [(where, place, fault_of_use(place, call)) for where, place, call in uses]
    faults += [f"{where}: {place}: {said}" for where, place, said in wrong if said]
    for place, wanted in OBJECTS.items():
        faults += faults_of_object(place, wanted)
    known = {place for _, place, _ in uses}
    faults += [f"{place}: no line calls it" for places in METHODS.values() for place in places if place not in known]
    print("\n".join(faults) or f"{len(uses)} uses and {len(OBJECTS)} classes are as they were")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
