"""CUDA by fakes: what the CUDA branches do, without a GPU, and what they rely on."""

import inspect
import itertools
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial, reduce
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import varlen
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

import fsdp_utils
import model.head
import train_grpo
from command_line import parse_flags
from engine import vllm_setup
from engine.options import EngineDemand, engine_options
from extras.models.adamw import ChunkedAdamW
from extras.models.vision import Vision
from flags import EngineSettings, Servers
from fsdp_utils import World, begin_gather, fill_from_main
from gate import machine
from gate.checks import check_flags
from gate.inputs import check_places, largest_share
from gate.machine import check_device
from gate.models import length_limits
from helpers.made_up import flags, load_policy, make_rollout
from helpers.runs import CALL, ROOT, name_of, said
from model import attention, sizes
from model.layout import Layout
from packing import pack
from plan.dry_run import config_of
from test_setups import launched
from tests.model.test_attention import SEVERAL_RECTANGLES, WINDOW, random_model
from tests.model.test_optimizer import chunked, gradients, train
from tests.watch.test_memory import LOWER_BATCH, RANK_3, ended_with
from watch import memory as watch
from watch.memory import MemoryWatch

# How vLLM resolves our options ----------------------------------------------------------------------------------------

GIB = 2**30
GPUS = {  # name, compute capability, multiprocessors, bytes
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 85_017_493_504),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 85_094_039_552),
}


def fake(kind: str) -> None:
    """From here on vLLM believes in a node of 8 such GPUs, with Triton and FlashInfer installed."""
    for kernels in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn"):
        sys.modules[kernels] = mock.MagicMock(__spec__=ModuleSpec(kernels, None))
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    name, capability, multiprocessors, num_bytes = GPUS[kind]
    answers = {
        "get_device_name": name, "get_device_capability": DeviceCapability(*capability), "device_count": 8,
        "num_compute_units": multiprocessors, "get_device_total_memory": num_bytes, "is_fully_connected": True,
        "is_pin_memory_available": True, "is_cumem_allocator_available": True, "is_sleep_mode_available": True,
    }  # fmt: skip
    methods = {key: classmethod(lambda *_, value=value, **__: value) for key, value in answers.items()}
    vllm.platforms._current_platform = type("Faked", (CudaPlatformBase,), methods)()
    torch.cuda.device_count = torch.accelerator.device_count = lambda: 8
    torch.cuda.get_device_capability = lambda *_: capability

    import vllm._custom_ops
    import vllm.config.compilation
    import vllm.config.vllm
    import vllm.utils.flashinfer

    vllm._custom_ops.cutlass_scaled_mm_supports_block_fp8 = lambda _: False  # asked while modules are imported
    vllm.config.vllm.HAS_TRITON = True
    vllm.utils.flashinfer.has_flashinfer = lambda: True
    sizes = "default_fi_allreduce_fusion_max_size_mb"  # in a module that needs the kernels
    setattr(vllm.config.compilation.PassConfig, sizes, staticmethod(dict))


