"""Run under torchrun: by how many bytes the memory of each rank grows, at most, while the policy is loaded into shards.

torchrun --nproc_per_node 2 tests/distributed_memory.py POLICY_FOLDER OUTPUT_FILE
"""

import json
import sys
import threading
from pathlib import Path

import torch

from fsdp_utils import close_world, gather_from_ranks, init_world
from policy import empty_policy, shard_and_fill


def anonymous_bytes() -> int:
    """This process's resident memory without mapped files, which the system takes back when it needs to."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    """The highest value of `anonymous_bytes` while it runs, looked at as often as Python lets it."""

    def run(self) -> None:
        self.is_over = threading.Event()
        self.bytes = 0
        while not self.is_over.wait(0.0005):
            self.bytes = max(self.bytes, anonymous_bytes())


def load(path: str, world) -> None:
    shard_and_fill(empty_policy(path, torch.float32), path, world)


def main(small: str, large: str, output: str) -> None:
    world = init_world(tp_size=1, timeout_minutes=2)
    load(small, world)  # what the first load imports and starts is not the model's
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    load(large, world)
    peak.is_over.set()
    peak.join()
    grown = gather_from_ranks(max(peak.bytes, anonymous_bytes()) - before)
    if world.is_main:
        Path(output).write_text(json.dumps(grown))
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
