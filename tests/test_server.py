"""Generation servers: what is sampled, by which weights, how far ahead, and what becomes of it when a server fails."""

import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from aiohttp import web

import serve
from batch import pack
from fake_server import FakeServer
from flags import EngineSettings, Sampling, Servers, take
from generation.start import SERVER, start_server
from generation.wire import TOKENS, Fleet, Server
from guards.start import RunError, reason_file
from helpers import (
    ALONE,
    ENVIRONMENT,
    ROOT,
    flags,
    launch_command,
    make_grade,
    make_model,
    make_rollout,
    make_row,
    metrics_of,
    torchrun,
    training_flags,
)  # fmt: skip
from inputs.checks import check_flags
from inputs.command_line import parse_flags
from inputs.load import check_places
from model.engine_options import engine_options
from policy import load_policy
from rollout_server import ServerEngine, build_servers
from sampling import Draws, Sampler
from warm_start import build_tokenizer

WEIGHTS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "norm.weight": torch.ones(3)}
DESCRIPTION = {"names": list(WEIGHTS), "dtype_names": ["float32"] * 2, "shapes": [[2, 3], [3]]}
CPU = torch.device("cpu")
TOKENIZER = SimpleNamespace(decode=lambda ids, **_: "text")
ROWS = [make_row([number, number + 1], where=f"row {number}") for number in range(8)]


@contextmanager
def engine_of(*servers, version=0, timeout=30.0, in_flight=False, most=64, policy=None):
    """An engine over these servers: fake ones, or urls. `said` is what it told the console, `spans` who did what."""
    said, spans = [], []
    found = [Server(url, url) for url in (each if isinstance(each, str) else each.url for each in servers)]
    fleet = Fleet(found, [], "", said.append, lambda *span: spans.append(span), timeout, most)
    weights = DESCRIPTION if policy is None else policy.describe_weights()
    engine = ServerEngine(fleet, TOKENIZER, weights, CPU, version, in_flight)
    engine.said, engine.spans, engine.policy = said, spans, policy
    try:
        yield engine
    finally:
        engine.close()
        for each in servers:
            if isinstance(each, FakeServer):
                each.kill()


def synced(engine: ServerEngine) -> ServerEngine:
    engine.sync(iter(WEIGHTS.items()) if engine.policy is None else engine.policy.full_weights())
    return engine


# Fake servers: what the client does -----------------------------------------------------------------------------------


def test_servers_get_every_weight_and_share_the_prompts_by_their_load():
    quick, slow = FakeServer(0.005), FakeServer(0.02)
    quick.hangs_up = slow.hangs_up = True  # when a connection is used again, as vLLM's does with idle ones
    heard = []
    with engine_of(quick, slow, most=4) as engine:
        synced(engine)
        rollout = engine.sample(ROWS, Sampling(4, 1.0, 5), (1, 1), on_finished=lambda b, *_: heard.append(b))
    for server in (quick, slow):
        assert all(torch.equal(*pair) for pair in zip(server.received, WEIGHTS.values(), strict=True))
    assert sorted(heard) == list(range(32)) and len(rollout.rows) == 32
    assert [row.where for row in rollout.rows] == [f"row {b // 4}" for b in range(32)]
    assert len(quick.prompts) + len(slow.prompts) == 32
    assert len(quick.prompts) > 1.5 * len(slow.prompts) > 0, "the quick one gets more"
    assert np.concatenate(rollout.versions).tolist() == [0] * 32 * 5 and engine.said == []


def changed(**changes):
    """Spoils the choice of an answer."""
    return lambda answer: web.json_response(answer | {"choices": [answer["choices"][0] | changes]})


NONSENSE = {
    "another prompt": (lambda answer: web.json_response(answer | {"prompt_token_ids": [1, 1]}), "another prompt"),
    "a status": (lambda _: web.Response(status=500, text="no memory"), "status 500: no memory"),
    "no JSON": (lambda _: web.Response(text="<html>"), "JSON"),
    "no tokens": (changed(token_ids=[]), "0 tokens"),
    "too many tokens": (changed(token_ids=[7] * 6), "6 tokens"),
    "log-probs of other tokens": (changed(token_ids=[7, 8, 7, 7, 7]), "not those"),
    "a log-prob above 0": (changed(logprobs={"content": [{"token_id": 7, "logprob": 0.5, "rank": 1}] * 5}), "above 0"),
    "tokens of no weights": (changed(weight_versions=[{"version": "0", "start": 0, "end": 4}]), "which weights"),
    "weights that were not sent": (changed(weight_versions=[{"version": "default", "start": 0, "end": 5}]), "not sent"),
    "an abort": (changed(finish_reason="abort"), "abort"),
    "nothing": (None, "no token for 1.5 s"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "reason"), NONSENSE.values(), ids=NONSENSE)
