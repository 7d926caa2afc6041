"""What a run needs from its user, checked before any weight is read: launch, flags, model, data, reward; each error says what to change."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from data import PromptData, prompt_format_of
from evaluate import Settings, check_names, settings_per_set
from fsdp_utils import World, check_launch, is_engine_leader_process, launched_world_size
from model.lora import check_lora
from model.vision import Vision, load_processor
from plan import Plan, check_flags, check_model, make_plan
from reward import Grader, grading_of, parse_reward, workers_per_engine


@dataclass(frozen=True)
class Inputs:
    """What is read and checked before any weight is."""

    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # of a model that sees
    train_parts: list[PromptData]
    eval_sets: list[PromptData]
    eval_settings: list[Settings]
    grader: Grader


def check_and_load_data(args: argparse.Namespace) -> Inputs:
    """Raises ValueError, OSError or RuntimeError for everything that is wrong with the user's input, before any weight is read."""
    check_launch(args.tensor_parallel_size, args.dtype)
    check_flags(args, launched_world_size())
    if args.compile_layers and not torch.cuda.is_available():
        raise ValueError(
            "--compile_layers has no effect without a GPU: vLLM on CPU runs with torch.compile off; leave it out."
        )
    parse_reward(args.reward)
    check_names(args.eval_data)
    sampling = {"samples": args.eval_samples, "temperature": args.eval_temperature, "top_p": args.eval_top_p}
    eval_settings = settings_per_set(
        len(args.eval_data), "eval_", **sampling, max_completion_tokens=args.eval_max_completion_tokens
    )
    owner, _, name = args.model.rpartition("/")
    is_like_hub_id = name and "/" not in owner and owner[:1] not in (".", "~") and not (owner and Path(owner).is_dir())
    if not Path(args.model).exists() and not is_like_hub_id:
        raise FileNotFoundError(
            f"--model {args.model!r}: no such folder, and not of the form of a hub id (owner/name)."
        )
    try:
        model_config = AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {args.model!r} is neither a folder with a model nor a model that the hub has: {error}"
        ) from None
    check_model(args, model_config)
    check_lora(args, model_config)
    tokenizer, vision = load_processor(args, model_config)
    rules = {
        "prompt_format": prompt_format_of(args),
        "tokenizer": tokenizer,
        "max_prompt_tokens": args.max_prompt_tokens,
        "vision": vision,
    }
    train_parts = [PromptData.load(source, **rules, seed=args.seed) for source in args.train_data]
    make_plan(
        args, len(PromptData.mix(train_parts, args.data_weights).rows)
    )  # tells what is wrong with weights and numbers of rows
    eval_sets = [
        PromptData.load(source, **rules, seed=0) for source in args.eval_data
    ]  # the same problems whatever the run's seed
    is_leader = is_engine_leader_process(args.tensor_parallel_size)
    grading = grading_of(args)
    grader = Grader(grading, workers_per_engine(grading, args.tensor_parallel_size) if is_leader else 0)
    return Inputs(tokenizer, vision, train_parts, eval_sets, eval_settings, grader)


def prepare_data(args: argparse.Namespace, inputs: Inputs, world: World) -> tuple[PromptData, list[PromptData], Plan]:
    """Training data, held-out sets, both without rows that the reward has no usable answer key for, and the plan that follows."""
    parts = [inputs.grader.check_keys(data, world) for data in inputs.train_parts]
    eval_sets = [inputs.grader.check_keys(data, world) for data in inputs.eval_sets]
    train_data = PromptData.mix(parts, args.data_weights)
    return train_data, eval_sets, make_plan(args, len(train_data.rows))
