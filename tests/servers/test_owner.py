"""A generation server belongs to one run, fits it, is left in order at the end, and ends when it is asked to."""

import os
import socket
import sys
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

import train_grpo
from fake_server import DESCRIPTION, HAS, INPUTS, KEY, A, B, FakeServer, engine_of, synced
from flags import EngineSettings, Sampling, Servers
from helpers import ALONE, ENVIRONMENT, ROOT, make_model, make_row, wait_for
from policies import load_policy
from runtime.start import RunError
from servers.engine import build_servers, claim_of
from servers.fleet import Fleet, Server
from servers.start import server_environment
from servers.weights import LEASE, Owner

A_AGAIN = A | {"host": "node-c", "pid": "9"}  # a new start of the run a, on another machine


@pytest.fixture
def server():
    server = FakeServer(0.001)
    yield server
    server.kill()


def run_of(claim, server, **more):
    """The engine of a run on a server that stays up."""
    return engine_of(Server(server.url, server.url), claim=claim, **more)


def test_a_server_belongs_to_one_run_until_that_frees_it_or_falls_silent():
    owner = Owner()
    assert owner.hear(A, "take", 0.0) == "" == owner.hear(A, "keep", 1.0)
    for claim, do in ((B, "take"), (B, "keep"), (B, "free"), ({}, "take"), (A_AGAIN, "keep")):
        refusal = owner.hear(claim, do, 1.0 + LEASE - 0.1)
        assert "belongs to the run /runs/a on node-a (process 7); end that run, or give other --server_urls" in refusal
    assert owner.hear(A | {"url": "x"}, "take", 2.0) == "", "the same run, started again"
    assert owner.hear(A | {"url": "y"}, "take", 2.0) == "it is x by another name; give each server once."
    assert owner.hear(A_AGAIN, "take", 2.0) == "", "the same run, started again"
    assert "process 9" in owner.hear(A, "keep", 3.0), "its start before cannot keep the server"
    assert "node-c" in owner.hear(A | {"out_dir": "/copy"}, "take", 3.0), "a copy of a run's folder is another run"
    assert owner.hear(B, "take", 2.0 + LEASE) == "", "a run that was killed lets go in the end"
    assert owner.hear(B, "free", 30.0) == "" == owner.hear(A, "take", 30.0), "one that ends in order lets go at once"


def test_a_second_run_is_refused_by_the_name_of_the_first_which_goes_on(server):
    with run_of(A, server) as first:
        synced(first)
        before = [path for path in server.asked if path != "owner"]
        with run_of(B, server) as second, pytest.raises(RunError) as error:
            synced(second)
        assert [path for path in server.asked if path != "owner"] == before, "nothing else is asked by the second"
        said = f"{server.url} cannot be used: it belongs to the run /runs/a on node-a (process 7); "
        assert str(error.value).startswith(said) and len(str(error.value).splitlines()) == 1
        synced(first).sample([make_row([1])], Sampling(2, 1.0, 5), (1, 1))
        assert first.said == []
    assert server.owner.claim == {}


def test_a_start_of_the_same_run_takes_the_server_and_the_one_before_notices(server):
    """As after a kill, but the old process is not gone, as on a machine that had lost its network."""
    with run_of(A, server) as old:
        synced(old)
        with run_of(A_AGAIN, server) as new:
            synced(new)
            wait_for(lambda: old.fleet.error)
            synced(new)
        said = f"{server.url} was lost and no other is left: it belongs to the run /runs/a on node-c (process 9)"
        assert old.fleet.error.startswith(said)
        assert not new.fleet.error


@pytest.mark.parametrize("changes", [{"--max_model_len": 65}, {"--head_dtype": "bfloat16"}, {"--model": "Qwen3"}])
def test_a_server_that_does_not_fit_is_refused_before_its_weights_change(changes, server):
    ((name, needed),) = changes.items()
    said = f"^{server.url} cannot be used: it does not fit this run: it has {name} {HAS[name]}, needed is {needed}.$"
    with run_of(A, server, needed=HAS | changes) as engine:
        with pytest.raises(RunError, match=said):
            synced(engine)
        assert server.owner.claim == {}, "another run may have it at once"
    assert set(server.asked) == {"owner"}
    with run_of(A, server, needed=HAS | {"--max_model_len": 32}) as engine:
        synced(engine)