def configuration(options: dict[str, object], num_ranks: int) -> object:
    """The `VllmConfig` that `vllm.LLM` would start with."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    stopped = mock.patch.object(LLMEngine, "from_engine_args", side_effect=InterruptedError)
    with stopped as start, suppress(InterruptedError):
        LLM(**options)
    given = start.call_args.kwargs
    return given["engine_args"].create_engine_config(given["usage_context"])


def resolve(kind: str, engines: str, output: str) -> None:
    """What vLLM makes of our options on a kind of GPU that is not there; no engine is started, without weights.

    `engines` is a file (JSON): name -> folder with a config.json, the flags of train_grpo.py, number of ranks. The
    platform's answers about the GPU are made up; vLLM itself decides all the rest.
    """
    assert "vllm" not in sys.modules, "it has asked for GPUs already"
    fake(kind)
    import vllm.envs

    import rollout  # noqa: F401  it sets the environment of vLLM

    adds = vllm.envs.VLLM_ALLREDUCE_USE_FLASHINFER
    found = {"log level": os.environ["VLLM_LOGGING_LEVEL"], "adds with FlashInfer": adds}
    for name, engine in json.loads(Path(engines).read_text()).items():
        args = parse_flags(engine["flags"])
        world = World(0, engine["ranks"], args.tensor_parallel_size, torch.device("cuda"))
        settings = EngineSettings.from_flags(args, max_model_len=sum(length_limits(args)))
        vision = SimpleNamespace(size={"shortest_edge": 3136, "longest_edge": args.max_pixels})
        sequences = largest_share([(args.prompts_per_step, args.group_size)], world.num_engines)
        demand = EngineDemand(sequences, Vision.engine_options(vision, 1) if args.image_column else {})
        options = engine_options(engine["folder"], settings, True, world.tp_size, demand)
        read = partial(reduce, getattr)
        config = configuration(options, engine["ranks"])
        found[name] = {path: read(path.split("."), config) for path in [*ALIKE, *APART]}
        found[name] |= config.additional_config
    Path(output).write_text(json.dumps(found, default=str))


ENGINES = {  # set-up -> ranks per engine, sequences at a time: its share of a step, at most 512
    "qwq32b_8xh100": (8, 512),  # 2,560 in all
    "deepseek32b_lora_8gpu": (4, 32),
    "qwen25vl72b_lora_8xa100": (8, 8),
    "tulu8b_rlvr_7plus1": (1, 32),
    "qwen7b_simplerl_2x8xh100": (2, 512),  # 1,024 in all
    "replay": (2, 128),  # no set-up; vLLM returns routes by its runner V2 alone
}
ALIKE = {  # what a run depends on: place in vLLM's config -> value
    "use_v2_model_runner": True, "scheduler_config.async_scheduling": True,
    "compilation_config.cudagraph_mode.name": "FULL_AND_PIECEWISE", "cache_config.enable_prefix_caching": True,
    "model_config.enable_sleep_mode": True, "model_config.enable_cumem_allocator": True,
    "model_config.sleep_mode_backend": "cumem", "model_config.logprobs_mode": "processed_logprobs",
    "kernel_config.enable_flashinfer_autotune": False, "kernel_config.moe_backend": "triton",
    "compilation_config.pass_config.fuse_allreduce_rms": False, "parallel_config.disable_custom_all_reduce": False,
    "parallel_config.distributed_executor_backend": "external_launcher",
    "parallel_config.worker_cls": "vllm.v1.worker.gpu_worker.Worker",
}  # fmt: skip
APART = (  # and what differs between engines and GPUs
    "scheduler_config.max_num_seqs", "scheduler_config.max_num_batched_tokens", "model_config.head_dtype",
    "parallel_config.tensor_parallel_size", "aux_output_config.enabled", "compilation_config.cudagraph_capture_sizes",
)  # fmt: skip
FP32_LOGITS = ("qwen7b_simplerl_2x8xh100", "qwen25vl72b_lora_8xa100")  # are given --head_dtype float32 here
VISION = "Qwen2_5_VLForConditionalGeneration"
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "qwen2_5_vl": VISION}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory) -> dict[str, dict]:
    """Kind of GPU -> what `resolve` found for each of `ENGINES`."""
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
        command = [sys.executable, CALL, name_of(resolve), kind, folder / "engines.json", folder / kind]
        said(command, environment | {"RANK": str(rank)})
    return {kind: json.loads((folder / kind).read_text()) for kind in GPUS}


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize("name", ENGINES)
def test_vllm_makes_of_our_options_what_the_engine_relies_on(name, kind, resolved):
    found, (tp_size, sequences) = resolved[kind][name], ENGINES[name]
    dtype = "torch.float32" if name in FP32_LOGITS else "torch.bfloat16"
    apart = [sequences, {"H100": 16384, "A100": 8192}[kind], dtype, tp_size, name == "replay"]
    captured = found.pop("compilation_config.cudagraph_capture_sizes")
    expected = ALIKE | dict(zip(APART[:-1], apart, strict=True)) | {"gdn_prefill_backend": "triton"}
    assert {path: found[path] for path in expected} == expected
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
    return rollout.Engine("m", SimpleNamespace(eos_token_id=2), world, EngineSettings(64, **settings))


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
    engine.sleep()
    with pytest.raises(AssertionError, match="wait for ever"):  # vLLM only warns where a tag does not sleep
        engine.sync([("name", torch.ones(1))])


@pytest.mark.parametrize("call", CHANGES)
def test_an_engine_whose_change_has_failed_never_samples_again(call, rollout, monkeypatch):
    """Nor is it tried again: a second reload would mix the weights of both (reload/layerwise.py)."""
    llm = RecordedLLM(call, RuntimeError("NCCL has lost a rank"))
    engine = engine_on_cuda(rollout, llm, monkeypatch)
    sample, sync = partial(engine.sample, [], None, (1,)), partial(engine.sync, [("name", torch.ones(1))])
    with pytest.raises(RuntimeError, match="NCCL has lost a rank"):
        engine.sleep()
        sync()
    assert llm.calls == CHANGES[: CHANGES.index(call) + 1], "nothing is done after a failure"
    llm.fails_at = ""
    for attempt in (sample, engine.sleep, sync):
        with pytest.raises(AssertionError, match="broken|failed"):
            attempt()
    assert len(llm.calls) == CHANGES.index(call) + 1


def test_memory_segments_expand_only_after_graph_capture(rollout, monkeypatch):
    """Custom all-reduce cannot register graphs over them (vLLM issue 42609)."""
    order = []
    monkeypatch.setattr(rollout, "set_allocator", lambda is_expandable: order.append(f"expandable {is_expandable}"))
    engine_on_cuda(rollout, lambda: order.append("captured") or RecordedLLM(), monkeypatch, enforce_eager=False)
    assert order == ["captured", "expandable True"]


def test_a_pin_that_has_moved_is_told():
    """Names and signatures are then compared by scripts/check_pins.py."""
    version = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("vllm=="))
    assert f"vLLM {version.split()[0].removeprefix('vllm==')}," in vllm_setup.__doc__, "look at each line of it again"


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


@pytest.mark.parametrize(("capability", "error"), [(9, None), (9, ImportError("not installed")), (10, None)])
def test_flash_attention_3_is_requested_on_hopper_before_checks(capability, error, monkeypatch):
    activate, checked = mock.Mock(side_effect=error), []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr("gate.machine.activate_flash_attention_impl", activate)
    monkeypatch.setattr("gate.machine.check_alignment", lambda device: checked.append(activate.called))
    for share_prompts in (False, True):
        check_device(torch.device("cuda"), share_prompts)
        assert checked == [capability == 9] * share_prompts


def test_on_a_gpu_fp32_logits_need_no_copy_of_the_weight():
    """By the shapes of torch's own kernel, on the meta device."""
    hidden, weight = (torch.empty(n, 8, dtype=torch.bfloat16, device="meta") for n in (3, 5))
    logits = model.head.chunk_logits(hidden, weight, torch.float32)
    assert (logits.shape, logits.dtype) == ((3, 5), torch.float32)


