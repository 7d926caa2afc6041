"""Every flag, once: its default, what it means, its range, and whether it may change when a run continues.

A flag has the name of its attribute, so one search finds the flag, its use, the scripts and the documentation. What the
flags amount to leaves this file as small frozen objects (`PromptFormat`, `Memory`, ... and `Plan`): only `main` sees
them all. The choices of the algorithm are functions in `grpo.py`: their parameters after `*` are the flags that have an
effect. No torch here, so that a mistake is reported at once.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar, dataclass_transform

from model.sizes import GPUS, check_path

if TYPE_CHECKING:
    import grpo

INF = math.inf
TINY = 1e-9  # as the smallest value: above 0
Settings = TypeVar("Settings")


class Flag(NamedTuple):
    """One flag. `default`: a value; or a type: None where the flag is not given; or [a type]: an empty list there."""

    name: str
    default: object
    help: str
    within: tuple[float, float] | None = None  # smallest and largest value
    choices: tuple[str, ...] | None = None
    is_list: bool = False  # any number of values, but None where it is not given
    is_required: bool = False
    free_on_resume: bool = False  # may change when a run continues, because it does not change what a step computes
    only_with: str | None = None  # the flag without which this one has no effect

    @property
    def type(self) -> type:
        """The type of a single value."""
        example = self.default[0] if isinstance(self.default, list) else self.default
        return example if isinstance(example, type) else type(example)

    @property
    def value(self) -> object:
        """The value where the flag is not given."""
        if isinstance(self.default, list):
            return [] if isinstance(self.default[0], type) else self.default
        return None if isinstance(self.default, type) else self.default

    def of(self, args: argparse.Namespace) -> object:
        """Its value among these flags."""
        return getattr(args, self.name.removeprefix("--"))


flag = Flag  # so that the declarations below read as what they are

DRY_RUN = "dry run (starts nothing; exit code 3: does not fit)"
GROUPS: dict[str, list[Flag]] = {}
# A flag takes one line, or two.
# fmt: off
GROUPS["model and data"] = [
    flag("--model", str, "starting policy, also reference and tokenizer: folder in Hugging Face format, or hub id",
         is_required=True),
    flag("--train_data", str, "training problems: one or more sources WHAT[@SPLIT][#ROWS], see docs/data.md",
         is_list=True, is_required=True),
    flag("--data_weights", float, "shares of the sources in an epoch; default: each row of each source once",
         is_list=True),
    flag("--keep_last", False, "fill an epoch's last partial step from the next epoch instead of dropping it"),
    flag("--eval_data", [str], "held-out problems: sources, each reported under its own name"),
    flag("--out_dir", str, "run folder; made if missing, continued if it holds a run of the same flags",
         is_required=True, free_on_resume=True),
]
GROUPS["prompts"] = [
    flag("--prompt_column", "problem", "column of the problem: text or messages; a dotted path reaches into objects"),
    flag("--answer_column", "answer", "column of the correct answer, for the reward; lists, objects become JSON text"),
    flag("--image_column", str, "column of the images, one or a list: files, relative to the data, or encoded bytes"),
    flag("--max_pixels", int, "larger images are scaled down to this many pixels; default: the processor's limit",
         (1, INF)),
    flag("--prompt_format", "chat", "chat: by the model's chat template; raw: the text as it is",
         choices=("chat", "raw")),
    flag("--system_prompt", str, "text, or a file with it; replaces the data's own system message"),
    flag("--prompt_suffix", "", "appended to the last user message as it is: begin it with a space or a line break"),
    flag("--max_prompt_tokens", 1024, "longer prompts, template included, are dropped and counted", (1, INF)),
]
GROUPS["reward"] = [
    flag("--reward", "exact", "math, gsm8k, ifeval, exact, format, think_format, length; a weighted sum "
         "(math:1.0,format:0.1); @COLUMN: the one that the row's column names; my_reward.py:function"),
    flag("--reward_timeout", 5.0, "seconds after which the grading of a completion is stopped: reward 0", (TINY, 1e6)),
    flag("--reward_memory_gib", 4.0, "memory at which a grading process is stopped: reward 0", (0.25, INF)),
    flag("--reward_workers", 0, "grading processes per engine; 0: the cores of the node / its engines",
         (0, INF), free_on_resume=True),
    flag("--truncated", "score", "completions cut at their token limit: graded like the others (score), reward 0 "
         "(zero), or graded but left out of the loss (mask)", choices=("score", "zero", "mask")),
    flag("--overlong_cache_tokens", int, "reward `length`: it falls from 0 to -1 over this many last tokens; "
         "default: 1/5 of the limit", (1, INF)),
]
GROUPS["batch, counted in prompts"] = [
    flag("--prompts_per_step", 32, "P: prompts sampled each step, over all ranks; a multiple of the engines", (1, INF)),
    flag("--group_size", 8, "G: completions per prompt, compared with each other", (2, INF)),
    flag("--prompts_per_update", int, "prompts per optimizer step, over all ranks; divides P; default: P", (1, INF)),
    flag("--num_iterations", 1, "passes over each rollout; all but the first are off-policy", (1, INF)),
    flag("--micro_batch_tokens", 8192, "maximum tokens that one rank packs into a forward and backward pass",
         (1, INF), free_on_resume=True),
    flag("--share_prompts", False, "compute a prompt once for all its completions that are packed together",
         free_on_resume=True),
    flag("--total_steps", int, "length of training in steps (give this, or one of the next two)", (1, INF)),
    flag("--epochs", int, "length of training in passes over the data; their last partial steps are dropped", (1, INF)),
    flag("--total_episodes", int, "length of training in completions, rounded down to whole steps", (1, INF)),
    flag("--stop_after", int, "stop after this step, with a checkpoint; the learning-rate schedule stays that of the "
         "whole length", (1, INF), free_on_resume=True),
]
GROUPS["sampling"] = [
    # vLLM would silently raise a temperature below 0.01; the trainer would not.
    flag("--temperature", 1.0, "sampling temperature; the trainer divides its logits by it, too", (0.01, 100)),
    flag("--max_completion_tokens", 1024, "completions are truncated after this many tokens", (1, INF)),
    flag("--tensor_parallel_size", 1, "ranks per vLLM engine; divides the number of ranks", (1, INF)),
    flag("--gpu_memory_utilization", 0.6, "CUDA: share of GPU memory that vLLM may take while it is awake",
         (0.01, 1), free_on_resume=True),
    flag("--enforce_eager", False, "CUDA: no CUDA graphs in vLLM (starts faster, samples slower); always so on CPU",
         free_on_resume=True),
    flag("--seed", 1, "random seed for data order and sampling", (0, INF)),
]
GROUPS["advantage"] = [
    flag("--advantage", "grpo", "how a completion is compared with the others of its group:"),
    flag("--advantage_ddof", 1, "the std divides by the count minus this: 1 (EasyR1, TRL, verl) or 0", (0, 1)),
    flag("--advantage_eps", 1e-6, "added to the std (EasyR1, verl: 1e-6; TRL: 1e-4)", (0, INF)),
    flag("--dynamic_sampling", "off", "replace groups without signal by newly sampled prompts (DAPO); signal: some "
         "but not all completions are correct (correct), or not all rewards are equal (reward)",
         choices=("off", "correct", "reward")),
    flag("--max_sampling_rounds", 10, "dynamic sampling: maximum rounds per step; then fill up with groups that have "
         "no signal", (1, INF), only_with="--dynamic_sampling"),
]
GROUPS["policy loss"] = [
    flag("--policy_loss", "clip", "loss of a token:"),
    flag("--clip_low", 0.2, "the ratio pi / pi_old is clipped below 1 - this (cispo: 1 is no lower bound)", (0, 1)),
    flag("--clip_high", 0.2, "the ratio pi / pi_old is clipped above 1 + this", (0, INF)),
    flag("--dual_clip", 0.0, "where A < 0, the loss is at most -A x this (EasyR1, verl: 3); 0: no bound", (0, INF)),
    flag("--sapo_tau_pos", 1.0, "steepness of SAPO's gate where A > 0", (TINY, INF)),
    flag("--sapo_tau_neg", 1.05, "steepness of SAPO's gate where A <= 0", (TINY, INF)),
    flag("--loss_aggregation", "token_mean", "how the losses of the tokens add up:"),
    flag("--loss_constant_tokens", int, "constant of seq_mean_token_sum_norm; default: --max_completion_tokens",
         (1, INF)),
    flag("--loss_args", [str], "NAME=VALUE ...: parameters after `*` of your own functions for --policy_loss, "
         "--advantage, --kl_estimator"),
    flag("--entropy_coef", 0.0, "weight of the entropy of the token distribution, subtracted from the loss", (0, INF)),
]
GROUPS["KL to the reference"] = [
    flag("--kl_coef", 0.0, "weight of KL(policy || reference); 0: no reference is loaded", (0, INF)),
    flag("--kl_estimator", "k3", "estimate of the KL of a token:", only_with="--kl_coef"),
    flag("--kl_clamp", 10.0, "clamp of the k3 estimate, and +-20 of its log-ratio (EasyR1, verl: 10); 0: none (TRL)",
         (0, INF), only_with="--kl_coef"),
    flag("--kl_in", "loss", "a term of the loss, or subtracted from the reward before the advantage is computed",
         choices=("loss", "reward"), only_with="--kl_coef"),
]
GROUPS["sampler-trainer mismatch"] = [
    flag("--rollout_correction", "none", "weight of a token's loss, from the ratio trainer / sampler of its log-prob:"),
    flag("--rollout_correction_max", 2.0, "largest ratio (truncated importance sampling: 2; IcePop: 5)", (TINY, INF)),
    flag("--rollout_correction_min", 0.5, "smallest ratio that is not masked (IcePop: 0.5)", (0, INF)),
]
GROUPS["LoRA"] = [
    flag("--lora_rank", 0, "train adapters of this rank on frozen weights; 0: train all weights", (0, INF)),
    flag("--lora_alpha", 32.0, "adapters are scaled by this / rank (ms-swift: 32 with rank 8)",
         (TINY, INF), only_with="--lora_rank"),
    flag("--lora_dropout", 0.0, "share of an adapter's inputs that is dropped, in the update only",
         (0, 0.99), only_with="--lora_rank"),
    flag("--lora_targets", str, "names of the linear layers that get an adapter (q_proj v_proj, say); default: all "
         "of the decoder but the head", is_list=True, only_with="--lora_rank"),
]
GROUPS["optimizer (AdamW)"] = [
    flag("--learning_rate", 1e-6, "peak learning rate", (0, INF)),
    flag("--lr_schedule", "constant", "learning rate after the warm-up; cosine and linear fall to 0",
         choices=("constant", "cosine", "linear")),
    flag("--warmup_ratio", 0.0, "share of all updates in which the rate rises linearly to its peak", (0, 1)),
    flag("--weight_decay", 0.0, "decoupled weight decay of all trained parameters", (0, INF)),
    flag("--adam_beta1", 0.9, "decay of the mean gradient", (0, 0.99999)),
    flag("--adam_beta2", 0.999, "decay of the mean squared gradient", (0, 0.99999)),
    flag("--max_grad_norm", 1.0, "the global gradient norm is clipped to this", (TINY, INF)),
    flag("--max_skipped_updates", 3, "stop after this many consecutive updates with a non-finite loss or gradient",
         (1, INF), free_on_resume=True),
]
DTYPES = ("bfloat16", "float32")
GROUPS["precision and memory"] = [
    flag("--dtype", "bfloat16", "arithmetic of trainer and sampler; gradients are reduced in fp32", choices=DTYPES),
    flag("--param_dtype", "float32", "parameters, gradients, Adam's moments: 16 bytes per parameter (float32), or 10 "
         "(bfloat16, updated as fp32 ones: model/optimizer.py)", choices=DTYPES),
    flag("--offload", "none", "what is kept in host RAM: nothing; the optimizer's state, which streams through the "
         "GPU; all: also parameters and gradients", choices=("none", "optimizer", "all"), free_on_resume=True),
    flag("--offload_reference", False, "keep the reference in host RAM; layers are fetched as they are needed",
         free_on_resume=True, only_with="--kl_coef"),
    flag("--gradient_checkpointing", False, "recompute each decoder layer in the backward pass instead of keeping it",
         free_on_resume=True),
    flag("--offload_activations", False, "keep in host RAM what the backward pass needs", free_on_resume=True),
    flag("--compile_layers", False, "CUDA: torch.compile the decoder layers; takes a minute or more at the first step",
         free_on_resume=True),
    flag("--reduce_gradients_once", False, "reduce gradients per update, not per micro-batch: less traffic, for 4 "
         "bytes per trained parameter on every GPU", free_on_resume=True),
    flag("--gather_parameters_once", False, "gather parameters per update, not per micro-batch: less traffic, for "
         "the whole policy in --dtype on every GPU", free_on_resume=True),
    flag("--timeout_minutes", 30.0, "a rank that waits longer than this for the others ends the run",
         (TINY, 1e6), free_on_resume=True),
]
GROUPS["evaluation and checkpoints, counted in steps"] = [
    flag("--eval_every", 0, "evaluate every so many steps and after the last; 0: never", (0, INF), free_on_resume=True),
    flag("--eval_before_training", False, "evaluate the starting policy, too, as step 0", free_on_resume=True),
    flag("--eval_samples", [1], "k: completions per held-out problem; one number for all sets, or one each", (1, INF)),
    flag("--eval_temperature", [1.0], "temperature of held-out sampling; 0 is greedy; for all sets, or each", (0, 100)),
    flag("--eval_top_p", [1.0], "nucleus sampling in evaluation; for all sets, or each", (TINY, 1)),
    flag("--eval_max_completion_tokens", int, "token limit in evaluation; for all sets, or each; default: the "
         "training's", (1, INF), is_list=True),
    flag("--save_every", 0, "write a checkpoint every so many steps; after the last there always is one",
         (0, INF), free_on_resume=True),
    flag("--keep_checkpoints", 3, "remove the oldest checkpoints beyond this many; 0: keep all",
         (0, INF), free_on_resume=True),
    flag("--async_checkpoint", False, "write checkpoints in the background, from a copy in host RAM",
         free_on_resume=True),
    flag("--profile_steps", [int], "steps whose trace is written to OUT_DIR/profile, one file per rank", (1, INF),
         free_on_resume=True),
]
GROUPS[DRY_RUN] = [  # all of them may change when a run continues
    flag("--dry_run", False, "print batches, memory, time and what would have to change, and stop; needs no GPU"),
    flag("--json", False, "print one JSON object instead"),
    flag("--trace", False, "also trace an update of the real model, cut to 8 layers, without a GPU; takes seconds"),
    flag("--plan_gpus", int, "GPUs over all nodes; default: the ranks that torchrun started; without it 8", (1, INF)),
    flag("--plan_nodes", 1, "nodes that the GPUs are on", (1, INF)),
    flag("--plan_gpu", "H100-80GB", "kind of GPU", choices=tuple(GPUS)),
    flag("--plan_gpu_memory_gib", float, "memory of a GPU that a process can take; default: the kind's", (TINY, INF)),
    flag("--plan_host_memory_gib", 1000.0, "RAM of a node", (TINY, INF)),
    flag("--plan_network_gb_s", 50.0, "GB/s between nodes, one way, for each GPU: a 400 Gbit/s card each", (TINY, INF)),
    flag("--plan_rows", int, "usable training rows; default: #ROWS of --train_data, lines of a .jsonl file, or a "
         "table", (1, INF)),
    flag("--plan_flops_share", 0.35, "share of peak FLOPs; torchtitan reports 33 to 39 %% on 8 to 128 H100", (TINY, 1)),
    flag("--plan_memory_share", 0.6, "share of the GPU memory's speed that decoding reaches; an assumption", (TINY, 1)),
    flag("--plan_link_share", 0.7, "share of the speed of links, network and bus that is reached; an assumption",
         (TINY, 1)),
    flag("--plan_length_share", 0.5, "mean length of prompts and completions, as a share of their limits", (TINY, 1)),
]
# fmt: on
FLAGS = {each.name: each for group in GROUPS.values() for each in group}
CHOICES = {  # flag -> the dict of functions in grpo.py that it chooses from
    "--advantage": "ADVANTAGES",
    "--policy_loss": "LOSSES",
    "--loss_aggregation": "AGGREGATIONS",
    "--kl_estimator": "KL",
    "--rollout_correction": "CORRECTIONS",
}
OWN = ("--advantage", "--policy_loss", "--kl_estimator")  # may also name a function of the user's, FILE.py:FUNCTION


# What the flags amount to ---------------------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True)
def settings(kind: type[Settings]) -> type[Settings]:
    """A frozen dataclass. A field with the name of a flag has the flag's default."""
    for name in kind.__annotations__:
        if f"--{name}" in FLAGS:
            setattr(kind, name, FLAGS[f"--{name}"].value)
    return dataclass(frozen=True)(kind)


