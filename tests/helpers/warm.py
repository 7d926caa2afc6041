"""What the warm process of runs.py does before its first fork. Nothing here starts threads or draws random numbers."""

import gc
import signal
import sys
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path += [str(TESTS), str(TESTS.parent / "scripts")]
for name in (
    "train_grpo", "evaluate", "rollout", "report", "matplotlib.figure", "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler", "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.llama",
    "vllm.utils.cpu_triton_utils", "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base", "vllm.entrypoints.launchers.cli_args",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm", "vllm.v1.executor.multiproc_executor",
    "extras.servers.engine", "extras.servers.weights", "torch.distributed.run", "grading.equality", "datasets",
    "helpers.runs", "launch",
):  # fmt: skip
    import_module(name)

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from vllm.platforms.cpu import CpuPlatform

signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # tvm_ffi would print the stack of a worker that is meant to crash
get_checkpoint_conversion_mapping("qwen2")
CpuPlatform.register_triton_kernel_overrides()  # it searches all modules, for half a second
CpuPlatform.register_triton_kernel_overrides = lambda *_: None
gc.collect()
gc.freeze()  # a collection in a fork would copy all pages
gc.unfreeze = lambda: None  # vLLM calls it at the end of an engine, and collects: 2 s of a core in each fork