def test_a_server_that_answers_nonsense_is_named_and_its_prompts_are_sampled_elsewhere(spoil, reason):
    good, bad = FakeServer(0.002), FakeServer()
    bad.spoil = spoil
    with engine_of(good, bad, timeout=1.5) as engine:
        synced(engine)
        bad.stuck = spoil is None
        rollout = engine.sample(ROWS, Sampling(2, 1.0, 5), (1, 1))
    assert sorted(good.prompts) == sorted(row.ids.tolist() for row in rollout.rows), "each once, all by the good one"
    (line,) = engine.said
    assert bad.url in line and reason in line and "sampled elsewhere" in line


def test_a_completion_moves_as_long_as_a_server_is_left_and_none_that_was_lost_is_used_again():
    last, *others = [FakeServer(0.02) for _ in range(4)]
    with engine_of(last, *others, most=4) as engine:
        synced(engine).begin(ROWS, Sampling(8, 1.0, 20), (1, 1))  # of 0.4 s
        for server in others:
            time.sleep(0.2)
            server.kill()
            again = FakeServer(0.0, server.port)
        rollout = engine.sample(ROWS, Sampling(8, 1.0, 20), (1, 1))
        synced(engine)
        assert [server.state for server in engine.fleet.servers] == ["ready", "lost", "lost", "lost"]
        assert again.asked == [] and last.version == "1"
        assert sum(server.url in line for server in others for line in engine.said) == len(engine.said) == 3
        last.kill()
        with pytest.raises(RunError, match=f"{last.url} was lost and no other is left: .*the same command goes on"):
            engine.sample(ROWS, Sampling(2, 1.0, 20), (1, 2))
    assert [row.where for row in rollout.rows] == [f"row {b // 8}" for b in range(64)]
    assert {len(ids) for ids in rollout.completions} == {20}


def test_a_server_that_does_not_start_ends_the_run_with_the_tail_of_its_log(monkeypatch, tmp_path):
    monkeypatch.setattr("generation.start.server_command", lambda *_: ["bash", "-c", "echo no memory left; exit 3"])
    process = start_server({}, "gloo", "", tmp_path / "0.log")
    for server, said in (
        (Server("server 0", process.url, process), "server 0 did not start: ended with exit status 3.*no memory left"),
        (Server("http://x", "http://127.0.0.1:9"), "http://x did not start: no answer"),
    ):
        fleet = Fleet([server], [], "", print, print, timeout=1.0)
        engine = ServerEngine(fleet, TOKENIZER, DESCRIPTION, CPU, 0)
        with pytest.raises(RunError, match=f"(?s){said}"):
            engine.sync([])
        engine.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_server_that_is_lost_amid_a_transfer_ends_the_run_although_there_is_another(is_first):
    good, bad = FakeServer(), FakeServer()
    with engine_of(good, bad, timeout=5.0) as engine:
        if not is_first:
            synced(engine)
        bad.dies_in_sync = True
        said = f"{bad.url} was lost amid a transfer of weights: /update_weights answers with status 500"
        with pytest.raises(RunError, match=said):
            synced(engine)


