"""Workers: a reward that misbehaves costs one completion, and nothing outlives the caller or holds it up."""

import os
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from pebble.pool.process import PoolManager

from grading import Case, Grade
from grading import pool as grading_pool
from grading.pool import Failure, Pool
from helpers.runs import ROOT, wait_for

FAILING = f"{ROOT}/tests/helpers/user_code.py:score"


def start(spec: str = FAILING, num_workers: int = 1, timeout: float = 60.0, in_flight: int = 1) -> Pool:
    """By default the time-out is a guard, which no sound item reaches on a busy machine."""
    return Pool("grading.score:RewardWorker", (spec, None), num_workers, timeout, in_flight)


def run(pool: Pool, texts: list[str], answer: str = "") -> list[Grade | Failure]:
    for i, text in enumerate(texts):
        pool.submit(i, ("grade", Case(text, answer)))
    outcomes = pool.collect()
    return [outcomes[i] for i in range(len(texts))]


def status_of(outcome: Grade | Failure) -> str:
    return str(outcome) if isinstance(outcome, Failure) else "ok"


def is_alive(pid: str) -> bool:
    """False for one that is gone, and for one that waits for its exit status to be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_reward_that_misbehaves_costs_one_completion(monkeypatch):
    monkeypatch.setattr(grading_pool, "MEMORY_GIB", 0.25)
    pool = start(num_workers=2, timeout=2.0)
    assert [status_of(outcome) for outcome in run(pool, ["loop", "stop"])] == ["timeout"] * 2
    pool.timeout = 60.0
    deeds = {
        "allocate": "error: MemoryError", "raise": "error: ValueError: no such luck (user_code.py, line 25)",
        "nan": "error: WrongReturn: score returned nan", "exit": "error: SystemExit: 3",
        "hard exit": "error: it ended its process (exit status 0)", "crash": "error: it ended its process",
        "close every file": "error: it ended its process", "half a character": "error: ValueError: \\udc80",
        "fork a child and exit": "error: it ended its process",
    }  # fmt: skip
    outcomes = run(pool, [text for deed in deeds for text in (deed, "fine x")], "x")
    for outcome, wanted in zip(outcomes[::2], deeds.values(), strict=True):
        assert status_of(outcome).startswith(wanted)
    assert all(outcome.reward == 1.0 for outcome in outcomes[1::2])
    (outcome,) = run(pool, ["leave a child"], "x")
    child = str(int(outcome.reward))
    assert is_alive(child)
    pool.close()
    wait_for(lambda: not is_alive(child))  # killed, but on a busy machine not yet gone


def test_leftovers_of_a_completion_do_not_touch_the_next_one(tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "import os, signal, time\n"
        "def ring(*_): raise TimeoutError('late')\n"
        "def score(completion):\n"
        "    if completion == 'alarm': signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "    if completion == 'fork': os.fork()\n"
        "    if completion == 'worn out': os.kill(os.getpid(), signal.SIGUSR2)\n"
        "    if completion == 'slow': time.sleep(0.5)\n"
        "    return len(completion)\n"
    )
    pool = start(f"{tmp_path}/my_reward.py:score")
    texts = ["alarm", "slow", "fork", "x", "worn out", "fork", "yy"]
    assert [outcome.reward for outcome in run(pool, texts)] == list(map(len, texts))
    pool.close()


@pytest.mark.parametrize("in_flight", [1, 4])
def test_thousands_of_gradings_with_killed_workers_lose_none(in_flight, tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "import os, signal, time\n"
        "def score(completion):\n"
        "    if completion == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if completion == '2': time.sleep(600)\n"
        "    if completion == '3': bytearray(8 << 30)\n"
        "    if completion == '4': os._exit(0)\n"
        "    return len(completion)\n"
    )
    wanted = {"1": "error: it ended", "2": "timeout", "3": "error: MemoryError", "4": "error: it ended"}
    count = 2000 if in_flight == 1 else 1000
    texts = ["1341341342"[i // 50 % 10] if i % 50 == 25 else f"text {i}" for i in range(count)]
    # On a busy machine a worker that has ended is seen a second later.
    pool = start(f"{tmp_path}/my_reward.py:score", num_workers=4, timeout=3.0, in_flight=in_flight)
    for text, outcome in zip(texts, run(pool, texts), strict=True):
        assert status_of(outcome).startswith(wanted.get(text, "ok")), (text, outcome)
        assert text in wanted or outcome.reward == len(text)
    pool.close()


def test_items_that_wait_share_a_worker_and_a_late_one_costs_no_other():
    pool, seconds = start(in_flight=20), []
    for count in (1, 1, 40):  # the first one loads the worker
        begin = time.monotonic()
        assert [status_of(outcome) for outcome in run(pool, ["sleep"] * count)] == ["ok"] * count
        seconds.append(time.monotonic() - begin)
    assert seconds[2] < 20 * seconds[1], "twenty wait at a time: two rounds, not forty"
    pool.timeout = 2.0
    deeds = {"loop": "timeout", "hard exit": "error: it ended", "raise": "error: V", "hold the interpreter": "timeout"}
    texts = [text for deed in deeds for text in ("sleep", deed, "fine x", "sleep")]
    for text, outcome in zip(texts, run(pool, texts, "x"), strict=True):
        assert status_of(outcome).startswith(deeds.get(text, "ok")), (text, outcome)
    pool.close()


def test_a_pool_may_break_often_if_items_are_done_in_between():
    pool = start()
    for _ in range(7):
        assert run(pool, ["fine x"], "x")[0].status == "ok"
        pool.pool._pool_manager.handle_broken_pool(BrokenProcessPool("a worker's death was seen before its item"))
    pool.close()


def test_a_workers_death_seen_before_its_item_is_remembered(monkeypatch):
    read = PoolManager.process_next_message
    monkeypatch.setattr(PoolManager, "process_next_message", lambda self, _: time.sleep(0.2) or read(self, 0.0))
    pool = start(num_workers=2, timeout=600.0)
    first, begin = pool.pool, time.monotonic()
    deeds = {"hard exit": "error: it ended its process", "crash": "error: it ended its process", "fine x": "ok"}
    for outcome, wanted in zip(run(pool, list(deeds), "x"), deeds.values(), strict=True):
        assert status_of(outcome).startswith(wanted)
    assert pool.pool is first and time.monotonic() - begin < 300.0, "neither given up nor waited for"
    pool.close()


def test_the_caller_hears_what_it_waits_for():
    pool, heard = start(timeout=1.5), []
    for key, text in enumerate(("fine", "loop")):
        pool.submit(key, ("grade", Case(text, "")))
    pool.collect(heard.append)
    assert 1 in heard
    pool.close()


def test_a_failure_to_load_is_told_and_one_later_too(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text("import os\ndef score(completion, answer, columns):\n    os._exit(1)\n")
    pool = start(f"{file}:score")
    pool.submit(0, ("inputs", None))
    assert pool.collect()[0].status == "ok"
    file.write_text("raise ValueError('changed in between')\n")
    pool.submit(0, ("grade", Case("", "")))
    pytest.raises(ValueError, pool.collect).match(r"changed in between \(my_reward.py, line 1\)")


MAIN = """
import os, signal, sys, time
import torch
from grading import Case, pool as grading_pool
from grading.pool import Pool

