"""What the user gives, read and checked before any weight is read: data, tokenizer, reward."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from data import PromptData
from evaluate import check_names, settings_per_set
from flags import Grading, Lora, Memory, PromptFormat, Sampling, make_plan, take
from fsdp_utils import is_engine_leader_process
from inputs.machine import check_launch
from inputs.records import read_system_prompt
from model.sizes import check_config
from model.vision import Vision, load_processor
from model.weights import load_config
from policy import check_policy
from reward import Grader, workers_per_engine


@dataclass(frozen=True)
class Inputs:
    """What `load_inputs` returns."""

    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # what reads images; None if the model sees none
    train_data: list[PromptData]  # of each source
    eval_sets: list[PromptData]
    eval_samplings: list[Sampling]
    grader: Grader

    @property
    def processor(self) -> PreTrainedTokenizerBase | ProcessorMixin:
        """What belongs to the model in its folder."""
        return self.vision.processor if self.vision else self.tokenizer


def load_inputs(args: Namespace) -> Inputs:
    """Raises ValueError, OSError or RuntimeError for everything that is wrong with the user's input."""
    check_launch(args.tensor_parallel_size, args.dtype)
    check_names(args.eval_data)
    eval_samplings = settings_per_set(
        len(args.eval_data), "eval_", samples=args.eval_samples, temperature=args.eval_temperature,
        top_p=args.eval_top_p, max_completion_tokens=args.eval_max_completion_tokens,
    )  # fmt: skip
    config = load_config(args.model)
    limits = args.max_prompt_tokens, max(args.max_completion_tokens, *args.eval_max_completion_tokens)
    check_config(args.model, config, limits, args.tensor_parallel_size)
    check_policy(config, take(Lora, args), take(Memory, args))
    prompt_format = take(PromptFormat, args, system_prompt=read_system_prompt(args.system_prompt))
    tokenizer, vision = load_processor(args.model, config, prompt_format)
    train_data = [PromptData.load(source, prompt_format, tokenizer, args.seed, vision) for source in args.train_data]
    make_plan(args, len(PromptData.mix(train_data, args.data_weights).rows))  # raises for too few rows, wrong weights
    # The seed 0 draws #ROWS: held-out sets are the same problems whatever the seed of the run.
    eval_sets = [PromptData.load(source, prompt_format, tokenizer, 0, vision) for source in args.eval_data]
    grading, is_leader = take(Grading, args), is_engine_leader_process(args.tensor_parallel_size)
    grader = Grader(grading, workers_per_engine(grading, args.tensor_parallel_size) if is_leader else 0)
    return Inputs(tokenizer, vision, train_data, eval_sets, eval_samplings, grader)
