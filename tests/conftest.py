"""Fixtures: the tiny policies are made once per test run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from helpers import make_model
from inputs.machine import avoid_broken_amx

avoid_broken_amx()


# Files whose tests start ranks. These use both cores: with two files at a time they would wait for each other.
WITH_RANKS = {
    "test_bad_input", "test_benchmarks", "test_evaluate", "test_fsdp", "test_gpu", "test_hacks", "test_lora",
    "test_main_job", "test_memory_measured", "test_memory_policies", "test_rollout", "test_setups", "test_train",
    "test_vision", "test_weights",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem in WITH_RANKS)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With several workers: each takes a file at a time, and one of them, at the end, all files that start ranks."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "with ranks" if Path(file).stem in WITH_RANKS else file

    return Files(config, log)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy, head tied to the embedding, with its data."""
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def untied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own."""
    return make_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of `datasets` in a folder of the test run; nothing is asked of the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
