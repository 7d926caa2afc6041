"""Workers: a reward that misbehaves costs one completion, and nothing outlives the caller or holds it up."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from grading.pool import Limits, Outcome, Pool
from grading.verifiers import Case

ROOT = Path(__file__).parent.parent.parent
FAILING = f"{Path(__file__).parent}/rewards_that_fail.py:score"


def start(
    spec: str = FAILING, num_workers: int = 1, timeout: float = 5.0, memory_gib: float = 4.0, **others: int
) -> Pool:
    limits = Limits(num_workers, timeout, memory_gib, **others)
    return Pool("grading.score:Handler", (spec, None), limits, "grading.preload")


def run(pool: Pool, texts: list[str], answer: str = "") -> list[Outcome]:
    for i, text in enumerate(texts):
        pool.submit(i, ("grade", Case(text, answer)))
    outcomes = pool.collect()
    return [outcomes[i] for i in range(len(texts))]


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], check=False, capture_output=True, text=True).stdout
    return [int(line) for line in found.split()]


def tree(pid: int) -> list[int]:
    """The process with all that descend from it."""
    return [pid, *(each for child in children(pid) for each in tree(child))]


def fork_server(pool: Pool) -> int:
    """Once it has a worker: it may just be starting again."""
    deadline = time.monotonic() + 10
    while not (found := [pid for pid in children(pool.dispatcher.pid) if children(pid)]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def is_alive(pid: int) -> bool:
    """False for one that is gone, and for one that waits for its exit status to be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "some outlive their caller"
        time.sleep(0.02)


def left_behind() -> bool:
    found = subprocess.run(["pgrep", "-f", "left behind by a [r]eward"], check=False, capture_output=True)
    return found.returncode == 0


def test_a_reward_that_misbehaves_costs_one_completion_and_the_others_are_graded():
    deeds = {
        "loop": "timeout",
        "allocate": "error: MemoryError",
        "allocate and keep": "error: MemoryError",
        "raise": "error: ValueError: no such luck",
        "nan": "error: ValueError: score returned nan",
        "text": "error: ValueError: score returned '1'",
        "exit": "error: SystemExit: 3",
        "hard exit": "error: it ended its process (exit status 0)",
        "crash": "error: it ended its process (signal 11)",
        "stop": "timeout",
        "write to every socket": "error: it ended its process",
        "close every file": "error: it ended its process",
        "half a character": "error: ValueError: \\udc80",
        "leave a child and exit": "error: it ended its process",
        "fork a child and exit": "error: it ended its process",
    }
    pool = start(num_workers=2, timeout=2.0, memory_gib=0.25)
    outcomes = run(pool, [text for deed in deeds for text in (deed, "fine x")], "x")
    for outcome, wanted in zip(outcomes[::2], deeds.values(), strict=True):
        assert outcome.status.startswith(wanted) and outcome.value is None
    assert all(outcome.status == "ok" and outcome.value.reward == 1.0 for outcome in outcomes[1::2])
    (outcome,) = run(pool, ["leave a child"], "x")
    assert outcome.status == "ok" and left_behind()
    pool.close()
    assert not left_behind()


def test_what_a_completion_leaves_behind_does_not_touch_the_next_one(tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "import signal\n"
        "class Silent(Exception):\n"
        "    def __str__(self):\n"
        "        raise RuntimeError('no text either')\n"
        "def ring(*_):\n"
        "    raise TimeoutError('late')\n"
        "def score(completion, answer, columns):\n"
        "    if completion == 'alarm':\n"
        "        signal.signal(signal.SIGALRM, ring)\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "    if completion == 'silent':\n"
        "        raise Silent\n"
        "    if completion == 'slow':\n"
        "        import time; time.sleep(0.5)\n"
        "    return 1\n"
    )
    pool = start(f"{tmp_path}/my_reward.py:score")
    outcomes = run(pool, ["alarm", "slow", "silent", "slow"])
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "error: Silent", "ok"]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pool.submit(0, ("grade", Case("", "", {"function": lambda: None})))
    assert run(pool, ["fine"])[0].status == "ok", "what cannot be sent is not waited for"
    pool.close()


