"""Starts the ranks of this node, passes signals on to them, and says last why the run ended.

    python scripts/launch.py --ranks 8 train_grpo.py FLAGS
    python scripts/launch.py --ranks 8 --nodes 2 --node_rank 1 --master_addr 10.0.0.1 train_grpo.py FLAGS

`launch.sh` calls it. torchrun starts the same programs; what it lacks is the reason for the lines here:
- The ranks of one node meet through a file, and nothing listens beyond the loopback (torchrun: two sockets).
- No rank outlives this process, from its first instruction on.
- A signal reaches every rank once, and a run that then saves and ends is no failure.
- The last line on the screen is the reason, with the rank and the phase.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from guards.launched import FOLDER, LAUNCHER, die_with_parent, reason_file, stop_file
from inputs.cgroup import oom_kills

PATIENCE = 5.0  # seconds between the first rank that failed and the end of the others: they may have reasons, too
AGAIN, ANOTHER = 0.5, 5.0  # seconds: signals of one kind that come closer together are one; of two kinds
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="processes on this node, one per GPU")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node_rank", type=int, default=0, help="0 on the first node, 1 on the next")
    parser.add_argument("--master_addr", default="127.0.0.1", help="several nodes: address of the first")
    parser.add_argument("--master_port", type=int, default=29500, help="several nodes: a free port there")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program.py and its flags")
    args = parser.parse_args()
    if not args.command or args.ranks < 1 or not 0 <= args.node_rank < args.nodes:
        parser.error("it takes a program, --ranks of 1 or more, and --node_rank below --nodes.")
    return args


@dataclass
class Ranks:
    """The processes of this node."""

    first: int  # number of the first one
    folder: Path  # where they meet, and leave their reasons
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    signal: int | None = None  # that was passed on
    signal_time: float = 0.0

    def start(self, args: argparse.Namespace) -> None:
        place = environment(args, self.folder)
        for local_rank in range(args.ranks):
            own = {"RANK": str(self.first + local_rank), "LOCAL_RANK": str(local_rank)}
            self.processes.append(subprocess.Popen(
                [sys.executable, "-u", *args.command], env=os.environ | place | own,
                start_new_session=True,  # Ctrl-C in a terminal reaches this process alone, which passes it on
                preexec_fn=partial(die_with_parent, os.getpid()),
            ))  # fmt: skip
            if self.signal is not None:  # it came while this one was started, and may not have reached it
                self.processes[-1].send_signal(signal.SIGTERM)
                break

    def pass_on(self, number: int, _: object = None) -> None:
        """A signal asks every rank, as SIGTERM, to save and to end. A second one ends them at once."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.signal_time = number, now
            for rank, process in enumerate(self.processes, start=self.first):
                if not self._has_signal(rank) and process.poll() is None:
                    process.send_signal(signal.SIGTERM)
        elif now - self.signal_time > (AGAIN if number == self.signal else ANOTHER):
            self.kill()
            print("ended by a second signal", file=sys.stderr, flush=True)
            os._exit(128 + number)

    def _has_signal(self, rank: int) -> bool:
        """Whether it was sent to the rank by somebody else."""
        return stop_file(self.folder, rank).exists()

    def kill(self) -> None:
        """Ends the ranks, and with each what it started in its process group."""
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                process.kill()

    def wait(self) -> dict[int, int]:
        """Rank -> exit status of those that failed, in the order of their ends; returns when none runs any more."""
        failed: dict[int, int] = {}
        deadline = math.inf
        while self._are_running(failed):
            if failed and deadline == math.inf:
                deadline = time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                self.kill()
                break
            time.sleep(0.1)
        return failed

    def _are_running(self, failed: dict[int, int]) -> bool:
        """Whether a rank is; adds those that have failed meanwhile. A signal to one rank is passed on to the others."""
        ranks = range(self.first, self.first + len(self.processes))
        for rank, process in zip(ranks, self.processes, strict=True):
            if process.poll():
                failed.setdefault(rank, process.returncode)
        if self.signal is None and (-signal.SIGTERM in failed.values() or any(map(self._has_signal, ranks))):
            self.pass_on(signal.SIGTERM)
        return any(process.returncode is None for process in self.processes)


def environment(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """What torchrun would set, and what the ranks need to find this process."""
    threads = os.environ.get("OMP_NUM_THREADS", -(-len(os.sched_getaffinity(0)) // args.ranks))
    place = {
        "LOCAL_WORLD_SIZE": args.ranks, "WORLD_SIZE": args.ranks * args.nodes, "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": args.master_port if args.nodes > 1 else free_port(), "OMP_NUM_THREADS": threads,
        FOLDER: folder, LAUNCHER: os.getpid(),
    }  # fmt: skip
    return {name: str(value) for name, value in place.items()}


def free_port() -> int:
    """A number that no run on this node has. One node: nobody listens there, but libraries ask for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def reason(ranks: Ranks, failed: dict[int, int], out_dir: Path | None, oom_kills: int) -> str:
    """Why the first one failed, in a sentence: by its own words, else by how it ended.

    `oom_kills`: processes that Linux has killed meanwhile for lack of memory.
    """
    files = {rank: reason_file(ranks.folder, rank) for rank in failed}
    notes = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    verdicts = [note["text"] for note in notes.values() if note["kind"] == "verdict"]
    if verdicts:
        return verdicts[0]
    rank = next(iter(failed))
    if notes and not (failed[rank] < 0 and rank not in notes):  # else it was killed, and the others failed of that
        rank = min(notes, key=lambda each: notes[each]["time"])
        if notes[rank]["kind"] == "mistake":
            return notes[rank]["text"]
    how = f"ended with {notes[rank]['text']}" if rank in notes else how_it_ended(failed[rank], oom_kills)
    return f"rank {rank}{where(rank, ranks.processes[rank - ranks.first].pid, out_dir)} {how}"


def where(rank: int, pid: int, out_dir: Path | None) -> str:
    """The phase that this process was in, by its last heartbeat (guards/heartbeat.py); "" if there is none."""
    try:
        beat = json.loads((out_dir / "ranks" / f"rank_{rank}.json").read_text()) if out_dir else {}
    except (OSError, ValueError):
        return ""
    return f" (step {beat['step']}, {beat['phase']})" if beat.get("pid") == pid else ""


def out_dir_of(command: list[str]) -> Path | None:
    """The run folder of train_grpo.py."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out_dir", type=Path)
    return parser.parse_known_args(command)[0].out_dir


def how_it_ended(status: int, oom_kills: int) -> str:
    """In words, after "rank 3"."""
    if status > 0:
        return f"ended with exit status {status}."
    name = signal.Signals(-status).name
    by = ""
    if -status == signal.SIGKILL:
        by = " by someone" if not oom_kills else ", probably by Linux, which has killed a process for lack of memory"
    return f"was ended by signal {-status} ({name}){by}; the same command continues from the last checkpoint."


def main() -> int:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="grpo_") as folder:
        ranks = Ranks(args.node_rank * args.ranks, Path(folder))
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, ranks.pass_on)
        kills_before = oom_kills() or 0
        ranks.start(args)
        failed = ranks.wait()
        if ranks.signal and set(failed.values()) <= {-signal.SIGTERM}:  # a program that has nothing to save
            return 128 + ranks.signal if failed else 0
        if failed:
            killed = (oom_kills() or 0) - kills_before
            said = reason(ranks, failed, out_dir_of(args.command), killed)
            print(f"error: {said}", file=sys.stderr, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
