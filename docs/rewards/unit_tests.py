"""Runs the row's unit tests on generated code: --reward docs/rewards/unit_tests.py:score

The answer is Python code with assertions. The reward is 1 if all hold. The risk: the code runs with the rights of the
training, and the limits below stop loops and full memory, but no network access and no deleted files; use a container.
"""

import re
import resource
import subprocess
import sys
import tempfile

SECONDS, GIB = 4, 2**30  # below --reward_timeout


def limit() -> None:
    """What the child process may use: processor time, memory, the size of a file."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


def score(completion, answer):
    blocks = re.findall(r"```(?:python)?\n(.*?)```", completion.rpartition("</think>")[2], re.DOTALL)
    if not blocks:
        return {"reward": 0.0, "has_code": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", f"{blocks[-1]}\n{answer}\nprint('all tests' ' passed')"],
                cwd=folder, env={}, preexec_fn=limit, timeout=SECONDS, capture_output=True, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"reward": 0.0, "has_code": 1.0}
    is_right = done.returncode == 0 and done.stdout.endswith("all tests passed\n")  # not so after sys.exit(0)
    return {"reward": float(is_right), "has_code": 1.0}
