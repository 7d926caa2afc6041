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
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import grpo

INF = math.inf
TINY = 1e-9  # stands for "above 0"
Settings = TypeVar("Settings")


class Flag(NamedTuple):
    """One flag. `default` may be a type: then there is none, and the value is None where the flag is not given."""

    name: str
    default: object
    help: str
    within: tuple[float, float] | None = None  # smallest and largest value
    choices: tuple[str, ...] | None = None
    is_list: bool = False
    is_required: bool = False
    free_on_resume: bool = False  # may change when a run continues, because it does not change what a step computes
    only_with: str | None = None  # the flag without which this one has no effect

    @property
    def type(self) -> type:
        first = self.default[0] if isinstance(self.default, list) and self.default else self.default
        return first if isinstance(first, type) else str if first == [] else type(first)


flag = Flag  # so that the declarations below read as what they are

# A flag takes one line, or two.
# fmt: off
MODEL_AND_DATA = [
    flag("--model", str, "starting policy, also reference and tokenizer: folder in Hugging Face format, or hub id",
         is_required=True),
    flag("--train_data", str, "training problems: one or more sources WHAT[@SPLIT][#ROWS], see docs/data.md",
         is_list=True, is_required=True),
    flag("--data_weights", float, "shares of the sources in an epoch; default: each row of each source once",
         is_list=True),
    flag("--keep_last", False, "fill an epoch's last partial step from the next epoch instead of dropping it"),
    flag("--eval_data", [], "held-out problems: sources, each reported under its own name"),
    flag("--out_dir", str, "run folder; made if missing, continued if it holds a run of the same flags",
         is_required=True, free_on_resume=True),
]
PROMPTS = [
    flag("--prompt_column", "problem", "column of the problem: text or messages; a dotted path reaches into nested "
         "objects"),
    flag("--answer_column", "answer", "column of the correct answer, given to the reward; lists and objects become "
         "JSON text"),
    flag("--image_column", str, "column of the images, one or a list: files, relative to the data, or encoded bytes; "
         "default: none"),
    flag("--max_pixels", int, "larger images are scaled down to this many pixels; default: the processor's limit",
         (1, INF)),
    flag("--prompt_format", "chat", "chat: by the model's chat template; raw: the text as it is",
         choices=("chat", "raw")),
    flag("--system_prompt", str, "text, or a file with it; replaces the data's own system message; default: the "
         "data's"),
    flag("--prompt_suffix", "", "appended to the last user message as it is: begin it with a space or a line break"),
    flag("--max_prompt_tokens", 1024, "longer prompts, template included, are dropped and counted", (1, INF)),
]
REWARD = [
    flag("--reward", "exact", "math, gsm8k, ifeval, exact, format, think_format, length; a weighted sum "
         "(math:1.0,format:0.1); @COLUMN: the one that the row's column names; my_reward.py:function"),
    flag("--reward_timeout", 5.0, "seconds after which the grading of a completion is stopped: reward 0",
         (TINY, 1000000.0)),
    flag("--reward_memory_gib", 4.0, "memory at which a grading process is stopped: reward 0", (0.25, INF)),
    flag("--reward_workers", 0, "grading processes per engine; 0: the cores of the node / its engines",
         (0, INF), free_on_resume=True),
    flag("--truncated", "score", "completions cut at their token limit: graded like the others (score), reward 0 "
         "(zero), or graded but left out of the loss (mask)", choices=("score", "zero", "mask")),
    flag("--overlong_cache_tokens", int, "reward `length`: it falls from 0 to -1 over this many last tokens; "
         "default: 1/5 of the limit", (1, INF)),
]
BATCH = [
    flag("--prompts_per_step", 32, "P: prompts sampled each step, over all ranks; divisible by the number of engines",
         (1, INF)),
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
SAMPLING = [
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
ADVANTAGE = [
    flag("--advantage", "grpo", "how a completion is compared with the others of its group:"),
    flag("--advantage_ddof", 1, "the std divides by the count minus this: 1 (EasyR1, TRL, verl) or 0", (0, 1)),
    flag("--advantage_eps", 1e-06, "added to the std (EasyR1, verl: 1e-6; TRL: 1e-4)", (0, INF)),
    flag("--dynamic_sampling", "off", "replace groups without signal by newly sampled prompts (DAPO); a group has a "
         "signal if some but not all completions are correct (correct), or if not all rewards are equal (reward)",
         choices=("off", "correct", "reward")),
    flag("--max_sampling_rounds", 10, "dynamic sampling: maximum rounds per step; then fill up with groups that have "
         "no signal", (1, INF), only_with="--dynamic_sampling"),
]
POLICY_LOSS = [
    flag("--policy_loss", "clip", "loss of a token:"),
    flag("--clip_low", 0.2, "the ratio pi / pi_old is clipped below 1 - this (cispo: 1 is no lower bound)", (0, 1)),
    flag("--clip_high", 0.2, "the ratio pi / pi_old is clipped above 1 + this", (0, INF)),
    flag("--dual_clip", 0.0, "where A < 0, the loss is at most -A x this (above 1; EasyR1, verl: 3); 0: no such "
         "bound", (0, INF)),
    flag("--sapo_tau_pos", 1.0, "steepness of SAPO's gate where A > 0", (TINY, INF)),
    flag("--sapo_tau_neg", 1.05, "steepness of SAPO's gate where A <= 0", (TINY, INF)),
    flag("--loss_aggregation", "token_mean", "how the losses of the tokens add up:"),
    flag("--loss_constant_tokens", int, "constant of seq_mean_token_sum_norm; default: --max_completion_tokens",
         (1, INF)),
    flag("--loss_args", [], "NAME=VALUE ...: parameters after `*` of your own functions for --policy_loss, "
         "--advantage, --kl_estimator"),
    flag("--entropy_coef", 0.0, "weight of the entropy of the token distribution, which is subtracted from the loss",
         (0, INF)),
]
KL = [
    flag("--kl_coef", 0.0, "weight of KL(policy || reference); 0: no reference is loaded", (0, INF)),
    flag("--kl_estimator", "k3", "estimate of the KL of a token:", only_with="--kl_coef"),
    flag("--kl_clamp", 10.0, "clamp of the k3 estimate, and +-20 of its log-ratio (EasyR1, verl: 10); 0: none (TRL)",
         (0, INF), only_with="--kl_coef"),
    flag("--kl_in", "loss", "a term of the loss, or subtracted from the reward before the advantage is computed",
         choices=("loss", "reward"), only_with="--kl_coef"),
]
MISMATCH = [
    flag("--rollout_correction", "none", "weight of the policy loss, by the ratio trainer / sampler under the same "
         "weights:"),
    flag("--rollout_correction_max", 2.0, "largest ratio (truncated importance sampling: 2; IcePop: 5)", (TINY, INF)),
    flag("--rollout_correction_min", 0.5, "smallest ratio that is not masked (IcePop: 0.5)", (0, INF)),
]
LORA = [
    flag("--lora_rank", 0, "train adapters of this rank on frozen weights; 0: train all weights", (0, INF)),
    flag("--lora_alpha", 32.0, "adapters are scaled by this / rank (ms-swift: 32 with rank 8)",
         (TINY, INF), only_with="--lora_rank"),
    flag("--lora_dropout", 0.0, "share of an adapter's inputs that is dropped, in the update only",
         (0, 0.99), only_with="--lora_rank"),
    flag("--lora_targets", str, "names of the linear layers that get an adapter (q_proj v_proj, say); default: all "
         "of the decoder but the head", is_list=True, only_with="--lora_rank"),
]
OPTIMIZER = [
    flag("--learning_rate", 1e-06, "peak learning rate", (0, INF)),
    flag("--lr_schedule", "constant", "after the warm-up; cosine and linear fall to 0",
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
MEMORY = [
    flag("--dtype", "bfloat16", "arithmetic of trainer and sampler; gradients are reduced in fp32", choices=DTYPES),
    flag("--param_dtype", "float32", "parameters, gradients, Adam's moments: 16 bytes per parameter (float32), or 10 "
         "(bfloat16, updated as fp32 ones: model/optimizer.py)", choices=DTYPES),
    flag("--offload", "none", "keep in host RAM: nothing; the optimizer's state, which streams through the GPU; all: "
         "also parameters and gradients", choices=("none", "optimizer", "all"), free_on_resume=True),
    flag("--offload_reference", False, "keep the reference in host RAM; layers are fetched as they are needed",
         free_on_resume=True, only_with="--kl_coef"),
    flag("--gradient_checkpointing", False, "recompute each decoder layer in the backward pass instead of keeping it",
         free_on_resume=True),
    flag("--offload_activations", False, "keep in host RAM what the backward pass needs", free_on_resume=True),
    flag("--compile_layers", False, "CUDA: torch.compile the decoder layers; takes a minute or more at the first "
         "step", free_on_resume=True),
    flag("--reduce_gradients_once", False, "reduce gradients per update, not per micro-batch: less traffic, for 4 "
         "bytes per trained parameter on every GPU", free_on_resume=True),
    flag("--gather_parameters_once", False, "gather parameters per update, not per micro-batch: less traffic, for "
         "the whole policy in --dtype on every GPU", free_on_resume=True),
    flag("--timeout_minutes", 30.0, "a rank that waits longer than this for the others ends the run",
         (TINY, 1000000.0), free_on_resume=True),
]
EVALUATION = [
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
    flag("--profile_steps", int, "steps whose trace is written to OUT_DIR/profile, one file per rank", is_list=True,
         (1, INF), free_on_resume=True),
]
DRY_RUN = [  # all of them may change when a run continues
    flag("--dry_run", False, "print batches, memory, time and what would have to change, and stop; needs no GPU"),
    flag("--json", False, "print one JSON object"),
    flag("--trace", False, "also trace an update of the real model, cut to 8 layers, under fake tensors; takes "
         "seconds"),
    flag("--plan_gpus", int, "GPUs over all nodes; default: the ranks that torchrun started, without torchrun 8",
         (1, INF)),
    flag("--plan_nodes", 1, "nodes that they are on", (1, INF)),
    flag("--plan_gpu", "H100-80GB", "kind of GPU: H100-80GB, H200-141GB, A100-80GB, A100-40GB, L40S-48GB"),
    flag("--plan_gpu_memory_gib", float, "memory of a GPU that a process can take; default: the kind's", (TINY, INF)),
    flag("--plan_host_memory_gib", 1000.0, "RAM of a node", (TINY, INF)),
    flag("--plan_network_gb_s", 50.0, "GB/s between nodes, one way, for each GPU: a 400 Gbit/s card each", (TINY, INF)),
    flag("--plan_rows", int, "usable training rows; default: #ROWS of --train_data, lines of a .jsonl file, or a "
         "table", (1, INF)),
    flag("--plan_flops_share", 0.35, "share of peak FLOPs; torchtitan reports 33 to 39 %% on 8 to 128 H100", (TINY, 1)),
    flag("--plan_memory_share", 0.6, "share of the GPU memory's speed that decoding reaches; an assumption", (TINY, 1)),
    flag("--plan_link_share", 0.7, "share of the speed of links, network and bus that transfers reach; an assumption",
         (TINY, 1)),
    flag("--plan_length_share", 0.5, "mean length of prompts and completions, as a share of their limits", (TINY, 1)),
]
# fmt: on
GROUPS: dict[str, list[Flag]] = {
    "model and data": MODEL_AND_DATA,
    "prompts": PROMPTS,
    "reward": REWARD,
    "batch, counted in prompts": BATCH,
    "sampling": SAMPLING,
    "advantage": ADVANTAGE,
    "policy loss": POLICY_LOSS,
    "KL to the reference": KL,
    "sampler-trainer mismatch": MISMATCH,
    "LoRA": LORA,
    "optimizer (AdamW)": OPTIMIZER,
    "precision and memory": MEMORY,
    "evaluation and checkpoints, counted in steps": EVALUATION,
    "dry run (starts nothing; exit code 3: does not fit)": DRY_RUN,
}
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


@dataclass(frozen=True)
class PromptFormat:
    """How a row becomes a prompt."""

    prompt_column: str = "problem"
    answer_column: str = "answer"
    image_column: str | None = None
    prompt_format: str = "chat"
    system_prompt: str | None = None
    prompt_suffix: str = ""
    max_prompt_tokens: int = 1024
    max_pixels: int | None = None


@dataclass(frozen=True)
class Grading:
    """How completions are graded."""

    reward: str
    reward_timeout: float = 5.0
    reward_memory_gib: float = 4.0
    reward_workers: int = 0
    truncated: str = "score"
    overlong_cache_tokens: int | None = None


@dataclass(frozen=True)
class Lora:
    """Which adapters are trained; rank 0: none, but all weights."""

    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Memory:
    """Precision, and what is kept where."""

    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    offload: str = "none"
    offload_reference: bool = False
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    compile_layers: bool = False
    reduce_gradients_once: bool = False
    gather_parameters_once: bool = False
    micro_batch_tokens: int = 8192
    share_prompts: bool = False


@dataclass(frozen=True)
class AdamW:
    """The optimizer."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class EngineSettings:
    """The engine; `max_model_len` is in tokens, prompt and completion together."""

    max_model_len: int
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.6
    enforce_eager: bool = False
    seed: int = 1


@dataclass(frozen=True)
class Sampling:
    """How often and how a set of prompts is sampled: the training prompts, or a held-out set."""

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
    learning_rate: float = 0.0
    lr_schedule: str = "constant"
    max_grad_norm: float = 1.0
    seed: int = 1

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


@dataclass(frozen=True)
class UpdateStep:
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


# The command line -----------------------------------------------------------------------------------------------------


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Wide lines, the type in the place of the value, and a default only where there is one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.split("\n") for line in textwrap.wrap(part, width, subsequent_indent="    ")]

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.type.__name__ if action.type else "text"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help
        if action.option_strings[0] in CHOICES:
            text += " " + "; ".join(
                f"{name} = {summary(f)}" for name, f in functions_of(action.option_strings[0]).items()
            )
            text = (text + (", or FILE.py:FUNCTION" if action.option_strings[0] in OWN else "")).replace("%", "%%")
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
            many = (
                {"nargs": "*" if each.default == [] else "+"} if each.is_list or isinstance(each.default, list) else {}
            )
            default = None if isinstance(each.default, type) else each.default
            add(
                each.name,
                type=each.type,
                default=default,
                choices=each.choices,
                required=each.is_required,
                help=each.help,
                **many,
            )


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line as attributes of the same names, each within its range.

    Ends the process with a sentence if one is not.
    """
    parser = argparse.ArgumentParser(
        usage="torchrun --nproc_per_node RANKS train_grpo.py --model MODEL --train_data FILE --out_dir FOLDER --total_steps N [flags]",
        description="Trains a language model with GRPO on verifiable rewards. One rank per GPU; on CPU, as many as you like. "
        "One step = one rollout of P prompts x G completions; one update = one optimizer step. "
        "Starting the same command again continues from the last checkpoint.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, GROUPS)
    args = parser.parse_args(argv)
    if args.prompts_per_update is None:
        args.prompts_per_update = args.prompts_per_step
    if args.eval_max_completion_tokens is None:
        args.eval_max_completion_tokens = [args.max_completion_tokens]
    args.profile_steps = args.profile_steps or []
    return args


def free_on_resume(args: argparse.Namespace) -> set[str]:
    """Names of the flags that may differ when a run continues; the length of the run where the rate does not depend
    on it.
    """
    free = {each.name.removeprefix("--") for each in FLAGS.values() if each.free_on_resume or each in DRY_RUN}
    is_constant = args.lr_schedule == "constant" and not args.warmup_ratio
    return free | {"total_steps", "epochs", "total_episodes"} if is_constant else free


# Checks: each error says what was given, what is required, what to do -------------------------------------------------


def check_ranges(args: argparse.Namespace, groups: dict[str, list[Flag]] = GROUPS) -> None:
    """Raises ValueError for a value out of its range, and for a flag that has no effect beside the others."""
    for each in (each for group in groups.values() for each in group):
        value = getattr(args, each.name.removeprefix("--"))
        for number in value if isinstance(value, list) else [value]:
            if (
                each.within and number is not None and not each.within[0] <= number <= each.within[1]
            ):  # also true for nan
                low, high = each.within
                bounds = f"at least {low:g}" if high == INF else f"from {low:g} to {high:g}"
                raise ValueError(f"{each.name} {number:g}: must be {bounds}.")
        if each.only_with and is_changed(each, args):
            other = getattr(args, each.only_with.removeprefix("--"))
            if other in (0, "off", "none"):
                needed = f"{each.only_with} above 0" if other == 0 else each.only_with
                raise ValueError(
                    f"{each.name} {value} has no effect here, only with {needed}: {leave(each)}, or change the other."
                )


def is_changed(each: Flag, args: argparse.Namespace) -> bool:
    """The flag has another value than its default."""
    return getattr(args, each.name.removeprefix("--")) != (None if isinstance(each.default, type) else each.default)


def leave(each: Flag) -> str:
    """How to say that the default should stay."""
    return "leave it out" if isinstance(each.default, type) or each.default is False else f"leave it at {each.default}"


def multiples(value: int, divisor: int) -> str:
    """The two multiples of `divisor` next to `value`, as words."""
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {divisor}"


def check_flags(args: argparse.Namespace, world_size: int) -> None:
    """Raises ValueError for flags out of range, and for those that contradict each other."""
    check_ranges(args)
    num_engines = world_size // args.tensor_parallel_size
    if args.prompts_per_step % num_engines:
        raise ValueError(
            f"--prompts_per_step {args.prompts_per_step} is not divisible by {num_engines} engines ({world_size} ranks / "
            f"--tensor_parallel_size {args.tensor_parallel_size}); {multiples(args.prompts_per_step, num_engines)}."
        )
    if args.prompts_per_step % args.prompts_per_update:
        divisors = [str(n) for n in range(1, args.prompts_per_step + 1) if args.prompts_per_step % n == 0]
        raise ValueError(
            f"--prompts_per_update {args.prompts_per_update} does not divide --prompts_per_step {args.prompts_per_step}; "
            f"use one of {', '.join(divisors)}."
        )
    longest = args.max_prompt_tokens + args.max_completion_tokens
    if args.micro_batch_tokens < longest:
        raise ValueError(
            f"--micro_batch_tokens {args.micro_batch_tokens} cannot hold one sequence of --max_prompt_tokens "
            f"{args.max_prompt_tokens} + --max_completion_tokens {args.max_completion_tokens}; use at least {longest}."
        )
    num_lengths = sum(x is not None for x in (args.total_steps, args.epochs, args.total_episodes))
    if num_lengths != 1:
        raise ValueError(f"{num_lengths} of --total_steps, --epochs, --total_episodes were given; give exactly one.")
    completions = args.prompts_per_step * args.group_size
    if args.total_episodes is not None and args.total_episodes < completions:
        raise ValueError(
            f"--total_episodes {args.total_episodes} is less than one step: --prompts_per_step x --group_size = {completions} "
            "completions; use at least that many."
        )
    check_memory(args)
    check_algorithm(args)
    for name in ("eval_every", "eval_before_training"):
        if getattr(args, name) and not args.eval_data:
            raise ValueError(f"--{name} needs --eval_data; name a file, or leave --{name} out.")


def check_memory(args: argparse.Namespace) -> None:
    """Raises ValueError for flags of precision and memory that contradict each other."""
    if args.param_dtype == "bfloat16" and args.dtype == "float32":
        raise ValueError(
            "--dtype float32 computes more finely than --param_dtype bfloat16 stores; leave one of them out."
        )
    if args.lora_rank and (args.param_dtype != "float32" or args.offload_reference):
        given = "--offload_reference" if args.offload_reference else f"--param_dtype {args.param_dtype}"
        raise ValueError(
            f"{given} has no effect with --lora_rank {args.lora_rank}: frozen weights are held in --dtype, adapters in float32, and "
            "the reference is the policy with its adapter off; leave it out."
        )


def check_algorithm(args: argparse.Namespace) -> None:
    """Raises ValueError for flags of the algorithm that contradict each other.

    What has no effect is found in `algorithm_of`.
    """
    if 0 < args.dual_clip <= 1:
        raise ValueError(f"--dual_clip {args.dual_clip:g}: must be above 1, or 0 for none.")
    low, high = args.rollout_correction_min, args.rollout_correction_max
    if args.rollout_correction.endswith("mask") and low >= high:
        raise ValueError(f"--rollout_correction_min {low:g} must be below --rollout_correction_max {high:g}.")
    if args.kl_in == "reward" and args.kl_estimator == "k3+":
        raise ValueError(
            "--kl_estimator k3+ differs from k3 in its gradient only, and with --kl_in reward there is none: use k3."
        )
    if args.kl_in == "reward" and args.advantage == "reinforce++" and args.policy_loss == "gspo":
        raise ValueError(
            "--policy_loss gspo weighs whole sequences, but --advantage reinforce++ with --kl_in reward differs from token to "
            "token: use gspo_token."
        )
    if args.dynamic_sampling != "off" and args.epochs is not None:
        raise ValueError(
            f"--epochs {args.epochs}: with --dynamic_sampling the steps in an epoch are known only afterwards; give --total_steps."
        )
    if args.dynamic_sampling != "off" and args.keep_last:
        raise ValueError(
            "--keep_last has no effect with --dynamic_sampling, which goes through all epochs in a row: leave it out."
        )


# The algorithm --------------------------------------------------------------------------------------------------------


def functions_of(name: str) -> dict[str, Callable]:
    """The functions that the flag of this name chooses from."""
    import grpo  # torch: not before the other flags are checked

    return getattr(grpo, CHOICES[name])


def summary(function: Callable) -> str:
    """The first sentence of the docstring."""
    return " ".join((function.__doc__ or "your own").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def parameters_of(function: Callable) -> list[str]:
    """Names of the parameters after `*`: the flags that have an effect."""
    return [each.name for each in inspect.signature(function).parameters.values() if each.kind == each.KEYWORD_ONLY]


def algorithm_of(args: argparse.Namespace) -> grpo.Algorithm:
    """The algorithm, its functions with their parameters bound, and its description.

    Raises ValueError for an unknown name, for a flag that has no effect, and for a function of the user's that fails on
    a trial.
    """
    import grpo

    own_values = dict(parse_value(text) for text in args.loss_args)
    bound, words = {}, {}
    for name in CHOICES:
        given = getattr(args, name.removeprefix("--"))
        function = functions_of(name).get(given) or own_function(name, given)
        values = values_of(name, given, function, args, own_values)
        bound[name.removeprefix("--")] = partial(function, **values)
        settings = ", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        words[name] = f"{given}{f' ({settings})' if settings else ''}: {summary(function)}"
        if given not in functions_of(name):
            grpo.try_out(name, given, bound[name.removeprefix("--")])
    unused = set(own_values) - {key for each in bound.values() for key in each.keywords}
    if unused:
        raise ValueError(
            f"--loss_args {', '.join(sorted(unused))}: no function of your own has this parameter after `*`; leave it out."
        )
    return take(
        grpo.Algorithm, args, **bound, is_corrected=args.rollout_correction != "none", description=describe(args, words)
    )


def own_function(name: str, given: str) -> Callable:
    """FILE.py:FUNCTION of the user's. Raises ValueError if there is none."""
    path, _, function_name = given.rpartition(":")
    if name not in OWN or not path.endswith(".py"):
        own = " or FILE.py:FUNCTION" if name in OWN else ""
        raise ValueError(f"{name} {given}: use {', '.join(functions_of(name))}{own}.")
    return load_function(name, path, function_name)


def values_of(
    name: str, given: str, function: Callable, args: argparse.Namespace, own_values: dict[str, object]
) -> dict[str, object]:
    """The parameters after `*`: flags, `--loss_args`, or the function's own defaults.

    Raises ValueError for one without a value.
    """
    built_in = {
        key: others
        for key in FLAGS
        if (others := [n for n, f in functions_of(name).items() if key[2:] in parameters_of(f)])
    }
    for key, others in built_in.items():
        if key.removeprefix("--") not in parameters_of(function) and is_changed(FLAGS[key], args):
            value = getattr(args, key.removeprefix("--"))
            raise ValueError(
                f"{key} {value} has no effect with {name} {given}, only with {', '.join(others)}: {leave(FLAGS[key])}."
            )
    values = {}
    for each in (inspect.signature(function).parameters[key] for key in parameters_of(function)):
        if f"--{each.name}" in FLAGS:
            values[each.name] = getattr(args, each.name)
        elif each.name in own_values:
            values[each.name] = own_values[each.name]
        elif each.default is each.empty:
            raise ValueError(
                f"{name} {given}: its parameter {each.name} has no value; give --loss_args {each.name}=VALUE, or a default."
            )
    if values.get("loss_constant_tokens", 0) is None:
        values["loss_constant_tokens"] = args.max_completion_tokens
    return values


def parse_value(text: str) -> tuple[str, object]:
    """(name, value) of NAME=VALUE: a Python literal, or else the text. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals or f"--{name}" in FLAGS:
        needed = f"it is a flag: use --{name}" if f"--{name}" in FLAGS else "needed is NAME=VALUE"
        raise ValueError(f"--loss_args {text}: {needed}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def describe(args: argparse.Namespace, words: dict[str, str]) -> str:
    """What the flags amount to, in words: for the first lines of the log."""
    parts = [f"advantage {words['--advantage']}", f"loss {words['--policy_loss']}", words["--loss_aggregation"]]
    parts.append(f"KL {args.kl_coef:g} x {words['--kl_estimator']}, in the {args.kl_in}" if args.kl_coef else "no KL")
    if args.entropy_coef:
        parts.append(f"entropy bonus {args.entropy_coef:g}")
    if args.rollout_correction != "none":
        parts.append(f"rollout correction {words['--rollout_correction']}")
    if args.dynamic_sampling != "off":
        parts.append(f"dynamic sampling by {args.dynamic_sampling}, at most {args.max_sampling_rounds} rounds")
    if args.truncated != "score":
        parts.append(f"truncated: {args.truncated}")
    parts.append(f"{args.num_iterations} passes per rollout" if args.num_iterations > 1 else "one pass per rollout")
    return "algorithm: " + "; ".join(parts) + f"; temperature {args.temperature:g} in sampler and trainer"


def load_function(name: str, path: str, function_name: str) -> Callable:
    """The function of this name in a file of the user's. Raises ValueError, also with what the file itself raises."""
    spec = importlib.util.spec_from_file_location(f"own_{Path(path).stem}", path)  # a file may be called math.py
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).absolute().parent))  # so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001  the user's code may raise anything
        raise ValueError(
            f"{name} {path}:{function_name}: the file cannot be loaded ({type(error).__name__}: {error})."
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(f"{name}: {path} has no function {function_name!r}; it has {', '.join(found) or 'none'}.")
    return function
