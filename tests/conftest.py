"""Fixtures: the tiny policies are made once per process, the warm process once for all.

The process that hands the files to others, with `-n`, imports no torch.
"""

from __future__ import annotations

import os
import signal
from multiprocessing import forkserver
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# For --compile, read when torch is imported: its own choices take the C++ compiler twice the time. They are vector
# instructions, whose kinds it first tries out, and line numbers; and a process with threads, for each rank.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

for ignored in (signal.SIGINT, signal.SIGHUP):  # by a suite in the background, or under nohup, and by all its children
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)  # which children do not inherit

LONGEST = [
    "test_kills", "test_compile", "test_setups", "test_main_job", "test_servers", "test_real_model", "test_train",
    "test_turns", "test_lora", "test_pool", "test_benchmarks", "test_reshard", "test_owner", "test_families",
    "test_partial", "test_math", "test_cuda", "test_fsdp", "test_own", "test_launch", "test_teacher", "test_page",
    "test_verifiers", "test_memory", "test_sync", "test_rollout", "test_core", "test_hacks", "test_evaluate",
    "test_check_gpu", "test_minimal", "test_console", "test_replay", "test_router_replay", "test_start",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: with three files at a time, none of them is left over at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        forkserver.set_forkserver_preload(["tests.helpers.warm"])
        forkserver.ensure_running()
        os.environ["GRPO_TEST_WARM"] = forkserver._forkserver._forkserver_address
    else:
        from runtime.machine import prepare_cpu

        prepare_cpu()


def make_model(folder: Path, **sizes: object) -> Path:
    from helpers import made_up

    return made_up.make_model(folder, **sizes)


QWEN3 = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy, head tied to the embedding, with its data."""
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def untied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own."""
    return make_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def qwen3_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3, head tied to the embedding, whose 4 heads of 32 are twice as wide in all as the model."""
    return make_model(tmp_path_factory.mktemp("qwen3"), **QWEN3)


@pytest.fixture(scope="session")
def untied_qwen3_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own, as from 8B on."""
    return make_model(tmp_path_factory.mktemp("untied_qwen3"), tied=False, **QWEN3)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, pretrained."""
    from smollm2 import unpack_model

    return unpack_model()


@pytest.fixture(scope="session")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A --reward of our own: 1 for about a third of random completions."""
    file = tmp_path_factory.mktemp("reward") / "thirds.py"
    file.write_text("def score(completion, answer, columns):\n    return float(len(completion) % 3 == 0)\n")
    return f"{file}:score"


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of `datasets` in a folder of the test run; nothing is asked of the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