@settings
class PromptFormat:  # how a row becomes a prompt
    prompt_column: str
    answer_column: str
    image_column: str | None
    prompt_format: str
    system_prompt: str | None
    prompt_suffix: str
    max_prompt_tokens: int
    max_pixels: int | None


@settings
class Grading:  # how completions are graded
    reward: str
    reward_timeout: float
    reward_memory_gib: float
    reward_workers: int
    truncated: str
    overlong_cache_tokens: int | None


@settings
class Lora:  # which adapters are trained; rank 0: none, but all weights
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: tuple[str, ...] | None


@settings
class Memory:  # precision, and what is kept where
    dtype: str
    param_dtype: str
    offload: str
    offload_reference: bool
    gradient_checkpointing: bool
    offload_activations: bool
    compile_layers: bool
    reduce_gradients_once: bool
    gather_parameters_once: bool
    micro_batch_tokens: int
    share_prompts: bool


@settings
class AdamW:  # the optimizer
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    max_grad_norm: float


@settings
class EngineSettings:  # the engine; `max_model_len` is in tokens, prompt and completion together
    max_model_len: int
    dtype: str
    gpu_memory_utilization: float
    enforce_eager: bool
    seed: int


@settings
class Sampling:  # how often and how a set of prompts is sampled: the training prompts, or a held-out set
    num_samples: int
    temperature: float
    max_completion_tokens: int
    top_p: float = 1.0