def test_the_thread_ends_the_process_if_the_main_one_hangs_in_a_transfer(monkeypatch, tmp_path):
    """As over NCCL, where nothing ends a broadcast that nobody answers."""
    ended = threading.Event()
    monkeypatch.setenv("GRPO_LAUNCH_FOLDER", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("generation.wire.LEAVE", 0.1)
    monkeypatch.setattr("generation.wire.os._exit", lambda status: status == 1 and ended.set())
    server = FakeServer()
    with engine_of(server) as engine:
        link, sent = synced(engine).fleet.servers[0], []
        server.dies_in_sync, send = True, link.send
        link.send = lambda tensor: sent.append(tensor) or (ended.wait(10.0) if len(sent) > 1 else send(tensor))
        with pytest.raises(RunError, match="status 500"):
            synced(engine)
        assert ended.is_set()
    assert "amid a transfer of weights" in json.loads(reason_file(tmp_path, 0).read_text())["text"]


def test_what_a_server_does_at_the_start_of_a_run_is_left_over_and_aborted():
    server = FakeServer()
    for _ in range(2):
        with engine_of(server.url) as engine:
            synced(synced(engine))
        asked = [path for path in server.asked if path.startswith(("pause", "shutdown", "init"))]
        first = ["pause?mode=abort&clear_cache=true", "shutdown_weight_transfer_engine", "init_weight_transfer_engine"]
        assert asked == [*first, "pause?mode=keep&clear_cache=true"]
        server.asked.clear()
    server.kill()


def test_without_in_flight_a_sync_waits_and_with_it_completions_go_on_under_new_weights():
    for in_flight in (False, True):
        with engine_of(FakeServer(0.02), in_flight=in_flight) as engine:
            synced(engine)
            engine.begin(ROWS, Sampling(1, 1.0, 20), (1, 2))
            time.sleep(0.2)
            rollout = synced(engine).sample(ROWS, Sampling(1, 1.0, 20), (1, 2))
        for versions in rollout.versions:
            assert versions.tolist() == sorted(versions.tolist()) and len(versions) == 20
            assert set(versions.tolist()) == ({0, 1} if in_flight else {0})


def test_servers_that_connect_at_once_leave_the_output_of_the_run_as_it_was():
    """vLLM turns it off while gloo connects, for the whole process."""
    before = os.fstat(1)
    for _ in range(5):
        with engine_of(FakeServer(), FakeServer(), FakeServer()) as engine:
            synced(engine)
        assert os.path.samestat(os.fstat(1), before)


def test_the_timeline_says_what_a_server_did_when():
    with engine_of(FakeServer(0.02), in_flight=True) as engine:
        synced(engine).begin(ROWS, Sampling(1, 1.0, 10), (1, 1))
        time.sleep(0.1)
        synced(engine).sample(ROWS, Sampling(1, 1.0, 10), (1, 1))
    _, what, begin, end = zip(*engine.spans, strict=True)
    assert what == ("updates", "samples 0", "updates", "samples 1")
    times = [time for pair in zip(begin, end, strict=True) for time in pair]
    assert times == sorted(times)


def test_what_is_asked_for_now_goes_before_what_is_sampled_ahead():
    server = FakeServer(0.01)
    with engine_of(server, most=4) as engine:
        synced(engine).begin(ROWS, Sampling(4, 1.0, 5), (1, 2))
        engine.sample([make_row([63])], Sampling(2, 1.0, 5), (1, 1))
        assert len(server.prompts) < 16
        engine.sample(ROWS, Sampling(4, 1.0, 5), (1, 2))


# Flags ----------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "--steps_ahead 1": "only with --engine server",
    "--engine server --in_flight": "only with --steps_ahead above 0",
    "--engine server --image_column image": "images are not sent to servers",
    "--engine server --server_urls http://127.0.0.1:1 --generation_gpus 7": "names servers that run",
    "--engine server --server_urls 127.0.0.1:1": "needed is http://HOST:PORT",
    "--engine server --server_urls http://10.0.0.2:8000": "set VLLM_API_KEY",
    "--engine server --generation_gpus 5 6 7 --tensor_parallel_size 2": "no whole number of servers of 2",
    "--engine server --generation_gpus 7 7": "each can be given once",
}


