"""What the CUDA branches rely on, without a GPU: how vLLM resolves our options on faked ones; sleep; signatures."""

import ast
import inspect
import json
import os
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

from command_line import parse_flags
from engine import vllm_setup
from engine.options import memory_errors
from flags import EngineSettings, Sampling
from fsdp_utils import World, begin_gather, fill_from_main
from gate.agreement import program_files
from helpers.programs import GPUS
from helpers.runs import PROGRAMS, ROOT, said, torchrun
from plan.dry_run import config_of
from smoke_inputs import SETUPS, make_model
from test_setups import launched

# How vLLM resolves our options ----------------------------------------------------------------------------------------

ENGINES = {  # set-up -> ranks per engine, sequences at a time: its share of a step, at most 512
    "qwq32b_8xh100": (8, 512),  # 2,560 in all
    "deepseek32b_lora_8gpu": (4, 32),
    "qwen25vl72b_lora_8xa100": (8, 8),
    "tulu8b_rlvr_7plus1": (1, 32),
    "qwen7b_simplerl_2x8xh100": (2, 512),  # 1,024 in all
    "replay": (2, 128),  # no set-up; vLLM returns routes by its runner V2 alone
}
FP32_LOGITS = ("qwen7b_simplerl_2x8xh100", "qwen25vl72b_lora_8xa100")  # are given --head_dtype float32 here
VISION = "Qwen2_5_VLForConditionalGeneration"
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "qwen2_5_vl": VISION}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory) -> dict[str, dict]:
    """Kind of GPU -> what `resolved` of tests/helpers/programs.py found for each of `ENGINES`."""
    folder, engines = tmp_path_factory.mktemp("resolved"), {}
    for name in ENGINES.keys() - {"replay"}:
        num_nodes, num_ranks, flags = launched(name)
        flags += ["--head_dtype", "float32"] if name in FP32_LOGITS else []
        flags += ["--engine", "colocated", "--steps_ahead", "0"] if "--engine" in flags else []
        config = config_of(parse_flags(flags).model)
        config.architectures = [ARCHITECTURES[config.model_type]]
        config.save_pretrained(folder / name)
        engines[name] = {"folder": str(folder / name), "flags": flags, "ranks": num_nodes * num_ranks}
    config = transformers.AutoConfig.for_model("qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(folder / "replay")
    flags = f"--model {folder} --train_data d --out_dir o --total_steps 1 --dtype bfloat16 --tensor_parallel_size 2"
    engines["replay"] = {"folder": str(folder / "replay"), "flags": [*flags.split(), "--router_replay"], "ranks": 4}
    (folder / "engines.json").write_text(json.dumps(engines))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    for rank, kind in enumerate(GPUS):
        command = [sys.executable, PROGRAMS, "resolved", kind, folder / "engines.json", folder / kind]
        said(command, environment | {"RANK": str(rank)})
    return {kind: json.loads((folder / kind).read_text()) for kind in GPUS}


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize("name", ENGINES)
def test_vllm_makes_of_our_options_what_the_engine_relies_on(name, kind, resolved):
    found = resolved[kind][name]
    tp_size, sequences = ENGINES[name]
    captured = found.pop("captured")
    assert found == {
        "runner": 2, "is_asynchronous": True, "graphs": "FULL_AND_PIECEWISE", "sequences": sequences,
        "batched_tokens": {"H100": 16384, "A100": 8192}[kind], "has_prefix_cache": True, "sleeps": True,
        "logprobs": "processed_logprobs",
        "head_dtype": "torch.float32" if name in FP32_LOGITS else "torch.bfloat16",
        "tries_flashinfer": False, "experts": "triton", "linear_attention": "triton", "fuses_all_reduce": False,
        "has_custom_all_reduce": True, "executor": "external_launcher",
        "worker": "vllm.v1.worker.gpu_worker.Worker", "tp_size": tp_size, "returns_routes": name == "replay",
    }  # fmt: skip
    assert sequences in captured, "a batch of all sequences has a CUDA graph of its own size"
    assert captured[-1] <= 512
    assert resolved[kind]["log level"] == "ERROR"
    assert not resolved[kind]["adds with FlashInfer"], "it would look for nvcc"


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.usefixtures("rollout")  # vLLM is imported as an engine does
def test_each_rank_of_an_engine_keeps_routes(is_changed, monkeypatch):
    """By itself vLLM keeps them on the first rank alone, where other executors have a scheduler."""
    worker = pkgutil.resolve_name("vllm.distributed.aux_output_connector.worker")
    monkeypatch.setattr(worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=False))
    if is_changed:
        pkgutil.resolve_name("extras.models.routes").keep_on_each_rank()
    assert inspect.getsource(worker).count("get_tp_group()") == 1, "it is asked for nothing else"
    capturer = SimpleNamespace(shape_per_token=(2, 2), output_dtype_name="uint8")
    monkeypatch.setattr(worker, "RoutedExpertsCapturer", lambda **_: capturer)
    monkeypatch.setattr(worker, "bind_routed_experts_capturer", lambda model, capturer: None)
    monkeypatch.setattr(worker, "resolve_kv_cache_block_sizes", lambda *_: (16, 16))
    scheduler = SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2)
    config = SimpleNamespace(scheduler_config=scheduler, max_concurrent_batches=2)
    config.aux_output_config, cache = SimpleNamespace(max_bytes=None), SimpleNamespace(num_blocks=4)
    connector = worker.AuxOutputWorkerConnector(vllm_config=config, model=torch.nn.Module(), kv_cache_config=cache)
    assert (connector._buffer is not None) == is_changed  # which is asked at each step
    connector.close()


