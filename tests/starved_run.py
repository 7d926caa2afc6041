"""Run as a program: train_grpo.py with the flags after WHERE and RANK, where memory runs out on that rank.

    python scripts/launch.py --ranks 2 tests/starved_run.py grpo.total_loss 1 --model ...

At the first call of the function WHERE the process may grow by 64 MiB and asks for 1 GiB.
"""

import importlib
import os
import resource
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def starve(where: str) -> None:
    name, _, function = where.rpartition(".")

    def ask(*arguments: object, **options: object) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, most))
        torch.empty(2**30, dtype=torch.uint8)

    setattr(importlib.import_module(name), function, ask)


if __name__ == "__main__":
    where, rank = sys.argv[1:3]
    if os.environ["RANK"] == rank:
        starve(where)
    sys.argv = [str(ROOT / "train_grpo.py"), *sys.argv[3:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
