"""Accuracy on held-out sets, inside training and as a command; and grading while the engine samples, which training shares.

    python evaluate.py --model runs/x/step_90 --data math500.jsonl aime24.jsonl --reward math --samples 1 32
    torchrun --nproc_per_node 8 evaluate.py --model Qwen/Qwen2.5-7B ...     # eight engines share the problems

Figures, each with its standard error over problems: avg@k, the mean score of k samples a problem; pass@k, the chance that at least one of
k is right (unbiased: 1 - C(n-c, k) / C(n, k) from c right ones of n, Chen et al. 2021); maj@k, the chance that the most frequent answer
of k is right (ties count in part); the share of truncated completions; the mean length in tokens. Right is a score of 1 or more by the
first verifier of the reward.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from batch import Rollout
from data import PromptData, add_data_flags, name_of_source, prompt_format_of
from flags import Sampling
from fsdp_utils import check_launch, exit_with_error, gather_from_ranks, init_world, is_engine_leader_process
from model.vision import Vision, load_processor, most_images
from reward import Grade, Grader, add_reward_flags, grading_of, parse_reward, workers_per_engine

if TYPE_CHECKING:  # importing vLLM takes seconds; the checks of bad input come first
    from rollout import Engine

Figure = tuple[float, float]  # mean and standard error; nan for what one problem cannot tell


def rows_with_text(data: PromptData, indices: np.ndarray) -> list[SimpleNamespace]:
    """The rows as `Grader.submit_to` takes them; a bridge until a row carries its text."""
    return [SimpleNamespace(**vars(data.rows[i]), text=data.texts[i]) for i in indices]


# Evaluation -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How a set is sampled."""

    samples: int
    temperature: float
    top_p: float
    max_completion_tokens: int


@dataclass(frozen=True)
class Result:
    """What came out for one set."""

    name: str
    num_problems: int
    settings: Settings
    figures: dict[str, Figure]

    def metrics(self) -> dict[str, float]:
        """`eval/<set>/<figure>`, and `..._stderr` beside it; `stderr` alone is that of avg@k."""
        metrics = {}
        for name, (mean, stderr) in self.figures.items():
            metrics[f"eval/{self.name}/{name}"] = mean
            metrics[f"eval/{self.name}/{'stderr' if name.startswith('avg@') else name + '_stderr'}"] = stderr
        return metrics


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """The chance that at least one of k of the samples, drawn without replacement, is right."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_score(grades: list[Grade]) -> float | None:
    """The chance that the most frequent answer of one problem is right, ties broken by lot; None if no answer was read from any.

    All right answers are one answer, whatever their form; wrong ones are the same if they are read the same.
    """
    votes = Counter(
        "right" if grade.is_correct else f"wrong {grade.answer}" for grade in grades if grade.answer is not None
    )
    if not votes:
        return None
    most = max(votes.values())
    return float(votes["right"] == most) / sum(count == most for count in votes.values())


def _figure(per_problem: list[float] | np.ndarray) -> Figure:
    values = np.asarray(per_problem, dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def figures_of(grades: list[Grade], rollout: Rollout, num_samples: int) -> dict[str, Figure]:
    """Every figure of the module's docstring, from prompt-major completions."""
    groups = [grades[i : i + num_samples] for i in range(0, len(grades), num_samples)]
    figures = {f"avg@{num_samples}": _figure([sum(grade.score for grade in group) / num_samples for group in groups])}
    for k in sorted({2**i for i in range(1, num_samples.bit_length())} | {num_samples} - {1}):
        figures[f"pass@{k}"] = _figure(
            [pass_at_k(sum(grade.is_correct for grade in group), num_samples, k) for group in groups]
        )
    votes = [majority_score(group) for group in groups]
    if num_samples > 1 and any(vote is not None for vote in votes):
        figures[f"maj@{num_samples}"] = _figure([vote or 0.0 for vote in votes])
    per_problem = {
        "frac_truncated": rollout.is_truncated_B,
        "tokens_mean": rollout.completion_lengths_B,
        "frac_failed": [grade.is_failed for grade in grades],
    }
    return figures | {
        name: _figure(np.reshape(values, (-1, num_samples)).mean(axis=1)) for name, values in per_problem.items()
    }


