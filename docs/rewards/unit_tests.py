"""Runs the row's unit tests on generated code: --reward docs/rewards/unit_tests.py:score

The answer is Python code with assertions. The reward is 1 if all hold: then CHILD gets a mark, made anew for each call,
and returns it. The risks: code can pass by objects whose `__eq__` is always true, by an `abs` or `len` of its own, or
by speaking in the place of CHILD. And it has the rights of the training: SECONDS and GIB stop loops and full memory,
but no network access and no deleted files; use a container.
"""

import re
import secrets
import sys
from contextlib import suppress
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from threading import Timer

SECONDS, GIB = 4, 2**30  # below --reward_timeout
CHILD = f"""import os, resource, sys, types
for what, most in ("CPU", {SECONDS}), ("AS", {GIB}), ("FSIZE", 2**20):
    resource.setrlimit(getattr(resource, "RLIMIT_" + what), (most, most))
hears, says, null = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
[os.dup2(null, number) for number in (0, 1, 2)]
sys.modules["__main__"] = main = types.ModuleType("__main__")
exec, eval, print, space = exec, eval, print, vars(main)  # also when the code has changed the builtins
for _ in ("code", "tests"):
    print(exec(eval(hears.readline()), space), file=says, flush=True)
print(eval(hears.readline()), file=says, flush=True)"""


def score(completion, answer):
    code = re.findall(r"```(?:python)?\n(.*?)```", completion.rpartition("</think>")[2], re.DOTALL)[-1:]
    command, said, mark = [sys.executable, "-I", "-c", CHILD], "", secrets.token_hex()
    pipes = {"stdin": PIPE, "stdout": PIPE, "text": True, "env": {}}
    with suppress(OSError), TemporaryDirectory() as folder, Popen(command, cwd=folder, **pipes) as child:
        Timer(SECONDS, child.kill).start()
        for text in (code[0], answer, mark) if code else ():  # each is sent when the one before has run
            print(ascii(text), file=child.stdin, flush=True)
            said = child.stdout.readline()
        child.kill()
    return {"reward": float(said == f"{mark}\n"), "has_code": float(bool(code)), "feedback": "Not all tests passed."}
