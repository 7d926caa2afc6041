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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For pytest-xdist: two files at a time, and at the end, one after the other, those that start ranks."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args == ("ranks",))


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