@dataclass(frozen=True)
class Plan:
    """The arithmetic of batches and steps. One step = one rollout; one update = one optimizer step."""

    prompts_per_step: int
    group_size: int
    num_iterations: int
    completions_per_step: int
    updates_per_pass: int
    updates_per_step: int  # of all passes
    steps_per_epoch: float  # a whole number but with --keep_last
    total_steps: int
    total_updates: int
    warmup_updates: int
    learning_rate: float
    lr_schedule: str
    max_grad_norm: float
    seed: int

    def update(self, step: int, i: int) -> UpdateStep:
        """Where update i of step 1, 2, ... stands in the run, and its learning rate."""
        index = (step - 1) * self.updates_per_step + i
        return UpdateStep(index, self.rate(index), i == 0, self.max_grad_norm, self.seed)

    def rate(self, update: int) -> float:
        """The learning rate of update 0, 1, ...: linear warm-up to the peak, then constant, or cosine or linear to 0.

        The last update is the last one above 0: none is wasted on a rate of 0.
        """
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / self.warmup_updates
        progress = (update - self.warmup_updates) / max(self.total_updates - self.warmup_updates, 1)
        if self.lr_schedule == "cosine":
            return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.learning_rate * (1.0 - progress) if self.lr_schedule == "linear" else self.learning_rate


