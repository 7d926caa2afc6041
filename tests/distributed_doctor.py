"""train_grpo.py with faults: the first argument is JSON, fault -> the rank that has it.

hang    the engine blocks in its first rollout
hold    a C call keeps the interpreter, in the first update
reward  the rank sees another reward than the others
stop    {phase: rank that stops itself (SIGSTOP) in this phase of step 1}
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import rollout
import run
import sampling

FAULTS = json.loads(sys.argv.pop(1))
RANK = int(os.environ["RANK"])
MOMENT = 0.4  # seconds in which the doctor writes that the phase has begun


def hang(self: rollout.Engine, *_: object) -> Iterator[None]:
    time.sleep(1e6)
    yield


def in_phase_too(act: dict[str, object]) -> None:
    """Calls the function of a phase, once, when it has begun."""
    phase = run.Run.phase

    @contextmanager
    def acting(self: run.Run, name: str) -> Iterator[None]:
        with phase(self, name):
            if self.step == 1 and name in act:
                time.sleep(MOMENT)
                act.pop(name)()
            yield

    run.Run.phase = acting


def with_other_reward(self: sampling.Sampler, *arguments: int) -> rollout.Rollout:
    result = SAMPLE_ROUND(self, *arguments)
    first, *others = result.grades
    return replace(result, grades=[replace(first, reward=first.reward + 1), *others])


SAMPLE_ROUND = sampling.Sampler.sample_round
if FAULTS.get("hang") == RANK:
    rollout.Engine._run = hang
if FAULTS.get("hold") == RANK:
    in_phase_too({"update": lambda: ctypes.PyDLL(None).sleep(10**6)})
if FAULTS.get("reward") == RANK:
    sampling.Sampler.sample_round = with_other_reward
stops = [phase for phase, rank in FAULTS.get("stop", {}).items() if rank == RANK]
in_phase_too({phase: lambda: os.kill(os.getpid(), signal.SIGSTOP) for phase in stops})
runpy.run_path("train_grpo.py", run_name="__main__")