def test_ten_thousand_gradings_with_one_in_a_hundred_failing_lose_nothing_and_leak_nothing():
    deeds = ["loop", "allocate", "hard exit", "raise"]
    texts = [deeds[i // 100 % 4] if i % 100 == 50 else f"the answer {i} is x{i % 2}" for i in range(10_000)]
    pool = start(num_workers=2, timeout=0.2, memory_gib=0.15)
    servers = [pool.dispatcher.pid, fork_server(pool)]

    def used() -> tuple[list[int], list[int]]:
        """Open files and resident KiB of the dispatcher and the fork server."""
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in servers]
        files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in servers]
        return files, [int(status.partition("VmRSS:")[2].split()[0]) for status in statuses]

    run(pool, texts[:100], "x1")
    files_before, kib_before = used()
    for i, outcome in enumerate(run(pool, texts, "x1")):
        assert (outcome.status != "ok") == (i % 100 == 50), (i, outcome)
        assert outcome.status != "ok" or outcome.value.reward == float(i % 2)
    deadline = time.monotonic() + 10  # a worker that replaces another may just be starting
    while (found := used())[0] != files_before and time.monotonic() < deadline:
        time.sleep(0.1)
    files_after, kib_after = found
    assert files_after == files_before
    assert all(after < before + 20_000 for before, after in zip(kib_before, kib_after, strict=True))
    workers = children(servers[1])
    assert len(workers) == 2
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in [*servers, *workers])


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("deed", ["return twice", "raise in a child"])
def test_a_forked_child_that_returns_into_the_worker_shifts_no_outcome(deed, in_flight):
    texts = [deed if i % 10 == 0 else f"the answer {i} is x{i % 2}" for i in range(200)]
    pool = start(num_workers=2, in_flight=in_flight)
    for i, outcome in enumerate(run(pool, texts, "x1")):
        assert outcome.status == "ok" and outcome.value.reward == float(i % 10 > 0 and i % 2), (i, outcome)
    pool.close()


def test_a_module_that_forks_answers_once(tmp_path):
    (tmp_path / "my_reward.py").write_text("import os\nos.fork()\ndef score(completion):\n    return len(completion)\n")
    pool = start(f"{tmp_path}/my_reward.py:score")
    assert [outcome.value.reward for outcome in run(pool, ["a", "bb", "ccc"])] == [1.0, 2.0, 3.0]
    pool.close()


def test_a_worker_has_as_many_items_in_work_as_it_may():
    pool = start(num_workers=1, in_flight=20)
    begin = time.monotonic()
    assert [outcome.status for outcome in run(pool, ["sleep"] * 40)] == ["ok"] * 40
    assert 1.0 <= time.monotonic() - begin < 5.0, "twice half a second, not forty times"
    pool.close()


def test_an_item_that_fails_among_others_costs_no_other_one():
    deeds = {"loop": "timeout", "hard exit": "error: it ended", "raise": "error: ValueError"}
    texts = [text for deed in deeds for text in ("sleep", deed, "fine x", "sleep")] * 3
    pool = start(num_workers=2, timeout=2.0, in_flight=8)
    for text, outcome in zip(texts, run(pool, texts, "x"), strict=True):
        assert outcome.status.startswith(deeds.get(text, "ok")), (text, outcome)
    pool.close()


@pytest.mark.parametrize("deed", ["hold the interpreter", "stop", "write to every socket"])
def test_an_item_that_keeps_the_others_of_its_worker_from_running_costs_no_other_one(deed):
    texts = ["sleep", deed, "x" * 300_000, "sleep", "x" * 300_000, "x", "sleep"]  # more than a pipe holds
    pool = start(num_workers=1, timeout=2.0, in_flight=8)
    dispatcher = pool.dispatcher.pid
    for text, outcome in zip(texts, run(pool, texts, "x"), strict=True):
        wanted = "error: it ended its process" if deed == "write to every socket" else "timeout"
        assert outcome.status.startswith(wanted if text == deed else "ok"), (text[:20], outcome)
    assert pool.dispatcher.pid == dispatcher
    pool.close()


def test_more_threads_than_the_memory_holds_end_the_start():
    with pytest.raises(ValueError, match=r"1000 threads in one process do not fit into 0\.25 GiB"):
        start(in_flight=1000, memory_gib=0.25)


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize(
    ("deed", "status"),
    [
        ("raise OSError('no')", "error: OSError: no (my_reward.py, line 7)"),
        ("time.sleep(60)", "timeout"),
        ("os._exit(3)", "error: it ended its process (exit status 3)"),
    ],
)
def test_what_failed_is_tried_again_as_often_as_it_may_be(deed, status, in_flight, tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "import os, pathlib, time\n"
        "def score(completion):\n"
        f"    file = pathlib.Path({str(tmp_path)!r}) / completion\n"
        "    with file.open('a') as tries:\n"
        "        tries.write('x')\n"
        "    if completion == 'always' or (completion == 'once' and len(file.read_text()) == 1):\n"
        f"        {deed}\n"
        "    return 1.0\n"
    )
    pool = start(f"{tmp_path}/my_reward.py:score", num_workers=2, timeout=1.0, num_retries=1, in_flight=in_flight)
    outcomes = run(pool, ["never", "once", "always"])
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", status]
    assert (tmp_path / "always").read_text() in ("xx", "xxx"), "where workers are shared, a crash is told apart first"
    pool.close()


