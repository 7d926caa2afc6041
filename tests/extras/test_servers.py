"""Generation servers: what is sampled, by which weights, how far ahead, and that a server that fails ends the run."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch

import serve
from batch import pack
from engine.options import EngineDemand, engine_options
from extras.servers.fleet import Server
from extras.servers.start import start_server
from flags import EngineSettings, Sampling
from helpers.fake_servers import KEY, WEIGHTS, A, B, FakeServer, engine_of, sampler_over, synced
from helpers.made_up import load_policy, make_model, make_row
from helpers.runs import NO_EVAL, SERVERS, begin, launched, metrics_of, torchrun, training_flags, wait_for
from runtime.rank import RunError
from runtime.start import reason_file
from soak import is_running, ranks_of

ROWS = [make_row([number, number + 1], where=f"row {number}") for number in range(8)]


def cut(named, count, do):  # the tensors, with something done after so many
    yield from islice(named, count)
    do()
    yield from named


def test_servers_share_prompts_by_load():
    quick, slow = servers = FakeServer(0.01), FakeServer(0.05)
    heard, sampling = [], Sampling(8, 1.0, 20)
    with engine_of(*servers, most=4) as engine:
        synced(engine).begin(ROWS, sampling, (1, 1))  # a completion takes a slow one a second
        engine.sample([make_row([63])], sampling, (1, 0))
        assert len(quick.prompts) + len(slow.prompts) < 64, "what is asked for now goes before what was begun"
        rollout = engine.sample(ROWS, sampling, (1, 1), on_finished=lambda b, *_: heard.append(b))
        assert len(quick.prompts) > len(slow.prompts) > 0, "the quick one gets more"
        synced(engine)
        asked = [path.partition("_")[0] for path in slow.asked if path.startswith(("pause", "shutdown", "init"))]
        assert asked == ["pause?mode=abort&clear", "shutdown", "init", "pause?mode=keep&clear"], "aborts what is left"
    for server in (quick, slow):
        assert server.version == f"{A}:1"
        assert all(torch.equal(*pair) for pair in zip(server.received, WEIGHTS.values(), strict=True))
    assert sorted(heard) == list(range(64))
    assert [row.where for row in rollout.rows] == [f"row {b // 8}" for b in range(64)]
    assert np.concatenate(rollout.parts["versions"]).tolist() == [0] * 64 * 20


NONSENSE = {  # what is said -> what an answer is changed by
    "another prompt": {"prompt_token_ids": [1, 1]},
    "status 500: no memory": {"status": 500, "text": "no memory"},
    "JSON": {"text": "<html>"},
    "6 tokens": {"token_ids": [7] * 6},
    "log-probs are not those": {"token_ids": [7, 8, 7, 7, 7]},
    "does not say which weights": {"weight_versions": [{"version": f"{A}:0", "start": 0, "end": 4}]},
    "it has weights of the run /runs/b on node-b (process 8); give each": {
        "weight_versions": [{"version": f"{A}:0", "start": 0, "end": 4}, {"version": f"{B}:0", "start": 4, "end": 5}]
    },
    "weights were not sent": {"weight_versions": [{"version": "default", "start": 0, "end": 5}]},
    "abort": {"finish_reason": "abort"},
    (STUCK := "no progress for 2 s"): {"stuck": True},
}


@pytest.mark.parametrize("said", NONSENSE)
def test_a_server_that_answers_nonsense_ends_the_run(said, monkeypatch):
    monkeypatch.setattr("extras.servers.fleet.WATCH_SECONDS", 0.1)
    good, bad = FakeServer(0.002), FakeServer()
    with engine_of(good, bad, timeout=2.0 if said == STUCK else 300.0) as engine:
        synced(engine)
        bad.changes = NONSENSE[said]
        with pytest.raises(RunError) as error:
            engine.sample(ROWS, Sampling(2, 1.0, 5), (1, 1))
    sentence = str(error.value)
    assert sentence.startswith(f"{bad.url} has failed: ") and said in sentence
    assert sentence.endswith("with servers that run, the same command continues.")


def test_a_server_that_is_gone_ends_the_run_and_the_next_start_samples_again():
    """What a server answers that was started anew, under the same address, is not taken."""
    sampling, good, bad = Sampling(2, 1.0, 20), FakeServer(0.01), FakeServer(0.05)
    with engine_of(good, bad) as engine:
        synced(engine).begin(ROWS, sampling, (1, 1))
        wait_for(lambda: bad.asked.count("inference/v1/generate") == 8)
        bad.kill()
        again = FakeServer(0.0, bad.port)
        with pytest.raises(RunError, match=f"{bad.url} has failed: "):
            engine.sample(ROWS, sampling, (1, 1))
    with engine_of(FakeServer(0.01), again, run=B) as engine:
        rollout = synced(engine).sample(ROWS, sampling, (1, 1))
    assert len(rollout.rows) == 16 and again.prompts


@pytest.mark.parametrize("host", ["127.0.0.1:9", "absent.invalid:9"])
def test_an_unreachable_server_is_told_at_once(host):
    """It may still come, for as long as a server may start."""
    begin, url = time.monotonic(), f"http://{host}"
    with engine_of(Server(url, url), timeout=1.0) as engine:
        assert time.monotonic() - begin < 50.0, "a guard; on a quiet machine it takes less than 5 s"
        assert re.fullmatch(f"Cannot connect to host {host} .* so far: {url}", *engine.said)
        with pytest.raises(RunError, match=f"{url} cannot be used: no answer for 1 s"):
            synced(engine)


def test_a_server_that_does_not_start_shows_the_tail_of_its_log(monkeypatch, tmp_path):
    monkeypatch.setattr("extras.servers.start.server_command", lambda *_: ["bash", "-c", "echo no memory left; exit 3"])
    process = start_server({}, "gloo", "", tmp_path / "0.log")
    process.process.wait(60)
    server = Server("server 0", process.url, process)
    said = "(?s)server 0 cannot be used: ended with exit status 3.*no memory left"
    with engine_of(server, timeout=1.0) as engine, pytest.raises(RunError, match=said):
        synced(engine)


@pytest.mark.parametrize(("is_first", "hangs"), [(True, False), (False, False), (False, True)])
def test_a_server_lost_amid_a_transfer_ends_the_run(is_first, hangs, monkeypatch, tmp_path):
    """Also if the main thread hangs, as over NCCL, where nothing ends a broadcast that nobody answers."""
    ended, may_die = Future(), threading.Event()

    def hang():
        may_die.set()
        if hangs:
            ended.result(60.0)

    monkeypatch.setenv("GRPO_LAUNCH_FOLDER", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("extras.servers.fleet.EXIT_SECONDS", 0.1)
    monkeypatch.setattr("extras.servers.fleet.MEETING_SECONDS", 2.0)  # so long gloo waits, too
    monkeypatch.setattr("os._exit", ended.set_result)
    good, bad = FakeServer(), FakeServer()
    with engine_of(good, bad) as engine:
        if not is_first:
            synced(engine)
        bad.dies_in_sync = may_die
        said = f"{bad.url} has failed: /update_weights answers with status 500"
        with pytest.raises(RunError, match=said):
            engine.sync(cut(iter(WEIGHTS.items()), 1, hang))
    assert not hangs or (ended.result(0) == 1 and said in json.loads(reason_file(tmp_path, 0).read_text())["text"])


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_lags_are_bounded_by_the_steps_ahead(ahead, in_flight):
    """Only with --in_flight a completion has tokens of two versions."""
    server = FakeServer(0.05)
    with engine_of(server, in_flight=in_flight) as engine:
        sampler, lags, is_mixed = sampler_over(engine, steps_ahead=ahead, max_completion_tokens=6), [], []
        synced(engine)
        for step in range(1, 6):
            rollout, metrics = sampler.collect(step)
            tokens, begun = server.tokens, len(engine.begun)
            sampler.start(step, 5)
            assert [row.where for row in rollout.rows[::2]] == [f"row {i}" for i in range(4 * step - 4, 4 * step)]
            assert metrics["rollout/lag_max"] == max(lag.max() for lag in rollout.parts["lags"]) <= ahead
            lags.append(int(metrics["rollout/lag_max"]))
            is_mixed += [versions[0] < versions[-1] for versions in rollout.parts["versions"]]
            assert all(sorted(versions) == versions.tolist() for versions in rollout.parts["versions"])
            if len(engine.begun) > begun:  # the new weights come amid a completion
                wait_for(lambda before=tokens: server.tokens > before)
            synced(engine)
        assert not engine.begun and not engine.fleet.pending, "nothing was begun that is not trained"
    assert max(lags) == ahead and any(is_mixed) == (in_flight and ahead > 0)


def test_serve_py_starts_vllm_as_a_run_does(folder, monkeypatch, capsys):
    started, keys = [], []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append((command, environment)))
    for host, url in {"127.0.0.1": "127.0.0.1", "0.0.0.0": socket.gethostname(), "::1": "[::1]"}.items():
        flags_of_it = f"serve.py --model {folder} --max_model_len 64 --port 8123 --host {host}"
        for given in ("secret", ""):
            monkeypatch.setattr("sys.argv", flags_of_it.split())
            monkeypatch.setenv("VLLM_API_KEY", given)
            serve.main()
            (command, environment), shown = started.pop(), capsys.readouterr().out
            keys.append(environment["VLLM_API_KEY"])
            assert {"8123", host, "processed_logprobs"} <= set(command)
            assert {"extras.servers.weights.Extension", "extras.servers.weights.check_key"} <= set(command)
            assert environment["VLLM_SERVER_DEV_MODE"] == "1" and keys[-1] not in command, "ps shows commands to all"
            line = (f"VLLM_API_KEY={keys[-1]} python scripts/launch.py", f"--server_urls http://{url}:8123\n")
            assert not given or (keys[-1], shown) == ("secret", "")
            assert given or (len(keys[-1]) == 64 and all(part in shown for part in line))
    assert len(set(keys)) == 1 + 3, "each is made anew"


def test_a_wrong_key_is_told_by_its_name():
    server = FakeServer()
    server.key = "another"
    said = f"{server.url} cannot be used: it has another key; set VLLM_API_KEY to the one that scripts"
    with engine_of(server) as engine, pytest.raises(RunError, match=said):
        synced(engine)


# Real servers ---------------------------------------------------------------------------------------------------------

TEMPERATURE = 0.7  # not 1, so that a temperature that only one side applies would show
RUN = {"engine": "server", "dtype": "float32", "max_completion_tokens": 60, "micro_batch_tokens": 512} | NO_EVAL
REWARD = """
def score(completion, answer, columns):
    with open(__file__ + ".graded", "a") as file:
        print(columns["number"], file=file)
    return float(len(completion) % 3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny policy whose context is long enough to be interrupted in, and data whose rows have numbers."""
    folder = make_model(tmp_path_factory.mktemp("long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    rows = [{"problem": f"{i % 5}+{i // 5 % 5}", "answer": "1", "number": i} for i in range(40)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    return folder


def start_real(folder, log):
    settings = EngineSettings(1024, dtype="float32", gpu_memory_utilization=0.5)
    return start_server(engine_options(str(folder), settings, False, 1, EngineDemand(64)), "gloo", KEY, log)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """A server that the tests share: one after the other finds it with the weights of the one before."""
    with patch("extras.servers.start.subprocess", SERVERS):
        process = start_real(folder, tmp_path_factory.mktemp("server") / "0.log")
        yield process
        process.end()


def test_no_process_of_a_server_outlives_it_also_while_it_starts(folder, tmp_path):
    """SIGKILL when it has begun to start others, which are still importing torch."""
    process = start_real(folder, tmp_path / "0.log").process
    wait_for(lambda: len(ranks_of(process)) > 1, 300)  # the first child tracks shared memory
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_running(each.pid) for each in started))


def logprobs_under(policy, rollout):
    """The trainer's log-probs of all tokens that were sampled, completion after completion."""
    rollout = replace(rollout, loss_weights_B=np.zeros(len(rollout.rows), dtype=np.float32))
    batches = [pack(rollout, [b]) for b in range(len(rollout.rows))]
    with torch.no_grad():
        return torch.cat([policy(batch, TEMPERATURE)[0][batch.loss_mask_N] for batch in batches]).numpy()


def endless(folder, factor):
    """The policy, scaled, without an end token: its row of the tied head points against all hidden states."""
    policy = load_policy(str(folder), torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(factor)
        embedding = policy.model.get_input_embeddings().weight
        embedding[:, 0] = 3.0
        embedding[policy.model.config.eos_token_id, 0] = -3.0
    return policy


@pytest.mark.parametrize("sent", [None, 0, 5])
def test_recorded_logprobs_are_those_of_each_tokens_weights(folder, server, sent):
    """Also of a head that is tied to the embedding: vLLM multiplies by a packed copy of it.

    `sent`: tensors after which the run before has ended in a sync; its server stands still, amid an update.
    """
    old, new, sampling = endless(folder, 1.0), endless(folder, 1.2), Sampling(2, TEMPERATURE, 400)
    if sent is not None:
        with engine_of(server, policy=new) as engine, pytest.raises(SystemExit):
            engine.sync(cut(new.full_weights(), sent, sys.exit))
    with engine_of(server, policy=old, version=4, in_flight=True) as engine:
        # Once, but on another machine the new weights may come too early or too late.
        for step, seconds in enumerate((0.1, 0.3, 0.6, 1.2, 2.4, 4.8), start=1):
            engine.policy = old
            synced(engine).begin(ROWS, sampling, (1, step))
            time.sleep(seconds)
            engine.policy = new
            rollout = synced(engine).sample(ROWS, sampling, (1, step))
            is_mixed = [versions[0] < versions[-1] for versions in rollout.parts["versions"]]
            if sum(is_mixed) >= 3:
                break
    versions, recorded = np.concatenate(rollout.parts["versions"]), np.concatenate(rollout.rollout_logprobs)
    old_logprobs, new_logprobs = logprobs_under(old, rollout), logprobs_under(new, rollout)
    assert sum(is_mixed) >= 3 and set(versions.tolist()) == {2 * step + 2, 2 * step + 3}
    assert np.abs(np.where(versions % 2 == 0, old_logprobs, new_logprobs) - recorded).max() < 5e-5
    assert np.abs(old_logprobs - new_logprobs).max() > 0.1, "other weights would show"
    assert np.exp(recorded).mean() > 0.025, "a uniform one would agree with any"


def writers_of(log):
    found = []
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended, or is another user's
            if Path(f"/proc/{pid}/fd/1").readlink() == log:
                found.append(pid)
    return found


def test_the_same_command_completes_a_run_whose_server_is_killed(folder, server, tmp_path):
    """SIGKILL amid a step of two trainers, whose prompts alone are sampled again; then another server samples."""
    out_dir, graded = tmp_path / "run", folder / "reward.py.graded"
    changes = {"reward": f"{folder}/reward.py:score", "total_steps": 5, "save_every": 1, "steps_ahead": 1}
    run = training_flags(folder, out_dir, **RUN, **changes, in_flight=True)
    said_in, log = tmp_path / "said", out_dir / "servers" / "0.log"
    launcher = begin(launched(2, "train_grpo.py", *run), said_in, said_in)
    wait_for(lambda: (out_dir / "step_2").exists() or launcher.poll() is not None, 900)
    for pid in writers_of(log):
        with suppress(ProcessLookupError):  # those that it has started end with it
            os.kill(pid, signal.SIGKILL)
    assert launcher.wait(300) == 1
    last = [line for line in said_in.read_text().splitlines() if line.startswith("error: ")][-1]
    assert all(part in last for part in ("server 0 has failed", "ended by SIGKILL", "continues", "0.log")), last
    assert not writers_of(log)
    torchrun(2, "train_grpo.py", *run, "--server_urls", server.url, VLLM_API_KEY=KEY)
    lines = list(metrics_of(out_dir).values())
    assert [lines[0]["rollout/lag_max"], max(line["rollout/lag_max"] for line in lines), len(lines)] == [0, 1, 5]
    assert max(line["policy/rollout_gap_lag_0"] or 0 for line in lines) < 1e-6
    assert max(line["policy/rollout_gap_lag_1"] or 0 for line in lines) > 1e-5
    assert all(line["policy/rollout_clip_frac"] < 0.5 for line in lines), "corrected by default"
    counts = Counter(graded.read_text().split()) - Counter({"0": 2 * 3})  # the trials at the two starts
    assert counts.keys() == {str(number) for number in range(40)}, "each prompt of the epoch"
    assert min(counts.values()) == 4 and sum(count >= 8 for count in counts.values()) <= 8  # late ones are graded twice
