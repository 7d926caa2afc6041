"""What a run needs from its user, checked before any weight is read: launch, flags, model, data, reward; each error says what to change."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from data import PromptData, prompt_format_of
from evaluate import Settings, check_names, settings_per_set, without_bad_keys
from flags import PromptFormat, from_args
from fsdp_utils import World, check_launch, is_engine_leader_process, launched_world_size
from model.lora import check_lora
from model.vision import Vision, load_processor
from model.weights import load_config
from plan import Plan, check_flags, check_model, make_plan
from reward import Grader, grader_of, parse_reward


@dataclass(frozen=True)
class Inputs:
    """What is read and checked before any weight is."""

    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # of a model that sees
    train_parts: list[PromptData]
    eval_sets: list[PromptData]
    eval_settings: list[Settings]
    grader: Grader | None  # on each engine's first rank


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
    model_config = load_config(args.model)
    check_model(args, model_config)
    check_lora(args, model_config)
    tokenizer, vision = load_processor(args.model, model_config, from_args(PromptFormat, args))
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
    grader = grader_of(args) if is_engine_leader_process(args.tensor_parallel_size) else None
    return Inputs(tokenizer, vision, train_parts, eval_sets, eval_settings, grader)


def prepare_data(args: argparse.Namespace, inputs: Inputs, world: World) -> tuple[PromptData, list[PromptData], Plan]:
    """Training data, held-out sets, both without rows that the reward has no usable answer key for, and the plan that follows."""
    parts = [without_bad_keys(data, inputs.grader, world) for data in inputs.train_parts]
    eval_sets = [without_bad_keys(data, inputs.grader, world) for data in inputs.eval_sets]
    train_data = PromptData.mix(parts, args.data_weights)
    return train_data, eval_sets, make_plan(args, len(train_data.rows))