@pytest.mark.parametrize(("found", "words"), [(["bfloat16"], "in bfloat16; leave"), ([], "no layer that knows it")])
def test_an_engine_that_has_no_logits_of_head_dtype_is_refused(found, words, rollout, monkeypatch):
    llm = SimpleNamespace(apply_model=lambda function: [found])
    with pytest.raises(ValueError, match=f"--head_dtype float32: .*{words}"):
        engine_on_cuda(rollout, llm, monkeypatch, head_dtype="float32")
    engine_on_cuda(rollout, llm, monkeypatch)


# Sleep, wake-up and new weights ---------------------------------------------------------------------------------------

CHANGES = ["sleep(2)", "wake_up(weights)", "reload_weights", "wake_up(kv_cache)"]


class RecordedLLM:
    """Stands for `vllm.LLM`: notes what is called, and raises `error` where it is told to."""

    def __init__(self, fails_at: str = "", error: Exception | None = None) -> None:
        self.calls, self.fails_at, self.error = [], fails_at, error
        self.queue = ["a step ahead of the outputs, of which nobody has taken one"]
        core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=self.queue))
        self.llm_engine = SimpleNamespace(engine_core=core, step=self.queue.pop)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_at:
            raise self.error

    def apply_model(self, function: Callable) -> list[list[str]]:
        return [["float32"]]  # what the engine's start asks for: the dtypes of its logits

    def sleep(self, level: int) -> None:
        self.note(f"sleep({level})")

    def wake_up(self, tags: list[str]) -> bool:
        self.note(f"wake_up({', '.join(tags)})")
        return tags == ["kv_cache"]

    def collective_rpc(self, method: str, kwargs: dict[str, Iterator]) -> None:
        self.weights = dict(kwargs["weights_iterator"])
        self.note(method)

    def reset_prefix_cache(self) -> bool:
        assert not self.queue, "the step holds blocks of the cache"
        raise InterruptedError("the engine may sample, which is as far as these tests go")


@pytest.fixture(scope="module")
def rollout() -> ModuleType:
    with mock.patch.dict(os.environ):  # what it sets there is not for the programs that other tests start
        import rollout
    return rollout


def engine_on_cuda(rollout: ModuleType, llm: object, monkeypatch: pytest.MonkeyPatch, **settings: object) -> object:
    """The real `Engine` around the stand-in, or what a function returns for it."""
    monkeypatch.setattr(rollout, "LLM", lambda **options: llm() if callable(llm) else llm)
    monkeypatch.setattr("engine.options.load_config", lambda path: Qwen2Config())
    world = World(trainer_rank=0, num_trainers=1, tp_size=1, device=torch.device("cuda", 0))
    return rollout.Engine("m", None, world, EngineSettings(64, **settings))


def change(engine: object) -> None:
    engine.sleep()
    engine.sync([("name", torch.ones(1))])