@pytest.mark.parametrize(("gib", "changes", "growth"), [
    ([80.0, 80.0], {}, 8),
    ([80.0, 34.0], {}, 2),  # the smallest card decides for all ranks
    ([30.0, 30.0], {}, 1),  # the least, however little there is
    ([80.0, 80.0], {"micro_batch_tokens": 3000}, 4),  # all of them at once
    ([80.0, 80.0], {"kl_over": "vocabulary", "kl_coef": 1.0}, 1),  # these chunks have their own size
    ([80.0, 80.0], {"model": "no/such-model"}, 1),  # the dry run does not know it
])  # fmt: skip
def test_one_decision_for_a_run_is_how_many_logits_are_made_at_a_time(gib, changes, growth, monkeypatch):
    """By the dry run, for the whole card: what happens to be free plays no part, so a continued run decides alike."""
    properties = SimpleNamespace(total_memory=gib[0] * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("what is free now"))
    monkeypatch.setattr(machine, "gather_from_ranks", lambda own: [own, gib[1] * 2**30])
    limits = {"model": "Qwen/Qwen2.5-1.5B", "micro_batch_tokens": 16384, "gradient_checkpointing": True}
    args = flags(**limits | {"dtype": "bfloat16", "max_prompt_tokens": 512, "max_completion_tokens": 512} | changes)
    world = SimpleNamespace(device=torch.device("cuda"))
    assert machine.head_growth(args, world) == growth
    world.device = torch.device("cpu")
    assert machine.head_growth(args, world) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_chunks_of_optimizer_state_come_and_go_in_turn(dtype, monkeypatch):
    """One comes while another goes back, on two streams, after the gradients, before the host goes on."""
    start, grads = torch.randn(1000, generator=torch.Generator().manual_seed(2)).to(dtype), gradients(2)
    monkeypatch.setattr(sizes, "OPTIMIZER_CHUNK", 300)
    wanted = chunked(start)
    parameter = train(wanted, grads)
    order, streams, update = [], ["main"], ChunkedAdamW._update_chunk  # what is queued; the streams in use
    names = itertools.cycle(["side 0", "side 1"])

    def make_stream() -> SimpleNamespace:
        name = next(names)
        return SimpleNamespace(name=name, wait_stream=lambda other: order.append(f"{name} waits for {other}"))

    @contextmanager
    def use(stream: SimpleNamespace) -> Iterator[None]:
        streams.append(stream.name)
        yield
        streams.pop()

    def noted(chunk: dict[str, torch.Tensor], *rest: object) -> None:
        order.append(f"{streams[-1]}: {len(chunk['gradient'])}")
        update(chunk, *rest)

    fakes = {"is_available": lambda: True, "Stream": make_stream, "stream": use}
    fakes |= {"current_stream": lambda: streams[-1], "synchronize": lambda: order.append("all have come")}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(ChunkedAdamW, "_update_chunk", staticmethod(noted))
    found = chunked(start, is_state_on_host=True)
    assert train(found, grads).equal(parameter)
    torch.testing.assert_close([*found.state.values()], [*wanted.state.values()], atol=0, rtol=0)
    waits = ["side 0 waits for main", "side 1 waits for main"]
    assert order == 2 * [*waits, "side 0: 300", "side 1: 300", "side 0: 300", "side 1: 100", "all have come"]


