"""A Python that the model may call, with limits of time and memory.

    --tools docs/environments/python_tool.py:python --reward math --max_turns 4

The risk: the code runs as you, on this machine, and may read and send what you can. Use a container without a network.
"""

import resource
import subprocess
import sys

SECONDS, GIB, MOST_CHARACTERS = 3, 1, 2000


def python(code: str) -> str:
    """Runs Python code and returns what it prints.

    Args:
        code: The code, which prints its result.
    """
    command = [sys.executable, "-I", "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False, preexec_fn=limit
        )
    except subprocess.TimeoutExpired:
        return f"error: not finished after {SECONDS} s"
    return (done.stdout + done.stderr)[-MOST_CHARACTERS:] or "nothing was printed"


def limit() -> None:
    """Limits, in the new process, memory and processor time, and forbids to write files."""
    resource.setrlimit(resource.RLIMIT_AS, (GIB << 30,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
