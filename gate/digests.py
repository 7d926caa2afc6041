"""Digests of all that a run's flags name, which two ranks, or a run and its continuation, must have alike."""

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from transformers.utils import cached_file

from fsdp_utils import is_main_process
from gate.inputs import Inputs, read_system_prompt
from grading.user_code import files_of
from runtime.parts import part

ROOT = Path(__file__).parent.parent


def digest(pieces: Iterable[np.ndarray | bytes]) -> str:
    """Twelve hexadecimal digits, which differ if a byte or the end of a piece does."""
    sha1 = hashlib.sha1(usedforsecurity=False)  # the fastest that hashlib has
    for piece in pieces:
        sha1.update(len(piece).to_bytes(8))
        sha1.update(piece)
    return sha1.hexdigest()[:12]


def weight_files(path: str) -> list[Path]:
    """The weights' files of a folder or hub id, downloaded if need be. Raises OSError."""
    find = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    if file := find("model.safetensors"):
        return [Path(file)]
    if not (index := find("model.safetensors.index.json")):
        raise OSError(f"{path} has no weights in safetensors: neither model.safetensors nor its index was found")
    parts = set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values())
    return [Path(cached_file(path, part)) for part in sorted(parts)]


def samples_of(file: Path) -> Iterator[bytes]:
    """64 pieces of 64 KiB, from all over a file of weights: training changes every tensor; large files are not read."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        for i in range(64):
            opened.seek(size * i // 64)
            yield opened.read(2**16)


def digests_of_files(named: Iterable[str]) -> dict[str, str]:
    """File -> digest, of the files of these functions (my_reward.py:score), and what they import beside them.

    Ours are left out: run.py compares the code of the program by itself.
    """
    files = [file for each in named if ".py:" in each for file in files_of(Path(each.partition(".py:")[0] + ".py"))]
    ours = {file.resolve() for file in files_of(ROOT / "train_grpo.py")} if files else ()
    return {str(file): digest([file.read_bytes()]) for file in files if file.resolve() not in ours}


def digests_of_inputs(args: Namespace, inputs: Inputs) -> dict[str, str]:
    """For the rows of each source, files of one's own, and on the main process models; by name.

    Weights that are not on the disk are downloaded here, while nobody waits in a collective.
    """
    # Flags that may change when a run continues, --eval_data and --after_step, have no digest.
    digests = {}
    for source, data in zip(args.train_data, inputs.train_data, strict=True):
        pieces = (
            (row.ids.tobytes(), row.answer.encode(), repr(row.columns).encode(), *row.encoded_images)
            for row in data.rows
        )
        digests[source] = digest(chain.from_iterable(pieces))
    named = [args.environment, args.tools, args.advantage, args.policy_loss, args.kl_estimator, args.optimizer]
    digests |= digests_of_files([*inputs.grader.weights, *",".join(filter(None, named)).split(",")])
    system_prompt = read_system_prompt(args.system_prompt)
    if system_prompt != args.system_prompt:  # the content of a file
        digests["--system_prompt"] = digest([system_prompt.encode()])
    critic = args.critic and part("extras.critic.settings", "--critic").path_of(args.critic, args.model)
    for flag, path in {"--model": args.model, "--reference": args.reference, "--critic": critic}.items():
        if path and is_main_process():
            digests[flag] = digest(chain.from_iterable(map(samples_of, weight_files(path))))
            ends = json.loads(inputs.companions["generation_config.json"]).get("eos_token_id")
            config = Path(cached_file(path, "config.json")).read_bytes()
            digests[f"config of {flag}"] = digest([config, str(ends).encode()])
    return digests
