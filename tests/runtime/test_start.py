"""A rank that fails leaves at once, whoever has launched it, and with its own reason."""

import os
import subprocess
import sys

import pytest

from helpers.runs import ROOT, run_command
from runtime.rank import FOLDER
from runtime.start import reason_file

BEGINS = """
import atexit, multiprocessing, sys, time
sys.path.insert(0, "{root}")
from runtime.rank import RunError
from runtime.start import join_launcher
from command_line import exit_with_error
join_launcher()
""".replace("{root}", str(ROOT))
FAILS = f"""{BEGINS}
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
atexit.register(time.sleep, 3600)  # as NCCL's destroy waits for ranks that wait for this one
lock = multiprocessing.get_context("spawn").Lock()  # as the grading workers have; somebody else puts it away
print("said before")
"""
ENDS = ["raise OSError('no room')", "exit_with_error(MemoryError('no room'))"]


def environment(folder: object = None) -> dict[str, str]:
    """That of the only rank; `folder`: of the launcher, if there is one."""
    return os.environ | {"RANK": "0", "PYTHONUNBUFFERED": ""} | ({FOLDER: str(folder)} if folder else {})


def begin(program: str, folder: object = None) -> subprocess.Popen[bytes]:
    command, pipes = [sys.executable, "-c", program], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment(folder), **pipes)


def status_of(process: subprocess.Popen[bytes], within: float) -> int:
    try:
        return process.wait(within)
    finally:
        process.kill()