def evaluate(
    engine: Engine,
    data: PromptData,
    grader: Grader,
    settings: Settings,
    seed: tuple[int, ...],
    folder: Path,
    is_main: bool,
) -> Result:
    """Samples and grades the set; every completion with its grade goes to `folder`/<set>.jsonl."""
    sampling = Sampling(settings.samples, settings.temperature, settings.max_completion_tokens, settings.top_p)
    on_finished = grader.submit_to(rows_with_text(data, np.arange(len(data.rows))), sampling)
    rollout = engine.sample(
        data.prompts,
        settings.samples,
        seed,
        settings.temperature,
        settings.max_completion_tokens,
        settings.top_p,
        f"evaluate {data.name}",
        on_finished,
        data.images,
    )
    grades = grader.collect_from_ranks()
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{data.name}.jsonl").open("w", encoding="utf-8") as out:
            for b, grade in enumerate(grades):
                row = data.rows[b // settings.samples]
                record = {"row": row.where, "prompt": row.prompt, "answer": row.answer, "completion": rollout.texts[b]}
                record |= {
                    "reward": grade.reward,
                    "reward_status": grade.status,
                    "is_correct": grade.is_correct,
                    "read_as": grade.answer,
                }
                record |= {"num_tokens": len(rollout.completions[b]), "is_truncated": bool(rollout.is_truncated_B[b])}
                out.write(json.dumps(record, ensure_ascii=True) + "\n")
    return Result(data.name, len(data.rows), settings, figures_of(grades, rollout, settings.samples))


def settings_per_set(num_sets: int, prefix: str, **values: list[int] | list[float]) -> list[Settings]:
    """One `Settings` per set, from the values of its fields: one for all sets or one for each. They are flags, --<prefix>samples and so on.

    Raises ValueError for another number of values, and for values out of range.
    """
    names = {name: f"--{prefix}{name}" for name in values}
    for name, (low, high) in {
        "samples": (1, math.inf),
        "temperature": (0, 100),
        "top_p": (1e-9, 1),
        "max_completion_tokens": (1, math.inf),
    }.items():
        if len(values[name]) not in (1, num_sets):
            raise ValueError(
                f"{names[name]} has {len(values[name])} values for {num_sets} sets; give one for all or one for each."
            )
        for value in values[name]:
            if not low <= value <= high:  # also true for nan
                raise ValueError(
                    f"{names[name]} {value:g}: must be at least {low:g}{'' if high == math.inf else f' and at most {high:g}'}."
                )
    settings = [Settings(**{name: given[i % len(given)] for name, given in values.items()}) for i in range(num_sets)]
    for each in settings:
        if each.temperature < 0.01 and each.samples > 1:
            raise ValueError(
                f"{names['samples']} {each.samples} at {names['temperature']} {each.temperature:g} are {each.samples} times the same; "
                f"use {names['samples']} 1."
            )
    return settings


def check_names(sources: list[str]) -> None:
    """Raises ValueError if two sets would be reported under the same name."""
    names = [name_of_source(source) for source in sources]
    if len(set(names)) < len(names):
        raise ValueError(
            f"the held-out sets {', '.join(names)} are reported under their names, which must differ; rename one."
        )


# The command ------------------------------------------------------------------------------------------------------------------------


def table(results: list[Result], published: list[str]) -> str:
    """The console table: percentages with their standard errors, and the published numbers beside them."""
    rows = [
        ["set", "problems", "k", "avg@k", "pass@k", "maj@k", "truncated", "tokens"]
        + (["published"] if published else [])
    ]
    for i, result in enumerate(results):
        k = result.settings.samples
        row = [result.name, str(result.num_problems), str(k)]
        for name, scale in (
            (f"avg@{k}", 100),
            (f"pass@{k}", 100),
            (f"maj@{k}", 100),
            ("frac_truncated", 100),
            ("tokens_mean", 1),
        ):
            mean, stderr = result.figures.get(name, (math.nan, math.nan))
            row.append(
                "-"
                if math.isnan(mean)
                else f"{mean * scale:.1f}" + ("" if math.isnan(stderr) else f" ± {stderr * scale:.1f}")
            )
        rows.append(row + published[i : i + 1])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Evaluates a checkpoint or hub model on held-out sets. Settings take one value for all sets or one for each.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, help="folder in Hugging Face format (runs/x/step_90) or hub id")
    add("--data", nargs="+", required=True, help="sets, each WHAT[@SPLIT][#ROWS]: see data.py")
    add(
        "--out_dir",
        help="new folder for results.json and the completions; default: MODEL/eval/TIME, or eval/MODEL/TIME for a hub id",
    )
    add("--published", nargs="+", default=[], help="published numbers to show beside ours, one text per set")
    add = parser.add_argument_group("sampling").add_argument
    add("--samples", type=int, nargs="+", default=[1], help="k: completions per problem")
    add("--temperature", type=float, nargs="+", default=[1.0], help="0 is greedy")
    add("--top_p", type=float, nargs="+", default=[1.0], help="nucleus sampling")
    add(
        "--max_completion_tokens",
        type=int,
        nargs="+",
        default=[2048],
        help="a completion is cut (truncated) after this many tokens",
    )
    add("--seed", type=int, default=1, help="of sampling")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the engine's arithmetic")
    add("--tensor_parallel_size", type=int, default=1, help="ranks per vLLM engine; divides the number of ranks")
    add("--gpu_memory_utilization", type=float, default=0.9, help="CUDA: share of GPU memory that vLLM may take")
    add("--enforce_eager", action="store_true", help="CUDA: no CUDA graphs in vLLM")
    add_data_flags(parser)
    add_reward_flags(parser, default="math")
    return parser.parse_args(argv)