def test_weights_wake_before_the_transfer_and_the_cache_after_it(rollout, monkeypatch):
    llm = RecordedLLM()
    engine = engine_on_cuda(rollout, llm, monkeypatch)
    engine.sync([("name", torch.zeros(1))])
    assert llm.calls == ["reload_weights"], "it is awake from the start"
    llm.calls.clear()
    engine.sleep()
    engine.sleep()
    assert llm.calls == ["sleep(2)"], "an engine that sleeps is left alone"
    with pytest.raises(AssertionError, match="asleep"):
        engine.sample([], None, (1,))
    engine.sync([("name", torch.ones(1))])
    assert llm.calls == CHANGES and llm.weights == {"name": torch.ones(1)}
    with pytest.raises(InterruptedError, match="may sample"):
        engine.sample([], None, (1,))
    monkeypatch.setattr(llm, "wake_up", lambda tags: False)
    with pytest.raises(AssertionError, match="wait for ever"):  # vLLM only warns where a tag does not sleep
        change(engine)


@pytest.mark.parametrize("call", CHANGES)
def test_an_engine_whose_change_has_failed_never_samples_again(call, rollout, monkeypatch):
    """Nor is it tried again: a second reload would mix the weights of both (reload/layerwise.py)."""
    llm = RecordedLLM(call, RuntimeError("NCCL has lost a rank"))
    engine = engine_on_cuda(rollout, llm, monkeypatch)
    with pytest.raises(RuntimeError, match="NCCL has lost a rank"):
        change(engine)
    assert llm.calls == CHANGES[: CHANGES.index(call) + 1], "nothing is done after a failure"
    llm.fails_at = ""
    for attempt in (lambda: engine.sample([], None, (1,)), engine.sleep, lambda: change(engine)):
        with pytest.raises(AssertionError, match="broken|failed"):
            attempt()
    assert len(llm.calls) == CHANGES.index(call) + 1


def test_memory_segments_expand_only_after_graph_capture(rollout, monkeypatch):
    """Custom all-reduce cannot register graphs over them (vLLM issue 42609)."""
    order = []
    monkeypatch.setattr(rollout, "set_allocator", lambda is_expandable: order.append(f"expandable {is_expandable}"))
    engine_on_cuda(rollout, lambda: order.append("captured") or RecordedLLM(), monkeypatch, enforce_eager=False)
    assert order == ["captured", "expandable True"]