class UpdateStep(NamedTuple):
    """One optimizer step of the run."""

    index: int  # 0, 1, ... over the whole run
    rate: float
    is_first: bool  # of its rollout: no weight has changed since sampling
    max_grad_norm: float
    seed: int


def take(kind: type[Settings], args: argparse.Namespace, **others: object) -> Settings:
    """The object of this kind, its fields filled from the flags of the same names, or from `others`."""
    values = {each.name: getattr(args, each.name) for each in fields(kind) if each.name not in others} | others
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def make_plan(args: argparse.Namespace, num_rows: int) -> Plan:
    """The plan for `num_rows` usable training rows. Raises ValueError if they do not fill one step."""
    if num_rows < args.prompts_per_step and not args.keep_last:
        raise ValueError(
            f"--train_data has {num_rows} usable rows, fewer than --prompts_per_step {args.prompts_per_step}; "
            f"use at most {num_rows}. With --keep_last a step may reach into the next epoch."
        )
    completions_per_step = args.prompts_per_step * args.group_size
    steps_per_epoch = num_rows / args.prompts_per_step if args.keep_last else num_rows // args.prompts_per_step
    total_steps = args.total_steps
    if args.epochs is not None:
        total_steps = math.ceil(args.epochs * steps_per_epoch)
    if args.total_episodes is not None:
        total_steps = args.total_episodes // completions_per_step
    updates_per_pass = args.prompts_per_step // args.prompts_per_update
    total_updates = total_steps * updates_per_pass * args.num_iterations
    return take(
        Plan,
        args,
        completions_per_step=completions_per_step,
        updates_per_pass=updates_per_pass,
        updates_per_step=updates_per_pass * args.num_iterations,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_updates=total_updates,
        warmup_updates=math.ceil(args.warmup_ratio * total_updates),
    )