def test_a_run_that_one_server_refuses_lets_go_of_the_others_at_once(server, monkeypatch):
    monkeypatch.setattr("servers.fleet.LOOK", 0.05)
    other = FakeServer()
    other.owner.hear(B, "take", time.monotonic())
    with engine_of(server, other) as engine:
        with pytest.raises(RunError, match=f"{other.url} cannot be used: it belongs to the run /runs/b"):
            synced(engine)
        time.sleep(0.3)  # looks at a server come several times meanwhile
        assert server.owner.claim == {} and other.owner.claim["run"] == "b"


def test_a_run_starts_its_servers_asks_for_model_length_and_dtypes_and_keeps_its_name(tmp_path, monkeypatch):
    given, started, log = [], [], SimpleNamespace(world=ALONE, out_dir=tmp_path, say=print)
    folder = make_model(tmp_path / "model")
    monkeypatch.setattr("servers.engine.Fleet", lambda *all_of_them, turns: given.append(all_of_them))
    monkeypatch.setattr("servers.engine.start_server", lambda *them: started.append(them) or SimpleNamespace(url=""))
    for head_dtype, gpus, size in ((None, (), 1), ("float32", (4, 5, 6, 7), 2)):  # on CPUs their number counts
        settings, servers = EngineSettings(96, "bfloat16", head_dtype), Servers(gpus, (), size, in_flight=False)
        build_servers(str(folder), settings, servers, INPUTS, DESCRIPTION, log, 0)
    assert [[server.name for server in servers] for servers, *_ in given] == [["server 0"], ["server 0", "server 1"]]
    assert [log.name for *_, log, _ in started] == ["0.log", "0.log", "1.log"]
    (*_, claim, needed), (*_, claim_again, _) = given
    model = "Qwen2ForCausalLM of 2 layers, hidden size 64, vocabulary of 64"
    assert needed == {"--model": model, "--max_model_len": 96, "--dtype": "bfloat16", "--head_dtype": "bfloat16"}
    assert [heads["--head_dtype"] for *_, heads in given] == ["bfloat16", "float32"]
    (tmp_path / "other").mkdir()
    assert claim == claim_again and claim["run"] != claim_of(tmp_path / "other")["run"]
    assert claim["out_dir"] == str(tmp_path) and claim["pid"] == str(os.getpid())


@pytest.mark.parametrize("hangs", ["pause", "init_weight_transfer_engine"])
def test_after_a_signal_a_transfer_that_stands_still_ends_the_run(hangs, server, monkeypatch, capsys):
    ended, is_requested = Future(), threading.Event()
    monkeypatch.setattr("servers.fleet.LEAVE", 0.3)
    monkeypatch.setattr("servers.fleet.LOOK", 0.05)
    monkeypatch.setattr("servers.fleet.os._exit", ended.set_result)
    monkeypatch.setattr("servers.fleet.requested", is_requested.is_set)
    with run_of(A, server) as engine:
        if hangs != "init_weight_transfer_engine":
            synced(engine)
        server.hangs = hangs
        with ThreadPoolExecutor(1) as pool:
            pool.submit(synced, engine)
            wait_for(lambda: hangs in {path.partition("?")[0] for path in server.asked[-3:]})
            time.sleep(1.0)
            assert not ended.done(), "without a signal it may take its time"
            is_requested.set()
            assert ended.result(30.0) == 1
            said = "was lost amid a transfer of weights: the transfer stands still, and SIGTERM asks the run to end"
            assert said in capsys.readouterr().err
            server.event.set()


def test_a_server_that_fails_while_it_connects_is_noticed_although_the_connection_hangs(server, monkeypatch):
    """As over NCCL, where nothing ends a main rank that waits for the others."""
    hangs, ended = threading.Event(), Future()
    monkeypatch.setattr("servers.fleet.LEAVE", 0.1)
    monkeypatch.setattr("servers.fleet.os._exit", ended.set_result)
    monkeypatch.setattr("servers.fleet.open_link", lambda *_: hangs.wait(60.0))
    server.meet = lambda info: 1 / 0
    with run_of(A, server) as engine:
        with pytest.raises(RunError, match="lost amid a transfer of weights: /init_weight_transfer_engine answers"):
            synced(engine)
        assert ended.result(30.0) == 1
        hangs.set()


