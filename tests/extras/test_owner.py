"""A generation server has one run's weights, fits it, is left in order at the end, and ends when it is asked to."""

import asyncio
import os
import re
import socket
import sys
import threading
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import product
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch

from extras.servers.engine import build_servers
from extras.servers.fleet import Server
from extras.servers.start import server_environment
from extras.servers.weights import check_key
from flags import EngineSettings, Sampling, Servers
from helpers.fake_servers import HAS, KEY, TOKENIZER, A, B, FakeServer, engine_of, synced
from helpers.made_up import ALONE, load_policy, make_model, make_row
from helpers.runs import ENVIRONMENT, GUARD_SECONDS, ROOT
from runtime.rank import RunError

MODEL = "Qwen2ForCausalLM of 2 layers, hidden size 64, vocabulary of 64"


@pytest.fixture
def server():
    server = FakeServer(0.001)
    yield server
    server.kill()


def run_of(run, server, **more):
    return engine_of(Server(server.url, server.url), run=run, **more)


@pytest.mark.parametrize("syncs_again", [True, False])
def test_the_first_of_two_runs_on_one_server_ends(syncs_again, server):
    """Whether it sends its next weights, or only ends. It names the second. While it samples: a real server's test."""
    with ExitStack() as second_run:
        with run_of(A, server) as first:
            synced(first)
            second = synced(second_run.enter_context(run_of(B, server)))
            asked = len(server.asked)
            if syncs_again:
                said = f"{server.url} has failed: it has weights of the run {re.escape(B)}; give each run servers of"
                with pytest.raises(RunError, match=said):
                    synced(first)
        assert set(server.asked[asked:]) <= {"weight_info", "metrics"}, "the first changes nothing any more"
        synced(second).sample([make_row([1])], Sampling(2, 1.0, 5), (1, 1))
        assert not second.fleet.error


def test_a_run_that_lacks_a_server_leaves_the_others_alone(server):
    with run_of(B, server) as second:
        synced(second)
        asked = len(server.asked)
        servers, said = (Server(server.url, server.url), Server("x", "http://127.0.0.1:9")), "x cannot be used"
        with engine_of(*servers, timeout=1.0) as first, pytest.raises(RunError, match=said):
            synced(first)
        assert set(server.asked[asked:]) <= {"collective_rpc", "metrics"}
        synced(second)


@pytest.mark.parametrize("changes", [{"--max_model_len": 65}, {"--head_dtype": "bfloat16"}, {"--model": "Qwen3"}])
def test_servers_that_do_not_fit_keep_their_weights(changes, server):
    ((name, needed),) = changes.items()
    said = f"^{server.url} cannot be used: it does not fit this run: it has {name} {HAS[name]}, needed is {needed}.$"
    with run_of(A, server, needed=HAS | changes) as engine, pytest.raises(RunError, match=said):
        synced(engine)
    assert set(server.asked) == {"collective_rpc"}
    with run_of(A, server, needed=HAS | {"--max_model_len": 32}) as engine:
        synced(engine)


def test_a_run_asks_its_servers_for_model_length_and_dtypes(tmp_path, monkeypatch):
    given, started, log = [], [], SimpleNamespace(world=ALONE, out_dir=tmp_path, say=print)
    folder = make_model(tmp_path / "model")
    monkeypatch.setattr("extras.servers.engine.Fleet", lambda **settings: given.append(settings) or mock.Mock())
    monkeypatch.setattr(
        "extras.servers.engine.start_server", lambda *them: started.append(them) or SimpleNamespace(url="")
    )
    for head_dtype, gpus, size in ((None, (), 1), ("float32", (4, 5, 6, 7), 2)):  # on CPUs their number counts
        settings, servers = EngineSettings(96, "bfloat16", head_dtype), Servers(gpus, (), size, in_flight=False)
        build_servers(str(folder), settings, servers, TOKENIZER, None, log, 0)
    names = [[server.name for server in settings["servers"]] for settings in given]
    assert names == [["server 0"], ["server 0", "server 1"]]
    assert [log.name for *_, log, _ in started] == ["0.log", "0.log", "1.log"]
    needed = {"--model": MODEL, "--max_model_len": 96, "--dtype": "bfloat16", "--head_dtype": "bfloat16"}
    assert [settings["needed"] for settings in given] == [needed, needed | {"--head_dtype": "float32"}]
    assert given[0]["run"] == f"{tmp_path} on {socket.gethostname()} (process {os.getpid()})"


