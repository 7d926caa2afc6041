"""A rank that fails leaves at once, whatever its libraries do at exit."""

import os
import subprocess
import sys

import pytest

from guards.start import FOLDER, reason_file
from helpers import ROOT

FAILS = """
import atexit, multiprocessing, sys, time
sys.path.insert(0, "{root}")
from guards.start import join_launcher
from inputs.command_line import exit_with_error
join_launcher()
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
atexit.register(time.sleep, 600)  # as NCCL's destroy waits for ranks that wait for this one
lock = multiprocessing.get_context("spawn").Lock()  # as the grading workers have; somebody else puts it away
print("said before")
{end}
"""


@pytest.mark.parametrize("end", ["raise OSError('no room')", "exit_with_error(MemoryError('no room'))"])
def test_a_rank_that_fails_alone_does_not_wait_for_the_others_at_exit(end, tmp_path):
    command = [sys.executable, "-c", FAILS.format(root=ROOT, end=end)]
    environment = os.environ | {"RANK": "0", FOLDER: str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "said before\n")
    assert "resource_tracker" not in done.stderr
    assert "no room" in reason_file(tmp_path, 0).read_text()
