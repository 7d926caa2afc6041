"""scripts/slurm_example.sh with stand-ins for Slurm's commands."""

import os
import signal
import subprocess

import pytest

from helpers.runs import GUARD_SECONDS, ROOT, wait_for

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
trap 'echo saved >> "$OUT"; exit ${STATUS_ON_SIGNAL:-0}' USR1
echo "$NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT" >> "$OUT"
for _ in $(seq "${SECONDS_OF_RUN:-600}"); do sleep 1 & wait $!; done
exit "${STATUS:-0}"
"""


@pytest.fixture
def job(tmp_path):
    for folder in (".venv/bin", "scripts"):
        (tmp_path / folder).mkdir(parents=True)
    programs = {"srun": SRUN, "scontrol": SCONTROL, "scripts/run.sh": RUN, ".venv/bin/python": PYTHON}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start(*before: str, **environment: str) -> subprocess.Popen[bytes]:
        slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456"}
        place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
        command = ["bash", ROOT / "scripts" / "slurm_example.sh", *before, tmp_path / "scripts/run.sh"]
        everything = os.environ | slurm | place | environment
        return subprocess.Popen([*command, "--steps_ahead", "2"], cwd=tmp_path, env=everything)

    return start


SEEDS = [str(ROOT / "scripts" / "seeds.sh"), "3"]
# The last task of an array has the array's own number, by which Slurm would queue all of them.
ARRAY = {"SLURM_ARRAY_JOB_ID": "123456", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize(("number", "before", "environment", "status", "last"), [
    (signal.SIGUSR1, [], {"STATUS_ON_SIGNAL": "75"}, 75, "requeue 123456"),
    (signal.SIGTERM, [], {}, 0, "requeue 123456"),
    (signal.SIGUSR1, SEEDS, ARRAY, 0, "requeue 123456_2"),
    (signal.SIGUSR1, [], {"STATUS_ON_SIGNAL": "1"}, 1, "saved"),  # it could not save: it is not begun again
])  # fmt: skip
def test_a_job_that_must_go_saves_and_queues_itself_again(number, before, environment, status, last, job, tmp_path):
    process = job(*before, **environment)
    wait_for((tmp_path / "out").exists)
    process.send_signal(number)
    assert process.wait(GUARD_SECONDS) == status
    assert (tmp_path / "out").read_text().splitlines() == list(dict.fromkeys(["2 1 node7 23456", "saved", last]))
    assert (tmp_path / "out.flags").read_text() == f"--steps_ahead 2{' --seed 2' * bool(before)}\n"


@pytest.mark.parametrize("status", [0, 3])
def test_a_run_that_has_ended_ends_the_job_with_its_status(status, job, tmp_path):
    assert job(SECONDS_OF_RUN="0", STATUS=str(status)).wait(GUARD_SECONDS) == status
    assert "requeue" not in (tmp_path / "out").read_text()


def test_the_last_nodes_of_a_job_serve_one_server_for_each_gpu(job, tmp_path):
    process = job(SECONDS_OF_RUN="2", SERVER_NODES="1", SLURM_GPUS_PER_NODE="2", SERVE="--model m --max_model_len 64")
    assert process.wait(GUARD_SECONDS) == 0
    assert (tmp_path / "out").read_text().splitlines() == ["1 1 node7 23456"]
    urls = "http://node8:23457 http://node8:23458"
    assert (tmp_path / "out.flags").read_text() == f"--steps_ahead 2 --engine server --server_urls {urls}\n"
    begun = f"64 {tmp_path}/scripts/../scripts/serve.py --host 0.0.0.0"  # the secret has 64 characters
    servers = [f"{gpu} {begun} --port {23457 + gpu} --model m --max_model_len 64\n" for gpu in (0, 1)]
    assert sorted((tmp_path / "out.servers").open()) == servers