@pytest.mark.parametrize("whom", ["dispatcher", "fork server"])
def test_a_server_that_is_killed_is_replaced_and_its_work_done_again(whom):
    pool = start(num_workers=2)
    everything = tree(pool.dispatcher.pid)
    for i in range(100):
        pool.submit(i, ("grade", Case(f"fine {i}", "fine")))
        if i == 50:
            pid = pool.dispatcher.pid if whom == "dispatcher" else fork_server(pool)
            os.kill(pid, signal.SIGKILL)
    outcomes = pool.collect()
    assert sorted(outcomes) == list(range(100)) and all(each.value.reward == 1.0 for each in outcomes.values())
    wait_until_gone(everything)
    assert run(pool, ["fine"], "fine")[0].value.reward == 1.0  # the new one starts with new work
    os.kill(fork_server(pool), signal.SIGKILL)  # while nothing is to be done
    assert run(pool, ["fine"], "fine")[0].value.reward == 1.0
    pool.close()


def test_a_server_that_cannot_live_is_not_replaced_for_ever(monkeypatch):
    pool = start()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool.dispatcher.kill()
    with pytest.raises(RuntimeError, match="ended 4 times, last with exit status 1"):
        pool.collect()


def test_a_reward_that_stops_loading_is_told_at_the_next_collect(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text("import os\ndef score(completion, answer, columns):\n    os._exit(1)\n")
    pool = start(f"{file}:score")
    file.write_text("raise ValueError('changed in between')\n")
    pool.submit(0, ("grade", Case("", "")))
    pool.submit(1, ("grade", Case("", "")))
    with pytest.raises(ValueError, match="changed in between"):
        pool.collect()
    assert not is_alive(pool.dispatcher.pid)


@pytest.mark.parametrize("completion", ["fine", "loop"])
def test_nothing_is_left_when_the_caller_is_killed(completion):
    code = f"""
        import sys, time
        from grading.pool import Limits, Pool
        from grading.verifiers import Case
        pool = Pool("grading.score:Handler", ({FAILING!r}, None), Limits(2, 600.0, 4.0), "grading.preload")
        pool.submit(0, ("grade", Case({completion!r}, "")))
        time.sleep(0.3)
        print(pool.dispatcher.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as caller:
        everything = tree(int(caller.stdout.readline()))
        assert len(everything) >= 4
        caller.kill()
    wait_until_gone(everything)


def test_submitting_does_not_wait_even_for_a_dispatcher_that_has_stopped():
    pool = start()
    os.kill(pool.dispatcher.pid, signal.SIGSTOP)
    begin = time.monotonic()
    for i in range(100):
        pool.submit(i, ("grade", Case("x" * 300_000, "x")))
    assert time.monotonic() - begin < 1.0
    os.kill(pool.dispatcher.pid, signal.SIGCONT)
    assert all(outcome.value.reward == 1.0 for outcome in pool.collect().values())
    pool.close()


def test_workers_go_on_and_time_outs_are_kept_while_the_caller_is_busy():
    pool = start(num_workers=2, timeout=0.3)
    for i in range(200):
        pool.submit(i, ("grade", Case("loop" if i < 2 else f"fine {i}", "fine")))
    begin = time.monotonic()
    while time.monotonic() - begin < 2.0:  # holds the interpreter, as an engine does
        sum(range(1000))
    begin = time.monotonic()
    outcomes = pool.collect()
    assert time.monotonic() - begin < 0.2, "all was done before"
    assert [outcomes[i].status for i in range(200)] == ["timeout"] * 2 + ["ok"] * 198
    pool.close()


MAIN = """
    import multiprocessing, sys
    import torch
    from grading.pool import Limits, Pool
    from grading.verifiers import Case

    print("the main script is run", flush=True)

    def grade():
        pool = Pool("grading.score:Handler", (sys.argv[1], None), Limits(2, 20.0, 4.0), "grading.preload")
        pool.submit(0, ("grade", Case("", "")))
        print(pool.collect()[0], flush=True)
        pool.close()

    if __name__ == "__main__":
        if sys.argv[2] == "forked":
            process = multiprocessing.get_context("forkserver").Process(target=grade)
            process.start()
            process.join()
        else:
            grade()
"""


@pytest.mark.parametrize("how", ["called", "forked"])
def test_workers_import_neither_the_callers_main_script_nor_torch(how, tmp_path):
    (tmp_path / "main.py").write_text(textwrap.dedent(MAIN))
    (tmp_path / "torch.py").write_text("# takes no seconds\n")
    (tmp_path / "my_reward.py").write_text(
        "import sys\n"
        "def score(completion, answer, columns):\n"
        "    return 'torch' in sys.modules or 'numpy' in sys.modules\n"
    )
    (tmp_path / "here").mkdir()
    if how == "called":  # the other caller comes from a fork server that would import it, too
        (tmp_path / "here" / "socket.py").write_text("raise RuntimeError('imported from the working directory')\n")
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py", f"{tmp_path}/my_reward.py:score", how],
        cwd=tmp_path / "here",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "reward=0.0, status='ok'" in done.stdout, done.stderr[-2000:]
    runs = 1 if how == "called" else 2  # the second is the caller's own: it is itself a child of a fork server
    assert done.stdout.count("the main script is run") == runs