def parse_source(source: str) -> tuple[str, str | None, int | None]:
    """(WHAT, SPLIT, ROWS) of WHAT[@SPLIT][#ROWS]. A path that exists is taken literally."""
    what, split, count = source, None, None
    if not Path(what).exists() and (match := re.fullmatch(r"(.+)#([1-9]\d*)", what)):
        what, count = match[1], int(match[2])
    if not Path(what).exists() and (match := re.fullmatch(r"(.+)@([^@/]+)", what)):
        what, split = match[1], match[2]
    return what, split, count


# The command line -----------------------------------------------------------------------------------------------------

USAGE = "torchrun --nproc_per_node RANKS train_grpo.py --model MODEL --train_data FILE --out_dir FOLDER [flags]"
DESCRIPTION = """Trains a language model with GRPO on verifiable rewards. One rank per GPU; on CPU, as many as you like.
One step = one rollout of P prompts x G completions; one update = one optimizer step. Starting the same command again
continues from the last checkpoint."""


class HelpFormatter(argparse.HelpFormatter):
    """Wide lines, the type in the place of the value, the algorithm's choices from `grpo.py`, and the defaults."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, subsequent_indent="    ")

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.type.__name__ if action.type else "text"

    def _get_help_string(self, action: argparse.Action) -> str:
        text, name = action.help, action.option_strings[0]
        if name in CHOICES:
            words = [f"{choice} = {summary(function)}" for choice, function in functions_of(name).items()]
            text = f"{text} {'; '.join(words + ['or FILE.py:FUNCTION'] * (name in OWN))}".replace("%", "%%")
        has_default = action.default not in (None, [], "") and action.nargs != 0 and not action.required
        return f"{text} (default: %(default)s)" if has_default else text


def add_flags(parser: argparse.ArgumentParser, groups: dict[str, list[Flag]]) -> None:
    """Declares the flags of these groups."""
    for title, group in groups.items():
        add = parser.add_argument_group(title).add_argument
        for each in group:
            if each.default is False:
                add(each.name, action="store_true", help=each.help)
                continue
            options = {"type": each.type, "default": each.value, "choices": each.choices, "help": each.help}
            if each.is_list or isinstance(each.default, list):
                options["nargs"] = "*" if each.value == [] else "+"
            add(each.name, required=each.is_required, **options)


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line as attributes of the same names. Ends the process with a sentence if it cannot be read."""
    parser = argparse.ArgumentParser(
        usage=USAGE, description=DESCRIPTION, formatter_class=HelpFormatter, allow_abbrev=False
    )
    add_flags(parser, GROUPS)
    args = parser.parse_args(argv)
    args.prompts_per_update = args.prompts_per_step if args.prompts_per_update is None else args.prompts_per_update
    args.eval_max_completion_tokens = args.eval_max_completion_tokens or [args.max_completion_tokens]
    return args


