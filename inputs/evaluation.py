"""The flags of `evaluate.py`, and what they name, read and checked before any weight is read."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data import PromptData
from flags import DTYPES, GROUPS, Grading, PromptFormat, Sampling, flag, take
from fsdp_utils import is_engine_leader_process
from inputs.checks import check_head_dtype, check_ranges
from inputs.command_line import HelpFormatter, add_flags
from inputs.machine import check_launch
from inputs.records import name_of_source, read_system_prompt
from model.engine_options import stop_ids
from model.sizes import check_config
from model.vision import Vision, load_processor
from model.weights import load_config
from reward import Grader, workers_per_engine

# fmt: off
WHAT = [
    flag("--model", str, "folder in Hugging Face format (runs/x/step_90) or hub id", is_required=True),
    flag("--data", str, "sets, each WHAT[@SPLIT][#ROWS]: see docs/data.md", is_list=True, is_required=True),
    flag("--out_dir", str, "new folder for the results; default: MODEL/eval/TIME, or eval/MODEL/TIME for a hub id"),
    flag("--published", [str], "published numbers to show beside ours, one text per set"),
]
SAMPLING = [
    flag("--samples", [1], "k: completions per problem", (1, math.inf)),
    flag("--temperature", [1.0], "sampling temperature; 0 is greedy", (0, 2)),
    flag("--top_p", [1.0], "nucleus sampling", (1e-9, 1)),
    flag("--max_completion_tokens", [2048], "completions are truncated after this many tokens", (1, math.inf)),
    flag("--stop_tokens", [str], "tokens, as text, at which completions end beside those of the model's folder"),
    flag("--seed", 1, "random seed for sampling", (0, math.inf)),
    flag("--dtype", "bfloat16", "arithmetic of the engine", choices=DTYPES),
    flag("--head_dtype", str, "arithmetic of the head's logits; default: that of --dtype", choices=DTYPES),
    flag("--tensor_parallel_size", 1, "ranks per vLLM engine; divides the number of ranks", (1, math.inf)),
    flag("--gpu_memory_utilization", 0.9, "CUDA: share of GPU memory that vLLM may take", (0.01, 1)),
    flag("--enforce_eager", False, "CUDA: no CUDA graphs in vLLM"),
]
# fmt: on
FLAGS = {"what": WHAT, "sampling": SAMPLING, "prompts": GROUPS["prompts"], "reward": GROUPS["reward"]}


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Evaluates a model on held-out sets. Sampling flags take one value for all sets or one for each.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, FLAGS)
    parser.set_defaults(reward="math")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Inputs:
    """What `load_inputs` returns."""

    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # what reads images; None if the model sees none
    sets: list[PromptData]
    samplings: list[Sampling]  # of each set
    grader: Grader
    folder: Path  # for the results


def load_inputs(args: argparse.Namespace) -> Inputs:
    """Raises ValueError, OSError or RuntimeError for everything that is wrong with the user's input."""
    check_ranges(args, FLAGS)
    check_head_dtype(args)
    check_launch(args.tensor_parallel_size, "bfloat16", args.gpu_memory_utilization)
    check_names(args.data)
    samplings = settings_per_set(
        len(args.data), "", samples=args.samples, temperature=args.temperature, top_p=args.top_p,
        max_completion_tokens=args.max_completion_tokens,
    )  # fmt: skip
    if args.published and len(args.published) != len(args.data):
        counts = f"{len(args.published)} numbers for {len(args.data)} sets"
        raise ValueError(f"--published has {counts}; give one for each, '-' for none.")
    folder, config = new_folder(args.out_dir, args.model), load_config(args.model)
    limits = args.max_prompt_tokens, max(args.max_completion_tokens)
    check_config(args.model, config, limits, args.tensor_parallel_size)
    prompt_format = take(PromptFormat, args, system_prompt=read_system_prompt(args.system_prompt))
    tokenizer, vision = load_processor(args.model, config, prompt_format)
    stop_ids(tokenizer, args.stop_tokens)  # raises for a token that it does not have
    sets = [PromptData.load(source, prompt_format, tokenizer, seed=0, vision=vision) for source in args.data]
    grading, is_leader = take(Grading, args), is_engine_leader_process(args.tensor_parallel_size)
    grader = Grader(grading, workers_per_engine(grading, args.tensor_parallel_size) if is_leader else 0)
    return Inputs(tokenizer, vision, sets, samplings, grader, folder)


def new_folder(out_dir: str | None, model: str) -> Path:
    """Where the results go. Raises ValueError if it is there already and not empty."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    beside = Path(model) / "eval" if Path(model).is_dir() else Path("eval") / model.replace("/", "--")
    folder = Path(out_dir) if out_dir else beside / stamp
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out_dir {str(folder)!r} is there already and not empty; choose another.")
    return folder


def settings_per_set(num_sets: int, prefix: str, **values: list[int] | list[float]) -> list[Sampling]:
    """How each set is sampled, from flags that have one value for all sets or one for each.

    `values` are those of --<prefix>samples, temperature, top_p and max_completion_tokens. Raises ValueError for another
    number of values.
    """
    for name, given in values.items():
        if len(given) not in (1, num_sets):
            flag_name = f"--{prefix}{name}"
            raise ValueError(
                f"{flag_name} has {len(given)} values for {num_sets} sets; give one for all or one for each."
            )
    values["num_samples"] = values.pop("samples")
    samplings = [Sampling(**{name: given[i % len(given)] for name, given in values.items()}) for i in range(num_sets)]
    for each in samplings:
        if each.temperature < 0.01 and each.num_samples > 1:
            given = f"--{prefix}samples {each.num_samples} at --{prefix}temperature {each.temperature:g}"
            raise ValueError(f"{given} are {each.num_samples} times the same; use --{prefix}samples 1.")
    return samplings


def check_names(sources: list[str]) -> None:
    """Raises ValueError if two sets would be reported under the same name."""
    names = [name_of_source(source) for source in sources]
    if len(set(names)) < len(names):
        listed = ", ".join(names)
        raise ValueError(f"the held-out sets {listed} are reported under their names, which must differ; rename one.")
