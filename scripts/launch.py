"""Starts the ranks of this node, passes signals on to them, and says last why the run ended.

    python scripts/launch.py --ranks 8 --max_restarts 3 train_grpo.py FLAGS
    python scripts/launch.py --ranks 8 --nodes 2 --node_rank 1 --master_addr 10.0.0.1 train_grpo.py FLAGS

torchrun starts the same programs, but it listens beyond the loopback. Here no rank outlives this process, from its
first instruction on. A run that saves and ends after a signal is no failure. docs/faults.md
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from runtime.files import end_status
from runtime.rank import FOLDER
from runtime.signals import HEARD, SECOND, SignalRecord
from runtime.start import LAUNCHER, NOT_FINISHED, die_with_parent, print_any_text, reason_file

NOTES_SECONDS = 5.0  # between the first rank that fails and the end of the others: they may have reasons, too
KILL_SECONDS = 30.0  # in which a killed rank is gone, unless a driver holds it


class Launch:
    """The ranks of this node; `run` starts them, once or again."""

    def __init__(self, out_dir: Path) -> None:
        self.out_dir, self.signals = out_dir, SignalRecord()
        self.processes: dict[int, subprocess.Popen] = {}  # of the last start, by rank
        for number in (*HEARD, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, self.hear)
        signal.signal(signal.SIGUSR2, lambda *_: self.signals.classify(signal.SIGTERM))  # a rank got a signal

    def hear(self, number: int, _: object) -> None:
        """The first signal is passed on by `wait`, when all ranks are started; a second one ends them at once."""
        if self.signals.classify(number) == "second":
            self.kill()
            self.tell_failure(SECOND)
            print(SECOND, file=sys.stderr, flush=True)
            os._exit(128 + number)

    def run(self, command: list[str], first: int, place: dict[str, object]) -> tuple[int, str]:
        """(exit status, why it failed) of a start of all ranks; "": it did not fail."""
        with tempfile.TemporaryDirectory(prefix="grpo_") as folder:
            self.folder, self.processes, self.begin = Path(folder), {}, time.time()
            for local_rank in range(place["LOCAL_WORLD_SIZE"]):
                rank = first + local_rank
                variables = place | {"RANK": rank, "LOCAL_RANK": local_rank, FOLDER: folder, LAUNCHER: os.getpid()}
                variables["PYTHONUTF8"] = 1  # torch and vLLM read files of their own in the encoding of the locale
                self.processes[rank] = subprocess.Popen(
                    [sys.executable, "-u", *command],
                    env=os.environ | {name: str(value) for name, value in variables.items()},
                    start_new_session=True,  # Ctrl-C in a terminal reaches this process alone, which passes it on
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            failed, notes = self.wait(), self.notes()
            if self.signals.first is not None:
                statuses = {process.returncode for process in self.processes.values()}
                if NOT_FINISHED in statuses:
                    return NOT_FINISHED, ""  # the ranks have saved together, or had nothing to save
                if 0 in statuses:
                    return 0, ""
                if set(failed.values()) == {-signal.SIGTERM}:
                    return 128 + self.signals.first, ""  # they do not listen
            if not failed and not notes:
                return 0, ""
            status = 2 if 2 in failed.values() else 1  # 2: a flag that does not exist, or is no number
            return status, self.reason(failed, notes)

    def wait(self) -> dict[int, int]:
        """Rank -> exit status of those that failed by themselves, in the order of their ends; when all are gone."""
        failed: dict[int, int] = {}
        is_passed_on, deadline, statuses = False, math.inf, dict.fromkeys(self.processes)
        while None in statuses.values() and time.monotonic() < deadline:
            time.sleep(0.1)
            statuses = {rank: process.poll() for rank, process in self.processes.items()}
            failed |= {rank: status for rank, status in statuses.items() if status not in (None, 0, NOT_FINISHED)}
            if self.signals.first is not None and not is_passed_on:
                is_passed_on = True
                for process in self.processes.values():
                    process.send_signal(signal.SIGTERM)  # what has ended gets none
            if failed or self.notes():
                deadline = min(deadline, time.monotonic() + NOTES_SECONDS)
        self.kill()
        return failed

    def kill(self) -> None:
        """Ends the ranks that run, and with each what it started in its process group."""
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)

    def tell_failure(self, reason: str) -> None:
        """Writes it to status.json, if these ranks have made that: the main one may have been killed, or wait."""
        if processes := [process.pid for process in self.processes.values()]:
            end_status(self.out_dir, f"failed: {reason}", processes)

    def notes(self) -> dict[int, dict[str, str]]:
        """Rank -> the reason that it has left, the first one first."""
        notes = {}
        for rank in self.processes:
            if (file := reason_file(self.folder, rank)).exists():
                notes[rank] = json.loads(file.read_text("utf-8"))
        return dict(sorted(notes.items(), key=lambda item: item[1]["time"]))

    def reason(self, failed: dict[int, int], notes: dict[int, dict[str, str]]) -> str:
        """The reason of the first rank, in a sentence: by its own words, else by how it ended."""
        killed = [rank for rank, status in failed.items() if status < 0 and rank not in notes]
        rank = [*killed, *notes, *failed][0]  # a killed one is why the others fail
        if rank in notes and notes[rank]["kind"] == "mistake":
            return notes[rank]["text"]
        if rank in notes:
            how = f"ended with {notes[rank]['text']}"
        elif (status := failed[rank]) < 0:
            by = " by someone, or by Linux for lack of memory" if status == -signal.SIGKILL else ""
            how = f"was ended by signal {-status} ({signal.Signals(-status).name}){by}; the same command continues."
        else:
            how = f"ended with exit status {status}."
        where = f" ({next(iter(notes.values()))['place']})" if notes else ""  # the ranks go in step
        stacks = [file.stat() for file in (self.out_dir / "ranks").glob("rank_*.txt")]
        is_stalled = any(stack.st_size and stack.st_mtime >= self.begin for stack in stacks)
        before = f"no progress (stacks: {self.out_dir}/ranks); then " if is_stalled else ""
        return f"{before}rank {rank}{where} {how}"


def steps_logged(out_dir: Path) -> int:
    """Lines of metrics.jsonl, but for the evaluation before the first step."""
    file = out_dir / "metrics.jsonl"
    return sum(b'"step": 0,' not in line for line in file.read_bytes().splitlines()) if file.exists() else 0


def main() -> int:
    print_any_text()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="processes on this node, one per GPU")
    parser.add_argument("--max_restarts", type=int, default=0, help="after faults, if a step was done since the start")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node_rank", type=int, default=0, help="0 on the first node, 1 on the next")
    parser.add_argument("--master_addr", default="127.0.0.1", help="several nodes: address of the first")
    parser.add_argument("--master_port", type=int, default=29500, help="several nodes: a free port there")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program.py and its flags")
    args = parser.parse_args()
    is_possible = args.command and args.ranks > 0 and 0 <= args.node_rank < args.nodes
    if not is_possible or (args.max_restarts and args.nodes > 1):
        parser.error(
            "it takes a program, --ranks of 1 or more, --node_rank below --nodes, --max_restarts on one node; "
            "on several use torchrun --max_restarts, or Slurm's requeue."
        )
    program_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    program_parser.add_argument("--out_dir", type=Path, default=Path("no run folder"))
    out_dir = program_parser.parse_known_args(args.command)[0].out_dir
    place = {  # what torchrun would set; on one node nobody listens at the port
        "LOCAL_WORLD_SIZE": args.ranks, "WORLD_SIZE": args.ranks * args.nodes, "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": args.master_port,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", -(-len(os.sched_getaffinity(0)) // args.ranks)),
    }  # fmt: skip
    launch = Launch(out_dir)
    for restart in range(1, args.max_restarts + 2):
        before = steps_logged(out_dir)
        status, reason = launch.run(args.command, args.node_rank * args.ranks, place)
        if not reason:
            break
        print(f"error: {reason}", file=sys.stderr, flush=True)
        launch.tell_failure(reason)
        num_steps = steps_logged(out_dir) - before
        if not num_steps or launch.signals.first is not None or restart > args.max_restarts:
            break
        print(f"restart {restart} of {args.max_restarts}, {num_steps} steps after the last start", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