def free_on_resume(args: argparse.Namespace) -> set[str]:
    """Names of the flags that may differ when a run continues.

    The length of the run is one of them, unless the learning rate depends on it.
    """
    free = {each.name.removeprefix("--") for each in FLAGS.values() if each.free_on_resume or each in GROUPS[DRY_RUN]}
    is_constant = args.lr_schedule == "constant" and not args.warmup_ratio
    return free | {"total_steps", "epochs", "total_episodes"} if is_constant else free


def exit_with_error(error: Exception) -> NoReturn:
    """Ends the process with the error's sentence, without a traceback: for mistakes of the user.

    All ranks find the same one: the first reports it, and torchrun stops the others. One that is still there after some
    seconds has an error of its own (a file that is missing on its node only) and reports that.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10)
    sys.exit(f"error: {error}")


# Checks: each sentence says what was given, what is required, what to do ----------------------------------------------


def check_flags(args: argparse.Namespace, num_ranks: int | None = None) -> None:
    """Raises ValueError for flags out of range, without effect, or in contradiction to each other.

    `num_ranks`: by default those that torchrun started. What has no effect on the algorithm is found by `algorithm_of`.
    """
    check_ranges(args, GROUPS)
    check_path(args.model)
    check_batches(args, int(os.environ.get("WORLD_SIZE", "1")) if num_ranks is None else num_ranks)
    check_algorithm(args)
    check_memory(args)
    for name in ("eval_every", "eval_before_training"):
        if getattr(args, name) and not args.eval_data:
            wrong = given(FLAGS[f"--{name}"], args)
            raise ValueError(f"{wrong} needs --eval_data; name a file, or leave --{name} out.")


def check_ranges(args: argparse.Namespace, groups: dict[str, list[Flag]]) -> None:
    """Raises ValueError for a value out of its range, and for a flag that has no effect without another one."""
    for each in (each for group in groups.values() for each in group):
        value = each.of(args)
        low, high = each.within or (-INF, INF)
        for number in value if isinstance(value, list) else [value]:
            if each.within and number is not None and not low <= number <= high:  # also true for nan
                bounds = "above 0" if low == TINY else f"at least {low:g}"
                bounds += "" if high == INF else f" and at most {high:g}"
                raise ValueError(f"{each.name} {number:g}: must be {bounds}.")
        if each.only_with and value != each.value:
            other = FLAGS[each.only_with].of(args)
            if other in (0, "off", "none"):
                needed = f"{each.only_with} above 0" if other == 0 else each.only_with
                wrong = f"{given(each, args)} has no effect here, only with {needed}"
                raise ValueError(f"{wrong}: {leave(each)}, or change the other.")


def given(each: Flag, args: argparse.Namespace) -> str:
    """The flag as it was written."""
    value = each.of(args)
    values = value if isinstance(value, list) else [] if value is True else [value]
    return " ".join([each.name, *map(str, values)])


def leave(each: Flag) -> str:
    """How to say that the default should stay."""
    return f"leave it at {each.value}" if each.value else "leave it out"


def divisors(number: int) -> str:
    """The numbers that divide it, as words."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def check_engines(tensor_parallel_size: int, num_ranks: int) -> None:
    """Raises ValueError if so many ranks are no whole number of engines."""
    if tensor_parallel_size < 1 or num_ranks % tensor_parallel_size:
        wrong = f"--tensor_parallel_size {tensor_parallel_size} does not divide the world size {num_ranks}"
        raise ValueError(f"{wrong}; use one of {divisors(num_ranks)}.")


