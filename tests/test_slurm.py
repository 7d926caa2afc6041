"""scripts/slurm_example.sh with stand-ins for Slurm's commands: it passes signals on, and queues itself again."""

import os
import signal
import subprocess
import time

import pytest

from helpers import ROOT

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=1 exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1" = show ] && printf 'node7\\nnode8\\n' && exit
echo "$@" >> "$OUT"
"""
PYTHON = """#!/usr/bin/env bash
echo "$CUDA_VISIBLE_DEVICES ${#VLLM_API_KEY} $*" >> "$OUT.servers"
"""
RUN = """echo "$@" > "$OUT.flags"
echo "$NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT" >> "$OUT"
trap 'echo saved >> "$OUT"; exit ${STATUS_ON_SIGNAL:-0}' USR1
for _ in $(seq "${SECONDS_OF_RUN:-600}"); do sleep 1 & wait $!; done
exit "${STATUS:-0}"
"""


@pytest.fixture
def job(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("run.sh", RUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(PYTHON)
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)

    def start(*before: str, **environment: str) -> subprocess.Popen[bytes]:
        slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456"}
        place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
        command = ["bash", str(ROOT / "scripts" / "slurm_example.sh"), *before, str(tmp_path / "run.sh")]
        return subprocess.Popen(
            [*command, "--steps_ahead", "2"], cwd=tmp_path, env=os.environ | slurm | place | environment
        )

    return start


def begun(tmp_path) -> None:
    deadline = time.monotonic() + 30
    while not (tmp_path / "out").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # its trap


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_that_must_go_saves_and_queues_itself_again(job, tmp_path, number):
    process = job()
    begun(tmp_path)
    process.send_signal(number)
    assert process.wait(30) == 0
    assert (tmp_path / "out").read_text().splitlines() == ["2 1 node7 23456", "saved", "requeue 123456"]


def test_a_task_of_an_array_trains_its_seed_and_queues_itself_alone(job, tmp_path):
    """The last task of an array has the array's own number, by which Slurm would queue all of its tasks again."""
    array = {"SLURM_ARRAY_JOB_ID": "123456", "SLURM_ARRAY_TASK_ID": "2"}
    process = job(str(ROOT / "scripts" / "seeds.sh"), "3", **array)
    begun(tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 0
    assert (tmp_path / "out").read_text().splitlines() == ["2 1 node7 23456", "saved", "requeue 123456_2"]
    assert (tmp_path / "out.flags").read_text() == "--steps_ahead 2 --seed 2\n"


def test_a_run_that_could_not_save_is_not_begun_again_and_a_failure_is_one(job, tmp_path):
    process = job(STATUS_ON_SIGNAL="1")
    begun(tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 1
    assert "requeue" not in (tmp_path / "out").read_text()
    assert job(SECONDS_OF_RUN="0", STATUS="3").wait(30) == 3


def test_a_complete_run_ends_the_job(job, tmp_path):
    assert job(SECONDS_OF_RUN="0").wait(30) == 0
    assert "requeue" not in (tmp_path / "out").read_text()


def test_the_last_nodes_sample_on_a_server_for_each_gpu_with_a_secret_of_the_job(job, tmp_path):
    process = job(SECONDS_OF_RUN="2", SERVER_NODES="1", SLURM_GPUS_PER_NODE="2", SERVE="--model m --max_model_len 64")
    assert process.wait(30) == 0
    assert (tmp_path / "out").read_text().splitlines() == ["1 1 node7 23456"]
    urls = "http://node8:23457 http://node8:23458"
    assert (tmp_path / "out.flags").read_text() == f"--steps_ahead 2 --engine server --server_urls {urls}\n"
    common = "64 scripts/serve.py --host 0.0.0.0 --port {} --model m --max_model_len 64"
    servers = sorted((tmp_path / "out.servers").read_text().splitlines())
    assert servers == [f"0 {common.format(23457)}", f"1 {common.format(23458)}"]
