"""A test's work on several ranks: `main(world, *arguments)` of a file beside this one, and what it returns.

torchrun --nproc_per_node N tests/ranks.py FILE RANKS_OF_AN_ENGINE OUTPUT_FILE ARGUMENTS...
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import torch

from fsdp_utils import close_world, init_world
from helpers import torchrun
from inputs.checks import check_flags
from inputs.command_line import parse_flags

COMMON = (
    "--model m --train_data d --out_dir o --total_steps 1 --max_prompt_tokens 4 --max_completion_tokens 12 "
    "--micro_batch_tokens 40"
)


def parsed(words: str, num_trainers: int = 1) -> Namespace:
    """The program's flags of such a work, checked."""
    args = parse_flags([*COMMON.split(), *words.split()])
    check_flags(args, num_trainers)
    return args


def on_ranks(num_ranks: int, file: str, *arguments: object, tp_size: int = 1, timeout: float = 300) -> object:
    """What the first rank's `main` returns."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.pt"
        torchrun(num_ranks, "tests/ranks.py", file, tp_size, output, *arguments, timeout=timeout)
        return torch.load(output, weights_only=False)


if __name__ == "__main__":
    file, tp_size, output, *arguments = sys.argv[1:]
    world = init_world(int(tp_size), timeout_minutes=2)
    found = importlib.import_module(file).main(world, *arguments)
    if world.is_main:
        torch.save(found, output)
    close_world()