@pytest.mark.parametrize(("given", "said"), MISTAKES.items())
def test_a_mistake_in_a_flag_is_told_before_anything_is_loaded(given, said, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    args = parse_flags([*["--model", "m", "--train_data", "d", "--out_dir", "o", "--total_steps", "1"], *given.split()])
    with pytest.raises(ValueError, match=said):
        check_flags(args, num_ranks=1)
    if said == "set VLLM_API_KEY":
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        check_flags(args, num_ranks=1)


def test_on_gpus_servers_need_some_that_the_ranks_leave_free_and_on_cpus_their_number_counts(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for gpus in (None, "1", "2"):
        args = flags(engine="server", generation_gpus=gpus)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        check_flags(args, num_ranks=2)
        check_places(args)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        said = {None: "give --generation_gpus", "1": "train on GPUs 0 to 1; use 2 and higher", "2": None}[gpus]
        with pytest.raises(ValueError, match=said) if said else nullcontext():
            check_places(args)


@pytest.mark.parametrize(("count", "size", "num_servers"), [(0, 1, 1), (3, 1, 3), (4, 2, 2)])
def test_on_cpus_a_server_is_started_for_each_number(count, size, num_servers, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr("rollout_server.start_server", lambda *given: started.append(given) or SimpleNamespace(url=""))
    monkeypatch.setattr("rollout_server.engine_options", lambda *_: {})
    monkeypatch.setattr("rollout_server.Fleet", lambda servers, *_: servers)
    servers = Servers(tuple(range(count)), (), size, in_flight=False)
    log = SimpleNamespace(world=ALONE, out_dir=tmp_path, say=print, note_span=print)
    engine = build_servers("m", SimpleNamespace(stop_tokens=()), servers, TOKENIZER, DESCRIPTION, log, 3)
    assert [server.name for server in engine.fleet] == [f"server {i}" for i in range(num_servers)]
    assert [given[3].name for given in started] == [f"{i}.log" for i in range(num_servers)]
    assert {given[4] for given in started} == {()}, "no GPUs"


def test_the_correction_is_on_by_default_above_0_steps_ahead():
    assert flags().rollout_correction == "none"
    assert flags(engine="server", steps_ahead=1).rollout_correction == "token_truncate"
    assert flags(engine="server", steps_ahead=1, rollout_correction="none").rollout_correction == "none"


def test_vllms_nccl_backend_takes_what_is_sent_to_it():
    """No GPU: names and parameters alone."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.utils.nccl import unpinned_nccl_env

    assert callable(unpinned_nccl_env)
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    assert not NCCLWeightTransferEngine.init_info_cls(**info).packed, "tensors are sent one by one"
    NCCLWeightTransferEngine.update_info_cls(**DESCRIPTION)
    inspect.signature(PyNcclCommunicator).bind("group", "device")
    inspect.signature(PyNcclCommunicator.broadcast).bind("self", "tensor", src=0, stream=None)
    place = {"host": "", "port": 1, "listen_socket": None, "rank": 0, "world_size": 2}
    inspect.signature(StatelessProcessGroup.create).bind(**place, store_timeout=60)


# Steps ahead ----------------------------------------------------------------------------------------------------------


class StubGrader:
    """Every second completion is correct, or none of a prompt whose number is odd."""

    def submit_to(self, rows, sampling):
        self.rows, self.sampling = rows, sampling
        return lambda *_: None

    def collect_from_ranks(self):
        count = self.sampling.num_samples
        graded = [(row, i) for row in self.rows for i in range(count)]
        return [
            make_grade(i % 2 and row.ids[0] % 2 == 0, is_correct=bool(i % 2 and row.ids[0] % 2 == 0))
            for row, i in graded
        ]


def sampler_over(engine, **changes) -> Sampler:
    args = flags(prompts_per_step=4, group_size=2, engine="server", **changes)
    rows = [make_row([i, i], where=f"row {i}") for i in range(400)]
    data = SimpleNamespace(
        rows=rows,
        indices_of_step=lambda step, count, *_: np.arange((step - 1) * count, step * count),
        indices_from=lambda start, count, _: np.arange(start, start + count),
    )
    run = SimpleNamespace(phase=lambda _: nullcontext(), reward_failures=lambda *_: None)
    return Sampler(engine, StubGrader(), data, take(Draws, args), take(Sampling, args, num_samples=2, top_p=1.0), run)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_lag_of_every_token_is_bounded_by_the_steps_ahead(ahead, in_flight):
    with engine_of(FakeServer(0.001), in_flight=in_flight) as engine:
        sampler, lags = sampler_over(engine, steps_ahead=ahead, max_completion_tokens=10), []
        synced(engine)
        for step in range(1, 7):
            rollout, metrics = sampler.collect(step)
            sampler.start(step, 6)
            assert [row.where for row in rollout.rows[::2]] == [f"row {i}" for i in range(4 * step - 4, 4 * step)]
            assert metrics["rollout/lag_max"] == max(lag.max() for lag in rollout.lags) <= ahead
            lags.append(int(metrics["rollout/lag_max"]))
            time.sleep(0.05)
            synced(engine)
        assert not engine.begun and not engine.fleet.pending, "nothing was begun that is not trained"
    assert max(lags) == ahead


class ListingEngine:
    """Notes which prompts it samples."""

    seconds_E, used = np.ones(1), ()

    def begin(self, *_):
        pass

    def sample(self, rows, sampling, seed, description, on_finished):
        self.used += [row.where for row in rows]
        full = make_rollout([1] * len(rows) * sampling.num_samples)
        of_completions = [row for row in rows for _ in range(sampling.num_samples)]
        return replace(full, rows=of_completions, loss_weights_B=None, advantages=None)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("stops", [(3,), (1, 2, 5)])
def test_a_run_that_is_continued_uses_every_prompt_once_also_those_that_were_begun(ahead, stops):
    """Dynamic sampling: the steps draw prompts in a row. Each stop comes amid the step after it."""

    def prompts_of_steps(*lasts):
        used, state, first = {}, None, 1
        for last in lasts:
            sampler = sampler_over(ListingEngine(), steps_ahead=ahead, dynamic_sampling="correct", total_steps=8)
            if state:
                sampler.restore(state)
            for step in range(first, last + 1):
                sampler.engine.used = used[step] = []
                sampler.collect(step)
                sampler.start(step, 8)
            state, first = sampler.state(last), last + 1
            if last < 8:
                sampler.engine.used = []
                sampler.collect(first)  # and is cut off
                assert sampler.state(last) == state
        return used

    whole = prompts_of_steps(8)
    assert prompts_of_steps(*stops, 8) == whole
    numbers = [int(where.split()[1]) for where in sum(whole.values(), [])]
    assert sorted(numbers) == list(range(len(numbers))), "no prompt twice, and none left out"


def test_serve_py_starts_vllm_as_a_run_does_and_beyond_the_loopback_only_with_a_key(folder, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append((command, environment)))
    arguments = ["serve.py", "--model", str(folder), "--max_model_len", "64", "--port", "8123", "--host", "0.0.0.0"]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="--host 0.0.0.0: .*set VLLM_API_KEY to a secret"):
        serve.main()
    assert started == []
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    serve.main()
    ((command, environment),) = started
    assert command[command.index("--port") + 1] == "8123" and command[command.index("--host") + 1] == "0.0.0.0"
    assert {"generation.weights.Extension", "generation.weights.check_key", "processed_logprobs"} <= set(command)
    assert (environment["VLLM_SERVER_DEV_MODE"], environment["VLLM_API_KEY"]) == ("1", "secret")


# A real server, with a head tied to the embedding ---------------------------------------------------------------------

TEMPERATURE = 0.7  # not 1, so that a temperature that only one side applies would show


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny policy whose context is long enough to be interrupted in, and data whose rows have numbers."""
    folder = make_model(tmp_path_factory.mktemp("long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    rows = [{"problem": f"{i % 5}+{i // 5 % 5}", "answer": "1", "number": i} for i in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


REWARD = """
from pathlib import Path

def score(completion, answer, columns):
    with (Path(__file__).parent / "graded.txt").open("a") as file:
        file.write(f"{columns['number']}\\n")
    return float(len(completion) % 3)
"""


def is_healthy(url):
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """A server that the tests share: one after the other finds it with the weights of the one before."""
    settings = EngineSettings(1024, "float32", None, 0.5, False, 1, ())
    options = engine_options(str(folder), settings, False, 1, most_sequences=64)
    process = start_server(options, "gloo", "", tmp_path_factory.mktemp("server") / "0.log")
    while not is_healthy(process.url):
        assert process.how_it_ended() is None, process.last_words()
        time.sleep(0.2)
    yield process
    process.kill()


def test_no_process_of_a_server_outlives_it_also_while_it_starts(folder, tmp_path):
    """SIGKILL, so many seconds after it has begun to start others, which are still importing torch."""
    options = engine_options(str(folder), EngineSettings(1024, "float32", None, 0.5, False, 1, ()), False, 1)
    found = {seconds: start_server(options, "gloo", "", tmp_path / f"{seconds}.log") for seconds in (0.0, 4.0)}
    for seconds, process in found.items():
        first, deadline = psutil.Process(process.process.pid), time.monotonic() + 60
        while len(first.children()) < 2 and time.monotonic() < deadline:  # the first one tracks shared memory
            time.sleep(0.05)
        time.sleep(seconds)
        started = first.children(recursive=True)
        assert len(started) >= 2
        first.kill()
        process.process.wait()
        _, left = psutil.wait_procs(started, timeout=5)
        assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]


def logprobs_under(policy, rollout):
    """The trainer's log-probs of the tokens of each completion."""
    found = []
    rollout = replace(rollout, loss_weights_B=np.zeros(len(rollout.rows), dtype=np.float32))
    for b in range(len(rollout.rows)):
        batch = pack(rollout, [b])
        with torch.no_grad():
            found.append(policy(batch, TEMPERATURE)[0][batch.loss_mask_N].numpy())
    return found


def policies(folder, *factors):
    """The policy with its weights scaled by each factor: that is another distribution."""
    found = [load_policy(str(folder), torch.float32) for _ in factors]
    with torch.no_grad():
        for policy, factor in zip(found, factors, strict=True):
            for parameter in policy.parameters():
                parameter.mul_(factor)
    return found


def largest_gap(policy, rollout):
    pairs = zip(logprobs_under(policy, rollout), rollout.rollout_logprobs, strict=True)
    return max(float(np.abs(own - sampled).max()) for own, sampled in pairs)


@pytest.mark.parametrize("sent", [None, 0, 5])
def test_recorded_logprobs_are_the_trainers_whatever_the_server_held_before(folder, server, sent):
    """Also of a head that is tied to the embedding: vLLM multiplies by a packed copy of it.

    `sent`: tensors after which the run before was killed in a sync; its server stands still, amid an update.
    """
    old, policy = policies(folder, 1.0, 1.3)
    with engine_of(server.url, policy=old) as engine:
        if sent is None:
            rollout = synced(engine).sample(ROWS, Sampling(4, TEMPERATURE, 40), (1, 1))
            assert largest_gap(old, rollout) < 5e-5
        else:
            with pytest.raises(KeyboardInterrupt):
                engine.sync(interrupted(old.full_weights(), sent))
    with engine_of(server.url, policy=policy, version=5, timeout=10.0) as engine:
        rollout = synced(engine).sample(ROWS, Sampling(4, TEMPERATURE, 40), (1, 1))
    assert largest_gap(policy, rollout) < 5e-5
    assert largest_gap(old, rollout) > 0.1, "other weights would show"
    assert set(np.concatenate(rollout.versions).tolist()) == {5}
    assert np.exp(np.concatenate(rollout.rollout_logprobs)).mean() > 0.025, "a uniform one would agree with any"


def tokens_of(server):
    """Of all requests so far, by its own count."""
    return sum(map(float, TOKENS.findall(urllib.request.urlopen(f"{server.url}/metrics").read().decode())))


def interrupted(named, count):
    yield from itertools.islice(named, count)
    raise KeyboardInterrupt


def make_endless(policy):
    """Without an end token: all hidden states point along the first axis, and its row of the tied head against it."""
    with torch.no_grad():
        (embedding,) = [each for name, each in policy.named_parameters() if name.endswith("embed_tokens.weight")]
        embedding[:, 0] = 3.0
        embedding[build_tokenizer().eos_token_id, 0] = -3.0


def test_completions_go_on_in_flight_and_each_token_has_the_logprob_of_the_weights_that_made_it(folder, server):
    old, new = policies(folder, 1.0, 1.2)
    for policy in (old, new):
        make_endless(policy)
    sampling = Sampling(6, TEMPERATURE, 500)
    with engine_of(server.url, policy=old, in_flight=True) as engine:
        for step in range(1, 7):  # once, but on a busy machine the weights may come when all are finished
            engine.policy, before = old, tokens_of(server)
            synced(engine).begin(ROWS, sampling, (1, step))
            deadline = time.monotonic() + 30
            while tokens_of(server) < before + 500 and time.monotonic() < deadline:
                time.sleep(0.02)
            engine.policy = new
            rollout = synced(engine).sample(ROWS, sampling, (1, step))
            is_mixed = [len(set(versions.tolist())) == 2 for versions in rollout.versions]
            if sum(is_mixed) >= 3:
                break
    assert sum(is_mixed) >= 3
    of_old, of_new = logprobs_under(old, rollout), logprobs_under(new, rollout)
    for b, versions in enumerate(rollout.versions):
        assert versions.tolist() == sorted(versions.tolist())
        expected = np.where(versions % 2 == 0, of_old[b], of_new[b])
        assert np.abs(expected - rollout.rollout_logprobs[b]).max() < 5e-5
    assert max(np.abs(of_old[b] - of_new[b]).max() for b in range(len(is_mixed)) if is_mixed[b]) > 0.1


# Whole runs -----------------------------------------------------------------------------------------------------------


def run_flags(folder, out_dir, **changes):
    own = {
        "engine": "server", "dtype": "float32", "eval_data": None, "eval_every": None, "eval_before_training": None,
        "max_completion_tokens": 60, "micro_batch_tokens": 512, "reward": f"{folder / 'reward.py'}:score",
        "save_every": None,
    }  # fmt: skip
    return training_flags(folder, out_dir, **own | changes)


@pytest.mark.parametrize("ahead", [0, 1])
def test_two_trainers_and_a_server_train_and_log_how_far_the_server_is_behind(folder, server, ahead, tmp_path):
    more = {"in_flight": True} if ahead else {}
    torchrun(
        2, "train_grpo.py", *run_flags(folder, tmp_path / "run", server_urls=server.url, steps_ahead=ahead, **more)
    )
    metrics = metrics_of(tmp_path / "run")
    assert sorted(metrics) == [1, 2, 3, 4]
    assert metrics[1]["rollout/lag_max"] == 0 and max(line["rollout/lag_max"] for line in metrics.values()) == ahead
    for line in metrics.values():
        on_policy = line["policy/rollout_gap_lag_0" if ahead else "policy/rollout_gap_mean"]
        assert on_policy is None or on_policy < (1e-6 if ahead else 0.1)
    if ahead:
        assert all(line["policy/rollout_clip_frac"] < 0.5 for line in metrics.values()), "corrected by default"
        assert max(line["policy/rollout_gap_lag_1"] or 0 for line in metrics.values()) > 1e-5


def test_a_run_whose_only_server_is_killed_ends_and_the_same_command_completes_it(folder, tmp_path):
    """SIGKILL in the middle of a step. The step under way is the only one whose prompts are sampled again."""
    (folder / "graded.txt").unlink(missing_ok=True)
    out_dir = tmp_path / "run"
    changes = {"total_steps": 8, "steps_ahead": 1, "save_every": 1}
    command = launch_command(1, "train_grpo.py", *run_flags(folder, out_dir, **changes))
    options = {"cwd": ROOT, "env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as run:
        while not (out_dir / "metrics.jsonl").exists():
            assert run.poll() is None
            time.sleep(0.05)
        of_run = psutil.Process(run.pid).children(recursive=True)
        (server,) = [each for each in of_run if SERVER in each.cmdline()]
        port = server.cmdline()[server.cmdline().index("--port") + 1]
        with pytest.raises(urllib.error.HTTPError, match="401"):  # nobody else may change the weights
            urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/pause", method="POST"))
        server.send_signal(signal.SIGKILL)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 1
    last = [line for line in said.splitlines() if line.startswith("error: ")][-1]
    assert re.match(
        r"error: server 0 was lost (amid a transfer|and no other).*ended by SIGKILL.* goes on .*0.log", last
    )
    assert not [each for each in of_run if each.is_running() and each.status() != "zombie"], "no orphan"
    done = subprocess.run(command, **options, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(metrics_of(out_dir)) == list(range(1, 9))
    graded = Counter((folder / "graded.txt").read_text().split())
    assert graded.keys() == {str(number) for number in range(64)}, "each prompt of the epoch"
    assert min(graded.values()) == 4 and sum(count > 4 for count in graded.values()) <= 8