@pytest.mark.parametrize("hangs", ["pause", "update_weights"])
def test_a_server_that_hangs_in_a_transfer_ends_the_run(hangs, server, monkeypatch, capsys):
    """Also where the main rank waits in a broadcast, as over NCCL, where nothing ends it."""
    ended, is_over = Future(), threading.Event()
    monkeypatch.setattr("extras.servers.fleet.EXIT_SECONDS", 0.1)
    monkeypatch.setattr("extras.servers.fleet.WATCH_SECONDS", 0.05)
    monkeypatch.setattr("os._exit", ended.set_result)
    with run_of(A, server, timeout=1.0) as engine:
        synced(engine)
        server.hangs = hangs
        engine.fleet.servers[0].link.broadcast = lambda *_, **__: is_over.wait(60.0)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(synced, engine)
            assert ended.result(30.0) == 1
            assert f"{server.url} has failed: no " in capsys.readouterr().err
            server.event.set()
            is_over.set()


def test_failures_during_a_connection_that_hangs_are_noticed(server, monkeypatch):
    """As over NCCL, where nothing ends a main rank that waits for the others."""
    hangs, ended = threading.Event(), Future()
    monkeypatch.setattr("extras.servers.fleet.EXIT_SECONDS", 0.1)
    monkeypatch.setattr("os._exit", ended.set_result)
    monkeypatch.setattr("extras.servers.fleet.open_link", lambda *_: hangs.wait(60.0))
    server.meet = lambda info: 1 / 0
    with run_of(A, server) as engine:
        with pytest.raises(RunError, match="has failed: /init_weight_transfer_engine answers"):
            synced(engine)
        assert ended.result(30.0) == 1
        hangs.set()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_server_spawns_workers_without_the_ranks_allocator(name, monkeypatch):
    """vLLM captures no CUDA graphs under expandable segments where a server spans GPUs."""
    monkeypatch.setenv(name, "expandable_segments:True")
    environment = server_environment("nccl")
    assert name not in environment and environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


PATHS = (
    "/collective_rpc", "/pause", "/resume", "/finish_weight_update", "/init_weight_transfer_engine", "/weight_info",
    "/inference/v1/generate", "/v1/models", "/health", "/metrics", "/metrics/", "/version", "/docs", "/openapi.json",
    "/ping", "/server_info", "/absent", "//pause", "/v1/../pause",
)  # fmt: skip
STRANGERS = list(product(("GET", "POST", "OPTIONS", "PUT"), ("", "Bearer ", "Bearer wrong", KEY)))


def status_of(url: str, method: str, key: str) -> int:
    headers = {"Authorization": key, "Origin": "http://x", "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(url, method=method, data=b'{"method": "own_fit"}', headers=headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=GUARD_SECONDS)
    return refused.value.code


def test_real_servers_have_one_run_and_end_on_sigterm(tmp_path, monkeypatch):
    """It answers its key alone, and ends amid a transfer, when the run hangs and a request waits for its weights."""
    folder = make_model(tmp_path / "model")
    monkeypatch.setattr("extras.servers.fleet.end_at_once", lambda *_: None)  # this process stays
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--model {folder} --max_model_len 64 --dtype float32 --port {port}"
    command = [sys.executable, "scripts/serve.py", *flags.split()]
    with (tmp_path / "log").open("w") as log:
        process = psutil.Popen(command, cwd=ROOT, env=ENVIRONMENT | {"VLLM_API_KEY": KEY}, stdout=log, stderr=log)
    policy, url = load_policy(str(folder), torch.float32), f"http://127.0.0.1:{port}"
    has = {"--model": MODEL, "--max_model_len": 64, "--dtype": "float32", "--head_dtype": "float32"}
    try:
        with engine_of(Server(url, url), needed=has, policy=policy) as engine:
            engine.sync(policy.full_weights())
            assert {status_of(f"{url}{path}", *how) for path in PATHS for how in STRANGERS} == {401}
            engine.sync(policy.full_weights())
            engine.begin([make_row([1, 2])], Sampling(8, 1.0, 60), (1, 1))
            with engine_of(Server(url, url), run=B, policy=policy) as second:
                second.sync(policy.full_weights())
                with pytest.raises(RunError, match="it has weights of the run /runs/b on node-b"):
                    engine.sample([make_row([1, 2])], Sampling(8, 1.0, 60), (1, 1))
                second.sync(policy.full_weights())
                second.sample([make_row([1, 2])], Sampling(2, 1.0, 5), (1, 1))
        with engine_of(Server(url, url), run="c", needed=has, policy=policy) as engine:
            engine.sync(policy.full_weights())
            engine.fleet.call(engine.fleet.prepare(engine.weights, engine.device, engine.version))
            engine.fleet.send(next(policy.full_weights())[1])
            processes = [process, *process.children(recursive=True)]
            process.terminate()
            _, left = psutil.wait_procs(processes, timeout=GUARD_SECONDS)
            assert not left
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_server_without_a_key_answers_nobody(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "")
    request = SimpleNamespace(headers={"authorization": "Bearer "})
    assert asyncio.run(check_key(request, None)).status_code == 401