def test_at_the_end_both_sides_close_the_transfer_of_a_server_that_stays_up(server):
    closed = []
    with run_of(A, server) as engine:
        synced(engine)
        (seen,) = engine.fleet.servers
        seen.link = SimpleNamespace(destroy=lambda: closed.append(list(server.asked)))
        asked = len(server.asked)
    assert [path for path in server.asked[asked:] if path != "owner"] == ["shutdown_weight_transfer_engine"]
    assert len(closed) == 1 and "shutdown_weight_transfer_engine" in closed[0][asked:]
    assert callable(PyNcclCommunicator.destroy), "what closes the main rank's side on CUDA"


@pytest.mark.parametrize("replays", [False, True])
def test_on_gpus_segments_can_expand_also_without_an_engine_in_the_ranks(replays, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", given.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    log = SimpleNamespace(world=SimpleNamespace(is_main=False, device=torch.device("cpu")), out_dir=tmp_path)
    if replays:
        train_grpo.build_engine(SimpleNamespace(replay="runs/x"), INPUTS, None, log, 0)
    else:
        build_servers("", EngineSettings(96), Servers((), (), 1, in_flight=False), INPUTS, DESCRIPTION, log, 0)
    assert given == ["expandable_segments:True"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_server_spawns_its_workers_and_has_no_allocator_settings_of_the_ranks(name, monkeypatch):
    """vLLM captures no CUDA graphs under expandable segments where a server spans GPUs."""
    monkeypatch.setenv(name, "expandable_segments:True")
    environment = server_environment("nccl")
    assert name not in environment and environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


PATHS = (
    "/collective_rpc", "/pause", "/resume", "/finish_weight_update", "/init_weight_transfer_engine", "/owner",
    "/inference/v1/generate", "/v1/models", "/health", "/metrics", "/metrics/", "/version", "/docs", "/openapi.json",
    "/ping", "/server_info", "/absent", "//pause", "/v1/../pause",
)  # fmt: skip
STRANGERS = [
    (method, key) for method in ("GET", "POST", "OPTIONS", "PUT") for key in ("", "Bearer ", "Bearer wrong", KEY)
]
CLOSED = {(path, 401) for path in PATHS}


def status_of(url: str, method: str, key: str) -> int:
    headers = {"Authorization": key, "Origin": "http://x", "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(url, method=method, data=b'{"method": "own_fit"}', headers=headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    return refused.value.code


def test_a_real_server_has_one_run_tells_what_it_is_and_ends_on_sigterm_amid_a_transfer(tmp_path, monkeypatch):
    """The run hangs then, and a request waits for its weights; no process of the server may stay."""
    folder = make_model(tmp_path / "model")
    monkeypatch.setattr(Fleet, "_leave", lambda _: None)  # this process stays
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--model {folder} --max_model_len 64 --dtype float32 --port {port}"
    command = [sys.executable, "scripts/serve.py", *flags.split()]
    with (tmp_path / "log").open("w") as log:
        process = psutil.Popen(command, cwd=ROOT, env=ENVIRONMENT | {"VLLM_API_KEY": KEY}, stdout=log, stderr=log)
    policy, url = load_policy(str(folder), torch.float32), f"http://127.0.0.1:{port}"
    model = "Qwen2ForCausalLM of 2 layers, hidden size 64, vocabulary of 64"
    has = {"--model": model, "--max_model_len": 64, "--dtype": "float32", "--head_dtype": "float32"}
    try:
        with engine_of(Server(url, url), needed=has, policy=policy) as engine:
            engine.sync(policy.full_weights())
            assert {(path, status_of(f"{url}{path}", *how)) for path in PATHS for how in STRANGERS} == CLOSED
            with engine_of(Server(url, url), claim=B) as second, pytest.raises(RunError, match="/runs/a on node-a"):
                synced(second)
            engine.sync(policy.full_weights())
        said, too_long = "--max_model_len 64, needed is 65", has | {"--max_model_len": 65}
        with engine_of(Server(url, url), claim=B, needed=too_long) as engine, pytest.raises(RunError, match=said):
            synced(engine)
        with engine_of(Server(url, url), claim=B | {"pid": "8"}, needed=has, policy=policy) as engine:
            engine.sync(policy.full_weights())
            engine.fleet.call(engine.fleet.prepare(engine.weights, engine.device, engine.version))
            engine.fleet.send(next(policy.full_weights())[1])
            processes = [process, *process.children(recursive=True)]
            process.terminate()
            _, left = psutil.wait_procs(processes, timeout=10.0)
            assert not left
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()