@pytest.mark.parametrize("is_launched", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_fails_alone_leaves_without_the_others(end, is_launched, tmp_path):
    done = run_command([sys.executable, "-c", FAILS + end], environment(tmp_path if is_launched else None))
    assert (done.returncode, done.stdout) == (1, "said before\n")
    assert "resource_tracker" not in done.stderr
    assert "no room" in (reason_file(tmp_path, 0).read_text() if is_launched else done.stderr)
    assert ("Traceback" in done.stderr) == ("raise" in end), "where it happened is shown"


@pytest.mark.parametrize("end", [*ENDS, "raise RuntimeError('gloo: Connection closed by peer')"])
def test_a_rank_whose_output_nobody_reads_any_more_leaves_too(end, tmp_path):
    """Python tells a closed pipe by an exception, at the first flush: here after the failure."""
    process = begin(FAILS + end, tmp_path)
    process.stdout.close()
    process.stderr.close()
    assert status_of(process, within=60) == 1 and reason_file(tmp_path, 0).exists()


def test_torchrun_learns_of_a_failed_rank_within_seconds(tmp_path):
    """The other rank is in a collective, for up to 30 minutes."""
    (program := tmp_path / "program.py").write_text(f"""{BEGINS}
import os, torch
torch.distributed.init_process_group("gloo")
if os.environ["RANK"] == "1":
    torch.distributed.barrier()
atexit.register(time.sleep, 3600)
exit_with_error(RunError("no room"))
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(program)]
    done = run_command(command)
    assert done.returncode == 1 and "error: no room\n" in done.stderr


SYSTEM = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.29.7\nncclSystemError: System call (e.g. socket, malloc) or external "
    "library call failed or device error. \nLast error:\n"
)
REMOTE = SYSTEM.replace("unhandled system error", "remote process exited or there was a network error")
FULL = "Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888), error: No space left on device"
ABORTED = "NCCL communicator was aborted on rank 1.  Original reason for failure was: "
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
OWN = [  # what a library says -> what belongs to the reason
    (f"{SYSTEM}{FULL}\n", FULL),
    (f"{SYSTEM}Bootstrap : no socket interface found\nException raised from create", "no socket interface found"),
    (f"{SYSTEM}socketStartConnect: Connect to 10.0.0.1<41> failed : Connection refused", "Connection refused"),
    ("NCCL error in: a.cpp:1, invalid usage\nncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 1", "Duplic"),
    ("NCCL error in: a.cpp:1, unhandled cuda error\nLast error:\nCuda failure 217 'peer access is not sup", "peer acc"),
    (f"{ABORTED}CUDA error: an illegal memory access was encountered", "illegal memory access"),
    ("NCCL error in: a.cpp:1, internal error, NCCL version 2.29.7\nncclInternalError\nLast error:\n", "internal error"),
    ("[enforce fail at gloo/transport/tcp/device.cc:84] rp != nullptr. Unable to find address for: eth7", "eth7"),
]
LOST = [
    f"{REMOTE}socketProgress: Connection closed by remote peer node2<42830>",
    f"{REMOTE}socketProgressOpt: Call to recv from 10.0.0.1<33759> failed : Connection reset by peer",
    "NCCL error: remote process exited or there was a network error",  # vLLM's own communicator
    f"{ABORTED}[PG 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, Timeout(ms)=600000) ran",
    f"{GLOO}Connection closed by peer [127.0.0.1]:41",
    f"{GLOO}Write error [127.0.0.1]:41: Broken pipe",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: wait timeout after 600000ms",
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
]


@pytest.mark.parametrize(("said", "words"), OWN + [(each, None) for each in LOST])
def test_an_error_of_a_rank_is_told_from_the_loss_of_the_others(said, words, tmp_path):
    """A loss goes to a file of the rank; an error of its own, with NCCL's last words, to the screen."""
    program = f"{BEGINS}class DistBackendError(RuntimeError): pass\nraise DistBackendError({said!r})"
    done = run_command([sys.executable, "-c", program], environment(tmp_path) | {"TMPDIR": str(tmp_path)})
    has_lost = "rank 0 has lost the others; its traceback is in" in done.stderr
    assert has_lost == (words is None) and ("Traceback" in done.stderr) != has_lost
    reason = reason_file(tmp_path, 0).read_text()
    assert "DistBackendError: " in reason and (words or "") in reason and "Exception raised" not in reason


@pytest.mark.parametrize(("is_armed", "status"), [(False, 75), (True, 1)])
def test_a_signal_ends_a_rank_whose_output_nobody_reads_any_more(is_armed, status):
    """It is heard in a thread, which an exception would end alone."""
    program = f"{BEGINS}from runtime.signals import arm, listen\nlisten()\n{'arm(0.2)' * is_armed}\nprint(flush=True)\n"
    process = begin(program + "time.sleep(3600)")
    process.stdout.readline()
    process.stderr.close()
    process.terminate()
    assert status_of(process, within=20) == status


PRINTS = f"""{BEGINS}
import os
from pathlib import Path
from grading import Case
from grading.pool import Pool
from runtime.start import print_any_text
print_any_text()
folder = Path(sys.argv[1])
(folder / "my_reward.py").write_text('''
def score(completion):
    print(completion * 9999, flush=True)
    return 1.0
''')
pool = Pool("grading.score:RewardWorker", (str(folder / "my_reward.py:score"), None), 1, 60.0)
for i in range(2):
    print("é" * 99999, flush=True)
    print("e" * 99999, file=sys.stderr)
    pool.submit(i, ("grade", Case("text", "")))
    time.sleep(0.1)
outcomes = pool.collect()
(folder / "done").write_text(" ".join(outcomes[i].status for i in range(2)))
pool.close()
"""


@pytest.mark.parametrize("console", ["| head -1", "> /dev/full 2>&1", ">&- 2>&-", "2>&1 >&- | head -1"])
def test_a_console_that_is_closed_ends_no_run_and_fails_no_reward(console, tmp_path):
    """Nor one on a disk that is full. What a user's code prints in a worker is dropped, too."""
    (program := tmp_path / "program.py").write_text(PRINTS)
    command = f"{sys.executable} {program} {tmp_path} {console}; exit ${{PIPESTATUS[0]}}"
    done = run_command(["bash", "-c", command], environment())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").read_text() == "ok ok"