print("the main script is run", flush=True)

if __name__ == "__main__":
    pool = Pool("ends_late:RewardWorker", (sys.argv[1], None), 2, 600.0)
    pool.submit(0, ("grade", Case("", "")))
    print(pool.collect()[0], flush=True)
    pool.submit(1, ("grade", Case("wait", "")))
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""
ENDS_LATE = """
import time
from grading.score import RewardWorker

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(600)

late = Late()
"""
WAITS = """
import os, sys, time

def score(completion):
    if completion == 'wait':
        open('PIDS', 'w').write(f'{os.getpid()} {os.getppid()}')
        time.sleep(600)
    return 'torch' in sys.modules or 'numpy' in sys.modules
"""


def test_workers_import_no_main_script_and_die_with_the_caller(tmp_path):
    """Workers import neither the main script nor torch, and end when the caller is killed; their fork server, too,
    which does not wait for the end of what it has imported.
    """
    waits = WAITS.replace("PIDS", f"{tmp_path}/pids")
    for name, code in {"main": MAIN, "ends_late": ENDS_LATE, "torch": "", "my_reward": waits}.items():
        (tmp_path / f"{name}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py", f"{tmp_path}/my_reward.py:score"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, check=False,
        stdout=(tmp_path / "out").open("w"),  # a pipe would be waited for as long as a worker holds it
    )  # fmt: skip
    assert done.returncode == -9
    out = (tmp_path / "out").read_text()
    assert out.count("the main script is run") == 1 and "reward=0.0, status='ok'" in out, out
    pids = (tmp_path / "pids").read_text().split()  # the worker and the fork server
    wait_for(lambda: not any(map(is_alive, pids)), 10)
