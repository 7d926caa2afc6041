"""Runs a program, and writes which of the functions beside it are entered: `python scripts/entered.py FILE PROGRAM ...`

FILE gets a JSON list of [file, line of the function]. Processes that the program starts, such as workers, do not count.
"""

import json
import runpy
import sys
import threading
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
entered: set[tuple[str, int]] = set()


def note(frame: FrameType, event: str, argument: object) -> None:
    """Notes a call; without a tracer of its own the function runs at its usual speed."""
    code = frame.f_code
    if code.co_filename.startswith(f"{ROOT}/"):
        entered.add((code.co_filename.removeprefix(f"{ROOT}/"), code.co_firstlineno))


if __name__ == "__main__":
    _, output, program, *flags = sys.argv
    sys.argv, sys.path[0] = [program, *flags], str(ROOT)
    threading.settrace(note)
    sys.settrace(note)
    try:
        runpy.run_path(str(ROOT / program), run_name="__main__")
    finally:
        sys.settrace(None)
        Path(output).write_text(json.dumps(sorted(entered)), "utf-8")