def test_a_gpu_rank_sets_its_allocator_its_device_and_as_threads_its_share_of_the_cores(monkeypatch):
    """Of torchrun's 8 ranks, of which this is the fourth on its node."""
    called, sizes = [], {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3", "RANK": "0"}
    for name, value in (sizes | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(torch, "set_num_threads", called.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called.append(str(device)))
    monkeypatch.setattr(fsdp_utils, "set_allocator", lambda is_expandable: called.append(is_expandable))
    monkeypatch.setattr(fsdp_utils, "meeting_point", lambda rank, size: torch.distributed.HashStore())
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: called.append(backend))
    world = fsdp_utils.init_world(tp_size=1, timeout_minutes=1)
    assert called == ["cuda:3", False, 8, "cpu:gloo,cuda:nccl"]
    assert os.environ["OMP_NUM_THREADS"] == "8", "vLLM respects the variable"
    assert world.device == torch.device("cuda", 3)


def test_servers_need_gpus_that_the_ranks_leave_free(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for gpus, words in ((None, "give --generation_gpus"), ("1", "train on GPUs 0 to 1; use 2 and higher"), ("2", None)):
        args = flags(engine="server", generation_gpus=gpus)
        for is_cuda in (False, True):
            monkeypatch.setattr("torch.cuda.is_available", lambda is_cuda=is_cuda: is_cuda)
            check_flags(args, num_ranks=2)
            with pytest.raises(ValueError, match=words) if words and is_cuda else nullcontext():
                check_places(args)


def test_a_gpu_server_gives_up_a_trainer_that_has_gone(monkeypatch):
    """Fake events: what NCCL does on a GPU when its peer has gone is proven by reading (ncclCommAbort) alone."""
    weights = pkgutil.resolve_name("extras.servers.weights")
    assert weights.TENSOR_SECONDS <= 120, "so long it answers nobody after a kill amid a transfer"
    destroyed, engine = [], object.__new__(weights.NcclEngine)
    actions = {"broadcast": lambda *_, **__: None, "destroy": lambda: destroyed.append(True)}
    engine.model_update_group = SimpleNamespace(**actions)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: False))
    monkeypatch.setattr(weights, "TENSOR_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="no weights came for 0.2 s"):
        engine.receive(torch.zeros(1))
    assert destroyed and engine.model_update_group is None


@pytest.mark.parametrize("replays", [False, True])
def test_gpu_segments_can_expand_without_an_engine_in_the_ranks(replays, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", given.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    log = SimpleNamespace(world=SimpleNamespace(is_main=False, device=torch.device("cpu")), out_dir=tmp_path)
    if replays:
        train_grpo.build_engine(SimpleNamespace(replay="runs/x"), None, log)
    else:
        build_servers = pkgutil.resolve_name("extras.servers.engine:build_servers")
        build_servers("", EngineSettings(96), Servers((), (), 1, in_flight=False), None, None, log, 0)
    assert given == ["expandable_segments:True"]


def fake_gpu(monkeypatch: pytest.MonkeyPatch, taken: int = 0, **stats: int) -> None:
    """What torch says of a GPU of 80 GiB that is not there. Its own figures hold what a sleeping engine gave back."""
    names = {"peak": "reserved_bytes.all.peak", "now": "reserved_bytes.all.current", "used": "allocated_bytes.all.peak"}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: ((80 - taken) * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {x: stats.get(key, 0) * GIB for key, x in names.items()})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)


def test_on_a_gpu_a_phase_leaves_out_what_the_engine_gave_back(monkeypatch):
    """CUDA has 2 GiB; of an engine of 40, 1 stays; the trainer holds 12, at the peak 60, 55 in use."""
    fake_gpu(monkeypatch, taken=2 + 1 + 12, peak=40 + 60, now=40 + 12, used=40 + 55)
    assert watch.peak(torch.device("cuda")) == ((2 + 1 + 60) * GIB, (2 + 1 + 55) * GIB)


# torch's kernel for packed attention on CUDA, computed on CPUs by its documentation, below the same custom operator:
# what is packed for a GPU can so be trained, and compiled, without one.
Place = tuple[slice, slice, Tensor]  # queries and keys of a sequence, and which of the latter each of the former sees
windows: set[int] = set()  # of the calls so far: keys before a query; -1: all


def places(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, window: list[int]) -> Iterator[Place]:
    """Causal: the last query sees the last key. The window is the number of keys before a query."""
    before, after = window
    windows.add(before)
    assert after == 0 and max_q >= cu_q.diff().max() and max_k >= cu_k.diff().max()
    bounds = (cu.unfold(0, 2, 1).tolist() for cu in (cu_q, cu_k))
    for (first_q, end_q), (first_k, end_k) in zip(*bounds, strict=True):
        num_k = end_k - first_k
        distances = torch.arange(num_k - (end_q - first_q), num_k)[:, None] - torch.arange(num_k)
        seen = (distances >= 0) & (distances <= (num_k if before == -1 else before))
        yield slice(first_q, end_q), slice(first_k, end_k), seen


def by_head(x: Tensor, num_heads: int) -> Tensor:
    """[N, heads, head_dim] -> [num_heads, N, head_dim], each head of keys for its group of queries."""
    return x.transpose(0, 1).repeat_interleave(num_heads // x.shape[1], 0)


def attend(query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, window, *_):
    assert cu_q[-1] == len(query) and cu_k[-1] == len(key) == len(value)
    out, heads = torch.empty_like(query), query.shape[1]
    for q, k, seen in places(cu_q, cu_k, max_q, max_k, window):
        scores = by_head(query[q], heads) @ by_head(key[k], heads).mT * scale
        out[q] = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ by_head(value[k], heads)).transpose(0, 1)
    return out, torch.zeros(heads, len(query)), torch.zeros(2, dtype=torch.uint64)


def backward(grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng_state, scale, window):
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    autograd = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)  # on again
    with autograd, torch.enable_grad():
        out, *_ = attend(*inputs, cu_q, cu_k, max_q, max_k, is_causal, scale, window)
        return torch.autograd.grad(out, inputs, grad)