def test_an_engine_that_lacks_memory_at_the_start_says_so(monkeypatch):
    """Other errors are left alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * 2**30, 80 * 2**30))
    free = "Free memory on device cuda:0 (10.0/80.0 GiB) on startup is less than desired GPU memory utilization"
    words = "engine starts, 10.0 of 80.0 GiB .*less than desired.*; change --gpu_memory_utilization"
    with pytest.raises(MemoryError, match=words), memory_errors():
        raise ValueError(f"{free} (0.9, 72.0 GiB). Decrease GPU memory utilization or reduce GPU memory used.")
    for error in (RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("no such model")):
        with pytest.raises(type(error), match=str(error)), memory_errors():
            raise error


def test_an_engine_of_llama_loses_nothing_in_its_sleep(tmp_path):
    """Qwen2: tests/test_rollout.py; Qwen2.5-VL: tests/extras/test_vision.py."""
    make_model(SETUPS["tulu8b_rlvr_7plus1"], tmp_path / "model")
    arguments = "engines:hidden", 1, 2, tmp_path / "found.pt", tmp_path / "model"
    done = torchrun(1, "tests/helpers/distributed.py", *arguments)
    assert "WARNING" not in done.stdout, "vLLM's warnings are shown"
    found = torch.load(tmp_path / "found.pt")
    assert found["hidden"] == [] and [name.rpartition(".")[2] for name in found["planted"]] == ["planted"]


# Signatures -----------------------------------------------------------------------------------------------------------

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
# What only objects have: class -> names that we read, and methods that we call or take the place of, with their first
# parameters.
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
    "peft.tuners.lora:LoraLayer": "lora_A lora_B scaling lora_dropout reset_lora_parameters(adapter_name)",
}


def foreign_uses() -> Iterator[tuple[str, str, ast.Call | None]]:
    """(file:line, place, call) of imports of `FOREIGN`, calls of what they name, calls of `METHODS`."""
    for path in program_files():
        places, tree = {}, ast.parse(path.read_text())  # own name -> "module:" or "module:name."
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


@pytest.mark.usefixtures("rollout")
def test_what_we_import_is_there_and_takes_what_we_give():
    """An upgrade that moves a name, or a parameter that we give, is told here by file and line."""
    faults, bound = [], Counter()
    for where, place, call in foreign_uses():
        try:
            found = resolved_name(place)
            starred = {ast.unparse(each) for each in (call.args if call else []) if isinstance(each, ast.Starred)}
            if call is None or starred - {"*ends"}:  # whose lengths are not in the source
                continue
            signature = inspect.signature(found)
            keywords = [keyword.arg for keyword in call.keywords]
            given = [*call.args, *starred]  # the ends, of queries and of keys, are two
            bind = signature.bind_partial if None in keywords else signature.bind
            bind(*given, **dict.fromkeys(filter(None, keywords)))
            bound[place] += 1
        except ValueError:  # written in C, without a signature
            continue
        except (TypeError, AttributeError, ImportError) as error:
            faults.append(f"{where}: {place}: {error}")
    assert not faults, "\n".join(faults)
    assert bound.total() > 100
    unused = {place for places in METHODS.values() for place in places} - bound.keys()
    assert not unused, "no line calls it: take it out of the list"


@pytest.mark.parametrize("place", OBJECTS)
@pytest.mark.usefixtures("rollout")
def test_objects_have_what_we_read_and_call(place):
    """Attributes are looked for in the source: an object would have to be made."""
    kind = pkgutil.resolve_name(place)
    source = "".join(inspect.getsource(each) for each in kind.__mro__ if each.__module__.partition(".")[0] in FOREIGN)
    for name, has_call, parameters in re.findall(r"(\w+)(\()?([\w,]*)\)?", OBJECTS[place]):
        if not has_call:
            assert hasattr(kind, name) or re.search(rf"\bself\.{name}\b|^    {name}:", source, re.MULTILINE), name
            continue
        method = inspect.getattr_static(kind, name)
        if isinstance(method, property):
            continue
        found = [*inspect.signature(getattr(method, "__func__", method)).parameters]
        wanted = [each for each in parameters.split(",") if each]
        own = found[1:] if found[0] == "self" else found
        assert own[: len(wanted)] == wanted, f"{name} takes {own}"


@pytest.mark.usefixtures("rollout")
def test_what_we_name_in_vllm_is_there():
    version = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("vllm=="))
    assert f"vLLM {version.split()[0].removeprefix('vllm==')}," in vllm_setup.__doc__, "look at each line of it again"
    tried = pkgutil.resolve_name("vllm.engine.arg_utils:EngineArgs")  # by scripts/check_gpu.sh
    assert tried.sleep_mode_offload_cudagraph is False
    sampling = Sampling(num_samples=2, temperature=0.6, max_completion_tokens=9, top_p=0.95).for_vllm(7)
    signature = inspect.signature(pkgutil.resolve_name("vllm:SamplingParams"))
    signature.bind(**sampling, stop_token_ids=[], flat_logprobs=True)


class Copies(TorchDispatchMode):
    """Notes each copy to another device: (dtype before, dtype after, whether the host waits)."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.device != args[0].device:
            self.found.append((args[0].dtype, out.dtype, not kwargs.get("non_blocking")))
        return out


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_cross_the_bus_in_the_dtype_that_they_have(num_ranks):
    """In one blocking step torch would convert on the host. "meta" stands for the GPU."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    parts = [torch.ones(4, 3, device=device) for device in ("cpu", "meta")]
    on_host, on_gpu = (DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for part in parts)
    mesh._device_type = "meta"
    try:
        with Copies() as copies:
            assert begin_gather(on_host, torch.bfloat16)().dtype == torch.bfloat16  # a sync with --offload all
            for target in (on_gpu, torch.empty(4 * num_ranks, 3, device="meta")):
                fill_from_main(target, torch.ones(4 * num_ranks, 3, dtype=torch.bfloat16))  # as in the file
    finally:
        dist.destroy_process_group()
    assert copies.found == [(torch.float32, torch.float32, False)] + 2 * [(torch.bfloat16, torch.bfloat16, False)]