def check_and_load(
    args: argparse.Namespace,
) -> tuple[list[Settings], list[PromptData], PreTrainedTokenizerBase, Vision | None, Grader, Path]:
    """Settings, data, tokenizer, what reads images, grader and output folder.

    Raises ValueError, OSError or RuntimeError for what is wrong with the input.
    """
    from transformers import AutoConfig

    check_launch(args.tensor_parallel_size, "bfloat16")
    parse_reward(args.reward)
    check_names(args.data)
    sampling = {"samples": args.samples, "temperature": args.temperature, "top_p": args.top_p}
    settings = settings_per_set(len(args.data), "", **sampling, max_completion_tokens=args.max_completion_tokens)
    if args.published and len(args.published) != len(args.data):
        raise ValueError(
            f"--published has {len(args.published)} numbers for {len(args.data)} sets; give one for each, '-' for none."
        )
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    default = (
        Path(args.model) / "eval" / stamp
        if Path(args.model).is_dir()
        else Path("eval") / args.model.replace("/", "--") / stamp
    )
    out_dir = Path(args.out_dir) if args.out_dir else default
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ValueError(f"--out_dir {str(out_dir)!r} is there already and not empty; choose another.")
    try:
        config = AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {args.model!r} is neither a folder with a model nor a model that the hub has: {error}"
        ) from None
    tokenizer, vision = load_processor(args, config)
    longest = args.max_prompt_tokens + max(args.max_completion_tokens)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest > context:
        raise ValueError(
            f"--max_prompt_tokens + --max_completion_tokens = {longest} is beyond the model's context of {context} tokens."
        )
    prompt_format = prompt_format_of(args)
    sets = [
        PromptData.load(source, prompt_format, tokenizer, args.max_prompt_tokens, 0, vision) for source in args.data
    ]
    is_leader = is_engine_leader_process(args.tensor_parallel_size)
    grading = grading_of(args)
    grader = Grader(grading, workers_per_engine(grading, args.tensor_parallel_size) if is_leader else 0)
    return settings, sets, tokenizer, vision, grader, out_dir


def main() -> None:
    args = parse_flags()
    try:
        settings, sets, tokenizer, vision, grader, out_dir = check_and_load(args)
        world = init_world(args.tensor_parallel_size, timeout_minutes=600)
        sets = [grader.check_keys(data, world) for data in sets]
        out_dir = gather_from_ranks(out_dir)[0]  # the time in its name is the main process's
        if world.is_main:
            out_dir.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, RuntimeError) as error:
        exit_with_error(error)
    if world.is_main:
        print(
            *[line for data in sets for line in data.describe()],
            f"first prompt: {sets[0].texts[0]!r}",
            sep="\n",
            flush=True,
        )

    import torch

    from rollout import (  # here, not above: vLLM takes seconds to import, and bad input should be told at once
        Engine,
        largest_share,
    )

    max_model_len = args.max_prompt_tokens + max(args.max_completion_tokens)
    options = (getattr(torch, args.dtype), args.gpu_memory_utilization, args.enforce_eager, args.seed)
    images = (vision, most_images(image for data in sets for image in data.images))
    sequences = largest_share(
        [(len(data.rows), each.samples) for data, each in zip(sets, settings, strict=True)], world
    )
    engine = Engine(
        args.model, tokenizer, world, max_model_len, *options, *images, load_weights=True, most_sequences=sequences
    )
    results = []
    for index, (data, each) in enumerate(zip(sets, settings, strict=True)):
        results.append(evaluate(engine, data, grader, each, (args.seed, index), out_dir, world.is_main))
    if world.is_main:
        record = {"flags": vars(args), "sets": {}}
        for result, data in zip(results, sets, strict=True):
            figures = {
                name: {"mean": mean, "stderr": None if math.isnan(stderr) else stderr}
                for name, (mean, stderr) in result.figures.items()
            }
            counts = {"problems": result.num_problems, "too_long": data.num_too_long, "excluded": data.excluded}
            record["sets"][result.name] = counts | vars(result.settings) | figures
        (out_dir / "results.json").write_text(json.dumps(record, indent=2) + "\n")
        print(
            table(results, args.published),
            f"results.json and every completion with its grade: {out_dir}",
            sep="\n",
            flush=True,
        )
    grader.close()
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