def pack_as_on_cuda(patch: pytest.MonkeyPatch) -> None:
    """While it is patched, policies pack for the kernel."""
    varlen._varlen_attn.register_kernel("cpu")(attend)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    patch.setattr(Layout, "to", lambda layout, device: layout)
    patch.setattr("policy.make_layout", lambda segments, _: attention.make_layout(segments, torch.device("cuda")))


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma3_text", "qwen3_5_text"])
def test_cuda_packing_gives_the_kernel_what_the_cpu_computes(name, tmp_path, monkeypatch):
    windows.clear()
    model, rollout = load_policy(random_model(tmp_path, name)), make_rollout(SEVERAL_RECTANGLES, 40, group_size=2)
    for group_size in (1, 2):
        batch, found = pack(rollout, [3, 0, 4, 2, 1], group_size), []
        for kernel in (False, True):
            with monkeypatch.context() as patch:
                if kernel:
                    pack_as_on_cuda(patch)
                logprobs = model(batch, 1.0)[0]
            found.append([logprobs.detach(), *torch.autograd.grad(logprobs.square().sum(), [*model.parameters()])])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 * a.abs().max().item(), rtol=1e-4)
    expected = {"qwen2": {-1}, "mistral": {WINDOW - 1}, "gemma3_text": {WINDOW - 1, -1}, "qwen3_5_text": {-1}}
    assert windows == expected[name]


TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 80.00 GiB"
PINNED = "Registering memory failed with cudaError: 2. Consider launching with CUDA_LAUNCH_BLOCKING=1 to debug."
STAYS = MemoryError("GPU memory ran out; lower --gpu_memory_utilization.")
STAYS.__cause__ = torch.OutOfMemoryError(TORCH)


@pytest.mark.parametrize(("phase", "error", "way"), [
    ("sample", torch.OutOfMemoryError(TORCH), "lower --gpu_memory_utilization"),
    ("sleep", RuntimeError("CUDA Error: out of memory at cumem.cpp:1"), "--gpu_memory_utilization"),
    ("pack", torch.OutOfMemoryError(TORCH), LOWER_BATCH),
    ("logprobs", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "--offload_reference"),
    ("update", torch.AcceleratorError("CUDA error: out of memory\nCUDA"), "--communicate_once if it fits; if it was"),
    ("update", RuntimeError(PINNED), "if it was the host's, use less of --offload"),
    ("reward", OSError(12, "Cannot allocate memory"), "start fewer ranks"),
])  # fmt: skip
def test_each_phase_has_its_flags(phase, error, way, monkeypatch):
    """But what the engine says about its memory stays the last sentence."""
    fake_gpu(monkeypatch)
    memory = MemoryWatch(replace(RANK_3, device=torch.device("cuda")))
    sentence = ended_with(memory, phase, error)
    assert sentence.startswith(f"memory ran out on rank 3 in phase {phase}; ") and way in sentence
    assert str(error).splitlines()[0] in sentence, "which tells what was asked for"
    assert ended_with(memory, "sync", STAYS) == str(STAYS)