def check_batches(args: argparse.Namespace, num_ranks: int) -> None:
    """Raises ValueError for batches that cannot be divided, and for a length of training that is not clear."""
    prompts, size = args.prompts_per_step, args.tensor_parallel_size
    check_engines(size, num_ranks)
    num_engines = num_ranks // size
    if prompts % num_engines:
        below = prompts // num_engines * num_engines
        near = f"{below} or {below + num_engines}" if below else num_engines
        engines = f"{num_engines} engines ({num_ranks} ranks / --tensor_parallel_size {size})"
        raise ValueError(f"--prompts_per_step {prompts} is not divisible by {engines}; use {near}.")
    if prompts % args.prompts_per_update:
        wrong = f"--prompts_per_update {args.prompts_per_update} does not divide --prompts_per_step {prompts}"
        raise ValueError(f"{wrong}; use one of {divisors(prompts)}.")
    longest = args.max_prompt_tokens + args.max_completion_tokens
    if args.micro_batch_tokens < longest:
        raise ValueError(
            f"--micro_batch_tokens {args.micro_batch_tokens} cannot hold one sequence of --max_prompt_tokens "
            f"{args.max_prompt_tokens} + --max_completion_tokens {args.max_completion_tokens}; use at least {longest}."
        )
    num_lengths = sum(x is not None for x in (args.total_steps, args.epochs, args.total_episodes))
    if num_lengths != 1:
        raise ValueError(f"{num_lengths} of --total_steps, --epochs, --total_episodes were given; give exactly one.")
    completions = prompts * args.group_size
    if args.total_episodes is not None and args.total_episodes < completions:
        wrong = f"--total_episodes {args.total_episodes} is less than one step"
        raise ValueError(f"{wrong}, --prompts_per_step x --group_size; use at least {completions}.")


def check_algorithm(args: argparse.Namespace) -> None:
    """Raises ValueError for flags of the algorithm that contradict each other."""
    if 0 < args.dual_clip <= 1:
        raise ValueError(f"--dual_clip {args.dual_clip:g}: must be above 1, or 0 for none.")
    low, high = args.rollout_correction_min, args.rollout_correction_max
    if args.rollout_correction.endswith("mask") and low >= high:
        raise ValueError(f"--rollout_correction_min {low:g} must be below --rollout_correction_max {high:g}.")
    if args.kl_in == "reward" and args.kl_estimator == "k3+":
        raise ValueError("--kl_estimator k3+: only its gradient differs from k3, and --kl_in reward has none; use k3.")
    if args.kl_in == "reward" and args.advantage == "reinforce++" and args.policy_loss == "gspo":
        differs = "--advantage reinforce++ with --kl_in reward differs from token to token"
        raise ValueError(f"--policy_loss gspo weighs whole sequences, but {differs}; use gspo_token.")
    if args.dynamic_sampling != "off":
        dynamic = f"--dynamic_sampling {args.dynamic_sampling}"
        if args.epochs is not None:
            known = "the steps of an epoch are known only afterwards"
            raise ValueError(f"--epochs {args.epochs} with {dynamic}: {known}; give --total_steps.")
        if args.keep_last:
            raise ValueError(f"--keep_last has no effect with {dynamic}, which has no last steps; leave it out.")


def check_memory(args: argparse.Namespace) -> None:
    """Raises ValueError for flags of precision and memory that contradict each other."""
    if args.param_dtype == "bfloat16" and args.dtype == "float32":
        raise ValueError(
            "--dtype float32 computes more finely than --param_dtype bfloat16 stores; leave one of them out."
        )
    if args.lora_rank:
        advice = f"has no effect with --lora_rank {args.lora_rank}; leave it out"
        if args.param_dtype != "float32":
            raise ValueError(
                f"--param_dtype {args.param_dtype} {advice}: adapters are kept in float32, the rest in --dtype."
            )
        if args.offload_reference:
            raise ValueError(f"--offload_reference {advice}: the reference is the policy with its adapter off.")


# The algorithm --------------------------------------------------------------------------------------------------------


def functions_of(name: str) -> dict[str, Callable]:
    """The functions that the flag of this name chooses from."""
    import grpo  # torch: not before the other flags are checked

    return getattr(grpo, CHOICES[name])


