"""Programs that need another world than `on_ranks` makes, or none.

    python tests/helpers/programs.py FUNCTION ARGUMENTS...

Each imports for itself what it needs: some start in a blink, some change a library before it is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import runpy
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# Training with a fault ------------------------------------------------------------------------------------------------


def train(flags: tuple[str, ...]) -> None:
    sys.argv = [str(Path(__file__).parent.parent.parent / "train_grpo.py"), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


def starved(where: str, rank: str, *flags: str) -> None:
    """Memory runs out on that rank at the first call of `where`: the process may grow by 64 MiB and asks for 1 GiB."""
    import torch

    def ask(*arguments: object, **options: object) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, most))
        torch.empty(2**30, dtype=torch.uint8)

    if os.environ["RANK"] == rank:
        name, _, function = where.rpartition(".")
        setattr(importlib.import_module(name), function, ask)
    train(flags)


def cooler(*flags: str) -> None:
    """train_grpo.py with an engine that samples the training prompts at 0.8 times the temperature that it is told."""
    import rollout

    play = rollout.play_one_turn

    def cooler(engine: rollout.Engine, rows: list, sampling: object, description: str) -> object:
        is_training = not description.startswith("evaluate")
        return play(engine, rows, replace(sampling, temperature=0.8) if is_training else sampling, description)

    rollout.play_one_turn = cooler
    train(flags)


# The start ------------------------------------------------------------------------------------------------------------


def late_start(first: str, second: str) -> None:
    """On two ranks: the main process comes when the other has waited for three hours, and the nodes do not share a
    folder. An hour goes by on the clock of the other rank each time that it waits.
    """
    import fsdp_utils
    from gate import agreement

    rank, has_waited, waits = int(os.environ["RANK"]), Path(first).parent / "has_waited", []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            has_waited.touch()
        time.sleep(seconds)

    if rank == 0:
        while not has_waited.exists():
            time.sleep(0.05)
    else:
        fsdp_utils.time = SimpleNamespace(sleep=wait, monotonic=lambda: 3600.0 * len(waits))
    fsdp_utils.init_world(tp_size=1, timeout_minutes=1)
    fsdp_utils.time = time
    agreement.SHOWN_SECONDS = 0.5
    try:
        agreement.check_shared(Path((first, second)[rank]))
    except ValueError as error:
        (Path(first) / f"error_of_rank_{rank}").write_text(str(error))
    fsdp_utils.close_world()


# vLLM on GPUs that are not there --------------------------------------------------------------------------------------

GPUS = {  # name, compute capability, multiprocessors, bytes
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 85_017_493_504),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 85_094_039_552),
}


def fake(kind: str) -> None:
    """From here on vLLM believes in a node of 8 such GPUs, with Triton and FlashInfer installed."""
    for kernels in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn"):
        sys.modules[kernels] = mock.MagicMock(__spec__=ModuleSpec(kernels, None))
    import torch
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


def described(config: object) -> dict[str, object]:
    """What a run depends on, by the name that the tests use."""
    graphs, scheduler, kernels = config.compilation_config, config.scheduler_config, config.kernel_config
    model, parallel = config.model_config, config.parallel_config
    return {
        "runner": 2 if config.use_v2_model_runner else 1, "is_asynchronous": scheduler.async_scheduling,
        "graphs": graphs.cudagraph_mode.name, "captured": graphs.cudagraph_capture_sizes,
        "sequences": scheduler.max_num_seqs, "batched_tokens": scheduler.max_num_batched_tokens,
        "has_prefix_cache": config.cache_config.enable_prefix_caching,
        "sleeps": model.enable_sleep_mode and model.enable_cumem_allocator and model.sleep_mode_backend == "cumem",
        "logprobs": model.logprobs_mode, "head_dtype": str(model.head_dtype),
        "tries_flashinfer": kernels.enable_flashinfer_autotune, "experts": kernels.moe_backend,
        "linear_attention": config.additional_config["gdn_prefill_backend"],
        "fuses_all_reduce": graphs.pass_config.fuse_allreduce_rms,
        "has_custom_all_reduce": not parallel.disable_custom_all_reduce,
        "executor": parallel.distributed_executor_backend, "worker": parallel.worker_cls,
        "tp_size": parallel.tensor_parallel_size, "returns_routes": config.aux_output_config.enabled,
    }  # fmt: skip


def resolved(kind: str, engines: str, output: str) -> None:
    """What vLLM makes of our options on a kind of GPU that is not there; no engine is started, without weights.

    `engines` is a file (JSON): name -> folder with a config.json, the flags of train_grpo.py, number of ranks. The
    platform's answers about the GPU are made up; vLLM itself decides all the rest.
    """
    fake(kind)
    import torch
    import vllm.envs

    import rollout  # noqa: F401  it sets the environment of vLLM
    from command_line import parse_flags
    from engine.options import EngineDemand, engine_options
    from extras.models.vision import Vision
    from flags import EngineSettings
    from fsdp_utils import World
    from gate.inputs import largest_share
    from gate.models import length_limits

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
        found[name] = described(configuration(options, engine["ranks"]))
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
