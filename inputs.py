"""The inputs of a run but weights: tokenizer, data, reward; digests of all that its flags name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import cached_file

from data import ImageReader, PromptData
from flags import Grading, PromptFormat, Sampling, TurnLimits
from fsdp_utils import is_engine_leader_process
from model.weights import weight_files
from reward import Grader, workers_per_engine
from runtime.parts import part

if TYPE_CHECKING:
    from extras.teacher.hints import Hints
    from extras.turns.turns import Turns

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    vision: ImageReader | None  # what reads images; None if the model sees none
    train_data: list[PromptData]  # one for each source
    eval_sets: list[PromptData]
    eval_samplings: list[Sampling]
    grader: Grader
    turns: Turns | None  # who plays episodes; None: each completion has one turn
    hints: Hints | None  # what makes hints of a step's completions; None: they are in a column, or there are none
    companions: list[PreTrainedTokenizerBase | ProcessorMixin | GenerationConfig]  # files beside the exported policy
    digests: dict[str, str]  # for models (main process), the rows of each source, files of one's own; by name


def start_grader(
    grading: Grading, limits: TurnLimits, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase,
    num_ranks: int, is_needed: bool = True,
) -> tuple[Grader, Turns | None]:  # fmt: skip
    """The grader of an engine of so many ranks, and who plays episodes; the first rank has their workers.

    Raises ValueError if --reward and --environment both reward, or, where that is needed, neither does.
    """
    num_workers = workers_per_engine(num_ranks) if is_engine_leader_process(num_ranks) else 0
    if not (limits.environment or limits.tools):
        return Grader(grading, num_workers), None
    turns = part("extras.turns.turns", "--environment or --tools").Turns(
        limits,
        grading,
        replace(prompt_format, system_prompt=None),  # it is in the messages
        tokenizer,
        num_workers,
    )
    kind = f"--reward {grading.reward}: the class of --environment"
    if turns.environments and turns.environments.has_reward:
        if grading.reward not in ("none", Grading.reward):  # the default is not meant
            raise ValueError(f"{kind} has a reward(); leave one of them out.")
        grading = replace(grading, reward="none")
    elif turns.environments and grading.reward == "none" and is_needed:
        raise ValueError(f"{kind} has no reward(); give --reward.")
    return Grader(grading, num_workers), turns


def digest(pieces: Iterable[np.ndarray | bytes]) -> str:
    """Twelve hexadecimal digits, which differ if a byte or the end of a piece does."""
    sha1 = hashlib.sha1(usedforsecurity=False)  # the fastest that hashlib has
    for piece in pieces:
        sha1.update(len(piece).to_bytes(8))
        sha1.update(piece)
    return sha1.hexdigest()[:12]


def digest_of_weights(path: str) -> str:
    """The digest of 64 pieces of each weight file: training changes every tensor, and large models are not read.

    Downloads weights that are not on the disk.
    """
    return digest(chain.from_iterable(map(samples_of, weight_files(path))))


def samples_of(file: Path) -> Iterator[bytes]:
    """64 pieces of 64 KiB, from all over the file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        for i in range(64):
            opened.seek(size * i // 64)
            yield opened.read(2**16)


def digest_of_config(path: str, generation: GenerationConfig) -> str:
    """The digest of config.json and of the tokens at which completions end."""
    return digest([Path(cached_file(path, "config.json")).read_bytes(), str(generation.eos_token_id).encode()])


def digest_of_data(data: PromptData) -> str:
    """The digest of what the rows bring into training."""
    return digest(
        chain.from_iterable(
            (row.ids.tobytes(), row.answer.encode(), repr(row.columns).encode(), *row.encoded_images)
            for row in data.rows
        )
    )


def digests_of_files(named: Iterable[str]) -> dict[str, str]:
    """File -> digest, of the files of these functions (my_reward.py:score), and what they import beside them.

    Ours are left out: run.py compares the code of the program by itself.
    """
    from grading.user_code import files_of

    files = [file for each in named if ".py:" in each for file in files_of(Path(each.partition(".py:")[0] + ".py"))]
    ours = {file.resolve() for file in files_of(ROOT / "train_grpo.py")} if files else ()
    return {str(file): digest([file.read_bytes()]) for file in files if file.resolve() not in ours}
