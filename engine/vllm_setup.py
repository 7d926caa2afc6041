"""The set-up that vLLM needs before it is imported: its environment, one patch.

`prepare_vllm()` does it in a rank, for an engine in this process; a variable that the user has set
stays there. `extras/servers/start.py` gives servers `ENVIRONMENT` and `SERVER_ENVIRONMENT`. All of it was
needed with vLLM 0.32.0, the pinned release: look at each line again when the pin moves.
"""

from __future__ import annotations

import logging
import os
import warnings

from runtime.rank import launch_name

ENVIRONMENT = {  # for every process with vLLM
    "VLLM_NO_USAGE_STATS": "1",  # otherwise it sends a report to its makers
    # CUDA: FlashInfer compiles at its first call, with a toolkit that pip lacks. docs/hardware.md
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # `gate/models.py` has checked the length; vLLM misreads yarn's
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # CPU: binding would put all ranks, or servers, on the same cores
}
RANK_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: its weights and its seed are ours
    "VLLM_LOGGING_LEVEL": "ERROR",  # dozens of its warnings are about settings that we chose; WARNING shows them
}
SERVER_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that change weights
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked worker would not import extras.servers.start, and outlive it
}


def prepare_vllm() -> None:
    """Sets up this process for an engine of its own. Call it before vLLM is imported."""
    for name, value in (ENVIRONMENT | RANK_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # on CPU there is none, as it should be
    name_shared_memory()


def name_shared_memory() -> None:
    """CPU: adds the run's name to the name of the memory that the ranks of an engine share.

    vLLM gives it the same name in every run on a machine: another run, or what a killed one has
    left, would get in the way.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make_name = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda owner: f"{make_name(owner)}-{launch_name()}")