def summary(function: Callable) -> str:
    """The first sentence of the docstring."""
    return " ".join((function.__doc__ or "your own").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def parameters_of(function: Callable) -> dict[str, object]:
    """The parameters after `*`, and their defaults: the flags that have an effect."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind == each.KEYWORD_ONLY}


def algorithm_of(args: argparse.Namespace) -> grpo.Algorithm:
    """The algorithm: its functions, with the values of their parameters after `*`.

    Raises ValueError for an unknown name, for a flag that has no effect, and for a function of the user's that fails on
    a trial.
    """
    import grpo

    own_values = own_parameters(args.loss_args)
    functions = {name: choose(name, FLAGS[name].of(args)) for name in CHOICES}
    check_effects(args, functions, own_values)
    bound = {}
    for name, function in functions.items():
        bound[name] = partial(function, **values_of(name, function, args, own_values))
        if function not in functions_of(name).values():
            needs_gradient = name == "--policy_loss" or (name == "--kl_estimator" and args.kl_in == "loss")
            grpo.try_out(name, given(FLAGS[name], args), bound[name], needs_gradient)
    choices = {name.removeprefix("--"): function for name, function in bound.items()}
    return take(
        grpo.Algorithm,
        args,
        **choices,
        is_corrected=args.rollout_correction != "none",
        kl_clamp=bound["--kl_estimator"].keywords.get("kl_clamp", 0.0),
        description=describe(args, bound),
    )


def choose(name: str, choice: str) -> Callable:
    """The function of this name, or the user's own, FILE.py:FUNCTION. Raises ValueError if there is none."""
    if choice in functions_of(name):
        return functions_of(name)[choice]
    path, _, function_name = choice.rpartition(":")
    if name in OWN and path.endswith(".py"):
        return load_function(name, path, function_name)
    raise ValueError(f"{name} {choice}: use {', '.join(functions_of(name))}{' or FILE.py:FUNCTION' * (name in OWN)}.")


def load_function(name: str, path: str, function_name: str) -> Callable:
    """The function of this name in a file of the user's. Raises ValueError, also with what the file itself raises."""
    spec = importlib.util.spec_from_file_location(f"own_{Path(path).stem}", path)  # a file may be called math.py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import would: dataclasses look there
    sys.path.insert(0, str(Path(path).absolute().parent))  # so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} {path}:{function_name}: the file cannot be loaded ({reason}).") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(f"{name}: {path} has no function {function_name!r}; it has {', '.join(found) or 'none'}.")
    return function


def own_parameters(texts: list[str]) -> dict[str, object]:
    """The values of --loss_args: Python literals, or else texts. Raises ValueError for what is not NAME=VALUE."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if f"--{name}" in FLAGS:
            raise ValueError(f"--loss_args {text}: {name} is a flag; use --{name}.")
        if not name.isidentifier() or not equals or name in values:
            raise ValueError(f"--loss_args {text}: needed is NAME=VALUE, each name once.")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return values


def check_effects(args: argparse.Namespace, functions: dict[str, Callable], own_values: dict[str, object]) -> None:
    """Raises ValueError for a flag that was changed, but that none of the chosen functions has as a parameter."""
    used = {key for function in functions.values() for key in parameters_of(function)}
    for name in functions:
        others = {choice: parameters_of(function) for choice, function in functions_of(name).items()}
        for key in {key: None for parameters in others.values() for key in parameters if key not in used}:
            each = FLAGS[f"--{key}"]
            if each.of(args) != each.value:
                wrong = f"{given(each, args)} has no effect with {given(FLAGS[name], args)}"
                needed = ", ".join(choice for choice, parameters in others.items() if key in parameters)
                raise ValueError(f"{wrong}, only with {name} {needed}: {leave(each)}.")
    if unused := sorted(set(own_values) - used):
        raise ValueError(
            f"--loss_args {', '.join(unused)}: no function of yours has this parameter after `*`; leave it out."
        )


def values_of(
    name: str, function: Callable, args: argparse.Namespace, own_values: dict[str, object]
) -> dict[str, object]:
    """The values of the parameters after `*`: flags, --loss_args, or defaults. Raises ValueError for one without."""
    values = {}
    for key, default in parameters_of(function).items():
        if f"--{key}" in FLAGS:
            values[key] = getattr(args, key)
        elif key in own_values:
            values[key] = own_values[key]
        elif default is inspect.Parameter.empty:
            missing = f"its parameter {key} has no value; give --loss_args {key}=VALUE, or a default"
            raise ValueError(f"{given(FLAGS[name], args)}: {missing}.")
    if values.get("loss_constant_tokens", 0) is None:
        values["loss_constant_tokens"] = args.max_completion_tokens
    return values


def describe(args: argparse.Namespace, bound: dict[str, partial]) -> str:
    """What the flags amount to, in words: for the first lines of the log."""

    def words(name: str) -> str:
        values = bound[name].keywords.items()
        said = ", ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in values)
        return f"{FLAGS[name].of(args)}{f' ({said})' if said else ''}: {summary(bound[name].func)}"

    parts = [f"advantage {words('--advantage')}", f"loss {words('--policy_loss')}", words("--loss_aggregation")]
    parts.append(f"KL {args.kl_coef:g} x {words('--kl_estimator')}, in the {args.kl_in}" if args.kl_coef else "no KL")
    if args.entropy_coef:
        parts.append(f"entropy bonus {args.entropy_coef:g}")
    if args.rollout_correction != "none":
        parts.append(f"rollout correction {words('--rollout_correction')}")
    if args.dynamic_sampling != "off":
        parts.append(f"dynamic sampling by {args.dynamic_sampling}, at most {args.max_sampling_rounds} rounds")
    if args.truncated != "score":
        parts.append(f"truncated: {args.truncated}")
    parts.append(f"{args.num_iterations} passes per rollout" if args.num_iterations > 1 else "one pass per rollout")
    return "algorithm: " + "; ".join(parts) + f"; temperature {args.temperature:g} in sampler and trainer"
